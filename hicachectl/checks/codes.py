"""Codes of findings: severities, meanings, remedies.

`explain`, hicachectl-findings(7), the table of `verify` and the messages of `--repair` take their
texts from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicachectl.formats.releases import since

if TYPE_CHECKING:
    from collections.abc import Mapping

SEVERITIES = ("info", "warning", "error")

# Rules that change a finding's severity. The check chooses the rule.
# No server reads wrong data without a draft or a trailing pool.
COSTS_HITS_ONLY = "costs-hits-only"
# The store evicts each pool separately: orphans are normal.
POOLS_APART = "pools-apart"
# The store refuses to read an object of another size: a miss.
REFUSED_WHOLE = "refused-whole"
# Versions repeat, so a rewrite may go unnoticed.
VERSIONS_RECUR = "versions-recur"
RULES = {
    COSTS_HITS_ONLY: "for drafts and trailing pools (Mamba states, sliding windows)",
    POOLS_APART: "on 3FS, which evicts each pool separately",
    REFUSED_WHOLE: "on Mooncake, which refuses to read the object",
    VERSIONS_RECUR: "if the store cannot tell whether a server rewrote the object",
}

# Words in commands. STORE and OPTIONS are replaced by those of a run, the others are for the user.
STORE, OPTIONS = "STORE", "OPTIONS"
PROFILE_OPTION = "--profile FILE"
# The option that makes a command believe a doubtful profile.
DESPITE = "--despite-profile"
_BELOW = "the command below"
_REPAIR = f"hicachectl verify {STORE} {OPTIONS} --repair quarantine"
_REMOVED = "Remove the page with {command}. Servers compute the page again and write it."
_REPAIR_COST = (
    "One computation of the page, when a request next needs it. Until then, requests miss the "
    "pages that follow it. The quarantine takes the space of the page; hicachectl-restore(1) puts "
    "the page back."
)


@dataclass(frozen=True, slots=True)
class Code:
    """A code of findings.

    severity: one of SEVERITIES.
    rules: severity under each rule that changes it.
    structural: the page group lacks objects; no object is damaged.
    doubts: a wrong profile gives the finding to healthy pages.
    remedy: next step if the finding is not about a page; repair ignores such findings. {command}
        stands for the command.
    meaning: what is wrong.
    effect: what a server does with the object or page.
    advice: what to look at before a repair.
    cost: what the remedy costs.
    command: the remedy; empty for a repair of pages, and if there is none.
    alternative: a command that keeps the pages, to be preferred where it applies.
    detail: what is wrong with one object, if all findings of the code say the same.
    """

    name: str
    severity: str
    rules: Mapping[str, str] = field(default_factory=dict, hash=False)
    structural: bool = False
    doubts: bool = False
    remedy: str = ""
    meaning: str = ""
    effect: str = ""
    advice: str = ""
    cost: str = ""
    command: str = ""
    alternative: str = ""
    detail: str = ""

    def mending_command(self, severity: str) -> str:
        """Return the command that mends findings, with STORE and OPTIONS in it; "" without one.

        severity: severity of the findings, which `rules` can change. A repair leaves all but
            errors unless an option names the code.
        """
        if self.command or self.remedy:
            return self.command
        return _REPAIR if severity == "error" else f"{_REPAIR} --repair-code {self.name}"

    @property
    def next_step(self) -> str:
        """The remedy as a part of a sentence; empty for findings about pages."""
        return self.remedy.format(command=shown(self.command))

    @property
    def exceptions(self) -> str:
        """When the severity is another one, as a text; empty if never."""
        others = {rule: changed for rule, changed in self.rules.items() if changed != self.severity}
        return "; ".join(f"{changed} {RULES.get(rule, rule)}" for rule, changed in others.items())

    def explanation(self) -> dict[str, str]:
        """Return the texts of `explain`: meaning, effect, remedy, cost, command."""
        command = shown(self.mending_command(self.severity))
        remedy = self.remedy[:1].upper() + self.remedy[1:] + "." if self.remedy else ""
        if not self.remedy and not self.command:
            remedy = _REMOVED
        return {
            "meaning": self.meaning,
            "effect": self.effect,
            "remedy": " ".join(filter(None, (self.advice, remedy.format(command=_BELOW)))),
            "cost": self.cost or ("" if self.remedy else _REPAIR_COST),
            "command": command,
        }


def is_repair(command: str) -> bool:
    """Return whether a command is a repair of pages."""
    return command.startswith(_REPAIR)


def shown(command: str) -> str:
    """Return a command as it looks without a run."""
    return command.replace(OPTIONS, PROFILE_OPTION)


_HITS_ONLY = {COSTS_HITS_ONLY: "warning"}
# What servers do with a page that lacks an object of a pool that each page needs.
WITHOUT_SIDECAR = (
    f"SGLang {since('requires_drafts')} and later miss the page; earlier releases may restore it "
    "without the object"
)
_COMPUTED_FROM = "servers compute with these numbers, and answers are wrong or garbled"

# --- keys and the store as a whole ---

STAMP_MISMATCH = Code(
    "stamp-mismatch",
    "error",
    meaning="The stamp of the store names another profile or weights version than this run.",
    effect="Keys carry no weights version and no dtype. Servers of one deployment read the pages "
    "of the other as their own.",
    advice="If this run has the wrong profile, give the right one. Pages of another object size "
    "have the finding truncated or oversized: repair them with the right profile.",
    remedy="pages of the same size have no finding of their own: if the store has such pages, "
    "remove the model with {command}; then write a new stamp with verify --stamp",
    cost="All pages of the model, which servers compute again. Without the removal, wrong answers.",
    command=f"hicachectl rm {STORE} --model MODEL",
)
COLLIDING_KEYS = Code(
    "colliding-keys",
    "error",
    meaning="Ranks of the deployment write different objects under the same keys: the keys of this "
    "store do not name the rank.",
    effect="The last rank that writes wins. The other ranks read its object as their own.",
    remedy="let the servers use a file store, then remove the objects with {command}",
    cost="All pages of the model. None of them can be trusted.",
    command=f"hicachectl rm {STORE} --model MODEL",
)
MISPLACED_OBJECT = Code(
    "misplaced-object",
    "warning",
    meaning="A file lies in a directory where servers do not look for its key.",
    effect="Servers miss the page and compute it again. The file only takes space.",
    remedy="give all directories of the servers, in their order; if they were given, remove the "
    "files by hand",
    cost="Nothing: no server reads the files.",
)
LOST_OBJECTS = Code(
    "lost-objects",
    "warning",
    meaning="The store lists objects that it no longer has, or cannot find.",
    effect="Servers miss the pages and compute them again.",
    remedy="copy the objects that are left to another store with {command}; servers compute the "
    "others again",
    cost="The space of the copy, and one computation of each lost page.",
    command=f"hicachectl migrate {STORE} DST",
)
AMBIGUOUS_KEY = Code(
    "ambiguous-key",
    "warning",
    meaning="Keys of this form can be read in several ways: their end can be a rank, or belong to "
    "the model's name. There is one finding for each form of key.",
    effect="Servers know their own keys, so they are not affected. hicachectl cannot judge these "
    "pages, and neither repairs nor moves them.",
    remedy="give the profile that wrote the keys, or remove them with {command}",
    cost="A profile costs nothing. A removal costs one computation of each page.",
    command=f"hicachectl rm {STORE} --state unknown",
)
FOREIGN_OBJECT = Code(
    "foreign-object",
    "info",
    meaning="The key is not one that SGLang writes.",
    effect="None: no server reads the object. It only takes space.",
    remedy="remove the object by hand, if no other program needs it",
    cost="Nothing for servers.",
)
STALE_TEMPORARY = Code(
    "stale-temporary",
    "warning",
    meaning="A temporary file of a write that ended long ago, or an object from before a server "
    "cleared the store.",
    effect="No server reads it. It only takes space.",
    remedy="remove the files with {command}",
    cost="Nothing: removing them is safe, also with running servers.",
    command=f"hicachectl rm {STORE} --temporaries",
)

# --- groups ---

MISSING_POOL = Code(
    "missing-pool",
    "error",
    _HITS_ONLY,
    structural=True,
    doubts=True,
    detail=f"object missing while the page's kv is present: {WITHOUT_SIDECAR}",
    meaning="The page has its kv, but an object of another pool is missing, such as indexer.",
    effect=f"{WITHOUT_SIDECAR[:1].upper()}{WITHOUT_SIDECAR[1:]}. Without a draft, they then accept "
    f"fewer drafted tokens. Without index keys, answers are garbled: before {since('clamps')} if "
    f"the object is lost between the look-up and the read, before {since('indexer')} always.",
)
MISSING_PART = Code(
    "missing-part",
    "error",
    _HITS_ONLY,
    structural=True,
    doubts=True,
    detail="object missing while other parts of the same pool and shard are present",
    meaning="A part of a pool is missing, such as v, while other parts of the same rank are there.",
    effect="A server that finds the page by its other parts loads it in part, and computes with "
    "what its memory held.",
)
MISSING_RANK = Code(
    "missing-rank",
    "warning",
    _HITS_ONLY,
    structural=True,
    detail="object missing while other ranks of the page are present: servers miss the page, but "
    "read no wrong data",
    meaning="The objects of a rank are missing, while other ranks have theirs: an interrupted "
    "write, a full disk, or an eviction that took some of the objects.",
    effect="The ranks agree on the prefix that all of them have. The page and those after it are "
    "misses; no wrong data is read.",
    advice="Many of them at once often mean another TP size than the profile says: compare with "
    "hicachectl ls --summary.",
)
ORPHAN_SIDECAR = Code(
    "orphan-sidecar",
    "warning",
    {POOLS_APART: "info"},
    structural=True,
    detail="the page has no kv object: no server reads this object",
    meaning="The page has objects of other pools, but no kv object.",
    effect="Servers look for kv first, so none reads this object. It only takes space.",
    cost="Nothing: no server can use the object. hicachectl rm --state orphan needs no profile.",
)

# --- sizes and reading ---

TRUNCATED = Code(
    "truncated",
    "error",
    doubts=True,
    meaning="The object is shorter than what servers of the deployment write: an interrupted "
    "write, a full disk, or an object of servers with another dtype, TP size or page size.",
    effect="File: the read fails, and up to 128 pages read with it are lost; the object is never "
    "rewritten, because it exists. Mooncake and 3FS: the rest of the page is what memory held.",
    advice="If most objects of a deployment are truncated, the profile has another dtype, page "
    "size or TP size than the servers that wrote: correct it before a repair.",
)
OVERSIZED = Code(
    "oversized",
    "error",
    {REFUSED_WHOLE: "warning"},
    doubts=True,
    meaning="The object is longer than what servers of the deployment write: servers with another "
    "dtype, TP size or page size wrote it.",
    effect="File: the first bytes are read as the page, without an error: wrong values. Mooncake: "
    "the read fails, a miss.",
    advice="If most objects of a deployment are oversized, correct the profile before a repair.",
)
MIXED_SIZES = Code(
    "mixed-sizes",
    "warning",
    meaning="Objects of one kind have several sizes, each on many pages: servers with two settings "
    "(dtype, page size, layers) wrote to the store under the same keys.",
    effect="Servers read the pages of the other setting as their own: wrong values, failed reads "
    "or misses.",
    advice="The detail has the time at which the size changed: compare it with the last change of "
    "the servers' flags. With a profile, the warning says that servers with the other setting may "
    "still write: a repair then needs --despite-profile.",
    remedy="give --profile of the running servers (hicachectl profile --launch writes it): the "
    "profile shows which of the sizes is wrong; {command} then repairs the others",
    cost="One computation of each page of the wrong size.",
    command=_REPAIR,
)
OTHER_DEPLOYMENT = Code(
    "other-deployment",
    "info",
    meaning="The store has pages of the profile's model with other sizes (tp, pp, cp, dcp) or "
    "another tag: servers with other settings wrote them.",
    effect="Keys name the sizes and the tag. Servers of the profile never ask for these keys, so "
    "the pages give them no hits. Only servers with the other settings use the pages.",
    advice="If such servers still run, nothing is wrong. If they were replaced, hicachectl migrate "
    "STORE STORE --profile OLD --to-profile FILE converts the pages and keeps the hits; OLD is the "
    "profile of the replaced servers.",
    remedy="if no server has these sizes any more, and the pages were converted or are not wanted, "
    "remove the pages with {command}",
    cost="Nothing for servers of the profile. Servers with the other settings compute the pages "
    "again.",
    command=f"hicachectl rm {STORE} --model MODEL --tp SIZE",
    alternative=f"hicachectl migrate {STORE} {STORE} --profile OLD --to-profile FILE",
)
UNREADABLE = Code(
    "unreadable",
    "error",
    meaning="The store lists the object but cannot read it: a disk error, permissions, or a "
    "damaged record.",
    effect="The read fails. A file store loses up to 128 pages read with it.",
    advice="Look at the kernel log and the permissions of the file first: a repair cannot mend a "
    "disk.",
)
NO_REPLICA = Code(
    "no-replica",
    "warning",
    detail="no replica can be reached, so servers miss the page",
    meaning="The store names replicas of the object, but none can be reached.",
    effect="Servers miss the page.",
    advice="See whether a node of the cluster is down: if it returns with its memory, so may the "
    "object.",
)
UNWRITTEN_PAGE = Code(
    "unwritten-page",
    "error",
    detail="the page was never written: servers would read zeros",
    meaning="A key holds a page of a 3FS file that was never written: a hole, which reads as "
    "zeros. A data file that was cut and opened again has such holes.",
    effect=f"Servers restore zeros: {_COMPUTED_FROM}.",
)
REPLICA_MISMATCH = Code(
    "replica-mismatch",
    "warning",
    meaning="Copies that should be equal differ: KV heads that several TP ranks hold, or the sizes "
    "of the replicas of one object.",
    effect="Ranks or servers compute with different values. Answers may depend on who reads.",
)
DISK_ONLY = Code(
    "disk-only",
    "info",
    detail="no replica in memory, so restoring the object is slow",
    meaning="The object is on the SSDs of the cluster, but no longer in its memory.",
    effect="Servers can read the object, but slowly.",
    remedy="load the objects into memory with {command}",
    cost="Memory of the cluster, and the eviction of other objects if it is full.",
    command=f"hicachectl prewarm {STORE} --trace TRACE --through-server URL",
)

# --- values and digests ---

_UNLIKELY = (
    "If most pages of the deployment have the finding, suspect the dtype of the profile first: "
    "bytes of another dtype look damaged."
)
NAN = Code(
    "nan",
    "error",
    doubts=True,
    meaning="The object holds values that are not numbers.",
    effect=f"The values spread to all tokens that attend to the page: {_COMPUTED_FROM}.",
    advice=_UNLIKELY,
)
INF = Code(
    "inf",
    "error",
    doubts=True,
    meaning="The object holds infinities.",
    effect=f"The attention of the page overflows: {_COMPUTED_FROM}.",
    advice=_UNLIKELY,
)
BAD_SCALE = Code(
    "bad-scale",
    "error",
    doubts=True,
    meaning="A scale of fp8 values is not finite, or too small for a server to have written it.",
    effect=f"All values under the scale are wrong: {_COMPUTED_FROM}.",
    advice=_UNLIKELY,
)
ALL_ZERO = Code(
    "all-zero",
    "warning",
    meaning="The object, a layer of it or the row of a token has only zero bytes: often a write "
    "that never reached the disk.",
    effect="If the zeros are not real, attention ignores what the page said: wrong answers.",
    advice="In some models, real values are zero: see with hicachectl show whether other pages "
    "have zeros in the same layers.",
)
LAYOUT_MISMATCH = Code(
    "layout-mismatch",
    "error",
    doubts=True,
    meaning="The rows of the object are in the order of another memory layout than the profile's.",
    effect=f"Keys carry no layout. Servers mix up layers and tokens: {_COMPUTED_FROM}.",
    advice="If the servers have the layout that was found, the profile is wrong. If they changed "
    "theirs, hicachectl migrate --to-layout keeps the pages.",
)
DIGEST_MISMATCH = Code(
    "digest-mismatch",
    "error",
    {VERSIONS_RECUR: "warning"},
    meaning="The bytes differ from the recorded digest, and nothing shows that a server rewrote "
    "the object: the bytes changed on the disk or on the way.",
    effect="SGLang compares no digests. It uses the bytes as they are: wrong values.",
    advice="With a catalog, the detail has the time of the last run that read the recorded bytes: "
    "look at the kernel log since then.",
)
RE_RECORDED = Code(
    "re-recorded",
    "info",
    detail="rewritten since the catalog recorded the object",
    meaning="The bytes differ from the catalog, and a server has rewritten the object since.",
    effect="None.",
    advice="Nothing is wrong. Record the new digest with the command below.",
    cost="Nothing.",
    command=f"hicachectl verify {STORE} {OPTIONS} --catalog CATALOG --update-catalog",
)
IDENTITY_MISMATCH = Code(
    "identity-mismatch",
    "error",
    doubts=True,
    meaning="The trailer of the object names other weights, dtype, layout or page size than the "
    "profile, or another rank than the key.",
    effect="Servers with the plug-in of hicachectl refuse the object: a miss. Servers without it "
    "read it as their own: wrong values.",
    advice="If both deployments are in use, keep the pages, and give each a store of its own. "
    "Files of another rank were copied or renamed: remove them.",
)

# --- page tables of 3FS ---

PAGE_INDEX_SHARED = Code(
    "page-index-shared",
    "error",
    meaning="Several keys hold the same page of a data file.",
    effect="Only the last key that was written has its bytes. Servers read them for the other keys "
    "too: wrong values.",
)
PAGE_INDEX_OUT_OF_RANGE = Code(
    "page-index-out-of-range",
    "error",
    meaning="A key holds a page beyond the end of its table.",
    effect="Servers read beyond the space of the table: an error, or bytes that belong to no page.",
)
PAGE_INDEX_FREE = Code(
    "page-index-free",
    "error",
    meaning="A key holds a page that the table also lists as free.",
    effect="The next write to the free page replaces the bytes of this key: wrong values.",
)
PAGE_INDEX_CODES = (PAGE_INDEX_SHARED, PAGE_INDEX_OUT_OF_RANGE, PAGE_INDEX_FREE)
SNAPSHOT_STALE = Code(
    "snapshot-stale",
    "warning",
    meaning="The snapshot of the page tables is older than the data files.",
    effect="None for servers. What hicachectl finds may be out of date.",
    remedy="wait until the metadata server has saved its tables, then run again: {command}",
    cost="Nothing.",
    command=f"hicachectl verify {STORE} {OPTIONS}",
)
PAGE_LEAKED = Code(
    "page-leaked",
    "warning",
    meaning="Pages of a data file are neither free nor held by a key.",
    effect="The space is lost until the pages are released; servers have less room.",
    remedy="stop all engines that write, then release leaked pages with {command}",
    cost="Nothing, if no engine writes. Otherwise the server may hand out a page twice.",
    command=f"{_REPAIR} --writers-stopped",
)
PAGE_COUNT_MISMATCH = Code(
    "page-count-mismatch",
    "warning",
    meaning="A data file has another number of pages than its table.",
    effect="Some pages are beyond the file or never used.",
    remedy="every rank needs the same file_size: correct SGLang's 3FS config",
    cost="A restart of the servers.",
)
