"""Define key grammars, which say how a backend divides a page into objects and names them.

A profile asks a grammar for the objects of all ranks. The storage plug-in asks for the objects of
its own rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hicachectl.formats.errors import CollidingKeys, UnsupportedByBackend
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import HALVES, Coordinate, Names
from hicachectl.formats.releases import since

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.formats.objects import Shard
    from hicachectl.formats.releases import Release

Affix = tuple[str, str]  # text of a key before and after its page hash
Readings = dict[Affix, tuple[Coordinate, ...]]

# Names of unfinished writes of HiCacheFile.set and hicachectl's file store. SGLang 0.5.14 to 0.5.19
# append ".tmp.PID.THREAD.UUID" to the object's name. Earlier releases write under that name itself.
TEMPORARY_PATTERN = (
    r"^(?:\.(?:hicachectl-)?[0-9a-f]{32}\.tmp"
    r"|[0-9a-f]{64}[._].*\.bin\.tmp\.[0-9]+\.[0-9]+\.[0-9a-f]{32})$"
)
FILE_STORE = "use a file store"


class Ranks(NamedTuple):
    """One rank of a deployment, and the sizes of its axes.

    page_size: tokens of a page.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dcp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0
    page_size: int = 0

    @property
    def dcp_rank(self) -> int:
        """Rank of decode context parallelism."""
        return self.tp_rank % self.dcp


class RankPool(NamedTuple):
    """A page of a pool as one rank holds it.

    names: names of the deployment.
    pool: name of the pool.
    ranks: the rank.
    parts: names of the page's parts in stored order: k and v, or states, or one name for a whole
        page. Empty for an anchor without bytes.
    sizes: bytes of each part.
    layout: SGLang's --hicache-mem-layout.
    release: facts about the servers' SGLang.
    shared_anchor: whether the TP ranks share the anchor's objects.
    sharded: whether the TP ranks hold different bytes of this pool.
    scattered: whether the layers of the page are scattered in host memory.
    opaque: whether the form of the page is unknown, so that `parts` does not show its division.
    tp_lcm: the TP size to which heads are split on Mooncake; 0 if heads are not split.
    nixl_layouts: layouts in which NIXL transfers a sidecar pool from its place in memory.
    """

    names: Names
    pool: str
    ranks: Ranks
    parts: tuple[str | None, ...]
    sizes: tuple[int, ...]
    layout: str
    release: Release
    shared_anchor: bool
    sharded: bool
    scattered: bool
    opaque: bool = False
    tp_lcm: int = 0
    nixl_layouts: tuple[str, ...] = ()

    @property
    def halved(self) -> bool:
        """Whether the parts are K and V."""
        return self.parts == HALVES


class PageObject(NamedTuple):
    """One object of a page.

    parts: slice of the page's parts that the object holds.
    head_slices: number of equal slices along the heads. The object holds one slice of each part.
    """

    coordinate: Coordinate
    parts: slice
    head_slices: int = 1

    @property
    def whole(self) -> bool:
        """Whether the object holds all parts together."""
        return self.parts == WHOLE


WHOLE = slice(None)


class Grammar(ABC):
    """The keys of one backend.

    name: name of the grammar, as stores and packs state it.
    title: name of the backend in messages.
    axes: axes whose rank the keys of at least one release state. The value is the field of
        `Release` that says whether a release's keys state the rank; "" if all releases' keys do.
    unnamed_cp: whether pages are described although keys do not name the CP rank. The object of
        rank 0 then stands for the objects of all CP ranks.
    names_model: whether the keys of at least one release name the model.
    has_tag: whether keys begin with an extra_backend_tag, which no key separates from the model.
    unequal_halves: whether K and V can differ in size.
    refuses_oversized: whether SGLang treats an object that is too large as a miss. Otherwise SGLang
        reads the object's start.
    refuses_truncated: whether SGLang's read of a kv object that is too short fails. Otherwise, old
        bytes may stay in the rest of the page.
    warm_ups: pattern of the keys that servers write when they start; "" if there are none.
    served: whether servers can read the keys through the storage plug-in.
    marker: bytes of the object that stands for an anchor without bytes; None without such objects.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    axes: ClassVar[Mapping[str, str]] = {}
    unnamed_cp: ClassVar[bool] = False
    names_model: ClassVar[bool] = True
    has_tag: ClassVar[bool] = False
    unequal_halves: ClassVar[bool] = False
    refuses_oversized: ClassVar[bool] = False
    refuses_truncated: ClassVar[bool] = False
    warm_ups: ClassVar[str] = ""
    served: ClassVar[bool] = True
    marker: ClassVar[int | None] = None

    @abstractmethod
    def readings(self, prefix: str, suffix: str) -> tuple[Coordinate, ...]:
        """Return every coordinate that an affix can mean. An affix of no key has none."""

    @abstractmethod
    def affix(self, coordinate: Coordinate) -> Affix:
        """Return the affix of a coordinate; inverse of `readings`."""

    def narrow(self, readings: Readings) -> Readings:
        """Drop readings that other keys of the same store exclude."""
        return readings

    @abstractmethod
    def objects(self, page: RankPool) -> tuple[PageObject, ...]:
        """Return the objects of one rank's page. Ranks that share an object get equal results.

        If keys do not name the CP rank, only CP rank 0 has objects.
        An anchor without bytes has an object only if the grammar has a `marker`.
        Raises UnsupportedByBackend if SGLang's backend cannot store such a page.
        """

    def check_ranks(self, ranks: Ranks, release: Release, *, reads: bool = False) -> None:
        """Refuse an axis with several ranks if keys do not name the rank.

        reads: accept CP ranks that keys do not name, if `unnamed_cp` is true.
        Raises CollidingKeys if no release names the rank. Raises UnsupportedByBackend if only a
        later release names the rank.
        """
        for axis in ("pp", "cp", "dcp"):
            size, fact = getattr(ranks, axis), self.axes.get(axis)
            accepted = axis == "cp" and reads and self.unnamed_cp
            if size == 1 or accepted or fact == "" or (fact and getattr(release, fact)):
                continue
            before = f" of SGLang before {since(fact)}" if fact else ""
            remedy = f"use SGLang {since(fact)} or later" if fact else FILE_STORE
            refusal = UnsupportedByBackend if fact else CollidingKeys
            raise refusal(
                f"{axis} {size}: {self.title} keys{before} do not name the {axis} rank, so ranks "
                f"overwrite each other's objects; {remedy}"
            )

    def coordinate(self, page: RankPool, part: str | None, shard: Shard) -> Coordinate:
        """Return the coordinate of a page's object, with the names that keys have."""
        model, tag = page.names
        names = Names(model if self.names_model else "", tag if self.has_tag else "")
        return Coordinate(names, page.pool, part, shard)


def part_in_keys(page: RankPool, part: str | None) -> str | None:
    """Return a part as Mooncake and NIXL keys name it. K and V of an MLA page together are "k"."""
    pool = pool_name(page.pool)
    if pool.states or page.halved:
        return part
    return HALVES[0] if pool.parts and not pool.whole else None
