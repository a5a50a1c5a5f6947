"""Which objects of a store with trailers its servers accept: those of their identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.base import take_rows
from hicachectl.backends.capabilities import Trailed
from hicachectl.profiles.identities import expected_identities

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory
    from hicachectl.profiles.identities import Expected

# Of an object: its trailer is as expected, missing, or of another identity or rank.
OWN, BARE, OTHER = range(3)

_ASKED_AT_ONCE = 8192
_NOT_ASKED = -1


def acceptance_of(store: Store, inventory: Inventory, profile: Profile | None) -> Acceptance:
    """Return how a profile's servers judge the objects of a store's listing."""
    return Acceptance(store, inventory, expected_identities(store, profile))


class Acceptance:
    """Comparison of a listing's objects with the expected identities, by their trailers.

    Objects of affixes without a marker have no trailers, and are OWN; so are those of affixes
    without an expected identity.
    """

    def __init__(
        self, store: Store, inventory: Inventory, expected: Expected, *, bare: bool = False
    ) -> None:
        """bare: objects without a trailer are OWN, too."""
        self._bare = OWN if bare else BARE
        self._objects = inventory.objects.select(["key"])
        self._hashes: list[bytes] = []
        asked: list[int] = []
        for affix in inventory.table.affixes:
            identity = expected.identities.get(affix)
            if identity is None or affix[1] not in expected.marked:
                asked.append(_NOT_ASKED)
            else:
                asked.append(len(self._hashes))
                self._hashes.append(identity.hash())
        self._hash_of = inventory.by_affix(asked, _NOT_ASKED)
        self._store = store if isinstance(store, Trailed) and self._hashes else None

    @property
    def compares(self) -> bool:
        """Return whether any object can be other than OWN."""
        return self._store is not None

    def of(self, rows: IntArray) -> npt.NDArray[np.int8]:
        """Return OWN, BARE or OTHER for each row of the listing: [rows].

        Opens each object that may have a trailer. One without a whole trailer is BARE.
        """
        found = np.full(len(rows), OWN, dtype=np.int8)
        if self._store is None:
            return found
        asked = np.flatnonzero(self._hash_of[rows] != _NOT_ASKED)
        for start in range(0, len(asked), _ASKED_AT_ONCE):
            some = asked[start : start + _ASKED_AT_ONCE]
            wanted = self._hash_of[rows[some]].tolist()
            trailers = self._store.read_trailers(take_rows(self._objects, rows[some]))
            identities = trailers.column("identity").to_pylist()
            ranks = trailers.column("own_rank").to_pylist()
            found[some] = [
                self._bare
                if identity is None
                else OWN
                if own_rank and identity == self._hashes[n]
                else OTHER
                for identity, own_rank, n in zip(identities, ranks, wanted, strict=True)
            ]
        return found
