"""The log of a real server, recorded by tests/conformance/test_request_logs.py, and its pages."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.requests.chains import Hashing
from hicachectl.requests.reading import Trace
from hicachectl.requests.tokenizing import DirectoryTokenizer
from tests.skips import need_module
from tests.tiny_tokenizers import make_tokenizer

if TYPE_CHECKING:
    from hicachectl.requests.chains import Requests

DATA = Path(__file__).parent / "data"
HASHING = Hashing(64)
WITH_ONE_MORE_PAGE = 1  # the first turn of the session came after the pages were listed
VALUES = (
    b"null", b"[]", b"{}", b'"x"', b"-1", b"NaN", b"true", b"18446744073709551616", b"2147483648",
    b'""', b"[[1]]", b"[1.5]", b'["a"]', b"-9223372036854775809", b'"\xff"', b'"\\ud800"',
)  # fmt: skip


def test_pages_are_those_that_the_server_wrote(tmp_path: Path) -> None:
    need_module("tokenizers")
    model = make_tokenizer(tmp_path / "model", "qwen")
    with Trace([str(DATA / "requests.log.gz")], tokenizer=lambda: DirectoryTokenizer(model)) as log:
        names = set(log.requests(HASHING).page_names.to_pylist())
    stored = set((DATA / "pages.txt").read_text().split())
    assert stored < names
    assert len(names - stored) == WITH_ONE_MORE_PAGE


def test_a_record_of_metrics_without_a_time_has_that_of_the_record_before(tmp_path: Path) -> None:
    """As without --enable-metrics, for the samples of a streamed request."""
    first, *others = _measured()[:3]
    for record in others:
        for name in [name for name in record if name.endswith("_ts")]:
            del record[name]
    requests = _read(tmp_path, "\n".join(map(json.dumps, [first, *others])).encode())
    assert requests.times is not None
    assert len(requests.times) == 3
    assert len({*requests.times}) == 1


@pytest.mark.parametrize("count", [-1, 2**31, 2**63, 2**64])
def test_a_record_with_an_impossible_count_is_damaged(tmp_path: Path, count: int) -> None:
    good, bad = _measured()[:2]
    bad["cached_tokens_details"] = {"device": count, "host": 0, "storage": 0}
    assert len(_read(tmp_path, "\n".join(map(json.dumps, [bad, good])).encode())) == 1


def test_the_log_and_the_metrics_of_a_server_are_not_read_as_one(tmp_path: Path) -> None:
    log, measured = _lines()[-2], json.dumps(_measured()[0]).encode() + b"\n"
    for data in (log + measured, measured + log):
        with pytest.raises(
            FormatError, match=r"line 2: looks like SGLang's.*read one kind at a time"
        ):
            _read(tmp_path, data)


def test_a_line_that_a_container_cut_goes_on_in_its_next_file_only(tmp_path: Path) -> None:
    finished = [line.rstrip(b"\n") for line in _lines() if b"request.finished" in line]
    cut, whole = finished[1:3]
    time = b"2026-11-28T16:26:18.655661123Z stdout "
    (tmp_path / "one.log.1").write_bytes(time + b"P " + cut[:2000] + b"\n")
    (tmp_path / "other.log").write_bytes(time + b"F " + whole + b"\n")
    (tmp_path / "one.log").write_bytes(time + b"F " + cut[2000:] + b"\n")
    for age, name in enumerate(("one.log", "other.log", "one.log.1")):
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    with Trace([str(tmp_path)]) as trace:
        assert len(trace.requests(HASHING)) == 2
        assert trace.remarks == ()


@pytest.mark.slow
def test_damaged_lines_never_end_a_run_unless_with_a_reason(tmp_path: Path) -> None:
    chance = random.Random(5)
    logged = [line for line in _lines() if len(line) < 8000]
    measured = [json.dumps(record).encode() + b"\n" for record in _measured()]
    place, read = tmp_path / "damaged", 0
    for _ in range(150):
        lines = chance.sample(chance.choice([logged, measured]), 6)
        for number in chance.sample(range(6), 2):
            lines[number] = _damaged(lines[number], chance)
        place.write_bytes(b"".join(lines))
        try:
            with Trace([str(place)]) as trace:
                requests = trace.requests(HASHING, outputs=True)
                assert requests.starts is not None
                again = [request.token_ids for request in trace.again(requests.starts.tolist())]
        except (FormatError, UsageError):
            continue
        assert [len(tokens) for tokens in again] == requests.tokens.tolist()
        read += 1
    assert read > 50


def _damaged(line: bytes, chance: random.Random) -> bytes:
    """Return a line with another byte, part or value of a member."""
    at, until = sorted(chance.randrange(len(line)) for _ in range(2))
    members = list(re.finditer(rb'": (null|-?[\d.]+|"[^"\\]*"|\[[^][]*\]|\{)', line))
    if not members or chance.random() < 0.4:
        return chance.choice([line[:at], line[:at] + line[until:], line[:until] + line[at:]])
    member = chance.choice(members)
    return line[: member.start(1)] + chance.choice(VALUES) + line[member.end(1) :]


def _lines() -> list[bytes]:
    with gzip.open(DATA / "requests.log.gz") as file:
        return file.readlines()


def _measured() -> list[dict[str, object]]:
    """Return records of metrics files, as the server writes them, for requests of the log."""
    records = [json.loads(line[line.index(b"{") :]) for line in _lines()]
    finished = [one for one in records if one["event"] == "request.finished"]
    return [
        {
            "request_parameters": json.dumps(
                {k: v for k, v in one["obj"].items() if v is not None}
            ),
            **one["out"]["meta_info"],
        }
        for one in finished
        if one["obj"].get("input_ids") and len(one["obj"]["input_ids"]) > 1
    ]


def _read(folder: Path, data: bytes) -> Requests:
    place = folder / "requests.log"
    place.write_bytes(data)
    with Trace([str(place)]) as trace:
        return trace.requests(HASHING)
