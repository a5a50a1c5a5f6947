"""Page objects of random rows in host memory, and random decode steps, for the sparse loader."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from hicachectl.backends.arena import Arena
from tests.device.devices import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.kernels.sparse_triton import HostRows

# N, k, page size. Few shapes, since each compiles another kernel.
SHAPES = ((1, 1, 1), (5, 3, 4), (8, 8, 4), (12, 5, 2))
CONTEXT = 40  # positions that have pages
SEQUENCE = 30  # positions; longer than the buffers of these tests


@contextmanager
def host_memory(nbytes: int, device: str) -> Iterator[torch.Tensor]:
    """Yield bytes of an arena that the device's kernels can read."""
    from hicachectl.device.lanes import HostArenas

    with Arena(nbytes) as arena:
        if device == "cpu":
            yield torch.from_numpy(arena.view(0, nbytes))
            return
        memory = HostArenas().tensor(arena)[:nbytes]
        assert memory.is_pinned()
        yield memory
        torch.cuda.synchronize()


@contextmanager
def host_rows(
    device: str,
    *,
    requests: int,
    layers: int,
    page_size: int,
    row_bytes: int = 48,
    context: int = CONTEXT,
    layout: str = "page_first",
    gap: int = 16,
) -> Iterator[HostRows]:
    """Yield rows of random pages in random order, `gap` bytes apart. Requests share no page."""
    from tests.device.sparse_rows import rows_of_layout

    columns = -(-context // page_size)
    stride = layers * page_size * row_bytes + gap
    rng = np.random.default_rng(requests)
    order = rng.permutation(requests * columns).reshape(requests, columns)
    with host_memory(requests * columns * stride, device) as memory:
        memory.copy_(torch.from_numpy(rng.integers(0, 256, len(memory), np.uint8)))
        yield rows_of_layout(
            memory,
            torch.from_numpy(order).to(device),
            layout=layout,
            layers=layers,
            page_size=page_size,
            row_bytes=row_bytes,
            page_stride=stride,
        )


def true_rows(rows: HostRows, layout: str) -> np.ndarray:
    """Return the row of every token, as the layout places rows: [R, layer, position, row_bytes]."""
    pages = rows.memory.numpy().reshape(-1, rows.page_stride)
    tokens, layers, row = rows.page_size, rows.layers, rows.row_bytes
    shape = (tokens, layers, row) if layout == "page_first" else (layers, tokens, row)
    objects = pages[:, : tokens * layers * row].reshape(-1, *shape)
    if layout == "page_first":
        objects = objects.swapaxes(1, 2)
    found = objects[rows.pages.cpu().numpy()]  # [R, page, layer, token, row_bytes]
    made: np.ndarray = found.swapaxes(1, 2).reshape(len(found), layers, -1, row).copy()
    return made


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all requests, in one layer."""

    lengths: list[int]
    top_k: list[list[int]]


@dataclass(frozen=True, slots=True)
class Episode:
    """The shape of a buffer, and steps to run on it."""

    slots: int
    k: int
    page_size: int
    steps: list[Step]


@st.composite
def episodes(draw: st.DrawFn, requests: int, most_steps: int) -> Episode:
    """Draw sequences that grow, stay, are cut back, pause and cross N; top-k of any int32."""
    slots, k, page_size = draw(st.sampled_from(SHAPES))
    lengths = draw(st.lists(st.integers(0, 24), min_size=requests, max_size=requests))
    steps = []
    for _ in range(draw(st.integers(1, most_steps))):
        entries = [
            st.integers(-1, length) | st.sampled_from([-(2**31), 2**31 - 1]) for length in lengths
        ]
        top_k = [draw(st.lists(entry, min_size=k, max_size=k)) for entry in entries]
        paused = draw(st.integers(0, 3 * requests))
        now = [0 if request == paused else length for request, length in enumerate(lengths)]
        steps.append(Step(now, top_k))
        change = st.sampled_from([1, 1, 1, 1, 1, 0, 5, -2])
        lengths = [min(CONTEXT, max(0, length + draw(change))) for length in lengths]
    return Episode(slots, k, page_size, steps)
