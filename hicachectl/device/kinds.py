"""One kind of object on a device: its pools, what is looked at, and the way through a lane."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from hicachectl.checks.tables import stored_layers
from hicachectl.device.fields import fields_of
from hicachectl.device.lanes import MOST_OBJECTS
from hicachectl.device.plans import PoolPiece, pool_form
from hicachectl.formats.copyplan import VECTOR_BYTES
from hicachectl.kernels.blake3_triton import Ranges, digest_ranges, ranges_of
from hicachectl.kernels.layout import is_hinted, is_unseen
from hicachectl.kernels.layout_triton import MARGIN, correlations
from hicachectl.kernels.statistics import BAD_SCALE, INF, NAN, ZERO_HEADS, Field
from hicachectl.kernels.values_triton import block_statistics, supports

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.checks.values import ValueChecker
    from hicachectl.device.lanes import Lane
    from hicachectl.device.providers import Provider
    from hicachectl.formats.copyplan import CopyPlan
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.kernels.layout import OrderLook

    BoolArray = npt.NDArray[np.bool_]
    IntArray = npt.NDArray[np.int64]
    Correlations = tuple[torch.Tensor, torch.Tensor]  # [pages, sets] float32, bool

T = TypeVar("T")

POISON = 0xA5  # what staging holds before pages are gathered back into it
_SEED = 20_011  # of the slots that pages are put in: scattered, as on a server


def form_of(expected: ObjectSpec, checker: ValueChecker | None) -> Hashable:
    """Tell kinds apart: ranks whose objects are of one form share what is prepared for it."""
    if checker is None:
        return expected.tensors
    stored = stored_layers(expected, checker.profile)
    padding = tuple(layer is None for layer in stored)
    return expected.coordinate.pool, expected.tensors, padding


class Kind:
    """What is known of objects of one kind that lie `step` bytes apart. Threads may share it.

    layers, fields, looks: what is looked at in the pools; nothing without a checker.
    """

    def __init__(self, expected: ObjectSpec, checker: ValueChecker | None, step: int) -> None:
        self.step = step
        self.nbytes = expected.nbytes
        self.form = pool_form(expected.tensors)
        self.layers: list[int] = []
        self.fields: list[tuple[PoolPiece, tuple[Field, ...]]] = []
        self.looks: list[OrderLook] = []
        if checker is None:
            return
        stored = stored_layers(expected, checker.profile)
        self.layers = [number for number, layer in enumerate(stored) if layer is not None]
        self.fields = list(fields_of(expected, checker.profile, self.form))
        if checker.layout is not None:
            self.looks = [checker.layout.first_look, *checker.layout.second_looks]

    @property
    def supported(self) -> bool:
        """Whether the kernels can look at every field."""
        return all(supports(field) for _, fields in self.fields for field in fields)

    def row_places(self, look: OrderLook, slots: int) -> IntArray:
        """Find the rows of a look in the first pool, of page slot 0: byte offsets [3, sets]."""
        piece, tensor = self.form.pieces[0], self.form.tensors[0]
        heads = dict(zip(tensor.axes, tensor.shape, strict=True)).get("head", 1)
        places: IntArray = (
            look.layer * slots * piece.slot_bytes
            + look.token * piece.row_bytes
            + look.head * (piece.row_bytes // heads)
        )
        return places


class Passage:
    """The way of one kind through one lane: everything that a slab needs but its bytes.

    On a CUDA device the launches are captured once, for as many objects as the lane holds, and
    replayed for every slab: what lies in slots without an object is looked at and not reported.
    Elsewhere they are made anew, for as many objects as there are. One thread at a time.
    """

    def __init__(self, kind: Kind, lane: Lane, provider: Provider) -> None:
        """Compile, compute and upload. Raises torch.OutOfMemoryError."""
        self.most = min(
            MOST_OBJECTS,
            len(lane.staging) // kind.step,
            len(lane.pools) // kind.form.page_bytes,
        )
        self._kind, self._lane, self._provider = kind, lane, provider
        most, device = self.most, lane.device
        self._slots = torch.from_numpy(np.random.default_rng(_SEED).permutation(most)).to(device)
        self._places = torch.arange(most, device=device) * (kind.step // VECTOR_BYTES)
        layers = torch.tensor(kind.layers, dtype=torch.int64, device=device)
        # Numbers of blocks [layer][slot], object by object, padding layers left out.
        self._blocks = (layers * most + self._slots[:, None]).reshape(-1)
        self._plans = kind.form.plans(most)
        self._back = tuple(plan.reversed() for plan in self._plans)
        self._rows = [
            torch.from_numpy(kind.row_places(look, most)).to(device) for look in kind.looks
        ]
        self._ranges = self._digestible(most)
        self._digesting: tuple[torch.cuda.CUDAGraph, torch.Tensor] | None = None
        self._checking = self._captured(self._launch_checks)

    def prepare_digests(self) -> None:
        """Compile and capture the way back and the digest, once. See `_captured`."""
        if self._digesting is None:
            self._digesting = self._captured(self._launch_digests)

    # --- what a slab goes through ---

    def start_checks(self, count: int) -> torch.Tensor:
        """Scatter the objects of the staging buffer into the pools, and look at what is to be.

        What was seen goes to the host, for `suspects`, once the lane has been waited for.
        """
        if self._checking is None:
            return self._lane.to_host("seen", self._launch_checks(count))
        graph, seen = self._checking
        graph.replay()
        return self._lane.to_host("seen", seen)

    def start_digests(self, count: int) -> torch.Tensor:
        """Gather objects out of the pools, into a buffer without their bytes, and digest them."""
        if self._digesting is None:
            return self._lane.to_host("digests", self._launch_digests(count))
        graph, results = self._digesting
        graph.replay()
        return self._lane.to_host("digests", results[:count])

    def suspects(self, seen: torch.Tensor, count: int) -> BoolArray:
        """Say what is suspicious by what was seen: [count, 2].

        First whether the host should look at an object, then whether it must find something:
        codes under a scale of 0 mean nothing, and a head of zeros may be all there is.
        """
        correlated, usable, flags = self._unpacked(seen.numpy())
        found: BoolArray = flags[:count].copy()
        if correlated:
            unseen = np.flatnonzero(is_unseen(correlated[0][:count], usable[0][:count], MARGIN))
            found[unseen[self._hinted(unseen, correlated[1:], usable[1:])], 0] = True
        return found

    def _hinted(
        self, pages: IntArray, gains: list[npt.NDArray[np.float32]], usable: list[BoolArray]
    ) -> BoolArray:
        """Tell which of some pages, that do not show the profile's order, hint at another one."""
        hinted = np.zeros(len(pages), np.bool_)
        for gain, usable_sets in zip(gains, usable, strict=True):
            if len(pages):
                hinted |= is_hinted(gain[pages], usable_sets[pages], MARGIN)
        return hinted

    def _unpacked(
        self, seen: npt.NDArray[np.uint8]
    ) -> tuple[list[npt.NDArray[np.float32]], list[BoolArray], BoolArray]:
        """Part what `_launch_checks` packed."""
        sets = [rows.shape[1] * len(self._kind.form.pieces) for rows in self._rows]
        count = len(seen) // (sum(sets) * 5 + 2)
        ends = np.cumsum([4 * count * n for n in sets] + [count * n for n in sets])
        parts = np.split(seen, ends)
        correlated = [part.view(np.float32).reshape(count, -1) for part in parts[: len(sets)]]
        marks = [part.view(np.bool_).reshape(count, -1) for part in parts[len(sets) :]]
        return correlated, marks[:-1], marks[-1]

    # --- launches ---

    def scatter(self, count: int) -> None:
        """Put the first objects of the staging buffer into the pools."""
        self._copy(self._plans, self._lane.staging, self._places, self._lane.pools, self._slots,
                   count)  # fmt: skip

    def look_at_order(self, count: int) -> list[Correlations]:
        """Correlate the rows of each look, the profile's order first: [n, sets] each."""
        return [self._correlated(n, self._slots[:count]) for n in range(len(self._rows))]

    def _launch_checks(self, count: int) -> torch.Tensor:
        """Scatter and look; all results in one tensor of bytes, for one copy to the host."""
        self.scatter(count)
        looks = self.look_at_order(count)
        results = [own for own, _ in looks] + [usable for _, usable in looks]
        results.append(self._flags(count))
        return torch.cat([result.reshape(-1).view(torch.uint8) for result in results])

    def _launch_digests(self, count: int) -> torch.Tensor:
        self._lane.staging[: count * self._kind.step].fill_(POISON)
        self._copy(self._back, self._lane.pools, self._slots, self._lane.staging, self._places,
                   count)  # fmt: skip
        ranges = self._ranges if count == self.most else self._digestible(count)
        return digest_ranges(self._lane.staging, ranges)

    def _copy(
        self,
        plans: Sequence[CopyPlan],
        source: torch.Tensor,
        source_places: torch.Tensor,
        destination: torch.Tensor,
        destination_places: torch.Tensor,
        count: int,
    ) -> None:
        for plan in plans:
            self._provider.copy(
                plan, source, source_places[:count], destination, destination_places[:count]
            )

    def _flags(self, count: int) -> torch.Tensor:
        layers = len(self._kind.layers)
        found = torch.zeros((count, 2), dtype=torch.bool, device=self._lane.device)
        for piece, fields in self._kind.fields:
            for field, counts in zip(fields, self._look(piece, fields, count), strict=True):
                by_object = counts.reshape(count, layers, -1).sum(1)
                scales = field.scale_floor is not None
                bad = by_object[:, BAD_SCALE] if scales else by_object[:, NAN] + by_object[:, INF]
                found[:, 0] |= (bad + by_object[:, ZERO_HEADS]) > 0
                if not field.excusable:
                    found[:, 1] |= bad > 0
        return found

    def _look(self, piece: PoolPiece, fields: Sequence[Field], count: int) -> list[torch.Tensor]:
        return block_statistics(
            self._lane.pools[self.most * piece.offset :],
            self._blocks[: count * len(self._kind.layers)],
            piece.slot_bytes,
            fields,
        )

    def _correlated(self, number: int, slots: torch.Tensor) -> Correlations:
        piece = self._kind.form.pieces[0]
        return correlations(
            self._lane.pools,
            self._rows[number],
            slots,
            self._kind.looks[number],
            weights=(1.0, -1.0) if number else (0.5, 0.5),
            slot_bytes=piece.slot_bytes,
            tensor_bytes=self.most * piece.layers * piece.slot_bytes,
            tensors=len(self._kind.form.pieces),
        )

    def _digestible(self, count: int) -> Ranges:
        offsets = np.arange(count, dtype=np.int64) * self._kind.step
        sizes = np.full(count, self._kind.nbytes, dtype=np.int64)
        return ranges_of(self._lane.staging, offsets, sizes, upload=self._lane.to_device)

    def _captured(self, launch: Callable[[int], T]) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """Capture launches for all slots, after a first time that compiles them.

        None where the device has no memory for that: made anew, for fewer objects, launches need
        less. While this thread captures, no other one may use the device.
        """
        lane = self._lane
        if lane.stream is None or not self._provider.capturable:
            return None
        kept = len(lane.graphs)
        try:
            launch(self.most)
            lane.wait()
            torch.cuda.empty_cache()  # the graph has memory of its own
            graph = torch.cuda.CUDAGraph()
            lane.graphs.append(graph)  # which is not to be destroyed once the device has failed
            with _capturing(graph, lane):
                results = launch(self.most)
        except RuntimeError as error:  # torch.OutOfMemoryError, or CUDA's as it builds the graph
            if "out of memory" not in str(error):
                raise
            del lane.graphs[kept:]
            return None
        return graph, results


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, lane: Lane) -> Iterator[None]:
    graph.capture_begin(pool=lane.graph_memory, capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # what went wrong has ended the capture, and says more
            graph.capture_end()
        raise
    graph.capture_end()
