"""How many pages fit into a budget of bytes, as far as a profile tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.errors import UsageError
from hicachectl.formats.spec import object_specs

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile


def pages_within(budget: int, profile: Profile | None, *, hashed: bool) -> int:
    """Count the pages that fit, each with every object of every rank but the trailing pools'.

    budget: bytes of a file store. Raises UsageError where the size of a page is not known.
    """
    if not hashed:
        raise UsageError("--budget: block ids have no size; give --budget-pages")
    if profile is None:
        raise UsageError("--budget: sizes need a profile; give --profile, or --budget-pages")
    objects = object_specs(profile, "file")
    page = sum(found.nbytes for found in objects if not found.trailing)
    if not page:
        raise UsageError("--budget: the profile gives pages no size; give --budget-pages")
    return budget // page
