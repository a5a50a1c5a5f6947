"""Text columns of the `table` format, made from the rows of results."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.objects import AXES
from hicachectl.pages.census import MOST_BYTES
from hicachectl.results import DEFAULT_LIMIT
from hicachectl.text.jsontext import join_present
from hicachectl.text.tables import human_column, human_sizes, table_lines
from hicachectl.text.units import counted, human_age, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicachectl.pages.listing import Totals
    from hicachectl.requests.measuring import HitsReport
    from hicachectl.text.tables import Screen


def pages_for_people(rows: pa.Table) -> pa.Table:
    """Return the text columns of `ls`. A name with ">" marks a right-aligned column."""
    return pa.table(
        {
            "page": _short(rows.column("page")),
            "model": rows.column("model"),
            "sizes": _sizes_text(rows),
            "pools": _pools_text(rows.column("pools")),
            ">size": human_sizes(rows.column("nbytes")),
            ">age": _ages(rows.column("mtime")),
            "state": rows.column("state"),
        }
    )


def _sizes_text(rows: pa.Table) -> pa.StringArray:
    """Return texts such as `tp 4 pp 2`, which distinguish the deployments of one model."""
    return _by_axis(
        [pc.binary_join_element_wise(f"{axis} ", _text(rows, f"{axis}_size"), "") for axis in AXES]
    )


def objects_for_people(rows: pa.Table) -> pa.Table:
    """Return the text columns of `ls --objects`."""
    return pa.table(
        {
            "key": rows.column("key"),
            "model": _text(rows, "model"),
            "pool": _text(rows, "pool"),
            "part": _text(rows, "part"),
            "ranks": _ranks_text(rows),
            ">size": human_sizes(rows.column("nbytes")),
            ">age": _ages(rows.column("mtime")),
            **{
                name.replace("_", " "): _short(rows.column(name))
                for name in ("digest", "identity", "trailer_digest")
                if name in rows.column_names
            },
        }
    )


def contents_for_people(rows: list[dict[str, Any]]) -> pa.Table:
    """Return the text columns of the value statistics of `show`."""
    column = partial(_formatted, rows)
    return pa.table(
        {
            "object": _object_ends([row["key"] for row in rows]),
            "tensor": column("tensor", ""),
            ">layer": column("layer", "d"),
            ">min": column("minimum", ".4g"),
            ">max": column("maximum", ".4g"),
            ">mean |x|": column("mean_magnitude", ".4g"),
            ">nan": column("nan", "d"),
            ">inf": column("inf", "d"),
            ">zero": column("zero", "d"),
        }
    )


def _formatted(rows: list[dict[str, Any]], name: str, form: str) -> pa.Array:
    values = [row[name] for row in rows]
    return pa.array([None if v is None else format(v, form) for v in values], pa.string())


def readings_for_people(rows: list[dict[str, Any]]) -> pa.Table:
    """Return the text columns of the quartiles of `show`."""
    return pa.table(
        {
            "object": _object_ends([row["key"] for row in rows]),
            "read as": _formatted(rows, "dtype", ""),
            ">1/4 |x| to": _formatted(rows, "quarter", ".4g"),
            ">1/2 |x| to": _formatted(rows, "half", ".4g"),
            ">3/4 |x| to": _formatted(rows, "three_quarters", ".4g"),
        }
    )


def _object_ends(keys: list[str]) -> pa.Array:
    """Return the keys with "…" in place of the page hash, which all objects of a page share."""
    return pa.array([re.sub("[0-9a-f]{64}", "…", key) for key in keys], pa.string())


def summary_for_people(rows: pa.Table, total: Totals) -> pa.Table:
    """Return the text columns of `ls --summary`, with the total as the last row."""
    last = pa.Table.from_pylist([{"model": "total", **total}], schema=rows.schema)
    every = pa.concat_tables([rows, last])
    sizes = human_column(every.column("object_nbytes"), human_size)
    columns = {
        "model": every.column("model"),
        "tag": every.column("tag"),
        "sizes": _sizes_text(every),
        "layout": every.column("layout"),
        "pool": every.column("pool"),
        ">object": sizes,
        ">pages": _text(every, "pages"),
        ">objects": _text(every, "objects"),
        ">size": human_sizes(every.column("nbytes")),
        ">oldest": _ages(every.column("first_mtime")),
        ">newest": _ages(every.column("last_mtime")),
    }
    optional = ("tag", "sizes", "layout", ">oldest", ">newest")
    return pa.table(
        {
            name: column
            for name, column in columns.items()
            if name not in optional or column.null_count < len(every)
        }
    )


def removals_for_people(rows: pa.Table) -> pa.Table:
    """Return the text columns of `rm` and `pin`: totals per deployment and state."""
    keys = ["model", "tag", *(f"{axis}_size" for axis in AXES), "state"]
    # Floats, because a sum of hostile sizes can exceed int64.
    sizes = rows.column("nbytes").cast(pa.float64(), safe=False)
    rows = rows.set_column(rows.column_names.index("nbytes"), "nbytes", sizes)
    totals = rows.group_by(keys).aggregate(
        [
            ("page", "count"),
            ("objects", "sum"),
            ("nbytes", "sum", pc.ScalarAggregateOptions(skip_nulls=False)),
        ]
    )
    totals = totals.sort_by([(key, "ascending") for key in keys])
    nbytes = pc.min_element_wise(totals.column("nbytes_sum"), float(MOST_BYTES), skip_nulls=False)
    return pa.table(
        {
            "model": totals.column("model"),
            "tag": totals.column("tag"),
            "sizes": _sizes_text(totals),
            ">pages": _text(totals, "page_count"),
            ">objects": _text(totals, "objects_sum"),
            ">size": human_sizes(nbytes),
            "state": totals.column("state"),
        }
    )


def hits_lines(
    report: HitsReport,
    screen: Screen,
    *,
    summary: bool = False,
    by: Sequence[str] = (),
    limit: int | None = None,
) -> Iterator[str]:
    """Yield the lines of `hits`: the requests or the causes, the groups, then the sums.

    summary: show the causes in place of the requests.
    by: words of --by.
    limit: most lines of a table, the worst lines first. None means DEFAULT_LIMIT on a terminal, and
        no limit elsewhere.
    """
    from hicachectl.requests.measuring import served_text, short_text, unreachable_text

    if limit is None and screen.width is not None:
        limit = DEFAULT_LIMIT

    def table(rows: pa.Table, human: Callable[[pa.Table], pa.Table], noun: str) -> Iterator[str]:
        yield from table_lines(human(rows.slice(0, limit)), screen)
        if limit is not None and (left := len(rows) - limit) > 0:
            more = "; --summary shows the causes" if noun == "request" else ""
            yield f"and {counted(left, noun)} more; --limit {len(rows)} shows all{more}"

    if summary:
        yield from table(report.causes, causes_for_people, "cause")
    else:
        rows = report.rows
        if limit is not None and limit < len(rows):
            rows = rows.sort_by([("lost_pages", "descending")])
        yield from table(rows, hits_for_people, "request")
    for word in by:
        yield ""
        yield from table(report.groups[word], partial(groups_for_people, by=word), "group")
    if by:
        yield ""
    yield from filter(None, (short_text(report.document), unreachable_text(report.document)))
    yield served_text(report.document)


def hits_for_people(rows: pa.Table) -> pa.Table:
    """Return the text columns of `hits`."""
    stops = rows.column("stopped_by").combine_chunks()
    page = pc.binary_join_element_wise("page ", _short(stops.field("page")), "")
    counts = ("tokens", "kv_pages", "usable_pages", "usable_tokens", "served_tokens")
    return pa.table(
        {
            ">chain": _text(rows, "chain"),
            **{f">{name.replace('_', ' ')}": _text(rows, name) for name in counts},
            ">unreachable": _text(rows, "unreachable_pages"),
            "stopped by": pc.if_else(stops.is_valid(), _stop_text(stops, page), None),
        }
    )


def causes_for_people(rows: pa.Table) -> pa.Table:
    """Return the text columns of the causes of `hits`."""
    return pa.table(
        {
            "stopped by": _stop_text(rows.to_struct_array().combine_chunks()),
            ">requests": _text(rows, "requests"),
            ">lost pages": _text(rows, "lost_pages"),
            ">lost tokens": _text(rows, "lost_tokens"),
            ">unreachable": _text(rows, "unreachable_pages"),
        }
    )


def groups_for_people(rows: pa.Table, by: str) -> pa.Table:
    """Return the text columns of groups of `hits`. by: word of --by, the title of a column."""
    served = pc.divide(pc.cast(rows["served_tokens"], pa.float64()), rows["requested_tokens"])
    shares = pc.coalesce(pc.if_else(pc.is_finite(served), served, None), rows["usable_share"])
    return pa.table(
        {
            by: rows["group"],
            ">requests": _text(rows, "requests"),
            ">tokens": _text(rows, "requested_tokens"),
            ">served": human_column(shares.combine_chunks(), "{:.1%}".format),
            ">unreachable": _text(rows, "unreachable_pages"),
        }
    )


def _stop_text(stops: pa.StructArray, *more: pa.StringArray) -> pa.StringArray:
    """Return texts such as `wrong size kv tp 0/2`. more: texts to append."""
    fault, reason = (pc.replace_substring(stops.field(n), "_", " ") for n in ("fault", "reason"))
    fault = pc.if_else(pc.equal(fault, "missing"), None, fault)
    ranks = _ranks_text(pa.Table.from_struct_array(stops.field("shard")))
    place = pc.binary_join_element_wise("(exists at ", stops.field("exists_at"), ")", "")
    pool, part = stops.field("pool"), stops.field("part")
    return join_present([reason, fault, pool, part, ranks, place, *more], " ")


def worst_first(rows: pa.Table) -> pa.Table:
    """Return the rows of `restore`. The pages that were not restored come first."""
    from hicachectl.move.results import RESTORED, WOULD_RESTORE

    done = pc.is_in(rows.column("state"), pa.array([RESTORED, WOULD_RESTORE]))
    return pa.concat_tables([rows.filter(pc.invert(done)), rows.filter(done)])


def restored_for_people(rows: pa.Table) -> pa.Table:
    """Return the text columns of `restore`."""
    return pa.table(
        {
            "page": _short(rows.column("page")),
            "model": rows.column("model"),
            ">objects": _text(rows, "objects"),
            ">size": human_sizes(rows.column("nbytes")),
            "found": pc.binary_join(rows.column("codes"), ","),
            "state": rows.column("state"),
            "detail": rows.column("detail"),
        }
    )


def runs_for_people(rows: pa.Table) -> pa.Table:
    """Return the text columns of `quarantine`."""
    return pa.table(
        {
            "run": rows.column("run"),
            "removed": _times(rows.column("removed")),
            "store": rows.column("store"),
            ">pages": _text(rows, "groups"),
            ">size": human_sizes(rows.column("nbytes")),
            "found": pc.binary_join(rows.column("codes"), ","),
            "state": rows.column("state"),
        }
    )


def run_directories_for_people(rows: pa.Table) -> pa.Table:
    """Return the text columns of `runs list` and `runs purge`."""
    done, parts = (_text(rows, name) for name in ("done", "parts"))
    return pa.table(
        {
            "run": rows.column("run"),
            "command": rows.column("command"),
            "stores": pc.binary_join(rows.column("stores"), " "),
            "listed": _times(rows.column("listed")),
            ">parts": pc.binary_join_element_wise(done, parts, "/"),
            ">size": human_sizes(rows.column("nbytes")),
            ">changed": _ages(rows.column("changed").combine_chunks()),
            "state": rows.column("state"),
        }
    )


def parts_for_people(rows: pa.Table) -> pa.Table:
    """Return the text columns of `runs status`."""
    return pa.table(
        {
            ">part": _text(rows, "part"),
            "host": rows.column("host"),
            "ended": _times(rows.column("ended")),
            ">took": human_column(rows.column("seconds").combine_chunks(), human_age),
            "state": rows.column("state"),
        }
    )


def last_line(document: Mapping[str, Any], counts: Mapping[str, int], done: str) -> str:
    """Return the line below a table: the counts, what was done, and why the run stopped early.

    counts: numbers by their nouns.
    done: the action in the past participle, such as "removed".
    """
    numbers = ", ".join(counted(count, noun) for noun, count in counts.items())
    would = "would be " if document.get("dry_run") else ""
    stopped = f"; stopped: {document['stopped_by']}" if document.get("stopped_by") else ""
    return f"{numbers}, {human_size(document['bytes'])} {would}{done}{stopped}"


def _times(moments: pa.ChunkedArray) -> pa.StringArray:
    """Return Unix times, in seconds, as texts in UTC."""
    return human_column(
        moments.combine_chunks(),
        lambda when: time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(when)),
    )


def _ages(mtimes: pa.Array) -> pa.StringArray:
    """Return ages of Unix times, in seconds, as texts."""
    # `human_column` makes one text for each distinct value, so round the ages to whole seconds.
    elapsed = pc.floor(pc.subtract(time.time(), mtimes))
    return human_column(elapsed, human_age)


def _pools_text(pools: pa.Array) -> pa.StringArray:
    """Return texts such as `kv 2/2 mamba 1/2`: present/expected objects of a page's pools."""
    if isinstance(pools, pa.ChunkedArray):
        pools = pools.combine_chunks()
    texts = []
    for field, counts in zip(pools.type, pools.flatten(), strict=True):
        present, expected = (pc.cast(values, pa.string()) for values in counts.flatten())
        text = pc.binary_join_element_wise(f"{field.name} ", present, "/", expected, "")
        texts.append(pc.if_else(counts.is_valid(), text, None))
    if not texts:
        return pa.nulls(len(pools), pa.string())
    return join_present(texts, " ")


def _ranks_text(rows: pa.Table) -> pa.StringArray:
    """Return texts such as `tp 0/2 pp 1/4`: the rank coordinates in each object's key."""
    texts = []
    for axis in AXES:
        rank, size = (_text(rows, f"{axis}_{end}") for end in ("rank", "size"))
        texts.append(
            pc.binary_join_element_wise(f"{axis} ", rank, "/", pc.fill_null(size, "?"), "")
        )
    return _by_axis(texts)


def _by_axis(texts: list[pa.StringArray]) -> pa.StringArray:
    """Join the texts of all axes. A row without any text becomes null."""
    joined = join_present(texts, " ")
    return pc.if_else(pc.equal(joined, ""), None, joined)


def _text(rows: pa.Table, name: str) -> pa.Array:
    return pc.cast(rows.column(name), pa.string())


def _short(hashes: pa.Array) -> pa.Array:
    return pc.utf8_slice_codeunits(hashes, 0, 16)
