"""An external kind of pool is listed, verified, packed and re-sharded like a built-in kind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from hicachectl.checks.codes import Code
from hicachectl.checks.registry import VALUES, ValueCheck, ValueIssue, register, unregister
from hicachectl.formats.errors import ProfileError, UnsupportedByBackend
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.profile import Profile, dump_profile, parse_profile
from hicachectl.formats.spec import object_specs
from tests.formats import conv_state
from tests.stores import OLD, contents, page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from hicachectl.formats.spec import ObjectSpec
    from tests.conftest import Invoke

PAGES, LAYERS, CHANNELS, WIDTH = 5, 3, 16, 4
WINDOW = StateTensor(shape=(CHANNELS, WIDTH), dtype="float32")
PROFILE = Profile(
    model="org/conv",
    page_size=4,
    tp=2,
    pools=(
        Pool(name="kv", kind="mha", dtype="float32", layers=(3,), kv_heads=4, head_dim=8),
        Pool(name="conv_state", kind="conv_state", layers=LAYERS, conv=(WINDOW,)),
    ),
)


@pytest.fixture(autouse=True)
def kind() -> Iterator[None]:
    """Register the kind and its value check."""
    check = ValueCheck(
        name="windows", group=VALUES, codes=(Code("dead-channel", "warning"),), prepare=windows
    )
    with conv_state.registered():
        register(check)
        yield
        unregister(check.name)


def windows(
    spec: ObjectSpec, profile: Profile
) -> Callable[[npt.NDArray[np.uint8]], Iterator[ValueIssue]] | None:
    """Find channels with equal inputs at all taps of all layers."""
    pool = profile.pool(spec.pool)
    if pool is None or pool.kind != "conv_state":
        return None
    (tensor,) = spec.tensors

    def find(objects: npt.NDArray[np.uint8]) -> Iterator[ValueIssue]:
        values = np.ascontiguousarray(objects).view("<f4").reshape(-1, *tensor.shape)
        dead = (values == values[..., :1]).all(axis=(1, 3))
        for index in np.flatnonzero(dead.any(axis=1)).tolist():
            yield ValueIssue(index, "dead-channel", f"channel {np.flatnonzero(dead[index])[0]}")

    return find


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "p.toml").write_text(dump_profile(PROFILE))
    return written(tmp_path / "store", PROFILE)


def written(directory: Path, profile: Profile) -> Path:
    """Write the objects that servers of a deployment would write for the same pages."""
    directory.mkdir()
    for number in range(PAGES):
        for spec in object_specs(profile, "file"):
            path = path_of(directory, number, spec)
            shard(number, spec, profile.tp).tofile(path)
            os.utime(path, (OLD, OLD))
    return directory


def path_of(directory: Path, number: int, spec: ObjectSpec) -> Path:
    return directory / f"{spec.affix[0]}{page(number)}{spec.affix[1]}"


def shard(number: int, spec: ObjectSpec, tp: int) -> np.ndarray:
    """Return a rank's share of a page's values: channels of windows, heads of K and V."""
    rng = np.random.default_rng([number, spec.pool == "kv"])
    shape = (2, 4, 4, 8) if spec.pool == "kv" else (LAYERS, CHANNELS, WIDTH)
    axis = 2 if spec.pool == "kv" else 1
    values = rng.standard_normal(shape).astype("<f4")
    return np.split(values, tp, axis=axis)[spec.coordinate.shard.tp_rank or 0]


def window_path(store: Path, number: int, rank: int = 1) -> Path:
    return store / f"{page(number)}.conv_state_org-conv_{rank}_2.bin"


def run(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = invoke(*arguments, "--format", "json", exit_code=exit_code).document
    return document


def findings(invoke: Invoke, store: Path, *, exit_code: int) -> list[tuple[str, str, str]]:
    document = run(
        invoke, "verify", store, "--profile", store.parent / "p.toml", exit_code=exit_code
    )
    return [(one["code"], one["page"], one["detail"]) for one in document["findings"]]


def test_its_objects_are_listed_and_belong_to_their_pages(invoke: Invoke, store: Path) -> None:
    listed = run(invoke, "ls", store, "--profile", store.parent / "p.toml")["pages"]
    assert [one["state"] for one in listed] == ["whole"] * PAGES
    both = {"present": 2, "expected": 2}
    assert listed[0]["pools"] == {"kv": both, "conv_state": both}
    window_path(store, 0).unlink()
    listed = run(invoke, "ls", store, "--profile", store.parent / "p.toml")["pages"]
    assert sorted(one["state"] for one in listed) == ["partial", *["whole"] * (PAGES - 1)]


def test_its_sizes_and_values_are_verified(invoke: Invoke, store: Path) -> None:
    assert findings(invoke, store, exit_code=0) == []
    window_path(store, 0).unlink()
    os.truncate(window_path(store, 1), 100)
    values = np.fromfile(window_path(store, 2), "<f4").reshape(LAYERS, CHANNELS // 2, WIDTH)
    values[1, 6, 3] = np.nan
    values.tofile(window_path(store, 2))
    for number in range(3):
        for path in store.glob(f"{page(number)}*"):
            os.utime(path, (OLD, OLD))
    found = findings(invoke, store, exit_code=4)
    assert [(code, number) for code, number, _ in sorted(found)] == [
        ("missing-pool", page(0)),
        ("nan", page(2)),
        ("truncated", page(1)),
    ]
    nan = next(detail for code, _, detail in found if code == "nan")
    assert nan == "window: 1 NaN in layer 1, the first at layer 1, channel 6, tap 3"


def test_its_own_value_check_finds_what_no_other_does(invoke: Invoke, store: Path) -> None:
    values = np.fromfile(window_path(store, 3), "<f4").reshape(LAYERS, CHANNELS // 2, WIDTH)
    values[:, 5] = 0.25
    values.tofile(window_path(store, 3))
    os.utime(window_path(store, 3), (OLD, OLD))
    found = findings(invoke, store, exit_code=4)
    assert found == [("dead-channel", page(3), "channel 5")]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 4])
def test_its_pages_are_packed_and_sharded_anew(
    invoke: Invoke, store: Path, tmp_path: Path, tp: int
) -> None:
    pack = f"pack://{tmp_path}/pages.hcpack"
    options = ("--profile", tmp_path / "p.toml", "--verify")
    assert run(invoke, "migrate", store, pack, *options)["pages"] == PAGES
    made = tmp_path / "made"
    made.mkdir()
    moved = run(invoke, "migrate", pack, f"file://{made}", *options, "--to-tp", tp)
    assert moved["pages"] == PAGES
    expected = contents(written(tmp_path / "expected", replace(PROFILE, tp=tp)))
    assert contents(made) == expected
    back = tmp_path / "back"
    back.mkdir()
    (tmp_path / "wide.toml").write_text(dump_profile(replace(PROFILE, tp=tp)))
    run(invoke, "migrate", made, back, "--profile", tmp_path / "wide.toml", "--to-tp", 2)
    assert contents(back) == contents(store)


def test_ranks_that_do_not_share_it_out_are_refused(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    options = ("--profile", tmp_path / "p.toml", "--to-tp", "32")
    said = invoke("migrate", store, tmp_path, *options, exit_code=2).stderr
    assert "pools[conv_state].conv: channels do not divide over 32 ranks" in said
    with pytest.raises(
        UnsupportedByBackend,
        match=r"pools\[conv_state\]: SGLang does not store this pool on Mooncake",
    ):
        object_specs(PROFILE, "mooncake")


def test_a_profile_states_it_as_its_kind_demands(store: Path) -> None:
    text = (store.parent / "p.toml").read_text()
    assert parse_profile(text) == PROFILE
    windows = (WINDOW, WINDOW)
    two = replace(PROFILE, pools=(PROFILE.pools[0], replace(PROFILE.pools[1], conv=windows)))
    with pytest.raises(
        ProfileError, match=r"pools\[conv_state\].conv: a conv_state pool needs one"
    ):
        parse_profile(dump_profile(two))
