"""Tests of markers: what one process writes, every other reads; hostile files are refused."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.object_files import markers as file_markers
from hicachectl.backends.object_files.markers import Marker, read_markers, write_marker
from hicachectl.formats.errors import FormatError, UntrustedError
from hicachectl.formats.identity import Identity
from hicachectl.formats.marker import dump_marker, parse_marker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IDENTITY = Identity(model="a-b", weights="w1", dtype="bfloat16", page_size=64, layer_bytes=512)
MARKER = Marker("_a-b_0_2.bin", 4096, IDENTITY, "xxh3")
OTHERS = [
    MARKER._replace(suffix=".indexer_a-b.bin"),
    MARKER._replace(identity=Identity(model="a-b", weights="w2", part="k")),
]


def _write(path: Path, marker: Marker) -> None:
    with Directory.named(str(path), writes=True) as directory:
        write_marker(directory, marker)


def _read(path: Path) -> list[Marker]:
    with Directory.named(str(path), writes=False) as directory:
        return read_markers(directory)


def test_markers_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert _read(tmp_path) == []
    for marker in (MARKER, *OTHERS):
        _write(tmp_path, marker)
    assert set(_read(tmp_path)) == {MARKER, *OTHERS}


def test_a_marker_that_is_there_stays_untouched(tmp_path: Path) -> None:
    """Proves that a second writer changes no file, so that listings need not read it again."""
    _write(tmp_path, MARKER)
    folder = tmp_path / ".hicachectl" / "plugin"
    before = (folder / MARKER.name).stat(), folder.stat()
    _write(tmp_path, MARKER)
    assert ((folder / MARKER.name).stat(), folder.stat()) == before


def test_writers_of_one_marker_may_race(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: _write(tmp_path, MARKER), range(64)))
    assert _read(tmp_path) == [MARKER]
    assert [path.name for path in (tmp_path / ".hicachectl" / "plugin").iterdir()] == [MARKER.name]


def test_files_with_other_names_are_ignored(tmp_path: Path) -> None:
    _write(tmp_path, MARKER)
    for name in (".hicachectl-1-aa.tmp", "README", "x.json"):
        (tmp_path / ".hicachectl" / "plugin" / name).write_text("{")
    assert _read(tmp_path) == [MARKER]


def _changed(**fields: Any) -> bytes:
    return json.dumps(json.loads(dump_marker(MARKER)) | fields).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"[" * 4000, "values"),
        (b'{"form":' * 60 + b"1" + b"}" * 60, "."),
        (b"[]", "not a JSON object"),
        (b" " * (1 << 20), "larger than 16384 bytes"),
        (_changed(form=2), "newer hicachectl"),
        (_changed(nbytes=-1), "nbytes"),
        (_changed(nbytes=1 << 60), "nbytes"),
        (_changed(nbytes=True), "nbytes"),
        (_changed(suffix=""), "suffix"),
        (_changed(suffix="x" * 256), "suffix"),
        (_changed(digest="md5"), "digest"),
        (_changed(identity="00" * 16), "does not match its facts"),
        (_changed(facts={}), "model"),
        (_changed(more=1), "more"),
        (_changed(suffix="\ud800"), "."),
        (dump_marker(OTHERS[0]), "belongs under"),
    ],
)
def test_a_hostile_marker_is_one_line_that_names_its_file(
    tmp_path: Path, data: bytes, message: str
) -> None:
    _write(tmp_path, MARKER)
    (tmp_path / ".hicachectl" / "plugin" / MARKER.name).write_bytes(data)
    with pytest.raises(FormatError, match=message) as caught:
        _read(tmp_path)
    assert MARKER.name in str(caught.value)
    remedy = "use a newer hicachectl" if message == "newer hicachectl" else "remove the file"
    assert str(caught.value).endswith(f"; {remedy}")
    assert "\n" not in str(caught.value)


def _link(marker: Path) -> None:
    marker.rename(marker.with_name("aside"))
    marker.symlink_to("aside")


def _fifo(marker: Path) -> None:
    marker.unlink()
    os.mkfifo(marker)


def _linked_folder(marker: Path) -> None:
    marker.parent.rename(marker.parent.with_name("aside"))
    marker.parent.symlink_to("aside")


@pytest.mark.parametrize("change", [_link, _fifo, _linked_folder])
def test_only_plain_files_in_plain_folders_are_read(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    _write(tmp_path, MARKER)
    change(tmp_path / ".hicachectl" / "plugin" / MARKER.name)
    with pytest.raises(UntrustedError):
        _read(tmp_path)


def test_the_number_of_markers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, MARKER)
    _write(tmp_path, OTHERS[0])
    monkeypatch.setattr(file_markers, "MAX_MARKERS", 1)
    with pytest.raises(FormatError, match="more than 1 files"):
        _read(tmp_path)


def test_a_marker_names_its_source_when_it_is_cut() -> None:
    data = dump_marker(MARKER)
    for size in range(len(data) - 2):
        with pytest.raises(FormatError, match=r"^here: "):
            parse_marker(data[:size], "here")
