"""`hicachectl rm`: remove pages from a store for good."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.command import Command
from hicachectl.cli.commands.earlier_runs import EarlierRuns
from hicachectl.cli.consent import locked, require_consent
from hicachectl.cli.environment import on_command_line
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.options import (
    FILE,
    NameList,
    PointInTime,
    lease_wait_option,
    lock_option,
    output_options,
    store_argument,
)
from hicachectl.cli.session import opened, progress, remark, store_name
from hicachectl.formats.wording import lock_held
from hicachectl.text.vocabulary import LOCK, STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.move.planning import Criteria, RepairPlan
    from hicachectl.move.reports import GroupReport
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

    # The question before a removal (None: nothing to remove), and the removal, given dry_run.
    Removal = tuple[str | None, Callable[[bool], GroupReport]]

_SELECTORS = ("model", "tag", "tp", "pp", "cp", "pages", "before", "state")


@click.command(
    "rm",
    cls=Command,
    epilog="""\b
Examples:
  hicachectl rm /tmp/hicache --model Qwen/Qwen3-32B --dry-run
  hicachectl rm prod: --before 7d --yes --lock /run/hicachectl.lock
  hicachectl rm prod: --state orphan
  hicachectl rm prod: --temporaries --before 1d
  hicachectl rm prod: --pages bad-pages.txt --profile prod.toml --token-ids prompts.jsonl
""",
)
@store_argument
@click.option("--model", metavar="NAME", help="Pages of this model, as org/name or org-name.")
@click.option("--tag", metavar="TAG", help="Pages with this Mooncake extra_backend_tag.")
@click.option(
    "--tp", type=click.IntRange(1), metavar="N", help="Pages of this TP size, as shown by ls."
)
@click.option(
    "--pp", type=click.IntRange(1), metavar="N", help="Pages of this PP size, as shown by ls."
)
@click.option(
    "--cp", type=click.IntRange(1), metavar="N", help="Pages of this CP size, as shown by ls."
)
@click.option(
    "--pages",
    type=FILE,
    help="Pages in FILE. A line is a page hash, or a row of ls --format jsonl, which stands for "
    "one group of the page.",
)
@click.option(
    "--all-deployments",
    is_flag=True,
    help="With --pages: remove a page given by its hash alone from all deployments.",
)
@click.option(
    "--before",
    type=PointInTime(),
    help="Pages last written before TIME (ISO 8601, or an age such as 7d).",
)
@click.option("--state", type=NameList(STATES), help="Pages in these states.")
@click.option(
    "--temporaries",
    is_flag=True,
    help="Remove temporary files of unfinished writes and what a server's clear left, if older "
    "than a minute.",
)
@click.option(
    "--token-ids",
    type=FILE,
    help="Prompts, one JSON list of token ids per line. Also remove the pages that follow a "
    "removed page in a prompt, because servers can no longer reach them. Needs --profile.",
)
@click.option(
    "--profile",
    "profile_file",
    type=FILE,
    help="Read the deployment's profile from FILE (TOML or JSON); see hicachectl-profile(1).",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask before removing.")
@lock_option
@lease_wait_option
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    store: str,
    dry_run: bool,
    yes: bool,
    lock: Path | None,
    output_format: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Remove pages from a store for good.

    Give at least one filter: --model, --tag, --tp, --pp, --cp, --pages, --before or --state. Pages
    that match all filters are removed with all their objects, the kv objects first, so servers
    never see half a page. Objects that a server rewrites during the run stay. The exit status is 4
    if something could not be removed.

    One page can have objects of several deployments. A row of ls in --pages removes the group of
    one deployment. A bare hash that several deployments have is refused, unless --all-deployments
    is given.

    --temporaries removes no pages. It removes the files that verify reports as stale-temporary:
    temporary files that are older than a minute, and objects that a server's clear made misses
    more than a minute ago. With --before, they must also be older than TIME.
    """
    _refuse_contradictions(ctx, options)
    require_consent(yes=yes, dry_run=dry_run)
    with locked(lock) as is_ours:
        if not is_ours:
            remark(ctx, lock_held(lock))
            _write_lock_held(store_name(ctx, store), dry_run, output_format, output)
            return
        with opened(ctx, store, lease_wait=options["lease_wait"]) as source:
            earlier = EarlierRuns(ctx, source, None, yes=yes, dry_run=dry_run)
            earlier.begin()
            plan = _plan_temporaries if options["temporaries"] else _plan_pages
            question, remove = plan(ctx, source, options)
            started = time.monotonic()
            if not earlier.agreed(question):
                remark(ctx, "Nothing was removed")
                return
            outcome = remove(dry_run)
        _write(
            _document(source.url, outcome, time.monotonic() - started, dry_run),
            outcome,
            output_format=output_format,
            output=output,
        )
    if dry_run:
        remark(ctx, "Dry run: nothing was removed")
    if outcome.failures or outcome.remaining:
        ctx.exit(FINDINGS)


def _refuse_contradictions(ctx: click.Context, options: dict[str, Any]) -> None:
    given = [name for name in _SELECTORS if options[name] is not None]
    if options["temporaries"]:
        others = [
            *given,
            *(
                n
                for n in ("all_deployments", "token_ids", "profile_file")
                if on_command_line(ctx, n)
            ),
        ]
        if set(others) - {"before"}:
            name = next(n for n in others if n != "before").removesuffix("_file").replace("_", "-")
            raise click.UsageError(
                f"--temporaries removes files that belong to no page; leave out --{name}"
            )
        return
    if not given:
        raise click.UsageError(
            "Give a filter: --model, --tag, --tp, --pp, --cp, --pages, --before, --state or "
            "--temporaries. To wipe the whole store, use SGLang's clear_hicache_storage_backend."
        )
    if options["all_deployments"] and options["pages"] is None:
        raise click.UsageError("--all-deployments needs --pages")
    if options["token_ids"] and not options["profile_file"]:
        raise click.UsageError("--token-ids needs --profile, which states the page size")


def _plan_temporaries(ctx: click.Context, store: Store, options: dict[str, Any]) -> Removal:
    from hicachectl.move.reports import total
    from hicachectl.move.temporaries import find_temporaries, remove_temporaries
    from hicachectl.text.units import counted, human_size

    _refuse_without_times(store, options)
    with progress(ctx, "listing", " objects") as advance:
        stale = find_temporaries(store, before=options["before"], on_batch=advance)
    if not store.traits.lists_temporaries:
        remark(ctx, f"{store.url}: only file stores have temporary files")
    elif not len(stale):
        remark(ctx, f"{store.url}: no temporary file or cleared object is old enough to be removed")

    def remove(dry_run: bool) -> GroupReport:
        with progress(ctx, "removing", " files") as advance:
            return remove_temporaries(store, stale, dry_run=dry_run, on_progress=advance)

    nbytes = human_size(total(stale.column("nbytes")))
    cleared = len(stale) - stale.column("cleared_ns").null_count
    what = {"temporary file": len(stale) - cleared, "cleared object": cleared}
    named = " and ".join(counted(count, noun) for noun, count in what.items() if count)
    question = f"remove {named} ({nbytes}) from {store.url}"
    return question if len(stale) else None, remove


def _plan_pages(ctx: click.Context, store: Store, options: dict[str, Any]) -> Removal:
    from hicachectl.move.withdrawal import remove_groups

    inventory, groups, plan = _plan(ctx, store, options)

    def remove(dry_run: bool) -> GroupReport:
        with progress(ctx, "removing", " pages") as advance:
            return remove_groups(
                store,
                inventory,
                groups,
                plan,
                mode="delete",
                dry_run=dry_run,
                on_progress=advance,
            )

    return _question(store, groups, plan) if len(plan.groups) else None, remove


def _plan(
    ctx: click.Context, store: Store, options: dict[str, Any]
) -> tuple[Inventory, PageGroups, RepairPlan]:
    from hicachectl.move.planning import plan_removal, with_descendants
    from hicachectl.pages.ambiguity import ambiguity_remark
    from hicachectl.pages.group_table import UNKNOWN
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import take_inventory
    from hicachectl.pages.tally import object_counts
    from hicachectl.pages.unmatched import explain_nothing
    from hicachectl.profiles.sources import profile_from_options
    from hicachectl.requests.chains import Hashing, hex_chains
    from hicachectl.requests.files import read_token_ids
    from hicachectl.requests.page_lists import NamedGroups
    from hicachectl.text.units import counted

    criteria = _criteria(store, options)
    profile = profile_from_options({"profile_file": options["profile_file"]}, store)
    columns = ("version",) if "version" in store.traits.columns else ()
    with progress(ctx, "listing", " objects") as advance:
        inventory = take_inventory(store, profile, columns=columns, on_batch=advance)
    for text in store.remarks:
        remark(ctx, text)
    groups = PageGroups(inventory)
    plan = plan_removal(groups, criteria.chosen(groups, store.url), _why(options))
    ambiguous = int((groups.states == UNKNOWN).sum())
    chosen = int((groups.states[plan.groups] == UNKNOWN).sum())
    if chosen or (ambiguous and criteria.filters):
        verb, count = ("selected for removal", chosen) if chosen else ("left alone", ambiguous)
        text = ambiguity_remark(inventory.table, object_counts(inventory))
        remark(ctx, f"{counted(count, 'page group')} with ambiguous keys {verb}: {text}")
    if criteria.pages is not None:
        unmatched = criteria.pages.labelled - NamedGroups(criteria.pages, groups).matched
        if unmatched:
            rows = counted(unmatched, "row")
            remark(ctx, f"{options['pages']}: the store has no group for {rows}")
    if not len(plan.groups):
        remark(ctx, explain_nothing(store, inventory, _alone(criteria, groups)))
    if options["token_ids"] and profile is not None:
        chains = hex_chains(read_token_ids(options["token_ids"]), Hashing.of(profile))
        plan = with_descendants(plan, groups, chains)
    return inventory, groups, plan


def _alone(criteria: Criteria, groups: PageGroups) -> dict[str, bool]:
    """Return for each filter, as text, whether it alone matches a group.

    --pages counts as matching if there are other filters.
    """
    from dataclasses import fields, replace

    from hicachectl.pages.unmatched import option_text

    given: dict[str, Any] = {
        field.name: field.default
        for field in fields(criteria)
        if getattr(criteria, field.name) != field.default and field.name != "all_deployments"
    }
    texts = {}
    for name in given:
        if name == "pages":
            texts["--pages"] = len(given) > 1
            continue
        others = {other: default for other, default in given.items() if other != name}
        alone = replace(criteria, **others)
        texts[option_text(name, getattr(criteria, name))] = len(alone.chosen(groups)) > 0
    return texts


def _criteria(store: Store, options: dict[str, Any]) -> Criteria:
    from hicachectl.move.planning import Criteria
    from hicachectl.requests.files import read_page_list

    _refuse_without_times(store, options)
    return Criteria(
        model=options["model"],
        tag=options["tag"],
        tp=options["tp"],
        pp=options["pp"],
        cp=options["cp"],
        pages=None if options["pages"] is None else read_page_list(options["pages"]),
        all_deployments=options["all_deployments"],
        before=options["before"],
        states=options["state"],
    )


def _refuse_without_times(store: Store, options: dict[str, Any]) -> None:
    from hicachectl.formats.errors import UnsupportedByBackend

    if options["before"] is not None and "mtime_ns" not in store.traits.columns:
        raise UnsupportedByBackend(
            f"--before: {store.url} keeps no timestamps; choose pages by --pages, --model or "
            "--state"
        )


def _why(options: dict[str, Any]) -> str:
    given = (f"--{name}" for name in _SELECTORS if options[name] is not None)
    return f"rm {' '.join(given)}"


def _question(store: Store, groups: PageGroups, plan: RepairPlan) -> str:
    from hicachectl.text.units import counted, human_size

    nbytes = human_size(groups.total_bytes(plan.groups))
    return f"remove {counted(len(plan.groups), 'page')} ({nbytes}) from {store.url}"


def _write_lock_held(store: str, dry_run: bool, output_format: str, output: Path | None) -> None:
    """Write the document of a run that a lock prevented."""
    from hicachectl.move.reports import GroupReport

    outcome = GroupReport()
    document = _document(store, outcome, 0.0, dry_run) | {"complete": False, "stopped_by": LOCK}
    _write(document, outcome, output_format=output_format, output=output)


def _document(store: str, outcome: GroupReport, seconds: float, dry_run: bool) -> dict[str, Any]:
    return {
        "store": store,
        "pages": outcome.groups,
        "objects": outcome.deleted,
        "bytes": outcome.nbytes,
        "gone": outcome.gone,
        "kept": outcome.kept,
        "failed": len(outcome.failures),
        "remaining": outcome.remaining,
        "seconds": round(seconds, 3),
        "complete": True,
        "stopped_by": None,
        "dry_run": dry_run,
        "failures": [{"key": key, "detail": detail} for key, detail in outcome.failures],
        "groups": None,
    }


def _write(
    document: dict[str, Any], outcome: GroupReport, *, output_format: str, output: Path | None
) -> None:
    from hicachectl.cli.output import write_document

    write_document(
        document,
        rows=outcome.rows,
        name="groups",
        output_format=output_format,
        output=output,
        text=lambda colour: _lines(document, outcome, colour),
    )


def _lines(document: dict[str, Any], outcome: GroupReport, colour: bool) -> Iterator[str]:
    from hicachectl.cli.text_tables import removals_for_people
    from hicachectl.text.tables import table_lines
    from hicachectl.text.units import counted, human_size

    if len(outcome.rows):
        yield from table_lines(removals_for_people(outcome.rows), colour=colour)
    yield from (f"{failure['key']}: {failure['detail']}" for failure in document["failures"])
    files = "key" in outcome.rows.column_names  # they belong to no page
    noun = "file" if files else "page"
    left = document["remaining"]
    remaining = f", {counted(left, noun)} not removed" if left else ""
    count = (
        counted(document["objects"], noun)
        if files
        else f"{counted(document['pages'], noun)}, {counted(document['objects'], 'object')}"
    )
    would = "would be " if document["dry_run"] else ""
    stopped = f"; stopped: {document['stopped_by']}" if document["stopped_by"] else ""
    yield f"{count}, {human_size(document['bytes'])} {would}removed{remaining}{stopped}"
