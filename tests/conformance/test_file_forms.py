"""SGLang's own file backend beside our forms of a directory: trailers and folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from hicachectl.backends.base import Status
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.urls import parse_url
from hicachectl.formats.identity import Identity
from hicachectl.formats.trailer import TRAILER_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession, WriteStore
    from tests.conftest import Invoke

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-file-forms")]


def _into_folders(source: Path, target: Path) -> None:
    """Copy all objects into a directory with folders, and give them trailers."""
    url = parse_url(f"file://{target}?folders=hex2")
    with FileStore(source) as one, FileStore.create(url) as other:
        rows = pa.Table.from_batches(list(one.scan(("nbytes", "mtime_ns"))))
        suffixes = {key[64:].decode() for key in rows.column("key").to_pylist()}
        pools = {suffix: "mamba" if suffix.startswith(".mamba_") else "kv" for suffix in suffixes}
        identities = {
            ("", suffix): Identity(model="m", weights="w", pool=pool)
            for suffix, pool in pools.items()
        }
        other.write_trailers(identities, "xxh3")
        sizes = rows.column("nbytes").to_numpy()
        statuses = other.copy_from(one, rows, rows, sizes, if_absent=True).statuses
        assert (statuses == Status.OK).all()


def test_sglang_sees_no_folders_and_reads_through_trailers(
    invoke: Invoke, sglang_store: WriteStore, sglang_session: SglangSession, tmp_path: Path
) -> None:
    """Proves that a folder holds no hit, and that all ranks read files with trailers whole."""
    source, manifest = sglang_store("hybrid_mamba")
    folders, flat = tmp_path / "folders", tmp_path / "flat"
    _into_folders(source, folders)
    sizes = {path.name: path.stat().st_size for path in folders.glob("??/*.bin")}
    assert sizes == {p.name: p.stat().st_size + TRAILER_BYTES for p in source.glob("*.bin")}
    assert [rank["hit_pages"] for rank in sglang_session.read_back(folders, "file", manifest)] == [
        0,
        0,
    ]
    assert sizes == {path.name: path.stat().st_size for path in folders.glob("??/*.bin")}
    invoke("migrate", folders, flat)
    assert sizes == {path.name: path.stat().st_size for path in flat.glob("*.bin")}
    results = sglang_session.read_back(flat, "file", manifest)
    assert [result["hit_pages"] for result in results] == [8, 8]
    assert all(result["wrong"] == {"kv": [], "mamba": []} for result in results)
    assert all(result["read"]["mamba"] == [2, 5, 7] for result in results)
