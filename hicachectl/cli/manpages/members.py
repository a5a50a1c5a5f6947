"""Members of the JSON documents that commands print, as hicachectl-output(7) lists them.

A test runs the commands and compares what they print with these lists, in both directions.
"""

from __future__ import annotations

from typing import NamedTuple

INTEGER = "integer"
NUMBER = "number"
TEXT = "text"
BOOLEAN = "boolean"
OBJECT = "object"
ROWS = "list of rows"
TEXTS = "list of texts"
INTEGERS = "list of integers"


class Member(NamedTuple):
    """A member of a document.

    path: its place, with [] for each entry of a list and NAME for each name of an object whose
    names vary. null: what null means; "" if the member is never null. when: the runs whose
    documents have it; "" for all.
    """

    path: str
    kind: str
    text: str
    null: str = ""
    when: str = ""


class Document(NamedTuple):
    """The JSON document of a command.

    rows: the member whose entries are the rows of jsonl, csv, parquet and arrow; "" if these
    formats print one row, or the command does not have them.
    """

    title: str
    rows: str
    members: tuple[Member, ...]
    text: str = ""


def _below(path: str, members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Return members as those of another member."""
    return tuple(member._replace(path=f"{path}.{member.path}") for member in members)


_NO_TIMES = "the store keeps no times"
_NOT_SHOWN = "the keys do not show it"
_UNKNOWN_SIZE = "a size is not known"

_AXES = (("tp", "Attention TP"), ("pp", "PP"), ("cp", "Attention CP"), ("dcp", "DCP"))
_SIZES = tuple(Member(f"{x}_size", INTEGER, f"{name} size.", _NOT_SHOWN) for x, name in _AXES)
_DEPLOYMENT = (
    Member("model", TEXT, "Served model name, or as in the keys."),
    Member("tag", TEXT, 'extra_backend_tag, or "".'),
    *_SIZES,
    Member("page_size", INTEGER, "Tokens of a page.", "not known"),
    Member("layout", TEXT, "Memory layout.", "not known"),
)
_PAGE = Member("page", TEXT, "Page hash: 64 hexadecimal digits.")
_MODEL = Member("model", TEXT, "Model name, as in the keys.", "not in the keys, or ambiguous")
_TAG = Member("tag", TEXT, "extra_backend_tag of Mooncake.", "none")
_NBYTES = Member("nbytes", INTEGER, "Bytes.", _UNKNOWN_SIZE)
_STORE = Member("store", TEXT, "URL of the store, without secrets.")
_BYTES = Member("bytes", INTEGER, "Bytes of these objects.", _UNKNOWN_SIZE)
_SECONDS = Member("seconds", NUMBER, "Duration, in seconds.")
_COMPLETE = Member("complete", BOOLEAN, "False if something ended the run early.")
_LOCKED = Member("stopped_by", TEXT, "lock: another process holds the lock.", "nothing")
_DRY_RUN = Member("dry_run", BOOLEAN, "With --dry-run: the counts are what would be done.")
_PARTS = (
    Member("listed", NUMBER, "Time of the run's listing, in Unix seconds.", when="merge, --ray"),
    Member("parts", INTEGER, "Parts of the run.", when="merge, --ray"),
    Member("missing_parts", INTEGERS, "Parts without a result, by number.", when="merge, --ray"),
)

_GROUP = (
    Member("group", TEXT, "Name of the group among the groups of its page; see hicachectl-ls(1)."),
    _MODEL,
    _TAG,
    *_SIZES,
    Member("state", TEXT, "whole, partial, orphan or unknown; see hicachectl(1)."),
    _NBYTES,
    Member("mtime", NUMBER, "Last write of an object, in Unix seconds.", _NO_TIMES),
    Member("pools", OBJECT, "Objects by pool."),
    Member("pools.NAME.present", INTEGER, "Objects in the store."),
    Member(
        "pools.NAME.expected",
        INTEGER,
        "Objects of a whole page; 0 if the page carries no state of a trailing pool.",
    ),
    Member("missing", TEXTS, "Keys of missing objects."),
)
_OBJECT = (
    Member("key", TEXT, "Key, with .bin in a file store; bytes that are not UTF-8 as \\xNN."),
    _PAGE._replace(null="a foreign object"),
    _MODEL,
    _TAG,
    Member("pool", TEXT, "Pool, such as kv.", "a foreign object, or ambiguous"),
    Member("part", TEXT, "Part, such as k.", "the object holds the whole page of its pool"),
    *(
        Member(f"{axis}_{end}", INTEGER, f"{name} {end}.", _NOT_SHOWN)
        for axis, name in _AXES
        for end in ("rank", "size")
    ),
    Member("layers", TEXT, "Range of layers.", _NOT_SHOWN),
    Member("heads", TEXT, "Range of heads.", _NOT_SHOWN),
    Member("nbytes", INTEGER, "Bytes, without a trailer.", "the store does not tell"),
    Member("mtime", NUMBER, "Last write, in Unix seconds.", _NO_TIMES),
    Member("replicas", INTEGER, "Readable replicas.", "not in Mooncake"),
    Member("offset", INTEGER, "Page index (3FS), or place in the file (pack).", "neither"),
)
_FINDING = (
    Member("code", TEXT, "Finding code; see hicachectl-findings(7)."),
    Member("severity", TEXT, "error, warning or info."),
    _PAGE._replace(null="the finding is about no page"),
    Member("pool", TEXT, "Pool.", "the finding is about no pool"),
    Member("part", TEXT, "Part.", "the object has none"),
    Member("key", TEXT, "Key.", "the finding is about no object"),
    Member("detail", TEXT, "What was found, and what was expected."),
)
_TOTALS = (
    Member("pages", INTEGER, "Pages."),
    Member("objects", INTEGER, "Objects."),
    _NBYTES,
    Member("first_mtime", NUMBER, "First write, in Unix seconds.", _NO_TIMES),
    Member("last_mtime", NUMBER, "Last write, in Unix seconds.", _NO_TIMES),
)
_PROBLEMS = (
    Member("problems", ROWS, "Conflicts and failures, at most 1000 of a run or part."),
    *_below(
        "problems[]",
        (
            _PAGE._replace(null="the problem is about no page"),
            Member("key", TEXT, "Key.", "the problem is about the whole page"),
            Member("detail", TEXT, "What happened, and the next step."),
        ),
    ),
)
_REMOVED = (
    _PAGE._replace(null="an object without a page"),
    _MODEL,
    _TAG,
    Member("objects", INTEGER, "Objects of the group."),
    _NBYTES,
)
_RUN = (
    Member("run", TEXT, "Name of the run."),
    Member("removed", NUMBER, "Begin of the removal, in Unix seconds.", "unknown"),
    Member("store", TEXT, "URL of the store that the pages were in.", "unknown"),
    Member("groups", INTEGER, "Page groups.", "unknown"),
    Member("objects", INTEGER, "Objects.", "unknown"),
    _NBYTES,
    Member("codes", TEXTS, "Findings that caused the removals."),
)
_QUARANTINE = Member("quarantine", TEXT, "Path of the quarantine.")
_RUN_COUNTS = (
    Member("pages", INTEGER, "Page groups in them."),
    Member("objects", INTEGER, "Objects in them."),
    Member("bytes", INTEGER, "Bytes in them."),
)

_ENOUGH = "the chain is usable to its end"
_REQUESTED = (
    "Tokens of the whole pages of the requests, without the last token of each; all tokens of a "
    "request without such a page, none of which can be restored."
)
_UNVALUED = "without --trace and --keep-plan"
_UNCOUNTED = "without --trace"
_UNNAMED = "without --profile, or without --trace and --keep-plan"
_FREE = (
    Member("asked_bytes", INTEGER, "Bytes of --free."),
    Member("bytes", INTEGER, "Bytes of the chosen groups."),
    Member("order", TEXT, "What decides which groups stay: last-use, trace or plan."),
    Member("last_use", NUMBER, "Latest use of a chosen group.", "with --trace or --keep-plan"),
    Member("kept_pages", INTEGER, "Page groups that match and stay."),
    Member("kept_bytes", INTEGER, "Bytes of these groups.", _UNKNOWN_SIZE),
    Member("valued_pages", INTEGER, "Groups that the trace or plan names.", _UNVALUED),
    Member("valued_pages_removed", INTEGER, "Chosen groups among them.", _UNVALUED),
    Member("requested_tokens", INTEGER, "Tokens of the trace's requests.", _UNCOUNTED),
    Member("usable_tokens_before", INTEGER, "Of these, what servers can restore.", _UNCOUNTED),
    Member("usable_tokens_after", INTEGER, "The same after the removal.", _UNCOUNTED),
    Member("unnamed", ROWS, "Deployments that no request names.", _UNNAMED),
    *_below(
        "unnamed[]",
        (
            Member("group", TEXT, "The deployment, as in ls."),
            Member("pages", INTEGER, "Its page groups that match."),
            Member("bytes", INTEGER, "Bytes of these groups.", _UNKNOWN_SIZE),
        ),
    ),
)

DOCUMENTS = (
    Document(
        "ls",
        "pages",
        (Member("pages", ROWS, "Page groups."), *_below("pages[]", (_PAGE, *_GROUP))),
    ),
    Document(
        "ls --objects",
        "objects",
        (Member("objects", ROWS, "Objects."), *_below("objects[]", _OBJECT)),
    ),
    Document(
        "ls --summary",
        "summary",
        (
            Member("summary", ROWS, "Totals by deployment, pool and object size."),
            *_below(
                "summary[]",
                (
                    _MODEL,
                    _TAG,
                    *_SIZES,
                    Member("layout", TEXT, "Memory layout.", "no profile or marker states it"),
                    Member("pool", TEXT, "Pool.", "foreign objects, or ambiguous"),
                    Member(
                        "object_nbytes", INTEGER, "Bytes of each object.", "rare or unknown sizes"
                    ),
                    *_TOTALS,
                ),
            ),
            Member("total", OBJECT, "Totals of the listed objects; each page counts once."),
            *_below("total", _TOTALS),
            Member("free_bytes", INTEGER, "Free space of the store.", "the store does not tell"),
        ),
    ),
    Document(
        "show",
        "objects",
        (
            _STORE,
            _PAGE,
            Member("groups", ROWS, "The groups of the page."),
            *_below("groups[]", _GROUP),
            Member("objects", ROWS, "The objects of the page."),
            *_below(
                "objects[]",
                (
                    *_OBJECT,
                    Member("digest", TEXT, "BLAKE3 digest, in hexadecimal.", "not readable"),
                    Member(
                        "identity",
                        TEXT,
                        "Identity in the trailer, in hexadecimal.",
                        "no trailer",
                        "stores of the plug-in",
                    ),
                    Member(
                        "trailer_digest",
                        TEXT,
                        "Digest in the trailer, after its kind.",
                        "no trailer, or no digest",
                        "stores of the plug-in",
                    ),
                ),
            ),
            Member("contents", ROWS, "Statistics by object, tensor and layer; needs a profile."),
            *_below(
                "contents[]",
                (
                    Member("key", TEXT, "Key of the object."),
                    Member("tensor", TEXT, "Tensor, such as k."),
                    Member("layer", INTEGER, "Layer number of the model."),
                    Member("values", INTEGER, "Number of values."),
                    Member("minimum", NUMBER, "Smallest finite value.", "no finite value"),
                    Member("maximum", NUMBER, "Largest finite value.", "no finite value"),
                    Member("mean_magnitude", NUMBER, "Mean of the magnitudes.", "no finite value"),
                    Member("nan", INTEGER, "Number of NaN."),
                    Member("inf", INTEGER, "Number of infinities."),
                    Member("zero", INTEGER, "Number of zeros."),
                ),
            ),
            Member("findings", ROWS, "Findings about the page."),
            *_below("findings[]", _FINDING),
            *(
                member._replace(when="stores of the plug-in")
                for member in (
                    Member("identities", OBJECT, "What the markers know, by identity."),
                    *_below(
                        "identities.NAME",
                        (
                            Member("model", TEXT, "Model name, as in the keys."),
                            Member("weights", TEXT, "Name of the weights."),
                            Member("draft_weights", TEXT, 'Name of the draft\'s weights, or "".'),
                            Member("pool", TEXT, "Pool."),
                            Member("part", TEXT, "Part.", "the pool has no parts"),
                            Member("dtype", TEXT, "Dtypes of the tensors, joined by +."),
                            Member("layout", TEXT, "Memory layout."),
                            Member("page_size", INTEGER, "Tokens of a page."),
                            Member("layer_bytes", INTEGER, "Bytes of a layer of an object."),
                            Member("pp_partition", TEXT, 'Layers of each stage, or "".'),
                        ),
                    ),
                )
            ),
        ),
    ),
    Document(
        "verify",
        "findings",
        (
            _STORE,
            Member(
                "profile",
                TEXT,
                'Model of the profile, or "inferred".',
                "another process holds the lock",
            ),
            Member("objects", INTEGER, "Objects listed."),
            Member("pages", INTEGER, "Pages listed."),
            _BYTES,
            _SECONDS,
            _COMPLETE,
            Member("stopped_by", TEXT, "deadline (--time-limit) or lock.", "nothing"),
            Member("gone", INTEGER, "Objects that vanished during the run."),
            Member("in_flight", INTEGER, "Page groups not judged, because they are new."),
            Member("sampled", INTEGER, "Pages chosen to be read."),
            Member("objects_read", INTEGER, "Objects read, including failed reads."),
            Member("bytes_read", INTEGER, "Bytes of the objects read whole."),
            Member("unranked", INTEGER, "Objects read whole whose trailers name no rank."),
            Member(
                "device",
                TEXT,
                "cpu, or the GPUs, joined by commas.",
                "another process holds the lock",
            ),
            Member("repaired", INTEGER, "Page groups removed by --repair."),
            Member("quarantined", INTEGER, "Objects moved to the quarantine."),
            Member("checks", TEXTS, "Check groups that ran."),
            Member("skipped_checks", TEXTS, "Checks, or parts of checks, that did not run."),
            Member("findings", ROWS, "The findings."),
            *_below("findings[]", _FINDING),
            Member("counts", OBJECT, "Number of findings by code."),
            Member("counts.NAME", INTEGER, "Number of findings of a code."),
            _DRY_RUN._replace(when="--repair"),
            *(
                member._replace(when="--repair")
                for member in (
                    Member(
                        "repair_refused",
                        ROWS,
                        "Why nothing was repaired: a finding that most of the newest pages have. "
                        "Empty if the repair was not refused; a row for each part that refused.",
                    ),
                    *_below(
                        "repair_refused[]",
                        (
                            Member("code", TEXT, "Code of the finding."),
                            Member("detail", TEXT, 'Both sizes of a wrong size, else "".'),
                            Member("newest", INTEGER, "Newest pages judged."),
                            Member("newest_affected", INTEGER, "Of these, pages with the finding."),
                            Member("pages", INTEGER, "All pages judged."),
                            Member("affected", INTEGER, "Of these, pages with the finding."),
                            Member(
                                "since",
                                NUMBER,
                                "Unix seconds, from when on at least half of the pages have it.",
                                _NO_TIMES,
                            ),
                            Member("part", INTEGER, "Number of the part.", "one process"),
                        ),
                    ),
                )
            ),
            *_PARTS,
        ),
    ),
    Document(
        "hits",
        "chains",
        (
            Member("chains", ROWS, "A chain for each request."),
            *_below(
                "chains[]",
                (
                    Member("chain", INTEGER, "Number of the request, from 0."),
                    Member("tokens", INTEGER, "Tokens of the request.", "--pages"),
                    Member("kv_pages", INTEGER, "Pages whose kv is there, from the start."),
                    Member("usable_pages", INTEGER, "Pages that servers can restore."),
                    Member(
                        "usable_tokens", INTEGER, "Tokens of these pages.", "page size not known"
                    ),
                    Member(
                        "served_tokens",
                        INTEGER,
                        "These tokens, or 0 if they are below the servers' prefetch threshold.",
                        "page size not known",
                    ),
                    Member(
                        "stopped_by",
                        OBJECT,
                        "First object that servers lack, or the prefetch threshold.",
                        "the chain is served to its end",
                    ),
                    *_below(
                        "stopped_by",
                        (
                            _PAGE._replace(when=_ENOUGH),
                            Member("pool", TEXT, "Pool.", _ENOUGH),
                            Member("part", TEXT, "Part.", "the object has none"),
                            Member("shard", OBJECT, "Ranks and sizes.", "the store has no pages"),
                            *_below(
                                "shard",
                                (
                                    *(
                                        Member(f"{x}_{end}", INTEGER, f"{name} {end}.")
                                        for x, name in _AXES
                                        for end in ("rank", "size")
                                    ),
                                    Member("layers", TEXT, "Range of layers."),
                                    Member("heads", TEXT, "Range of heads."),
                                ),
                            ),
                            Member("key", TEXT, "Key.", "the store has no pages"),
                            Member(
                                "exists_at",
                                TEXT,
                                "Another deployment that has the page, such as tp 4.",
                                "none has it",
                            ),
                            Member(
                                "reason",
                                TEXT,
                                "below_threshold: the usable tokens are fewer than the servers' "
                                "prefetch threshold, so servers fetch none of them.",
                                "they are enough, or none",
                            ),
                        ),
                    ),
                ),
            ),
            Member(
                "deployment", OBJECT, "The servers that were measured.", "the store has no pages"
            ),
            *_below("deployment", _DEPLOYMENT),
            Member(
                "requested_tokens",
                INTEGER,
                _REQUESTED,
                "page size not known",
            ),
            Member(
                "usable_tokens",
                INTEGER,
                "Of these, tokens that servers can restore.",
                "page size not known",
            ),
            Member(
                "served_tokens",
                INTEGER,
                "Of these, tokens that servers fetch; --min-usable counts them.",
                "page size not known",
            ),
            Member("usable_share", NUMBER, "Share of the usable ones.", "nothing is requested"),
            Member(
                "elsewhere",
                ROWS,
                "Other deployments that have pages which the measured servers cannot restore.",
            ),
            *_below(
                "elsewhere[]",
                (
                    Member("place", TEXT, "What differs from the measured one, such as tp 4."),
                    Member("pages", INTEGER, "Such pages."),
                    Member("deployment", OBJECT, "The deployment."),
                    *_below("deployment", _DEPLOYMENT),
                ),
            ),
        ),
        "The members of shard that the key does not show are left out.",
    ),
    Document(
        "migrate",
        "problems",
        (
            Member("source", TEXT, "URL of SRC, without secrets."),
            Member("destination", TEXT, "URL of DST, without secrets."),
            Member("pages", INTEGER, "Page groups copied."),
            Member("objects", INTEGER, "Objects copied."),
            Member("bytes", INTEGER, "Bytes copied."),
            Member("skipped", INTEGER, "Page groups that DST already had."),
            Member(
                "left_out",
                INTEGER,
                "Page groups that match the filters and are not copied, such as those that are not "
                "whole; stderr says why.",
            ),
            Member("gone", INTEGER, "Page groups that vanished from SRC."),
            Member("conflicts", INTEGER, "Page groups with other objects in DST."),
            Member("failed", INTEGER, "Page groups that failed."),
            Member("moved", INTEGER, "Page groups removed from SRC by --move."),
            Member(
                "left_in_source",
                INTEGER,
                "Page groups that are not whole in SRC, and that --move left there.",
            ),
            _SECONDS,
            Member("resumed", INTEGER, "Always 0."),
            _COMPLETE,
            Member("stopped_by", TEXT, "destination full, or lock.", "nothing"),
            *_PROBLEMS,
            Member("estimated_seconds", NUMBER, "Always null.", "always", "--dry-run"),
            *_PARTS,
        ),
        "With --dry-run, the counts are what would be done.",
    ),
    Document(
        "prewarm",
        "",
        (
            Member("destination", TEXT, "URL of DST, without secrets."),
            Member("source", TEXT, "URL of --from, without secrets.", "no --from"),
            Member("requested_pages", INTEGER, "Pages of the requests."),
            Member("already_there", INTEGER, "Requested pages that DST already had."),
            Member("copied_pages", INTEGER, "Pages copied."),
            Member("bytes", INTEGER, "Bytes copied."),
            Member("missing_pages", INTEGER, "Requested pages that the source does not have."),
            Member("usable_tokens", INTEGER, "Requested tokens that servers can restore from DST."),
            Member(
                "served_tokens",
                INTEGER,
                "Of these, tokens that servers fetch: none of a request with fewer than their "
                "prefetch threshold. --min-usable counts them.",
                "prefixes not known (--all, --pages)",
            ),
            Member(
                "requested_tokens",
                INTEGER,
                _REQUESTED,
            ),
            Member(
                "deployment",
                OBJECT,
                "The servers for which usable tokens are counted.",
                "not counted",
            ),
            *_below(
                "deployment",
                (
                    Member("model", TEXT, "Served model name."),
                    Member("tag", TEXT, 'extra_backend_tag, or "".'),
                    *(Member(f"{x}_size", INTEGER, f"{name} size.") for x, name in _AXES),
                    Member("page_size", INTEGER, "Tokens of a page."),
                    Member("layout", TEXT, "Memory layout."),
                ),
            ),
            Member("not_pinned", INTEGER, "Pages that --pin could not pin."),
            Member("gone", INTEGER, "Pages that vanished from the source."),
            Member("failed", INTEGER, "Pages that failed, or have other objects in DST."),
            _SECONDS,
            _COMPLETE,
            Member(
                "stopped_by",
                TEXT,
                "budget, deadline, destination full, destination evicts, interrupted, terminated "
                "or lock.",
                "nothing",
            ),
            *_PROBLEMS,
            *(
                member._replace(when="--dry-run")
                for member in (
                    Member("plan", ROWS, "Pages to copy, the most valuable first."),
                    *_below(
                        "plan[]",
                        (
                            _PAGE,
                            Member("parent", TEXT, "Page before it in the prefix.", "none"),
                            Member("depth", INTEGER, "Pages before it in the prefix."),
                            Member("bytes", INTEGER, "Bytes of the page.", _UNKNOWN_SIZE),
                        ),
                    ),
                )
            ),
            *(
                member._replace(when="--through-server")
                for member in (
                    Member("pulled", ROWS, "The servers that loaded pages."),
                    *_below(
                        "pulled[]",
                        (
                            Member("server", TEXT, "URL of the server."),
                            Member("requests", ROWS, "Requests that were sent."),
                            *_below(
                                "requests[]",
                                (
                                    Member("request", INTEGER, "Number of the request, from 0."),
                                    Member("dp_rank", INTEGER, "DP rank.", "one rank"),
                                    Member("tokens", INTEGER, "Tokens that the store has."),
                                    Member(
                                        "cached_tokens", INTEGER, "Tokens that the server restored."
                                    ),
                                    Member(
                                        "cached_tokens_details",
                                        OBJECT,
                                        "Restored tokens by tier, as the server says.",
                                        "the server does not say",
                                    ),
                                    Member("cached_tokens_details.NAME", INTEGER, "Tokens."),
                                    Member("error", TEXT, "Why the request failed.", "it did not"),
                                ),
                            ),
                            Member("failed", INTEGER, "Requests that failed."),
                            Member("cached_tokens", INTEGER, "Tokens that the server restored."),
                            Member("complete", BOOLEAN, "Whether all prefixes were requested."),
                            Member("error", TEXT, "Why the server was given up.", "it was not"),
                        ),
                    ),
                )
            ),
            *_PARTS,
        ),
        "Formats other than json print one row, without problems and pulled, and with deployment "
        "as text; with --dry-run, they print the rows of plan.",
    ),
    Document(
        "rm",
        "groups",
        (
            _STORE,
            Member("pages", INTEGER, "Page groups removed."),
            Member("objects", INTEGER, "Objects removed."),
            _BYTES,
            Member("gone", INTEGER, "Objects that had vanished before."),
            Member("kept", INTEGER, "Page groups left, because a server wrote to them meanwhile."),
            Member(
                "in_flight",
                INTEGER,
                "Page groups left, because they are not whole and younger than --grace.",
            ),
            Member("failed", INTEGER, "Objects that could not be removed."),
            Member("remaining", INTEGER, "Page groups that should be gone and are not."),
            _SECONDS,
            _COMPLETE,
            _LOCKED,
            _DRY_RUN,
            Member("free", OBJECT, "What is lost and kept.", "without --free"),
            *_below("free", _FREE),
            Member("failures", ROWS, "What could not be removed."),
            *_below(
                "failures[]",
                (Member("key", TEXT, "Key or path."), Member("detail", TEXT, "What happened.")),
            ),
            Member("groups", ROWS, "The groups chosen."),
            *_below(
                "groups[]",
                (
                    *_REMOVED,
                    Member(
                        "state",
                        TEXT,
                        "removed, would-remove, gone, kept, in-flight (a server writes it again) "
                        "or failed.",
                    ),
                    Member("key", TEXT, "Name of the file.", when="--temporaries"),
                ),
            ),
        ),
    ),
    Document(
        "restore",
        "groups",
        (
            _STORE,
            _QUARANTINE,
            Member("pages", INTEGER, "Page groups restored."),
            Member("objects", INTEGER, "Objects restored."),
            _BYTES,
            Member("gone", INTEGER, "Objects that vanished from the quarantine meanwhile."),
            Member("conflicts", INTEGER, "Page groups with another object in the store."),
            Member("failed", INTEGER, "Page groups that failed."),
            _SECONDS,
            _COMPLETE,
            _LOCKED,
            _DRY_RUN,
            Member("groups", ROWS, "The groups chosen."),
            *_below(
                "groups[]",
                (
                    *_REMOVED,
                    Member("codes", TEXTS, "Findings that caused the removal."),
                    Member("state", TEXT, "restored, would-restore, conflict or failed."),
                    Member("detail", TEXT, "Why the group was not restored.", "it was"),
                ),
            ),
        ),
    ),
    Document(
        "quarantine list",
        "runs",
        (
            _QUARANTINE,
            Member("count", INTEGER, "Runs."),
            *_RUN_COUNTS,
            Member("runs", ROWS, "The runs, oldest first."),
            *_below(
                "runs[]",
                (
                    *_RUN,
                    Member(
                        "state",
                        TEXT,
                        "kept, half-purged, busy, earlier-form or unreadable.",
                    ),
                ),
            ),
        ),
    ),
    Document(
        "quarantine purge",
        "runs",
        (
            _QUARANTINE,
            Member("count", INTEGER, "Runs deleted."),
            *_RUN_COUNTS,
            Member("failed", INTEGER, "Runs that could not be deleted."),
            _COMPLETE,
            _LOCKED,
            _DRY_RUN,
            Member("runs", ROWS, "The runs that are old enough."),
            *_below(
                "runs[]",
                (
                    *_RUN,
                    Member("state", TEXT, "purged, would-purge, failed, busy or earlier-form."),
                ),
            ),
        ),
    ),
    Document(
        "pack info",
        "",
        (
            Member("pack", TEXT, "Path of the pack."),
            Member("grammar", TEXT, "Form of the keys: file, mooncake, hf3fs, ..."),
            Member("model", TEXT, "Model of the recorded profile.", "no profile recorded"),
            Member("written_by", TEXT, "Version of hicachectl that wrote the pack."),
            Member("objects", INTEGER, "Objects."),
            Member("bytes", INTEGER, "Bytes of the objects."),
            Member("stored_bytes", INTEGER, "Their bytes after compression."),
            Member("file_bytes", INTEGER, "Bytes of the file."),
            Member("planes", OBJECT, "Number of objects by the number of byte planes."),
            Member("planes.NAME", INTEGER, "Objects; see hcpack(5)."),
        ),
    ),
    Document(
        "pack repair",
        "",
        (
            Member("pack", TEXT, "Path of the pack."),
            Member("objects", INTEGER, "Objects saved."),
            Member("bytes", INTEGER, "Bytes of these objects."),
            Member("damaged", INTEGER, "Damaged objects left out."),
            Member("unfinished", INTEGER, "1 if an object was not written to its end, else 0."),
            Member("damaged_bytes", INTEGER, "Bytes that were skipped."),
            Member("cut_bytes", INTEGER, "Bytes cut off after the last whole object."),
            Member("was_valid", BOOLEAN, "Whether there was nothing to repair."),
            _DRY_RUN,
        ),
    ),
    Document(
        "explain",
        "codes",
        (
            Member("codes", ROWS, "The codes."),
            *_below(
                "codes[]",
                (
                    Member("code", TEXT, "Finding code."),
                    Member("severity", TEXT, "Severity."),
                    Member("exceptions", TEXT, "Other severities, and when.", "none"),
                    Member("meaning", TEXT, "What is wrong."),
                    Member("effect", TEXT, "What a server does with such an object."),
                    Member("remedy", TEXT, "How to mend it."),
                    Member("cost", TEXT, "What that costs.", "nothing"),
                    Member("command", TEXT, "The command that mends it.", "there is none"),
                ),
            ),
        ),
    ),
)
PLAN = (
    _PAGE,
    Member("parent", TEXT, "Page before it in the prefix.", "none"),
    Member("depth", INTEGER, "Pages before it in the prefix."),
    Member("value", NUMBER, "Value of the page, per page of budget."),
    Member("requests", INTEGER, "Requests of the trace that use the page."),
    Member("last_seen", NUMBER, "Its last use, in Unix seconds.", "the trace has no times"),
)
