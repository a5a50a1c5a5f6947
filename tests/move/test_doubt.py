"""A repair believes the profile by the newest pages, and otherwise changes nothing."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.formats.profile import Profile, parse_profile
from hicachectl.move.repair import RepairOptions, plan_of
from hicachectl.verification.request import VerifyRequest
from hicachectl.verification.verify import check_store
from tests.move.repairs import DSA, INDEXER_BYTES, KV_BYTES, dsa_store, indexer, kv
from tests.stores import DSA as DSA_TEXT
from tests.stores import OLD, contents, page, put, put_pages

if TYPE_CHECKING:
    from hicachectl.move.removal_plan import RepairPlan
    from tests.conftest import Invoke

DAY = 86_400
VALUES = """
model = "v"
page_size = 2
layout = "page_first"
[[pools]]
name = "kv"
kind = "mha"
dtype = "bfloat16"
layers = 1
kv_heads = 1
head_dim = 32
"""  # 256 bytes a page
PLAIN = 'model = "m"\n[[pools]]\nname = "kv"\nkind = "opaque"\nnbytes = 40\n'
KEY = "_m_0_1"


def plan(store: object, profile: Profile = DSA, **options: Any) -> RepairPlan:
    """Return the plan of a repair, from the checks of names, groups and sizes."""
    with open_store(str(store)) as opened:
        request = VerifyRequest(
            profile=profile, checks=("names", "groups", "sizes"), grace_seconds=0, repairs=True
        )
        checked = check_store(opened, request)
        return plan_of(checked, checked.findings, RepairOptions(mode="delete", **options))


def lacking(store: Path, pages: int, *, newest: int = 0, oldest: int = 0) -> Path:
    """Make pages of growing times, the newest and the oldest of which lack their indexer."""
    dsa_store(store, pages)
    for number in range(pages):
        os.utime(store / kv(number), (0, OLD + number))
        if number < oldest or number >= pages - newest:
            (store / indexer(number)).unlink()
        else:
            os.utime(store / indexer(number), (0, OLD + number))
    return store


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pages", "newest", "oldest", "refused"),
    [
        (7, 4, 0, True),  # of fewer than 8 pages, all count
        (7, 3, 0, False),
        (7, 0, 4, True),
        (8, 4, 0, True),  # exactly half
        (8, 3, 0, False),
        (9, 4, 0, True),
        (9, 0, 4, False),  # 3 of the newest 8
        (80, 4, 4, True),  # exactly a tenth of all
        (80, 4, 3, False),
        (80, 8, 0, True),
        (80, 0, 60, False),  # old pages are repaired, whatever their share
        (90, 5, 4, True),  # half of the newest 9
        (90, 4, 9, False),
        (1, 1, 0, True),
    ],
)
def test_half_of_the_newest_and_a_tenth_of_all(
    tmp_path: Path, pages: int, newest: int, oldest: int, refused: bool
) -> None:
    store = lacking(tmp_path / "store", pages, newest=newest, oldest=oldest)
    planned = plan(store)
    assert (planned.refused is not None) is refused
    assert len(planned.groups) == (0 if refused else newest + oldest)
    if planned.refused is not None:
        assert (planned.refused.code, planned.refused.pages) == ("missing-pool", pages)
        assert planned.refused.affected == newest + oldest
    assert len(plan(store, despite_profile=True).groups) == newest + oldest


@pytest.mark.parametrize(("bad", "refused"), [(10, True), (9, False)])
def test_pages_of_equal_times_count_together(tmp_path: Path, bad: int, refused: bool) -> None:
    """The ten pages of the last second all are the newest, not eight of them."""
    dsa_store(tmp_path, 20)
    for path in tmp_path.iterdir():
        os.utime(path, (OLD, OLD))
    for number in range(bad):
        (tmp_path / indexer(number)).unlink()
    planned = plan(tmp_path)
    assert (planned.refused is not None) is refused
    if planned.refused is not None:
        assert (planned.refused.newest, planned.refused.newest_affected) == (20, 10)


def test_since_when_is_the_change(tmp_path: Path) -> None:
    """An old page with the finding is damage, and does not tell when the servers changed."""
    store = lacking(tmp_path / "store", 40, newest=12, oldest=1)
    planned = plan(store)
    assert planned.refused is not None
    assert planned.refused.since == OLD + 28
    assert "have missing-pool, since 2023-11-14 22:13 UTC" in planned.refused.text
    assert "8 of the 8 newest pages, and 13 of all 40," in planned.refused.text


def expected(pages: list[tuple[int, bool]]) -> bool:
    """Return whether a repair of pages, each a time and whether it is bad, must be refused."""
    count = max(8, -(-len(pages) // 10))
    times = sorted((time for time, _ in pages), reverse=True)
    limit = times[min(count, len(times)) - 1]
    newest = [bad for time, bad in pages if time >= limit]
    bad = sum(bad for _, bad in pages)
    return bad > 0 and 2 * sum(newest) >= len(newest) and 10 * bad >= len(pages)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=40),
    st.sampled_from(["lacking", "long"]),
    st.lists(st.sampled_from([39, 80]), max_size=6),
)
def test_any_pages_of_any_age(pages: list[tuple[int, bool]], kind: str, foreign: list[int]) -> None:
    """Pages of another deployment decide nothing, and are in no plan."""
    profile = parse_profile(PLAIN.replace("40\n", '40\n[[pools]]\nname = "indexer"\n'
                                          'kind = "opaque"\nnbytes = 8\n'))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        for number, (time, bad) in enumerate(pages):
            long = bad and kind == "long"
            put(store, f"{page(number)}{KEY}.bin", 80 if long else 40, OLD + time)
            if not (bad and kind == "lacking"):
                put(store, f"{page(number)}.indexer{KEY}.bin", 8, OLD + time)
        for number, nbytes in enumerate(foreign):
            put(store, f"{page(number)}_other_0_1.bin", nbytes, OLD + 100)
        if kind == "long" and all(bad for _, bad in pages) and len(pages) > 2:
            return  # the profile contradicts the store: refused before
        planned = plan(store, profile)
        assert (planned.refused is not None) is expected(pages)
        bad_pages = sum(bad for _, bad in pages)
        left = 0 if planned.refused else bad_pages - planned.mixed
        assert len(planned.groups) == left
        despite = plan(store, profile, despite_profile=True)
        assert len(despite.groups) == bad_pages


def untimed(path: Path, bad: int, *, truncated: bool = False) -> str:
    """Make a pack of ten pages without times; some lack their indexer, or are too short."""
    url = f"pack://{path}?keys=file"
    with open_store(url, create=True) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        for number in range(10):
            size = KV_BYTES // 2 if truncated and number < bad else KV_BYTES
            sizes = {kv(number): size, indexer(number): INDEXER_BYTES}
            if not truncated and number < bad:
                del sizes[indexer(number)]
            rows = pa.table({"key": [key.encode() for key in sizes]})
            offsets = np.arange(len(sizes)) * 16384
            done = store.write_from(rows, offsets, np.array([*sizes.values()]), if_absent=True)
            assert done.all_ok
    return url


def directory(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    store.mkdir()
    return store


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def verify(invoke: Invoke, store: object, *arguments: object, exit_code: int = 0) -> Any:
    return invoke("verify", store, *arguments, "--format", "json", exit_code=exit_code)


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_refused_repair_writes_all_else(invoke: Invoke, tmp_path: Path, dry_run: bool) -> None:
    """Document, metrics and catalog are those of a run without --repair."""
    store = lacking(tmp_path / "store", 12, newest=9)
    profile = write(tmp_path / "p.toml", DSA_TEXT)
    options = ("--profile", profile, "--checks", "groups,sizes,digests", "--fail-on", "never")
    records = ("--catalog", tmp_path / "c.parquet", "--update-catalog",
               "--metrics-file", tmp_path / "m.prom")  # fmt: skip
    whole = verify(invoke, store, *options, *records).document
    expected_metrics = (tmp_path / "m.prom").read_text().splitlines()
    (tmp_path / "c.parquet").unlink()
    before = contents(store)
    way = "--dry-run" if dry_run else "--yes"
    ran = verify(invoke, store, *options, *records, "--repair", "delete", way, exit_code=2)
    assert contents(store) == before
    assert "nothing was repaired: 8 of the 8 newest pages, and 9 of all 12, have missing-pool" in (
        ran.stderr
    )
    assert (
        "compare the profile with hicachectl profile --server; --despite-profile repairs"
        in ran.stderr
    )
    document = ran.document
    (refusal,) = document.pop("repair_refused")
    assert refusal == {
        "code": "missing-pool", "detail": "", "newest": 8, "newest_affected": 8, "pages": 12,
        "affected": 9, "since": OLD + 3.0, "part": None,
    }  # fmt: skip
    assert document.pop("dry_run") is dry_run
    assert {**document, "seconds": 0} == {**whole, "seconds": 0}
    assert (tmp_path / "c.parquet").exists()
    metrics = (tmp_path / "m.prom").read_text().splitlines()
    assert len(metrics) == len(expected_metrics)
    assert any("findings" in line and 'code="missing-pool"' in line for line in metrics)
    despite = ("--repair", "delete", "--yes", "--despite-profile")
    document = verify(invoke, store, *options, *records, *despite).document
    assert (document["repaired"], document["repair_refused"]) == (9, [])


def test_quiet_says_why_nothing_was_repaired(invoke: Invoke, tmp_path: Path) -> None:
    store = lacking(tmp_path / "store", 8, newest=8)
    profile = write(tmp_path / "p.toml", DSA_TEXT)
    options = ("--profile", profile, "--checks", "groups", "--repair", "delete", "--yes")
    ran = invoke("-q", "verify", store, *options, exit_code=2)
    assert "nothing was repaired" in ran.stderr


@pytest.mark.parametrize("newest", [8, 3])
def test_the_table_says_beforehand_what_a_repair_says(
    invoke: Invoke, tmp_path: Path, newest: int
) -> None:
    """The command that the table shows is refused exactly if the table says so."""
    store = lacking(tmp_path / "store", 20, newest=newest)
    profile = write(tmp_path / "p.toml", DSA_TEXT)
    options = ("--profile", profile, "--checks", "groups", "--grace", "0s")
    lines = invoke("verify", store, *options, exit_code=4).stdout.splitlines()
    under = lines[lines.index("missing-pool:") + 1 :]
    (command,) = (line.strip() for line in under if " --repair quarantine" in line)
    words = shlex.split(command)[1:]
    refused = "--despite-profile" in words
    assert refused is (newest == 8)
    assert (
        under[0].startswith("  A repair without --despite-profile is refused, because 8 of")
        is refused
    )
    plainly = [word for word in words if word != "--despite-profile"]
    tried = invoke(*plainly, "--dry-run", exit_code=2 if refused else 4)
    assert ("The repair would be refused, because 8 of the 8 newest" in tried.stderr) is refused
    if refused:
        assert under[1].startswith("  First compare the profile with hicachectl profile --server.")
        assert (
            "with the settings of the servers that wrote the pages; compare the pools" in under[1]
        )
        said = tried.stderr
        assert said.index("would be refused") < said.index("nothing was changed")
        assert "--despite-profile" in tried.stdout
    assert invoke(*words, "--yes", "--format", "json", exit_code=4).document["repaired"] == newest


def test_most_objects_of_another_size_suggest_another_setting(
    invoke: Invoke, tmp_path: Path
) -> None:
    """The newest pages are whole, so that a repair takes the old ones; the table says of what."""
    for number in range(30):
        name = f"{page(number)}{KEY}.bin"
        put(tmp_path / "store", name, 20 if number < 20 else 40)
        os.utime(tmp_path / "store" / name, (0, OLD + number))
    profile = write(tmp_path / "p.toml", PLAIN)
    options = ("--profile", profile, "--checks", "sizes", "--grace", "0s")
    lines = invoke("verify", tmp_path / "store", *options, exit_code=4).stdout.splitlines()
    under = lines[lines.index("truncated:") + 1 :]
    assert under[0].startswith(
        "  Most objects have truncated, probably because servers with another"
    )
    assert "with that setting; compare the page size, the KV cache dtype or the" in under[0]
    assert under[1].endswith("--repair quarantine")


def test_the_option_needs_a_repair(invoke: Invoke, tmp_path: Path) -> None:
    said = invoke("verify", tmp_path, "--despite-profile", exit_code=2).stderr
    assert "--despite-profile needs --repair" in said


def test_a_code_that_no_profile_makes_is_repaired_whatever_its_share(tmp_path: Path) -> None:
    """Orphans can be all of the newest pages."""
    store = dsa_store(tmp_path / "store", 8)
    for number in range(7):
        (store / kv(number)).unlink()
    planned = plan(store, codes=("orphan-sidecar",))
    assert planned.refused is None
    assert len(planned.groups) == 7


def test_sizes_that_differ_are_damage(tmp_path: Path) -> None:
    """Truncated objects of a size each, also on all newest pages, are not another setting's."""
    profile = parse_profile(PLAIN)
    for number in range(10):
        put(tmp_path, f"{page(number)}{KEY}.bin", 20 + number if number else 40, OLD + number)
    planned = plan(tmp_path, profile)
    assert planned.refused is None
    assert len(planned.groups) == 9


def test_pages_that_were_not_judged_do_not_count(invoke: Invoke, tmp_path: Path) -> None:
    """Of a sample, the newest of the read pages decide."""
    store, profile = directory(tmp_path), write(tmp_path / "p.toml", VALUES)
    for number in range(40):
        path = put(store, f"{page(number)}_v_0_1.bin", 256, OLD + number)
        path.write_bytes(b"\xff\xff" * 128)  # NaN of bfloat16
        os.utime(path, (OLD + number, OLD + number))
    options = ("--profile", profile, "--repair", "delete", "--yes", "--sample-slice", "0")
    ran = verify(invoke, store, *options, "--sample", "30%", exit_code=2)
    (refusal,) = ran.document["repair_refused"]
    assert refusal["code"] == "nan"
    assert 8 <= refusal["pages"] == refusal["affected"] == ran.document["sampled"] < 40
    assert len(list(store.glob("*.bin"))) == 40


def test_a_store_without_times_is_judged_as_a_whole(tmp_path: Path) -> None:
    """Half of all pages refuse a repair; fewer are repaired."""
    for bad, refused in ((5, True), (4, False)):
        planned = plan(untimed(tmp_path / f"{bad}.hcpack", bad))
        assert (planned.refused is not None) is refused, bad
        if planned.refused is not None:
            assert (planned.refused.newest, planned.refused.since) == (10, None)
            assert "since" not in planned.refused.text


def test_a_change_of_the_dtype_is_mended(invoke: Invoke, tmp_path: Path) -> None:
    """Thirty old pages of the old size go; the profile is that of the ten new ones."""
    store = directory(tmp_path)
    put_pages(store, range(30), KEY, nbytes=80)
    put_pages(store, range(30, 40), KEY, nbytes=40, mtime=OLD + DAY)
    profile = write(tmp_path / "p.toml", PLAIN)
    options = ("--profile", profile, "--repair", "delete", "--yes")
    document = verify(invoke, store, *options, exit_code=4).document
    assert document["counts"] == {"oversized": 30}
    assert (document["repaired"], document["repair_refused"]) == (30, [])
    assert len(list(store.glob("*.bin"))) == 10
    assert verify(invoke, store, "--profile", profile).document["counts"] == {}


@pytest.mark.slow
def test_pages_of_another_size_among_the_right_ones_stay(invoke: Invoke, tmp_path: Path) -> None:
    """Servers with both settings may run: errors stand with the warning, and nothing goes."""
    store = directory(tmp_path)
    put_pages(store, range(40), KEY, nbytes=40)
    for number in range(40):
        os.utime(store / f"{page(number)}{KEY}.bin", (0, OLD + number))
    put_pages(store, range(40, 46), KEY, nbytes=80, mtime=OLD + 10)
    put(store, f"{page(0)}{KEY}.bin", 39)
    profile = write(tmp_path / "p.toml", PLAIN)
    options = ("--profile", profile, "--repair", "delete", "--yes")
    ran = verify(invoke, store, *options, exit_code=4)
    assert ran.document["counts"] == {"mixed-sizes": 1, "oversized": 6, "truncated": 1}
    assert (ran.document["repaired"], ran.document["repair_refused"]) == (1, [])
    assert "Not repaired: 6 pages of a common size that the profile does not state" in ran.stderr
    (mixed,) = [one for one in ran.document["findings"] if one["code"] == "mixed-sizes"]
    assert mixed["severity"] == "warning"
    assert "80 bytes on 6 pages (13%)" in mixed["detail"]
    assert (
        "the profile states 40 bytes, but not all pages of another size are older"
        in (mixed["detail"])
    )
    assert len(list(store.glob("*.bin"))) == 45
    document = verify(invoke, store, *options, "--despite-profile", exit_code=4).document
    assert document["repaired"] == 6


@pytest.mark.parametrize(
    ("others", "time", "mixed"),
    [
        (2, 100, 0),  # fewer than 3 pages are damage
        (3, 100, 3),
        (3, 4, 3),  # newer than the oldest tenth, pages 0 to 3
        (3, 3, 0),  # as old as the newest of these
        (3, -1, 0),
    ],
)
def test_a_common_size_is_of_three_pages_newer_than_the_oldest_tenth(
    tmp_path: Path, others: int, time: int, mixed: int
) -> None:
    for number in range(40):
        put(tmp_path, f"{page(number)}{KEY}.bin", 40, OLD + number)
    for number in range(40, 40 + others):
        put(tmp_path, f"{page(number)}{KEY}.bin", 80, OLD + time)
    planned = plan(tmp_path, parse_profile(PLAIN))
    assert planned.refused is None
    assert (planned.mixed, len(planned.groups)) == (mixed, others - mixed)


@pytest.mark.parametrize(("right", "mixed"), [(57, 3), (58, 0)])
def test_a_common_size_is_of_a_twentieth_of_the_pages(
    tmp_path: Path, right: int, mixed: int
) -> None:
    put_pages(tmp_path, range(right), KEY, nbytes=40)
    put_pages(tmp_path, range(100, 103), KEY, nbytes=80, mtime=OLD + DAY)
    assert plan(tmp_path, parse_profile(PLAIN)).mixed == mixed


def test_without_times_a_common_size_stays(tmp_path: Path) -> None:
    url = untimed(tmp_path / "x.hcpack", 4, truncated=True)
    planned = plan(url)
    assert planned.refused is None
    assert (planned.mixed, len(planned.groups)) == (4, 0)
