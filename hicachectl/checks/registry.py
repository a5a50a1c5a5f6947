"""The checks and the codes of their findings: the one list that commands, reports and repair read.

A check is registered with all that is known of it: its codes with their severities, what it needs,
its function, and the device kernel where there is one. Functions are named by module, so that help
imports none of them. Another package registers a check of its own:

    register(ValueCheck(name=…, group=VALUES, codes=(Code("my-code", "warning"),), prepare=…))
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.backends.hf3fs.page_tables import TableState
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

    FindIssues = Callable[[npt.NDArray[Any]], Iterable["ValueIssue"]]

F = TypeVar("F", bound=Callable[..., Any])

SEVERITIES = ("info", "warning", "error")

# Rules that change the severity of a finding. Which of them holds, the check says.
COSTS_HITS_ONLY = "costs-hits-only"  # a draft or a trailing pool: no server reads wrong data
POOLS_APART = "pools-apart"  # the store evicts each pool by itself: some sidecars are always left
REFUSED_WHOLE = "refused-whole"  # the store refuses to read an object of another size: a miss
VERSIONS_RECUR = "versions-recur"  # the object may have been rewritten unnoticed


@dataclass(frozen=True, slots=True)
class Code:
    """One code of findings.

    severity: one of SEVERITIES. rules: the severity under each of the rules that change it.
    structural: the finding says that a page group lacks something; no object of it is damaged.
    absent: its key is of an object that is not there.
    remedy: what to do about a finding that is about no page, so that no repair acts on it.
    """

    name: str
    severity: str
    rules: Mapping[str, str] = field(default_factory=dict, hash=False)
    structural: bool = False
    absent: bool = False
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """Checks that `--checks` chooses together. summary: their line in the help."""

    name: str
    summary: str


class Need(Enum):
    """What a check needs; `verify.coverage.unmet_needs` says why a store or a request lacks it."""

    SIZES = auto()  # of objects: listed, or told by a profile
    REPLICAS = auto()  # the store lists its copies of each object
    PAGE_TABLES = auto()  # the store has tables of keys and pages
    PROFILE = auto()  # a real one, not inferred from the store
    TENSORS = auto()  # a profile that tells what the bytes of objects are
    DIGESTS = auto()  # recorded before, or to be recorded
    BYTES = auto()  # objects are read


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckInput:
    """A store as it was listed and, after the reading, what was found in its objects.

    in_flight: [groups] those that servers may be writing. profile: None where none was given.
    now_ns: Unix time of the run's start. tables: of a store with page tables, as they were then.
    digested: [objects] bool, those with a valid digest: [objects, 32] uint8. compared: of these,
    what `checks.catalogs.compare` says; None where none were compared. remark is told what the
    user should know, skip what cannot be told (as in `skipped_checks`) and why.
    """

    store: Store
    inventory: Inventory
    groups: PageGroups
    in_flight: npt.NDArray[Any]
    profile: Profile | None = None
    weights_version: str = ""
    now_ns: int = 0
    grace_ns: int = 0
    tables: TableState | None = None
    digests: npt.NDArray[Any] | None = None
    digested: npt.NDArray[Any] | None = None
    compared: npt.NDArray[Any] | None = None
    remark: Callable[[str], None] = lambda text: None
    skip: Callable[[str, str], None] = lambda name, why: None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Check:
    """One check.

    group: None for a check that always runs. function: gives tables of findings, or says where
    what gives them is, as "package.module:name"; None where reading notes them as it meets them.
    """

    name: str
    group: CheckGroup | None
    codes: tuple[Code, ...]
    needs: frozenset[Need] = frozenset()
    function: Callable[[CheckInput], Iterator[pa.Table]] | str | None = None

    def find(self, given: CheckInput) -> Iterator[pa.Table]:
        """Run the check: tables of findings, some of them empty."""
        if self.function is not None:
            yield from resolved(self.function)(given)


@dataclass(frozen=True, slots=True)
class ValueIssue:
    """One thing wrong with one object.

    index:  which of the objects checked together.
    code:   one that the check declares.
    detail: what, how many, in which tensors and layers, and the first place.
    """

    index: int
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueCheck(Check):
    """A check of the bytes of objects whose tensors a profile describes.

    prepare: makes, for objects of one spec, the function that finds issues in some of them, bytes
        [n, nbytes]; None where it has nothing to say of them. Threads share that function.
    kernel: a class, `device.runs.DeviceKernel`, that finds suspects on a device. Where there is
        none, or it does not support the objects, the processor checks every object, with
        `--device` too.
    """

    group: CheckGroup
    needs: frozenset[Need] = frozenset({Need.PROFILE, Need.TENSORS, Need.BYTES})
    prepare: Callable[[ObjectSpec, Profile], FindIssues | None] | str
    kernel: type[Any] | str | None = None


def resolved(function: F | str) -> F:
    """Return a function that may be given by its place."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: F = getattr(import_module(module), name)
    return found


# --- what is registered ---

_CODES: dict[str, Code] = {}
_CHECKS: dict[str, Check] = {}


def register(check: Check) -> None:
    """Add a check to those that run. Raises ValueError on a name or a code that is taken."""
    if check.name in _CHECKS:
        raise ValueError(f"{check.name}: there is such a check already")
    for code in check.codes:
        if code.severity not in SEVERITIES or not set(code.rules.values()) <= set(SEVERITIES):
            raise ValueError(f"{code.name}: a severity is one of {', '.join(SEVERITIES)}")
        if _CODES.get(code.name, code) != code:
            raise ValueError(f"{code.name}: there is another such code")
    _CHECKS[check.name] = check
    _CODES.update({code.name: code for code in check.codes})


def unregister(name: str) -> None:
    """Take a check back, with the codes that no other one has."""
    check = _CHECKS.pop(name)
    kept = {code.name for other in _CHECKS.values() for code in other.codes}
    for code in check.codes:
        if code.name not in kept:
            del _CODES[code.name]


def checks(groups: Collection[str] | None = None) -> list[Check]:
    """List the checks, of some groups and those that always run; None: all."""
    return [
        check
        for check in _CHECKS.values()
        if groups is None or check.group is None or check.group.name in groups
    ]


def group_names() -> tuple[str, ...]:
    """Name the groups that `--checks` chooses from."""
    return tuple(_groups())


def value_groups() -> frozenset[str]:
    """Name the groups with checks of objects' bytes."""
    return frozenset(check.group.name for check in checks() if isinstance(check, ValueCheck))


def reading_groups() -> frozenset[str]:
    """Name the groups with checks that need objects to be read."""
    return frozenset(
        check.group.name for check in checks() if check.group and Need.BYTES in check.needs
    )


def severity_of(code: str, rule: str | None = None) -> str:
    """Return the severity of a finding; rule: the one of its code's rules that holds.

    Raises ValueError on a code or a rule that no check declares.
    """
    if code not in _CODES:
        raise ValueError(f"{code}: no such finding code")
    if rule is None:
        return _CODES[code].severity
    if rule not in _CODES[code].rules:
        raise ValueError(f"{rule}: no such rule of {code}")
    return _CODES[code].rules[rule]


def codes() -> tuple[Code, ...]:
    """List the codes of all checks."""
    return tuple(_CODES.values())


def page_codes() -> tuple[str, ...]:
    """Name the codes of findings about one page group, which `verify --repair` can take away."""
    return tuple(code.name for code in codes() if not code.remedy)


def remedies() -> dict[str, str]:
    """Return what to do about each code that is about no page."""
    return {code.name: code.remedy for code in codes() if code.remedy}


def absent_codes() -> tuple[str, ...]:
    """Name the codes of findings about objects that are not there."""
    return tuple(code.name for code in codes() if code.absent)


def is_structural(code: str) -> bool:
    """Whether a code says that a group lacks something: once it is whole, nothing is wrong."""
    return code in _CODES and _CODES[code].structural


def groups_help(width: int = 92) -> str:
    """Describe the groups in lines of a help text."""
    groups = _groups().values()
    column = max(len(group.name) for group in groups) + 2
    return "\n".join(
        textwrap.fill(
            group.summary,
            width,
            initial_indent=group.name.ljust(column),
            subsequent_indent=" " * column,
        )
        for group in groups
    )


def _groups() -> dict[str, CheckGroup]:
    return {check.group.name: check.group for check in checks() if check.group}


# --- the product's own checks ---

NAMES = CheckGroup("names", "keys that SGLang did not write, or that can be read in several ways")
GROUPS = CheckGroup("groups", "pages of which an object is missing")
SIZES = CheckGroup("sizes", "objects that are shorter or longer than their deployment writes them")
VALUES = CheckGroup(
    "values",
    "NaN, infinities, zeros, scales and memory layout; reads objects, needs a profile",
)
DIGESTS = CheckGroup(
    "digests",
    "bytes that changed since they were recorded; reads objects, needs --catalog, but for packs, "
    "which record digests themselves",
)

_HITS_ONLY = {COSTS_HITS_ONLY: "warning"}
_TRUNCATED = Code("truncated", "error")
_OVERSIZED = Code("oversized", "error", {REFUSED_WHOLE: "warning"})
_DIGEST_MISMATCH = Code("digest-mismatch", "error", {VERSIONS_RECUR: "warning"})
_REPLICA_MISMATCH = Code("replica-mismatch", "warning")
# About a key and its page in a store's own table.
PAGE_INDEX_CODES = (
    Code("page-index-shared", "error"),
    Code("page-index-out-of-range", "error"),
    Code("page-index-free", "error"),
)

# In the order in which findings of one code and key, and codes in messages, come.
for _check in (
    Check(
        name="stamp",
        group=None,
        codes=(
            Code(
                "stamp-mismatch",
                "error",
                remedy="the store holds pages of another deployment: remove them with "
                "hicachectl rm STORE --model, then stamp the store anew with --stamp",
            ),
        ),
        function="hicachectl.profiles.stamps:check_stamp",
    ),
    Check(
        name="names",
        group=NAMES,
        codes=(
            Code(
                "ambiguous-key",
                "warning",
                remedy="give the profile that wrote the keys, or remove them with "
                "hicachectl rm STORE --state unknown",
            ),
            Code(
                "foreign-object",
                "info",
                remedy="SGLang did not write the object and never reads it: remove it by hand",
            ),
            Code(
                "stale-temporary",
                "warning",
                remedy="remove them with hicachectl rm STORE --temporaries",
            ),
        ),
        function="hicachectl.checks.names:check_names",
    ),
    Check(
        name="groups",
        group=GROUPS,
        codes=(
            Code("missing-pool", "error", _HITS_ONLY, structural=True, absent=True),
            Code("missing-part", "error", _HITS_ONLY, structural=True, absent=True),
            Code("missing-rank", "warning", _HITS_ONLY, structural=True, absent=True),
            Code("orphan-sidecar", "warning", {POOLS_APART: "info"}, structural=True),
        ),
        function="hicachectl.checks.group:check_groups",
    ),
    Check(
        name="sizes",
        group=SIZES,
        codes=(_TRUNCATED, _OVERSIZED),
        needs=frozenset({Need.SIZES}),
        function="hicachectl.checks.sizes:check_sizes",
    ),
    Check(
        name="mixed-sizes",
        group=SIZES,
        codes=(
            Code(
                "mixed-sizes",
                "warning",
                remedy="give --profile, which says which of the sizes is wrong",
            ),
        ),
        needs=frozenset({Need.SIZES}),
        function="hicachectl.checks.sizes:check_mixed_sizes",
    ),
    Check(
        name="reading",  # noted in `reading`, whichever check has the objects read
        group=None,
        codes=(_TRUNCATED, _OVERSIZED, Code("unreadable", "error")),
        needs=frozenset({Need.BYTES}),
    ),
    ValueCheck(
        name="numbers",
        group=VALUES,
        codes=(
            Code("nan", "error"),
            Code("inf", "error"),
            Code("bad-scale", "error"),
            Code("all-zero", "warning"),
        ),
        prepare="hicachectl.checks.values:number_check",
        kernel="hicachectl.device.number_kernel:NumberKernel",
    ),
    ValueCheck(
        name="layout",
        group=VALUES,
        codes=(Code("layout-mismatch", "error"),),
        prepare="hicachectl.checks.layouts:layout_check",
        kernel="hicachectl.device.order_kernel:OrderKernel",
    ),
    Check(
        name="digests",
        group=DIGESTS,
        codes=(_DIGEST_MISMATCH, Code("re-recorded", "info")),
        needs=frozenset({Need.DIGESTS, Need.BYTES}),
        function="hicachectl.checks.digests:check_digests",
    ),
    Check(
        name="placement",
        group=SIZES,
        codes=(
            _REPLICA_MISMATCH,
            Code(
                "disk-only",
                "info",
                remedy="servers can read the objects, but slowly: hicachectl prewarm "
                "--through-server brings them into memory",
            ),
        ),
        needs=frozenset({Need.REPLICAS}),
        function="hicachectl.checks.placement:check_placement",
    ),
    Check(
        name="replicas",
        group=VALUES,
        codes=(_REPLICA_MISMATCH,),
        needs=frozenset({Need.PROFILE, Need.TENSORS, Need.BYTES}),
        function="hicachectl.checks.replicas:check_replicas",
    ),
    Check(
        name="availability",  # noted in `reading`: what the store says of an object it has not
        group=None,
        codes=(_DIGEST_MISMATCH, Code("no-replica", "warning"), Code("unwritten-page", "error")),
        needs=frozenset({Need.BYTES}),
    ),
    Check(
        name="page-tables",
        group=GROUPS,
        codes=(
            *PAGE_INDEX_CODES,
            _TRUNCATED,
            Code(
                "snapshot-stale",
                "warning",
                remedy="wait until the metadata server has saved its tables, and verify again",
            ),
            Code(
                "page-leaked",
                "warning",
                remedy="--repair with --writers-stopped releases leaked pages",
            ),
            Code(
                "page-count-mismatch",
                "warning",
                remedy="every rank needs the same file_size: correct SGLang's 3FS config",
            ),
        ),
        needs=frozenset({Need.PAGE_TABLES}),
        function="hicachectl.verify.live_tables:check_tables_of",
    ),
):
    register(_check)
