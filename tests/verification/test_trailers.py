"""`verify` and `show` of stores that the plug-in wrote: digests and identities of trailers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from blake3 import blake3
from msgspec.structs import replace
from xxhash import xxh3_128

from hicachectl.backends.base import open_store
from hicachectl.formats.identity import object_identity
from hicachectl.formats.profile import dump_profile
from hicachectl.formats.spec import object_specs
from hicachectl.formats.trailer import TRAILER_BYTES
from hicachectl.profiles.identities import with_marked_weights
from tests.served_stores import (
    HYBRID,
    INDEXED,
    OTHER_WEIGHTS,
    WEIGHTS,
    forget_ranks,
    served_by,
    served_store,
    swap_ranks,
)
from tests.stores import OLD, page, put
from tests.verification.in_process import brief

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.conftest import Invoke

KV = f"{page(1)}_demo-hybrid-1b_0_2.bin"
UNNAMED = replace(HYBRID, weights="")


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """Four pages of a model of TP 2 with states."""
    served_store(tmp_path / "store", HYBRID)
    return tmp_path / "store"


def profile_file(directory: Path, profile: Profile) -> Path:
    path = directory / "profile.toml"
    path.write_text(dump_profile(profile))
    return path


def verify(
    invoke: Invoke, store: Path, profile: Profile, *arguments: object, exit_code: int = 0
) -> Any:
    given = ("--profile", profile_file(store.parent, profile), "--format", "json")
    return invoke("verify", store, *given, *arguments, exit_code=exit_code)


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file in place, without a new time."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, (OLD, OLD))


@pytest.mark.slow
@pytest.mark.parametrize("profile", [HYBRID, INDEXED], ids=["hybrid", "indexed"])
def test_a_store_of_the_plug_in_is_clean_and_all_of_it_was_compared(
    invoke: Invoke, tmp_path: Path, profile: Profile
) -> None:
    """Sizes are without trailers; nothing is named as unchecked, not even dtypes."""
    served_store(tmp_path / "store", profile)
    document = verify(invoke, tmp_path / "store", profile).document
    assert document["findings"] == []
    assert document["skipped_checks"] == []
    assert "digests" in document["checks"]
    assert (
        document["bytes"]
        == document["bytes_read"]
        == 4 * sum(spec.nbytes for spec in object_specs(profile, "file"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 700, -1, -TRAILER_BYTES, -60], ids=str)
def test_a_flipped_bit_is_a_digest_mismatch_without_a_catalog(
    invoke: Invoke, served: Path, at: int
) -> None:
    """In the object or in its trailer; with and without a profile."""
    flip(served / KV, at)
    found = [("digest-mismatch", "error", KV)]
    if at == -TRAILER_BYTES:  # no trailer is left, so the file is too long
        found = [("oversized", "error", KV)]
    document = verify(invoke, served, HYBRID, exit_code=4).document
    assert brief(document) == found
    plain = invoke("verify", served, "--format", "json", exit_code=4).document
    assert brief(plain) == found


@pytest.mark.slow
def test_repair_removes_a_damaged_page_and_restore_puts_its_trailer_back(
    invoke: Invoke, served: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in served.glob("*.bin")}
    flip(served / KV, 5)
    damaged = (served / KV).read_bytes()
    away = tmp_path / "away"
    repair = ("--repair", "quarantine", "--quarantine", away, "--yes")
    assert verify(invoke, served, HYBRID, *repair, exit_code=4).document["repaired"] == 1
    assert not list(served.glob(f"{page(1)}*"))
    assert served_by(served, HYBRID, [page(0), page(1)]) == [True, False]
    invoke("restore", away, served, "--yes")
    assert {path.name: path.read_bytes() for path in served.glob("*.bin")} == {
        **before,
        KV: damaged,
    }


@pytest.mark.slow
def test_objects_of_another_rank_are_foreign(invoke: Invoke, served: Path) -> None:
    """Digest, page, pool and identity are right; with and without a profile."""
    swapped = sorted(("identity-mismatch", "error", key) for key in swap_ranks(served, page(1)))
    document = verify(invoke, served, HYBRID, exit_code=4).document
    assert brief(document) == swapped
    (detail,) = [f["detail"] for f in document["findings"] if f["key"] == KV]
    assert detail == "its trailer is of rank 1 (tp 2), but its key is of rank 0 (tp 2)"
    assert served_by(served, HYBRID, [page(0), page(1)]) == [True, False]
    plain = invoke("verify", served, "--format", "json", exit_code=4).document
    assert [row for row in brief(plain) if row[0] == "identity-mismatch"] == swapped


@pytest.mark.slow
def test_trailers_that_name_no_rank_are_counted(
    invoke: Invoke, served: Path, tmp_path: Path
) -> None:
    """They are no findings, but nothing tells swapped ranks apart: the check is skipped in part."""
    forget_ranks(served)
    swap_ranks(served, page(1))
    found = verify(invoke, served, HYBRID)
    assert found.document["findings"] == []
    assert found.document["skipped_checks"] == ["ranks"]
    assert found.document["unranked"] == 4 * len(object_specs(HYBRID, "file"))
    assert "ranks: 16 objects with a trailer that names no rank" in found.stderr
    few = verify(invoke, served, HYBRID, "--checks", "groups").document
    assert (few["unranked"], few["skipped_checks"]) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("profile", [HYBRID, INDEXED], ids=["hybrid", "indexed"])
def test_objects_of_other_weights_are_named_in_words(
    invoke: Invoke, tmp_path: Path, profile: Profile
) -> None:
    """The finding names both weights; the plug-in refuses exactly these pages."""
    store = tmp_path / "store"
    served_store(store, profile, range(3))
    served_store(store, replace(profile, weights=OTHER_WEIGHTS), range(3, 5))
    document = verify(invoke, store, profile, exit_code=4).document
    assert {f["page"] for f in document["findings"]} == {page(3), page(4)}
    assert set(document["counts"]) == {"identity-mismatch"}
    assert all(f["severity"] == "error" for f in document["findings"])
    assert all(
        f"weights {OTHER_WEIGHTS} instead of {WEIGHTS}" in f["detail"] for f in document["findings"]
    )
    readable = served_by(store, profile, [page(number) for number in range(5)])
    assert readable == [True, True, True, False, False]


def test_objects_of_another_dtype_of_equal_size_are_named(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    served_store(store, INDEXED, range(2))
    pools = tuple(replace(pool, dtype="float16") for pool in INDEXED.pools[:1])
    halved = replace(INDEXED, pools=(*pools, *INDEXED.pools[1:]))
    (kv, _), (other, _) = (object_specs(p, "file") for p in (INDEXED, halved))
    if object_identity(INDEXED, kv) == object_identity(halved, other):
        pytest.fail("the two profiles have one identity")
    served_store(store, halved, range(2, 3))
    document = verify(invoke, store, INDEXED, "--fail-on", "never").document
    details = {f["detail"] for f in document["findings"] if f["pool"] == "kv"}
    assert details == {"its identity differs: dtype float16 instead of bfloat16"}


def test_an_identity_that_no_marker_describes(invoke: Invoke, served: Path) -> None:
    served_store(served, replace(HYBRID, weights=OTHER_WEIGHTS), range(4, 5))
    for marker in (served / ".hicachectl/plugin").iterdir():
        if OTHER_WEIGHTS in marker.read_text():
            marker.unlink()
    document = verify(invoke, served, HYBRID, exit_code=4).document
    assert set(document["counts"]) == {"identity-mismatch"}
    assert all("no marker describes it" in f["detail"] for f in document["findings"])


@pytest.mark.slow
def test_weights_come_from_markers_if_these_agree_on_one(invoke: Invoke, served: Path) -> None:
    """A profile without weights is enough; with two sets of weights, verify asks for --weights."""
    found = verify(invoke, served, UNNAMED)
    assert found.document["skipped_checks"] == []
    with open_store(str(served)) as store:
        assert with_marked_weights(UNNAMED, store) == HYBRID
    served_store(served, replace(HYBRID, weights=OTHER_WEIGHTS), range(4, 6))
    found = verify(invoke, served, UNNAMED)
    assert "identities" in found.document["skipped_checks"]
    assert f"{WEIGHTS}, {OTHER_WEIGHTS}; choose with --weights" in found.stderr
    chosen = verify(invoke, served, UNNAMED, "--weights", OTHER_WEIGHTS, exit_code=4).document
    assert {f["page"] for f in chosen["findings"]} == {page(number) for number in range(4)}


def test_a_profile_that_no_marker_agrees_with(invoke: Invoke, served: Path) -> None:
    other = replace(UNNAMED, layout="page_first_direct")
    found = verify(invoke, served, other, "--checks", "digests")
    assert found.document["skipped_checks"] == ["identities"]
    assert "layout page_first instead of page_first_direct" in found.stderr


def test_objects_without_a_trailer_are_no_findings_but_counted(
    invoke: Invoke, served: Path
) -> None:
    """SGLang's own files may lie beside the plug-in's."""
    bare = served / KV.replace(page(1), page(9))
    for rank in range(2):
        for path in (KV, KV.replace("_demo", ".mamba_demo")):
            source = served / path.replace("_0_2", f"_{rank}_2")
            target = source.with_name(source.name.replace(page(1), page(9)))
            target.write_bytes(source.read_bytes()[:-TRAILER_BYTES])
    found = verify(invoke, served, HYBRID, "--grace", "0s")
    assert found.document["findings"] == []
    assert "undigested-objects" in found.document["skipped_checks"]
    assert "4 objects without a digest in the store" in found.stderr
    assert bare.exists()


@pytest.mark.slow
def test_trailers_without_digests_are_not_called_checked(invoke: Invoke, tmp_path: Path) -> None:
    """Identities are still compared."""
    store = tmp_path / "store"
    served_store(store, HYBRID, range(2), digest="off")
    found = verify(invoke, store, HYBRID)
    assert "digests" in found.document["skipped_checks"]
    assert "digests" not in found.document["checks"]
    other = verify(invoke, store, HYBRID, "--weights", OTHER_WEIGHTS, exit_code=4)
    assert set(other.document["counts"]) == {"identity-mismatch"}


@pytest.mark.slow
def test_a_catalog_holds_payload_digests_and_meets_trailers(
    invoke: Invoke, served: Path, tmp_path: Path
) -> None:
    """The same catalog fits the same objects without trailers."""
    catalog = tmp_path / "catalog.parquet"
    verify(invoke, served, HYBRID, "--catalog", catalog, "--update-catalog")
    plain = tmp_path / "plain"
    for path in served.glob("*.bin"):
        put(plain, path.name).write_bytes(path.read_bytes()[:-TRAILER_BYTES])
    found = invoke("verify", plain, "--catalog", catalog, "--format", "json", "--grace", "0s")
    assert found.document["findings"] == []
    flip(plain / KV, 3)
    found = invoke("verify", plain, "--catalog", catalog, "--format", "json", "--grace", "0s")
    assert brief(found.document) == [("re-recorded", "info", KV)]


def test_other_files_beside_trailed_objects_are_not_read(invoke: Invoke, served: Path) -> None:
    put(served, "notes.txt", 4000)
    put(served, f"{page(1)}_another_0_1.bin", 4000)
    document = verify(invoke, served, HYBRID).document
    assert document["objects_read"] == 16
    assert set(document["counts"]) == {"foreign-object"} | set(document["counts"])
    assert "undigested-objects" in document["skipped_checks"]


@pytest.mark.slow
@pytest.mark.parametrize("digest", ["xxh3", "blake3", "off"])
def test_show_has_identity_and_digest_of_each_object(
    invoke: Invoke, tmp_path: Path, digest: str
) -> None:
    store = tmp_path / "store"
    served_store(store, HYBRID, range(2), digest=digest)
    served_store(store, replace(HYBRID, weights=OTHER_WEIGHTS), range(2, 3))
    value = (store / KV).read_bytes()[:-TRAILER_BYTES]
    digests = {
        "xxh3": f"xxh3:{xxh3_128(value).hexdigest()}",
        "blake3": f"blake3:{blake3(value).hexdigest()}",
        "off": None,
    }
    given = ("--profile", profile_file(tmp_path, HYBRID))
    document = invoke("show", store, page(1), *given, "--format", "json").document
    (kv,) = [one for one in document["objects"] if one["key"] == KV]
    assert kv["trailer_digest"] == digests[digest]
    facts = document["identities"][kv["identity"]]
    assert (facts["weights"], facts["dtype"]) == (WEIGHTS, "bfloat16")
    assert (facts["layout"], facts["page_size"]) == ("page_first", 16)
    assert document["findings"] == []
    text = invoke("show", store, page(1)).stdout
    assert f"identity {kv['identity']}: model demo-hybrid-1b, weights {WEIGHTS}" in text
    assert kv["identity"][:12] in text


def test_show_names_the_object_of_another_identity(invoke: Invoke, served: Path) -> None:
    given = ("--profile", profile_file(served.parent, HYBRID), "--weights", OTHER_WEIGHTS)
    document = invoke("show", served, page(1), *given, "--format", "json").document
    assert {f["code"] for f in document["findings"]} == {"identity-mismatch"}
    assert len(document["findings"]) == len(document["objects"]) == 4


def test_ls_shows_sizes_without_trailers(invoke: Invoke, served: Path) -> None:
    rows = invoke("ls", served, "--objects", "--format", "json").document["objects"]
    assert {one["nbytes"] for one in rows} == {spec.nbytes for spec in object_specs(HYBRID, "file")}
    plain = invoke("ls", served, "--summary", "--format", "json").document["summary"]
    assert sum(row["nbytes"] for row in plain) == sum(one["nbytes"] for one in rows)
