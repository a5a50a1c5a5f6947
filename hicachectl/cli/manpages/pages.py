"""Man pages from the click commands, the architectures and the finding codes.

`python -m hicachectl.cli.manpages.pages DIRECTORY` builds them.
"""

from __future__ import annotations

import re
import sys
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hicachectl.checks.codes import AFTERWARDS
from hicachectl.checks.reasons import reasons
from hicachectl.checks.registry import codes
from hicachectl.cli.command import GLOBAL
from hicachectl.cli.commands.explain import SOURCES
from hicachectl.cli.group import COMMANDS, cli
from hicachectl.cli.manpages.access import USES, VERBS, access
from hicachectl.cli.manpages.mdoc import (
    SEE_ALSO,
    escaped,
    example_section,
    flag_macros,
    help_text,
    literal_line,
    name_list,
    page_head,
    section_lines,
    sentence_lines,
    table_lines,
    text_line,
    with_listings,
)
from hicachectl.cli.manpages.members import DOCUMENTS, members_of
from hicachectl.cli.manpages.web import write_web_pages
from hicachectl.cli.metrics import LABELS, metrics
from hicachectl.cli.parameters import OWN, sections
from hicachectl.cli.prose import Item, prose
from hicachectl.cli.settings import every_command
from hicachectl.formats.kinds import kinds
from hicachectl.formats.models.architectures import (
    REFUSALS,
    architectures,
    unverified,
)
from hicachectl.formats.models.drafts import DSPARK_V4
from hicachectl.formats.models.families.base import Family
from hicachectl.formats.models.recorded import recorded
from hicachectl.prewarming.ranking import PlanRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hicachectl.cli.manpages.members import Member
    from hicachectl.cli.parameters import Section


def build(directory: Path) -> None:
    """Write hicachectl.1, one page for each command, and the generated pages of section 7.

    Also update the files that the hand-written pages of the directory quote.
    """
    pages = {
        "hicachectl.1": main_page(),
        "hicachectl-models.7": models_page(),
        "hicachectl-findings.7": findings_page(),
        "hicachectl-output.7": output_page(),
        "hicachectl-security.7": security_page(),
        **{f"hicachectl-{name}.1": command_page(name) for name in COMMANDS},
    }
    for page, lines in pages.items():
        text = without_own_name("\n".join(lines), page)
        (directory / page).write_text(text + "\n", encoding="utf-8")
    for path in directory.glob("*.7"):
        path.write_text(with_listings(path.read_text(encoding="utf-8")), encoding="utf-8")


def without_own_name(text: str, page: str) -> str:
    """Return a page without its references to itself, which come from option and shared texts."""
    name, section = page.split(".")
    own = rf"(?:; see| in)\n\.Xr {re.escape(name)} {section}((?: [.,:;)])*)$"
    return re.sub(own, lambda found: found[1].replace(" ", ""), text, flags=re.MULTILINE)


def main_page() -> list[str]:
    """Return the page of the whole program."""
    ctx, texts = _group_context(), dict(prose("hicachectl"))
    lines = [
        *page_head("hicachectl", "inspect, verify, migrate and prewarm SGLang HiCache L3 stores"),
        ".Nm",
        ".Op Fl vqh",
        ".Op Fl -config Ar FILE",
        ".Ar COMMAND ...",
        ".Sh DESCRIPTION",
        *help_text(cli.help or ""),
        ".Sh OPTIONS",
        *_options(cli, ctx),
        ".Pp",
        *section_lines(texts.pop("VALUES")),
        ".Sh COMMANDS",
        ".Bl -tag -width Ds",
    ]
    for name, summary in COMMANDS.items():
        lines += [f".It Xr hicachectl-{name} 1", text_line(summary)]
    lines.append(".El")
    texts.pop(SEE_ALSO)
    for title, blocks in texts.items():
        lines += [f".Sh {title}", *section_lines(blocks, {"variables": _variables(ctx)})]
    lines += [".Sh SEE ALSO", *_see_also("hicachectl")]
    return lines


def command_page(name: str) -> list[str]:
    """Return the page of one command."""
    command = cli.get_command(_group_context(), name)
    assert command is not None  # COMMANDS names only commands that exist
    ctx = click.Context(command, info_name=name, parent=_group_context())
    arguments = [p.make_metavar(ctx) for p in command.params if isinstance(p, click.Argument)]
    if isinstance(command, click.Group):
        arguments.append("COMMAND ...")
    summary = COMMANDS[name].rstrip(".")
    return [
        *page_head(f"hicachectl-{name}", summary[0].lower() + summary[1:]),
        f".Nm hicachectl {name}",
        ".Op Ar OPTIONS",
        *(f".Ar {argument}" for argument in arguments),
        ".Sh DESCRIPTION",
        *help_text(_without_pointer(command.help or "", name)),
        ".Sh OPTIONS",
        *_options(command, ctx),
        *_subcommands(command, ctx),
        ".Sh EXIT STATUS",
        "As for",
        ".Xr hicachectl 1 .",
        *example_section(command.epilog or ""),
        *_background(name),
        ".Sh SEE ALSO",
        *_see_also(f"hicachectl-{name}"),
    ]


def models_page() -> list[str]:
    """Return the page that says of every architecture of SGLang whether a profile describes it."""
    texts = prose("hicachectl-models")
    families = {name: x for name, x in architectures().items() if isinstance(x, Family)}
    drafts = {name: family for name, family in families.items() if family.draft_only}
    lines = [
        *_head("hicachectl-models", "model architectures that have a profile"),
        ".Sh TARGETS",
        *name_list(families.keys() - drafts.keys() - unverified(drafts=False)),
        ".Sh UNVERIFIED TARGETS",
        *section_lines(texts["UNVERIFIED TARGETS"]),
        *name_list(unverified(drafts=False)),
        ".Sh DRAFTS",
        *section_lines(texts["DRAFTS"][:1]),
        *_drafts(drafts),
        ".Sh REFUSALS",
        *section_lines(texts["REFUSALS"]),
    ]
    for refusal in REFUSALS.values():
        names = {name for name, answer in architectures().items() if answer is refusal}
        lines += [f".Ss {text_line(refusal.reason)}", *name_list(names)]
    lines += [".Sh SEE ALSO", ".Xr hicachectl-profile 1"]
    return lines


def _head(name: str, summary: str) -> Iterator[str]:
    """Yield the lines of a page of section 7 up to the end of its description."""
    yield from page_head(name, summary, section=7)[:-1]
    yield ".Sh DESCRIPTION"
    yield from section_lines(prose(name)["DESCRIPTION"])


def _drafts(families: Mapping[str, Family]) -> Iterator[str]:
    """Yield the drafts by the form of their KV."""
    frozen = {name for name, family in families.items() if family.frozen_kv}
    own = {x.draft for x in recorded().architectures.values()} | {DSPARK_V4}
    mtp = own & set(families)
    forms = prose("hicachectl-models")["DRAFTS"][1:]
    by_hand = unverified(drafts=True)
    for form, group in zip(forms, (mtp, set(families) - mtp - frozen, frozen), strict=True):
        assert isinstance(form, Item)
        title, text = form
        yield f".Ss {text_line(title)}"
        yield from sentence_lines(text)
        yield from name_list(group - by_hand)
        if group & by_hand:
            yield from (".Pp", *sentence_lines("Unverified, like the targets above:"))
            yield from name_list(group & by_hand)


def findings_page() -> list[str]:
    """Return the page with the explanation of every finding code and of every reason."""
    texts = prose("hicachectl-findings")
    lines = [
        *_head("hicachectl-findings", "meaning and remedy of findings and of lost hits"),
        ".Sh CODES",
    ]
    for code in codes():
        severity = "; ".join(filter(None, (code.severity, code.exceptions)))
        lines += _explained(code.name, f"Severity: {severity}.", code.explanation())
    lines += [".Sh AFTER A REPAIR", *section_lines(texts["AFTER A REPAIR"])]
    lines += [".Pp", *sentence_lines(AFTERWARDS)]
    misleading = (code.name for code in codes() if code.misleads)
    lines += [".Pp", *sentence_lines(f"These findings mislead: {', '.join(misleading)}.")]
    lines += [".Sh REASONS", *section_lines(texts["REASONS"])]
    for reason in reasons():
        source = SOURCES[reason.source]
        source = f"{source[:1].upper()}{source[1:]}"
        where = f": {', '.join(reason.counters)}" if reason.counters else ""
        lines += _explained(reason.name, f"{source}{where}.", reason.explanation())
    lines += [".Sh SEE ALSO", ".Xr hicachectl-explain 1 ,", ".Xr hicachectl-verify 1 ,"]
    lines += [".Xr hicachectl-plugin 7 ,", ".Xr hicachectl-runbooks 7"]
    return lines


def _explained(name: str, head: str, texts: Mapping[str, str]) -> Iterator[str]:
    """Yield a subsection with the texts of `explain`. head: first line of the subsection."""
    yield from (f".Ss {text_line(name)}", *sentence_lines(head))
    for title in ("meaning", "effect", "remedy", "cost"):
        if texts.get(title):
            yield from (".Pp", f"{title.capitalize()}:", *sentence_lines(texts[title]))
    if texts["command"]:
        yield from (".Bd -literal -offset indent", literal_line(texts["command"]), ".Ed")


def output_page() -> list[str]:
    """Return the page with the members of every document and the metrics."""
    texts = prose("hicachectl-output")
    lines = [
        *_head("hicachectl-output", "members of JSON documents, and metrics"),
        ".Sh DOCUMENTS",
    ]
    for document in DOCUMENTS:
        lines.append(f".Ss {escaped(document.title)}")
        lines += sentence_lines(f"Rows: {document.rows}.") if document.rows else []
        lines += section_lines(texts.get(document.title, ()))
        lines += _members(document.members)
    lines += [".Ss profile", *section_lines(texts["profile"])]
    lines += [".Ss prewarm without stores", *section_lines(texts["prewarm without stores"])]
    lines += _members(members_of(PlanRow))
    lines += [".Sh METRICS", *section_lines(texts["METRICS"])]
    for command, gauges in metrics().items():
        lines += [f".Ss {command}", ".Bl -tag -width Ds"]
        for name, text in gauges.items():
            lines += [f".It {escaped(f'hicachectl_{command}_{name}')}", *sentence_lines(text)]
            lines += [f"Label: {LABELS[name]}."] if name in LABELS else []
        lines.append(".El")
    lines += [".Sh SEE ALSO", ".Xr hicachectl 1 ,", ".Xr hicachectl-profile 1 ,"]
    lines += [".Xr hicachectl-findings 7 ,", ".Xr hicachectl-scheduling 7"]
    return lines


def security_page() -> list[str]:
    """Return the page with the access, ports, rights, trust and secrets of commands."""
    name = "hicachectl-security"
    texts = dict(prose(name))
    lines = list(_head(name, "access, ports, rights, trust and secrets"))
    tables = {
        "COMMANDS": (
            ["command", *VERBS],
            [[" ".join(x.words), *_cells(x.places, VERBS)] for x in access().commands],
        ),
        "NETWORK": (
            ["store", "command", *USES.values()],
            [
                [kind, " ".join(x.words) or "all commands", *_cells(x.places, USES)]
                for kind, rows in access().network.items()
                for x in rows
            ],
        ),
    }
    known = {
        "options": _by_verb(access().options),
        "system": [Item("The system", f"Read: {', '.join(access().system)}, and what lies below.")],
    }
    for title in ("DESCRIPTION", SEE_ALSO):
        texts.pop(title)
    for title, blocks in texts.items():
        lines += [f".Sh {title}", *section_lines(blocks, known)]
        lines += table_lines(*tables[title]) if title in tables else []
    return [*lines, f".Sh {SEE_ALSO}", *_see_also(name)]


def _cells(row: Mapping[str, Iterable[str]], columns: Iterable[str]) -> Iterator[str]:
    """Yield the cells of a row of `access.toml`."""
    for column in columns:
        yield ", ".join(row.get(column, ()))


def _by_verb(options: Mapping[str, str]) -> list[Item]:
    """Return the options that name a place or service, grouped by what commands do with it."""
    return [
        Item(verb.capitalize(), ", ".join(x for x, done in options.items() if done == verb))
        for verb in dict.fromkeys(options.values())
    ]


def _members(members: Iterable[Member]) -> Iterator[str]:
    yield ".Bl -tag -width Ds -compact"
    for member in members:
        kind = f"{member.kind} or null" if member.null else member.kind
        yield f".It {escaped(member.path)} Pq {kind}"
        yield from sentence_lines(member.text)
    yield ".El"


def _variables(ctx: click.Context) -> list[Item]:
    """Return the environment variables of options, grouped by the section of the option."""
    found: dict[str, dict[str, None]] = {}
    for command in every_command(ctx):
        for title, options in sections(command.params).items():
            names = {str(option.envvar): None for option in options if option.envvar}
            found.setdefault(title, {}).update(names)
    elsewhere = {name for title, names in found.items() if title != OWN.title for name in names}
    others = [name for name in found.pop(OWN.title) if name not in elsewhere]
    return [
        *(Item(title, ", ".join(names)) for title, names in found.items() if names),
        Item("Others", ", ".join(others)),
    ]


def _group_context() -> click.Context:
    # Without the group's settings, click would make, and keep, a help option without -h.
    return click.Context(cli, info_name="hicachectl", **cli.context_settings)


def _without_pointer(text: str, name: str) -> str:
    """Return a help text without the paragraph that points to the man page of the command."""
    paragraphs = cleandoc(text).split("\n\n")
    own = f"hicachectl-{name}(1) "
    return "\n\n".join(paragraph for paragraph in paragraphs if not paragraph.startswith(own))


def _subcommands(command: click.Command, ctx: click.Context) -> Iterator[str]:
    if not isinstance(command, click.Group):
        return
    yield ".Sh COMMANDS"
    for name, part in command.commands.items():
        inner = click.Context(part, info_name=name, parent=ctx)
        arguments = [p.make_metavar(inner) for p in part.params if isinstance(p, click.Argument)]
        yield f".Ss {' '.join([name, *arguments])}"
        yield from help_text(part.help or "")
        yield from _options(part, inner, without=GLOBAL)  # the group's list has the global options


def _options(
    command: click.Command, ctx: click.Context, *, without: Section | None = None
) -> Iterator[str]:
    """Yield the options by section. Arguments have no list, as the description explains them."""
    for title, options in sections(command.get_params(ctx)).items():
        if without is not None and title == without.title:
            continue
        if title != OWN.title:
            yield f".Ss {title}"
        yield ".Bl -tag -width Ds"
        for option in options:
            record = option.get_help_record(ctx)
            assert record is not None  # no option is hidden
            yield f".It {flag_macros(record[0])}"
            yield from sentence_lines(record[1])
        yield ".El"


def _background(name: str) -> Iterator[str]:
    known = {"kinds": [Item(kind.name, kind.summary) for kind in kinds()]}
    for title, blocks in prose(f"hicachectl-{name}").items():
        if title != SEE_ALSO:
            yield f".Sh {title}"
            yield from section_lines(blocks, known)


def _see_also(page: str) -> Iterator[str]:
    """Yield references to related pages.

    hicachectl(1) names the pages of all commands. Every other page names hicachectl(1).
    """
    commands = [f"hicachectl-{name}(1)" for name in sorted(COMMANDS)]
    pages = commands if page == "hicachectl" else ["hicachectl(1)"]
    for block in prose(page).get(SEE_ALSO, ()):
        assert isinstance(block, str)
        pages += block.replace("\n", " ").split(", ")
    for name in pages:
        title, section = name.removesuffix(")").split("(")
        yield f".Xr {title} {section}{' ,' if name != pages[-1] else ''}"


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    write_web_pages(Path(sys.argv[1]))
