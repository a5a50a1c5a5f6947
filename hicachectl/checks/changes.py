"""Check whether servers with two settings wrote pages of equal keys and sizes, and since when.

A change of the memory layout, or between dtypes of one width, changes no key and no size. Comparing
pages from before and after the change shows it, even if the profile states the wrong setting.

A dtype shows in the quartiles of an object: the magnitudes that a quarter, half and three quarters
of its numbers do not exceed. Quartiles depend on the model, and hardly on the prompt. Codes without
their sign bits have the same order in every float format, so the same codes are the quartiles in
each. After a change of dtype, new pages read in the new dtype have the quartiles that old pages
have in the old one. If all are read in one dtype, the logarithms of the quartiles are twice as far
apart on one side of the change (fp8), or eight times (16 bits). Neither prompts nor new weights
cause that.

A layout shows in the findings of `checks.layouts`: all of them before some time, or all after it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.checks.evidence import LEAST_OBJECTS, QUARTILES
from hicachectl.checks.findings import findings
from hicachectl.checks.tables import WORD_BYTES, code_dtype_of, sections_of
from hicachectl.formats.layouts import TENSOR_DTYPE_BYTES
from hicachectl.kernels.values import is_inf, is_nan, to_float32
from hicachectl.text.units import counted, exact, written_between

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicachectl.checks.registry import CheckSums
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.kernels.values import Bytes

    Codes = npt.NDArray[np.uint16]
    Octaves = npt.NDArray[np.float64]

# The two dtypes of each width in bytes.
_RIVALS = {2: ("float16", "bfloat16"), 1: ("float8_e4m3fn", "float8_e5m2")}
# The first dtype has 2**factor times as many codes in an octave as the second.
_FACTORS = {2: 3, 1: 1}
_FNUZ = "float8_e4m3fnuz"  # takes the place of float8_e4m3fn on some devices
# Most numbers of an object that are read. Their quartiles vary by a tenth of an octave, no more
# than the quartiles of whole pages.
_NUMBERS = 512
_LEAST_NUMBERS = 256
_LEAST_SHARE = 0.01  # least share of each kind in the compared objects
# Distances in octaves. Between pages of one model, quartiles vary by 0.1, and by 0.5 at most.
_NEAR = 0.4  # most, between quartiles before and after a change, each read in its own dtype
_FAR = 0.8  # least, between quartiles before and after a change, all read in the second dtype
_SCATTER = 0.75  # most, between an object's quartiles and the medians of its kind
_SCATTERED = 0.05  # share of objects that may be further from the medians
_FACTOR_ERROR = 0.35  # most error of the factor between the distances of quartiles, in bits
_ROUNDS = 20  # more than the search for two groups needs
_UNITS_NS = (10**9, 10**6, 10**3)  # units to which a time of a change is rounded, best first
_MISPLACED = 0.05  # share of the rarer kind that may have been written on the wrong side


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Quartiles of objects of one spec.

    width: bytes of a number.
    dtypes: the two dtypes that the numbers may have.
    words: places of the words that are read.
    """

    width: int
    dtypes: tuple[str, str]
    words: IntArray

    def __call__(self, objects: Bytes, rows: IntArray) -> Codes:
        """Return the codes of the quartiles of some of the objects [n, nbytes]: [rows, 3]."""
        words = objects.view("<u4")[rows[:, np.newaxis], self.words]
        codes = words.view(f"<u{self.width}").astype(np.uint16)
        codes &= (1 << 8 * self.width - 1) - 1
        codes.sort(axis=1)  # faster than a partition at three places
        quartiles: Codes = codes[:, [int(share * (codes.shape[1] - 1)) for share in QUARTILES]]
        return quartiles

    def readings(self, codes: Codes) -> dict[str, list[float | None]]:
        """Return the quartiles [3] of an object, read in each dtype; None for no finite number."""
        bits = codes.astype(f"<u{self.width}")
        return {
            dtype: [size if isfinite(size) else None for size in to_float32(bits, dtype).tolist()]
            for dtype in self.dtypes
        }


def quartiles_of(expected: ObjectSpec, profile: Profile) -> Quartiles | None:
    """Return the quartiles of one spec; None if a change of its dtype cannot show.

    This holds for few numbers, numbers of several dtypes, a dtype without another of its width, and
    codes with scales, for which SGLang has one dtype.
    """
    if expected.nbytes % WORD_BYTES:
        return None
    known = {_FNUZ, *chain.from_iterable(_RIVALS.values())}
    plain = [
        (section, section.table.columns[0].dtype)
        for section in sections_of(expected, profile)
        if section.plain and section.table.columns[0].dtype in known
    ]
    if len({dtype for _, dtype in plain}) != 1:
        return None
    width = TENSOR_DTYPE_BYTES[plain[0][1]]
    most = _NUMBERS * width // WORD_BYTES
    words = np.concatenate([section.sample_words(most) for section, _ in plain])
    if len(words) * WORD_BYTES < _LEAST_NUMBERS * width:
        return None
    words = np.sort(np.random.default_rng(0).permutation(words)[:most])
    return Quartiles(width, _rivals(width, profile, expected.coordinate.pool), words)


def _rivals(width: int, profile: Profile | None, pool: str) -> tuple[str, str]:
    """Return the dtypes of one width that numbers of a pool may have."""
    first, second = _RIVALS[width]
    known = None if profile is None else profile.pool(pool)
    if width == 1 and profile is not None and known is not None:
        first = code_dtype_of(profile, known)
    return first, second


# --- judging ---


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Objects of a part, divided into two kinds: two dtypes, or two layouts.

    names: names of the kinds, for messages.
    second: [n] bool, objects of the second kind.
    written_ns: [n] int64, 0 if not known.
    evidence: difference of the kinds, in words.
    """

    names: tuple[str, str]
    second: BoolArray
    written_ns: IntArray
    evidence: str = ""


def check_changes(given: CheckSums) -> Iterator[pa.Table]:
    """Yield values-changed for each pool and part with pages of two dtypes, or two layouts."""
    table = given.table
    by_part: dict[tuple[int, str, str | None], list[pa.Table]] = defaultdict(list)
    listed: dict[tuple[int, str, str | None], int] = defaultdict(int)
    affixes = given.evidence.column("affix").to_numpy()
    for affix in np.unique(affixes).tolist():
        spec = table.specs[affix]
        if spec is not None:
            key = (table.deployment_ids[affix], spec.coordinate.pool, spec.coordinate.part)
            by_part[key].append(given.evidence.filter(pa.array(affixes == affix)))
            listed[key] += int(given.tally.objects[affix])
    for (owner, pool, part), tables in by_part.items():
        deployment = table.deployments[owner]
        profile = deployment.profile
        for kinds in filter(None, (_dtypes(tables, profile, pool), _layouts(tables, profile))):
            every = len(kinds.second) == listed[owner, pool, part]
            since_ns, text = _described(kinds, every=every)
            yield findings(
                "values-changed",
                keys=pa.nulls(1, pa.string()),
                deployments=pa.array([deployment.label(table.grammar)]),
                written_ns=pa.array([since_ns], pa.int64()),
                pools=pa.array([pool]),
                parts=pa.array([part], pa.string()),
                detail=f"model {deployment.names.model!r} {deployment.shard.sizes_text()}: {text}",
            )


def _dtypes(tables: list[pa.Table], profile: Profile | None, pool: str) -> _Kinds | None:
    """Return the two dtypes of a part's objects; None without a change.

    tables: evidence of each rank. Most ranks that have enough objects must show the change.
    """
    ranks: list[_Kinds] = []
    judged = 0
    for seen in tables:
        codes = np.stack([seen.column(f"quartile_{n}").to_numpy() for n in (1, 2, 3)], axis=1)
        width = int(seen.column("width").to_numpy().max())
        known = codes[:, 0] > 0  # a quartile of zero has no logarithm
        if width and np.count_nonzero(known) >= 2 * LEAST_OBJECTS:
            judged += 1
            rivals = _rivals(width, profile, pool)
            kinds = _two_dtypes(codes[known], rivals, _FACTORS[width], _times(seen)[known])
            ranks += [] if kinds is None else [kinds]
    if 2 * len(ranks) <= judged:
        return None
    second = np.concatenate([kinds.second for kinds in ranks])
    times = np.concatenate([kinds.written_ns for kinds in ranks])
    return replace(ranks[0], second=second, written_ns=times)


def _two_dtypes(
    codes: Codes, rivals: tuple[str, str], factor: int, written_ns: IntArray
) -> _Kinds | None:
    """Return the two dtypes of objects of one spec; None for one dtype. codes: [n, 3]."""
    apart = np.log2(np.maximum(codes[:, 2].astype(np.float64) - codes[:, 0], 0.5))
    narrow = _lower_half(apart)
    if _few(narrow):
        return None
    error = abs(np.median(apart[~narrow]) - np.median(apart[narrow]) - factor)
    first, second = (_octaves(codes, dtype) for dtype in rivals)
    centres = [np.median(first[~narrow], axis=0), np.median(second[narrow], axis=0)]
    as_second = np.median(second[~narrow], axis=0)
    if not (
        error <= _FACTOR_ERROR
        and np.abs(centres[0] - centres[1]).max() <= _NEAR
        and np.abs(as_second - centres[1]).max() >= _FAR
        and _gathered(first[~narrow])
        and _gathered(second[narrow])
    ):
        return None
    texts = (
        f"{', '.join(f'{size:.2g}' for size in np.exp2(centre))} in {dtype}"
        for centre, dtype in zip(centres, rivals, strict=True)
    )
    evidence = f"quartiles of the magnitudes are {' and '.join(texts)}"
    return _Kinds(rivals, narrow, written_ns, evidence)


def _few(chosen: BoolArray) -> bool:
    """Return whether too few objects are chosen, or too few are not."""
    fewer = min(np.count_nonzero(chosen), np.count_nonzero(~chosen))
    return bool(fewer < max(LEAST_OBJECTS, _LEAST_SHARE * len(chosen)))


def _gathered(octaves: Octaves) -> bool:
    """Return whether the quartiles of nearly all objects, [n, 3], are near each other."""
    furthest = np.abs(octaves - np.median(octaves, axis=0)).max(axis=1)
    return bool(np.mean(furthest > _SCATTER) <= _SCATTERED)


def _lower_half(values: Octaves) -> BoolArray:
    """Return which values belong to the lower one of two groups: [n]."""
    low, high = values.min(), values.max()
    lower = values <= (low + high) / 2
    for _ in range(_ROUNDS):
        if lower.all() or not lower.any():
            break
        middle = (values[lower].mean() + values[~lower].mean()) / 2
        again = values <= middle
        if np.array_equal(again, lower):
            break
        lower = again
    found: BoolArray = lower
    return found


def _octaves(codes: Codes, dtype: str) -> Octaves:
    """Return the logarithms of codes read in a dtype; -100 for codes without a logarithm."""
    bits = codes.astype(f"<u{TENSOR_DTYPE_BYTES[dtype]}")
    values = to_float32(bits, dtype).astype(np.float64)
    values[is_nan(bits, dtype) | is_inf(bits, dtype) | (values == 0)] = 2.0**-100
    return np.log2(values)


def _layouts(tables: list[pa.Table], profile: Profile | None) -> _Kinds | None:
    """Return the two layouts of a part's objects; None unless one followed the other."""
    seen = pa.concat_tables(tables)
    seen = seen.filter(seen.column("disordered").is_valid())
    second = seen.column("disordered").to_numpy(zero_copy_only=False).astype(np.bool_)
    if profile is None or _few(second):
        return None
    kinds = _Kinds((profile.layout, "another layout"), second, _times(seen))
    return None if _split(kinds) is None else kinds


def _split(kinds: _Kinds) -> tuple[int, int, bool] | None:
    """Return when the last object before a change and the first one after it were written.

    Also return whether the later objects are of the second kind. None if the writes of both kinds
    overlap in time, or if the times are not known.
    """
    order = np.argsort(kinds.written_ns, kind="stable")
    times, second = kinds.written_ns[order], kinds.second[order]
    total = int(second.sum())
    before = np.cumsum(second)[:-1]  # objects of the second kind before each place, from 1
    places = np.arange(1, len(second))
    wrong = before + (len(second) - total) - (places - before)
    wrong = np.stack([len(second) - wrong, wrong]).astype(float)
    wrong[:, times[1:] == times[:-1]] = np.inf
    to_second, place = np.unravel_index(int(np.argmin(wrong)), wrong.shape)
    if wrong[to_second, place] > _MISPLACED * min(total, len(second) - total):
        return None
    return int(times[place]), int(times[place + 1]), bool(to_second)


def _rounded(after_ns: int, until_ns: int, *, early: bool) -> int:
    """Return the roundest time that is later than `after_ns` and not later than `until_ns`.

    early: whether the first of equally round times is returned, not the last.
    """
    for unit in _UNITS_NS:
        rounded = (after_ns // unit + 1 if early else until_ns // unit) * unit
        if after_ns < rounded <= until_ns:
            return int(rounded)
    return until_ns


def _described(kinds: _Kinds, *, every: bool) -> tuple[int | None, str]:
    """Return the time of the change in Unix nanoseconds, and the detail.

    The time is None if the writes of both kinds overlap. If not every object of the part was
    compared, a page written between the last compared one before the change and the first after it
    can be of either kind. Each of the two suggested removals then includes such pages.
    """
    counts = [int((~kinds.second).sum()), int(kinds.second.sum())]
    evidence = f"; {kinds.evidence}" * bool(kinds.evidence)
    change = _split(kinds)
    if change is None:
        both = zip(kinds.names, counts, (~kinds.second, kinds.second), strict=True)
        texts = (f"{name} in {counted(n, 'object')}{_written(kinds, of)}" for name, n, of in both)
        return None, (
            f"numbers are {' and '.join(texts)}{evidence}; servers with both settings wrote them: "
            "remove the pages of the wrong one with hicachectl rm --since --before, or all pages"
        )
    last_ns, first_ns, to_second = change
    old, new = kinds.names if to_second else kinds.names[::-1]
    counts = counts if to_second else counts[::-1]
    end_ns = _rounded(last_ns, first_ns, early=False)
    start_ns = end_ns if every else _rounded(last_ns, first_ns, early=True)
    start, end = exact(start_ns), exact(end_ns)
    then, between = (end, ", none from between") if start != end else ("then", "")
    return end_ns, (
        f"{old} before {start}, {new} since {then} ({counts[0]} and {counts[1]} objects compared"
        f"{between}){evidence}; if the servers write {new} now, remove the older pages with "
        f"hicachectl rm --before {end}; if {old}, the newer ones with --since {start}"
    )


def _written(kinds: _Kinds, chosen: BoolArray) -> str:
    times = kinds.written_ns[chosen]
    return f", {written_between(int(times.min()), int(times.max()))}" if times.all() else ""


def _times(seen: pa.Table) -> IntArray:
    times: IntArray = seen.column("written_ns").fill_null(0).to_numpy()
    return times
