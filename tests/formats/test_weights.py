"""Which bytes of a shard are read, and which settings change the name of weights."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError
from hicachectl.formats.weights import (
    MAX_HEADER_BYTES,
    MAX_RANGE_BYTES,
    SAME_LOAD_FORMATS,
    fingerprint,
    header_bytes,
    read_header,
    served_weights,
)
from tests.checkpoints import shard_header

if TYPE_CHECKING:
    from hicachectl.formats.weights import Shard

MIB = 1 << 20
NAME = "0123456789abcdef" * 2


def shard_of(sizes: list[int]) -> tuple[Shard, int]:
    """Return a shard with tensors of these sizes, and where its tensors begin."""
    start, nbytes = shard_header({f"t{n}": ("F8_E4M3", (size,)) for n, size in enumerate(sizes)})
    return read_header(start[8:], len(start) + nbytes, "s"), len(start)


@pytest.mark.slow
@example([4096] * 1000)
@example([20_000, 0, 2048] * 500)
@given(
    st.lists(
        st.one_of(st.integers(0, 20_000), st.integers(0, 3 * MIB), st.integers(0, 300 * MIB)),
        max_size=200,
    )
)
def test_each_tensor_has_its_samples(sizes: list[int]) -> None:
    """Samples lie in order: small tensors whole, of large ones 4 KiB of each 64 MiB."""
    shard, at = shard_of(sizes)
    ranges = [place for group in shard.groups for place in group]
    assert all(0 < place.nbytes <= MAX_RANGE_BYTES for place in ranges)
    assert all(sum(one) <= other.offset for one, other in pairwise(ranges))
    assert all(len(group) <= 64 for group in shard.groups)
    assert sum(place.nbytes for place in ranges) <= sum(
        min(size, 4096 * (1 + size // (64 * MIB))) + 16_384 for size in sizes
    )
    places = iter(ranges)
    place = next(places, None)
    for size in sizes:
        parts = 1 + size // (64 * MIB)
        wanted = (
            [(at, size)]
            if size <= 4096
            else [(at + size * (2 * n + 1) // (2 * parts) - 2048, 4096) for n in range(parts)]
        )
        for offset, nbytes in wanted:
            while place is not None and sum(place) < offset + nbytes:
                place = next(places, None)
            assert not nbytes or (place is not None and place.offset <= offset)
        at += size
    assert not ranges or sum(ranges[-1]) <= at


@pytest.mark.parametrize(
    ("entries", "extra", "problem"),
    [
        ({"a": {"data_offsets": [0, 8]}}, -1, "truncated: has .* describes"),
        ({"a": {"data_offsets": [0, 8]}}, 1, "has .* bytes, but its header describes"),
        (
            {"a": {"data_offsets": [0, 4]}, "b": {"data_offsets": [5, 8]}},
            0,
            "gaps or overlap; download the file again",
        ),
        (
            {"a": {"data_offsets": [0, 8]}, "b": {"data_offsets": [0, 8]}},
            0,
            "gaps or overlap; download the file again",
        ),
        ({"a": {"data_offsets": [1, 8]}}, 0, "gaps or overlap; download the file again"),
        (
            {"a": {"data_offsets": [8, 0]}},
            0,
            "'a' has no valid data_offsets; download the file again",
        ),
        ({"a": {"data_offsets": [0, -8]}}, 0, "no valid data_offsets"),
        ({"a": {"data_offsets": [0, 8.0]}}, 0, "no valid data_offsets"),
        ({"a": {"data_offsets": [0, 8, 16]}}, 0, "no valid data_offsets"),
        ({"a": [0, 8]}, 0, "no valid data_offsets"),
        ({"a": {}}, 0, "no valid data_offsets"),
    ],
)
def test_a_header_that_does_not_describe_its_shard_is_refused(
    entries: dict[str, Any], extra: int, problem: str
) -> None:
    header = json.dumps(entries).encode()
    with pytest.raises(FormatError, match=f"^s: .*{problem}"):
        read_header(header, 8 + len(header) + 8 + extra, "s")


def test_a_header_names_its_tensors_in_any_order() -> None:
    sizes = {"a": [0, 8000], "b": [8000, 9000], "c": [9000, 70_000]}
    groups = set()
    for names in ("abc", "cab", "bca"):
        header = json.dumps({name: {"data_offsets": sizes[name]} for name in names}).encode()
        groups.add(read_header(header, 8 + len(header) + 70_000, "s").groups)
    assert len(groups) == 1


@pytest.mark.parametrize("header", [b"", b"[]", b"{", b"\xff{}", b"[" * 100_000])
def test_a_header_that_is_no_json_object_is_refused(header: bytes) -> None:
    with pytest.raises(
        FormatError,
        match=r"^s: (not JSON|not a JSON object|has 100000 values).*; download the file again$",
    ):
        read_header(header, 8 + len(header), "s")


@pytest.mark.parametrize(
    ("length", "nbytes", "problem"),
    [
        (
            MAX_HEADER_BYTES + 1,
            1 << 40,
            "not a safetensors file, because its header would have 100000001",
        ),
        (1 << 63, 1 << 40, "not a safetensors file.*; download the file again$"),
        (MAX_HEADER_BYTES, MAX_HEADER_BYTES + 7, "truncated"),
        (0, 7, "truncated: has 7 bytes, but its header describes 8"),
        (0xFFFFFF, 3, "truncated: has 3 bytes, but its header describes 8"),
    ],
)
def test_the_length_of_a_header_is_bounded(length: int, nbytes: int, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        header_bytes(length.to_bytes(8, "little")[:nbytes], nbytes, "s")
    longest = MAX_HEADER_BYTES.to_bytes(8, "little")
    assert header_bytes(longest, MAX_HEADER_BYTES + 8, "s") == MAX_HEADER_BYTES


def test_fields_without_an_effect_do_not_count() -> None:
    config = {"a": 1, "text_config": {"b": 2, "layers": [{"c": 3}]}}
    noted = {
        "a": 1,
        "_name_or_path": "/models/a",
        "transformers_version": "5.1",
        "text_config": {
            "layers": [{"c": 3, "_commit_hash": "f00"}],
            "_attn_implementation_autoset": True,
            "b": 2,
        },
    }
    name = fingerprint({"config.json": config}, {})
    assert fingerprint({"config.json": noted}, {}) == name
    others: list[dict[str, Any]] = [{"a": 1.0}, {"a": "1"}, {"a": 2}, {"a": None}, {"d": 0}]
    changed = [{**config, **other} for other in others]
    assert len({name, *(fingerprint({"config.json": one}, {}) for one in changed)}) == 6


def test_every_part_of_a_checkpoint_counts() -> None:
    """Configs and shards by name, their contents, and whether the index names a shard."""
    configs, shards = {"config.json": {"a": 1}}, {"a": b"1", "b": b"2"}
    names = [
        fingerprint(configs, shards),
        fingerprint({"params.json": {"a": 1}}, shards),
        fingerprint({**configs, "hf_quant_config.json": {}}, shards),
        fingerprint(configs, {"a": b"1"}),
        fingerprint(configs, {"a": b"2", "b": b"1"}),
        fingerprint(configs, {"a": b"1", "c": b"2"}),
        fingerprint(configs, shards, {"a"}),
    ]
    assert len(set(names)) == len(names)
    assert fingerprint(configs, {"b": b"2", "a": b"1"}, {"b", "a"}) == names[0]


def test_default_settings_leave_the_name() -> None:
    for load_format in (*SAME_LOAD_FORMATS, "", None):
        assert served_weights(NAME, load_format=load_format, quantization=None) == NAME
    assert served_weights(NAME, revision=None, overrides="{}", loader={}, modelopt=None) == NAME


def test_every_other_setting_gives_another_name() -> None:
    settings: list[dict[str, Any]] = [
        {"quantization": "fp8"},
        {"quantization": "mxfp8"},
        {"load_format": "mistral"},
        {"revision": "fp8"},
        {"overrides": '{"rope_theta": 1e6}'},
        {"overrides": '{"rope_theta": 1e7}'},
        {"overrides": {"rope_theta": 1}, "revision": "fp8"},
        {"loader": {"pattern": "x"}},
        {"modelopt": "fp8"},
    ]
    names = {served_weights(NAME, **setting) for setting in settings}
    assert len(names | {NAME, served_weights(NAME[::-1], **settings[0])}) == len(settings) + 2
    assert all(len(name) == 32 and int(name, 16) for name in names)


def test_overrides_are_compared_as_json() -> None:
    one = served_weights(NAME, overrides='{"a": 1, "b": [2]}')
    assert served_weights(NAME, overrides=' {"b":[2],"a":1}') == one
    assert served_weights(NAME, overrides={"b": [2], "a": 1}) == one
    with pytest.raises(FormatError, match="json_model_override_args: not a JSON object"):
        served_weights(NAME, overrides="[]")
