"""Records of groups that were taken out of a store: what, why and where from, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.labels import group_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MAX_VALUES = 16_000_000  # JSON values of one record; a thousand objects have some 10,000
FORM = 1
# What numbers of a record can be: none that an Arrow column or the system refuses.
_INT64_MAX = 2**63 - 1
_MOST_BYTES = 2**44  # of an object; the sum of a page is an int64
_MOST_FILES = 999_999_999
_MOST_SLOTS = 1 << 16
_MOST_KEYS = 1 << 23  # of all groups; some shapes have thousands of slots that no page fills
_MOST_VERSION = 1 << 16
_LAST_MOMENT = 1e11

Mode = Literal["quarantine", "delete"]
_Count = Annotated[int, Meta(ge=0, le=_INT64_MAX)]


def total_bytes(sizes: Iterable[int | None]) -> int | None:
    """Sum sizes; None where one is not known."""
    known = list(sizes)
    return None if None in known else sum(size or 0 for size in known)


class Slot(Struct, frozen=True):
    """An object that a page of a deployment can have; its key is prefix, page hash, suffix.

    required: a page without it is not whole.
    trailing: number of a set that a page has all or nothing of; None outside of such sets.
    sidecars: of an anchor, the slots that its writer has written before it.
    """

    prefix: str
    suffix: str
    anchor: bool
    required: bool
    trailing: _Count | None
    sidecars: tuple[_Count, ...]


Shape = tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a store lists of an object: how to tell it from a later one under its key."""

    nbytes: int | None
    mtime_ns: int | None
    version: bytes | None

    def same(self, other: Facts) -> bool:
        """Whether both are the same object; where a store has no versions, size and time decide."""
        if self.version is not None and other.version is not None:
            return self.version == other.version
        return (self.nbytes, self.mtime_ns) == (other.nbytes, other.mtime_ns)


@dataclass(frozen=True, slots=True)
class TakenObject:
    """One object of a group, as it was.

    slot: index into the group's shape. file: its number in the batch's folder.
    unwanted: the group is taken away because of this object.
    """

    slot: int
    file: int
    unwanted: bool
    facts: Facts
    blake3: str | None = None


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A page group that is taken away.

    absent: slots whose absence is not why. findings: why, with the members of `verify`'s.
    """

    page: str
    model: str
    tag: str
    shape: Shape
    objects: tuple[TakenObject, ...]
    absent: frozenset[int] = frozenset()
    findings: tuple[Mapping[str, str | None], ...] = ()

    def key(self, slot: int) -> bytes:
        """Spell the key of one of its objects."""
        return f"{self.shape[slot].prefix}{self.page}{self.shape[slot].suffix}".encode()

    def label(self, scheme: str) -> str:
        """Name the group as `ls` does under "group". scheme: of the store's keys."""
        slots = sorted(taken.slot for taken in self.objects)
        affixes = ((self.shape[slot].prefix, self.shape[slot].suffix) for slot in slots)
        return group_label(codec_for(scheme), self.model, self.tag, affixes)

    @property
    def keys(self) -> list[bytes]:
        """The keys of all its slots."""
        return [self.key(slot) for slot in range(len(self.shape))]


@dataclass(frozen=True, slots=True)
class Record:
    """What one batch took from where."""

    store: str
    scheme: str
    mode: Mode
    began: float
    groups: tuple[TakenGroup, ...]


class _ObjectForm(Struct):
    """A `TakenObject` as JSON has it; key: must be that of its slot. version: hexadecimal."""

    key: str
    slot: _Count
    file: Annotated[int, Meta(ge=0, le=_MOST_FILES)]
    unwanted: bool
    nbytes: Annotated[int, Meta(ge=0, le=_MOST_BYTES)] | None
    mtime_ns: Annotated[int, Meta(ge=-_INT64_MAX, le=_INT64_MAX)] | None
    version: Annotated[str, Meta(max_length=_MOST_VERSION)] | None
    blake3: str | None


class _GroupForm(Struct):
    """A `TakenGroup` as JSON has it; shape: index into the record's."""

    page: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    model: str
    tag: str
    findings: tuple[dict[str, str | None], ...]
    shape: _Count
    absent: tuple[_Count, ...]
    objects: tuple[_ObjectForm, ...]


class _RecordForm(Struct):
    """A `Record` as JSON has it."""

    quarantine: int
    store: str
    scheme: str
    mode: Mode
    began: Annotated[float, Meta(ge=0, le=_LAST_MOMENT)]
    shapes: tuple[Shape, ...]
    groups: tuple[_GroupForm, ...]


def dump_record(record: Record) -> bytes:
    """Write a record as JSON, a group a line."""
    places: dict[int, int] = {}  # of each shape, by its identity
    shapes: list[Shape] = []
    groups = []
    for group in record.groups:
        if id(group.shape) not in places:
            places[id(group.shape)] = len(shapes)
            shapes.append(group.shape)
        form = _group_form(group, places[id(group.shape)])
        groups.append(json.dumps(msgspec.to_builtins(form)))
    head = _RecordForm(
        FORM, record.store, record.scheme, record.mode, record.began, tuple(shapes), ()
    )
    body = ",\n".join(groups)
    text = json.dumps(msgspec.to_builtins(head)).removesuffix("]}")
    return f"{text}\n{body}\n]}}\n".encode()


def _group_form(group: TakenGroup, shape: int) -> _GroupForm:
    return _GroupForm(
        page=group.page,
        model=group.model,
        tag=group.tag,
        findings=tuple(dict(finding) for finding in group.findings),
        shape=shape,
        absent=tuple(sorted(group.absent)),
        objects=tuple(_object_form(group, taken) for taken in group.objects),
    )


def _object_form(group: TakenGroup, taken: TakenObject) -> _ObjectForm:
    nbytes, mtime_ns, version = taken.facts.nbytes, taken.facts.mtime_ns, taken.facts.version
    return _ObjectForm(
        key=group.key(taken.slot).decode(),
        slot=taken.slot,
        file=taken.file,
        unwanted=taken.unwanted,
        nbytes=nbytes,
        mtime_ns=mtime_ns,
        version=None if version is None else version.hex(),
        blake3=taken.blake3,
    )


class _DamagedError(FormatError):
    """Text of a record that is not JSON, beyond the bounds of one, or of another form."""


def parse_record(text: bytes, *, source: str) -> Record:
    """Read a record. Raises FormatError."""
    try:
        document = parse_json_object(text, "JSON", refusal=_DamagedError, max_values=_MAX_VALUES)
        form = document.get("quarantine")
        if form != FORM:
            raise ValueError(f"form {form!r:.60}; this release reads {FORM}")
        return _record(convert(document, _RecordForm, "JSON", refusal=_DamagedError))
    except (_DamagedError, ValueError) as error:
        raise FormatError(
            f"{source}: not a quarantine record of form {FORM} ({str(error)[:200]}); its pages are "
            "neither restored nor removed. To go on without them, move the file out of the "
            "quarantine"
        ) from error  # fmt: skip


def _record(form: _RecordForm) -> Record:
    """Make what a record says. Raises ValueError where parts of it contradict one another."""
    msgspec.json.encode(form)  # UnicodeEncodeError for half a character, which nothing could print
    for shape in form.shapes:
        if len(shape) > _MOST_SLOTS:
            raise ValueError(f"a page with {len(shape)} objects")
        if any(sidecar >= len(shape) for slot in shape for sidecar in slot.sidecars):
            raise ValueError("a sidecar that is no slot")
    if any(group.shape >= len(form.shapes) for group in form.groups):
        raise ValueError("a group of no shape")
    if sum(len(form.shapes[group.shape]) for group in form.groups) > _MOST_KEYS:
        raise ValueError(f"more than {_MOST_KEYS} keys")
    taken = [one for group in form.groups for one in group.objects]
    if len({one.file for one in taken}) != len(taken):
        raise ValueError("a file number twice")
    if len({one.key for one in taken}) != len(taken):
        raise ValueError("a key twice")
    groups = tuple(_group(group, form.shapes[group.shape]) for group in form.groups)
    return Record(form.store, form.scheme, form.mode, form.began, groups)


def _group(form: _GroupForm, shape: Shape) -> TakenGroup:
    slots = [one.slot for one in form.objects]
    if len(set(slots)) != len(slots) or any(n >= len(shape) for n in (*slots, *form.absent)):
        raise ValueError(f"page {form.page}: its objects do not fit its shape")
    group = TakenGroup(
        form.page,
        form.model,
        form.tag,
        shape,
        tuple(map(_taken, form.objects)),
        frozenset(form.absent),
        form.findings,
    )
    for one in form.objects:
        if group.key(one.slot) != one.key.encode():
            raise ValueError(f"key {one.key!r:.200} is not that of its slot")
    return group


def _taken(form: _ObjectForm) -> TakenObject:
    version = None if form.version is None else bytes.fromhex(form.version)
    facts = Facts(form.nbytes, form.mtime_ns, version)
    return TakenObject(form.slot, form.file, form.unwanted, facts, form.blake3)
