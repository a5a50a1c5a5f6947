"""Packs with records that no writer makes: the pack, the place and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import open_store
from hicachectl.formats.errors import FormatError
from tests.backends.pack import pack_files
from tests.backends.pack.pack_files import INDEX, METADATA, OBJECT, record
from tests.stores import page

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

KEY = f"{page(0)}_m_0_1.bin".encode()
BEGIN = pack_files.header() + pack_files.metadata()


def ended(entry: bytes, length: int | None = None) -> bytes:
    """Return a pack whose trailer names a record as the index."""
    length = len(entry) if length is None else length
    return BEGIN + entry + pack_files.trailer(len(BEGIN), length)


COMPRESSED = record(INDEX, b"", bytes(64), planes=[bytes(8)])
BEYOND = record(INDEX, b"", b"", planes=[bytes(1000)], nbytes=1000)[:-1000]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ended(COMPRESSED), "the record is compressed, which is not allowed here"),
        (ended(BEYOND), "the file ends within the record"),
        (ended(record(OBJECT, KEY, b"x")), "the record's kind or length differs from the trailer"),
        (ended(record(INDEX, b"", b"x", digest=bytes(32))), "the content does not match"),
    ],
    ids=["compressed", "cut", "another kind", "another digest"],
)
def test_an_index_that_is_none_is_named_with_its_place_and_the_repair(
    invoke: Invoke, tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "x.hcpack"
    path.write_bytes(content)
    (message,) = invoke("ls", f"pack://{path}", exit_code=2).stderr.splitlines()
    assert message.startswith(f"hicachectl: {path}: ")
    assert f"offset {len(BEGIN)}" in message
    assert said in message
    assert "pack repair" in message


@pytest.mark.parametrize("nbytes", [None, 5 << 20])
def test_a_cut_pack_without_its_metadata_is_not_continued(
    tmp_path: Path, nbytes: int | None
) -> None:
    path = tmp_path / "x.hcpack"
    metadata = b"" if nbytes is None else record(METADATA, b"", bytes(nbytes))
    path.write_bytes(pack_files.header() + metadata + record(OBJECT, KEY, b"x"))
    said = f"{path}: the pack's metadata is missing or damaged; write to a new pack"
    with pytest.raises(FormatError, match=said):
        open_store(f"pack://{path}?keys=file", create=True)
