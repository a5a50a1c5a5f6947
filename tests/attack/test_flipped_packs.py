"""Packs with damaged bytes in every region: `verify` finds the damage, or all reads stay the same.

The pack records no profile, so value checks cannot help: only its own digests do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.__main__ import run
from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import open_store, scan_schema
from hicachectl.cli.demo_store import fill
from tests.backends.pack import pack_files

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

PAGES = 3
FLIPS_A_REGION = 30
HEAD = 104  # bytes of a record before its key


class Region(NamedTuple):
    """A stretch of the file. harmless: none of its bytes affects a reader."""

    name: str
    start: int
    stop: int
    harmless: bool = False


def write(path: Path) -> None:
    """Write a pack twice: dead records, an old index and an old trailer stay in the middle."""
    with open_store(f"pack://{path}?keys=file", create=True) as store:
        fill(store, PAGES)
    with open_store(f"pack://{path}", create=True) as store, Arena(1 << 20) as arena:
        store.attach(arena)
        arena.view(0, 5000)[:] = np.random.default_rng(1).integers(0, 256, 5000)
        rows = pa.table({"key": pa.array([b"a foreign key", b"withdrawn"], pa.binary())})
        offsets, sizes = np.array([0, 2500]), np.array([2500, 2500])
        assert store.write_from(rows, offsets, sizes, if_absent=True).all_ok
        assert store.undo_writes(rows.slice(1)).all_ok


def contents(path: Path) -> dict[bytes, bytes]:
    """Return every object; fail if one cannot be read."""
    with open_store(f"pack://{path}") as store:
        listed = pa.Table.from_batches(store.scan(), schema=scan_schema(("nbytes", "mtime_ns")))
        sizes = listed.column("nbytes").to_numpy()
        offsets, total = place(sizes)
        with Arena(max(total, 1)) as arena:
            store.attach(arena)
            assert store.read_into(listed, np.asarray(offsets), sizes).all_ok
            return {
                key: arena.view(offset, size).tobytes()
                for key, offset, size in zip(
                    listed.column("key").to_pylist(), offsets, sizes.tolist(), strict=True
                )
            }


def regions(path: Path) -> list[Region]:
    """Divide the file into regions, as hcpack(5) describes them.

    Harmless are the unused last four bytes of the header and of every record head, metadata records
    (the index repeats them; only `pack repair` reads them), and leftovers of a later writer:
    withdrawn objects, and earlier indexes and trailers.
    """
    found = pack_files.records(path)
    alive = {row["offset"] for row in pack_files.indexed(path).values()}
    size = path.stat().st_size
    cut = [Region("header", 0, 28), Region("header padding", 28, 32, harmless=True)]
    for record in found:
        end = record.offset + record.length
        last_index = end == size - pack_files.TRAILER_BYTES
        if record.offset not in alive and not last_index:
            cut.append(Region("dead record", record.offset, end, harmless=True))
            continue
        kind = "index" if last_index else "object"
        body = record.offset + HEAD + len(record.key)
        cut += [
            Region(f"{kind} head", record.offset, record.offset + 100),
            Region(f"{kind} head padding", record.offset + 100, record.offset + HEAD, True),
            Region("key", record.offset + HEAD, body),
            Region(f"{kind} content", body, end),
        ]
    cut.append(Region("trailer", size - pack_files.TRAILER_BYTES, size))
    starts = [region.start for region in cut] + [size]
    gaps = [
        Region("old trailer", region.stop, start, harmless=True)
        for region, start in zip(cut, starts[1:], strict=True)
        if region.stop < start
    ]
    return [region for region in sorted([*cut, *gaps], key=lambda r: r.start) if len_of(region)]


def len_of(region: Region) -> int:
    return region.stop - region.start


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "x.hcpack"
    write(path)
    return path


def test_the_regions_are_the_whole_file(pack: Path) -> None:
    cut = regions(pack)
    assert (cut[0].start, cut[-1].stop) == (0, pack.stat().st_size)
    assert all(one.stop == two.start for one, two in pairwise(cut))
    assert {region.name for region in cut} >= {"key", "index content", "old trailer", "trailer"}


def test_the_pack_is_clean_and_every_byte_of_its_objects_is_read(
    invoke: Invoke, pack: Path
) -> None:
    document = invoke("verify", f"pack://{pack}", "--format", "json").document
    assert document["counts"] == {"foreign-object": 1}
    assert "digests" in document["checks"]
    assert document["bytes_read"] == sum(map(len, contents(pack).values()))


@pytest.mark.parametrize("kind", ["bit", "byte", "run"])
def test_no_damage_is_called_clean(
    pack: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    original, held = pack.read_bytes(), contents(pack)
    cut: dict[str, list[Region]] = {}
    for region in regions(pack):
        cut.setdefault(region.name, []).append(region)
    rng = np.random.default_rng({"bit": 1, "byte": 2, "run": 3}[kind])
    damaged_pack = tmp_path / "damaged.hcpack"
    clean = []
    for several in cut.values():
        for _ in range(FLIPS_A_REGION // 3):
            region = several[rng.integers(len(several))]
            at = int(rng.integers(region.start, region.stop))
            damaged = bytearray(original)
            if kind == "bit":
                damaged[at] ^= 1 << int(rng.integers(8))
            elif kind == "byte":
                damaged[at] ^= int(rng.integers(1, 256))
            else:
                stop = min(region.stop, at + int(rng.integers(2, 64)))
                damaged[at:stop] = bytes(byte ^ 0x55 for byte in damaged[at:stop])
            damaged_pack.write_bytes(damaged)
            status = run(["-q", "verify", f"pack://{damaged_pack}"])
            said = capfd.readouterr()
            assert status in (0, 2, 4), f"{region} at {at}: {status}\n{said.out}{said.err}"
            if region.harmless:
                assert status == 0, f"{region} at {at}\n{said.out}{said.err}"
                assert contents(damaged_pack) == held
            elif status == 0:
                clean.append((region, at))
    assert clean == []
