"""Convert Arrow columns to JSON text, without running Python for each row."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from hicachectl.text.terminal import escape_controls

WRITE_NULL = {b"json": b"null"}  # metadata of a struct field whose nulls are written, too
_ARROW_TYPES = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    list[str]: pa.list_(pa.string()),
}


def schema_of(row: type) -> pa.Schema:
    """Return the Arrow schema of rows. row: class that declares the members of a row."""
    fields = []
    for name, hint in get_type_hints(row).items():
        known = next(one for one in (hint, *get_args(hint)) if one in _ARROW_TYPES)
        fields.append((name, _ARROW_TYPES[known]))
    return pa.schema(fields)


def json_rows(table: pa.Table | pa.RecordBatch) -> pa.StringArray:
    """Return each row as a JSON object. It has all columns in order, even those that are null."""
    rows = table.to_struct_array()
    if isinstance(rows, pa.ChunkedArray):
        rows = rows.combine_chunks()
    return _object(rows, skip_nulls=False)


def json_values(array: pa.Array) -> pa.StringArray:
    """Return each value as JSON. Null fields of structs are left out, except with WRITE_NULL.

    array: strings, booleans, integers, floats, dictionary-encoded values, lists or structs.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    kind = array.type
    if pt.is_dictionary(kind):
        text = json_values(array.dictionary).take(array.indices)
    elif pt.is_struct(kind):
        text = _object(array, skip_nulls=True)
    elif pt.is_list(kind):
        text = _list(array)
    elif pt.is_string(kind):
        text = _quoted(array)
    else:
        text = pc.cast(array, pa.string())
    return pc.if_else(array.is_valid(), text, "null")


def _object(array: pa.StructArray, *, skip_nulls: bool) -> pa.StringArray:
    if not array.type.num_fields:
        return pa.array(["{}"] * len(array))
    members = []
    for field, values in zip(array.type, array.flatten(), strict=True):
        text = pc.binary_join_element_wise(f"{json.dumps(field.name)}: ", json_values(values), "")
        skip = skip_nulls and (field.metadata or {}).items().isdisjoint(WRITE_NULL.items())
        members.append(pc.if_else(values.is_valid(), text, None) if skip else text)
    return pc.binary_join_element_wise("{", join_present(members, ", "), "}", "")


def join_present(columns: list[pa.StringArray], separator: str) -> pa.StringArray:
    """Join the values of each row that are not null. The text is "" if all values are null.

    Arrow's null_handling="skip" loses rows that have only nulls (pyarrow 26.0.1).
    """
    joined = pc.fill_null(columns[0], "")
    for column in columns[1:]:
        longer = pc.binary_join_element_wise(joined, column, separator)
        first = pc.and_(column.is_valid(), pc.equal(joined, ""))
        joined = pc.if_else(first, column, pc.coalesce(longer, joined))
    return joined


def _list(array: pa.ListArray) -> pa.StringArray:
    items = json_values(array.flatten())
    # flatten() drops values that lie outside a slice or in a null list, so the offsets are computed
    # anew.
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    body = pc.binary_join(pa.ListArray.from_arrays(offsets, items), ", ")
    return pc.binary_join_element_wise("[", body, "]", "")


def json_text(value: Any) -> str:
    r"""Return a value as JSON that is safe on a terminal and valid in any Unicode encoding.

    Characters that `escape_controls` escapes, such as lone surrogates, are written \uNNNN.
    """
    text = json.dumps(value, ensure_ascii=False)
    if escape_controls(text) == text:
        return text
    return "".join(c if escape_controls(c) == c else json.dumps(c)[1:-1] for c in text)


def _quoted(array: pa.StringArray) -> pa.StringArray:
    if pc.any(pc.match_substring_regex(array, r'["\\]|[^ -~]')).as_py():
        distinct = pc.dictionary_encode(array)
        quoted = [json_text(value) for value in distinct.dictionary.to_pylist()]
        return pa.array(quoted, pa.string()).take(distinct.indices)
    return pc.binary_join_element_wise('"', array, '"', "")
