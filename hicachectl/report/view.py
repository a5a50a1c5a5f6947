"""Render the report as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import defaultdict
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hicachectl import __version__
from hicachectl.checks.codes import SEVERITIES
from hicachectl.checks.registry import code_named, group_names
from hicachectl.formats.keys.labels import label_text
from hicachectl.report.charts import (
    MAGNITUDES,
    Bar,
    Cell,
    Point,
    completeness_chart,
    curve_chart,
    loss_chart,
    share_text,
    size_chart,
    strip_chart,
    tree_chart,
    write_chart,
)
from hicachectl.report.names import pool_text, rank_text, summary_name
from hicachectl.report.worth import Worth
from hicachectl.text.terminal import escape_controls, message_text, shortened
from hicachectl.text.units import counted, human_age, human_size
from hicachectl.text.vocabulary import STATES
from hicachectl.verification.report_text import AGE_CLASSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jinja2

    from hicachectl.report.charts import Mark
    from hicachectl.report.filling import Window
    from hicachectl.report.picture import Picture
    from hicachectl.report.prefixes import PrefixTree
    from hicachectl.verification.inspection import PageReport
    from hicachectl.verification.report_text import FindingGroup, Mending

_DEPLOYMENTS = 6  # most deployments with charts; the tables have all deployments
_TEXT = 4000  # longer texts are shortened to this many characters
_EXAMPLES = 3
_STRIPS = 40
_SERVED = "served from the store"
# If the largest mean is at most this many times the least, all means get the same shade.
_FEW_LEVELS = 1.05


def html_of(picture: Picture, mending: Mending, marks: Sequence[Mark]) -> str:
    """Return the HTML of the report. Texts from the store are escaped for HTML and terminals."""
    from markupsafe import Markup

    environment, asked = _templates(), picture.requested
    style = environment.get_template("report.css").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        version=__version__,
        style=Markup(style),
        style_digest=digest,
        picture=picture,
        share=_share,
        states=list(zip(STATES, picture.states, strict=True)),
        verdict=_verdict(picture),
        checks=_checks(picture),
        findings=_findings(picture.findings, mending),
        ages=_ages(picture.findings),
        sizes=_sizes(picture),
        writes=_writes(picture, marks),
        filling=_filling(picture),
        completeness=[
            (one, _chart(completeness_chart(one))) for one in picture.completeness[:_DEPLOYMENTS]
        ],
        tree=None if asked.tree is None else _tree(asked.tree),
        worth=_worth(asked.worth) if isinstance(asked.worth, Worth) else None,
        page=None if picture.page is None else _page(picture.page),
    )


@cache
def _templates() -> jinja2.Environment:
    """Return the templates of the report. They are parsed once."""
    import jinja2
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        # Markup is made only in this module, from texts that are already safe.
        plain = isinstance(value, str) and not isinstance(value, Markup)
        return shortened(message_text(value), _TEXT) if plain else value

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hicachectl.report"),
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "moment": _moment,
        "size": human_size,
        "many": _many,
        "deployment": label_text,
    }
    return environment


def _chart(svg: str) -> Any:
    from markupsafe import Markup

    return Markup(svg)  # vl-convert escapes the texts of a chart


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f} s"


def _many(number: int) -> str:
    """Return a number with thin spaces between thousands."""
    return f"{number:,}".replace(",", "\u202f")


# --- verdict ---


def _verdict(picture: Picture) -> dict[str, str]:
    document = picture.verified.document
    counts = dict.fromkeys(SEVERITIES, 0)
    for group in picture.findings:
        counts[group.severity] += group.count
    ran, skipped = document["checks"], document["skipped_checks"]
    if counts["error"]:
        many = counted(counts["error"], "error")
        kind, text = "error", f"{many}, so servers could read wrong data, or fail to read"
    elif counts["warning"]:
        kind = "warning"
        mixed = any(group.code == "mixed-sizes" for group in picture.findings)
        risk = "servers may read wrong data" if mixed else "hits or space are lost"
        text = f"No errors found; {counted(counts['warning'], 'warning')}, so {risk}"
    elif picture.page_only and picture.worst() != "info":
        kind = picture.worst()
        many = counted(sum(picture.page_only.values()), "finding")
        text = f"The page shown in full has {many} that the checks of this run did not look for"
    elif skipped == ["everything"] or not ran:
        kind, text = "nothing", "Nothing was checked"
    elif "in-flight" in skipped:
        kind, text = "nothing", "No page was judged, because all pages are in flight"
    else:
        kind, text = "none", f"No errors and no warnings by the checks that ran: {', '.join(ran)}"
    if picture.free_bytes == 0:
        kind = kind if kind == "error" else "warning"
        text = f"The store is full. {text}"
    return {
        "kind": kind,
        "text": text,
        "line": picture.line,
        "requests": _served(picture.requested.tree),
    }


def _served(tree: PrefixTree | None) -> str:
    """Return a sentence about the share of the requested tokens or pages that can be restored.
    The sentence is "" if there are no requests.
    """
    if tree is None or tree.served_share is None:
        return ""
    share = math.floor(tree.served_share * 100)
    unit = "pages" if tree.page_size is None else "tokens"
    return f"Servers of {tree.deployment} can restore {share} % of the requested {unit}."


def _checks(picture: Picture) -> list[dict[str, Any]]:
    """Return the state of each group of checks."""
    document = picture.verified.document
    skipped = document["skipped_checks"]
    states = dict.fromkeys(group_names(), ("not", "was not asked for"))
    for name in picture.asked:
        if name in skipped:
            states[name] = ("not", "could not run; the remarks say why")
        elif skipped == ["everything"] or name not in document["checks"]:
            states[name] = ("not", "had nothing to check")
        else:
            states[name] = ("ran", "ran")
    return [{"name": name, "kind": one[0], "text": one[1]} for name, one in states.items()]


# --- findings ---


def _ages(groups: Sequence[FindingGroup]) -> dict[str, Any]:
    """Return the table of findings by code and age: its columns, and a row for each code."""
    used = sorted({g.age_class for g in groups if g.age_class is not None})
    columns: list[int | None] = [
        *used,
        *([None] if any(g.age_class is None for g in groups) else []),
    ]
    rows: dict[str, dict[str, Any]] = {}
    for group in groups:
        row = rows.setdefault(
            group.code,
            {"code": group.code, "severity": group.severity, "counts": dict.fromkeys(columns, 0)},
        )
        row["counts"][group.age_class] += group.count
    return {
        "columns": ["age unknown" if c is None else AGE_CLASSES[c] for c in columns],
        "rows": [
            {**row, "counts": list(row["counts"].values()), "total": sum(row["counts"].values())}
            for row in rows.values()
        ],
    }


def _findings(groups: Sequence[FindingGroup], mending: Mending) -> list[dict[str, Any]]:
    """Return the findings of each code, the worst severity first."""
    by_code: dict[str, list[FindingGroup]] = defaultdict(list)
    for group in groups:
        by_code[group.code].append(group)
    found = []
    for name, own in by_code.items():
        code = code_named(name)
        labels = {group.deployment for group in own}
        label = labels.pop() if len(labels) == 1 else None
        severity = min((group.severity for group in own), key=SEVERITIES.index)
        found.append(
            {
                "code": name,
                "severity": own[0].severity,
                "count": sum(group.count for group in own),
                "groups": own,
                "examples": [e for group in own for e in group.examples][:_EXAMPLES],
                "texts": code.explanation(),
                "command": "\n".join(mending.commands(code, severity, label, own[0].written_ns)),
            }
        )
    return found


# --- bytes ---


def _sizes(picture: Picture) -> dict[str, Any]:
    rows = picture.rows.to_pylist()
    sized = all(row["nbytes"] is not None for row in rows)
    unit, amount = ("bytes", "nbytes") if sized else ("objects", "objects")
    of_deployment: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        row["name"] = summary_name(row, models=picture.models)
        row["pool"] = row["pool"] or "not SGLang's"
        of_deployment.setdefault(row["name"], {}).setdefault(row["pool"], []).append(row)
    bars = {
        name: {pool: _bars(own, amount) for pool, own in pools.items()}
        for name, pools in of_deployment.items()
    }
    lengths = {
        name: [sum(bar.amount for bar in own) for own in pools.values()]
        for name, pools in bars.items()
    }
    order = sorted(filter(lambda name: sum(lengths[name]), bars), key=lambda n: -sum(lengths[n]))
    longest = max((max(lengths[name]) for name in order), default=0)
    mixed = dict.fromkeys(g.deployment for g in picture.findings if g.code == "mixed-sizes")
    return {
        "counted": unit,
        "charts": [
            {
                "name": name,
                "svg": _chart(size_chart(bars[name], longest=longest, counted=unit, of=name)),
            }
            for name in order[:_DEPLOYMENTS]
        ],
        "left_out": len(order[_DEPLOYMENTS:]),
        "mixed": list(mixed),
        "rows": rows,
    }


def _bars(rows: list[dict[str, Any]], amount: str) -> list[Bar]:
    """Return the objects of a pool by size, the most common size first."""
    known = sorted(
        (row for row in rows if row["object_nbytes"] is not None), key=lambda row: -row["objects"]
    )
    rest = [row for row in rows if row["object_nbytes"] is None]
    return [
        *(
            Bar(human_size(row["object_nbytes"]), min(rank, 3), row[amount])
            for rank, row in enumerate(known)
        ),
        *(
            Bar("unknown size" if row["nbytes"] is None else "other sizes", 4, row[amount])
            for row in rest
        ),
    ]


# --- writes ---


def _writes(picture: Picture, marks: Sequence[Mark]) -> dict[str, Any] | None:
    writes = picture.writes
    if writes is None:
        return None
    near = [m for m in marks if abs(m.at - writes.start) < 10 * (writes.end - writes.start) + 86400]
    outside = (
        (writes.earlier, f"before {_moment(writes.start)}"),
        (writes.later, f"after {_moment(writes.end)}"),
    )
    return {
        "of": writes,
        "svg": _chart(write_chart(writes, near)),
        "bar": {"hour": "an hour", "day": "a day"}.get(writes.unit, writes.unit),
        "outside": [f"{_many(count)} of them {where}" for count, where in outside if count],
        "marks": near,
        "far": [mark for mark in marks if mark not in near],
    }


# --- growth ---


def _filling(picture: Picture) -> dict[str, Any]:
    filling, free = picture.filling, picture.free_bytes
    rows = []
    for window in filling.windows:
        days = None if free is None or filling.is_part else window.days_until_full(free)
        rows.append((_span_text(window), window, "" if days is None else _days(days)))
    return {
        "of": filling,
        "verdict": _fills(picture, filling.main),
        "windows": rows,
        "main": "" if filling.main is None else _span_text(filling.main),
        "groups": sum(use.pages for use in filling.uses),
    }


def _fills(picture: Picture, main: Window | None) -> str:
    """Return how long the free space of a store lasts, or why this is unknown."""
    filling, free = picture.filling, picture.free_bytes
    if filling.is_part:
        return "Only pages that match the filters count, so days until full are unknown."
    if not filling.uses:
        return "Without write times, growth and days until full are unknown."
    if main is None:
        return "The first write was less than an hour ago, which is too short to tell a rate."
    rate = human_size(int(main.per_day))
    grows = f"In the {_span_text(main)}, the store grew by at most {rate} a day"
    if free is None:
        return f"{grows}. The store does not report its free space, so days until full are unknown."
    days = main.days_until_full(free)
    if days is None:
        return f"Nothing in the store was written in the {_span_text(main)}."
    left = human_size(free)
    return f"{grows}. At this rate, its {left} of free space last {_days(days)} days or longer."


def _span_text(window: Window) -> str:
    if window.is_all:
        return f"{human_age(window.seconds)} since the first write"
    return (
        "last 24 hours" if window.seconds <= 86400 else f"last {window.seconds // 86400:.0f} days"
    )


def _days(days: float) -> str:
    """Return a number of days as text, rounded down. More than 100 years count as 100 years."""
    days = min(days, 36500)
    return f"{math.floor(days):d}" if days >= 10 else f"{math.floor(days * 10) / 10:g}"


def _share(part: int, whole: int) -> str:
    return f"{share_text(part, whole)} %" if whole else ""


# --- requests ---


def _tree(tree: PrefixTree) -> dict[str, Any]:
    unit = "pages" if tree.page_size is None else "tokens"
    scale = tree.page_size or 1

    def share(pages: int) -> str:
        return f"{math.floor(1000 * pages / tree.pages) / 10:g} %" if tree.pages else "0 %"

    return {
        "of": tree,
        "unit": unit,
        "scale": scale,
        "svg": _chart(tree_chart(tree)) if tree.nodes else "",
        "usable": f"{math.floor(1000 * (tree.usable_share or 0)) / 10:g} %",
        "kv_only": share(tree.kv_only),
        "lost": tree.pages - tree.usable - tree.kv_only,
    }


# --- caches ---


def _worth(worth: Worth) -> dict[str, Any]:
    document, rows = worth.document, worth.rows
    sized = document["page_bytes"] is not None
    size = "capacity_bytes" if sized else "capacity_pages"
    points = [Point(row["policy"], row[size], row["hit_share"] or 0.0) for row in rows]
    parts = {}
    if document["losses"] is not None:
        parts[_SERVED] = document["served_tokens"]
        parts |= {one["cause"]: one["tokens"] for one in document["losses"]}
    return {
        "of": worth,
        "svg": _chart(curve_chart(points, document["today_bytes"] or None, counts_bytes=sized)),
        "parts": parts,
        "losses": _chart(loss_chart(parts)) if any(parts.values()) else "",
        "policies": list(dict.fromkeys(row["policy"] for row in rows)),
        "sized": sized,
        "size": size,
    }


# --- one page ---


def _page(report: PageReport) -> dict[str, Any]:
    document = report.document
    objects = report.objects.to_pylist()
    what_of = {
        one["key"]: f"{pool_text(one['pool'], one['part'])} {rank_text(one)}".lstrip()
        for one in objects
    }
    contents = sorted(
        document["contents"], key=lambda c: (what_of[c["key"]], c["tensor"], c["layer"])
    )
    cells, levels, left_out = _cells(contents, what_of)
    for one in objects:
        one["what"] = what_of[one["key"]]
    return {
        "page": document["page"],
        "groups": document["groups"],
        "objects": objects,
        "findings": document["findings"],
        "identities": document.get("identities", {}),
        "svg": _chart(strip_chart(cells, levels)) if cells else "",
        "strips_left_out": left_out,
        "contents": [{**one, "what": what_of[one["key"]]} for one in contents],
    }


def _cells(
    contents: list[dict[str, Any]], what_of: dict[str, str]
) -> tuple[list[Cell], list[str], int]:
    """Return the cells of the shown strips, the names of levels, and the number of other strips.

    contents: statistics of tensors by layer.
    what_of: description of each object, by its key.
    """
    means = [
        one["mean_magnitude"]
        for one in contents
        if one["mean_magnitude"] is not None and math.isfinite(one["mean_magnitude"])
    ]
    positive: list[float] = [mean for mean in means if mean > 0]
    low, high = (min(positive), max(positive)) if positive else (1.0, 1.0)
    count = 1 if high <= low * _FEW_LEVELS else len(MAGNITUDES) - 1
    bounds: list[float] = [low * (high / low) ** (n / count) for n in range(count + 1)]
    digits = next((n for n in (2, 3, 4) if len({f"{b:.{n}g}" for b in bounds}) > count), 5)
    ranges = [f"{a:.{digits}g} to {b:.{digits}g}" for a, b in pairwise(bounds)]
    names = ["all zero", *ranges]

    def level(one: dict[str, Any]) -> int | None:
        mean: float | None = one["mean_magnitude"]
        if one["nan"] or one["inf"] or mean is None or not math.isfinite(mean):
            return None
        if mean <= 0:
            return 0
        return min(1 + sum(mean >= bound for bound in bounds[1:-1]), count)

    strips: dict[str, list[Cell]] = {}
    for one in contents:
        name = escape_controls(f"{what_of[one['key']]} {one['tensor']}")
        strips.setdefault(name, []).append(Cell(name, one["layer"], level(one)))
    shown = [cell for cells in list(strips.values())[:_STRIPS] for cell in cells]
    return shown, names, max(0, len(strips) - _STRIPS)
