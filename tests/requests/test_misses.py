"""Missing pages are explained: another deployment has them, or the requests were hashed wrongly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import hicachectl
from hicachectl.formats.hashing import namespace_seed, page_hashes_hex
from hicachectl.requests.measuring import passes
from tests.stores import page, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

TP2 = """
model = "org/m"
page_size = 4
prefetch_threshold = 4
tp = 2
[[pools]]
name = "kv"
kind = "opaque"
nbytes = 64
"""
MANY_PAGES = 6000  # of two ranks: more keys than are looked up one by one
TOKENS = list(range(600, 641))  # ten pages of 4 tokens, and the last token


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "tp2.toml"
    path.write_text(TP2)
    return path


def requests(tmp_path: Path, *chains: list[int]) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(f"{json.dumps(chain)}\n" for chain in chains))
    return path


def put_chain(
    store: Path,
    *stems: str,
    page_size: int = 4,
    bigram: bool = False,
    pages: slice = slice(None),
    seed: bytes | None = None,
) -> None:
    """Write objects of 64 bytes of the chain of TOKENS."""
    for name in page_hashes_hex(TOKENS, page_size, bigram=bigram, prior=seed)[pages]:
        for stem in stems:
            (store / f"{name}{stem}.bin").write_bytes(bytes(64))


def test_all_tokens_are_usable_only_if_none_is_missing(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    put_chain(store, "_org-m_0_2", "_org-m_1_2", pages=slice(9))
    short = [TOKENS[:37]] * 40
    arguments = (store, "--profile", profile, "--token-ids")
    last = invoke("hits", *arguments, requests(tmp_path, TOKENS, *short)).stdout.splitlines()[-1]
    assert last == "99% of 1480 tokens served by org/m tp 2"
    assert "100% of 1440 " in invoke("hits", *arguments, requests(tmp_path, *short)).stdout


def measured(invoke: Invoke, *arguments: object, exit_code: int = 0) -> tuple[dict[str, Any], str]:
    """Return the document of `hits`, and its stderr."""
    output = invoke("hits", *arguments, "--format", "json", exit_code=exit_code)
    return output.document, output.stderr


# --- other deployments ---


def test_pages_of_another_topology_are_named_with_their_number(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    put_chain(store, "_org-m_0_2", "_org-m_1_2", pages=slice(3))
    put_chain(store, *(f"_org-m_{rank}_4" for rank in range(4)), pages=slice(2, 8))
    # So many keys are not looked up, but listed.
    asked = requests(tmp_path, TOKENS, TOKENS[:9], list(range(4 * MANY_PAGES)))
    arguments = (store, "--token-ids", asked, "--profile", profile)
    document, said = measured(invoke, *arguments)
    (found,) = document["elsewhere"]
    assert (found["place"], found["pages"], found["deployment"]["tp_size"]) == ("tp 4", 5, 4)
    assert document["deployment"] == {
        "model": "org/m", "tag": "", "tp_size": 2, "pp_size": 1, "cp_size": 1, "dcp_size": 1,
        "page_size": 4, "layout": "page_first",
    }  # fmt: skip
    total = 40 + 8 + 4 * (MANY_PAGES - 1)  # the last token of a request is never restored
    assert (document["usable_tokens"], document["requested_tokens"]) == (12 + 8, total)
    assert document["usable_share"] == pytest.approx(20 / total)
    rows = document["chains"][:2]
    stops = [row["stopped_by"] and row["stopped_by"]["exists_at"] for row in rows]
    assert stops == ["tp 4", None]
    assert (
        f"file://{store}: servers of org/m tp 2 cannot restore requested pages that other servers "
        "wrote: tp 4 (5 pages); give the profile of the other servers or, if the weights are the "
        "same, convert the pages with hicachectl migrate"
    ) in said
    table = invoke("hits", *arguments).stdout.splitlines()
    assert "kv tp 0/2 (exists at tp 4) page " in table[1]
    assert table[-1] == f"1% of {total} tokens served by org/m tp 2"


@pytest.mark.parametrize(
    ("stems", "place"),
    [
        (["_org-m_0_1"], "tp 1"),
        ([f"_org-m_{rank}_2_2_{stage}" for rank in (0, 1) for stage in (0, 1)], "pp 2"),
        ([f"_org-m_{rank}_4_2_{stage}" for rank in range(4) for stage in (0, 1)], "tp 4 pp 2"),
        (["_other_0_2", "_other_1_2"], "model other tp 2"),
    ],
)
def test_a_store_with_pages_of_another_deployment_only_has_no_hits(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path, stems: list[str], place: str
) -> None:
    put_chain(store, *stems)
    asked = requests(tmp_path, TOKENS)
    document, said = measured(invoke, store, "--token-ids", asked, "--profile", profile)
    assert [(one["place"], one["pages"]) for one in document["elsewhere"]] == [(place, 10)]
    assert document["chains"][0]["stopped_by"]["exists_at"] == place
    assert document["usable_tokens"] == 0
    assert f"wrote: {place} (10 pages)" in said


def test_a_chosen_deployment_is_named_and_the_others_are(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    put_pages(store, range(2), "_m_0_2", "_m_1_2")
    put_pages(store, range(3), "_m_0_1")
    listed = tmp_path / "pages"
    listed.write_text(json.dumps([page(number) for number in range(4)]) + "\n")
    document, _ = measured(invoke, store, "--pages", listed, "--tp", 2)
    assert document["deployment"] == {
        "model": "m", "tag": "", "tp_size": 2, "pp_size": None, "cp_size": None, "dcp_size": None,
        "page_size": None, "layout": None,
    }  # fmt: skip
    assert (document["requested_tokens"], document["usable_share"]) == (None, 0.5)
    assert [(one["place"], one["pages"]) for one in document["elsewhere"]] == [("tp 1", 1)]
    table = invoke("hits", store, "--pages", listed, "--tp", 2).stdout.splitlines()
    assert table[-1] == "50% of the requested pages usable by m tp 2"


def test_a_profile_of_other_sizes_is_still_refused(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    put_chain(store, "_org-m_0_2", "_org-m_1_2")
    profile.write_text(TP2.replace("64", "128"))
    asked = requests(tmp_path, TOKENS)
    refused = invoke("hits", store, "--token-ids", asked, "--profile", profile, exit_code=2).stderr
    assert "expected 128 bytes for kv objects, found 64 bytes" in refused


# --- the gate ---


@pytest.mark.parametrize(("least", "exit_code"), [("0.5", 0), ("0.51", 4)])
def test_a_gate_says_what_failed_with_both_numbers(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path, least: str, exit_code: int
) -> None:
    put_chain(store, "_org-m_0_2", "_org-m_1_2", pages=slice(5))
    asked = requests(tmp_path, TOKENS)
    arguments = (store, "--token-ids", asked, "--profile", profile, "--min-usable", least)
    document, said = measured(invoke, *arguments, exit_code=exit_code)
    assert document["usable_share"] == 0.5
    gate = (
        "hicachectl: --min-usable 0.51: servers of org/m tp 2 can restore 50.0% of the requested "
        "tokens (20 of 40); copy pages with hicachectl prewarm, or give a lower share"
    )
    assert said.splitlines() == ([gate] if exit_code else [])


@pytest.mark.parametrize("percent", [28, 55, 56])
def test_a_gate_passes_at_exactly_its_share(percent: int) -> None:
    document = {"requested_tokens": 1600, "usable_tokens": 1600, "served_tokens": 16 * percent}
    assert passes(document, percent / 100)
    assert not passes(document | {"served_tokens": 16 * percent - 16}, percent / 100)


def test_a_gate_says_what_to_do_about_pages_of_another_topology(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    put_chain(store, *(f"_org-m_{rank}_4" for rank in range(4)))
    asked = requests(tmp_path, TOKENS)
    arguments = (store, "--token-ids", asked, "--profile", profile, "--min-usable", "0.9")
    said = measured(invoke, *arguments, exit_code=4)[1].splitlines()[-1]
    assert "(0 of 40); convert the pages that exist elsewhere with hicachectl migrate" in said


def test_a_gate_without_a_page_size_counts_pages(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    put_pages(store, range(2), "_m_0_1")
    listed = tmp_path / "pages"
    listed.write_text(json.dumps([page(number) for number in range(4)]) + "\n")
    gate = ("hits", store, "--pages", listed, "--min-usable")
    invoke(*gate, 0.5)
    said = invoke(*gate, 0.6, exit_code=4).stderr
    assert "--min-usable 0.6: servers of m tp 1 can restore 50.0% of the requested pages;" in said
    listed.write_text("[]\n")
    assert "no tokens were requested" in invoke(*gate, 1, exit_code=4).stderr


@pytest.mark.slow
def test_a_failed_gate_of_prewarm_names_the_deployment_and_both_numbers(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    put_chain(store, "_org-m_0_2", "_org-m_1_2", pages=slice(5))
    asked = requests(tmp_path, TOKENS)
    target = tmp_path / "target"
    stores = ("prewarm", target, "--from", store, "--profile", profile, "--token-ids", asked)
    said = invoke(*stores, "--min-usable", "0.9", exit_code=4).stderr.splitlines()
    assert said[-1] == (
        "hicachectl: --min-usable 0.9: servers of org/m tp 2 can restore 50.0% of the requested "
        f"tokens (20 of 40); file://{store} cannot restore 5 requested pages, so no further run "
        "copies them; look for these pages in another source, or give a lower share"
    )
    quiet = invoke("-q", *stores, "--min-usable", "0.9", exit_code=4).stderr
    assert said[-1] in quiet.splitlines()  # cron mails it
    few = ("prewarm", tmp_path / "few", *stores[2:], "--budget-pages", "2", "--min-usable", "0.9")
    assert "give a larger --budget or --budget-pages, or" in invoke(*few, exit_code=4).stderr
    run = ("--run", tmp_path / "run", "--min-usable", "0.9")
    for part in range(2):
        invoke(*stores, *run, "--shard", f"{part}/2")
    assert said[-1] in invoke("merge", tmp_path / "run", exit_code=4).stderr.splitlines()


def test_pages_that_prewarm_misses_are_found_at_another_size(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    put_chain(store, "_org-m_0_2", "_org-m_1_2", pages=slice(2))
    put_chain(store, *(f"_org-m_{rank}_4" for rank in range(4)))
    asked = requests(tmp_path, TOKENS, list(range(4 * MANY_PAGES)))
    stores = ("prewarm", tmp_path / "target", "--from", store, "--profile", profile)
    said = invoke(*stores, "--token-ids", asked).stderr
    assert f"file://{store}: servers of org/m tp 2 cannot restore requested pages" in said
    assert "wrote: tp 4 (8 pages); " in said


def test_what_few_keys_do_not_show_is_not_guessed(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    """A store that has one of the keys is not listed."""
    put_chain(store, "_org-m_0_2", "_org-m_1_2", pages=slice(2))
    put_chain(store, *(f"_org-m_{rank}_4" for rank in range(4)))
    arguments = ("--token-ids", requests(tmp_path, TOKENS), "--profile", profile)
    document, _ = measured(invoke, store, *arguments)
    assert (document["elsewhere"], document["usable_tokens"]) == ([], 8)


# --- the hashing ---


def test_a_wrong_page_size_is_suspected_and_the_right_one_named(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    put_chain(store, "_org-m_0_2", "_org-m_1_2", page_size=4)
    asked = requests(tmp_path, TOKENS, list(range(9)), TOKENS[:21])
    arguments = ("hits", store, "--token-ids", asked, "--page-size")
    assert (
        f"file://{store}: has pages, but none of the 6 requested pages, hashed with --page-size 8; "
        "with --page-size 4, the store has pages of 2 of the first 3 requests; give --page-size 4, "
        "or correct page_size in the profile"
    ) in invoke(*arguments, 8).stderr
    assert "has pages, but none" not in invoke(*arguments, 4).stderr


@pytest.mark.parametrize("bigram", [True, False])
def test_a_wrong_hash_unit_is_suspected(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path, bigram: bool
) -> None:
    put_chain(store, "_org-m_0_2", "_org-m_1_2", bigram=bigram)
    profile.write_text(f'hash_unit = "{"token" if bigram else "bigram"}"\n{TP2}')
    asked = requests(tmp_path, TOKENS)
    named = ("--profile", profile, "--token-ids", asked)
    pairs, option = (
        ("--page-size 4 over token pairs", "--speculative-algorithm EAGLE")
        if bigram
        else ("--page-size 4", "no --speculative-algorithm")
    )
    for command in (
        ("hits", store, *named),
        ("prewarm", tmp_path / "target", "--from", store, *named),
    ):
        said = invoke(*command).stderr
        assert f"with {pairs}, the store has pages of the first request; " in said
        assert f"give {option}, or correct hash_unit in the profile" in said


@pytest.mark.parametrize(("release", "seeded"), [("0.5.19", True), ("0.5.20", False)])
def test_a_release_that_hashes_namespaces_otherwise_is_suspected(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path, release: str, seeded: bool
) -> None:
    seed = namespace_seed("lora7", None) if seeded else None
    put_chain(store, "_org-m_0_2", "_org-m_1_2", seed=seed)
    asked = tmp_path / "requests.jsonl"
    asked.write_text(json.dumps({"token_ids": TOKENS, "extra_key": "lora7"}) + "\n")
    profile.write_text(f'sglang = "{release}"\n{TP2}')
    said = invoke("hits", store, "--token-ids", asked, "--profile", profile).stderr
    which = "not before" if seeded else "before"
    assert f"give --sglang with the servers' release, if it is {which} 0.5.20, or correct" in said
    options = ("--page-size", 4, "--sglang", "0.5.23" if seeded else "0.5.18")
    assert "has pages" not in invoke("hits", store, "--token-ids", asked, *options).stderr


def test_a_wrong_page_size_of_a_trace_is_suspected(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    put_chain(store, "_org-m_0_2", "_org-m_1_2", page_size=8)
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 5, "token_ids": TOKENS}, {"timestamp": 2, "token_ids": [1] * 30}]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    stores = ("prewarm", tmp_path / "target", "--from", store, "--profile", profile)
    said = invoke(*stores, "--trace", trace).stderr
    assert "with --page-size 8, the store has pages of 1 of the first 2 requests" in said


def test_requests_that_no_usual_hashing_finds_are_said(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    put_pages(store, range(5), "_org-m_0_2", "_org-m_1_2")
    asked = requests(tmp_path, TOKENS)
    said = invoke("hits", store, "--token-ids", asked, "--profile", profile).stderr
    assert "has pages, but none of the 10 requested pages, hashed with --page-size 4; no " in said
    assert "compare the model, the tokenizer, extra_key and cache_salt" in said
    listed = tmp_path / "pages"
    listed.write_text(f"{page(77)}\n")
    said = invoke("hits", store, "--pages", listed, "--profile", profile).stderr
    assert "has pages, but none of the 1 requested page; check that the page hashes are" in said


def test_nothing_is_suspected_of_an_empty_store_or_of_no_request(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    asked = requests(tmp_path, TOKENS)
    arguments = ("hits", store, "--token-ids", asked, "--profile", profile)
    assert "has pages" not in invoke(*arguments).stderr
    put_pages(store, range(5), "_org-m_0_2", "_org-m_1_2")
    requests(tmp_path, [1], [])
    assert "has pages" not in invoke(*arguments).stderr


# --- the Python interface ---


def test_the_interface_returns_what_the_command_writes(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    put_chain(store, *(f"_org-m_{rank}_4" for rank in range(4)))
    asked = requests(tmp_path, TOKENS)
    document, said = measured(invoke, store, "--token-ids", asked, "--profile", profile)
    with hicachectl.open_store(str(store)) as opened:
        servers = hicachectl.read_profile(profile)
        asked_for = hicachectl.hash_requests([TOKENS], servers)
        report = hicachectl.hits(
            opened, hicachectl.HitsRequest(requests=asked_for, profile=servers)
        )
    assert {"chains": document["chains"], **report.document}.items() <= document.items()
    assert said.splitlines() == [f"hicachectl: {text}" for text in report.remarks]
    assert report.rows.num_rows == 1


@pytest.mark.parametrize("share", ["nan", "inf", "-1", "1.5", "150%", "0x1", "90 %"])
def test_a_share_that_is_none_is_refused(invoke: Invoke, tmp_path: Path, share: str) -> None:
    said = invoke("hits", tmp_path, "--min-usable", share, exit_code=2).stderr
    assert said == f"hicachectl: --min-usable: {share!r} is not a share; write 0.9 or 90%\n"
