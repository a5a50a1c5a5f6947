"""`hicachectl pack`: describe and repair pack files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct, to_builtins

from hicachectl.cli.command import Group
from hicachectl.cli.exit_codes import FINDINGS
from hicachectl.cli.options import format_option
from hicachectl.cli.parameters import argument, own_option
from hicachectl.cli.session import bytes_progress, config_of, remark
from hicachectl.cli.values import FILE
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class InfoDocument(Struct, kw_only=True):
    """Document of `pack info`."""

    pack: str
    grammar: str
    model: str | None
    written_by: str
    objects: int
    bytes: int
    stored_bytes: int
    file_bytes: int
    planes: dict[str, int]


class RepairDocument(Struct, kw_only=True):
    """Document of `pack repair`."""

    pack: str
    objects: int
    bytes: int
    damaged: int
    unfinished: int
    damaged_bytes: int
    cut_bytes: int
    was_valid: bool
    dry_run: bool


_format_option = format_option(("table", "json"))


@click.group("pack", cls=Group)
def command() -> None:
    """Describe pack files, and repair truncated ones.

    A pack is one file with the objects of a store; see hcpack(5). Most other commands accept a pack
    as a store: /path/archive.hcpack, or pack:///path/archive.

    Examples:
      hicachectl pack info archive.hcpack
      hicachectl pack repair archive.hcpack --dry-run
      hicachectl pack repair archive.hcpack
      hicachectl pack repair damaged.hcpack -o saved.hcpack
    """


@command.command("info")
@argument("pack", metavar="FILE")
@_format_option
@click.pass_context
def info(ctx: click.Context, /, pack: str, output_format: str) -> None:
    """Describe a pack file.

    Print the number of objects, their bytes before and after compression, the form of the keys, and
    the model of the profile.
    """
    from hicachectl.backends.pack.store import PackStore

    with PackStore(_path(ctx, pack)) as store:
        document = to_builtins(InfoDocument(pack=store.path, **store.summary()))
    _write(document, output_format, _described(document))


@command.command("repair")
@argument("pack", metavar="FILE")
@own_option(
    "-o",
    "--output",
    type=FILE,
    metavar="NEW",
    help="Write the saved objects to a new pack, and do not change FILE.",
)
@own_option("--dry-run", is_flag=True, help="Show what can be saved; change nothing.")
@_format_option
@click.pass_context
def repair(
    ctx: click.Context, /, pack: str, output: Path | None, dry_run: bool, output_format: str
) -> None:
    """Repair a truncated pack file.

    After the repair, FILE is a valid pack of all its whole objects. A writer that was killed leaves
    a pack without its end. repair reads record after record, cuts off everything after the last
    whole record, and writes a new index. Whole records after a damaged part are saved, too; the
    exit status is then 4. While another process writes to the pack, repair does nothing.
    """
    from hicachectl.backends.pack import recovery

    path = _path(ctx, pack)
    with bytes_progress(ctx, "reading") as advance:
        found = recovery.repair(
            path, output=None if output is None else str(output), dry_run=dry_run, on_bytes=advance
        )
    document = to_builtins(
        RepairDocument(
            pack=path,
            objects=found.objects,
            bytes=found.nbytes,
            damaged=found.damaged,
            unfinished=int(found.unfinished),
            damaged_bytes=found.damaged_bytes,
            cut_bytes=found.cut_bytes,
            was_valid=found.was_valid,
            dry_run=dry_run,
        )
    )
    _write(document, output_format, _repaired(document))
    if dry_run and not found.was_valid:
        remark(ctx, "Dry run: nothing was changed")
    if found.damaged or found.damaged_bytes:
        ctx.exit(FINDINGS)


def _path(ctx: click.Context, pack: str) -> str:
    """Return the path from a pack's path or URL."""
    from hicachectl.backends.urls import parse_url

    url = parse_url(pack, config_of(ctx))
    if not (url.kind.archive or url.kind.directory):
        raise click.UsageError(f"{pack}: this is a {url.scheme} store; give the file of a pack")
    return url.path


def _write(document: dict[str, Any], output_format: str, lines: Iterator[str]) -> None:
    from hicachectl.cli.output import document_text, write_text

    text = document_text(document) if output_format == "json" else "\n".join(lines) + "\n"
    write_text(text, None)


def _described(document: dict[str, Any]) -> Iterator[str]:
    from hicachectl.text.terminal import escape_controls

    stored = document["stored_bytes"]
    ratio = f" ({document['bytes'] / stored:.2f}x)" if stored else ""
    yield f"objects   {document['objects']}, {human_size(document['bytes'])}"
    yield f"stored    {human_size(stored)}{ratio}, file {human_size(document['file_bytes'])}"
    for planes, count in document["planes"].items():
        yield f"          {count} as {counted(int(planes), 'byte plane')}"
    yield f"keys      {document['grammar']}"
    yield f"profile   {escape_controls(document['model'] or 'none')}"
    yield f"version   hicachectl {escape_controls(document['written_by'])}"


def _repaired(document: dict[str, Any]) -> Iterator[str]:

    saved = f"{counted(document['objects'], 'object')}, {human_size(document['bytes'])}"
    if document["was_valid"]:
        yield f"{saved}: the pack is valid; nothing to repair"
        return
    lost = []
    if document["damaged"]:
        lost.append(f"{counted(document['damaged'], 'damaged object')} left out")
    if document["damaged_bytes"]:
        lost.append(f"{human_size(document['damaged_bytes'])} of damaged data skipped")
    if document["unfinished"]:
        lost.append("1 unfinished object lost")
    if document["cut_bytes"]:
        lost.append(f"{human_size(document['cut_bytes'])} after the last whole object cut off")
    yield f"{saved} saved" + "".join(f", {text}" for text in lost)
