"""`hicachectl report`: what the page says of a store."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.formats.profile import dump_profile
from hicachectl.report import charts
from hicachectl.report.prefixes import KV_ONLY, LOST, USABLE
from hicachectl.requests.chains import Hashing, requests_of_pages
from hicachectl.requests.measuring import HitsRequest
from tests.report.page_texts import picture_of, text_of
from tests.small_file_system import small_file_system
from tests.stores import DSA, OLD, contents, page, put, put_pages
from tests.verification.drawn_stores import Model, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.fixture
def dsa(tmp_path: Path) -> Path:
    """Return a store of ten pages; two lack their indexer."""
    store = tmp_path / "store"
    put_pages(store, range(10), "_x-dsa", nbytes=9216)
    put_pages(store, range(2, 10), ".indexer_x-dsa", nbytes=1056)
    return store


@pytest.fixture
def dsa_profile(tmp_path: Path) -> Path:
    path = tmp_path / "dsa.toml"
    path.write_text(DSA)
    return path


def test_findings_come_with_meaning_risk_and_command(
    invoke: Invoke, dsa: Path, dsa_profile: Path, tmp_path: Path
) -> None:
    before = contents(dsa)
    made = tmp_path / "page.html"
    said = invoke("report", dsa, "--profile", dsa_profile, "-o", made, exit_code=4)
    assert said.stdout.startswith(f"{made}: 18 objects, 10 pages")
    assert said.stdout.count("\n") == 1
    text = text_of(made)
    assert "2 errors, so servers could read wrong data, or fail to read" in text
    assert "missing-pool 2 Meaning The page has its kv" in text
    assert "Risk SGLang 0.5.19 and later miss the page" in text
    assert f"hicachectl verify {dsa} --profile {dsa_profile} --repair quarantine" in text
    assert f"{page(0)}.indexer_x-dsa.bin" in text
    assert contents(dsa) == before


@pytest.mark.parametrize(
    ("checks", "unchecked"),
    [((), "values, digests"), (("--checks", "names"), "groups, sizes, values, digests")],
)
def test_the_line_names_the_checks_that_nobody_asked_for(
    invoke: Invoke, dsa_profile: Path, tmp_path: Path, checks: tuple[str, ...], unchecked: str
) -> None:
    store, made = tmp_path / "store", tmp_path / "page.html"
    put_pages(store, range(10), "_x-dsa", nbytes=9216)
    put_pages(store, range(10), ".indexer_x-dsa", nbytes=1056)
    options = ("--profile", dsa_profile, *checks, "--fail-on", "never")
    said = invoke("report", store, *options, "-o", made).stdout
    assert f": no findings; not checked: {unchecked}" in said
    assert f"no findings; not checked: {unchecked}" in text_of(made)


@pytest.mark.slow
def test_the_exit_status_is_that_of_verify(
    invoke: Invoke, dsa: Path, dsa_profile: Path, tmp_path: Path
) -> None:
    made = tmp_path / "page.html"
    invoke("report", dsa, "--profile", dsa_profile, "--fail-on", "never", "-o", made)
    whole = tmp_path / "whole"
    put_pages(whole, range(2), "_m_0_1")
    invoke("report", whole, "-o", made)


@pytest.mark.slow
def test_what_was_not_checked_is_named_and_never_called_clean(
    invoke: Invoke, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    put_pages(store, range(3), "_m_0_1")
    made = tmp_path / "page.html"
    invoke("report", store, "-o", made)
    text = text_of(made)
    assert "No errors and no warnings by the checks that ran: names, groups, sizes" in text
    assert "values: was not asked for" in text
    assert "digests: was not asked for" in text
    assert "a pool, part or rank missing everywhere goes unnoticed" in text
    refused = invoke("report", store, "--checks", "values", "-o", made, exit_code=2).stderr
    assert "--checks values: no given profile describes the bytes" in refused


@pytest.mark.slow
def test_pages_in_flight_are_not_called_clean(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put_pages(store, range(3), "_m_0_1", mtime=time.time())
    made = tmp_path / "page.html"
    invoke("report", store, "-o", made)
    assert "No page was judged, because all pages are in flight" in text_of(made)


@pytest.mark.slow
def test_values_are_checked_and_shown_if_asked_for(
    invoke: Invoke, dsa_profile: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    rng = np.random.default_rng(1)
    for number in range(3):
        values = (rng.standard_normal(4608).astype("<f4").view("<u4") >> 16).astype("<u2")
        values[: 2 * (number == 1)] = 0x7FC0
        one = put(store, f"{page(number)}_x-dsa.bin")
        one.write_bytes(values.tobytes())
        os.utime(one, (OLD, OLD))
    made = tmp_path / "page.html"
    arguments = ("report", store, "--profile", dsa_profile, "-o", made)
    invoke(*arguments, "--checks", "values", exit_code=4)
    text = text_of(made)
    assert "values: ran" in text
    assert "Chosen for its finding: error nan. x-dsa" in text
    assert "layer" in text
    assert "damaged" in text
    said = invoke(*arguments, "--page", page(1)[:12], exit_code=4).stdout
    assert "; in the page shown in full: 1 nan" in said
    invoke(*arguments, "--page", page(2)[:12], exit_code=4)
    text = text_of(made)
    assert page(2) in text
    assert "Chosen with --page." in text
    assert "missing-pool" in text
    lone = tmp_path / "lone"
    lone.mkdir()
    one = lone / f"{page(1)}_x-dsa.bin"
    shutil.copy2(store / one.name, one)
    kv_only = tmp_path / "kv.toml"
    kv_only.write_text(DSA[: DSA.rindex("[[pools]]")])
    invoke("report", lone, "--profile", kv_only, "-o", made, exit_code=4)
    assert "has 1 finding that the checks of this run did not look for" in text_of(made)
    refused = invoke(*arguments, "--page", "0" * 20, exit_code=2).stderr
    assert "no page begins with '00000000000000000000'" in refused


@pytest.mark.slow
def test_a_mix_of_sizes_is_seen(tmp_path: Path, invoke: Invoke) -> None:
    store = tmp_path / "store"
    put_pages(store, range(30), "_m_0_1", nbytes=4096)
    put_pages(store, range(30, 50), "_m_0_1", nbytes=2048)
    made = tmp_path / "page.html"
    invoke("report", store, "-o", made, exit_code=4)
    text = text_of(made)
    assert "Several sizes under the same keys: m tp 1 . Servers with another dtype" in text
    assert "160.0 KiB in objects of 4.0 KiB, 2.0 KiB" in text
    assert "mixed-sizes" in text
    assert "No errors found; 1 warning, so servers may read wrong data" in text


@pytest.mark.slow
def test_a_change_of_the_dtype_lets_servers_read_wrong_data(tmp_path: Path, invoke: Invoke) -> None:
    before = Model(
        name="m", kind="mha", dtype="float8_e4m3fn", layout="page_first", layers=4, heads=2,
        width=64, page_size=16, tp=1, seed=5, noise=False,
    )  # fmt: skip
    after = replace(before, dtype="float8_e5m2")
    write(tmp_path / "store", before, range(10), np.arange(OLD, OLD + 10.0))
    write(tmp_path / "store", after, range(10, 20), np.arange(OLD + 10.0, OLD + 20.0))
    profile = tmp_path / "p.toml"
    profile.write_text(dump_profile(after.profile))
    made = tmp_path / "page.html"
    command = ["report", tmp_path / "store", "--profile", profile, "-o", made]
    invoke(*command, "--checks", "values", exit_code=4)
    text = text_of(made)
    assert "1 error, so servers could read wrong data, or fail to read" in text
    assert "--model m --before 2023-11-14T22:13:30Z" in text


@pytest.mark.slow
def test_parts_of_other_sizes_are_no_mix(tmp_path: Path, invoke: Invoke) -> None:
    """Proves that states and stages of a pool, each with keys and a size of its own, raise none."""
    store = tmp_path / "store"
    for rank, nbytes in ((0, 4096), (1, 2048)):
        put_pages(store, range(8), f"_m_0_1_2_{rank}", nbytes=nbytes)
    made = tmp_path / "page.html"
    invoke("report", store, "-o", made)
    text = text_of(made)
    assert "Several sizes" not in text
    assert "48.0 KiB in objects of 2.0 KiB, 4.0 KiB" in text


def test_writes_are_counted_by_deployment_and_time(tmp_path: Path) -> None:
    store = tmp_path / "store"
    start = OLD // 3600 * 3600
    for number in range(40):
        put_pages(store, range(number, number + 1), "_a_0_1", mtime=start + 3600 * (number // 4))
    put_pages(store, range(6), "_b_0_2", "_b_1_2", mtime=start + 3600 * 3)
    put(store, "other", mtime=1)
    writes = picture_of(store).writes
    assert writes is not None
    assert (writes.start, writes.width) == (start - 2 * 3600, 3600)  # at least 12 bars
    assert {name: counts.tolist() for name, counts in writes.series} == {
        "a tp 1": [0] * 2 + [4] * 10,
        "b tp 2": [0] * 5 + [12] + [0] * 6,
    }
    assert (writes.earlier, writes.later) == (1, 0)


@pytest.mark.slow
def test_of_many_deployments_the_largest_are_shown_and_the_others_counted(
    invoke: Invoke, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    for number in range(250):  # two pages, one of which lacks a rank
        put_pages(store, range(number, number + 1), f"_m{number}_0_2", f"_m{number}_1_2", nbytes=8)
        put_pages(store, range(number + 250, number + 251), f"_m{number}_0_2", nbytes=8)
    for number in (7, 8):
        put_pages(store, range(500, 520), f"_m{number}_0_2", f"_m{number}_1_2", nbytes=8)
    invoke("report", store, "-o", tmp_path / "page.html", exit_code=4)
    text = text_of(tmp_path / "page.html")
    assert "; and 230 other deployments or ages; hicachectl verify --all-findings" in text
    assert "244 smaller deployments have no chart" in text
    assert "and 50 more rows; hicachectl ls --summary has all" in text
    assert "244 deployments with fewer pages have no chart" in text
    writes = picture_of(store).writes
    assert writes is not None
    totals = [(name, int(counts.sum())) for name, counts in writes.series]
    assert totals[:2] == [("m7 tp 2", 43), ("m8 tp 2", 43)]
    assert totals[6:] == [("244 others", 244 * 3)]
    assert (tmp_path / "page.html").stat().st_size < 1 << 20


@pytest.mark.slow
def test_long_names_do_not_fill_the_page(invoke: Invoke, tmp_path: Path) -> None:
    url = f"pack://{tmp_path}/x.hcpack?keys=file"
    with open_store(url, create=True) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        for number in range(40):
            name = f"{page(number)}_{'m' * 60_000}{number}_0_1.bin"
            rows = pa.table({"key": [name.encode()]})
            assert store.write_from(rows, np.array([0]), np.array([4096]), if_absent=True).all_ok
    invoke("report", url, "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2 << 20


def test_a_few_writes_have_an_axis_of_an_hour_and_a_late_one_is_drawn(tmp_path: Path) -> None:
    store = tmp_path / "store"
    start = OLD // 3600 * 3600
    put_pages(store, range(60), "_a_0_1", mtime=start)
    writes = picture_of(store).writes
    assert writes is not None
    assert (writes.width, writes.bins, writes.end) == (300, 12, start + 300)
    put_pages(store, range(60, 61), "_a_0_1", mtime=start + 2 * 86400)
    writes = picture_of(store).writes
    assert writes is not None
    assert (writes.later, int(writes.series[0][1][-1])) == (0, 1)


@pytest.mark.slow
def test_the_verdict_has_the_share_of_the_requests_and_a_full_store(
    tmp_path: Path, invoke: Invoke
) -> None:
    store = tmp_path / "store"
    put_pages(store, range(3), "_m_0_1")
    put(store, "other", 100)
    put(store, "one", 200)
    asked, made = tmp_path / "pages.jsonl", tmp_path / "page.html"
    asked.write_text(json.dumps([page(0), page(1), page(7)]))
    invoke("report", store, "--pages", asked, "-o", made)
    assert "can restore 66 % of the requested" in text_of(made)
    invoke("report", store, "--pages", asked, "--page-size", 16, "-o", made)
    text = text_of(made)
    assert "can restore 0 % of the requested tokens" in text  # 32 of 48, below the threshold
    assert "Can be restored 66.6 % 32 tokens Below the threshold 1 requests" in text
    arguments = ("--page-size", 16, "--prefetch-threshold", 32)
    invoke("report", store, "--pages", asked, *arguments, "-o", made)
    assert "can restore 66 % of the requested tokens" in text_of(made)
    assert "Several sizes" not in text_of(made)
    with small_file_system(tmp_path / "small", "64k") as full:
        put_pages(full, range(3), "_m_0_1")
        with suppress(OSError), (full / "rest").open("wb", buffering=0) as rest:
            while True:
                rest.write(bytes(4096))
        invoke("report", full, "-o", made)
        assert "The store is full. No errors" in text_of(made)
        assert 'class="verdict warning"' in made.read_text()


def test_completeness_is_by_pool_and_rank_without_pages_in_flight(tmp_path: Path) -> None:
    store = tmp_path / "store"
    put_pages(store, range(8), "_m_0_2", ".indexer_m_0_2")
    put_pages(store, range(6), "_m_1_2")
    put_pages(store, range(5), ".indexer_m_1_2")
    put_pages(store, range(100, 104), "_m_0_2", mtime=time.time())
    (one,) = picture_of(store).completeness
    assert (one.deployment, one.pages) == ("m tp 2", 8)
    assert {(s.pool, s.rank): (s.present, s.expected) for s in one.shares} == {
        ("kv", "tp 0"): (8, 8),
        ("kv", "tp 1"): (6, 8),
        ("indexer", "tp 0"): (8, 8),
        ("indexer", "tp 1"): (5, 8),
    }


@pytest.mark.parametrize(
    ("present", "text", "level"),
    [(1000, "100", 0), (999, "99.9", 1), (99999 // 100, "99.9", 1), (900, "90", 2), (1, "0.1", 4),
     (0, "0", 5)],
)  # fmt: skip
def test_only_a_whole_share_is_shown_as_whole(present: int, text: str, level: int) -> None:
    assert charts.share_text(present, 1000) == text
    assert charts.share_level(present, 1000) == level
    assert charts.share_text(99_999, 100_000) == "99.9"


def test_the_prefix_tree_agrees_with_hits(tmp_path: Path, invoke: Invoke) -> None:
    store = tmp_path / "store"
    put_pages(store, range(6), "_m_0_1", ".indexer_m_0_1")
    put_pages(store, range(6, 9), "_m_0_1")
    chains = [
        [page(n) for n in range(4)],  # usable
        [page(n) for n in range(12)],  # 6 usable, 9 with kv
        [*(page(n) for n in range(4)), *(page(n) for n in range(50, 53))],  # 4 usable
        [page(n) for n in range(60, 62)],  # nothing
    ]
    picture = picture_of(store, hits=HitsRequest(requests=requests_of_pages(chains, Hashing(16))))
    tree = picture.requested.tree
    assert tree is not None
    listed = tmp_path / "chains.jsonl"
    listed.write_text("".join(json.dumps(chain) + "\n" for chain in chains))
    rows = invoke("hits", store, "--pages", listed, "--format", "jsonl").rows
    assert tree.usable == sum(row["usable_pages"] for row in rows) == 14
    assert tree.kv_only == sum(row["kv_pages"] - row["usable_pages"] for row in rows) == 3
    assert (tree.requests, tree.unstopped, tree.pages) == (4, 1, 25)
    assert {stop.key for stop in tree.stops} == {
        row["stopped_by"]["key"] for row in rows if row["stopped_by"]
    }
    assert {(n.first, n.last, n.top, n.bottom, n.state) for n in tree.nodes} == {
        (0, 4, 0, 3, USABLE),
        (4, 6, 0, 1, USABLE),
        (6, 9, 0, 1, KV_ONLY),
        (9, 12, 0, 1, LOST),
        (4, 7, 1, 2, LOST),
        (0, 2, 3, 4, LOST),
    }
    (most,) = [stop for stop in tree.stops if stop.pool == "indexer"]
    assert (most.at, most.row, most.pages_lost) == (6, 0.5, 6)


@pytest.mark.slow
def test_objects_of_a_span_of_layers_are_told_apart(tmp_path: Path, invoke: Invoke) -> None:
    store = tmp_path / "store"
    stems = [f"_ukv1-0123456789abcdef_L{span}" for span in ("0-16", "16-32")]
    put_pages(store, range(4), stems[0])
    put_pages(store, range(2), stems[1])
    asked = HitsRequest(requests=requests_of_pages([[page(n) for n in range(4)]], None))
    tree = picture_of(store, hits=asked).requested.tree
    assert tree is not None
    assert [stop.rank for stop in tree.stops] == ["layers 16-32"]
    made = tmp_path / "page.html"
    invoke("report", store, "--page", page(0), "-o", made, exit_code=4)
    text = text_of(made)
    assert all(text.count(f"kv layers {span} 64 ") == 1 for span in ("0-16", "16-32"))


@pytest.mark.slow
def test_pages_that_follow_two_pages_make_no_tree(tmp_path: Path, invoke: Invoke) -> None:
    store = tmp_path / "store"
    put_pages(store, range(6), "_m_0_1")
    listed = tmp_path / "chains.jsonl"
    listed.write_text(json.dumps([page(1), page(2)]) + "\n" + json.dumps([page(3), page(2)]) + "\n")
    made = tmp_path / "page.html"
    invoke("report", store, "--pages", listed, "-o", made)
    assert f"The requests make no prefix tree: {listed}: page" in text_of(made)


@pytest.mark.slow
def test_a_trace_needs_a_profile_and_makes_a_tree(
    invoke: Invoke, dsa: Path, dsa_profile: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n')
    made = tmp_path / "page.html"
    refused = invoke("report", dsa, "--trace", trace, "-o", made, exit_code=2).stderr
    assert "Hashing token ids needs a page size" in refused
    assert not made.exists()
    invoke(
        "report", dsa, "--trace", trace, "--profile", dsa_profile, "--fail-on", "never", "-o", made
    )
    text = text_of(made)
    assert "Asked for 8 tokens" in text
    assert "Measured for servers of the deployment x-dsa" in text
    several = invoke(
        "report", dsa, "--trace", trace, "--pages", trace, "-o", made, exit_code=2
    ).stderr
    assert "Give exactly one of --prompts, --token-ids, --pages and --trace" in several


@pytest.mark.slow
def test_filters_choose_pages_and_without_a_profile_the_deployment_of_requests(
    invoke: Invoke, dsa: Path, dsa_profile: Path, tmp_path: Path
) -> None:
    listed, made = tmp_path / "chains.jsonl", tmp_path / "page.html"
    listed.write_text(json.dumps([page(n) for n in range(4)]) + "\n")
    put_pages(dsa, range(3), "_other")
    asked = ("report", dsa, "--model", "other", "-o", made)
    said = invoke(*asked, "--pages", listed, "--profile", dsa_profile, exit_code=2).stderr
    assert "--model chooses a deployment from the contents of STORE; leave out --profile" in said
    invoke(*asked)
    assert "dsa" not in text_of(made)
    invoke(*asked, "--pages", listed, "--fail-on", "never")
    assert "Servers of other can restore 75 % of the requested pages." in text_of(made)


@pytest.mark.slow
def test_commands_leave_out_flags_that_are_about_the_requests(
    invoke: Invoke, tmp_path: Path
) -> None:
    store, asked, made = (tmp_path / name for name in ("store", "asked.jsonl", "page.html"))
    store.mkdir()
    put_pages(store, range(8), "_m_0_2", "_m_1_2")
    put(store, f"{page(0)}_m_0_2.bin", 10)
    asked.write_text("[1, 2, 3, 4, 5]\n")
    flags = ("--token-ids", asked, "--page-size", 4, "--tp", 2, "--grace", "90s")
    invoke("report", store, *flags, "-o", made, exit_code=4)
    repair = f"hicachectl verify {store} --grace 90s --profile FILE --repair quarantine"
    assert repair in text_of(made)


@pytest.mark.slow
def test_marks_are_shown_with_their_text_and_time(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put_pages(store, range(6), "_m_0_1")
    when = datetime.fromtimestamp(OLD, UTC).isoformat()
    made = tmp_path / "page.html"
    invoke("report", store, "--mark", f"v2=beta={when}", "--mark", "2026-01-01T00:00Z", "-o", made)
    text = text_of(made)
    assert "v2=beta: 2023-11-14 22:13 UTC." in text
    assert "deploy (2026-01-01 00:00 UTC) is too far from the writes to draw." in text
    refused = invoke("report", store, "--mark", "a=b", "-o", made, exit_code=2).stderr
    assert "'b' is neither ISO 8601 nor an age such as 7d" in refused


def test_an_empty_store_has_a_true_page(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    made = tmp_path / "page.html"
    invoke("report", store, "--allow-empty", "-o", made)
    text = text_of(made)
    assert "Nothing was checked" in text
    assert "sizes: had nothing to check values: was not asked for" in text
    assert "No check had anything to judge." in text
    assert "is empty; check the mount" in text
    assert "The store has no objects." in text
    assert "The store has no pages." in text


@pytest.mark.slow
def test_foreign_files_are_no_pages(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, "notes.txt")
    put(store, "empty", nbytes=0)
    made = tmp_path / "page.html"
    invoke("report", store, "--allow-empty", "-o", made)
    text = text_of(made)
    assert "foreign-object 2" in text
    assert "Nothing was checked" in text
    assert "has no HiCacheFile objects" in text


@pytest.mark.slow
def test_keys_of_any_bytes_are_shown_escaped(invoke: Invoke, tmp_path: Path) -> None:
    keys = [b"nul\0<b>\xff", f"{page(1)}_m\0<script>_0_1.bin".encode()]
    url = f"pack://{tmp_path}/store.hcpack"
    with open_store(f"{url}?keys=file", create=True) as store, Arena(4096) as arena:
        store.attach(arena)
        rows = pa.table({"key": pa.array(keys, pa.binary()), "mtime_ns": [OLD * 10**9] * 2})
        sizes = np.array([64, 64])
        assert store.write_from(rows, np.array([0, 64]), sizes, if_absent=True).all_ok
        store.detach()
    made = tmp_path / "page.html"
    invoke("report", url, "--fail-on", "never", "-o", made)
    assert b"\0" not in made.read_bytes()
    text = text_of(made)
    assert r"nul\x00<b>\xff" in text
    assert r"m\x00<script> tp 1" in text


@pytest.mark.slow
def test_a_damaged_pack_is_refused_or_shown_with_its_damage(
    invoke: Invoke, dsa: Path, tmp_path: Path
) -> None:
    pack = tmp_path / "store.hcpack"
    invoke("migrate", dsa, f"pack://{pack}")
    made = tmp_path / "page.html"
    invoke("report", f"pack://{pack}", "-o", made)
    assert "x-dsa" in text_of(made)
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)
    made.unlink()
    invoke("report", f"pack://{pack}", "--checks", "digests", "-o", made, exit_code=4)
    assert "1 error, so servers could read wrong data, or fail to read" in text_of(made)
    pack.write_bytes(content[: len(content) // 2])
    made.unlink()
    assert "store.hcpack" in invoke("report", f"pack://{pack}", "-o", made, exit_code=2).stderr
    assert not made.exists()


def test_the_file_is_never_in_the_store_and_is_written_whole(
    invoke: Invoke, dsa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = dsa / "page.html"
    assert "lies in the store" in invoke("report", dsa, "-o", inside, exit_code=2).stderr
    (tmp_path / "link").symlink_to(dsa)
    linked = tmp_path / "link" / "page.html"
    assert "lies in the store" in invoke("report", dsa, "-o", linked, exit_code=2).stderr
    assert not inside.exists()
    made = tmp_path / "page.html"
    made.write_text("<!DOCTYPE html>earlier")

    def fail(*_: object, **__: object) -> str:
        raise StoreUnavailable("no more")

    monkeypatch.setattr("hicachectl.report.view.size_chart", fail)
    invoke("report", dsa, "-o", made, exit_code=3)
    assert made.read_text() == "<!DOCTYPE html>earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "page.html", "store"]


@pytest.mark.slow
def test_only_a_page_is_replaced(invoke: Invoke, dsa: Path, tmp_path: Path) -> None:
    profile = tmp_path / "dsa.toml"
    profile.write_text(DSA)
    refused = invoke("report", dsa, "-o", profile, exit_code=2).stderr
    assert refused == (
        f"hicachectl: {profile}: exists and is not an HTML page; name another file\n"
    )
    assert profile.read_text() == DSA
    made = tmp_path / "page.html"
    for _ in range(2):
        invoke("report", dsa, "--fail-on", "never", "-o", made)
    nixl = f"nixl://{tmp_path},{dsa}"
    assert "lies in the store" in invoke("report", nixl, "-o", made, exit_code=2).stderr


@pytest.mark.slow
def test_the_page_is_as_private_as_the_store(invoke: Invoke, dsa: Path, tmp_path: Path) -> None:
    dsa.chmod(0o700)
    made = tmp_path / "page.html"
    invoke("report", dsa, "--fail-on", "never", "-o", made)
    assert made.stat().st_mode & 0o077 == 0


def test_a_missing_package_is_one_line(
    invoke: Invoke, dsa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hicachectl.report.charts.find_spec",
        lambda name: None if name == "vl_convert" else find_spec(name),
    )
    refused = invoke("report", dsa, "-o", tmp_path / "page.html", exit_code=2).stderr
    assert refused == (
        f"hicachectl: report needs vl-convert-python; run {sys.executable} -m pip install "
        "vl-convert-python\n"
    )


@pytest.mark.slow
def test_charts_take_any_text() -> None:
    """A text that is no XML would end the process in vl-convert."""
    codes = [*range(0x30), *range(0x7E, 0xA2), *range(0x200A, 0x2010), *range(0x2027, 0x2030),
             *range(0xD7FE, 0xD803), *range(0xDFFD, 0xE001), 0xFEFF, 0xFFFE, 0xFFFF, 0x1F600,
             0xE0001, 0x10FFFF]  # fmt: skip
    letters = [chr(code) for code in codes]
    names = ["".join(letters[at : at + 4]) for at in range(0, len(letters), 4)]
    pools = {name: [charts.Bar("1 B", 0, 1)] for name in names}
    svg = charts.size_chart(pools, longest=1, counted="bytes", of="\0<&\"'")
    assert svg.count("<svg") == 2
    assert "\0" not in svg
