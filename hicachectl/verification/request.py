"""Options of a verification, and the slices of a store that nightly runs check in turn."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pyarrow.compute as pc
from msgspec import Meta

from hicachectl.backends.capabilities import keeps_digests
from hicachectl.backends.page_tables import PageTables
from hicachectl.checks.evidence import MOST_OBJECTS
from hicachectl.checks.registry import DIGESTS, Need, checks, group_names, value_groups
from hicachectl.formats.errors import UsageError
from hicachectl.formats.spec import object_specs
from hicachectl.formats.wording import GIVE_PROFILE
from hicachectl.io.pipeline import DEFAULT_BUFFER_BYTES
from hicachectl.pages.selection import EVERYTHING, Selection
from hicachectl.profiles.identities import expected_identities
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.formats.catalog import Catalog
    from hicachectl.formats.profile import Profile
    from hicachectl.profiles.identities import Expected


_SECONDS_A_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Sample:
    """One of `slices` equal shares of all pages, chosen by page hash.

    number: number of the share, from 0.
    """

    slices: Annotated[int, Meta(ge=1)]
    number: Annotated[int, Meta(ge=0)]

    @classmethod
    def parse(cls, text: str, number: int | None = None) -> Sample:
        """Return the slice for a text such as 5%.

        number: see `of`.
        Raises UsageError if the text is not a share in percent.
        """
        if not re.fullmatch(r"\d+(\.\d+)?%", text):
            raise UsageError(f"--sample: {text!r} is not a share in percent; write 5%")
        return cls.of(float(text[:-1]), number)

    @classmethod
    def of(cls, percent: float, number: int | None = None) -> Sample:
        """Return the slice for a share in percent.

        number: number of the slice; None for the number of the day, so that slices take turns.
        Raises UsageError unless 0 < percent <= 100.
        """
        if not 0 < percent <= 100:
            raise UsageError(f"--sample {percent:g}%: must be above 0% and at most 100%")
        slices = max(1, round(100 / percent))
        day = int(time.time() // _SECONDS_A_DAY)
        return cls(slices, (day if number is None else number) % slices)

    def contains(self, pages: pa.StringArray) -> BoolArray:
        """Return which page hashes are in the slice: [pages]."""
        # Eight hexadecimal digits of a SHA-256 are as good as random. Arrow casts "0x..." to
        # numbers without Python code for each page.
        digits = pc.binary_join_element_wise("0x", pc.utf8_slice_codeunits(pages, 0, 8), "")
        numbers = pc.cast(digits, "uint32").to_numpy(zero_copy_only=False)
        chosen: BoolArray = numbers % self.slices == np.uint32(self.number)
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """Options of a verification.

    collision: why ranks of the given profile overwrite each other's objects, so that the profile
        was left out; "" if they do not.
    checks: names of the check groups to run.
    time_limit_seconds: time after which no read begins.
    identity: version fields that show a rewrite if they have changed since the catalog was
        recorded; empty for all fields of the store.
    most_looked_up: largest number of incomplete groups to look up again, to see which of them have
        changed since the listing; None for all.
    repairs: whether to list the version of each object, for a repair.
    allow_empty: whether to accept a store without pages.
    changes: whether the run may remove pages, so that the clock of the store's file system decides
        their ages.
    devices: names of the devices, see `hicachectl.device.devices.parse_devices`.
    device_bytes: bytes of memory to use on each device.
    noted_objects: most objects of an affix that are compared with objects of another age.
    """

    profile: Profile | None = None
    collision: str = ""
    checks: tuple[str, ...] = field(default_factory=group_names)
    selection: Selection = EVERYTHING
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    sample: Sample | None = None
    time_limit_seconds: float | None = None
    catalog: Catalog | None = None
    update_catalog: bool = False
    identity: tuple[str, ...] = ()
    weights_version: str = ""
    most_looked_up: int | None = None
    repairs: bool = False
    allow_empty: bool = False
    changes: bool = False
    devices: tuple[str, ...] = ("cpu",)
    device_bytes: int = 2 << 30
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    bytes_per_second: int | None = None
    jobs: int | None = None
    noted_objects: int = MOST_OBJECTS

    def __post_init__(self) -> None:
        """Raise UsageError if `checks` is empty, or has a name that is no check group."""
        known = group_names()
        if not self.checks:
            raise UsageError(
                "checks: empty; give names of checks, or leave it out for all that apply"
            )
        for name in self.checks:
            if name not in known:
                raise UsageError(f"checks: {name!r} is not one of {', '.join(known)}")

    @property
    def real_profile(self) -> Profile | None:
        """The profile, unless it was inferred from the store."""
        return None if self.profile is None or self.profile.inferred else self.profile

    @property
    def grace_ns(self) -> int:
        """The grace period in nanoseconds."""
        return int(self.grace_seconds * 1e9)

    @property
    def value_groups(self) -> tuple[str, ...]:
        """The requested groups of value checks; empty if the user gave no profile."""
        if self.real_profile is None:
            return ()
        return tuple(group for group in self.checks if group in value_groups())

    @property
    def has_catalog(self) -> bool:
        """Whether digests are compared with a catalog, or recorded in one."""
        return self.catalog is not None or self.update_catalog

    @property
    def compares_catalog(self) -> bool:
        """Whether objects are digested for the catalog."""
        return self.has_catalog and DIGESTS.name in self.checks

    def columns(self, store: Store) -> list[str]:
        """Return the optional columns of the listing that the checks and a repair need."""
        replicas = any(Need.REPLICAS in check.needs for check in checks(self.checks))
        wanted = {"version": self.repairs, "replicas": replicas}
        return [name for name, needed in wanted.items() if needed and name in store.traits.columns]

    def unmet(self, store: Store) -> dict[Need, str]:
        """Return the needs of checks that a store does not meet, with reasons and next steps."""
        columns = store.traits.columns
        unmet = {}
        if self.profile is None and "nbytes" not in columns:
            unmet[Need.SIZES] = (
                f"{store.url} keeps no object sizes; {self.collision or GIVE_PROFILE}"
            )
        if "replicas" not in columns:
            unmet[Need.REPLICAS] = f"{store.url} does not list the replicas of objects"
        if not isinstance(store, PageTables):
            unmet[Need.PAGE_TABLES] = f"{store.url} has no page tables"
        if (profile := self.real_profile) is None:
            unmet[Need.PROFILE] = (
                self.collision or f"no given profile describes the bytes of objects; {GIVE_PROFILE}"
            )
        elif not any(spec.tensors for spec in object_specs(profile, store.grammar)):
            unmet[Need.TENSORS] = (
                "the profile describes no values, only object sizes; give a profile made from "
                "--model-config"
            )
        if not (self.has_catalog or compares_own(store, expected_identities(store, profile))):
            unmet[Need.DIGESTS] = (
                "no recorded digests to compare with; give --catalog FILE and, to record digests, "
                "--update-catalog"
            )
        return unmet

    def impossible(self, unmet: Mapping[Need, str]) -> dict[str, str]:
        """Return the requested groups in which no check can run, each with reason and next step."""
        impossible = {}
        for group in self.checks:
            reasons = [
                [why for need, why in unmet.items() if need in check.needs]
                for check in checks()
                if check.group and check.group.name == group
            ]
            if reasons and all(reasons):
                impossible[group] = reasons[0][0]
        return impossible


def compares_own(store: Store, expected: Expected) -> bool:
    """Return whether reads compare objects with digests in the store, or with identities."""
    return keeps_digests(store) or bool(expected.marked and expected.identities)
