"""Changes of dtype or layout between pages of different age, which keys and sizes do not show."""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.formats.profile import dump_profile
from hicachectl.pages.scanning import take_inventory
from hicachectl.verification.request import Sample, VerifyRequest
from hicachectl.verification.verify import check_store
from tests.speed import slow, some
from tests.stores import OLD, page
from tests.verification.drawn_stores import (
    Model,
    write,
    write_changed,
    write_healthy,
)
from tests.verification.in_process import verify_store

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke

CODE = "values-changed"
WHAT = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "layout")
SMALL = Model(
    name="m", kind="mha", dtype="float8_e4m3fn", layout="page_first", layers=4, heads=2, width=64,
    page_size=16, tp=1, seed=5, noise=False,
)  # fmt: skip
OTHER = Model(**{**SMALL.__dict__, "dtype": "float8_e5m2"})


def changes(store: Path, profile: Profile) -> list[dict[str, Any]]:
    verified = verify_store(FileStore(store), VerifyRequest(profile=profile))
    found: list[dict[str, Any]] = verified.findings.to_pylist()
    return [one for one in found if one["code"] == CODE]


def seconds(text: str) -> float:
    """Return the first time of a detail, as Unix seconds."""
    word = next(word.strip(",;") for word in text.split() if word.strip(",;").endswith("Z"))
    return datetime.fromisoformat(word).timestamp()


@pytest.mark.parametrize("seed", [slow(n) for n in some(range(200), *range(5))])
def test_a_healthy_store_has_not_changed(tmp_path: Path, seed: int) -> None:
    """Models, dtypes, layouts, pools, ranks, ages and new weights are drawn."""
    for model in write_healthy(tmp_path / "s", np.random.default_rng([7, seed])):
        document = verify_store(
            FileStore(tmp_path / "s"), VerifyRequest(profile=model.profile)
        ).document
        assert set(document["counts"]) <= {"other-deployment"}, model


@pytest.mark.parametrize("seed", [slow(n) for n in some(range(100), *range(5))])
def test_a_change_is_found_with_its_time(tmp_path: Path, seed: int) -> None:
    """The profile states the setting from before, or the one from after."""
    drawn = write_changed(tmp_path / "s", np.random.default_rng([7, seed]), WHAT[seed % 5])
    for model in (drawn.before, drawn.after):
        found = changes(tmp_path / "s", model.profile)
        assert {one["pool"] for one in found} == drawn.pools
        for one in found:
            assert one["severity"] == "error"
            assert drawn.last < seconds(one["detail"]) <= drawn.time


@pytest.mark.slow
def test_little_data_shows_no_change(tmp_path: Path) -> None:
    times = OLD + 60.0 * np.arange(40)
    for before in (7, 8, 32, 33):
        store = tmp_path / str(before)
        write(store, SMALL, range(before), times[:before])
        write(store, OTHER, range(before, 40), times[before:])
        assert len(changes(store, SMALL.profile)) == (8 <= before <= 32)


@pytest.mark.slow
def test_a_sample_with_few_objects_of_a_kind_says_that_it_cannot_tell(tmp_path: Path) -> None:
    times = OLD + 60.0 * np.arange(150)
    write(tmp_path / "s", SMALL, range(75), times[:75])
    write(tmp_path / "s", OTHER, range(75, 150), times[75:])
    skipped, counts = [], []
    for slices in (15, 2):  # about 10 and 75 pages
        request = VerifyRequest(profile=SMALL.profile, sample=Sample(slices, 0))
        document = verify_store(FileStore(tmp_path / "s"), request).document
        skipped.append("changes" in document["skipped_checks"])
        counts.append(CODE in document["counts"])
    assert (skipped, counts) == ([True, False], [False, True])


@pytest.mark.slow
def test_dtypes_written_in_turns_are_named_without_a_time(tmp_path: Path) -> None:
    """A change that was taken back, or servers of two settings."""
    times = OLD + 60.0 * np.arange(60)
    write(tmp_path / "s", SMALL, range(60), times)
    write(tmp_path / "s", OTHER, range(20, 40), times[20:40])
    (found,) = changes(tmp_path / "s", SMALL.profile)
    said = found["detail"]
    assert "numbers are float8_e4m3fn in 40 objects, written 2023-11-14 22:13 to" in said
    assert "and float8_e5m2 in 20 objects, written 2023-11-14 22:33 to 2023-11-14 22:52 UTC" in said


@pytest.mark.slow
def test_a_layout_that_the_profile_never_had_is_no_change(tmp_path: Path) -> None:
    """Each page is an error, and no time divides them."""
    said, written = (
        Model(**{**SMALL.__dict__, "layers": 9, "layout": layout})
        for layout in ("page_first", "layer_first")
    )
    write(tmp_path / "s", written, range(40), OLD + 60.0 * np.arange(40))
    verified = verify_store(FileStore(tmp_path / "s"), VerifyRequest(profile=said.profile))
    assert verified.document["counts"] == {"layout-mismatch": 40}


@pytest.mark.slow
def test_the_removals_that_are_suggested_end_the_change(invoke: Invoke, tmp_path: Path) -> None:
    """They take the pages of one setting, whole, and no page of the other."""
    times = OLD + 0.25 + 60.0 * np.arange(50)
    write(tmp_path / "s", SMALL, range(30), times[:30])
    write(tmp_path / "s", OTHER, range(30, 50), times[30:])
    profile = tmp_path / "p.toml"
    profile.write_text(dump_profile(OTHER.profile))
    command = ["verify", tmp_path / "s", "--profile", profile]
    verified = invoke(*command, exit_code=4)
    said = verified.stdout
    (mend,) = [line for line in said.splitlines() if line.startswith("  hicachectl rm ")]
    assert mend.endswith(" --model m --before 2023-11-14T22:43:20Z")
    time = mend.split()[-1]
    assert f"before {time}, float8_e5m2 since then" in said
    assert (
        f"  If the servers still have the flags from after {time}, remove the older pages" in said
    )
    remarks = verified.stderr
    assert "values-changed shows two settings, but not which of them the servers have" in remarks
    newer = invoke(*mend.replace("--before", "--since").split()[1:], "--dry-run").stdout
    assert "\n20 pages, 20 objects, " in newer
    removed = invoke(*mend.split()[1:], "--yes").stdout
    assert "\n30 pages, 30 objects, " in removed
    clean = invoke(*command)
    assert "no findings" in clean.stdout
    assert "values do not prove the dtypes" in clean.stderr
    assert "values-changed" not in clean.stderr


@pytest.mark.slow
def test_parts_see_the_change_together(invoke: Invoke, tmp_path: Path) -> None:
    """Seven pages of a part show nothing alone."""
    times = OLD + 60.0 * np.arange(60)
    write(tmp_path / "s", SMALL, range(20), times[:20])
    write(tmp_path / "s", OTHER, range(20, 60), times[20:])
    profile = tmp_path / "p.toml"
    profile.write_text(dump_profile(OTHER.profile))
    command = ["verify", tmp_path / "s", "--profile", profile]
    alone = invoke(*command, "--format", "json", exit_code=4).document
    run = tmp_path / "run"
    for part in range(4):
        invoke(*command, "--shard", f"{part}/4", "--run", run)
    merged = invoke("merge", run, "--format", "json", exit_code=4).document
    assert merged["findings"] == alone["findings"]
    assert alone["counts"] == {CODE: 1}


def test_pages_of_any_age_are_compared_evenly(tmp_path: Path) -> None:
    """Of more objects than are compared, those of few pages before the change are not left out."""
    request = VerifyRequest(profile=SMALL.profile, noted_objects=50)
    times = OLD + 60.0 * np.arange(200)
    write(tmp_path / "s", SMALL, range(40), times[:40])
    write(tmp_path / "s", OTHER, range(40, 200), times[40:])
    verified = verify_store(FileStore(tmp_path / "s"), request)
    (found,) = verified.findings.to_pylist()
    assert "(10 and 40 objects compared, none from between)" in found["detail"]
    assert -3 * 60 <= seconds(found["detail"]) - times[40] < 60


def evidence(store: Path, profile: Profile, **options: Any) -> dict[str, list[Any]]:
    """Return the evidence of a run, by column."""
    checked = check_store(FileStore(store), VerifyRequest(profile=profile, **options))
    columns: dict[str, list[Any]] = checked.result.evidence.to_pydict()
    return columns


@pytest.mark.slow
def test_evidence_is_of_objects_that_were_judged(tmp_path: Path) -> None:
    store = tmp_path / "s"
    write(store, SMALL, range(20), OLD + np.arange(20.0))
    seen = evidence(store, SMALL.profile)
    assert seen["written_ns"] == [(OLD + n) * 10**9 for n in order_of(store)]
    assert set(seen["width"]) == {1}
    assert set(seen["disordered"]) == {False}
    for path in sorted(store.iterdir())[:4]:
        os.truncate(path, 100)
        os.utime(path, (OLD, OLD))
    assert len(evidence(store, SMALL.profile)["affix"]) == 16
    assert evidence(store, SMALL.profile, time_limit_seconds=0.0)["affix"] == []
    assert evidence(store, SMALL.profile, checks=("sizes",))["affix"] == []


def order_of(store: Path) -> list[int]:
    """Return the numbers of the pages, in the order of the listing."""
    listed = take_inventory(FileStore(store), SMALL.profile).objects.column("key").to_pylist()
    numbers = {page(number): number for number in range(20)}
    return [numbers[key.decode()[:64]] for key in listed]


@pytest.mark.slow
def test_tiny_objects_give_no_evidence(tmp_path: Path) -> None:
    """One token shows no layout, and 192 numbers no quartiles."""
    tiny = Model(**{**SMALL.__dict__, "page_size": 1, "layers": 3, "width": 16})
    write(tmp_path / "s", tiny, range(3), OLD + np.arange(3.0))
    seen = evidence(tmp_path / "s", tiny.profile)
    assert (seen["width"], seen["disordered"]) == ([0] * 3, [None] * 3)
