"""Nothing asked for and nothing found: no command takes either for success."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from hicachectl.cli.demo_store import PROFILE
from tests.tiny_tokenizers import make_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

SIZE = PROFILE.page_size

# Command lines that read requests from the file EMPTY.
READERS = """
hits SRC --token-ids EMPTY --profile PROFILE
hits SRC --pages EMPTY --profile PROFILE
hits SRC --prompts EMPTY --tokenizer TOKENIZER --profile PROFILE
hits SRC --pages EMPTY --page-size 16
prewarm DST --from SRC --token-ids EMPTY --profile PROFILE
prewarm DST --from SRC --pages EMPTY --profile PROFILE
prewarm DST --from SRC --prompts EMPTY --tokenizer TOKENIZER --profile PROFILE
prewarm DST --from SRC --trace EMPTY --profile PROFILE
prewarm DST --from SRC --plan EMPTY --profile PROFILE
prewarm DST --from SRC --token-ids EMPTY --profile PROFILE --dry-run
prewarm DST --from SRC --token-ids EMPTY --profile PROFILE --shard 0/1 --run RUN
prewarm --trace EMPTY --profile PROFILE --dry-run
prewarm --trace EMPTY --dry-run
report SRC --token-ids EMPTY --profile PROFILE -o PAGE
report SRC --pages EMPTY --profile PROFILE -o PAGE
report SRC --trace EMPTY --profile PROFILE -o PAGE
rm SRC --free 1KiB --trace EMPTY --profile PROFILE --yes
rm SRC --free 1KiB --keep-plan EMPTY --profile PROFILE --yes
rm SRC --model demo/hybrid-1b --token-ids EMPTY --profile PROFILE --yes
"""


@pytest.mark.parametrize("line", READERS.strip().splitlines())
@pytest.mark.parametrize("text", ["", "\n \n"], ids=["empty", "blank"])
def test_a_file_without_requests_is_refused(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path, line: str, text: str
) -> None:
    empty = tmp_path / "requests.jsonl"
    empty.write_text(text)
    names = {
        "SRC": source,
        "DST": tmp_path / "target",
        "PROFILE": profile,
        "EMPTY": empty,
        "RUN": tmp_path / "run",
        "PAGE": tmp_path / "page.html",
    }
    if "TOKENIZER" in line:
        names["TOKENIZER"] = make_tokenizer(tmp_path / "tokenizer", "qwen")
    before = sorted(source.iterdir())
    said = invoke(*(names.get(word, word) for word in line.split()), exit_code=2).stderr
    what = "pages" if "plan" in line else "requests"
    assert f"{empty}: has no {what}; check the path" in said
    assert sorted(source.iterdir()) == before
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("command", ["rm", "migrate"])
def test_a_page_list_that_chooses_nothing_is_no_error(
    invoke: Invoke, source: Path, tmp_path: Path, command: str
) -> None:
    """Proves that a nightly list of bad pages may be empty, and then chooses no page."""
    nothing = tmp_path / "bad-pages"
    nothing.write_text("")
    words = {
        "rm": ("--pages", nothing, "--yes"),
        "migrate": (tmp_path / "x", "--pages-from", nothing),
    }
    before = sorted(source.iterdir())
    invoke(command, source, *words[command])
    assert sorted(source.iterdir()) == before


def test_a_request_shorter_than_a_page_counts_as_lost(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    asked = tmp_path / "asked.jsonl"
    alone, with_others = [[5] * SIZE], [[5] * 7, [5] * SIZE, [5] * (2 * SIZE + 1)]
    for requests, tokens in ((alone, SIZE), (with_others, 7 + SIZE + 2 * SIZE)):
        asked.write_text("".join(f"{json.dumps(ids)}\n" for ids in requests))
        gate = ("--token-ids", asked, "--profile", profile, "--min-usable", "0.9")
        for command in (("hits", source), ("prewarm", tmp_path / "target", "--from", source)):
            output = invoke(*command, *gate, "--format", "json", exit_code=4)
            document = output.document
            assert (document["usable_tokens"], document["requested_tokens"]) == (0, tokens)
            assert f"(0 of {tokens})" in output.stderr
    assert document.get("usable_share", 0.0) == 0.0


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)], ids=["", "dry run"])
def test_no_share_of_no_tokens_passes(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path, dry_run: tuple[str, ...]
) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text("[]\n")
    gate = ("--token-ids", asked, "--profile", profile, "--min-usable", "0")
    why = "--min-usable 0: no tokens were requested; check the requests"
    prewarm = ("prewarm", tmp_path / "target", "--from", source)
    assert why in invoke("hits", source, *gate, exit_code=4).stderr
    assert why in invoke("-q", *prewarm, *gate, *dry_run, exit_code=4).stderr
    said = invoke(*prewarm, "--token-ids", asked, "--profile", profile, *dry_run).stderr
    assert "100%" not in said
    assert "0 tokens requested" in said


def test_a_dry_run_is_not_judged_by_the_share_of_before_the_copy(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps(list(range(3 * SIZE + 1))))
    rehearsed = ("prewarm", tmp_path / "target", "--from", source, "--dry-run")
    invoke(*rehearsed, "--token-ids", asked, "--profile", profile, "--min-usable", "1")
