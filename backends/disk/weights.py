"""Read a model directory for the fingerprint of its weights.

Files are opened by their names, through links, because a Hugging Face cache consists of links. Only
JSON and safetensors files are read. Pickles are never loaded.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.backends.disk.io import closing_descriptor, errors_as, open_regular, read_up_to
from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.weights import (
    CONFIGS,
    LENGTH_BYTES,
    MODEL_CONFIGS,
    Checkpoint,
    fingerprint,
    header_bytes,
    read_header,
    samples_digest,
    shard_digest,
)
from hicachectl.formats.wording import NAME_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hicachectl.formats.weights import Range, Shard

_INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_COMMIT = re.compile("[0-9a-f]{40}")
_THREADS = 32  # many, because a read over a network waits for some milliseconds
_MAX_CONFIG_BYTES = 32 << 20
_REFUSED = {
    ".gguf": "GGUF files",
    ".bin": "pickles (.bin)",
    ".pt": "pickles (.pt)",
    ".pth": "pickles (.pth)",
}


def hub_snapshot(name: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Return the directory with a Hugging Face Hub model's files; None if this host lacks it.

    revision: commit, branch or tag; by default main.
    cache: directory of the Hub's cache; by default chosen as huggingface_hub chooses it.
    """
    if name.count("/") > 1 or name.startswith(("/", ".")) or ".." in name:
        return None
    stated = (os.environ.get(variable) for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or Path(caches, "huggingface")
    folder = cache or next(filter(None, stated), None) or Path(home, "hub")
    model = Path(folder).expanduser() / f"models--{name.replace('/', '--')}"
    commit = revision or "main"
    with suppress(OSError, UnicodeDecodeError):
        if not _COMMIT.fullmatch(commit):
            commit = (model / "refs" / commit).read_text(encoding="ascii").strip()
        snapshot = model / "snapshots" / commit
        if _COMMIT.fullmatch(commit) and snapshot.is_dir():
            return snapshot
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the fingerprint and configs of a model.

    path: the model's directory, or a config file in it.

    Reads 4 KiB or more of each tensor, in parallel; see `formats.weights`.
    Raises UsageError if a file cannot be read. Raises FormatError in these cases:
    - The directory has no config or no safetensors file.
    - A file that the index names is missing.
    - A file is truncated or damaged.
    """
    directory = _directory(path)
    next_step = "give the directory of a model"
    with errors_as(UsageError, directory, "read the model directory", next_step):
        names = sorted(os.listdir(directory))  # noqa: PTH208 - names only
    configs = {name: _read_json(directory / name) for name in CONFIGS if name in names}
    if not any(name in configs for name in MODEL_CONFIGS):
        raise FormatError(f"{directory}: no config.json; give the directory of a model")
    shards = [name for name in names if name.endswith(_SUFFIX)]
    if not shards:
        raise FormatError(_no_shards(directory, names))
    indexed = _indexed(directory, shards) if _INDEX in names else None
    paths = [directory / name for name in shards]
    with ThreadPoolExecutor(_THREADS, "weights") as pool:
        found = list(pool.map(_read_shard, paths))
        groups = [
            (path, group)
            for path, shard in zip(paths, found, strict=True)
            for group in shard.groups
        ]
        # `map` keeps the order, so each shard in turn takes the digests of its own groups.
        digests = pool.map(_read_group, groups)
        hashes = [shard_digest(shard, [next(digests) for _ in shard.groups]) for shard in found]
    name = fingerprint(configs, dict(zip(shards, hashes, strict=True)), indexed)
    return Checkpoint(name, configs, shards)


def _directory(path: Path) -> Path:
    if path.is_dir():
        return path
    if path.name in MODEL_CONFIGS:
        return path.parent
    kind = _REFUSED.get(path.suffix)
    raise FormatError(
        f"{path}: weights are read from safetensors files, not {kind}; {NAME_WEIGHTS}"
        if kind
        else f"{path}: not a model directory; give the directory of config.json"
    )


def _no_shards(directory: Path, names: list[str]) -> str:
    kinds = sorted({kind for name in names if (kind := _REFUSED.get(Path(name).suffix))})
    if not kinds:
        return f"{directory}: no safetensors files; give the directory of a model"
    return (
        f"{directory}: weights are read from safetensors files, but it has only "
        f"{' and '.join(kinds)}; {NAME_WEIGHTS}"
    )


def _read_json(path: Path) -> dict[str, Any]:
    data = read_bounded(path, _MAX_CONFIG_BYTES, what="a model's JSON file", regular=True)
    return parse_json_object(data, str(path))


def _indexed(directory: Path, shards: list[str]) -> Collection[str]:
    """Return the shards that the index names (weight_utils.filter_duplicate_safetensors_files)."""
    path = directory / _INDEX
    places = _read_json(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise FormatError(
            f"{path}: weight_map: expected the file name of each tensor; download the model again"
        )
    indexed = set(places.values())
    if missing := sorted(indexed - set(shards)):
        raise FormatError(
            f"{path}: names shards that are not in the directory, such as {missing[0]!r:.80}; "
            "download the model again"
        )
    return indexed


def _read_shard(path: Path) -> Shard:
    source = str(path)
    with _opened(path) as file:
        nbytes = os.fstat(file).st_size
        length = header_bytes(_read(file, path, 0, min(nbytes, LENGTH_BYTES)), nbytes, source)
        return read_header(_read(file, path, LENGTH_BYTES, length), nbytes, source)


def _read_group(task: tuple[Path, tuple[Range, ...]]) -> bytes:
    path, ranges = task
    with _opened(path) as file:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # read nothing around the samples
        return samples_digest(_read(file, path, *place) for place in ranges)


def _read(file: int, path: Path, offset: int, nbytes: int) -> bytes:
    data = read_up_to(file, nbytes, offset)
    if len(data) < nbytes:
        raise FormatError(f"{path}: became shorter while it was read; try again")
    return data


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    next_step = "check the file, or download the model again"
    with (
        errors_as(UsageError, path, "read the weights", next_step),
        closing_descriptor(open_regular(path)) as file,
    ):
        yield file
