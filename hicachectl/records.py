"""Records of groups that were taken out of a store: what, why and where from, as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hicachectl.formats.documents import parse_json
from hicachectl.formats.errors import FormatError
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.labels import group_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
_PAGE = re.compile(r"[0-9a-f]{64}")

Mode = Literal["quarantine", "delete"]


def total_bytes(sizes: Iterable[int | None]) -> int | None:
    """Sum sizes; None where one is not known."""
    known = list(sizes)
    return None if None in known else sum(size or 0 for size in known)


@dataclass(frozen=True, slots=True)
class Slot:
    """An object that a page of a deployment can have; its key is prefix, page hash, suffix.

    required: a page without it is not whole.
    trailing: number of a set that a page has all or nothing of; None outside of such sets.
    sidecars: of an anchor, the slots that its writer has written before it.
    """

    prefix: str
    suffix: str
    anchor: bool
    required: bool
    trailing: int | None = None
    sidecars: tuple[int, ...] = ()


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


def dump_record(record: Record) -> bytes:
    """Write a record as JSON, a group a line."""
    shapes: dict[int, int] = {}
    distinct: list[Shape] = []
    groups = []
    for group in record.groups:
        if id(group.shape) not in shapes:
            shapes[id(group.shape)] = len(distinct)
            distinct.append(group.shape)
        groups.append(json.dumps(_group_to_mapping(group, shapes[id(group.shape)])))
    head = {
        "quarantine": FORM,
        "store": record.store,
        "scheme": record.scheme,
        "mode": record.mode,
        "began": record.began,
        "shapes": [[_slot_to_mapping(slot) for slot in shape] for shape in distinct],
    }
    body = ",\n".join(groups)
    return f'{json.dumps(head)[:-1]}, "groups": [\n{body}\n]}}\n'.encode()


class _NotJsonError(FormatError):
    """Text of a record that is not JSON, or beyond the bounds of one."""


def parse_record(text: bytes, *, source: str) -> Record:
    """Read a record. Raises FormatError."""
    try:
        return _parse_document(
            parse_json(text, source, refusal=_NotJsonError, max_values=_MAX_VALUES)
        )
    except (
        _NotJsonError,
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise FormatError(
            f"{source}: not a quarantine record of form {FORM} ({str(error)[:200]}); its pages are "
            "neither restored nor removed. To go on without them, move the file out of the "
            "quarantine"
        ) from error  # fmt: skip


def _parse_document(document: Any) -> Record:
    form = document["quarantine"]
    if type(form) is not int or form != FORM:
        raise ValueError(f"form {form!r:.60}; this release reads {FORM}")
    mode: Mode = document["mode"]
    if mode not in ("quarantine", "delete"):
        raise ValueError(f"mode {mode!r:.60}")
    shapes = [_parse_shape(shape) for shape in document["shapes"]]
    budget = _MOST_KEYS
    groups = []
    for entry in document["groups"]:
        groups.append(_parse_group(entry, shapes))
        budget -= len(groups[-1].shape)
        if budget < 0:
            raise ValueError(f"more than {_MOST_KEYS} keys")
    taken = [(group, object_) for group in groups for object_ in group.objects]
    if len({object_.file for _, object_ in taken}) != len(taken):
        raise ValueError("a file number twice")
    if len({group.key(object_.slot) for group, object_ in taken}) != len(taken):
        raise ValueError("a key twice")
    return Record(
        _text(document["store"]),
        _text(document["scheme"]),
        mode,
        _moment(document["began"]),
        tuple(groups),
    )


def _parse_shape(slots: Sequence[Mapping[str, Any]]) -> Shape:
    shape = tuple(_parse_slot(slot) for slot in slots)
    if len(shape) > _MOST_SLOTS:
        raise ValueError(f"a page with {len(shape)} objects")
    if any(sidecar >= len(shape) for slot in shape for sidecar in slot.sidecars):
        raise ValueError("a sidecar that is no slot")
    return shape


def _slot_to_mapping(slot: Slot) -> dict[str, Any]:
    return {
        "prefix": slot.prefix,
        "suffix": slot.suffix,
        "anchor": slot.anchor,
        "required": slot.required,
        "trailing": slot.trailing,
        "sidecars": list(slot.sidecars),
    }


def _group_to_mapping(group: TakenGroup, shape: int) -> dict[str, Any]:
    return {
        "page": group.page,
        "model": group.model,
        "tag": group.tag,
        "findings": [dict(finding) for finding in group.findings],
        "shape": shape,
        "absent": sorted(group.absent),
        "objects": [
            {
                "key": group.key(taken.slot).decode(),
                "slot": taken.slot,
                "file": taken.file,
                "unwanted": taken.unwanted,
                "nbytes": taken.facts.nbytes,
                "mtime_ns": taken.facts.mtime_ns,
                "version": None if taken.facts.version is None else taken.facts.version.hex(),
                "blake3": taken.blake3,
            }
            for taken in group.objects
        ],
    }


def _parse_slot(table: Mapping[str, Any]) -> Slot:
    return Slot(
        _text(table["prefix"]),
        _text(table["suffix"]),
        _flag(table["anchor"]),
        _flag(table["required"]),
        _optional_count(table["trailing"]),
        tuple(_count(slot) for slot in table["sidecars"]),
    )


def _parse_group(table: Mapping[str, Any], shapes: Sequence[Shape]) -> TakenGroup:
    page = _text(table["page"])
    if not _PAGE.fullmatch(page):
        raise ValueError(f"page {page!r:.60}")
    shape = shapes[_count(table["shape"])]
    absent = frozenset(_count(slot) for slot in table["absent"])
    group = TakenGroup(
        page,
        _text(table["model"]),
        _text(table["tag"]),
        shape,
        tuple(_parse_object(entry) for entry in table["objects"]),
        absent,
        tuple(_parse_finding(finding) for finding in table["findings"]),
    )
    slots = [taken.slot for taken in group.objects]
    if len(set(slots)) != len(slots) or any(slot >= len(shape) for slot in (*slots, *absent)):
        raise ValueError(f"page {page}: its objects do not fit its shape")
    for taken, entry in zip(group.objects, table["objects"], strict=True):
        if group.key(taken.slot) != _text(entry["key"]).encode():
            raise ValueError(f"key {entry['key']!r:.200} is not that of its slot")
    return group


def _parse_object(table: Mapping[str, Any]) -> TakenObject:
    version, digest = table["version"], table["blake3"]
    return TakenObject(
        slot=_count(table["slot"]),
        file=_count(table["file"], _MOST_FILES),
        unwanted=_flag(table["unwanted"]),
        facts=Facts(
            nbytes=_optional_count(table["nbytes"], _MOST_BYTES),
            mtime_ns=_time(table["mtime_ns"]),
            version=None if version is None else bytes.fromhex(_text(version, _MOST_VERSION)),
        ),
        blake3=None if digest is None else _text(digest),
    )


def _parse_finding(table: Mapping[str, Any]) -> dict[str, str | None]:
    return {_text(name): None if value is None else _text(value) for name, value in table.items()}


def _text(value: object, most: int | None = None) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not text")
    value.encode()  # ValueError for half a surrogate pair, which nothing could print
    if most is not None and len(value) > most:
        raise ValueError(f"{value!r:.60}… has {len(value)} characters")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.60} is neither true nor false")
    return value


def _count(value: object, most: int = _INT64_MAX) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise TypeError(f"{value!r:.60} is not a count up to {most}")
    return value


def _optional_count(value: object, most: int = _INT64_MAX) -> int | None:
    return None if value is None else _count(value, most)


def _time(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _INT64_MAX:
        raise TypeError(f"{value!r:.60} is not a time in nanoseconds")
    return value


def _moment(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _LAST_MOMENT:  # type: ignore[operator]
        raise TypeError(f"{value!r:.60} is not a time in seconds")
    return float(value)  # type: ignore[arg-type]
