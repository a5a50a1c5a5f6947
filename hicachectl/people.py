"""The rows of `listing` as text columns for people: what the `table` format shows."""

from __future__ import annotations

import time

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.jsontext import join_present
from hicachectl.output import human_age, human_column, human_size


def pages_for_people(rows: pa.Table) -> pa.Table:
    """Make the text columns of `ls`; ">" marks what is aligned to the right."""
    return pa.table(
        {
            "page": pc.utf8_slice_codeunits(rows.column("page"), 0, 16),
            "model": rows.column("model"),
            "pools": _pools_text(rows.column("pools")),
            ">size": human_column(rows.column("nbytes"), human_size),
            ">age": _ages(rows.column("mtime")),
            "state": rows.column("state"),
        }
    )


def objects_for_people(rows: pa.Table) -> pa.Table:
    """Make the text columns of `ls --objects`."""
    return pa.table(
        {
            "key": rows.column("key"),
            "model": pc.cast(rows.column("model"), pa.string()),
            "pool": pc.cast(rows.column("pool"), pa.string()),
            "part": pc.cast(rows.column("part"), pa.string()),
            "ranks": _ranks_text(rows),
            ">size": human_column(rows.column("nbytes"), human_size),
            ">age": _ages(rows.column("mtime")),
        }
    )


def summary_for_people(rows: pa.Table) -> pa.Table:
    """Make the text columns of `ls --summary`."""
    return pa.table(
        {
            "model": rows.column("model"),
            "tag": rows.column("tag"),
            "pool": rows.column("pool"),
            ">pages": pc.cast(rows.column("pages"), pa.string()),
            ">objects": pc.cast(rows.column("objects"), pa.string()),
            ">size": human_column(rows.column("nbytes"), human_size),
        }
    )


def _ages(mtimes: pa.Array) -> pa.StringArray:
    """Unix seconds as ages for people."""
    elapsed = pc.floor(pc.subtract(time.time(), mtimes))  # few distinct values, unlike mtimes
    return human_column(elapsed, human_age)


def _pools_text(pools: pa.Array) -> pa.StringArray:
    """`kv 2/2 mamba 1/2`: present of expected objects of each pool of a page."""
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
    """`tp 0/2 pp 1/4`: the rank coordinates that each object's key says."""
    texts = []
    for axis in ("tp", "pp", "cp", "dcp"):
        rank, size = (
            pc.cast(rows.column(f"{axis}_{end}"), pa.string()) for end in ("rank", "size")
        )
        texts.append(
            pc.binary_join_element_wise(f"{axis} ", rank, "/", pc.fill_null(size, "?"), "")
        )
    joined = join_present(texts, " ")
    return pc.if_else(pc.equal(joined, ""), None, joined)
