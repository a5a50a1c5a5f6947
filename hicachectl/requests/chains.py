"""Requests as chains of pages or blocks, in columns, and the forest of their prefixes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace as changed

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.hashing import (
    HASH_BYTES,
    namespace_seed,
    page_hashes,
    restorable_pages,
)
from hicachectl.formats.models.flags import canonical_algorithm, hash_unit
from hicachectl.formats.objects import PAGE_DIGITS
from hicachectl.formats.releases import release_of
from hicachectl.formats.wording import GIVE_PROFILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.requests.forms import Request

    Blocks = npt.NDArray[np.int32]
    Names = npt.NDArray[np.uint8] | npt.NDArray[np.int64]

MAX_REFERENCES = 2**31 - 1
LABELS = ("model", "salt", "adapter", "session", "server")
_ROW = ("lengths", "prompt_blocks", "tokens", "reach", "output_tokens", "starts")
_REFERENCES_AT_ONCE = 1 << 20
_IDS_AT_ONCE = 1 << 22
# Ids below this many times (references numbered so far + _REFERENCES_AT_ONCE) are small.
_LARGEST_SHARE = 4
_SAMPLE_REQUESTS = 8
_SAMPLE_TOKENS = 1026  # enough for a page of 1024 tokens, the next token, and a bigram

_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), "<u2")


@dataclass(frozen=True, slots=True)
class Hashing:
    """Rules by which tokens become pages.

    page_size: number of tokens of a page.
    bigram: whether pairs of tokens are hashed.
    seeds: whether extra_key and cache_salt seed the hashes, as in SGLang 0.5.20 and later.
    """

    page_size: int
    bigram: bool = False
    seeds: bool = True

    @classmethod
    def of(cls, profile: Profile) -> Hashing:
        """Return the hashing of a profile. An inferred profile has none (`Profile.inferred`)."""
        return cls(
            profile.page_size, profile.hash_unit == "bigram", release_of(profile.sglang).seeds
        )

    @classmethod
    def of_flags(cls, page_size: int, algorithm: str, sglang: str) -> Hashing:
        """Return the hashing of servers with these flags.

        page_size: number of tokens of a page.
        algorithm: value of --speculative-algorithm; empty if the servers have none.
        sglang: release of SGLang.
        Raises ProfileError for an unknown algorithm or release.
        """
        unit = hash_unit(canonical_algorithm(algorithm))
        return cls(page_size, unit == "bigram", release_of(sglang).seeds)

    def hashes(self, request: Request) -> npt.NDArray[np.uint8]:
        """Return the hashes of a request's full pages: [pages, 32].

        Raises FormatError that names the line of the request.
        """
        try:
            seed = namespace_seed(request.extra_key, request.cache_salt) if self.seeds else None
            return page_hashes(request.token_ids, self.page_size, bigram=self.bigram, prior=seed)
        except FormatError as error:
            raise FormatError(f"{request.where}: {error}") from error

    def reach(self, tokens: int) -> int:
        """Return the largest number of pages of a prompt that a server can take from a store.

        tokens: number of tokens of the prompt.
        """
        return restorable_pages(tokens, self.page_size, bigram=self.bigram)


@dataclass(frozen=True, eq=False, slots=True)
class Forest:
    """Forest of the prefixes of blocks.

    parents: [blocks] int32, block before the block in its chain; -1 for the first block.
    depths: [blocks] int32, number of blocks before the block in its chain.
    """

    parents: Blocks
    depths: Blocks

    def __len__(self) -> int:
        return len(self.parents)

    def of(self, blocks: IntArray) -> Forest:
        """Return the forest of some of the blocks, numbered in the order of `blocks`.

        blocks: distinct blocks, with all blocks of their prefixes.
        """
        # First blocks have parent -1, which indexes the last entry. This entry stays -1.
        numbers = np.full(len(self) + 1, -1, np.int32)
        numbers[blocks] = np.arange(len(blocks))
        return Forest(numbers[self.parents[blocks]], self.depths[blocks])

    def closed(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the value of each block, raised to the largest value of any block after it.

        A block is of no use without the blocks before it. So each of those blocks is worth at least
        as much as the block.
        """
        closed = values.copy()
        by_depth = np.argsort(self.depths, kind="stable")
        levels = np.searchsorted(self.depths[by_depth], np.arange(self.depths.max(initial=0) + 2))
        for start, end in zip(levels[-2:0:-1].tolist(), levels[:1:-1].tolist(), strict=True):
            level = by_depth[start:end]
            np.maximum.at(closed, self.parents[level], closed[level])
        return closed


class Labels(NamedTuple):
    """One text for each request, such as its model.

    names: distinct texts; None for requests without a text.
    ids: [requests] int32, index in `names` of the request's text.
    """

    names: tuple[str | None, ...]
    ids: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Requests:
    """Chains of blocks, one for each request. A block is a page, or the block of a trace.

    source: name of the input, for messages.
    names: [distinct, 32] uint8, page hashes; or [distinct] int64, block ids. Blocks are in the
        order of their first use, so each block comes after the blocks of its prefix.
    blocks: [references] int32, indices into `names`, one chain after another.
    offsets: [requests + 1] int64. Request i has blocks[offsets[i]:offsets[i + 1]].
    tokens: [requests] int64, number of prompt tokens; -1 if unknown.
    reach: [requests] int64, number of leading blocks that a server can take from a store. The page
        of the last prompt token is out of reach, because a server always computes that token. All
        blocks with ids are within reach. So are all pages if the input does not state the number of
        tokens, or if the page size is unknown.
    output_tokens: [requests] int64, number of generated tokens; -1 if unknown.
    prompt_blocks: [requests] int64, number of blocks of the prompt. Blocks of generated tokens may
        follow in the chain.
    block_tokens: number of tokens of a full block; 0 if unknown.
    times: [requests] float64, time in the unit of the input; None if unknown.
    seconds_per_unit: number of seconds in one unit of `times`; None if unknown.
    starts: [requests] int64, place of the request in the input, for `Trace.again`; None if a
        request has no place.
    cached: [requests, 3] int64, number of prompt tokens that device, host and storage served; -1 if
        unknown. If only the sum is known, it stands first. None if no request has such numbers.
    labels: texts of requests by kind (`LABELS`). Kinds that no request has are left out.
    sample: first tokens of the first requests; empty if only hashes are known.
    hashing: rules by which tokens became these pages; None for block ids, and if unknown.
    """

    names: Names
    blocks: Blocks
    offsets: IntArray
    tokens: IntArray
    reach: IntArray
    output_tokens: IntArray
    prompt_blocks: IntArray
    block_tokens: int = 0
    times: npt.NDArray[np.float64] | None = None
    seconds_per_unit: float | None = None
    starts: IntArray | None = None
    cached: IntArray | None = None
    labels: Mapping[str, Labels] = field(default_factory=dict)
    sample: tuple[Request, ...] = ()
    hashing: Hashing | None = None
    source: str = ""
    _origin: tuple[Requests, IntArray | None] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def hashed(self) -> bool:
        """Whether blocks are pages, named by their hashes."""
        return self.names.ndim == 2

    @property
    def page_size(self) -> int | None:
        """Number of tokens of a page; None if unknown."""
        return None if self.hashing is None else self.hashing.page_size

    @cached_property
    def page_names(self) -> pa.StringArray:
        """Hashes of the distinct pages, in hexadecimal digits."""
        return hex_pages(self.names.astype(np.uint8, copy=False))

    @cached_property
    def forest(self) -> Forest:
        """Forest of the blocks.

        Raises FormatError if a block follows different blocks in two requests. The name of such a
        block stands for two prefixes, so no plan is possible.
        """
        if self._origin is not None:
            origin, used = self._origin
            return origin.forest if used is None else origin.forest.of(used)
        parents = np.full(len(self.names), -1, np.int32)
        depths = np.zeros(len(self.names), np.int32)
        for refs, before, depth in self._references():
            parents[refs] = before
            depths[refs] = depth
        for refs, before, _ in self._references():
            if len(wrong := np.flatnonzero(parents[refs] != before)):
                first = wrong[0]
                said = self._two_parents(refs[first], parents[refs[first]], before[first])
                raise FormatError(f"{self.source}: {said}")
        return Forest(parents, depths)

    def _references(self) -> Iterator[tuple[Blocks, Blocks, Blocks]]:
        """Yield the blocks of some requests, the block before each block, and each block's depth.

        To bound memory, each step takes about a million references at most, or one longer request.
        """
        first, offsets = 0, self.offsets
        while first < len(self):
            most = offsets[first] + _REFERENCES_AT_ONCE
            last = max(int(np.searchsorted(offsets, most, side="right")) - 1, first + 1)
            refs = self.blocks[offsets[first] : offsets[last]]
            _, places = _ranges(
                np.zeros(last - first, np.int64), np.diff(offsets[first : last + 1])
            )
            before = np.full(len(refs), -1, np.int32)
            before[1:] = refs[:-1]
            before[places == 0] = -1
            yield refs, before, places.astype(np.int32)
            first = last

    def _two_parents(self, block: int, parent: int, other: int) -> str:
        what = "page" if self.hashed else "block"

        def spell(number: int) -> str:
            return f"no {what}" if number < 0 else f"{what} {self.name_of(number)}"

        remedy = (
            "a chain must begin with the first page of its prefix"
            if self.hashed
            else "equal ids must mean equal prefixes, not only equal contents"
        )
        return (
            f"{spell(block)} follows {spell(parent)} in one request and {spell(other)} in another; "
            f"{remedy}"
        )

    def name_of(self, block: int) -> str:
        """Return the name of a block, as in plan files."""
        name = self.names[block]
        return name.tobytes().hex() if self.hashed else str(name)

    def refuse_block_ids(self, remedy: str) -> None:
        """Raise UsageError if blocks are not pages."""
        if not self.hashed:
            raise UsageError(
                f"{self.source}: has block ids, which do not give the keys of pages; {remedy}"
            )

    def tokens_requested(self, page_size: int) -> IntArray:
        """Return the number of tokens of each request that count as 100%: [requests].

        These are the tokens of the pages within reach. A request with no page within reach counts
        with all its tokens, although none of them can be restored.
        """
        return np.where(self.reach == 0, np.maximum(self.tokens, 0), self.reach * page_size)

    def requested_tokens(self, page_size: int) -> int:
        """Return the sum of `tokens_requested`."""
        return int(self.tokens_requested(page_size).sum())

    def within_reach(self) -> Requests:
        """Return the requests with each chain cut to its reach."""
        return self.cut(self.reach)

    def cut(self, lengths: IntArray) -> Requests:
        """Return the requests with each chain cut to its first blocks.

        lengths: [requests] number of blocks to keep.
        """
        if np.array_equal(lengths, np.diff(self.offsets)):
            return self
        offsets, places = _ranges(self.offsets[:-1], lengths)
        shorter = {
            name: np.minimum(getattr(self, name), lengths) for name in ("reach", "prompt_blocks")
        }
        return self._made_of(places, fewer=True, offsets=offsets, **shorter)

    def merged(self, count: int) -> Requests:
        """Return the requests with every `count` blocks merged into one block.

        Blocks at the end of a chain that are too few for a new block are left out. The last of the
        merged blocks names the new block, because its name stands for the whole prefix. This name
        is not the hash of a page of the new size, so the hashing of the result is unknown.
        """
        if count == 1:
            return self
        lengths = np.diff(self.offsets) // count
        offsets, numbers = _ranges(np.zeros(len(self), np.int64), lengths)
        places = np.repeat(self.offsets[:-1], lengths) + numbers * count + count - 1
        prompts, size = self.prompt_blocks // count, self.block_tokens * count
        merged = self._made_of(
            places, fewer=True, offsets=offsets, reach=self.reach // count, prompt_blocks=prompts
        )
        return replace(merged, block_tokens=size, hashing=None, _origin=None)

    def after(self, lengths: IntArray, reach: IntArray) -> Requests:
        """Return the requests without their first blocks.

        lengths: [requests] number of blocks to leave out.
        reach: [requests] number of the remaining blocks that a server asks a store for.
        """
        offsets, places = _ranges(self.offsets[:-1] + lengths, np.diff(self.offsets) - lengths)
        prompts = np.maximum(self.prompt_blocks - lengths, 0)
        return self._made_of(
            places, fewer=False, offsets=offsets, reach=reach, prompt_blocks=prompts
        )

    def take(self, order: IntArray) -> Requests:
        """Return some of the requests. order: distinct numbers of requests, in the wanted order."""
        offsets, places = _ranges(self.offsets[:-1][order], np.diff(self.offsets)[order])
        names = ("tokens", "reach", "output_tokens", "prompt_blocks", "times", "starts", "cached")
        columns: dict[str, Any] = {name: getattr(self, name) for name in names}
        columns = {n: None if column is None else column[order] for n, column in columns.items()}
        columns["labels"] = {
            name: Labels(found.names, found.ids[order]) for name, found in self.labels.items()
        }
        return self._made_of(places, fewer=len(order) < len(self), offsets=offsets, **columns)

    def in_time_order(self) -> Requests:
        """Return the requests in the order of their times; unchanged if the times are unknown.

        The blocks keep their numbers.
        """
        if self.times is None or not (np.diff(self.times) < 0).any():
            return self
        return self.take(np.argsort(self.times, kind="stable"))

    def _made_of(self, places: IntArray, *, fewer: bool, **columns: Any) -> Requests:
        """Return requests with other columns, and with the blocks at some places of `blocks`.

        places: indices into `self.blocks`.
        fewer: whether names may become unused, and are to be dropped then.
        columns: columns to replace, by name.
        """
        blocks, names, used = self.blocks[places], self.names, None
        if fewer:
            coded = pa.array(blocks).dictionary_encode()
            used = coded.dictionary.to_numpy().astype(np.int64)
            blocks, names = coded.indices.to_numpy(), self.names[used]
        return replace(self, names=names, blocks=blocks, _origin=(self, used), **columns)


def requests_of(
    requests: Iterable[Request], hashing: Hashing | None, *, source: str = "requests"
) -> Requests:
    """Return requests in columns, without their tokens, in the same order.

    hashing: hashing for token ids; None if no request has token ids.
    Raises FormatError for a wrong request, with its line. Raises UsageError if there is no request,
    or if a request has token ids and `hashing` is None.
    """
    columns = Columns(hashing)
    for request in requests:
        columns.add(request)
    if not len(columns):
        raise UsageError(f"{source}: has no requests; give at least one")
    return columns.finished(source)


def requests_of_pages(
    chains: Iterable[list[str]], hashing: Hashing | None, *, source: str = "pages"
) -> Requests:
    """Return requests of which only the page hashes are known.

    hashing: rules by which the pages were hashed; None if unknown.
    """
    columns = Columns(hashing)
    for chain in chains:
        columns.add_pages(chain)
    return columns.finished(source)


class Columns:
    """Columns that grow while requests are read."""

    def __init__(self, hashing: Hashing | None, *, outputs: bool = False) -> None:
        """Begin without requests.

        hashing: hashing for token ids; None if no request has token ids.
        outputs: whether chains also have the pages of generated tokens.
        """
        self._hashing = hashing
        self._outputs = outputs
        self._hashes: list[npt.NDArray[np.uint8]] = []
        self._ids = _DistinctIds()
        self._hashed: bool | None = None
        self._timed: bool | None = None
        self._block_tokens = 0
        self._sample: list[Request] = []
        self._times = array("d")
        self._rows = array("q")  # one row after another, each with the members of `_ROW`
        self._cached = array("q")
        self._labels = {name: _LabelColumn() for name in LABELS}

    def __len__(self) -> int:
        return len(self._rows) // len(_ROW)

    def add(self, request: Request) -> None:
        """Add a request.

        Raises FormatError that names the line if the request is wrong, or if earlier requests have
        another form. Raises UsageError for token ids without hashing.
        """
        hashed, timed = request.block_ids is None, request.time is not None
        _refuse_other(request, self._hashed, hashed, '"token_ids"', '"hash_ids"')
        _refuse_other(request, self._timed, timed, "a timestamp", "no timestamp")
        self._hashed, self._timed = hashed, timed
        number = len(self)
        if request.time is not None:
            self._times.append(request.time)
        if request.cached is not None:
            self._cached.extend((-1,) * (3 * number - len(self._cached)))
            self._cached.extend(request.cached)
        texts = (
            request.model, request.cache_salt, request.adapter, request.session, request.server,
        )  # fmt: skip
        if texts.count(None) != len(texts):
            for name, text in zip(LABELS, texts, strict=True):
                if text is not None:
                    self._labels[name].set(number, text)
        if request.block_ids is not None:
            self._add_blocks(request, request.block_ids)
        elif request.page_hashes is not None:
            self.add_pages(
                request.page_hashes, request.input_tokens, request.output_tokens, request.start
            )
        else:
            self._add_tokens(request)

    def add_pages(
        self, pages: list[str], tokens: int = -1, output_tokens: int = -1, start: int = -1
    ) -> None:
        """Add a request by its pages.

        tokens: number of prompt tokens; -1 if unknown.
        output_tokens: number of generated tokens; -1 if unknown.
        start: place of the request in the input; -1 if it has none.
        """
        self._hashed = True
        hashes = np.frombuffer(bytes.fromhex("".join(pages)), np.uint8).reshape(-1, HASH_BYTES)
        self._hashes.append(hashes)
        count = reach = len(hashes)
        if self._hashing is not None:
            if tokens >= 0:
                reach = min(count, self._hashing.reach(tokens))
            else:
                tokens = count * self._hashing.page_size
        self._rows.extend((count, count, tokens, reach, output_tokens, start))

    def _add_blocks(self, request: Request, ids: list[int]) -> None:
        self._ids.add(ids)
        size, count = request.block_tokens, len(ids)
        if size and size != self._block_tokens:
            if self._block_tokens:
                raise FormatError(
                    f"{request.where}: has blocks of {size} tokens, but earlier lines have blocks "
                    f"of {self._block_tokens}; write all lines alike"
                )
            self._block_tokens = size
        tokens = request.input_tokens
        self._rows.extend((count, count, tokens, count, request.output_tokens, request.start))

    def _add_tokens(self, request: Request) -> None:
        hashing, tokens = self._hashing, request.token_ids
        if hashing is None:
            raise UsageError(f"Hashing token ids needs a page size; {GIVE_PROFILE}, or --page-size")
        count = len(tokens)
        # SGLang never stores the last generated token: only the step for a next token would
        # compute its KV.
        generated = list(request.output_ids[:-1]) if self._outputs else []
        whole = changed(request, token_ids=tokens + generated) if generated else request
        hashes = hashing.hashes(whole)
        self._hashes.append(hashes)
        prompt = hashing.reach(count + 1) if generated else len(hashes)
        reach, outputs = hashing.reach(count), request.output_tokens
        self._rows.extend((len(hashes), prompt, count, reach, outputs, request.start))
        if len(self._sample) < _SAMPLE_REQUESTS:
            self._sample.append(changed(request, token_ids=list(tokens[:_SAMPLE_TOKENS])))

    def finished(
        self, source: str, *, unit: float | None = None, block_tokens: int | None = None
    ) -> Requests:
        """Return the requests. Raises FormatError for too many references.

        unit: number of seconds in one unit of times that are not Unix times; None if unknown.
        block_tokens: number of tokens of a block, used if no request states it; None if unknown.
        """
        rows = _numpy(self._rows).reshape(-1, len(_ROW))
        columns = dict(zip(_ROW, np.ascontiguousarray(rows.T), strict=True))
        lengths, tokens, starts = (columns.pop(name) for name in ("lengths", "tokens", "starts"))
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] > MAX_REFERENCES:
            raise FormatError(
                f"{source}: has {offsets[-1]} block references, but at most 2^31-1 are allowed; "
                "split the file"
            )
        hashing = None if self._hashed is False else self._hashing
        names, blocks = self._ids.finished() if self._hashed is False else self._distinct()
        if hashing is not None:
            block_tokens = hashing.page_size
        else:
            block_tokens = self._block_tokens or block_tokens or _block_tokens(tokens, lengths)
        times = np.array(self._times, np.float64) if self._timed else None
        labels = {name: column.finished(len(lengths)) for name, column in self._labels.items()}
        cached = None
        if self._cached:
            self._cached.extend((-1,) * (3 * len(lengths) - len(self._cached)))
            cached = _numpy(self._cached).reshape(-1, 3)
        return Requests(
            names=names,
            blocks=blocks,
            offsets=offsets,
            tokens=tokens,
            **columns,
            block_tokens=block_tokens,
            times=times,
            seconds_per_unit=None if times is None else _seconds_per_unit(times, unit),
            starts=None if (starts < 0).any() else starts,
            cached=cached,
            labels={name: found for name, found in labels.items() if found is not None},
            sample=tuple(self._sample),
            hashing=hashing,
            source=source,
        )

    def _distinct(self) -> tuple[Names, Blocks]:
        """Return the distinct pages, and the index of each page among them."""
        hashes = np.concatenate([np.zeros((0, HASH_BYTES), np.uint8), *self._hashes])
        self._hashes.clear()
        # Compare only the first 64 bits of each hash at first, because a dictionary of numbers is
        # several times faster than a dictionary of 32-byte values.
        words = np.ascontiguousarray(hashes[:, :8]).view(np.int64).ravel()
        coded = pa.array(words).dictionary_encode()
        blocks = coded.indices.to_numpy()
        first = np.zeros(len(coded.dictionary), np.int64)
        first[blocks[::-1]] = np.arange(len(blocks))[::-1]
        names = hashes[first]
        if np.array_equal(names[blocks], hashes):
            return names, blocks
        # Different hashes have equal first bits, so compare whole hashes.
        fixed = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(HASH_BYTES), len(hashes), [None, pa.py_buffer(hashes)]
        )
        coded = fixed.dictionary_encode()
        names = np.frombuffer(coded.dictionary.buffers()[1], np.uint8)
        names = names[: len(coded.dictionary) * HASH_BYTES].reshape(-1, HASH_BYTES)
        return names, coded.indices.to_numpy()


class _DistinctIds:
    """Distinct block ids in the order of their first use, and a number for each reference.

    References are numbered some millions at a time, so that their ids need not stay in memory. As
    long as all ids are small, a table has the number of each id. After the first large or negative
    id, a sorted array of ids replaces the table.
    """

    def __init__(self) -> None:
        self._waiting = array("q")
        self._blocks = array("i")
        self._names = array("q")
        self._table = np.full(_REFERENCES_AT_ONCE, -1, np.int32)  # number of each small id
        self._known: tuple[IntArray, Blocks] | None = None  # sorted ids, and their numbers

    def add(self, ids: list[int]) -> None:
        """Add the ids of a request."""
        self._waiting.fromlist(ids)
        if len(self._waiting) >= _IDS_AT_ONCE:
            self._number()

    def finished(self) -> tuple[Names, Blocks]:
        """Return the distinct ids, and for each reference the index of its id."""
        self._number()
        return _numpy(self._names), np.frombuffer(self._blocks, np.int32)

    def _number(self) -> None:
        ids = _numpy(self._waiting)
        self._waiting = array("q")
        if self._known is None and len(ids):
            most = int(ids.max())
            if ids.min() < 0 or most >= _LARGEST_SHARE * (len(self._blocks) + _REFERENCES_AT_ONCE):
                small = np.flatnonzero(self._table >= 0)
                self._known = small, self._table[small]
                self._table = self._table[:0]
            elif most >= len(self._table):
                grown = np.full(max(most + 1, len(self._table) * 3 // 2), -1, np.int32)
                grown[: len(self._table)] = self._table
                self._table = grown
        numbers = self._numbers_of_small(ids) if self._known is None else self._numbers_of(ids)
        self._blocks.frombytes(numbers.tobytes())

    def _numbers_of_small(self, ids: IntArray) -> Blocks:
        table = self._table
        new = ids[table[ids] < 0]
        places = np.arange(len(new), dtype=np.int32)
        # The last assignment to an entry wins. In reverse order, this is the first reference.
        table[new[::-1]] = places[::-1]
        first = new[table[new] == places]
        table[first] = np.arange(len(self._names), len(self._names) + len(first))
        self._names.frombytes(first.tobytes())
        return table[ids]

    def _numbers_of(self, ids: IntArray) -> Blocks:
        assert self._known is not None
        known, numbers = self._known
        found, places, which = np.unique(ids, return_index=True, return_inverse=True)
        at = np.searchsorted(known, found)
        is_new = np.ones(len(found), bool)
        inside = at < len(known)
        is_new[inside] = known[at[inside]] != found[inside]
        own = np.empty(len(found), np.int32)
        own[~is_new] = numbers[at[~is_new]]
        order = np.argsort(places[is_new])
        new = found[is_new]
        of_new = np.empty(len(new), np.int32)
        of_new[order] = np.arange(len(self._names), len(self._names) + len(new))
        own[is_new] = of_new
        self._names.frombytes(new[order].tobytes())
        self._known = np.insert(known, at[is_new], new), np.insert(numbers, at[is_new], of_new)
        return own[which]


class _LabelColumn:
    """Texts of requests. Equal texts are stored once."""

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {}
        self._ids = array("i")

    def set(self, request: int, text: str) -> None:
        """Set the text of a request. Calls must come in ascending order of `request`."""
        self._fill(request)
        self._ids.append(self._numbers.setdefault(text, len(self._numbers)))

    def _fill(self, count: int) -> None:
        if (missing := count - len(self._ids)) > 0:
            self._ids.extend((self._numbers.setdefault(None, len(self._numbers)),) * missing)

    def finished(self, count: int) -> Labels | None:
        """Return the texts of `count` requests; None if no request has a text."""
        if not self._numbers:
            return None
        self._fill(count)
        return Labels(tuple(self._numbers), np.frombuffer(self._ids, np.int32))


def _seconds_per_unit(times: npt.NDArray[np.float64], unit: float | None) -> float | None:
    """Return the number of seconds in one unit of times.

    The size of the smallest time shows whether the times are Unix seconds or Unix milliseconds. If
    they are neither, return `unit`.
    """
    first = float(times.min(initial=np.inf))
    if 1e9 <= first < 1e11:
        return 1.0
    return 0.001 if 1e12 <= first < 1e14 else unit


def _ranges(starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Return the offsets of ranges put one after another, and the places of all their items."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets, np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)


def _numpy(values: array[int]) -> IntArray:
    return np.frombuffer(values, np.int64) if values else np.zeros(0, np.int64)


def _refuse_other(request: Request, before: bool | None, now: bool, yes: str, no: str) -> None:
    """Raise FormatError if a request differs from earlier requests in a property.

    before: whether earlier requests have the property; None if there are none.
    now: whether this request has the property.
    yes: words for a request with the property.
    no: words for a request without the property.
    """
    if before is not None and before != now:
        mine, theirs = (yes, no) if now else (no, yes)
        raise FormatError(
            f"{request.where}: has {mine}, but earlier lines have {theirs}; write all lines alike"
        )


def _block_tokens(tokens: IntArray, lengths: IntArray) -> int:
    """Return the number of tokens of a block that fits the lengths of all prompts.

    The number k fits a prompt of n tokens with ceil(n / k) blocks. If several numbers fit all
    prompts, return the smallest power of two among them. If none of them is a power of two, return
    the smallest. Return 0 if no number fits, or if a length is unknown.
    """
    known = (tokens > 0) & (lengths > 0)
    if not known.any() or not (tokens >= 0).all():
        return 0
    tokens, blocks = tokens[known], lengths[known]
    least = int((-(-tokens // blocks)).max())
    several = blocks > 1
    most = int(((tokens[several] - 1) // (blocks[several] - 1)).min(initial=MAX_REFERENCES))
    if least > most:
        return 0
    power = 1 << (least - 1).bit_length()
    return power if power <= most else least


def hex_pages(pages: npt.NDArray[np.uint8]) -> pa.StringArray:
    """Return page hashes as the hexadecimal digits of keys. pages: [n, 32] bytes."""
    width = PAGE_DIGITS
    text = _HEX[pages]
    # Arrow's 32-bit offsets can address only 2 GiB of text.
    kind, step = (pa.string(), np.int32) if text.nbytes < 1 << 31 else (pa.large_string(), np.int64)
    ends = np.arange(len(pages) + 1, dtype=step) * width
    return pa.Array.from_buffers(kind, len(pages), [None, pa.py_buffer(ends), pa.py_buffer(text)])
