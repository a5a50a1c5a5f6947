"""The requests that a command's options describe, and the options of commands that it suggests."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.command import words_of
from hicachectl.cli.options import FILTER_NAMES, FLAG_FILTERS
from hicachectl.cli.parameters import (
    FILTERS,
    PROFILE,
    SERVERS,
    TRANSFORM,
    Option,
    on_command_line,
    options_of,
)
from hicachectl.cli.session import moment_of, remark, store_name
from hicachectl.formats.errors import UsageError
from hicachectl.formats.objects import AXES
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.move.difference_outcome import Closers
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.selection import Selection
    from hicachectl.prewarming.page_plan import PrewarmRequest
    from hicachectl.requests.chains import Hashing, Requests
    from hicachectl.requests.measuring import HitsRequest
    from hicachectl.requests.reading import Trace
    from hicachectl.verification.report_text import Mending
    from hicachectl.verification.request import VerifyRequest


def given_filters(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the given filters of a command that takes no server flags."""
    return [name for name in FILTER_NAMES if options.get(name) not in (None, False)]


def selection_of(
    ctx: click.Context, store: Store, options: dict[str, Any], *, changes: bool = False
) -> Selection:
    """Return the filters of a command.

    A server flag such as --tp is a filter unless --model-config or --server is given.

    options: the command's options. Flags that are filters are set to None, so that the other flags
        describe the profile.
    changes: whether the command changes the store; see `present_ns`.
    Raises UsageError for --tag with --no-tag, and as the reader of --pages does.
    """
    from hicachectl.pages.selection import Selection, no_times
    from hicachectl.requests.reading import read_page_list

    own = {option.name for option in options_of(ctx.command) if option.section is FILTERS}
    describes = bool(options.get("model_config") or options.get("server"))
    filters = {name: options[name] for name in FILTER_NAMES if name in own}
    for name in FLAG_FILTERS:
        if name not in own and not describes and on_command_line(ctx, name):
            filters[name], options[name] = options[name], None
    if filters.pop("no_tag", False):
        if filters.get("tag") is not None:
            raise click.UsageError("--tag cannot be combined with --no-tag; leave out one of them")
        filters["tag"] = ""
    for name in ("since", "before"):
        filters[name] = moment_of(store, filters.get(name), changes=changes)
        if filters[name] is not None and "mtime_ns" not in store.traits.columns:
            raise no_times(f"--{name}")
    states, pages = filters.pop("state", None), filters.pop("pages", None)
    listed = None if pages is None else read_page_list(pages)
    return Selection(**filters, states=states or (), pages=listed)


def say_unjudged(ctx: click.Context, selection: Selection, groups: PageGroups) -> None:
    """Say how many groups that may be partial are left out, as no profile describes them."""

    if unjudged := selection.unjudged(groups):
        remark(
            ctx,
            f"Left out {counted(unjudged, 'page')} that may be partial, because the profile "
            "describes another deployment; give the profile of their servers",
            failure=True,
        )


def asked_hashing(profile: Profile | None, options: Mapping[str, Any]) -> Hashing | None:
    """Return the hashing that a given profile or --page-size states; None if neither is given."""
    from hicachectl.formats.releases import NEWEST_SGLANG
    from hicachectl.requests.chains import Hashing

    if profile is not None and not profile.inferred:
        return Hashing.of(profile)
    if options["page_size"] is None:
        return None
    return Hashing.of_flags(
        options["page_size"],
        options["speculative_algorithm"] or "",
        options["sglang"] or NEWEST_SGLANG,
    )


def asked_requests(
    ctx: click.Context,
    options: Mapping[str, Any],
    hashing: Hashing | None,
    *,
    remedy: str | None = "record token ids",
    outputs: bool = False,
    trace: Trace | None = None,
) -> Requests:
    """Read the requests that the options name. Print the remarks of the trace.

    remedy: next step in the refusal of a trace with block ids only; None accepts such a trace.
    outputs: whether chains continue with generated tokens.
    trace: the trace that the options name, if it is open already.
    Raises UsageError if the hashing is unknown, and as the readers of files do.
    """
    from hicachectl.requests.chains import requests_of_pages
    from hicachectl.requests.reading import read_page_chains

    if options["pages"]:
        path = options["pages"]
        return requests_of_pages(read_page_chains(path), hashing, source=str(path))
    with asked_trace(options) if trace is None else nullcontext(trace) as opened:
        requests = opened.requests(hashing, outputs=outputs)
        remark(ctx, *opened.remarks)
    if remedy is not None:
        requests.refuse_block_ids(remedy)
    return requests


def asked_trace(options: Mapping[str, Any], *, keeps: bool = False) -> Trace:
    """Return the input of --token-ids, --prompts or --trace. keeps: see `Trace`."""
    from hicachectl.requests.reading import Trace
    from hicachectl.requests.tokenizing import find_tokenizer

    form, names = options["trace_format"] or "", options["trace"]
    for parameter in ("prompts", "token_ids"):
        if options.get(parameter):
            form, names = parameter.replace("_", "-"), (options[parameter],)
    places = (options.get("model_config"), options["profile_file"])
    tokenizer = find_tokenizer(options["tokenizer"], places)
    if form == "prompts" and tokenizer is None:
        raise UsageError("--prompts needs a tokenizer; give --tokenizer DIR")
    return Trace(
        names,
        form=form,
        tokenizer=tokenizer,
        block_size=options["block_size"],
        keeps=keeps,
    )


def asked_in(
    ctx: click.Context,
    request: PrewarmRequest,
    grammar: str,
    options: Mapping[str, Any],
    trace: Trace | None,
) -> PrewarmRequest:
    """Return the prewarm request with the requests or pages that the options name.

    grammar: grammar of the source's keys.
    trace: the open trace that the options name; None for other inputs.
    Raises UsageError and FormatError.
    """
    if options["all_"]:
        return request
    if options["pages"]:
        return _listed_pages(request, grammar, options)
    if options["plan"]:
        return _planned_pages(request, options["plan"])
    hashing = asked_hashing(request.profile, options)
    remedy = "record token ids, or give --dry-run without DST and --from"
    asked = asked_requests(ctx, options, hashing, remedy=remedy, trace=trace)
    return replace(request, requests=asked)


def _listed_pages(
    request: PrewarmRequest, grammar: str, options: Mapping[str, Any]
) -> PrewarmRequest:
    import pyarrow as pa

    from hicachectl.formats.keys import grammar_of
    from hicachectl.formats.keys.labels import label_text
    from hicachectl.pages.deployments import profiled_deployment
    from hicachectl.requests.chains import Hashing, requests_of_pages
    from hicachectl.requests.reading import read_page_list

    profile, source = request.profile, str(options["pages"])
    listed = read_page_list(options["pages"], requests=True)
    label = profiled_deployment(profile, grammar).label(grammar_of(grammar))
    in_others = listed.only_in_others(label)
    if not listed.is_chained:
        pages, others = (pa.array(names, pa.string()) for names in (listed.pages, in_others))
        return replace(request, pages=pages, in_others=others)
    if in_others:
        raise UsageError(
            f"{source}: has {counted(len(in_others), 'row')} of other deployments than the "
            f"profile's ({label_text(label)}); remove such rows from a file with chains"
        )
    chains = requests_of_pages(listed.chains(), Hashing.of(profile), source=source)
    return replace(request, requests=chains)


def _planned_pages(request: PrewarmRequest, path: Path) -> PrewarmRequest:
    from hicachectl.prewarming.ranking import rank_by_plan, read_plan
    from hicachectl.requests.chains import Hashing

    planned = read_plan(path)
    requests = planned.requests(Hashing.of(request.profile))
    if (requests.reach < 2).all():
        # The plan names single pages; the pages before them are unknown.
        return replace(request, pages=planned.pages)
    return replace(request, requests=requests, rank=rank_by_plan(planned.pages))


def asked_hits(
    ctx: click.Context,
    options: Mapping[str, Any],
    profile: Profile | None,
    choice: Selection,
    **reading: Any,
) -> HitsRequest:
    """Return what to measure: how much of the requests that the options name a store can serve.

    reading: arguments of `asked_requests`.
    """
    from hicachectl.requests.measuring import HitsRequest

    return HitsRequest(
        requests=asked_requests(ctx, options, asked_hashing(profile, options), **reading),
        profile=profile,
        choice=choice,
        threshold=options["prefetch_threshold"],
        by=options.get("by") or (),
    )


def asked_checks(
    ctx: click.Context,
    store: Store,
    options: Mapping[str, Any],
    profile: tuple[Profile | None, str],
    **more: Any,
) -> VerifyRequest:
    """Return the checks that the options ask for.

    profile: the profile, and the reason why it describes no objects; "" if it describes objects.
    more: further fields of the request.
    Raises click.UsageError for a check of --checks that cannot run.
    """
    from hicachectl.verification.request import Sample, VerifyRequest

    sampled = options["sample"]
    request = VerifyRequest(
        profile=profile[0],
        collision=profile[1],
        checks=options["checks"],
        grace_seconds=options["grace"],
        sample=Sample.parse(sampled, options["sample_slice"]) if sampled else None,
        time_limit_seconds=options["time_limit"],
        allow_empty=options["allow_empty"],
        buffer_bytes=options["buffer_bytes"],
        bytes_per_second=options["bwlimit"],
        **more,
    )
    if on_command_line(ctx, "checks"):
        for check, why in request.impossible(request.unmet(store)).items():
            raise click.UsageError(f"--checks {check}: {why}; or leave out {check}")
    return request


def request_flags(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of flags that only say how to hash requests, or choose a deployment.

    If the options have a source of a profile, such as --model-config, return no names, because the
    flags then describe the profile.
    """
    from hicachectl.profiles.sources import states_source

    return () if states_source(options) else ("page_size", "speculative_algorithm", "sglang", *AXES)


def without_request_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the flags of `request_flags` set to None."""
    return {**options, **dict.fromkeys(request_flags(options))}


def refuse_choice(choice: Selection, options: Mapping[str, Any]) -> None:
    """Raise UsageError if a filter chooses a deployment although a profile names it already."""
    from hicachectl.profiles.sources import states_source

    if choice.names_deployment and states_source(options):
        option = next(iter(choice.alone())).partition(" ")[0]
        raise UsageError(
            f"{option} chooses a deployment from the contents of STORE; leave out --profile, "
            "--model-config and --server"
        )


def refuse_other_sources(options: Mapping[str, Any], sources: Iterable[str]) -> None:
    """Raise UsageError unless the options name exactly one source of requests."""
    names = list(sources)
    if sum(bool(options[name]) for name in names) != 1:
        shown = [f"--{name.rstrip('_').replace('_', '-')}" for name in names]
        raise UsageError(f"Give exactly one of {', '.join(shown[:-1])} and {shown[-1]}")


def mending_without_options(ctx: click.Context, text: str) -> Mending:
    """Return how suggested commands name the program and the store.

    text: the STORE argument.
    """
    from hicachectl.verification.report_text import Mending

    # A URL can have a password. A name of the config file, such as prod:, has none.
    named = "://" not in text
    return Mending(program=_program(ctx), store=text if named else store_name(ctx, text))


def closers_of(ctx: click.Context, texts: tuple[str, str]) -> Closers:
    """Return the suggested commands that make the two stores of this command equal.

    texts: the arguments that name the stores.
    """
    from msgspec.structs import replace

    from hicachectl.move.difference_outcome import Closers

    to_b, to_a = (mending_without_options(ctx, text) for text in texts)
    changes = {option.name for option in options_of(ctx.command) if option.section is TRANSFORM}
    repeated = {option.name for option in options_of(ctx.command) if option.repeats}
    words, changing = (tuple(next_words(ctx, only=o)) for o in ({*repeated, *changes}, changes))
    # The config file may state the profile for one of the stores only.
    if ctx.params["profile_file"] and "--profile" not in words:
        words = (*words, "--profile", str(ctx.params["profile_file"]))
    sections = (PROFILE, SERVERS)
    describing = {one.name for one in options_of(ctx.command) if one.section in sections}
    undescribed = tuple(next_words(ctx, only=repeated - describing))
    back: tuple[str, ...] | None = words
    if changing:
        # The command from B to A exchanges the profiles. There is no such command without
        # --to-profile, because no other option describes the pages of B.
        swapped = {"--profile": "--to-profile", "--to-profile": "--profile"}
        back = tuple(swapped.get(word, word) for word in words)
        if changing[:1] != ("--to-profile",) or "--profile" not in words:
            back = None
    return Closers(
        replace(to_b, destination=to_a.store, options=words),
        None if back is None else replace(to_a, destination=to_b.store, options=back),
        undescribed,
    )


def mending_of(
    ctx: click.Context,
    text: str,
    store: Store,
    *,
    request: VerifyRequest,
    quarantine: str = "",
    without: Collection[str] = (),
) -> Mending:
    """Return how the suggested commands that mend findings name the store and repeat options.

    text: the STORE argument.
    request: checks of the run.
    quarantine: the directory of --quarantine.
    without: parameters that the commands leave out, although `Option.repeats` is true.
    """
    from msgspec.structs import replace

    from hicachectl.backends.capabilities import SideFiles

    own = store.side_directory() if isinstance(store, SideFiles) else None
    profile, words = request.real_profile, [*next_words(ctx, without)]
    # The default slice changes at midnight, and the command must find the same pages.
    if request.sample is not None and ctx.params["sample_slice"] is None:
        words += ["--sample-slice", str(request.sample.number)]
    return replace(
        mending_without_options(ctx, text),
        options=tuple(words),
        profiled=profile is not None,
        deletes=store.traits.deletes,
        quarantine=quarantine or ("" if own is not None else "DIR"),
        model="" if profile is None else profile.key_model,
        stamped=bool(ctx.params.get("stamp")),
        repair_codes=tuple(ctx.params.get("repair_codes") or ()),
        sizes={} if profile is None else {axis: getattr(profile, axis) for axis in AXES},
    )


def with_value(ctx: click.Context, option: str, value: str) -> str:
    """Return this command for a shell, with another value of an option and masked secrets."""
    from hicachectl.backends.urls import without_secrets

    words = words_of(ctx)
    for number, word in enumerate(words):
        if word == option and number + 1 < len(words):
            words[number + 1] = value
        elif word.startswith(f"{option}="):
            words[number] = f"{option}={value}"
    program = ("hicachectl",) if on_command_line(ctx, "config") else _program(ctx)
    return without_secrets(shlex.join([*program, str(ctx.info_name), *words]))


def _program(ctx: click.Context) -> tuple[str, ...]:
    config = ctx.obj.config
    return ("hicachectl", *(() if config is None else ("--config", str(config))))


def next_words(
    ctx: click.Context, without: Collection[str] = (), *, only: Collection[str] | None = None
) -> Iterator[str]:
    """Yield the given options that a suggested command repeats, as they were given.

    without: names of parameters to leave out.
    only: names of the parameters to yield; None for the options with `Option.repeats`.
    """
    values, _, order = ctx.command.make_parser(ctx).parse_args(words_of(ctx))
    for param in dict.fromkeys(order):
        if not isinstance(param, Option) or param.name in without:
            continue
        if not (param.repeats if only is None else param.name in only):
            continue
        value = values[param.name]
        for one in dict.fromkeys(value) if isinstance(value, list) else [value]:
            yield max(param.opts, key=len)
            if not param.is_flag:
                yield str(one)
