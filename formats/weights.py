"""Fingerprints, which are texts that name a model's weights. All hosts compute the same text.

A fingerprint covers the model's config files and, of each safetensors shard, its name, size, header
and samples. Paths, links, owners and times do not count, nor do tokenizers and code.

A fingerprint changes with every config value except notes such as `transformers_version`, with a
tensor's name, dtype, shape or place, and with a shard's size. Since a model can have a terabyte, a
fingerprint covers only samples of the numbers.
A sample is 4 KiB. A tensor has one sample, from its middle. A tensor of 64 MiB or more has one more
sample for each 64 MiB, and its samples are evenly spaced. Training, a merged adapter or another
quantisation changes most numbers of at least one tensor, and so practically always a sample.

A change within a share p of one tensor with n samples is missed with probability 1 - n x p, or 0 if
that is negative. So a few edited rows or experts can go unnoticed. The places of samples are known,
so a fingerprint does not protect against forgery.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hicachectl.formats.documents import parse_json_object, shown
from hicachectl.formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

FINGERPRINT_DIGITS = 32  # hexadecimal digits
_AGAIN = "download the file again"
LENGTH_BYTES = 8  # a shard begins with its header's length, little endian
MAX_HEADER_BYTES = 100_000_000  # safetensors refuses longer headers
MAX_RANGE_BYTES = 1 << 20
MODEL_CONFIGS = ("config.json", "params.json")  # params.json is Mistral's own format
# The names under which SGLang and its quantisation methods look for a checkpoint's quantisation
# (configs/model_config.py :: _parse_quant_hf_config, _find_quant_modelslim_config;
# layers/quantization :: get_config_filenames).
CONFIGS = (
    *MODEL_CONFIGS, "hf_quant_config.json", "quant_config.json", "quantization_config.json",
    "quantize_config.json", "quant_model_description.json",
)  # fmt: skip

# Load formats with which SGLang reads the same tensors from the same files as with auto
# (model_loader/loader.py :: DefaultModelLoader._prepare_weights, RunaiModelStreamerLoader).
SAME_LOAD_FORMATS = (
    "auto", "safetensors", "fastsafetensors", "instanttensor", "layered", "runai_streamer",
)  # fmt: skip

_HASH_BYTES = 32
_SAMPLE_BYTES = 4096
_SAMPLE_EVERY = 64 << 20
_JOINED_GAP = 16 << 10  # reading this many bytes more costs less than another read
_GROUP_RANGES = 64
# Fields of configs, at any depth, without an effect on results.
_IDLE_FIELDS = frozenset({
    "_name_or_path",  # place from which the config was read
    "_commit_hash",  # version of the place
    "transformers_version",  # release that wrote the config
    "_attn_implementation_autoset",  # note of the release that wrote the config
})  # fmt: skip


class Checkpoint(NamedTuple):
    """A model directory.

    configs: parsed files of `CONFIGS` in the directory, by name.
    shards: file names of the safetensors files in the directory.
    """

    fingerprint: str
    configs: Mapping[str, Any]
    shards: Collection[str] = ()


class Range(NamedTuple):
    """Bytes of a shard to read."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file.

    header_hash: hash of the file's size and header.
    groups: ranges with the file's samples, in order of offset. Groups can be read in parallel. No
        range exceeds MAX_RANGE_BYTES.
    """

    header_hash: bytes
    groups: tuple[tuple[Range, ...], ...]


def header_bytes(start: bytes, nbytes: int, source: str) -> int:
    """Return the length of a shard's header.

    start: the first LENGTH_BYTES bytes of the shard.
    nbytes: the shard's size.
    source: names the shard in messages.
    Raises FormatError.
    """
    if len(start) < LENGTH_BYTES:
        raise FormatError(_cut_off(source, nbytes, LENGTH_BYTES))
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            f"{source}: not a safetensors file, because its header would have {length} bytes, but "
            f"at most {MAX_HEADER_BYTES} are allowed; {_AGAIN}"
        )
    if LENGTH_BYTES + length > nbytes:
        raise FormatError(_cut_off(source, nbytes, LENGTH_BYTES + length))
    return length


def read_header(header: bytes, nbytes: int, source: str) -> Shard:
    """Return the shard that a header describes.

    header: the bytes after the header's length.
    nbytes, source: see `header_bytes`.
    Raises FormatError if the header is damaged, or describes more or fewer bytes than the shard
    has.
    """
    data = LENGTH_BYTES + len(header)
    tensors = _tensors(header, source)
    described = data + sum(tensor.nbytes for tensor in tensors)
    if described > nbytes:
        raise FormatError(_cut_off(source, nbytes, described))
    if described < nbytes:
        raise FormatError(
            f"{source}: has {nbytes} bytes, but its header describes {described}; {_AGAIN}"
        )
    header_hash = hashlib.blake2b(nbytes.to_bytes(8, "little"), digest_size=_HASH_BYTES)
    header_hash.update(header)
    ranges = _ranges(data, tensors)
    groups = (ranges[at : at + _GROUP_RANGES] for at in range(0, len(ranges), _GROUP_RANGES))
    return Shard(header_hash.digest(), tuple(map(tuple, groups)))


def samples_digest(samples: Iterable[bytes]) -> bytes:
    """Return the hash of a group's samples, in order."""
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    for sample in samples:
        digest.update(sample)
    return digest.digest()


def shard_digest(shard: Shard, groups: Iterable[bytes]) -> bytes:
    """Return the hash of a shard.

    groups: the hashes of the shard's groups of samples, in order.
    """
    return samples_digest((shard.header_hash, *groups))


def fingerprint(
    configs: Mapping[str, Any],
    shards: Mapping[str, bytes],
    indexed: Collection[str] | None = None,
) -> str:
    """Return the fingerprint of a checkpoint: 32 hexadecimal digits.

    configs: the parsed files of `CONFIGS` that the checkpoint has, by name.
    shards: the hash of each shard, by file name.
    indexed: the shards that the checkpoint's index names, which a server loads; None without an
        index. Other shards count as well, since some loaders read them.
    """
    loaded = shards if indexed is None else indexed
    return _text_hash({
        "configs": {name: _without_idle_fields(config) for name, config in configs.items()},
        "shards": {name: [digest.hex(), name in loaded] for name, digest in shards.items()},
    })  # fmt: skip


def served_weights(
    name: str,
    *,
    quantization: str | None = "",
    load_format: str | None = "auto",
    revision: str | None = "",
    overrides: str | Mapping[str, Any] | None = "",
    **others: Any,
) -> str:
    """Return the name of weights as a server loads them: 32 hexadecimal digits, or `name` itself.

    name: the checkpoint's fingerprint. It is returned if every setting has SGLang's default, or a
        value with which SGLang loads the same numbers.
    overrides: --json-model-override-args, as text or parsed.
    others: more settings, as JSON values. Empty values do not count. `formats.models.loading` says
        which of SGLang's settings belong here.
    Raises FormatError for overrides that are not a JSON object.
    """
    if isinstance(overrides, str):
        overrides = parse_json_object(overrides or "{}", "json_model_override_args")
    settings = {
        "quantization": quantization,
        "load_format": "" if load_format in SAME_LOAD_FORMATS else load_format,
        "revision": revision,
        "overrides": overrides,
        **others,
    }
    changed = {setting: value for setting, value in settings.items() if value}
    return _text_hash({"weights": name, **changed}) if changed else name


def _text_hash(document: Any) -> str:
    text = json.dumps(document, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_DIGITS // 2).hexdigest()


def _without_idle_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_idle_fields(inner)
            for name, inner in value.items()
            if name not in _IDLE_FIELDS
        }
    return [_without_idle_fields(inner) for inner in value] if isinstance(value, list) else value


def _tensors(header: bytes, source: str) -> list[Range]:
    """Return the bytes of each tensor in order, counted from the end of the header.

    Raises FormatError if the tensors have gaps or overlap, which the format forbids.
    """
    try:
        entries = parse_json_object(header, source)
    except FormatError as error:
        raise FormatError(f"{error}; {_AGAIN}") from None
    entries.pop("__metadata__", None)
    tensors = []
    for name, entry in entries.items():
        match entry:
            case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end:
                tensors.append(Range(begin, end - begin))
            case _:
                raise FormatError(
                    f"{source}: tensor {shown(name)} has no valid data_offsets; {_AGAIN}"
                )
    tensors.sort()
    end = 0
    for tensor in tensors:
        if tensor.offset != end:
            raise FormatError(f"{source}: the tensors of its header have gaps or overlap; {_AGAIN}")
        end += tensor.nbytes
    return tensors


def _ranges(data: int, tensors: Iterable[Range]) -> list[Range]:
    """Return ranges with the samples of tensors, in order. Samples with a small gap are joined.

    data: position of the header's end.
    """
    ranges: list[Range] = []
    for tensor in tensors:
        for sample in _samples(Range(data + tensor.offset, tensor.nbytes)):
            begin = ranges[-1].offset if ranges else 0
            gap = sample.offset - sum(ranges[-1]) if ranges else _JOINED_GAP + 1
            joined = Range(begin, sample.offset + sample.nbytes - begin)
            if gap <= _JOINED_GAP and joined.nbytes <= MAX_RANGE_BYTES:
                ranges[-1] = joined
            else:
                ranges.append(sample)
    return ranges


def _samples(tensor: Range) -> Iterator[Range]:
    if tensor.nbytes <= _SAMPLE_BYTES:
        if tensor.nbytes:
            yield tensor
        return
    count = 1 + tensor.nbytes // _SAMPLE_EVERY
    for number in range(count):
        middle = tensor.nbytes * (2 * number + 1) // (2 * count)
        yield Range(tensor.offset + middle - _SAMPLE_BYTES // 2, _SAMPLE_BYTES)


def _cut_off(source: str, nbytes: int, described: int) -> str:
    return (
        f"{source}: truncated: has {nbytes} bytes, but its header describes {described}; {_AGAIN}"
    )
