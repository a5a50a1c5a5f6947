"""Byte planes: objects read back as written, nothing grows, and lying frames are refused."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.pack.planes import PLANE_COUNTS, Coding, Decoder, Encoder, Plan, PlanMemory
from hicachectl.formats.profile import Profile
from hicachectl.formats.spec import object_specs
from tests.kvgen import KvGenerator

PLANS = st.sampled_from(PLANE_COUNTS).flatmap(
    lambda count: st.tuples(*[st.sampled_from(Coding)] * count)
)
KV = Pool(name="kv", kind="mha", dtype="bfloat16", layers=4, kv_heads=4, head_dim=128)


def array(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(data, dtype=np.uint8)


def decoded(planes: list[bytes], nbytes: int) -> bytes:
    out = bytearray(nbytes)
    Decoder().decode([memoryview(plane) for plane in planes], memoryview(out))
    return bytes(out)


def stored(data: bytes, plan: Plan | None = None) -> list[bytes]:
    encoder = Encoder()
    return [bytes(p) for p in encoder.encode(array(data), plan or encoder.measure(array(data)))]


def kv_object(dtype: str) -> bytes:
    pool = Pool(name="kv", kind="mha", dtype=dtype, layers=4, kv_heads=4, head_dim=128)
    profile = Profile(model="m", page_size=64, pools=(pool,))
    (expected, *_) = object_specs(profile, "file")
    return KvGenerator(expected, profile, 7).objects([0]).tobytes()


@given(data=st.binary(max_size=400).map(lambda data: data * 17), plan=PLANS)
def test_every_plan_gives_back_the_bytes_and_no_plane_grows(data: bytes, plan: Plan) -> None:
    data = data[: len(data) // len(plan) * len(plan)]
    planes = stored(data, plan)
    assert len(planes) == len(plan)
    assert all(len(plane) <= len(data) // len(plan) for plane in planes)
    assert decoded(planes, len(data)) == data


@given(data=st.binary(max_size=100_000))
def test_a_measured_plan_gives_back_the_bytes(data: bytes) -> None:
    assert decoded(stored(data), len(data)) == data


def test_planes_are_every_second_and_every_fourth_byte() -> None:
    raw = Coding.RAW
    assert stored(b"abcdefgh", (raw, raw)) == [b"aceg", b"bdfh"]
    assert stored(b"abcdefgh", (raw,) * 4) == [b"ae", b"bf", b"cg", b"dh"]


def test_bfloat16_is_split_in_two_and_only_its_exponents_are_compressed() -> None:
    data = kv_object("bfloat16")
    low, high = stored(data)
    assert low == data[::2]
    assert len(data) / (len(low) + len(high)) >= 1.38


def test_float32_is_split_in_four() -> None:
    planes = stored(kv_object("float32"))
    assert len(planes) == 4
    assert len(planes[3]) < len(planes[0])


def test_noise_stays_as_it_is_and_repetition_shrinks() -> None:
    noise = np.random.default_rng(0).bytes(200_000)
    assert stored(noise) == [noise]
    assert sum(map(len, stored(bytes(200_000)))) < 200


def test_what_matches_compress_better_than_codes_is_left_to_them() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 256, (500, 32), dtype=np.uint8)
    data = words[rng.integers(0, 500, 2000)].tobytes()
    assert Encoder().measure(array(data)) == (Coding.MATCHES,)
    assert len(stored(data)[0]) < len(data) / 2


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"no frame",
        zstandard.ZstdCompressor().compress(bytes(1 << 24)),  # a bomb
        zstandard.ZstdCompressor().compress(bytes(99)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)),
        zstandard.ZstdCompressor().compress(bytes(100)) + b"more",
        zstandard.ZstdCompressor().compress(bytes(range(100)))[:-1],
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip",
    ],
)
def test_a_frame_of_other_than_the_bytes_it_stands_for_is_refused(frame: bytes) -> None:
    for planes in ([frame], [bytes(100), frame]):
        with pytest.raises(FormatError, match="zstd"):
            decoded(planes, 100 * len(planes))


@given(frame=st.binary(max_size=60))
def test_arbitrary_bytes_are_refused_or_restored(frame: bytes) -> None:
    with suppress(FormatError):
        assert len(decoded([frame], 64)) == 64


@pytest.mark.parametrize(("objects", "times"), [(0, 2), (20, 2), (39, 2), (40, 1)])
def test_a_kind_of_objects_is_measured_now_and_then(
    objects: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is for 32 objects, or for the bytes of more."""
    measured: list[int] = []
    measure = Encoder.measure

    def counted(self: Encoder, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Plan:
        measured.append(len(data))
        return measure(self, data)

    monkeypatch.setattr(Encoder, "measure", counted)
    memory, encoder = PlanMemory(), Encoder()
    kv = array(kv_object("bfloat16"))
    monkeypatch.setattr("hicachectl.formats.pack.planes._PLAN_BYTES", objects * len(kv))
    for n in range(40):
        plan = memory.plan(b"%064x_m_0_1.bin" % n, kv, encoder)
        assert len(plan) == 2
        memory.plan(b"%064x.mamba_m_0_1.bin" % n, kv, encoder)
    assert len(measured) == 2 * times  # two kinds
    memory.plan(b"%064x_m_0_1.bin" % 0, kv[:1000], encoder)
    assert measured[-1] == 1000
