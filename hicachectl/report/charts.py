"""Draw charts as SVG with colours from the style sheet of the page.

A chart is a template of Vega-Lite, `templates/NAME.json`, which vl-convert draws without a browser
or a network. Each chart is drawn twice, for a wide and for a narrow page, because the letters of a
scaled SVG are too small to read. Colours are variables of the style sheet, which has values for
light screens, for dark screens and for paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import install_step
from hicachectl.text.terminal import escape_controls, shortened
from hicachectl.text.units import human_size, unit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import jinja2

    from hicachectl.report.completeness import Completeness
    from hicachectl.report.prefixes import PrefixTree
    from hicachectl.report.writes import Writes

    # Function that takes the width of a chart in pixels, and returns the values of its template.
    Values = Callable[[int], dict[str, Any]]

WIDE, NARROW = 1000, 348  # width of a chart in pixels
_MODULES = {"vl_convert": "vl-convert-python", "jinja2": "Jinja2"}
# Charts are laid out for letters of this size in pixels. The style sheet shows the letters at 12
# pixels, so that labels fit also in wider fonts.
_FONT_SIZE = 13.5
_LABEL = {WIDE: 44, NARROW: 17}  # most characters of a label
_SHORT = 15  # most characters of a label that has a fixed space
_EXTENT = {WIDE: 130, NARROW: 100}  # pixels of the space of such a label, by width of the chart
SERIES = tuple(f"var(--series-{n})" for n in range(6))
REST = "var(--rest)"
SIZES = ("var(--base)", "var(--series-1)", "var(--series-5)", "var(--series-3)", REST)
SHARES = tuple(f"var(--share-{n})" for n in range(6))
STATES = ("var(--usable)", "var(--kv-only)", "var(--lost)")
MAGNITUDES = tuple(f"var(--level-{n})" for n in range(7))
DAMAGED = "var(--error)"


@dataclass(frozen=True, slots=True)
class Mark:
    """A time to mark in charts.

    at: Unix seconds.
    text: label of the mark.
    """

    at: float
    text: str


def refuse_missing() -> None:
    """Raise UsageError if a package of the extra `report` is not installed."""
    lacking = [name for module, name in _MODULES.items() if find_spec(module) is None]
    if lacking:
        raise UsageError(f"report needs {' and '.join(lacking)}; {install_step(*lacking)}")


def _drawn(name: str, label: str, values: Values) -> str:
    """Return the SVG of a chart for wide and narrow pages.

    name: name of the template.
    label: text for screen readers.
    values: function that returns the values of the template for a width.
    """
    import vl_convert

    template = _templates().get_template(f"{name}.json")
    svgs = []
    for width, page in ((WIDE, "wide"), (NARROW, "narrow")):
        spec = template.render(width=width, wide=width == WIDE, size=_FONT_SIZE, **values(width))
        svgs.append(
            vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]).replace(
                'class="marks"',
                f'class="chart {page}" role="img" aria-label="{escape(escape_controls(label))}"',
                1,
            )
        )
    return "".join(svgs)


@cache
def _templates() -> jinja2.Environment:
    """Return the templates of charts. They are parsed once."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("hicachectl.report"),
        autoescape=False,  # `tojson` escapes texts
        undefined=jinja2.StrictUndefined,
    )


def _scale(colours: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the scale that gives each value of a field its colour."""
    return {"domain": list(colours), "range": list(colours.values())}


def _labels(names: Iterable[str], most: int) -> dict[str, str]:
    """Return a distinct label for each distinct name. Equal shortened names get numbers."""
    seen: dict[str, int] = {}
    labels = {}
    for name in dict.fromkeys(names):
        label = shortened(name, most)
        count = seen[label] = seen.get(label, 0) + 1
        labels[name] = label if count == 1 else f"{label} ({count})"
    return labels


# --- bytes ---

_KINDS = ("most common size", "second size", "third size", "fourth size", "other or unknown sizes")


@dataclass(frozen=True, slots=True)
class Bar:
    """Piece of a bar: objects of one size.

    size: size of an object, as text.
    rank: rank of the size by number of objects, from 0.
    amount: bytes or number of the objects.
    """

    size: str
    rank: int
    amount: int


def size_chart(pools: Mapping[str, Sequence[Bar]], *, longest: int, counted: str, of: str) -> str:
    """Return the chart of the pools of a deployment.

    longest: length of the longest bar of all deployments, because their charts share a scale.
    counted: "bytes" or "objects".
    of: name of the deployment.
    """
    unit, scale = unit_of(longest) if counted == "bytes" else ("objects", 1)
    used = sorted({bar.rank for bars in pools.values() for bar in bars})
    label_of = _labels(pools, _SHORT)
    rows = [
        {
            "name": label_of[pool],
            "kind": _KINDS[bar.rank],
            "rank": bar.rank,
            "amount": bar.amount / scale,
        }
        for pool, bars in pools.items()
        for bar in bars
    ]

    def values(width: int) -> dict[str, Any]:
        ends = [
            {
                "name": label_of[pool],
                "end": sum(bar.amount for bar in bars) / scale,
                "text": _bar_text(bars, counted, width),
            }
            for pool, bars in pools.items()
        ]
        return {
            "rows": rows,
            "ends": ends,
            "names": list(label_of.values()),
            "unit": unit,
            "longest": longest / scale,
            "digits": scale == 1,
            "extent": _EXTENT[width],
            "kinds": _scale({_KINDS[n]: SIZES[n] for n in used}),
            "legend": used != [0],
        }

    return _drawn("sizes", f"Bars: {counted} of {of} by pool and object size", values)


def _bar_text(bars: Sequence[Bar], counted: str, width: int) -> str:
    """Return the text after a bar: its sum and, in a wide chart, the sizes of its objects."""
    total = sum(bar.amount for bar in bars)
    text = human_size(total) if counted == "bytes" else f"{total:,}"
    if width == NARROW:
        return f"{text}, {len(bars)} sizes" if len(bars) > 1 else text
    return f"{text} in objects of {', '.join(bar.size for bar in bars[:3])}"


# --- writes ---


def write_chart(writes: Writes, marks: Sequence[Mark]) -> str:
    """Return the chart of objects by time of the last write."""
    colours = [*SERIES[: len(writes.series)], REST][: len(writes.series)]
    first = min([writes.start, *(mark.at for mark in marks)])
    last = max([writes.end, *(mark.at for mark in marks)])
    middle = (first + last) / 2

    def values(width: int) -> dict[str, Any]:
        wide = width == WIDE
        labels = _labels((name for name, _ in writes.series), 36 if wide else 28)
        rows = []
        below = np.zeros(writes.bins, dtype=np.int64)
        for name, counts in writes.series:
            rows += [
                {
                    "name": labels[name],
                    "low": int(below[at]),
                    "high": int(below[at] + counts[at]),
                    "start": (writes.start + writes.width * at) * 1000,
                    "end": (writes.start + writes.width * (at + 1)) * 1000,
                }
                for at in np.flatnonzero(counts).tolist()
            ]
            below += counts
        return {
            "rows": rows,
            "ends": [first * 1000, last * 1000],
            "format": _time_format(last - first),
            "unit": writes.unit,
            "series": _scale(dict(zip(labels.values(), colours, strict=True))),
            "marks": [
                {
                    "at": mark.at * 1000,
                    "text": shortened(mark.text, 24 if wide else 12),
                    "is_left": mark.at <= middle,
                    "y": 2 + 15 * (number % 8),
                }
                for number, mark in enumerate(marks)
            ],
        }

    label = f"Bars over time: objects by the {writes.unit} of their last write"
    return _drawn("writes", label, values)


def _time_format(seconds: float) -> str:
    """Return a time format in which the labels of an axis differ. seconds: length of the axis."""
    if seconds < 24 * 3600:
        return "%H:%M"
    return "%b %d %H:%M" if seconds <= 9 * 86400 else "%b %d" if seconds <= 300 * 86400 else "%Y-%m"


# --- completeness ---

_SHARE_STEPS = (
    (1.0, "all pages"),
    (0.99, "99 % or more"),
    (0.9, "90 % or more"),
    (0.5, "50 % or more"),
    (0.0, "under 50 %"),
)


def share_level(present: int, expected: int) -> int:
    """Return the index in SHARES of a share. The last index means that nothing is present."""
    if not present:
        return len(_SHARE_STEPS)
    return next(n for n, (least, _) in enumerate(_SHARE_STEPS) if present >= least * expected)


def share_text(present: int, expected: int) -> str:
    """Return a share in percent, rounded down, so that only a full share is 100."""
    tenths = present * 1000 // expected
    return f"{tenths // 10}" if tenths % 10 == 0 else f"{tenths / 10:.1f}"


def completeness_chart(one: Completeness) -> str:
    """Return the chart of the share of pages with each pool and rank of a deployment."""
    ranks = list(dict.fromkeys(share.rank for share in one.shares))
    names = [*(text for _, text in _SHARE_STEPS), "none"]
    levels = [share_level(share.present, share.expected) for share in one.shares]

    def values(width: int) -> dict[str, Any]:
        labels = _labels((share.pool for share in one.shares), _LABEL[width])
        rows = [
            {
                "pool": labels[share.pool],
                "rank": share.rank,
                "level": names[level],
                "dark": level >= 3,
                "text": share_text(share.present, share.expected),
            }
            for share, level in zip(one.shares, levels, strict=True)
        ]
        return {
            "rows": rows,
            "ranks": ranks,
            "pools": list(labels.values()),
            "room": (width - 160) / len(ranks),
            "levels": _scale({names[level]: SHARES[level] for level in sorted(set(levels))}),
        }

    label = f"Table of colours: pages of {one.deployment} with each pool and rank"
    return _drawn("completeness", label, values)


# --- requests ---

STATE_NAMES = ("can be restored", "kv only", "missing or of no use")


def tree_chart(tree: PrefixTree) -> str:
    """Return the chart of the prefix tree of requests."""
    tokens = tree.page_size or 1
    used = sorted({node.state for node in tree.nodes})
    values = {
        "rows": [
            {
                "first": node.first * tokens,
                "last": node.last * tokens,
                "top": node.top,
                "bottom": node.bottom,
                "state": STATE_NAMES[node.state],
            }
            for node in tree.nodes
        ],
        "stops": [
            {"at": stop.at * tokens, "row": stop.row, "number": str(number)}
            for number, stop in enumerate(tree.stops, start=1)
            if stop.row is not None
        ],
        "unit": "tokens" if tree.page_size else "pages",
        "requests": tree.requests,
        "height": max(90, min(420, 22 * tree.requests)),
        "longest": max(node.last for node in tree.nodes) * tokens,
        "states": _scale({STATE_NAMES[n]: STATES[n] for n in used}),
    }
    label = "Prefix tree of the requests, coloured by what the store can serve"
    return _drawn("tree", label, lambda width: values)


# --- caches ---


@dataclass(frozen=True, slots=True)
class Point:
    """Share of the prompt tokens that a cache serves.

    policy: name of the policy by which the cache evicts.
    size: bytes or pages of the cache.
    share: share of the tokens, from 0 to 1.
    """

    policy: str
    size: int
    share: float


def curve_chart(points: Sequence[Point], today: int | None, *, counts_bytes: bool) -> str:
    """Return the chart of the share that caches serve, by their size.

    today: size of the store; None if unknown.
    counts_bytes: whether sizes are in bytes, not in pages.
    """
    low, high = (function(point.size for point in points) for function in (min, max))
    powers = range(low.bit_length() - 1, high.bit_length())
    policies = list(dict.fromkeys(point.policy for point in points))
    curves = {
        "rows": [
            {"policy": one.policy, "at": math.log2(one.size), "share": 100 * one.share}
            for one in points
        ],
        "today": None if today is None else math.log2(today),
        "is_left": today is not None and today < math.sqrt(low * high),
        "text_today": "" if today is None else f"today: {human_size(today)}",
        "ends": [powers[0], max(math.log2(high), powers[0] + 1)],
        "unit": "bytes of the whole store" if counts_bytes else "pages",
        "policies": _scale(dict(zip(policies, (SERIES[0], REST), strict=False))),
    }

    def values(width: int) -> dict[str, Any]:
        ticks = list(powers[:: -(-len(powers) // (12 if width == WIDE else 4))])
        texts = (
            human_size(1 << n).replace(".0", "") if counts_bytes else f"{1 << n:,}" for n in ticks
        )
        return {**curves, "ticks": ticks, "labels": dict(zip(map(str, ticks), texts, strict=True))}

    return _drawn("curve", "Lines: share of the prompt tokens that caches serve, by size", values)


def loss_chart(parts: Mapping[str, int]) -> str:
    """Return the bar of prompt tokens: the served tokens, and the lost tokens by cause."""
    colours = dict(zip(parts, (STATES[0], *SERIES[1:], REST, STATES[2], STATES[1]), strict=False))
    ends = np.cumsum([0, *parts.values()]).tolist()

    def values(width: int) -> dict[str, Any]:
        return {
            "rows": [
                {"part": part, "low": low, "high": high}
                for part, low, high in zip(parts, ends, ends[1:], strict=False)
            ],
            "total": ends[-1],
            "parts": _scale(colours),
        }

    return _drawn("losses", "Bar: prompt tokens that the store serves, and loses by cause", values)


# --- one page ---


@dataclass(frozen=True, slots=True)
class Cell:
    """Values of a tensor in one layer.

    level: index of the mean magnitude among the levels of the chart; None for damaged values.
    """

    tensor: str
    layer: int
    level: int | None


def strip_chart(cells: Sequence[Cell], levels: Sequence[str]) -> str:
    """Return the chart of the values of a page, by tensor and layer.

    levels: names of the levels.
    """
    layers = sorted({cell.layer for cell in cells})
    names = [*levels, "damaged"]
    colour_of = [*_spread(len(levels)), DAMAGED]
    colours = {names[n]: colour_of[n] for n in sorted({_number(cell, names) for cell in cells})}
    short = max(map(len, colours)) <= 16

    def values(width: int) -> dict[str, Any]:
        labels = _labels((cell.tensor for cell in cells), _LABEL[width])
        rows = [
            {
                "tensor": labels[cell.tensor],
                "layer": cell.layer,
                "level": names[_number(cell, names)],
            }
            for cell in cells
        ]
        return {
            "rows": rows,
            "layers": layers,
            "step": max(1, -(-len(layers) * 26 // (width - 260 if width == WIDE else 200))),
            "tensors": list(labels.values()),
            "levels": _scale(colours),
            "columns": 4 if width == WIDE else 1 + short,
        }

    return _drawn("strips", "Strips: mean magnitude of the values of each tensor, by layer", values)


def _number(cell: Cell, names: Sequence[str]) -> int:
    return len(names) - 1 if cell.level is None else cell.level


def _spread(count: int) -> list[str]:
    """Return the colours of levels, spread over all of MAGNITUDES.

    count: number of levels.
    """
    last = len(MAGNITUDES) - 1
    return [MAGNITUDES[round(n * last / max(count - 1, 1))] for n in range(count)]
