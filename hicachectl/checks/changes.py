"""Check whether servers with two settings wrote pages of equal keys and sizes, and since when.

A change of the memory layout, or between dtypes of one width, changes no key and no size. But a
comparison of pages from before and after the change shows the change, even if the profile states
the wrong setting.

A dtype shows in the quartiles of an object: the magnitudes that a quarter, half and three quarters
of its numbers do not exceed. Quartiles depend on the model, and hardly on the prompt. The code of a
number is its bits without the sign. Codes have the same order in every float format, so the codes
of the quartiles are the same in every format. After a change of dtype, new pages read in the new
dtype have the same quartiles as old pages read in the old dtype. If all pages are read in one
dtype, the logarithms of an object's quartiles are further apart on one side of the change: twice as
far for fp8, eight times for 16 bits. Prompts and new weights do not cause such a difference.

A change of layout shows in the findings of `checks.layouts`: all of them are about pages from
before some time, or all are about pages from after it.
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
# By width: the first dtype of _RIVALS has 2**factor times as many codes in an octave as the second.
_FACTORS = {2: 3, 1: 1}
_FNUZ = "float8_e4m3fnuz"  # some devices use it instead of float8_e4m3fn
# Most numbers of an object that are read. Their quartiles vary by a tenth of an octave, which is no
# more than the quartiles of all numbers of a page vary.
_NUMBERS = 512
_LEAST_NUMBERS = 256
_LEAST_SHARE = 0.01  # least share of each dtype, or layout, in the compared objects
# The next three distances are in octaves. Between pages of one model, quartiles usually vary by
# 0.1, and never by more than 0.5.
# Largest distance between the quartiles before a change, read in the first dtype, and the quartiles
# after it, read in the second dtype.
_NEAR = 0.4
# Smallest distance between the quartiles before and after a change, all read in the second dtype.
_FAR = 0.8
# Largest distance between the quartiles of an object and the medians of all objects of its dtype.
_SCATTER = 0.75
_SCATTERED = 0.05  # largest share of objects that are further than _SCATTER from the medians
# Largest difference between a factor of _FACTORS and the factor that is measured.
_FACTOR_ERROR = 0.35
_ROUNDS = 20  # most rounds of the search for two groups, which needs fewer
_UNITS_NS = (10**9, 10**6, 10**3)  # units to round the time of a change to, the preferred first
# Most objects that may lie on the wrong side of a change in time, as a share of the rarer kind.
_MISPLACED = 0.05


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Reader of the quartiles of objects of one spec.

    width: bytes of a number.
    dtypes: the two dtypes that the numbers may have.
    words: places of the 32-bit words of an object that are read.
    """

    width: int
    dtypes: tuple[str, str]
    words: IntArray

    def __call__(self, objects: Bytes, rows: IntArray) -> Codes:
        """Return the codes of the quartiles of some objects: [rows, 3].

        objects: [n, nbytes].
        rows: indices of the objects to read.
        """
        words = objects.view("<u4")[rows[:, np.newaxis], self.words]
        codes = words.view(f"<u{self.width}").astype(np.uint16)
        codes &= (1 << 8 * self.width - 1) - 1
        codes.sort(axis=1)  # a sort is faster than a partition at three places
        quartiles: Codes = codes[:, [int(share * (codes.shape[1] - 1)) for share in QUARTILES]]
        return quartiles

    def readings(self, codes: Codes) -> dict[str, list[float | None]]:
        """Return the quartiles [3] of an object by dtype, read in that dtype.

        A quartile is None if it is not finite in the dtype.
        """
        bits = codes.astype(f"<u{self.width}")
        return {
            dtype: [size if isfinite(size) else None for size in to_float32(bits, dtype).tolist()]
            for dtype in self.dtypes
        }


def quartiles_of(expected: ObjectSpec, profile: Profile) -> Quartiles | None:
    """Return the reader of quartiles for one spec; None if quartiles cannot show its dtype.

    They cannot if the object has too few numbers or numbers of several dtypes, or if SGLang has no
    other dtype of the same width, as for codes with scales.
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
    """Objects of a pool and part, divided into two kinds: two dtypes, or two layouts.

    names: names of the two kinds, for messages.
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
    """Return the objects of a pool and part divided by dtype; None if all have one dtype.

    tables: evidence of each rank. More than half of the ranks with enough objects must show two
        dtypes.
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
    """Return the objects of one spec divided by dtype; None if all have one dtype.

    codes: [n, 3], codes of the quartiles.
    """
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
    """Return whether the chosen objects, or the other objects, are too few to be a kind."""
    fewer = min(np.count_nonzero(chosen), np.count_nonzero(~chosen))
    return bool(fewer < max(LEAST_OBJECTS, _LEAST_SHARE * len(chosen)))


def _gathered(octaves: Octaves) -> bool:
    """Return whether nearly all objects have quartiles [n, 3] near the medians."""
    furthest = np.abs(octaves - np.median(octaves, axis=0)).max(axis=1)
    return bool(np.mean(furthest > _SCATTER) <= _SCATTERED)


def _lower_half(values: Octaves) -> BoolArray:
    """Divide the values into two groups, and return which are in the lower group: [n]."""
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
    """Return the objects of a pool and part divided by layout.

    None if all have one layout, or if the writes in the two layouts overlap in time.
    """
    seen = pa.concat_tables(tables)
    seen = seen.filter(seen.column("disordered").is_valid())
    second = seen.column("disordered").to_numpy(zero_copy_only=False).astype(np.bool_)
    if profile is None or _few(second):
        return None
    kinds = _Kinds((profile.layout, "another layout"), second, _times(seen))
    return None if _split(kinds) is None else kinds


def _split(kinds: _Kinds) -> tuple[int, int, bool] | None:
    """Return the times of the last write before a change and of the first write after it.

    Also return whether the objects after the change are of the second kind. Return None if the
    writes of both kinds overlap in time, or if their times are not known.
    """
    order = np.argsort(kinds.written_ns, kind="stable")
    times, second = kinds.written_ns[order], kinds.second[order]
    total = int(second.sum())
    before = np.cumsum(second)[:-1]  # objects of the second kind before places 1, 2, …
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

    early: whether to return the first of several equally round times; if not, the last.
    """
    for unit in _UNITS_NS:
        rounded = (after_ns // unit + 1 if early else until_ns // unit) * unit
        if after_ns < rounded <= until_ns:
            return int(rounded)
    return until_ns


def _described(kinds: _Kinds, *, every: bool) -> tuple[int | None, str]:
    """Return the time of the change in Unix nanoseconds, and the detail of the finding.

    The time is None if the writes of both kinds overlap.
    every: whether every object of the part was compared. If not, nothing shows the kind of a page
        that was written between the last compared object before the change and the first compared
        object after it. Each of the two suggested removals then includes such pages.
    """
    counts = [int((~kinds.second).sum()), int(kinds.second.sum())]
    evidence = f"; {kinds.evidence}" * bool(kinds.evidence)
    change = _split(kinds)
    if change is None:
        both = zip(kinds.names, counts, (~kinds.second, kinds.second), strict=True)
        texts = (f"{name} in {counted(n, 'object')}{_written(kinds, of)}" for name, n, of in both)
        return None, (
            f"numbers are {' and '.join(texts)}{evidence}; servers with both settings wrote them; "
            "remove the pages of the wrong setting with hicachectl rm --since --before, or all "
            "pages"
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
        f"hicachectl rm --before {end}; if they write {old}, remove the newer pages with --since "
        f"{start}"
    )


def _written(kinds: _Kinds, chosen: BoolArray) -> str:
    times = kinds.written_ns[chosen]
    return f", {written_between(int(times.min()), int(times.max()))}" if times.all() else ""


def _times(seen: pa.Table) -> IntArray:
    times: IntArray = seen.column("written_ns").fill_null(0).to_numpy()
    return times
