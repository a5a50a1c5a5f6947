"""Build man/*.1 from the click commands: `python -m hicachectl.cli.manpages DIRECTORY`."""

from __future__ import annotations

import re
import sys
import textwrap
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hicachectl.cli.group import COMMANDS, cli
from hicachectl.formats.kinds import kinds

if TYPE_CHECKING:
    from collections.abc import Iterator

RELEASE_DATE = "November 20, 2026"  # of the version in hicachectl/__init__.py

_WIDTH = 70  # of source lines, before escapes

_EXIT_STATUS = (
    ("0", "Done, and clean. In a cache, objects that vanished meanwhile are no error."),
    ("1", "A bug of hicachectl: please report the traceback."),
    ("2", "Usage or bad input: an option, a profile, a config, a URL."),
    ("3", "The store, server or device cannot be reached, refuses or fails."),
    ("4", "Finished, with findings at the level asked for, or with failed objects."),
    ("130", "Interrupted (SIGINT)."),
    ("143", "Terminated (SIGTERM)."),
)
_STORES = (
    ("/dir, file:///dir", "The directory of SGLang's file backend (HiCacheFile)."),
    ("file:", "The directory that SGLang itself would use; see ENVIRONMENT."),
    (
        "mooncake://HOST:50051?admin=HOST:9003&protocol=tcp",
        "A Mooncake cluster, by its master; see MOONCAKE.",
    ),
    ("mooncake:", "The cluster that SGLang's configuration names; see ENVIRONMENT."),
    (
        "hf3fs:///path/prefix?server=http://HOST:18000&snapshot=FILE",
        "A 3FS store, by the prefix of its page files; see 3FS.",
    ),
    ("hf3fs:", "The 3FS store of SGLang's configuration; see ENVIRONMENT."),
    ("pack:///path/archive.hcpack", "A pack: the objects of a store in one file; see hcpack(5)."),
    ("NAME:", "A store of the config file."),
)
_HF3FS = (
    "Pages lie in preallocated files, prefix.RANK.bin, and a metadata server knows which key has "
    "which page. It lists nothing: what is listed comes from the snapshot that it saves "
    "(--persistence-path), and is as old; with server= keys that are gone since are left out. Only "
    "a profile tells how long pages are. Looking asks nothing that the server counts as use, but "
    "where a page looks damaged: whether it was merely reused is asked for, and said.",
    "Each pool has tables of its own, and evicts by itself: objects whose kv is gone "
    "(orphan-sidecar) are always there, and only noted (info). A page that looks lost "
    "(page-leaked) while a server is live is reported when three snapshots miss it: the third is "
    "waited for, two minutes at most.",
    "Pages that are freed are reused at once, so that deleting under live readers can tear what "
    "they read: repair when few read. All keys that share a page go in one call. Without server= a "
    "repair writes a snapshot beside the old one, FILE.repaired, for the metadata server to start "
    "from. Pages in no list are released with --writers-stopped, which has to be true: the "
    "server would hand a page out twice.",
    "Where 3FS's hf3fs_fuse package is installed and the prefix lies on a 3FS mount, pages are "
    "read through it (USRBIO), else as files. The former has not been tested on a real 3FS.",
)
_HF3FS_PARAMETERS = (
    ("server=URL", "The metadata server."),
    ("snapshot=FILE", "Its persistence file."),
    ("config=FILE", "SGLang's JSON config, for the prefix, file_size and server."),
    (
        "file_size=SIZE",
        "Bytes of each file, as SGLang was told; default: the size of the largest. It tells a file "
        "that was cut off from a profile of other page sizes.",
    ),
    ("ranks=N", "Only ranks below N."),
)
_MOONCAKE = (
    "hicachectl is a guest of the cluster: it gives no memory to it. Listing, and the checks "
    "names, groups and sizes, go over the master's HTTP service, which extends no lease and "
    "changes no order of eviction. Reading objects grants each a lease: for some seconds it is "
    "not evicted and cannot be removed, and it is evicted later than others. Removals wait for "
    "leases to end (--lease-wait) and are never forced.",
    "The listing is of the tenant default, and leaves out objects without a readable replica. "
    "A key with a comma (the side pools of split heads) can only be asked for its size with "
    "--allow-leases. The store keeps no times: what is not whole is looked at again after --grace.",
    "An object of an MLA model holds the whole latent row, but SGLang ends its key in _k. ls "
    "--objects and findings therefore show the part k, and no part v is expected. On other stores "
    "the part of such an object is null.",
)
_MOONCAKE_PARAMETERS = (
    ("admin=HOST:PORT", "The master's HTTP service; default: port 9003 of the master's host."),
    ("protocol=NAME", "How objects are transferred: tcp, rdma (the default), ..."),
    ("device=NAME", "Network devices, for rdma."),
    ("metadata=URL", "Metadata service of the transfer engine; default: P2PHANDSHAKE."),
    ("tenant=NAME", "Only default can be listed."),
)
_ENVIRONMENT = (
    ("HICACHECTL_CONFIG", "The config file, where --config is not given."),
    ("HICACHECTL_API_KEY", "Bearer key for --server and --through-server."),
    (
        "XDG_STATE_HOME",
        "Where migrate keeps its journals, in hicachectl/migrations; ~/.local/state when unset. "
        "Where no home can be written to, they lie in hicachectl-UID below TMPDIR, a directory of "
        "the user's alone.",
    ),
    ("NO_COLOR", "When set and not empty, no colours are written."),
    ("SGLANG_HICACHE_HF3FS_CONFIG_PATH", "SGLang's JSON config of 3FS, for hf3fs: alone."),
    (
        "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH",
        "SGLang's JSON config of Mooncake, for what a mooncake: URL leaves out.",
    ),
    (
        "MOONCAKE_MASTER, MOONCAKE_PROTOCOL, MOONCAKE_DEVICE, MOONCAKE_TE_META_DATA_SERVER, "
        "MOONCAKE_MASTER_METRICS_PORT, MOONCAKE_LOCAL_HOSTNAME",
        "The same, as for SGLang, where there is no such config.",
    ),
    (
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
        "The directory of the store file:, as for SGLang; /tmp/hicache when unset.",
    ),
)
_TRUST = (
    "STORE, --quarantine DIR and the parent of --lock FILE may be named through symbolic links. "
    "Below them no link is followed: .hicachectl in a store, the stamps and quarantine in it, and "
    "the lock itself must be regular files and directories. They must belong to the user who runs "
    "hicachectl, to root, to the owner of the store, or to a user that the file system gives new "
    "files to. A store that its group may write to trusts the members of that group. Objects in a "
    "quarantine keep their owner: they may be anyone's.",
    "A command that only reads says what it leaves alone. A command that writes changes nothing "
    "and ends with status 3.",
    "Objects in a quarantine that no record names are left alone, and are named.",
    "New files are no more readable than what they are made from: a copied file keeps the "
    "permissions of its source, less those that the source's directory and the umask take away. "
    "An object made of several, a pack and a 3FS data file are readable by those who may read all "
    "objects read so far. A pack is its owner's alone until it is whole. Directories, stamps, "
    "catalogs and quarantine records are as readable as the directory of the store. Where the "
    "group of a new file is another one, it gets no more than everyone. Root's new objects belong "
    "to the owner of their directory, if that user may read the sources. restore gives back owner "
    "and permissions. Data files of 3FS that are there already keep theirs.",
)
_LOCKS = (
    "The lock of --lock FILE is that of flock(2), as flock(1) takes it. On NFS it is held on all "
    "hosts, if the server has locks (not with the mount options nolock and local_lock=flock). "
    "Earlier versions of hicachectl took POSIX locks (fcntl), which flock does not see on a local "
    "file system: do not run both at once.",
)
_CONFIG_EXAMPLE = ("[stores.prod]", 'url = "file:///mnt/hicache"')
PROFILE_EXAMPLE = """\
model = "Qwen/Qwen3-Next-80B-A3B"   # served model name as given to SGLang
sglang = "0.5.23"                   # decides the key grammar
page_size = 64
layout = "page_first_direct"        # layer_first, page_first, page_head
tp = 2                              # attention TP size, as in the keys
pp = 1                              # with pp_partition = [24, 24]
cp = 1                              # cp_layer_split = true: layers divided
speculative_algorithm = ""          # hash_unit = "bigram" for EAGLE

[[pools]]
name = "kv"                         # the first pool must be kv
kind = "mha"                        # needs dtype, layers, kv_heads, head_dim
dtype = "bfloat16"
layers = [3, 7, 11]                 # model layer numbers, or a count
kv_heads = 2                        # of the whole model, before sharding
head_dim = 256

[[pools]]
name = "mamba"
kind = "mamba"                      # needs temporal, conv or both
layers = [0, 1, 2, 4, 5, 6]
temporal = { shape = [32, 128, 128], dtype = "float32" }
conv = [{ shape = [8192, 3], dtype = "bfloat16", groups = [2048, 2048, 4096] }]
"""
_STATES = (
    (
        "whole",
        "Every object of the page is there. Mamba and SWA states are on some pages only: "
        "all of them, or none, make a page whole.",
    ),
    ("partial", "Some object is missing."),
    ("orphan", "Side objects without the kv object that makes a server look for them."),
    ("unknown", "Nothing says what to expect, since the keys can be read in several ways."),
)


def build(directory: Path) -> None:
    """Write hicachectl.1 and a page for each command."""
    (directory / "hicachectl.1").write_text(main_page(), encoding="utf-8")
    for name in COMMANDS:
        (directory / f"hicachectl-{name}.1").write_text(command_page(name), encoding="utf-8")


def main_page() -> str:
    """Write the page of the program as a whole."""
    ctx = _group_context()
    lines = [
        *_head("hicachectl", "inspect and verify SGLang HiCache L3 stores"),
        ".Nm",
        ".Op Fl vqh",
        ".Op Fl -config Ar FILE",
        ".Ar COMMAND ...",
        *_description(cli.help or ""),
        ".Sh OPTIONS",
        *_options(cli, ctx),
        ".Sh COMMANDS",
        ".Bl -tag -width Ds",
    ]
    for name, entry in COMMANDS.items():
        lines += [f".It Xr hicachectl-{name} 1", _text(entry.summary)]
    lines += [".El", ".Sh STORES", *_list(_STORES)]
    lines += [".Sh MOONCAKE", *_paragraphs(_MOONCAKE)]
    lines += [".Pp", "Parameters of the URL:", *_list(_MOONCAKE_PARAMETERS)]
    lines += [".Sh 3FS", *_paragraphs(_HF3FS)]
    lines += [".Pp", "Parameters of the URL:", *_list(_HF3FS_PARAMETERS)]
    lines += [".Sh TRUST", *_paragraphs(_TRUST), ".Sh LOCKS", *_paragraphs(_LOCKS)]
    lines += [".Sh PAGE STATES", *_list(_STATES)]
    lines += [".Sh ENVIRONMENT", *_list(_ENVIRONMENT)]
    lines += [
        ".Sh FILES",
        ".Bl -tag -width Ds",
        ".It Pa ~/.config/hicachectl/config.toml",
        "Named stores:",
        ".El",
        ".Bd -literal -offset indent",
        *map(_literal, _CONFIG_EXAMPLE),
        ".Ed",
    ]
    lines += [".Sh EXIT STATUS", *_list(_EXIT_STATUS)]
    lines += [".Sh SEE ALSO", *_see_also("hicachectl")]
    return "\n".join(lines) + "\n"


def command_page(name: str) -> str:
    """Write the page of one command, from its click declaration alone."""
    command = cli.get_command(_group_context(), name)
    assert command is not None  # COMMANDS names only commands that exist
    ctx = click.Context(command, info_name=name, parent=_group_context())
    arguments = [p.make_metavar(ctx) for p in command.params if isinstance(p, click.Argument)]
    if isinstance(command, click.Group):
        arguments.append("COMMAND ...")
    summary = COMMANDS[name].summary.rstrip(".")
    lines = [
        *_head(f"hicachectl-{name}", summary[0].lower() + summary[1:]),
        f".Nm hicachectl {name}",
        ".Op Ar OPTIONS",
        *(f".Ar {argument}" for argument in arguments),
        *_description(command.help or ""),
        ".Sh OPTIONS",
        *_options(command, ctx),
        *_subcommands(command, ctx),
        ".Sh EXIT STATUS",
        "As for",
        ".Xr hicachectl 1 .",
        *_examples(command.epilog or ""),
        *(_profile_file() if name == "profile" else ()),
        ".Sh SEE ALSO",
        *_see_also(f"hicachectl-{name}"),
    ]
    return "\n".join(lines) + "\n"


def _group_context() -> click.Context:
    # With its settings, as in a real call: click keeps the help option it first makes.
    return click.Context(cli, info_name="hicachectl", **cli.context_settings)


def _head(name: str, summary: str) -> list[str]:
    return [
        f".Dd {RELEASE_DATE}",
        f".Dt {name.upper()} 1",
        ".Os",
        ".Sh NAME",
        f".Nm {name}",
        f".Nd {_text(summary)}",
        ".Sh SYNOPSIS",
    ]


def _description(text: str) -> list[str]:
    """Help text as paragraphs; a block that click must not rewrap stays as it is."""
    lines = [".Sh DESCRIPTION"]
    for number, paragraph in enumerate(cleandoc(text).split("\n\n")):
        if paragraph.startswith("\b"):
            body = paragraph.removeprefix("\b").strip("\n").splitlines()
            lines += [".Bd -literal -offset indent", *map(_literal, body), ".Ed"]
        else:
            lines += [*([".Pp"] if number and lines[-1] != ".Ed" else []), *_sentences(paragraph)]
    return lines


def _subcommands(command: click.Command, ctx: click.Context) -> Iterator[str]:
    """Write what the commands of a command do, with their options."""
    if not isinstance(command, click.Group):
        return
    yield ".Sh COMMANDS"
    for name, part in command.commands.items():
        inner = click.Context(part, info_name=name, parent=ctx)
        arguments = [p.make_metavar(inner) for p in part.params if isinstance(p, click.Argument)]
        yield f".Ss {' '.join([name, *arguments])}"
        yield from _description(part.help or "")[1:]
        yield from _options(part, inner)


def _options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    yield ".Bl -tag -width Ds"
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None or isinstance(parameter, click.Argument):
            continue  # an argument is in the synopsis and the description
        names, text = record
        yield f".It {_flags(names)}"
        yield from _sentences(text)
    yield ".El"


def _flags(names: str) -> str:
    """`-o, --output FILE` as mdoc flags."""
    *flags, last = names.split(", ")
    last, _, value = last.partition(" ")
    parts = [f"Fl {_escaped(flag[1:])} ," for flag in flags] + [f"Fl {_escaped(last[1:])}"]
    return " ".join([*parts, f"Ar {_escaped(value)}"] if value else parts)


def _examples(epilog: str) -> list[str]:
    lines = [line.strip() for line in epilog.replace("\b", "").strip().splitlines()]
    shown = [line for line in lines if line and line != "Examples:"]
    if not shown:
        return []
    return [".Sh EXAMPLES", ".Bd -literal -offset indent", *map(_literal, shown), ".Ed"]


def _profile_file() -> list[str]:
    return [
        ".Sh PROFILE FILE",
        *_sentences(
            "A profile is TOML, or the same keys as JSON, for the whole model before sharding. "
            "Fields that do not apply are left out."
        ),
        ".Bd -literal -offset indent",
        *map(_literal, PROFILE_EXAMPLE.splitlines()),
        ".Ed",
        ".Pp",
        "What the kinds of pools need:",
        *_list(tuple((kind.name, kind.summary) for kind in kinds())),
        *_sentences(
            "Each pool also takes packed_draft_layers, hit_policy (all_pages or trailing_pages), "
            "trailing_pages and replicated. A profile with inferred = true states only what a "
            "store showed, and is refused where bytes must be understood."
        ),
    ]


def _see_also(page: str) -> list[str]:
    pages = [f"{name} 1" for name in sorted({"hicachectl", *map("hicachectl-{}".format, COMMANDS)})]
    pages = [other for other in pages if other != f"{page} 1"]
    if page in ("hicachectl", "hicachectl-pack"):
        pages.append("hcpack 5")
    return [f".Xr {other} {',' if other != pages[-1] else ''}".rstrip() for other in pages]


def _list(entries: tuple[tuple[str, str], ...]) -> Iterator[str]:
    yield ".Bl -tag -width Ds"
    for term, text in entries:
        yield f".It {_text(term)}"
        yield from _sentences(text)
    yield ".El"


def _paragraphs(texts: tuple[str, ...]) -> Iterator[str]:
    for number, text in enumerate(texts):
        yield from [*([".Pp"] if number else []), *_sentences(text)]


def _sentences(text: str) -> list[str]:
    """One sentence a line, as mdoc wants it."""
    flat = " ".join(text.split())
    sentences = re.split(r"(?<=[.;:])\s+(?=[A-Z])", flat)
    return [_text(line) for sentence in sentences for line in textwrap.wrap(sentence, _WIDTH)]


def _text(line: str) -> str:
    escaped = _escaped(line)
    return rf"\&{escaped}" if escaped[:1] in (".", "'") else escaped


def _literal(line: str) -> str:
    return _text(line.rstrip())


def _escaped(text: str) -> str:
    replacements = (("\\", "\\e"), ("-", "\\-"), ("…", "..."), ('"', "\\(dq"))
    for plain, escape in replacements:
        text = text.replace(plain, escape)
    return text


if __name__ == "__main__":
    build(Path(sys.argv[1]))
