"""Bytes that a page takes in a store, and the limits of the store.

A store limits the bytes of each rank (HiCacheFile, the plug-in), of each table (3FS), or of all
objects together (Mooncake). In this package, a room is the place that one limit applies to: the
files of a rank, a table or the whole store. A capacity is always for the whole store. All ranks or
tables have the same setting, so the limit of each room is an equal part of the capacity.

A trailing pool is a pool that servers need only for the last pages of a prefix.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.formats.spec import object_specs

if TYPE_CHECKING:
    from hicachectl.formats.eviction import Policy
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec


class PageFile(NamedTuple):
    """One object of a page.

    pool: name of the object's pool.
    nbytes: bytes of the object.
    window: number of pages at the end of each write that have the object; 0 if all pages of the
        write have it.
    anchor: whether servers find the page by this object.
    """

    pool: str
    nbytes: int
    window: int = 0
    anchor: bool = True


class Room(NamedTuple):
    """Equal rooms of a store. Each room has a limit of its own.

    files: objects of a page in one room, in the order in which a server writes them.
    copies: number of the equal rooms. They always hold the same pages.
    """

    files: tuple[PageFile, ...]
    copies: int = 1


@dataclass(frozen=True, slots=True)
class PageSizes:
    """Sizes of the objects of a page, in the rooms of a store.

    rooms: rooms of the store. One `Room` stands for all rooms that are equal.
    known: whether bytes are known. If not, each page counts as one object of size 1.
    """

    rooms: tuple[Room, ...] = (Room((PageFile("kv", 1),)),)
    known: bool = False

    @classmethod
    def of(cls, profile: Profile | None, policy: Policy) -> PageSizes:
        """Return the sizes of a deployment's pages; without a profile, size 1 for each page.

        Raises as `object_specs` does.
        """
        if profile is None:
            return cls()
        rooms: dict[object, list[PageFile]] = {}
        specs = object_specs(profile, policy.grammar)
        for spec in sorted(specs, key=lambda spec: spec.anchor):  # servers write the anchor last
            file = PageFile(spec.pool, spec.nbytes, spec.trailing_pages, spec.anchor)
            rooms.setdefault(_room_of(spec, policy), []).append(file)
        counts = Counter(map(tuple, rooms.values()))
        return cls(tuple(Room(files, count) for files, count in counts.items()), known=True)

    def in_blocks(self, count: int) -> PageSizes:
        """Return the sizes of blocks. count: number of pages in a block."""
        if count == 1:
            return self
        rooms = [
            Room(tuple(_of_block(file, count) for file in room.files), room.copies)
            for room in self.rooms
        ]
        return replace(self, rooms=tuple(rooms))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in the whole store, without objects of trailing pools."""
        return self._total(trailing=False)

    @property
    def trailing_bytes(self) -> int:
        """Bytes that the objects of trailing pools add to a page that has them."""
        return self._total(trailing=True)

    @property
    def limits(self) -> int:
        """Number of rooms. The limit of each room is an equal part of the capacity."""
        return sum(room.copies for room in self.rooms)

    @property
    def uniform(self) -> bool:
        """Whether a page is one object in each room, so that a room's pages have equal bytes."""
        return all(len(room.files) == 1 and not room.files[0].window for room in self.rooms)

    def pages(self, capacity: int) -> int:
        """Return how many pages a store can hold, if no page has objects of trailing pools.

        capacity: bytes of the whole store.
        """
        return capacity // max(self.page_bytes, 1)

    def _total(self, *, trailing: bool) -> int:
        return sum(
            room.copies * file.nbytes
            for room in self.rooms
            for file in room.files
            if bool(file.window) == trailing
        )


def _of_block(file: PageFile, count: int) -> PageFile:
    """Return one object that stands for the objects of a block.

    file: object of one page. If its pool is trailing, only the block's last pages have it.
    count: number of pages in a block.
    """
    pages = min(count, file.window or count)
    return file._replace(nbytes=file.nbytes * pages, window=-(-file.window // count))


def _room_of(spec: ObjectSpec, policy: Policy) -> object:
    """Return a key for the room of an object: its rank or table; None if the store has one room.

    If ranks share an object, the first of them writes it.
    """
    if policy.limit == "table":
        return spec.affix[0]
    shard = spec.coordinate.shard
    first = shard.tp_rank if shard.tp_rank is not None else shard.dcp_rank
    return (first or 0, shard.pp_rank, shard.cp_rank) if policy.limit == "rank" else None
