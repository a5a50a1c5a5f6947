"""Statuses, the files in a store that describe the ranks of servers with the plug-in.

Each rank has a JSON file in `.hicachectl/status/`. The file names the rank, its process and its
model. It counts the tokens and pages that the rank moved and refused. The rank writes the file
again every `WRITTEN_EVERY_S` seconds, and when the backend is detached. A killed server leaves its
last status.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from hicachectl.formats.documents import parse_json_object, storable
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert

if TYPE_CHECKING:
    from collections.abc import Mapping

STATUS_DIRECTORY = "status"
MAX_STATUSES = 4096  # most statuses in a store, including servers that have ended
MAX_STATUS_BYTES = 64 << 10
WRITTEN_EVERY_S = 10.0
STALE_AFTER_S = 60.0  # a live rank would have written its status several times by then
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,199}\.json")
_UNSAFE = re.compile(r"[^A-Za-z0-9]+")
_LONGEST_HOST = 63
_FORM = 1
_MAX_VALUES = 1000
_LONGEST_TEXT = 4096

# Names of counts. A `Stage` has a count of tokens. The other names are reasons, with counts of
# pages, files or operations.
# The names also occur in `PluginStatus`, in the metrics and as titles of `explain`.
Stage = Literal["asked", "found", "restored", "written", "evicted"]
Refused = Literal[
    "damaged",
    "foreign",
    "full",
    "gone",
    "half",
    "new-weights",
    "other-deployment",
    "stale",
    "timeout",
    "uncleared",
    "unnamed-weights",
    "unopened",
    "unranked",
    "unreachable",
    "unreadable",
    "unserved",
    "unstamped",
    "unwritable",
]
Noted = Literal["unranked"]
Removed = Literal["damaged", "stale"]
Failed = Literal[
    "error",
    "unclosed",
    "uncleared",
    "unevicted",
    "unopened",
    "unreckoned",
    "unreported",
    "unswept",
]
COUNTED: Mapping[str, tuple[str, ...]] = {
    "tokens": get_args(Stage),
    "refused": get_args(Refused),
    "noted": get_args(Noted),
    "removed": get_args(Removed),
    "failed": get_args(Failed),
}
# Metrics by kind. A metric of tokens has the stage in its name.
_METRICS = {
    "tokens": "hicachectl_plugin_{}_tokens_total",
    "refused": "hicachectl_plugin_refused_pages_total",
    "noted": "hicachectl_plugin_noted_pages_total",
    "removed": "hicachectl_plugin_removed_files_total",
    "failed": "hicachectl_plugin_failed_operations_total",
}

_Text = Annotated[str, Meta(max_length=_LONGEST_TEXT)]
_Reason = Annotated[str, Meta(pattern=r"^[a-z][a-z-]{0,63}$")]
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
_Counts = Annotated[dict[_Reason, _Count], Meta(max_length=200)]


class PluginStatus(Struct, frozen=True, kw_only=True):
    """A rank of a server, its attached plug-in, and its counts.

    release: version of hicachectl.
    host: name of the host, as the server sees it.
    pid: process of the rank.
    pid_namespace: inode of /proc/self/ns/pid, for the namespace in which `pid` is valid.
    started_ns: start of the process, Unix ns.
    tp_rank, tp_size, pp_rank, pp_size, cp_rank, cp_size, dp_rank: coordinates of the rank in
        SGLang's storage configuration; tp counts the ranks of attention.
    model: served model name.
    weights, draft_weights: names of the weights; empty if this host could not name them.
    page_size: tokens of a page.
    dtype: dtype of the kv pool; empty before that pool is registered.
    layout: memory layout of the kv pool; empty before that pool is registered.
    pools: names of the served pools.
    stores: URLs of the stores without secrets; the first store has this file.
    attached_ns: time of the attachment, Unix ns.
    written_ns: time of writing this file, Unix ns.
    closed: whether the backend was detached, or the server shut down.
    excluded: texts, by reason, that say why all pages are misses until the next attach.
    tokens: tokens since the process first used these stores, by stage (`Stage`).
    refused: pages of a pool that were misses or were not written, by reason.
    noted: pages of a pool that were served in spite of a reason, by reason.
    removed: files that were removed, by reason.
    failed: operations other than reads and writes that failed, by reason.
    """

    release: _Text
    host: _Text
    pid: Annotated[int, Meta(ge=0, lt=1 << 32)]
    pid_namespace: _Count = 0
    started_ns: _Count = 0
    tp_rank: _Rank = 0
    tp_size: _Rank = 1
    pp_rank: _Rank = 0
    pp_size: _Rank = 1
    cp_rank: _Rank = 0
    cp_size: _Rank = 1
    dp_rank: _Rank = 0
    model: _Text = ""
    weights: _Text = ""
    draft_weights: _Text = ""
    page_size: Annotated[int, Meta(ge=1, lt=1 << 32)] = 1
    dtype: _Text = ""
    layout: _Text = ""
    pools: Annotated[tuple[_Text, ...], Meta(max_length=100)] = ()
    stores: Annotated[tuple[_Text, ...], Meta(max_length=100)] = ()
    attached_ns: _Count = 0
    written_ns: _Count
    closed: bool = False
    excluded: Annotated[dict[_Reason, _Text], Meta(max_length=200)] = field(default_factory=dict)
    tokens: _Counts = field(default_factory=dict)
    refused: _Counts = field(default_factory=dict)
    noted: _Counts = field(default_factory=dict)
    removed: _Counts = field(default_factory=dict)
    failed: _Counts = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name of the status's file. Only this process uses this name."""
        host = _UNSAFE.sub("-", self.host).strip("-")[:_LONGEST_HOST] or "host"
        process = f"{self.host} {self.pid_namespace} {self.started_ns}".encode(errors="replace")
        short = hashlib.blake2b(process, digest_size=4).hexdigest()
        rank = f"tp{self.tp_rank}-pp{self.pp_rank}-cp{self.cp_rank}-dp{self.dp_rank}"
        return f"{host}-{self.pid}-{rank}-{short}.json"

    def is_old(self, now_ns: int) -> bool:
        """Return whether a rank that still serves would have written its file again.

        now_ns: Unix ns.
        """
        return now_ns - self.written_ns > STALE_AFTER_S * 1e9


def metric_of(kind: str, name: str) -> str:
    """Return the metric that counts a name of `COUNTED`.

    Metrics of other kinds than tokens have the name in their label `reason`.
    """
    return _METRICS[kind].format(name)


def is_status_name(name: str) -> bool:
    """Return whether a file name has the form of names that `PluginStatus.name` returns."""
    return _NAME.fullmatch(name) is not None


def dump_status(status: PluginStatus) -> bytes:
    """Return a status as JSON; inverse of `parse_status`. Texts that are too long are cut."""
    document = {"form": _FORM, **{name: _cut(value) for name, value in asdict(status).items()}}
    return json.dumps(document, indent=1).encode() + b"\n"


def _cut(value: object) -> object:
    if isinstance(value, str):
        return storable(value)[:_LONGEST_TEXT]
    if isinstance(value, dict):
        return {name: _cut(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cut(inner) for inner in value]
    return value


def parse_status(data: bytes, source: str) -> PluginStatus:
    """Parse an untrusted status. source: names the status in messages. Raises FormatError."""
    if len(data) > MAX_STATUS_BYTES:
        raise FormatError(
            f"{source}: larger than {MAX_STATUS_BYTES} bytes, so not a status; remove the file"
        )
    table = parse_json_object(data, source, max_values=_MAX_VALUES)
    form = table.pop("form", None)
    if type(form) is int and form > _FORM:
        raise FormatError(
            f"{source}: has form {form}, but this version reads form {_FORM}; use a newer "
            "hicachectl"
        )
    if form != _FORM:
        raise FormatError(f"{source}: states no form, so it is not a status; remove the file")
    return convert(table, PluginStatus, source)
