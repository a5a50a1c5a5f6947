"""Record of a batch of page groups on disk: JSON, checked when read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Meta, Struct

from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert
from hicachectl.formats.marker import Marker, MarkerForm, marker_form, marker_of
from hicachectl.move.recorded import FACTS, FINDINGS, Count, RecordedGroups, Shape, Slot

_MAX_VALUES = 16_000_000  # JSON values of one record; 1,000 objects have about 10,000
FORM = 1
# Bounds of the numbers in a record: all fit into Arrow columns and system calls.
_INT64_MAX = 2**63 - 1
_MOST_BYTES = 2**44  # of an object; the sum of a page is an int64
_MOST_FILES = 999_999_999
_MOST_SLOTS = 1 << 16
_MOST_KEYS = 1 << 23  # of all groups; a shape may have thousands of slots that no page fills
_MOST_VERSION = 1 << 16
_LAST_MOMENT = 1e11  # Unix seconds

Mode = Literal["quarantine", "delete"]


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Groups that one batch removed, and their store.

    markers: of the trailers that the objects may have, for a restore into another store.
    """

    store: str
    scheme: str
    mode: Mode
    began: float
    groups: RecordedGroups
    markers: tuple[Marker, ...] = ()


class _ObjectForm(Struct):
    """An object in JSON. key: must equal the slot's key. version: hexadecimal."""

    key: str
    slot: Count
    file: Annotated[int, Meta(ge=0, le=_MOST_FILES)]
    unwanted: bool
    nbytes: Annotated[int, Meta(ge=0, le=_MOST_BYTES)] | None
    mtime_ns: Annotated[int, Meta(ge=-_INT64_MAX, le=_INT64_MAX)] | None
    version: Annotated[str, Meta(max_length=_MOST_VERSION)] | None
    blake3: str | None


class _GroupForm(Struct):
    """A group in JSON. shape: index into the record's shapes."""

    page: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    model: str
    tag: str
    findings: tuple[dict[str, str | None], ...]
    shape: Count
    absent: tuple[Count, ...]
    objects: tuple[_ObjectForm, ...]


class _RecordForm(Struct, kw_only=True):
    """A record in JSON. markers: missing in records of stores without any."""

    quarantine: int
    store: str
    scheme: str
    mode: Mode
    began: Annotated[float, Meta(ge=0, le=_LAST_MOMENT)]
    markers: tuple[MarkerForm, ...] = ()
    shapes: tuple[tuple[Slot, ...], ...]
    groups: tuple[_GroupForm, ...]


def dump_record(record: Record) -> bytes:
    """Return a record as JSON, one group a line."""
    groups = record.groups
    used, first = np.unique(groups.shape_ids, return_index=True)
    used = used[np.argsort(first)]  # in the order of the groups
    numbers = {number: place for place, number in enumerate(used.tolist())}
    shapes = tuple(groups.shapes[number].slots for number in used)
    absent = np.flatnonzero(groups.absent)
    absent_slots = (absent - groups.starts[groups.cell_owners[absent]]).tolist()
    absent_ends = np.searchsorted(absent, groups.starts).tolist()
    objects = _object_forms(groups)
    ends = np.searchsorted(groups.owners, np.arange(len(groups) + 1)).tolist()
    columns = (groups.pages, groups.models, groups.tags, groups.findings)
    described = zip(
        *(column.to_pylist() for column in columns), groups.shape_ids.tolist(), strict=True
    )
    lines = [
        json.dumps(
            {
                "page": page,
                "model": model,
                "tag": tag,
                "findings": findings,
                "shape": numbers[shape],
                "absent": absent_slots[absent_ends[n] : absent_ends[n + 1]],
                "objects": objects[ends[n] : ends[n + 1]],
            }
        )
        for n, (page, model, tag, findings, shape) in enumerate(described)
    ]
    head = _RecordForm(
        quarantine=FORM,
        store=record.store,
        scheme=record.scheme,
        mode=record.mode,
        began=record.began,
        markers=tuple(map(marker_form, record.markers)),
        shapes=shapes,
        groups=(),
    )
    body = ",\n".join(lines)
    text = json.dumps(msgspec.to_builtins(head)).removesuffix("]}")
    return f"{text}\n{body}\n]}}\n".encode()


def _object_forms(groups: RecordedGroups) -> list[dict[str, object]]:
    keys = groups.keys_of(groups.cells).cast(pa.string()).to_pylist()
    numbers = (column.tolist() for column in (groups.slots, groups.files, groups.unwanted))
    facts = (groups.facts.column(name).to_pylist() for name in FACTS.names)
    return [
        {
            "key": key,
            "slot": slot,
            "file": file,
            "unwanted": unwanted,
            "nbytes": nbytes,
            "mtime_ns": mtime_ns,
            "version": None if version is None else version.hex(),
            "blake3": blake3,
        }
        for key, slot, file, unwanted, nbytes, mtime_ns, version, blake3 in zip(
            keys, *numbers, *facts, strict=True
        )
    ]


class _DamagedError(FormatError):
    """Text that is not JSON, exceeds a bound or has another form."""


def parse_record(text: bytes, *, source: str) -> Record:
    """Return the record in a text. Raises FormatError."""
    try:
        document = parse_json_object(text, "JSON", refusal=_DamagedError, max_values=_MAX_VALUES)
        form = document.get("quarantine")
        if form != FORM:
            raise ValueError(f"has form {form!r:.60}, but this version reads form {FORM}")
        return _record(convert(document, _RecordForm, "JSON", refusal=_DamagedError))
    except (FormatError, ValueError) as error:
        raise FormatError(
            f"{source}: not a quarantine record of form {FORM} ({str(error)[:200]}), so its pages "
            "can be neither restored nor removed; to go on without them, move the file out of the "
            "quarantine"
        ) from error  # fmt: skip


def _record(form: _RecordForm) -> Record:
    """Return the record. Raises ValueError if its parts contradict one another."""
    msgspec.json.encode(form)  # raises UnicodeEncodeError for text that is not valid UTF-8
    for shape in form.shapes:
        if len(shape) > _MOST_SLOTS:
            raise ValueError(f"a page has {len(shape)} slots, more than {_MOST_SLOTS}")
        if any(sidecar >= len(shape) for slot in shape for sidecar in slot.sidecars):
            raise ValueError("an anchor lists a sidecar slot that its shape lacks")
    if any(group.shape >= len(form.shapes) for group in form.groups):
        raise ValueError("a group has the number of a shape that the record lacks")
    if sum(len(form.shapes[group.shape]) for group in form.groups) > _MOST_KEYS:
        raise ValueError(f"more than {_MOST_KEYS} keys")
    taken = [one for group in form.groups for one in group.objects]
    if len({one.file for one in taken}) != len(taken):
        raise ValueError("two objects have the same file number")
    if len({one.key for one in taken}) != len(taken):
        raise ValueError("two objects have the same key")
    for group in form.groups:
        _check_slots(group, len(form.shapes[group.shape]))
    groups = _recorded(form, taken)
    _check_keys(groups, taken)
    markers = tuple(marker_of(one, "markers") for one in form.markers)
    return Record(form.store, form.scheme, form.mode, form.began, groups, markers)


def _check_keys(groups: RecordedGroups, taken: list[_ObjectForm]) -> None:
    for one, key in zip(taken, groups.keys_of(groups.cells).to_pylist(), strict=True):
        if key != one.key.encode():
            raise ValueError(f"key {one.key!r:.200} differs from the key of its slot")


def _check_slots(group: _GroupForm, slots: int) -> None:
    filled = [one.slot for one in group.objects]
    if len(set(filled)) != len(filled) or any(n >= slots for n in (*filled, *group.absent)):
        raise ValueError(f"page {group.page}: its objects do not fit its shape")


def _recorded(form: _RecordForm, taken: list[_ObjectForm]) -> RecordedGroups:
    """Return a record's groups as columns. taken: all objects."""
    groups = form.groups
    shape_ids = np.array([group.shape for group in groups], dtype=np.int64)
    widths = np.array([len(shape) for shape in form.shapes], dtype=np.int64)
    starts = np.append(0, np.cumsum(widths[shape_ids]))
    absent = np.zeros(starts[-1], dtype=np.bool_)
    absent[[start + n for start, g in zip(starts.tolist(), groups) for n in g.absent]] = True  # noqa: B905 - one more start
    versions = [None if one.version is None else bytes.fromhex(one.version) for one in taken]
    facts = {
        **{name: [getattr(one, name) for one in taken] for name in FACTS.names},
        "version": versions,
    }
    texts = ([getattr(group, name) for group in groups] for name in ("page", "model", "tag"))
    pages, models, tags = (pa.array(values, pa.string()) for values in texts)
    return RecordedGroups(
        pages=pages,
        models=models,
        tags=tags,
        shapes=tuple(map(Shape, form.shapes)),
        shape_ids=shape_ids,
        findings=pa.array([group.findings for group in groups], FINDINGS),
        absent=absent,
        owners=np.repeat(np.arange(len(groups)), [len(group.objects) for group in groups]),
        slots=np.array([one.slot for one in taken], dtype=np.int64),
        files=np.array([one.file for one in taken], dtype=np.int64),
        unwanted=np.array([one.unwanted for one in taken], dtype=np.bool_),
        facts=pa.table(facts, schema=FACTS),
    )
