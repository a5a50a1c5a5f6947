"""Repair a checked store, or a part of one. Remove page groups, and correct the tables of 3FS."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.codes import DESPITE
from hicachectl.checks.page_tables import suspicious_keys
from hicachectl.checks.registry import codes, page_codes, remedies
from hicachectl.checks.sizes import rows_of_mixes
from hicachectl.formats.keys import grammar_of
from hicachectl.move.doubt import doubt
from hicachectl.move.removal_plan import described_groups, plan_repair
from hicachectl.move.table_repair import release_leaked, repair_tables, write_repaired_snapshot
from hicachectl.move.withdrawal import remove_groups
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.move.removal_plan import RepairPlan
    from hicachectl.move.results import GroupReport
    from hicachectl.move.withdrawal import Mode
    from hicachectl.verification.part_result import Refusal
    from hicachectl.verification.verify import PartCheck

    Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairOptions:
    """Options of a repair.

    codes: codes of findings to repair besides errors.
    quarantine: directory of the quarantine; None for the store's own quarantine.
    writers_stopped: whether no server writes to a 3FS store, so that leaked pages can be released.
    despite_profile: whether to repair even if the findings make the profile doubtful.
    """

    mode: Mode
    codes: tuple[str, ...] = ()
    quarantine: str | None = None
    writers_stopped: bool = False
    despite_profile: bool = False
    dry_run: bool = False


def plan_of(checked: PartCheck, found: pa.Table, options: RepairOptions) -> RepairPlan:
    """Plan the repair of a checked store, or of a part of one, by its findings.

    Groups that the profile does not describe stay. Unless `despite_profile` is set, pages of a mix
    (`SizeMix`) stay, too. If the findings make the profile doubtful, all pages stay, and the plan
    has the refusal.
    found: findings in the columns of findings.LOCATED_SCHEMA, from `checks.findings.located`.
    """
    groups = checked.groups
    plan = plan_repair(found, codes=options.codes)
    own = described_groups(groups)
    others = int((~own[plan.groups]).sum())
    plan = replace(plan.where(own), others=others)
    if not len(plan.groups):
        warnings = found.filter(pc.equal(found.column("severity"), "warning"))
        possible = plan_repair(warnings, codes=page_codes()).where(own)
        names = pc.unique(possible.reasons.column("code")).to_pylist()
        return replace(plan, warned=len(possible.groups), warnings=tuple(sorted(names)))
    if options.despite_profile:
        return plan
    refused = doubt(checked, plan.reasons, checked.judged)
    if refused is not None:
        return replace(plan.where(np.zeros(len(groups), dtype=np.bool_)), refused=refused)
    unmixed = np.ones(len(groups) + 1, dtype=np.bool_)  # last entry: objects without a group
    unmixed[groups.of_object[rows_of_mixes(groups.inventory)]] = False
    mixed = int((~unmixed[plan.groups]).sum())
    return replace(plan.where(unmixed[:-1]), mixed=mixed)


def doubted_repairs(checked: PartCheck) -> dict[str, Refusal]:
    """Return the refusals of the repairs that would mend the findings of a checked store.

    The keys are the same as in `VerifyFacts.doubted`.
    """
    found, own = checked.findings, described_groups(checked.groups)
    names = {"", *(code.name for code in codes() if code.doubts)}
    doubted: dict[str, Refusal] = {}
    for name in sorted(names & {"", *pc.unique(found.column("code")).to_pylist()}):
        reasons = plan_repair(found, codes=[name]).where(own).reasons
        refused = doubt(checked, reasons, checked.judged)
        if refused is not None:
            doubted[name] = refused
            # Every repair also removes pages with errors, so a refusal for errors alone ("") is a
            # refusal of every repair.
            if not name:
                break
    return doubted


def left_remarks(plan: RepairPlan, *, stamps: bool) -> Iterator[str]:
    """Yield remarks about findings that a repair leaves.

    stamps: whether the run writes a new stamp, which mends a stamp-mismatch.
    """
    instead, unplaced = remedies(), plan.unplaced
    mended = {"stamp-mismatch"} if stamps else set()
    for code in sorted((unplaced.keys() & instead) - mended):
        yield f"Not repaired: {unplaced[code]} {code}; {instead[code]}"
    if plan.others:
        yield (
            f"Not repaired: {counted(plan.others, 'page')} of deployments that the profile does "
            "not describe; repair these with a profile of their servers"
        )
    if plan.warned:
        yield (
            f"Not repaired: {counted(plan.warned, 'page')}, because no finding of the pages is an "
            f"error; add --repair-code {','.join(plan.warnings)}"
        )
    if plan.mixed:
        yield (
            f"Not repaired: {counted(plan.mixed, 'page')} of a common size that the profile does "
            "not state, because not all of them are older than the pages that fit the profile; "
            f"compare the profile with hicachectl profile --server; {DESPITE} repairs them"
        )


def repair(
    store: Store,
    checked: PartCheck,
    plan: RepairPlan,
    options: RepairOptions,
    *,
    first: bool = True,
    buffer_bytes: int,
    say: Say,
    on_progress: Callable[[int], None] = lambda groups: None,
) -> None:
    """Remove the groups of a plan, and correct the tables of 3FS. Record the result in `checked`.

    checked: result of a check that listed the versions of objects (`VerifyRequest.repairs`).
    first: whether to release leaked pages as well. They belong to no group, so only the first part
        of a run releases them.
    say: takes remarks.
    on_progress: takes the number of groups of each batch.
    Raises StoreUnavailable, UsageError.
    """
    groups, facts = checked.groups, checked.result.facts
    if len(plan.groups):
        if write_repaired_snapshot(
            store,
            groups,
            plan.groups,
            writers_stopped=options.writers_stopped,
            dry_run=options.dry_run,
            say=say,
        ):
            return
        repair_tables(store, suspicious_keys(plan.reasons), dry_run=options.dry_run, say=say)
        outcome = remove_groups(
            store,
            groups,
            plan,
            mode=options.mode,
            quarantine=options.quarantine,
            dry_run=options.dry_run,
            buffer_bytes=buffer_bytes,
            on_progress=on_progress,
            on_end=lambda taken: say(
                f"{taken.text(len(plan.groups))}; run the same command again to repair the others"
            ),
        )
        say(_removed_text(outcome, options))
        for text in _left_texts(outcome):
            say(text)
        facts.unrepaired = bool(outcome.failures or outcome.remaining)
        if not options.dry_run:
            facts.repaired, facts.quarantined = outcome.groups, outcome.moved
            if outcome.groups:
                misleading = np.unique(plan.about[_misleading(plan.reasons, store.grammar)])
                facts.misleading = len(misleading)
                facts.misleading_ns = groups.oldest_ns(misleading)
    if first and options.writers_stopped:
        release_leaked(store, dry_run=options.dry_run, say=say)


def _misleading(found: pa.Table, grammar: str) -> BoolArray:
    """Return after which findings servers may have computed with wrong data: [findings].

    grammar: name of the grammar of the store's keys.
    """
    code = found.column("code")
    names = pa.array([code.name for code in codes() if code.misleads])
    wrong: BoolArray = pc.is_in(code, names).to_numpy()
    if grammar_of(grammar).refuses_truncated:
        unread = pc.and_(pc.equal(code, "truncated"), pc.equal(found.column("pool"), "kv"))
        wrong &= ~unread.fill_null(False).to_numpy()
    return wrong


def _removed_text(outcome: GroupReport, options: RepairOptions) -> str:
    would = "would be " if options.dry_run else ""
    where = f" to {outcome.place}" if outcome.place else ""
    verb = "quarantined" if options.mode == "quarantine" else "deleted"
    return f"{counted(outcome.groups, 'page')} {would}{verb}{where}"


def _left_texts(outcome: GroupReport) -> Iterator[str]:
    if outcome.kept:
        yield f"Kept {counted(outcome.kept, 'page')} that servers rewrote during the repair"
    if outcome.remaining:
        yield f"{counted(outcome.remaining, 'page')} not removed; run again"
    for key, message in outcome.failures:
        yield f"{key}: {message}"
