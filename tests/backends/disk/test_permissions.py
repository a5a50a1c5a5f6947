"""Tests of backends.disk.permissions: who may read a file made from several files."""

from __future__ import annotations

from functools import reduce
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.disk.permissions import Permissions, with_foreign_group

GROUPS = (1, 2, None)
PERMISSIONS = st.builds(
    Permissions, st.integers(0, 0o77).map(lambda bits: bits | 0o700), st.sampled_from(GROUPS)
)
# Users who are not the owner, by the groups that they are in.
USERS = [frozenset(g for g, is_in in zip((1, 2, 3), chosen, strict=True) if is_in)
         for chosen in product((False, True), repeat=3)]  # fmt: skip


def reads(user: frozenset[int], bits: int, group: int | None) -> bool:
    return bool(bits & (0o040 if group in user else 0o004))


@given(st.lists(PERMISSIONS, max_size=4), st.sampled_from((1, 2, 3)))
def test_what_is_made_is_read_by_nobody_who_could_not_read_all_sources(
    sources: list[Permissions], group: int
) -> None:
    """If a source has no group, its group bits equal the bits of everyone."""
    sources = [
        source
        if source.group is not None
        else Permissions(with_foreign_group(source.bits), source.group)
        for source in sources
        # Leave out files that give everyone more rights than the group: USERS has no such users.
        if source.bits >> 3 & 0o7 | source.bits & 0o7 == source.bits >> 3 & 0o7
    ]
    made = reduce(Permissions.intersection, sources, Permissions()).for_group(group)
    for user in USERS:
        if reads(user, made, group):
            assert all(reads(user, source.bits, source.group) for source in sources)


@given(st.lists(PERMISSIONS, min_size=1, max_size=4))
def test_the_order_of_sources_does_not_widen(sources: list[Permissions]) -> None:
    made = reduce(Permissions.intersection, sources, Permissions())
    everyone = reduce(int.__and__, (source.bits for source in sources), 0o777)
    assert made.bits & 0o007 == everyone & 0o007
    assert made.bits & ~reduce(int.__or__, (source.bits for source in sources)) == 0
