"""`hicachectl diff` of stores that SGLang wrote says what a comparison of their files says."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter, defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.__main__ import run
from tests.conformance.busy_store import PATIENCE_S, BusyStore, lines
from tests.conformance.store_cases import CASES, VARIANTS, store_name
from tests.conformance.test_cli_stores import profile_files
from tests.served_stores import age
from tests.speed import some

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession, WriteStore
    from tests.conftest import Invoke

    Files = dict[str, bytes]

pytestmark = pytest.mark.conformance

GQA, LAYER_FIRST = ("gqa_tp2", "page_first"), ("mha_layouts", "layer_first")
MLA, V4 = ("mla_indexer", "page_first"), ("deepseek_v4", "page_first")
TWO, PARTIAL = ("two_models", "page_first"), ("cp2_without_dp", "page_first")
PAIRS = some(
    combinations(VARIANTS, 2),
    (("cp2", "page_first"), PARTIAL),  # ambiguous keys in one of them
    (MLA, ("mla_fp8_indexer", "page_first")),  # the same keys, other sizes
    (MLA, ("cp2", "page_first")),
    (GQA, TWO),  # a model of two
    (GQA, ("pp2", "page_first")),
    (LAYER_FIRST, ("mha_layouts", "page_first")),  # the same sizes, other bytes
    (V4, ("side_states", "page_first")),
)
STORES = some(VARIANTS, ("hybrid_mamba", "page_first"), V4, TWO, PARTIAL, MLA)
WATCHED_S = 2.5
EACH = 7  # one object of so many is damaged in a way


def objects_in(store: Path) -> Files:
    """Return the objects of a store."""
    return {path.name: path.read_bytes() for path in store.iterdir() if path.suffix == ".bin"}


def differences(a: Files, b: Files, *, reads: bool) -> dict[str, set[str]]:
    """Return what differs on each page, by the first digits of the names of files."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in a.keys() | b.keys():
        kinds = found[name[:64]]
        if name not in a or name not in b:
            kinds.add("lacking_b" if name in a else "lacking_a")
        elif len(a[name]) != len(b[name]):
            kinds.add("size")
        elif reads and a[name] != b[name]:
            kinds.add("bytes")
    return {page: kinds for page, kinds in found.items() if kinds}


def compared(invoke: Invoke, a: Path, b: Path, *options: object) -> dict[str, Any]:
    """Return the document of `diff`, after a look at its exit status."""
    words = ("diff", a, b, "--grace", "0s", *options)
    differs = differences(objects_in(a), objects_in(b), reads="--verify" in options)
    document = invoke.document(*words, exit_code=4 if differs else 0)
    sums = {name: sum(one["pages"] for one in document["sums"] if one["difference"] == name)
            for name in ("equal", "only-in-a", "only-in-b")}  # fmt: skip
    assert sums == {
        name.replace("_", "-"): document[name] for name in ("equal", "only_in_a", "only_in_b")
    }
    check_rows(document, objects_in(a), objects_in(b), reads="--verify" in options)
    return document


def check_rows(document: dict[str, Any], a: Files, b: Files, *, reads: bool) -> None:
    """Compare the rows of a document with the files."""
    rows = document["differences"]
    for letter, only in (("a", b.keys() - a.keys()), ("b", a.keys() - b.keys())):
        lacking = Counter(name[:64] for name in only)
        said: Counter[str] = Counter()
        for row in rows:
            said[row["page"]] += row[f"lacking_{letter}"]
        assert +said == lacking
    expected = differences(a, b, reads=reads)
    assert {row["page"] for row in rows} == expected.keys()
    for row in rows:
        if row["difference"] in ("size", "bytes"):
            assert row["difference"] in expected[row["page"]]
            assert differences(
                {row["key"]: a[row["key"]]}, {row["key"]: b[row["key"]]}, reads=reads
            )
    # Bytes are read of pages that are equal in all else.
    assert {row["page"] for row in rows if row["difference"] == "size"} == {
        page for page, kinds in expected.items() if "size" in kinds
    }


def check_migrations(
    invoke: Invoke, document: dict[str, Any], a: Path, b: Path, *options: object
) -> None:
    """Compare a document with what copies in both directions would do."""
    every = ("--grace", "0s", "--include-partial", "--include-damaged", "--dry-run", *options)
    rows = document["differences"]
    contested = [row for row in rows if row["difference"] == "size"]
    for source, target, has, lacks in ((a, b, "a", "b"), (b, a, "b", "a")):
        copied = [
            row
            for row in rows
            if row["difference"] in (f"only-in-{has}", "incomplete")
            and row[f"lacking_{lacks}"]
            and row[f"state_{has}"] != "unknown"  # ambiguous
        ]
        migrate = ("migrate", source, target, *every)
        if (status := run([str(word) for word in migrate])) == 2:
            said = invoke(*migrate, exit_code=2).stderr  # also without a page in common
            assert "under the keys to write, but they should have" in said
            continue
        planned = invoke.document(*migrate, exit_code=status)
        assert (status == 4) == bool(planned["conflicts"])
        # Pages whose keys are ambiguous are compared by key, but not copied.
        assert 0 <= len(contested) - planned["conflicts"] <= planned["left_out"]
        assert planned["pages"] == len(copied)
        assert planned["objects"] == sum(row[f"lacking_{lacks}"] for row in copied)


@pytest.mark.parametrize(
    ("one", "other"), PAIRS, ids=["-".join(store_name(*each) for each in pair) for pair in PAIRS]
)
def test_a_pair_of_stores_differs_as_its_files_do(
    sglang_store: WriteStore, invoke: Invoke, one: tuple[str, str], other: tuple[str, str]
) -> None:
    a, b = (sglang_store(case, layout=layout)[0] for case, layout in (one, other))
    check_migrations(invoke, compared(invoke, a, b), a, b)
    compared(invoke, b, a, "--verify")


def damaged(store: Path, copy: Path, manifest: Manifest, turn: int) -> Path:
    """Copy a store without some objects, and with others short, long or of other bytes."""
    shutil.copytree(store, copy)
    for number, entry in enumerate(manifest["objects"]):
        path = copy / entry["file"]
        value = path.read_bytes() if path.exists() else b""
        match (number + turn) % EACH:
            case 0:
                path.unlink()
            case 1 if turn:
                path.write_bytes(value[: len(value) // 2])
            case 2 if turn:
                path.write_bytes(value + b"\0")
            case 3:
                path.write_bytes(bytes([value[0] ^ 1]) + value[1:] if value else b"")
    for path in sorted(copy.glob("*.bin"))[: 1 + turn]:
        for rest in copy.glob(f"{path.name[:64]}*"):  # a whole page
            rest.unlink()
    return copy


@pytest.mark.parametrize(
    ("case", "layout"), STORES, ids=[store_name(*variant) for variant in STORES]
)
def test_a_damaged_copy_differs_as_its_files_do(
    sglang_store: WriteStore, invoke: Invoke, tmp_path: Path, case: str, layout: str
) -> None:
    store, manifest = sglang_store(case, layout=layout)
    a = damaged(store, tmp_path / "a", manifest, 0)
    b = damaged(store, tmp_path / "b", manifest, 3)
    profile = ("--profile", profile_files(manifest, tmp_path)[0])
    for options in ((), profile):
        check_migrations(invoke, compared(invoke, a, b, *options), a, b, *options)
        compared(invoke, a, b, "--verify", *options)
    before = objects_in(a), objects_in(b)
    os.utime(a)
    assert (objects_in(a), objects_in(b)) == before


def test_a_store_that_is_being_filled_differs_in_what_is_old(
    sglang_store: WriteStore, sglang_session: SglangSession, invoke: Invoke, tmp_path: Path
) -> None:
    """Pages that SGLang's own file backend writes meanwhile are in flight, and no difference."""
    pristine, manifest = sglang_store("hybrid_mamba")
    manifest = {**manifest, "node_pages": CASES["hybrid_mamba"].node_pages}
    a, b = tmp_path / "a", tmp_path / "b"
    shutil.copytree(pristine, a)
    age(a)
    shutil.copytree(a, b)
    lost, changed, *others = manifest["pages"]
    for path in b.glob(f"{lost}*"):
        path.unlink()
    path = next(b.glob(f"{changed}*"))
    path.write_bytes(path.read_bytes()[::-1])
    age(b)
    documents: list[dict[str, Any]] = []
    with BusyStore(sglang_session, a, manifest, tmp_path / "server") as server:
        rounds = [server.serve("fill", rank) for rank in range(2)]
        server.wait_until(lambda: all(lines(log) for log in rounds))
        began = time.monotonic()
        while len(documents) < 2 or time.monotonic() < began + WATCHED_S:
            assert time.monotonic() < began + PATIENCE_S
            for pair, only in (((a, b), "only-in-a"), ((b, a), "only-in-b")):
                document = invoke.document("diff", *pair, "--verify", exit_code=4)
                kinds = {row["page"]: row["difference"] for row in document["differences"]}
                assert kinds == {lost: only, changed: "bytes"}
                assert document["equal"] == len(others)
                documents.append(document)
        server.stop()
    in_flight = [document["in_flight"] for document in documents]
    assert 0 < in_flight[0] < in_flight[-1]
    shutil.rmtree(a)  # hundreds of megabytes
