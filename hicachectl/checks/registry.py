"""Registry of checks. The module `codes` has the finding codes of the built-in checks.

The registry names functions as "package.module:name", so --help imports none of their modules.
Other packages can register checks:

    register(ValueCheck(name=…, group=VALUES, codes=(Code("my-code", "warning"),), prepare=…))
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from hicachectl.checks.codes import PAGE_INDEX_CODES, SEVERITIES, Code, builtin_codes
from hicachectl.formats.wording import OTHER_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.backends.page_tables import TableState
    from hicachectl.checks.catalogs import Digested
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory
    from hicachectl.pages.tally import Tally

    FindIssues = Callable[[npt.NDArray[Any]], Iterable["ValueIssue"]]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """Checks that `--checks` selects together.

    summary: the group's line in the help.
    """

    name: str
    summary: str


class Need(StrEnum):
    """Requirements of checks. `VerifyRequest.unmet` explains why a requirement is not met."""

    # Sizes of objects, from the listing or from a profile.
    SIZES = auto()
    # The store lists the replicas of each object.
    REPLICAS = auto()
    # The store has tables of keys and pages.
    PAGE_TABLES = auto()
    # A profile that the user gave. A profile inferred from the store does not suffice.
    PROFILE = auto()
    # A profile that describes the bytes of objects.
    TENSORS = auto()
    # Digests in the store or in a catalog, or a catalog to record digests in.
    DIGESTS = auto()
    # The bytes of objects. A check with this need makes the run read objects.
    BYTES = auto()


class Scope(Enum):
    """Data that a check examines.

    A run can check a store in parts. All objects of a page group are in the same part.
    """

    # Objects and page groups of a part. Each part runs the check.
    OBJECTS = auto()
    # The store itself. Only the first part runs the check.
    STORE = auto()
    # The listing. The check runs once, with `CheckListing`, in the process that lists.
    LISTING = auto()
    # Sums over all parts. The report runs the check, with `CheckSums`.
    SUMS = auto()


@dataclass(frozen=True, slots=True)
class CheckSums:
    """Input of checks of `Scope.SUMS`.

    table: deployments and specs of the store's affixes.
    tally: counts of all objects and page groups that were selected.
    evidence: facts about some objects that were read, in columns of `evidence.EVIDENCE_SCHEMA`.
    """

    table: AffixTable
    tally: Tally
    evidence: pa.Table


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckListing:
    """Input of checks of `Scope.LISTING`.

    store: store that this process has just listed.
    collision: why ranks of the given deployment overwrite each other's objects; "" if they do not.
    grace_start_ns: start of the grace period, Unix nanoseconds. A file written later may be
        unfinished.
    """

    store: Store
    collision: str = ""
    grace_start_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckInput:
    """Input of checks of `Scope.OBJECTS` and `Scope.STORE`.

    in_flight: [groups] bool, groups that no check judges, because they may still be written.
    profile: the deployment to expect; None if not given.
    now_ns: start of the listing, Unix nanoseconds.
    tables: page tables at `now_ns`; None if the store has none or no check needs them.
    stamp_differences: differences of the profile from the stamp of the store.
    digests: [objects, 32] uint8, digests of the objects; None if no digests were made.
    digested: [objects] bool, whether the object has a valid digest in `digests`; None as `digests`.
    compared: comparison of the digested objects with a catalog; None without a catalog.
    skip: takes the name of something that was not checked, and the reason why. The report adds the
        name to `skipped_checks`.
    """

    store: Store
    groups: PageGroups
    in_flight: npt.NDArray[Any]
    profile: Profile | None = None
    now_ns: int = 0
    grace_ns: int = 0
    tables: TableState | None = None
    stamp_differences: Sequence[str] = ()
    digests: npt.NDArray[Any] | None = None
    digested: npt.NDArray[Any] | None = None
    compared: Digested | None = None
    skip: Callable[[str, str], None] = lambda name, why: None

    @property
    def inventory(self) -> Inventory:
        """The listing."""
        return self.groups.inventory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Check:
    """A check.

    group: group by which `--checks` selects the check; None if the check always runs.
    codes: codes of the findings; a code of `codes.toml` is given by its name.
    function: function that takes the input of the scope and yields tables of `checks.findings`, or
        its name as "package.module:name". None if `verification.reading` notes the findings.
    """

    name: str
    group: CheckGroup | None
    codes: tuple[Code | str, ...]
    needs: frozenset[Need] = frozenset()
    scope: Scope = Scope.OBJECTS
    function: Callable[[Any], Iterator[pa.Table]] | str | None = None

    @property
    def code_names(self) -> tuple[str, ...]:
        """Names of the codes."""
        return tuple(code if isinstance(code, str) else code.name for code in self.codes)

    def find(self, given: CheckInput | CheckListing | CheckSums) -> Iterator[pa.Table]:
        """Run the check; yield tables of findings, some of them empty."""
        if self.function is not None:
            yield from resolved(self.function)(given)


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of one tensor in one layer. Extremes and mean cover finite values only.

    tensor: name of the tensor. If a row has several parts, the statistics of codes times scales
        have the tensor's name alone, and those of another part have the name of the part added,
        such as scales or rope.
    layer: model layer number.
    """

    tensor: str
    layer: int
    values: int
    minimum: float | None
    maximum: float | None
    mean_magnitude: float | None
    nan: int
    inf: int
    zero: int


@dataclass(frozen=True, slots=True)
class ValueIssue:
    """A problem of one object.

    index: position of the object among the objects that were checked together.
    code: one of the check's codes.
    detail: the fault, its count, its tensors and layers, and its first place.
    """

    index: int
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueCheck(Check):
    """A check of the bytes of objects whose tensors a profile describes.

    prepare: function that takes a spec and its profile. It returns None if the check does not
        apply to the spec, else a function that finds issues in objects of the spec, given as bytes
        [n, nbytes]. Threads share the returned function.
    kernel: a `device.runs.DeviceKernel` that finds suspects on a device. If it is None, or does not
        support the spec, the CPU checks every object, even with `--device`.
    """

    group: CheckGroup
    needs: frozenset[Need] = frozenset({Need.PROFILE, Need.TENSORS, Need.BYTES})
    prepare: Callable[[ObjectSpec, Profile], FindIssues | None] | str
    kernel: type[Any] | str | None = None


def resolved(function: F | str) -> F:
    """Return a function. If it is given as "package.module:name", import it."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: F = getattr(import_module(module), name)
    return found


# --- registration ---

# Codes of all checks by name. None stands for a code of `codes.toml`, because that file is read
# only when one of its codes is needed.
_CODES: dict[str, Code | None] = {}
_CHECKS: dict[str, Check] = {}


def register(check: Check) -> None:
    """Register a check.

    Raises ValueError if a check has the same name, a check declares a code of the same name
    differently, or a severity is unknown.
    """
    if check.name in _CHECKS:
        raise ValueError(f"{check.name}: a check of this name already exists")
    own = {code.name: code for code in check.codes if isinstance(code, Code)}
    for name, code in own.items():
        if code.severity not in SEVERITIES or not set(code.rules.values()) <= set(SEVERITIES):
            raise ValueError(f"{name}: severities must be one of {', '.join(SEVERITIES)}")
        if name in _CODES and code_named(name) != code:
            raise ValueError(f"{name}: another check declares this code differently")
    _CHECKS[check.name] = check
    for name in check.code_names:
        _CODES.setdefault(name, own.get(name))


def unregister(name: str) -> None:
    """Remove a check, and its codes that no other check declares."""
    check = _CHECKS.pop(name)
    kept = {code for other in _CHECKS.values() for code in other.code_names}
    for code in set(check.code_names) - kept:
        del _CODES[code]


def checks(groups: Collection[str] | None = None) -> list[Check]:
    """Return the checks of some groups, and the checks that always run.

    groups: names of the groups; None for all checks.
    """
    return [
        check
        for check in _CHECKS.values()
        if groups is None or check.group is None or check.group.name in groups
    ]


def group_names() -> tuple[str, ...]:
    """Return the groups that `--checks` accepts."""
    return tuple(_groups())


def value_groups() -> frozenset[str]:
    """Return the groups with value checks."""
    return frozenset(check.group.name for check in checks() if isinstance(check, ValueCheck))


def reading_groups() -> frozenset[str]:
    """Return the groups with checks that read objects."""
    return frozenset(
        check.group.name for check in checks() if check.group and Need.BYTES in check.needs
    )


def severity_of(code: str, rule: str | None = None) -> str:
    """Return the severity of a finding.

    rule: name of the code's rule that applies; None for the code's own severity.
    Raises ValueError if no check declares the code or the rule.
    """
    known = code_named(code)
    if rule is None:
        return known.severity
    if rule not in known.rules:
        raise ValueError(f"{rule}: not a rule of {code}")
    return known.rules[rule]


def code_named(name: str) -> Code:
    """Return a code. Raises ValueError if no check declares the code."""
    if name not in _CODES:
        raise ValueError(f"{name}: no check declares this finding code")
    return _CODES[name] or builtin_codes()[name]


def codes() -> tuple[Code, ...]:
    """Return the codes of all checks."""
    return tuple(map(code_named, _CODES))


def page_codes() -> tuple[str, ...]:
    """Return the codes of findings about one page group. `verify --repair` can act on them."""
    return tuple(code.name for code in codes() if not code.remedy)


def remedies() -> dict[str, str]:
    """Return the next step for each code whose findings are not about page groups."""
    return {code.name: code.next_step for code in codes() if code.remedy}


def is_structural(code: str) -> bool:
    """Return whether a code says that a group lacks objects."""
    return code in _CODES and code_named(code).structural


def groups_help(width: int = 92) -> str:
    """Return the help lines about the groups."""
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


# --- built-in checks ---

NAMES = CheckGroup("names", "keys that SGLang did not write, or that can be read in several ways")
GROUPS = CheckGroup("groups", "pages that lack objects")
SIZES = CheckGroup("sizes", "objects shorter or longer than those that the deployment writes")
VALUES = CheckGroup(
    "values",
    "NaN, infinities, zeros, scales, dtype and memory layout; reads objects, needs a profile",
)
DIGESTS = CheckGroup(
    "digests",
    f"bytes that differ from the recorded digests, and objects of {OTHER_BYTES}; "
    "reads objects; needs --catalog, except for packs and objects with trailers",
)

# Name of the check whose findings are noted while objects are read.
READING = "reading"

# Messages list codes in the order of these checks. Findings with the same code and key are listed
# in this order, too.
for _check in (
    Check(
        name="stamp",
        group=None,
        codes=("stamp-mismatch",),
        scope=Scope.STORE,
        function="hicachectl.checks.structure:check_stamp",
    ),
    Check(
        name="collisions",
        group=None,
        codes=("colliding-keys",),
        scope=Scope.LISTING,
        function="hicachectl.checks.structure:check_collision",
    ),
    Check(
        name="losses",
        group=None,
        codes=("misplaced-object", "lost-objects"),
        scope=Scope.LISTING,
        function="hicachectl.checks.structure:check_losses",
    ),
    Check(
        name="ambiguous-keys",
        group=NAMES,
        codes=("ambiguous-key",),
        scope=Scope.SUMS,
        function="hicachectl.checks.structure:check_ambiguous_keys",
    ),
    Check(
        name="names",
        group=NAMES,
        codes=("foreign-object", "stale-temporary"),
        function="hicachectl.checks.structure:check_names",
    ),
    Check(
        name="groups",
        group=GROUPS,
        codes=("missing-pool", "missing-part", "missing-rank", "orphan-sidecar"),
        function="hicachectl.checks.structure:check_groups",
    ),
    Check(
        name="sizes",
        group=SIZES,
        codes=("truncated", "oversized"),
        needs=frozenset({Need.SIZES}),
        function="hicachectl.checks.sizes:check_sizes",
    ),
    Check(
        name="mixed-sizes",
        group=SIZES,
        codes=("mixed-sizes",),
        needs=frozenset({Need.SIZES}),
        scope=Scope.SUMS,
        function="hicachectl.checks.sizes:check_mixed_sizes",
    ),
    Check(
        name="other-deployments",
        group=GROUPS,
        codes=("other-deployment",),
        needs=frozenset({Need.PROFILE}),
        scope=Scope.SUMS,
        function="hicachectl.checks.structure:check_other_deployments",
    ),
    Check(
        name=READING,  # `verification.reading` notes its findings when any check needs bytes.
        group=None,
        codes=(
            "truncated",
            "oversized",
            "unreadable",
            "identity-mismatch",
            "digest-mismatch",
            "no-replica",
            "unwritten-page",
        ),
        needs=frozenset({Need.BYTES}),
    ),
    ValueCheck(
        name="numbers",
        group=VALUES,
        codes=("nan", "inf", "bad-scale", "all-zero"),
        prepare="hicachectl.checks.values:number_check",
        kernel="hicachectl.device.check_kernels:NumberKernel",
    ),
    ValueCheck(
        name="dtype",
        group=VALUES,
        codes=("dtype-mismatch",),
        prepare="hicachectl.checks.dtypes:dtype_check",
    ),
    ValueCheck(
        name="layout",
        group=VALUES,
        codes=("layout-mismatch",),
        prepare="hicachectl.checks.layouts:layout_check",
        kernel="hicachectl.device.check_kernels:OrderKernel",
    ),
    Check(
        name="changes",
        group=VALUES,
        codes=("values-changed",),
        needs=frozenset({Need.PROFILE, Need.TENSORS, Need.BYTES}),
        scope=Scope.SUMS,
        function="hicachectl.checks.changes:check_changes",
    ),
    Check(
        name="digests",
        group=DIGESTS,
        codes=("digest-mismatch", "re-recorded"),
        needs=frozenset({Need.DIGESTS, Need.BYTES}),
        function="hicachectl.checks.replicas:check_digests",
    ),
    Check(
        name="placement",
        group=SIZES,
        codes=("replica-mismatch", "disk-only"),
        needs=frozenset({Need.REPLICAS}),
        function="hicachectl.checks.replicas:check_placement",
    ),
    Check(
        name="replicas",
        group=VALUES,
        codes=("replica-mismatch",),
        needs=frozenset({Need.PROFILE, Need.TENSORS, Need.BYTES}),
        function="hicachectl.checks.replicas:check_replicas",
    ),
    Check(
        name="page-tables",
        group=GROUPS,
        codes=(
            *PAGE_INDEX_CODES,
            "truncated",
            "snapshot-stale",
            "page-leaked",
            "page-count-mismatch",
        ),
        needs=frozenset({Need.PAGE_TABLES}),
        scope=Scope.STORE,
        function="hicachectl.checks.page_tables:check_tables_of",
    ),
):
    register(_check)
