"""Fingerprints of model directories: what counts, what does not, and what is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.disk.weights import read_checkpoint
from hicachectl.formats.errors import FormatError, HicacheError, UsageError
from hicachectl.formats.weights import read_header
from tests.checkpoints import flip, shard_header, write_checkpoint, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
INDEX = "model.safetensors.index.json"
SHARDS: dict[str, dict[str, Any]] = {
    FIRST: {"embed": ("BF16", (512, 64)), "q": ("F8_E4M3", (300, 100)), "scale": ("F32", (3,))},
    SECOND: {"head": ("BF16", (64, 512)), "norm": ("F32", (64,))},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), SHARDS)


def name_of(directory: Path) -> str:
    name = read_checkpoint(directory).fingerprint
    assert len(name) == 32
    assert int(name, 16) >= 0
    return name


def test_fingerprints_are_those_of_earlier_releases(model: Path) -> None:
    """They are in profiles, in stamps, and through identities in every trailer."""
    assert name_of(model) == "2f6077b333cb3026b902f599d1e8e774"


@pytest.mark.slow
@given(st.data())
def test_each_byte_that_is_read_counts(model: Path, data: st.DataObject) -> None:
    """A flipped byte of a header or sample is seen, whatever the file's size and times say."""
    shard = data.draw(st.sampled_from(sorted(SHARDS)))
    header, nbytes = shard_header(SHARDS[shard])
    groups = read_header(header[8:], len(header) + nbytes, "s").groups
    places = [(0, len(header)), *(place for group in groups for place in group)]
    offset, length = data.draw(st.sampled_from(places))
    offset += data.draw(st.integers(0, length - 1))
    before = name_of(model)
    flip(model / shard, offset)
    try:
        assert name_of(model) != before
    except FormatError:
        assert offset < len(header)  # the header is no longer valid
    finally:
        flip(model / shard, offset)
    assert name_of(model) == before


def test_paths_links_times_and_owners_do_not_count(model: Path, tmp_path: Path) -> None:
    """A Hugging Face cache: the snapshot's files are links to blobs named by their digests."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir(), reverse=True)):
        shutil.copyfile(file, blobs / f"{number}")
        os.utime(blobs / f"{number}", (1, 1))
        (blobs / f"{number}").chmod(0o400)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number}"))
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "link", snapshot / "config.json"):
        assert name_of(path) == name_of(model)


def test_the_order_of_a_listing_does_not_count(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = name_of(model)
    listdir = os.listdir
    for seed in range(5):
        shuffled = random.Random(seed).sample

        def listing(path: Any, shuffled: Callable[..., list[str]] = shuffled) -> list[str]:
            names = listdir(path)
            return shuffled(names, len(names))

        monkeypatch.setattr(os, "listdir", listing)
        assert name_of(model) == before


def test_other_files_do_not_count(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    for name in ("tokenizer.json", "README.md", "pytorch_model.bin", "model.gguf", "x.py"):
        (copy / name).write_bytes(b"\x80")
    assert name_of(copy) == name_of(model)


def test_shards_count_with_or_without_an_index(model: Path, tmp_path: Path) -> None:
    """An index that names all shards says nothing new; a shard beside it counts, as a loader may
    read it (weight_utils.py :: maybe_add_mtp_safetensors)."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / INDEX).unlink()
    assert name_of(copy) == name_of(model)
    shutil.copyfile(copy / SECOND, copy / "mtp.safetensors")
    unindexed = name_of(copy)
    shutil.copyfile(model / INDEX, copy / INDEX)
    assert len({unindexed, name_of(copy), name_of(model)}) == 3


def test_other_weights_configs_and_sizes_have_other_names(model: Path, tmp_path: Path) -> None:
    names = {name_of(model)}

    def changed(change: Callable[[Path], object]) -> None:
        copy = Path(shutil.copytree(model, tmp_path / str(len(names))))
        change(copy)
        name = name_of(copy)
        assert name not in names
        names.add(name)

    def config(**fields: Any) -> Callable[[Path], object]:
        return lambda copy: (copy / "config.json").write_text(json.dumps(fields))

    changed(lambda copy: write_shard(copy / FIRST, SHARDS[FIRST], seed=7))
    changed(lambda copy: write_shard(copy / FIRST, SHARDS[FIRST] | {"b": ("F32", (1,))}, seed=0))
    changed(lambda copy: write_shard(copy / FIRST, {"x": SHARDS[FIRST]["embed"]}, seed=0))
    changed(config(hidden_size=64))
    changed(config(hidden_size=128))
    changed(lambda copy: (copy / "hf_quant_config.json").write_text("{}"))
    changed(_renamed)


def test_a_file_of_safetensors_own_writer_is_read(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    arrays = {name: np.arange(n, dtype=np.float32) for name, n in (("b", 5000), ("a", 3), ("c", 0))}
    (tmp_path / "config.json").write_text("{}")
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before = name_of(tmp_path)
    arrays["a"][1] += 1
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert name_of(tmp_path) != before


def _renamed(directory: Path) -> None:
    (directory / INDEX).unlink()
    (directory / FIRST).rename(directory / "model-00003.safetensors")


def _shorter(directory: Path, by: int) -> None:
    os.truncate(directory / FIRST, (directory / FIRST).stat().st_size - by)


def _without_shards(directory: Path, *others: str) -> None:
    for path in (directory / INDEX, *directory.glob("*.safetensors")):
        path.unlink()
    for name in others:
        (directory / name).write_bytes(b"\x80\x04N.")


def _unreadable(directory: Path) -> None:
    (directory / FIRST).unlink()
    (directory / FIRST).symlink_to("nowhere")


def _fifo(directory: Path, name: str = FIRST) -> None:
    (directory / name).unlink()
    os.mkfifo(directory / name)


def _text(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "refusal", "message"),
    [
        (lambda d: (d / "config.json").unlink(), FormatError, "{d}: no config.json; give the dir"),
        (_text("config.json", "[]"), FormatError, "{d}/config.json: not a JSON object"),
        (_text("config.json", '{"a":' * 100 + "1" + "}" * 100), FormatError, "more than 64 levels"),
        (_text(FIRST, ""), FormatError, "{d}/" + FIRST + ": truncated: has 0 bytes"),
        (lambda d: _shorter(d, 1), FormatError, "{d}/" + FIRST + ": truncated: has "),
        (lambda d: _shorter(d, 90_000), FormatError, "{d}/" + FIRST + ": truncated: has "),
        (
            _text(FIRST, "x" * 100),
            FormatError,
            "not a safetensors file, because its header would have",
        ),
        (_without_shards, FormatError, "{d}: no safetensors files; give the directory of a model"),
        (lambda d: _without_shards(d, "a.gguf"), FormatError, "but it has only GGUF files; give"),
        (
            lambda d: _without_shards(d, "a.bin", "b.pt"),
            FormatError,
            "only pickles (.bin) and pickles (.pt); give the weights a name, with --weights TEXT",
        ),
        (lambda d: (d / FIRST).unlink(), FormatError, "names shards that are not in the directory"),
        (
            _text(INDEX, '{"weight_map": {"a": 1}}'),
            FormatError,
            ": weight_map: expected the file name of each tensor; download",
        ),
        (_text(INDEX, '{"weight_map": {"a": "../../x"}}'), FormatError, "such as '../../x'"),
        (_unreadable, UsageError, "{d}/" + FIRST + ": cannot read the weights: No such file"),
        (lambda d: _fifo(d, INDEX), UsageError, "{d}/" + INDEX + ": cannot read: not a regular"),
        (_fifo, UsageError, "{d}/" + FIRST + ": cannot read the weights: not a regular file"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused_by_name(
    model: Path,
    tmp_path: Path,
    damage: Callable[[Path], object],
    refusal: type[HicacheError],
    message: str,
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    damage(copy)
    with pytest.raises(refusal) as caught:
        read_checkpoint(copy)
    assert message.format(d=copy) in str(caught.value)


def test_other_files_and_missing_directories_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(FormatError, match=r"a\.gguf: .* not GGUF files; give the weights a"):
        read_checkpoint(tmp_path / "a.gguf")
    with pytest.raises(FormatError, match="nowhere: not a model directory"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="nowhere: cannot read the model directory: No such file"):
        read_checkpoint(tmp_path / "nowhere" / "config.json")


def test_a_file_that_is_cut_while_it_is_read_says_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(tmp_path, SHARDS)
    real = os.pread

    def pread(descriptor: int, nbytes: int, offset: int) -> bytes:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == SECOND:
            os.truncate(directory / SECOND, 4)
        return real(descriptor, nbytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(FormatError) as refused:
        read_checkpoint(directory)
    assert (
        str(refused.value) == f"{directory / SECOND}: became shorter while it was read; try again"
    )
