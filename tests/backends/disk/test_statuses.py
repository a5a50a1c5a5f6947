"""A rank's status in a store: written whole, read as untrusted, and judged by process and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.statuses import (
    CLOSED,
    ENDED,
    SERVING,
    SILENT,
    StoreStatuses,
    process_start_ns,
    read_statuses,
    remove_ended,
    this_host,
    write_status,
)
from hicachectl.formats.errors import FormatError, UntrustedError
from hicachectl.formats.plugin_status import (
    MAX_STATUS_BYTES,
    MAX_STATUSES,
    STALE_AFTER_S,
    PluginStatus,
    dump_status,
    is_status_name,
    parse_status,
)

if TYPE_CHECKING:
    from pathlib import Path


def status(pid: int | None = None, **fields: Any) -> PluginStatus:
    """Return the status of a process, by default of this one, written now."""
    pid = os.getpid() if pid is None else pid
    host, namespace = this_host()
    facts = {
        "release": "1",
        "host": host,
        "pid": pid,
        "pid_namespace": namespace,
        "started_ns": process_start_ns(pid) or 0,
        "written_ns": time.time_ns(),
    }
    return PluginStatus(**{**facts, **fields})


def write(path: Path, one: PluginStatus) -> None:
    with Directory.named(str(path), writes=True) as directory:
        write_status(directory, one)


def read(path: Path) -> StoreStatuses:
    with Directory.named(str(path / ".hicachectl"), writes=False) as side:
        return read_statuses(side)


def ended_process() -> PluginStatus:
    """Return the status of a process that runs no more."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        return status(process.pid)


def test_a_written_status_is_read_back_with_every_member(tmp_path: Path) -> None:
    one = status(
        tp_rank=3,
        tp_size=8,
        model="org-model",
        weights="w1",
        stores=("file:///a", "pack:///b"),
        pools=("kv", "mamba"),
        excluded={"unnamed-weights": "no file"},
        tokens={"asked": 640, "found": 128},
        refused={"damaged": 2},
        failed={"unswept": 1},
        noted={"unranked": 3},
        removed={"stale": 1},
    )
    write(tmp_path, one)
    seen = read(tmp_path)
    assert [(found.status, found.standing) for found in seen.statuses] == [(one, SERVING)]
    assert not seen.problems
    assert [path.name for path in (tmp_path / ".hicachectl" / "status").iterdir()] == [one.name]


def test_a_rank_is_serving_silent_closed_or_ended(tmp_path: Path) -> None:
    old = time.time_ns() - int((STALE_AFTER_S + 5) * 1e9)
    standings = {
        SERVING: status(tp_rank=0),
        SILENT: status(tp_rank=1, written_ns=old),
        CLOSED: status(tp_rank=2, written_ns=old, closed=True),
        ENDED: ended_process(),
    }
    for one in standings.values():
        write(tmp_path, one)
    found = {seen.standing: seen.status for seen in read(tmp_path).statuses}
    assert found == standings


def test_another_process_with_the_same_number_is_not_taken_for_the_rank(tmp_path: Path) -> None:
    write(tmp_path, status(started_ns=10**18))
    assert [seen.standing for seen in read(tmp_path).statuses] == [ENDED]


def test_a_killed_process_that_nobody_has_waited_for_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        write(tmp_path, status(process.pid))
        assert [seen.standing for seen in read(tmp_path).statuses] == [SERVING]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert [seen.standing for seen in read(tmp_path).statuses] == [ENDED]


def test_a_process_of_another_host_is_judged_by_time_only(tmp_path: Path) -> None:
    gone = ended_process()
    write(tmp_path, structs.replace(gone, host="elsewhere"))
    write(tmp_path, structs.replace(gone, pid_namespace=1))
    assert [seen.standing for seen in read(tmp_path).statuses] == [SERVING, SERVING]


def test_statuses_of_ended_ranks_are_removed_and_others_stay(tmp_path: Path) -> None:
    own = status()
    day = 86400 * 10**9
    kept = [own, status(tp_rank=1, written_ns=own.written_ns - day // 2)]
    for one in [
        *kept,
        ended_process(),
        status(host="elsewhere", written_ns=own.written_ns - 2 * day),
    ]:
        write(tmp_path, one)
    foreign = tmp_path / ".hicachectl" / "status" / "notes.txt"
    foreign.write_text("mine")
    with Directory.named(str(tmp_path), writes=True) as directory:
        remove_ended(directory, own)
    assert [seen.status for seen in read(tmp_path).statuses] == sorted(
        kept, key=lambda one: one.name
    )
    assert foreign.exists()


@pytest.mark.parametrize("host", ["a/../../b", "", "x" * 300, "ho st\n", "\ud800", ".hidden"])
def test_any_host_has_a_safe_file_name(host: str) -> None:
    name = status(host=host).name
    assert is_status_name(name)
    assert len(name) < 200


def test_ranks_and_later_processes_have_other_names() -> None:
    ranks = [status(), status(tp_rank=1), status(dp_rank=1), status(pid=1), status(started_ns=7)]
    assert len({one.name for one in ranks}) == len(ranks)


HOSTILE = {
    "no JSON": b"{",
    "no object": b"[1]",
    "no form": b'{"release": "1"}',
    "later": b'{"form": 2}',
    "too long": b" " * (MAX_STATUS_BYTES + 1),
    "deep": b'{"form": 1, "tokens": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    "many": json.dumps({"form": 1, "tokens": {f"r{n}": 1 for n in range(2000)}}).encode(),
}
WRONG: dict[str, dict[str, object]] = {
    "negative process": {"pid": -1},
    "a text for a number": {"pid": "1"},
    "negative count": {"tokens": {"asked": -1}},
    "half a token": {"tokens": {"asked": 1.5}},
    "huge count": {"tokens": {"asked": 1 << 70}},
    "escapes": {"refused": {"\x1b[31m": 1}},
    "long text": {"model": "m" * 5000},
    "many stores": {"stores": ["file:///a"] * 200},
    "no time": {"written_ns": float("nan")},
}


@pytest.mark.parametrize("case", [*HOSTILE, *WRONG])
def test_a_hostile_status_is_refused_in_one_line(case: str) -> None:
    document = {**json.loads(dump_status(status())), **WRONG.get(case, {})}
    data = HOSTILE.get(case) or json.dumps(document).encode()
    with pytest.raises(FormatError) as refused:
        parse_status(data, "status/a.json")
    assert str(refused.value).startswith("status/a.json: ")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_members_of_later_releases_are_ignored() -> None:
    one = status()
    document = {**json.loads(dump_status(one)), "colour": {"deep": [1]}}
    assert parse_status(json.dumps(document).encode(), "a") == one


def test_long_texts_are_cut_so_that_the_status_can_be_read() -> None:
    long = status(model="m" * 9000, excluded={"unserved": "\ud800" * 9000})
    assert len(parse_status(dump_status(long), "a").model) == 4096


def test_links_fifos_and_damaged_files_are_named_and_the_others_read(tmp_path: Path) -> None:
    write(tmp_path, status())
    statuses = tmp_path / ".hicachectl" / "status"
    (statuses / "link.json").symlink_to(next(statuses.iterdir()))
    os.mkfifo(statuses / "pipe.json")
    (statuses / "torn.json").write_bytes(b"")
    (statuses / ".hicachectl-1-2.tmp").write_bytes(b"")
    seen = read(tmp_path)
    assert len(seen.statuses) == 1
    assert [problem.partition(".json")[0].rpartition("/")[2] for problem in seen.problems] == [
        "link",
        "pipe",
        "torn",
    ]


def test_a_linked_status_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store" / ".hicachectl").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store" / ".hicachectl" / "status").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedError):
        read(tmp_path / "store")
    with pytest.raises(UntrustedError):
        write(tmp_path / "store", status())
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
def test_more_files_than_ranks_are_read_up_to_a_bound(tmp_path: Path) -> None:
    write(tmp_path, status())
    statuses = tmp_path / ".hicachectl" / "status"
    for number in range(MAX_STATUSES):
        (statuses / f"{number}.txt").touch()
    (problem,) = read(tmp_path).problems
    assert str(MAX_STATUSES) in problem


def test_a_store_without_statuses_has_none(tmp_path: Path) -> None:
    (tmp_path / ".hicachectl").mkdir()
    assert read(tmp_path) == StoreStatuses((), ())
