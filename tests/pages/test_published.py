"""A published listing, read in parts, is the inventory of the whole store."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.base import open_store, scan_schema
from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.epochs import begin_epoch
from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.errors import FormatError, ProfileError
from hicachectl.formats.profile import parse_profile
from hicachectl.io import table_files
from hicachectl.io.table_files import read_share
from hicachectl.pages import scanning
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.listing import page_rows
from hicachectl.pages.published import (
    Listed,
    Listing,
    inventory_of,
    publish_listing,
    publish_rows,
)
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.tally import Tally, tally_of
from tests.move.migrations import demo_store
from tests.pages.test_contested import (
    BARE,
    MINE,
    NARROW,
    NARROW_BYTES,
    RANKS,
    THEIRS,
    WIDE,
    WIDE_BYTES,
    write_profile,
)
from tests.speed import examples
from tests.stores import page, put_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory

PARTS = (1, 2, 7)
IN_MEMORY, IN_FILES = scanning.MEMORY_ROWS, 10  # objects held in memory


@dataclass
class Objects:
    """A store of listed objects: key to size and time."""

    found: dict[bytes, tuple[int | None, int | None]]
    grammar: str = "file"
    url: str = "file:///objects"
    traits: Any = field(default_factory=lambda: SimpleNamespace(columns={"nbytes", "mtime_ns"}))

    def scan(self, columns: Any) -> Iterator[pa.RecordBatch]:
        rows = [(key, *facts) for key, facts in self.found.items()]
        for start in range(0, len(rows), 7):
            columns_of = map(list, zip(*rows[start : start + 7], strict=True))
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array(values, column.type)
                    for values, column in zip(columns_of, scan_schema(columns), strict=True)
                ],
                schema=scan_schema(columns),
            )


def publish(
    store: Store, profile: Profile | None, folder: Path | str, parts: int, memory_rows: int
) -> tuple[Listed, Listing, list[Inventory]]:
    """Publish a listing and read it again, with the decisions through JSON."""
    with Directory.named(str(folder), writes=True) as directory:
        listed = publish_listing(store, profile, directory, parts, memory_rows=memory_rows)
        mapping = json.loads(json.dumps(listed.listing.to_mapping()))
        listing = Listing.from_mapping(mapping, store.grammar, profile, "run.json")
        tables = [
            read_share(directory, listed.files, share, listing.schema, "list again")
            for share in listed.shares
        ]
        assert set(directory.entries()) == {file.name for file in listed.files}
    assert replace(listing.table, grammar=listed.listing.table.grammar) == listed.listing.table
    assert listing.schema == listed.listing.schema
    return listed, listing, [inventory_of(table, listing.table) for table in tables]


def rows_of(inventory: Inventory) -> list[tuple[str, ...]]:
    """Return all facts of each object, with a time of clearing, which most parts leave out."""
    rows = inventory.objects.to_pylist()
    ids = inventory.affix_ids.tolist()
    return [
        tuple(map(str, sorted({"cleared_ns": None, **row, "affix": affix}.items())))
        for row, affix in zip(rows, ids, strict=True)
    ]


def assert_parts_are_the_whole(
    store: Store, profile: Profile | None, folder: Path | str, parts: int, memory_rows: int
) -> None:
    whole = take_inventory(store, profile)
    listed, listing, inventories = publish(store, profile, folder, parts, memory_rows)
    assert replace(listing.table, grammar=whole.table.grammar) == whole.table
    assert sum(file.rows for file in listed.files) == len(whole.objects)
    names = {name for one in inventories for name in one.objects.column_names}
    assert names == set(whole.objects.column_names)
    found = [row for inventory in inventories for row in rows_of(inventory)]
    assert sorted(found) == sorted(rows_of(whole))
    for part, inventory in enumerate(inventories):
        assert part == 0 or not inventory.is_foreign.any()
        hashes = [int(page, 16) for page in inventory.pages().to_pylist() if page is not None]
        assert {(number >> 192) * parts >> 64 for number in hashes} <= {part}
    groups = [row for one in inventories for row in states_of(one)]
    assert sorted(groups) == sorted(states_of(whole))


@pytest.mark.parametrize("change", ["tp_size", "heads", "sizes"])
def test_a_listing_that_claims_too_much_is_refused(tmp_path: Path, change: str) -> None:
    """Numbers that would take all memory, or overflow, are refused before they are used."""
    put_pages(tmp_path, range(2), "_m_0_1")
    (folder := tmp_path / "run").mkdir()
    with open_store(str(tmp_path)) as store:
        listed, _, _ = publish(store, None, folder, 1, IN_MEMORY)
        mapping = json.loads(json.dumps(listed.listing.to_mapping()))
        shard = mapping["resolved"][0][0]["shard"]
        if change == "sizes":
            mapping["sizes"][0][0] = 2**70
        else:
            shard[change] = {"tp_size": 2**62, "heads": [0, 2**62]}[change]
        with pytest.raises(FormatError, match=r"^run.json: "):
            Listing.from_mapping(mapping, store.grammar, None, "run.json")


def test_counts_must_have_the_first_key_of_each_ambiguous_affix(tmp_path: Path) -> None:
    """A report names these keys, so counts without one, or with one too many, are refused."""
    put_pages(tmp_path, range(2), "_m_1_2_1")  # a model m_1_2 of rank 1, or m of stage 1
    with open_store(str(tmp_path)) as store:
        inventory = take_inventory(store)
    table = inventory.table
    counts = tally_of(PageGroups(inventory)).to_mapping()
    ambiguous = [affix for affix, one in enumerate(table.resolved) if one.ambiguous]
    assert [affix for affix, _ in counts["first_keys"]] == ambiguous
    assert Tally.from_mapping(counts, table, "result").pages == 2
    for keys in ([], [[0, ""], [1, ""]]):
        with pytest.raises(FormatError, match="has the first keys of other affixes"):
            Tally.from_mapping({**counts, "first_keys": keys}, table, "result")


@pytest.mark.slow
@pytest.mark.parametrize("memory_rows", [IN_MEMORY, IN_FILES])
@pytest.mark.parametrize("parts", PARTS)
def test_rows_about_objects_are_divided_as_the_objects(
    tmp_path: Path, parts: int, memory_rows: int
) -> None:
    """Each part gets the rows of its objects; rows of foreign keys are the first part's."""
    (copied := tmp_path / "store").mkdir()
    put_pages(copied, range(15), "_m_0_1")
    schema = pa.schema([("key", pa.binary()), ("nbytes", pa.int64()), ("note", pa.string())])
    (tmp_path / "run").mkdir()
    with (
        open_store(str(copied)) as store,
        Directory.named(str(tmp_path / "run"), writes=True) as directory,
    ):
        listed = publish_listing(store, None, directory, parts, memory_rows=memory_rows)
        keys = [b"notes", *(key for batch in store.scan(["key"]) for key in batch[0].to_pylist())]
        rows = [{"key": key, "nbytes": 1, "note": key.decode()} for key in reversed(keys)]
        batches = pa.Table.from_pylist(rows, schema).to_batches(max_chunksize=4)
        files = publish_rows(
            batches, schema, directory, listed.shares, "notes-",
            on_batch=lambda objects: None, memory_rows=memory_rows,
        )  # fmt: skip
        assert set(directory.entries()) == {file.name for file in [*listed.files, *files]}
        for number, share in enumerate(listed.shares):
            objects = read_share(directory, listed.files, share, listed.listing.schema, "again")
            notes = read_share(directory, files, share, schema, "again")
            own = {key.decode() for key in objects.column("key").to_pylist()}
            assert set(notes.column("note").to_pylist()) == own | (
                {"notes"} if number == 0 else set()
            )


def states_of(inventory: Inventory) -> list[tuple[str, ...]]:
    columns = ("page", "group", "model", "state", "nbytes", "pools", "missing")
    rows = page_rows(PageGroups(inventory)).select(columns).to_pylist()
    return [tuple(str(row[name]) for name in columns) for row in rows]


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def rename_as_foreign(path: Path) -> None:
    path.rename(path.with_suffix(".old"))


def rename_without_hash(path: Path) -> None:
    path.rename(path.with_name("notes.txt"))


def rename_as_no_text(path: Path) -> None:
    os.rename(path, os.fsencode(path) + b"\xff")  # noqa: PTH104


def rename_as_temporary(path: Path) -> None:
    path.rename(path.with_name(f".{path.name}.tmp-1-2"))


def age(path: Path) -> None:
    os.utime(path, (1, 1))


@pytest.fixture(scope="module", autouse=True)
def _no_syncs() -> Iterator[None]:
    """Hundreds of small files, none of which needs to outlast the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_store(tmp_path_factory.mktemp("demo") / "store", pages=8)


@pytest.mark.slow
@pytest.mark.parametrize("memory_rows", [IN_MEMORY, IN_FILES])
@pytest.mark.parametrize(
    "damage",
    [
        age, empty, lengthen, remove, rename_as_foreign, rename_as_no_text, rename_as_temporary,
        rename_without_hash, truncate,
    ],
)  # fmt: skip
def test_the_damaged_demo_store(demo: Path, tmp_path: Path, damage: Any, memory_rows: int) -> None:
    """Some objects of different pages and pools are damaged, with and without a profile."""
    store = tmp_path / "store"
    store.mkdir()
    for path in demo.iterdir():
        if path.is_file():
            os.link(path, store / path.name)
    paths = sorted(store.iterdir())
    for path in paths[:: len(paths) // 5]:
        content, facts = path.read_bytes(), path.stat()
        path.unlink()  # the demo's file has the other name
        path.write_bytes(content)
        os.utime(path, ns=(facts.st_mtime_ns, facts.st_mtime_ns))
        damage(path)
    with open_store(str(store)) as opened:
        for parts, profile in ((2, PROFILE), (7, None)):
            (folder := tmp_path / str(parts)).mkdir()
            assert_parts_are_the_whole(opened, profile, folder, parts, memory_rows)


@pytest.mark.slow
def test_two_models_that_share_keys(tmp_path: Path) -> None:
    """Their pages are marked after the scan has gone to files."""
    (store := tmp_path / "store").mkdir()
    put_pages(store, MINE, *RANKS, nbytes=WIDE_BYTES)
    put_pages(store, THEIRS, BARE, nbytes=NARROW_BYTES)
    with open_store(str(store)) as opened:
        (folder := tmp_path / "run").mkdir()
        assert_parts_are_the_whole(opened, None, folder, 7, IN_FILES)
        table = take_inventory(opened).table
        assert any(one.ambiguous for one in table.resolved)


# Page hashes: ordinary ones, some that share their first word, and bounds of parts.
WORDS = [0, 2**63 - 1, 2**63, 2**64 - 1, *(-(-part * 2**64 // 7) for part in range(1, 7))]
FORGED = [f"{word:016x}{'0' * 47}{rest:x}" for word in WORDS for rest in range(3)]
HASHES = [*FORGED, *map(page, range(12))]
STEMS = [*RANKS, BARE, ".draft" + BARE, f".indexer{BARE}", f".mamba{BARE}_0_4", "_other"]
ODD_KEYS = [b"notes.txt", b"\xff\xfe", b"a" * 63, *(HASHES[n].encode() + b".old" for n in (2, 9))]

blocks = st.tuples(
    st.slices(len(HASHES)),
    st.lists(st.sampled_from(STEMS), min_size=1, max_size=3),
    st.sampled_from([WIDE_BYTES, NARROW_BYTES, 100, 0, None]),
    st.sampled_from([None, 1, 10**18]),
)


@st.composite
def stores(draw: st.DrawFn) -> Objects:
    found: dict[bytes, tuple[int | None, int | None]] = {}
    for chosen, stems, nbytes, time in draw(st.lists(blocks, max_size=5)):
        for page_hash in HASHES[chosen]:
            for stem in stems:
                found[f"{page_hash}{stem}.bin".encode()] = nbytes, time
    for key in draw(st.lists(st.sampled_from(ODD_KEYS), unique=True)):
        found[key] = 5, None
    return Objects(found)


@pytest.mark.slow
@pytest.mark.parametrize("memory_rows", [IN_MEMORY, IN_FILES])
@pytest.mark.parametrize("model", [None, WIDE, NARROW])
@examples(15)
@given(store=stores(), parts=st.sampled_from(PARTS))
def test_any_store(
    profiles: dict[str | None, Profile], model: str | None, memory_rows: int, store: Any, parts: int
) -> None:
    """A profile that contradicts the store is refused with the same message."""
    profile = profiles[model]
    with TemporaryDirectory() as folder:
        refusal = contradiction(lambda: take_inventory(store, profile))
        if refusal:
            with Directory.named(folder, writes=True) as directory:
                assert refusal == contradiction(
                    lambda: publish_listing(
                        store, profile, directory, parts, memory_rows=memory_rows
                    )
                )
        else:
            assert_parts_are_the_whole(store, profile, folder, parts, memory_rows)


def contradiction(listing: Callable[[], object]) -> str:
    try:
        listing()
    except ProfileError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Profile | None]:
    folder = tmp_path_factory.mktemp("profiles")
    return {
        None: None,
        **{
            model: parse_profile(write_profile(folder / "p.toml", model).read_text())
            for model in (WIDE, NARROW)
        },
    }


@pytest.mark.slow
def test_each_part_reads_only_its_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large parts have several row groups, and no row group has objects of two parts."""
    monkeypatch.setattr(table_files, "_GROUP_ROWS", 8)
    store = Objects({f"{page(n)}_m.bin".encode(): (8, 1) for n in range(160)})
    for memory_rows in (IN_MEMORY, 50):
        (folder := tmp_path / str(memory_rows)).mkdir()
        listed, _, _ = publish(cast("Store", store), None, folder, 7, memory_rows)
        groups = [
            (name, group) for share in listed.shares for name, own in share.items() for group in own
        ]
        assert len(groups) == len(set(groups)) >= 160 // 8
        assert sum(file.rows for file in listed.files) == 160
    assert len(listed.files) > 50


def test_the_number_of_parts_can_depend_on_the_number_of_objects(tmp_path: Path) -> None:
    store = Objects({f"{page(n)}_m.bin".encode(): (8, 1) for n in range(40)})
    with Directory.named(str(tmp_path), writes=True) as directory:
        listed = publish_listing(cast("Store", store), None, directory, lambda n: n // 10)
    assert len(listed.shares) == 4


@pytest.mark.parametrize("damage", [truncate, lengthen, remove])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Any) -> None:
    store = Objects({f"{page(n)}_m.bin".encode(): (8, 1) for n in range(40)})
    with Directory.named(str(tmp_path), writes=True) as directory:
        listed = publish_listing(cast("Store", store), None, directory, 2)
        damage(tmp_path / listed.files[0].name)
        schema = listed.listing.schema
        with pytest.raises(FormatError, match=r"00\.parquet: .*; list again"):
            read_share(directory, listed.files, listed.shares[1], schema, "list again")


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_cleared_objects_are_part_0s(tmp_path: Path, parts: int) -> None:
    root = demo_store(tmp_path / "store", pages=4)
    suffix = next(path for path in root.glob("*.bin") if "mamba" in path.name).name[64:]
    with ObjectDirectory.open(str(root)) as directory:
        begin_epoch(directory, [suffix.encode()])
    with open_store(str(root)) as store:
        assert len(take_inventory(store, PROFILE).cleared_rows)
        for number, memory_rows in enumerate((IN_MEMORY, IN_FILES)):
            folder = tmp_path / str(number)
            folder.mkdir()
            assert_parts_are_the_whole(store, PROFILE, folder, parts, memory_rows)


def test_a_listing_without_some_affixes_is_refused(tmp_path: Path) -> None:
    with (
        open_store(str(demo_store(tmp_path / "store", pages=2))) as store,
        Directory.named(str(tmp_path), writes=True) as directory,
    ):
        listed = publish_listing(store, PROFILE, directory, 1)
        mapping = listed.listing.to_mapping()
        mapping["affixes"] = mapping["affixes"][:1]
        with pytest.raises(FormatError, match=r"run\.json: does not fit"):
            Listing.from_mapping(mapping, store.grammar, PROFILE, "run.json")
    with pytest.raises(FormatError, match="missing"):
        Listing.from_mapping({}, "file", None, "run.json")
