"""Charts as SVG that takes its colours from the style sheet of the page.

Altair makes the charts, and vl-convert draws them without a browser or a network. Each chart is
drawn for a wide and for a narrow page, since an SVG that is only scaled has letters too small to
read. Colours are variables of the style sheet: they follow the light or dark theme, and print.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.formats.errors import UsageError
from hicachectl.text.terminal import escape_controls, shortened
from hicachectl.text.units import human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.report.completeness import Completeness
    from hicachectl.report.prefixes import PrefixTree
    from hicachectl.report.writes import Writes

WIDE, NARROW = 1000, 348  # pixels
_MODULES = {"altair": "altair", "vl_convert": "vl-convert-python", "jinja2": "Jinja2"}
_LABEL = {WIDE: 44, NARROW: 17}  # characters
# Labels of a fixed room have so many characters, in so many pixels.
_SHORT, _EXTENT = 15, {WIDE: 130, NARROW: 100}
_INK, _MUTED, _GRID, _PAPER = "var(--ink)", "var(--muted)", "var(--grid)", "var(--paper)"
SERIES = tuple(f"var(--series-{n})" for n in range(6))
REST = "var(--rest)"
SIZES = ("var(--base)", "var(--series-1)", "var(--series-5)", "var(--series-3)", REST)
SHARES = tuple(f"var(--share-{n})" for n in range(6))
STATES = ("var(--usable)", "var(--kv-only)", "var(--lost)")
MAGNITUDES = tuple(f"var(--level-{n})" for n in range(7))
DAMAGED = "var(--error)"


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment to mark in charts over time. at: Unix seconds."""

    at: float
    text: str


def refuse_missing() -> None:
    """Raise UsageError if a package of the extra `report` is not installed."""
    lacking = [name for module, name in _MODULES.items() if find_spec(module) is None]
    if lacking:
        raise UsageError(f"report needs {', '.join(lacking)}; run pip install 'hicachectl[report]'")


def drawn(chart: Callable[[int], Any], label: str) -> str:
    """Return the SVG of a chart for wide and narrow pages.

    chart: returns the Altair chart for a width in pixels. label: what a screen reader says.
    """
    import vl_convert

    svgs = []
    for width, name in ((WIDE, "wide"), (NARROW, "narrow")):
        spec = chart(width).configure(**_config(width)).to_dict()
        svg = vl_convert.vegalite_to_svg(spec, allowed_base_urls=[])
        svgs.append(
            svg.replace(
                'class="marks"',
                f'class="chart {name}" role="img" aria-label="{escape(escape_controls(label))}"',
                1,
            )
        )
    return "".join(svgs)


def _config(width: int) -> dict[str, Any]:
    size = 13.5  # the style sheet shows 12: fonts differ in width, and labels must not be cut
    texts = {"labelFont": "sans-serif", "labelFontSize": size, "titleFontSize": size,
             "titleFont": "sans-serif", "titleFontWeight": "normal", "labelColor": _MUTED,
             "titleColor": _MUTED}  # fmt: skip
    return {
        "aria": False,
        "background": "transparent",
        "padding": 3,
        "view": {"stroke": None},
        "axis": {
            **texts,
            "gridColor": _GRID,
            "domainColor": _GRID,
            "tickColor": _GRID,
            "labelLimit": 500,
        },
        "legend": {
            **texts,
            "orient": "top",
            "title": None,
            "symbolType": "square",
            "labelLimit": 400,
            "columns": 4 if width == WIDE else 2,
        },
        "text": {"color": _INK, "font": "sans-serif", "fontSize": size},
    }


def _data(values: Sequence[dict[str, Any]]) -> Any:
    import altair as alt

    return alt.InlineData(values=list(values))


def _fitted(chart: Any, width: int) -> Any:
    import altair as alt

    return chart.properties(
        width=width, autosize=alt.AutoSizeParams(type="fit-x", contains="padding")
    )


# --- bytes ---

_KINDS = ("most common size", "second size", "third size", "fourth size", "other or unknown sizes")
_UNITS = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40),
          ("PiB", 2**50), ("EiB", 2**60))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """Objects of one size.

    name: name of the bar that shows them.
    rank: rank of the size, from 0.
    """

    name: str
    size: str
    rank: int
    amount: int


def size_chart(bars: Sequence[Bar], *, longest: int, counted: str, of: str) -> str:
    """Return the chart of the pools of a deployment.

    longest: bar of all deployments, whose charts share a scale. counted: "bytes" or "objects".
    """
    import altair as alt

    names = list(dict.fromkeys(bar.name for bar in bars))
    unit, scale = _unit(longest) if counted == "bytes" else ("objects", 1)
    used = sorted({bar.rank for bar in bars})

    def chart(width: int) -> Any:
        labels = _distinct([shortened(name, _SHORT) for name in names])
        label_of = dict(zip(names, labels, strict=True))
        rows = [
            {"name": label_of[bar.name], "kind": _KINDS[bar.rank], "rank": bar.rank,
             "amount": bar.amount / scale}
            for bar in bars
        ]  # fmt: skip
        ends = [
            {
                "name": label_of[name],
                "end": sum(bar.amount for bar in bars if bar.name == name) / scale,
                "text": _bar_text([bar for bar in bars if bar.name == name], counted, width),
            }
            for name in names
        ]
        room = 1.6 if width == WIDE else 2.2  # for the text after the longest bar
        x = alt.X(
            "amount:Q",
            title=unit,
            stack="zero",
            scale=alt.Scale(domain=[0, longest / scale * room], nice=False),
            axis=alt.Axis(tickCount=6 if width == WIDE else 3, format=",d" if scale == 1 else "~r"),
        )
        y = alt.Y(
            "name:N",
            title=None,
            sort=labels,
            axis=alt.Axis(
                grid=False, ticks=False, domain=False, labelPadding=6,
                minExtent=_EXTENT[width], maxExtent=_EXTENT[width],  # equal scales in all charts
            ),
        )  # fmt: skip
        colour = alt.Color(
            "kind:N",
            legend=None if used == [0] else alt.Legend(),
            scale=alt.Scale(domain=[_KINDS[n] for n in used], range=[SIZES[n] for n in used]),
        )
        pieces = (
            alt.Chart(_data(rows))
            .mark_bar(height={"band": 0.72}, stroke=_PAPER, strokeWidth=1)
            .encode(x=x, y=y, color=colour, order=alt.Order("rank:Q"))
        )
        texts = (
            alt.Chart(_data(ends))
            .mark_text(align="left", dx=6)
            .encode(x="end:Q", y=alt.Y("name:N", sort=labels), text="text:N")
        )
        return _fitted(alt.layer(pieces, texts).properties(height={"step": 26}), width)

    return drawn(chart, f"Bars: {counted} of {of} by pool and object size")


def _bar_text(bars: Sequence[Bar], counted: str, width: int) -> str:
    """Return the text after a bar: its sum and, in a wide chart, the sizes of the objects."""
    total = sum(bar.amount for bar in bars)
    text = human_size(total) if counted == "bytes" else f"{total:,}"
    if width == NARROW:
        return f"{text}, {len(bars)} sizes" if len(bars) > 1 else text
    return f"{text} in objects of {', '.join(bar.size for bar in bars[:3])}"


def _unit(largest: int) -> tuple[str, int]:
    fitting = [unit for unit in _UNITS if largest >= unit[1]]
    return fitting[-1] if fitting else _UNITS[0]


def _distinct(labels: list[str]) -> list[str]:
    """Return labels of which none equals another: a shortened name can."""
    seen: dict[str, int] = {}
    made = []
    for label in labels:
        count = seen[label] = seen.get(label, 0) + 1
        made.append(label if count == 1 else f"{label} ({count})")
    return made


# --- writes ---


def write_chart(writes: Writes, marks: Sequence[Mark]) -> str:
    """Return the chart of objects by time of the last write."""
    import altair as alt

    colours = [*SERIES[: len(writes.series)], REST][: len(writes.series)]
    first = min([writes.start, *(mark.at for mark in marks)])
    last = max([writes.end, *(mark.at for mark in marks)])

    def chart(width: int) -> Any:
        most = 36 if width == WIDE else 28
        labels = _distinct([shortened(name, most) for name, _ in writes.series])
        rows = []
        below = np.zeros(writes.bins, dtype=np.int64)
        for label, (_, counts) in zip(labels, writes.series, strict=True):
            rows += [
                {
                    "name": label,
                    "low": int(below[at]),
                    "high": int(below[at] + counts[at]),
                    "start": (writes.start + writes.width * at) * 1000,
                    "end": (writes.start + writes.width * (at + 1)) * 1000,
                }
                for at in np.flatnonzero(counts).tolist()
            ]
            below += counts
        scale = alt.Scale(type="utc", domain=[first * 1000, last * 1000], nice=False)
        axis = alt.Axis(
            format=_time_format(last - first), tickCount=8 if width == WIDE else 3,
            grid=False, labelOverlap=True, labelFlush=True,
        )  # fmt: skip
        bars = (
            alt.Chart(_data(rows))
            .mark_rect(stroke=_PAPER, strokeWidth=0.5)
            .encode(
                x=alt.X("start:T", title="UTC", scale=scale, axis=axis),
                x2="end:T",
                y=alt.Y("low:Q", title=f"objects per {writes.unit}", scale=alt.Scale(zero=True),
                        axis=alt.Axis(tickCount=5, format=",d", tickMinStep=1)),
                y2="high:Q",
                color=alt.Color("name:N", scale=alt.Scale(domain=labels, range=colours),
                                legend=alt.Legend(columns=3 if width == WIDE else 1)),
            )
        )  # fmt: skip
        layers = [bars]
        middle = (first + last) / 2
        place = alt.X("at:T", scale=scale)
        halo: dict[str, Any] = {"stroke": _PAPER, "strokeWidth": 3}
        for number, mark in enumerate(marks):
            side: dict[str, Any] = (
                {"align": "left", "dx": 4} if mark.at <= middle else {"align": "right", "dx": -4}
            )
            label = shortened(mark.text, 24 if width == WIDE else 12)
            at = alt.Chart(_data([{"at": mark.at * 1000, "text": label}])).encode(x=place)
            layers.append(at.mark_rule(stroke=_INK, strokeDash=[4, 3], strokeWidth=1.5))
            side |= {"baseline": "top", "y": 2 + 15 * (number % 8), "fontWeight": "bold"}
            texts = (at.mark_text(**side, **halo), at.mark_text(**side))
            layers += [text.encode(text="text:N") for text in texts]
        return _fitted(alt.layer(*layers).properties(height=220), width)

    return drawn(chart, f"Bars over time: objects by the {writes.unit} of their last write")


def _time_format(seconds: float) -> str:
    """Return a format in which the labels of an axis of this length differ."""
    if seconds < 24 * 3600:
        return "%H:%M"
    return "%b %d %H:%M" if seconds <= 9 * 86400 else "%b %d" if seconds <= 300 * 86400 else "%Y-%m"


# --- completeness ---

_SHARE_STEPS = (
    (1.0, "all pages"),
    (0.99, "99 % or more"),
    (0.9, "90 % or more"),
    (0.5, "50 % or more"),
    (0.0, "fewer"),
)


def share_level(present: int, expected: int) -> int:
    """Return the index in SHARES of a share; the last one is for nothing."""
    if not present:
        return len(_SHARE_STEPS)
    return next(n for n, (least, _) in enumerate(_SHARE_STEPS) if present >= least * expected)


def share_text(present: int, expected: int) -> str:
    """Return a share in percent, rounded down, so that only a whole one is 100."""
    tenths = present * 1000 // expected
    return f"{tenths // 10}" if tenths % 10 == 0 else f"{tenths / 10:.1f}"


def completeness_chart(one: Completeness) -> str:
    """Return the chart of the share of pages with each pool and rank of a deployment."""
    import altair as alt

    pools = list(dict.fromkeys(share.pool for share in one.shares))
    ranks = list(dict.fromkeys(share.rank for share in one.shares))
    names = [*(text for _, text in _SHARE_STEPS), "none"]
    cells = [
        {
            "pool": share.pool,
            "rank": share.rank,
            "level": names[share_level(share.present, share.expected)],
            "dark": share_level(share.present, share.expected) >= 3,
            "text": share_text(share.present, share.expected),
        }
        for share in one.shares
    ]
    used = [name for name in names if any(cell["level"] == name for cell in cells)]

    def chart(width: int) -> Any:
        labels = _distinct([shortened(pool, _LABEL[width]) for pool in pools])
        label_of = dict(zip(pools, labels, strict=True))
        rows = [{**cell, "pool": label_of[str(cell["pool"])]} for cell in cells]
        room = (width - 160) / len(ranks)
        base = alt.Chart(_data(rows)).encode(
            x=alt.X("rank:N", title="rank", sort=ranks,
                    axis=alt.Axis(orient="bottom", labelAngle=0 if room > 44 else -90,
                                  ticks=False, domain=False, labelOverlap=True)),
            y=alt.Y("pool:N", title=None, sort=labels,
                    axis=alt.Axis(ticks=False, domain=False)),
        )  # fmt: skip
        boxes = base.mark_rect(stroke=_PAPER, strokeWidth=2, cornerRadius=3).encode(
            color=alt.Color("level:N", legend=alt.Legend(columns=3 if width == NARROW else 6),
                            scale=alt.Scale(domain=used, range=[SHARES[names.index(name)]
                                                                for name in used]))
        )  # fmt: skip
        layers = [boxes]
        if room >= 30:
            texts = base.mark_text().encode(
                text="text:N",
                color=alt.condition(
                    "datum.dark", alt.value("var(--on-dark)"), alt.value("var(--on-light)")
                ),
            )
            layers.append(texts)
        return _fitted(alt.layer(*layers).properties(height={"step": 30}), width)

    return drawn(chart, f"Table of colours: pages of {one.deployment} with each pool and rank")


# --- requests ---

STATE_NAMES = ("can be restored", "kv only", "missing or of no use")


def tree_chart(tree: PrefixTree) -> str:
    """Return the chart of the prefix tree of requests."""
    import altair as alt

    tokens = tree.page_size or 1
    used = sorted({node.state for node in tree.nodes})
    rows = [
        {"first": node.first * tokens, "last": node.last * tokens, "top": node.top,
         "bottom": node.bottom, "state": STATE_NAMES[node.state]}
        for node in tree.nodes
    ]  # fmt: skip
    stops = [
        {"at": stop.at * tokens, "row": stop.row, "number": str(number)}
        for number, stop in enumerate(tree.stops, start=1)
        if stop.row is not None
    ]
    height = max(90, min(420, 22 * tree.requests))
    longest = max(node.last for node in tree.nodes) * tokens

    def chart(width: int) -> Any:
        runs = alt.Chart(_data(rows)).mark_rect(
            stroke=_PAPER, strokeWidth=1 if tree.requests < 200 else 0.4
        )
        plain: dict[str, Any] = {"grid": False, "format": ",d"}
        x = alt.X(
            "first:Q",
            title="tokens from the start" if tree.page_size else "pages from the start",
            scale=alt.Scale(domain=[0, longest], nice=False),
            axis=alt.Axis(tickCount=8 if width == WIDE else 3, **plain),
        )
        y = alt.Y(
            "top:Q",
            title="requests",
            scale=alt.Scale(domain=[0, tree.requests], reverse=True, nice=False),
            axis=alt.Axis(tickCount=5, tickMinStep=1, **plain),
        )
        layers = [
            runs.encode(
                x=x,
                x2="last:Q",
                y=y,
                y2="bottom:Q",
                color=alt.Color(
                    "state:N",
                    scale=alt.Scale(
                        domain=[STATE_NAMES[n] for n in used], range=[STATES[n] for n in used]
                    ),
                    legend=alt.Legend(columns=3 if width == WIDE else 1),
                ),
            )
        ]
        if stops:
            at = alt.Chart(_data(stops)).encode(x="at:Q", y="row:Q")
            layers += [
                at.mark_circle(size=260, color=DAMAGED, opacity=1, stroke=_PAPER, strokeWidth=1.5),
                at.mark_text(color="var(--on-error)", fontWeight="bold").encode(text="number:N"),
            ]
        return _fitted(alt.layer(*layers).properties(height=height), width)

    return drawn(chart, "Prefix tree of the requests, coloured by what the store can serve")


# --- one page ---


@dataclass(frozen=True, slots=True)
class Cell:
    """Values of a tensor in one layer. level: index in MAGNITUDES; None: damaged."""

    tensor: str
    layer: int
    level: int | None


def strip_chart(cells: Sequence[Cell], levels: Sequence[str]) -> str:
    """Return the chart of the values of a page by tensor and layer. levels: names of levels."""
    import altair as alt

    tensors = list(dict.fromkeys(cell.tensor for cell in cells))
    layers = sorted({cell.layer for cell in cells})
    names = [*levels, "damaged"]
    colours = [*_spread(len(levels)), DAMAGED]
    used = [n for n in range(len(names)) if any(_number(cell, names) == n for cell in cells)]
    short = max(len(names[n]) for n in used) <= 16

    def chart(width: int) -> Any:
        labels = _distinct([shortened(tensor, _LABEL[width]) for tensor in tensors])
        label_of = dict(zip(tensors, labels, strict=True))
        rows = [
            {"tensor": label_of[cell.tensor], "layer": cell.layer,
             "level": names[_number(cell, names)]}
            for cell in cells
        ]  # fmt: skip
        step = max(1, -(-len(layers) * 26 // (width - 260 if width == WIDE else 200)))
        boxes = (
            alt.Chart(_data(rows))
            .mark_rect(stroke=_PAPER, strokeWidth=1 if len(layers) < 100 else 0.3)
            .encode(
                x=alt.X("layer:O", title="layer", sort=layers,
                        axis=alt.Axis(labelAngle=0, ticks=False, domain=False,
                                      values=layers[::step])),
                y=alt.Y("tensor:N", title=None, sort=labels,
                        axis=alt.Axis(ticks=False, domain=False)),
                color=alt.Color("level:N", scale=alt.Scale(
                    domain=[names[n] for n in used], range=[colours[n] for n in used]),
                    legend=alt.Legend(columns=4 if width == WIDE else 1 + short)),
            )
            .properties(height={"step": 22})
        )  # fmt: skip
        return _fitted(boxes, width)

    return drawn(chart, "Strips: mean magnitude of the values of each tensor, by layer")


def _number(cell: Cell, names: Sequence[str]) -> int:
    return len(names) - 1 if cell.level is None else cell.level


def _spread(count: int) -> list[str]:
    """Return colours for some levels, over the whole range."""
    last = len(MAGNITUDES) - 1
    return [MAGNITUDES[round(n * last / max(count - 1, 1))] for n in range(count)]
