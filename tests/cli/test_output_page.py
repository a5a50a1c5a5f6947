"""hicachectl-output(7): the documents and metrics of the commands have exactly its members."""

from __future__ import annotations

import fcntl
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.cli.demo_store import PROFILE
from hicachectl.cli.manpages import members
from hicachectl.cli.manpages.members import DOCUMENTS, Member, members_of, texts_of
from hicachectl.cli.metrics import LABELS, metrics
from hicachectl.cli.prose import Item, prose
from hicachectl.formats.profile import parse_profile
from hicachectl.move import quarantine as runs
from hicachectl.move import results
from hicachectl.move.difference_outcome import Kind
from hicachectl.parts.results import RunDocument
from hicachectl.parts.runs import (
    DAMAGED,
    DONE,
    FINISHED,
    LISTING,
    MERGED,
    MISSING,
    NOT_COMPLETE,
    UNFINISHED,
)
from hicachectl.prewarming import outcome
from hicachectl.prewarming.ranking import PlanRow
from hicachectl.text.vocabulary import BUDGET, DEADLINE, FULL, LOCK
from tests.backends.http_scripts import serving
from tests.doctor.replies import answering, info
from tests.move.migrations import damaged_stores, demo_store, profile_file
from tests.move.repairs import dsa_store, indexer
from tests.parts.runs import CommandRun
from tests.prewarming.test_cli import prompts
from tests.prewarming.test_servers import Server, answer
from tests.served_stores import HYBRID, age, served_store
from tests.stores import DSA, page, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Invoke

    Documents = Iterator[dict[str, Any]]

ROWS = "list of rows"
ENTRIES = {"list of integers": int, ROWS: dict, "list of texts": str}
KINDS: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "text": (str,),
}


class Seen:
    """Members of documents, compared with declared ones."""

    def __init__(self, members: tuple[Member, ...]) -> None:
        self.declared = {member.path: member for member in members}
        assert len(self.declared) == len(members)
        self.paths: set[str] = set()

    def add(self, members: dict[str, Any], path: str = "") -> None:
        """Compare the members of a document, or of an object or a row of it."""
        above = f"{path}." if path else ""
        varies = f"{above}NAME" in self.declared or any(
            name.startswith(f"{above}NAME.") for name in self.declared
        )
        for name, value in members.items():
            self._compare(f"{above}NAME" if varies else f"{above}{name}", value)
        if path.endswith("[]"):
            self._compare_names(path, members)

    def _compare(self, path: str, value: Any) -> None:
        member = self.declared.get(path)
        if member is None:  # of an object by names
            assert path.endswith(".NAME"), f"{path}: not in hicachectl-output(7)"
            self.add(value, path)
            return
        self.paths.add(path)
        if value is None:
            assert member.null, f"{path}: is null"
        elif member.kind in ENTRIES:
            assert all(type(one) is ENTRIES[member.kind] for one in value), (path, value)
            for row in value if member.kind == ROWS else ():
                self.add(row, f"{path}[]")
        else:
            assert type(value) in KINDS[member.kind], (path, value)
            if path.rpartition(".")[2] in ("state", "stopped_by") and member.kind == "text":
                assert value in member.text, (path, value)
            if member.kind == "object":
                self.add(value, path)

    def _compare_names(self, path: str, row: dict[str, Any]) -> None:
        """Find the names that each row must have."""
        below = re.compile(re.escape(path) + r"\.\w+")
        for name, member in self.declared.items():
            if below.fullmatch(name) and not member.optional:
                assert name.removeprefix(f"{path}.") in row, name


def headless(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without its head, after a look at it."""
    head = document.pop("schema"), document.pop("version")
    assert [type(one) for one in head] == [int, str]
    return document


class Stores:
    """Stores of the demo, whole and damaged, and the command line."""

    def __init__(self, invoke: Invoke, folder: Path) -> None:
        self.invoke = invoke
        self.folder = folder
        self.whole = demo_store(folder / "whole")
        self.damaged, self.target = damaged_stores(folder / "damaged")
        age(self.damaged)
        self.profile = ("--profile", profile_file(folder / "profile.toml"))

    def run(self, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
        """Return the document of a command, after a look at its head."""
        return headless(self.invoke.document(*arguments, exit_code=exit_code))

    def quarantined(self) -> Path:
        """Return the quarantine of a store from which verify removed a page."""
        self.run("verify", self.damaged, *self.profile, "--repair", "quarantine", "--yes",
                 exit_code=4)  # fmt: skip
        return self.damaged / ".hicachectl" / "quarantine"

    def held(self, *arguments: object) -> dict[str, Any]:
        """Return the document of a command whose lock another process holds."""
        lock = self.folder / "lock"
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return self.run(*arguments, "--lock", lock)


def ls(stores: Stores) -> Documents:
    yield stores.run("ls", stores.damaged)
    yield stores.run("ls", stores.damaged, *stores.profile)


def ls_objects(stores: Stores) -> Documents:
    yield stores.run("ls", stores.damaged, "--objects")


def ls_summary(stores: Stores) -> Documents:
    yield stores.run("ls", stores.damaged, "--summary")
    yield stores.run("ls", stores.damaged, "--summary", *stores.profile)


def show(stores: Stores) -> Documents:
    pages = stores.run("ls", stores.damaged)["pages"]
    for row in [row for row in pages if row["state"] != "whole"]:
        yield stores.run("show", stores.damaged, row["page"], *stores.profile)
    served = stores.folder / "served"
    (whole,) = served_store(served, HYBRID, range(1))
    yield stores.run("show", served, whole)


def verify(stores: Stores) -> Documents:
    yield stores.run("verify", stores.whole, *stores.profile)
    yield stores.run("verify", stores.damaged, *stores.profile, exit_code=4)
    yield stores.run("verify", stores.damaged, exit_code=4)
    yield stores.run("verify", stores.damaged, *stores.profile, "--repair", "quarantine",
                     "--dry-run", exit_code=4)  # fmt: skip
    refused = dsa_store(stores.folder / "refused", 4)
    for number in range(2):
        (refused / indexer(number)).unlink()
    latent = ("--profile", profile_file(stores.folder / "latent.toml", parse_profile(DSA)),
              "--checks", "groups", "--repair", "delete")  # fmt: skip
    yield stores.run("verify", refused, *latent, "--dry-run", exit_code=2)
    run = CommandRun(stores.invoke, stores.folder / "repair", "verify", refused, *latent, "--yes")
    run.all(1)
    yield stores.run("merge", run.path, exit_code=2)
    yield stores.held("verify", stores.whole)
    run = CommandRun(stores.invoke, stores.folder / "run", "verify", stores.whole, *stores.profile)
    run.part(0, 2)
    yield stores.run("merge", run.path, exit_code=4)


def hits(stores: Stores) -> Documents:
    yield from measured(stores)


def hits_summary(stores: Stores) -> Documents:
    yield from measured(stores, "--summary")


def measured(stores: Stores, *words: str) -> Documents:
    requests = prompts(stores.folder / "requests.jsonl", 8, 3)
    pages = stores.folder / "pages.jsonl"
    pages.write_text(json.dumps([page(1)]))
    empty, unified = stores.folder / "empty", stores.folder / "unified"
    for folder in (empty, unified):
        folder.mkdir()
    latent = parse_profile(DSA)
    latent = replace(latent, pools=latent.pools[:1])
    put(unified, f"{page(2)}_ukv1-8d19308ec7f4a608_L0-16_H3.bin")
    yield stores.run("hits", *words, stores.damaged, *stores.profile, "--token-ids", requests)
    yield stores.run("hits", *words, stores.whole, "--pages", pages)
    yield stores.run("hits", *words, unified, "--pages", pages)
    yield stores.run("hits", *words, empty, "--pages", pages)
    for sizes in ({"pp": 2}, {"cp": 2}, {"tp": 2, "dcp": 2}):
        profile = profile_file(stores.folder / "ranks.toml", replace(latent, **sizes))
        yield stores.run("hits", *words, empty, "--pages", pages, "--profile", profile)
    wider = profile_file(stores.folder / "tp4.toml", replace(PROFILE, tp=4))
    yield stores.run("hits", *words, stores.whole, "--profile", wider, "--token-ids", requests)
    pages.write_text("[]\n")
    yield stores.run("hits", *words, stores.whole, "--pages", pages)
    trace = labelled(stores.folder / "labelled.jsonl", requests)
    asked = ("--trace", trace, "--by", "salt,session-age")
    yield stores.run("hits", *words, stores.whole, *stores.profile, *asked)


def labelled(path: Path, requests: Path) -> Path:
    """Write requests with a salt, a session and a time."""
    lines = map(json.loads, requests.read_text().splitlines())
    rows = [
        {"timestamp": at, "token_ids": ids, "session_id": "s", "cache_salt": "a" if at else None}
        for at, ids in enumerate(lines)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def simulate(stores: Stores) -> Documents:
    requests = prompts(stores.folder / "requests.jsonl", 8, 3)
    trace = stores.folder / "trace.jsonl"
    lines = [json.loads(line) for line in requests.read_text().splitlines()] * 2
    rows = [{"timestamp": at, "token_ids": ids, "session_id": "s"} for at, ids in enumerate(lines)]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = ("simulate", "--trace", trace, "--policy", "lru,hicachefile")
    yield stores.run(*asked, *stores.profile, stores.damaged)
    yield stores.run(*asked, *stores.profile, "--by", "session-age")
    yield stores.run(*asked, *stores.profile, "--l1", "1MiB", "--l2", "2MiB", "--what-if", "tp=1")
    yield stores.run(*asked, "--page-size", PROFILE.page_size)


def doctor(stores: Stores) -> Documents:
    with answering(info(tp_size=4)) as url:
        asked = ("doctor", stores.damaged, *stores.profile, "--server", url)
        yield stores.run(*asked, exit_code=4)


def migrate(stores: Stores) -> Documents:
    command = ("migrate", stores.damaged, stores.target, *stores.profile)
    yield stores.run(*command, "--dry-run", exit_code=4)
    yield stores.held(*command)
    yield stores.run(*command, exit_code=4)
    run = CommandRun(stores.invoke, stores.folder / "run", "migrate", stores.whole,
                     stores.folder / "copy", *stores.profile)  # fmt: skip
    run.all(2)
    yield stores.run("merge", run.path)


def diff(stores: Stores) -> Documents:
    yield stores.run("diff", stores.damaged, stores.target, *stores.profile, exit_code=4)
    yield stores.run("diff", stores.damaged, stores.whole, "--verify", exit_code=4)


def bench(stores: Stores) -> Documents:
    yield stores.run("bench", stores.whole, "--most", "64KiB", "--drop-cache")
    words = (*stores.profile, "--write", "--most", "512KiB", "--device", "cpu")
    yield stores.run("bench", stores.whole, *words, "--prefill", 1, "--time-limit", "0.001s")


def prewarm(stores: Stores) -> Documents:
    requests = prompts(stores.folder / "requests.jsonl", 8, 3)
    command = ("prewarm", stores.folder / "warm", "--from", stores.whole, *stores.profile)
    yield stores.run(*command, "--token-ids", requests, "--dry-run")
    yield stores.held(*command, "--token-ids", requests)
    conflicting = ("prewarm", stores.target, "--from", stores.damaged, *stores.profile, "--all")
    yield stores.run(*conflicting, exit_code=4)
    yield stores.run(*conflicting, "--min-usable", 0.9, "--open-after", "0s")
    with serving(Server(answer)) as place:
        pull = ("--token-ids", requests, "--through-server", f"http://{place}")
        yield stores.run(*command, *pull)
        yield stores.run("prewarm", stores.folder / "warm", *stores.profile, *pull)
    run = CommandRun(stores.invoke, stores.folder / "run", *command, "--token-ids", requests)
    run.all(2)
    yield stores.run("merge", run.path)


def rm(stores: Stores) -> Documents:
    def stuck(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    put(stores.whole, "." + "0a" * 16 + ".tmp")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hicachectl.backends.file.store.os.unlink", stuck)
        yield stores.run("rm", stores.whole, "--temporaries", "--yes", exit_code=4)
    yield stores.run("rm", stores.damaged, "--state", "partial", *stores.profile, "--dry-run")
    yield stores.held("rm", stores.damaged, "--state", "partial", *stores.profile, "--yes")
    yield stores.run("rm", stores.whole, "--free", "1B", "--dry-run")
    requests = prompts(stores.folder / "requests.jsonl", 8, 3)
    tokens = json.loads(requests.read_text().splitlines()[0])
    trace = stores.folder / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 1, "token_ids": tokens}))
    put(stores.whole, f"{page(0)}_other_0_1.bin")
    yield stores.run(
        "rm", stores.whole, "--free", "1B", "--trace", trace, *stores.profile, "--dry-run"
    )
    yield stores.run("rm", stores.whole, "--max-size", "1TiB", "--yes")
    yield stores.run("rm", stores.whole, "--keep-free", "1KiB", "--yes")
    yield stores.run("rm", stores.damaged, "--before", "0s", "--yes")
    yield stores.run("rm", stores.whole, "--temporaries", "--yes")


def restore(stores: Stores) -> Documents:
    quarantine = stores.quarantined()
    yield stores.run("restore", quarantine, stores.damaged, "--dry-run")
    yield stores.run("restore", quarantine, stores.damaged, "--yes")


def quarantine_list(stores: Stores) -> Documents:
    yield stores.run("quarantine", "list", stores.quarantined())


def quarantine_purge(stores: Stores) -> Documents:
    quarantine = stores.quarantined()
    yield stores.held("quarantine", "purge", quarantine, "--before", "0s", "--yes")
    yield stores.run("quarantine", "purge", quarantine, "--before", "0s", "--yes")


def divided(stores: Stores) -> Path:
    """Return the directory of two runs, of which one was merged."""
    for name, shards in (("merged", ["0/1"]), ("unfinished", ["0/2"])):
        run = CommandRun(stores.invoke, stores.folder / "runs" / name, "verify", stores.whole)
        for shard in shards:
            stores.invoke(*run.command, "--shard", shard, "--run", run.path)
    stores.invoke("merge", stores.folder / "runs" / "merged")
    (stores.folder / "runs" / "unreadable").mkdir()
    (stores.folder / "runs" / "unreadable" / "run.json").write_text("{}")
    return stores.folder / "runs"


def runs_list(stores: Stores) -> Documents:
    yield stores.run("runs", "list", divided(stores))


def runs_status(stores: Stores) -> Documents:
    runs = divided(stores)
    yield stores.run("runs", "status", runs / "merged")
    yield stores.run("runs", "status", runs / "unfinished")


def runs_purge(stores: Stores) -> Documents:
    purge = ("runs", "purge", divided(stores), "--before", "0s", "--yes")
    yield stores.held(*purge)
    yield stores.run(*purge)


def pack(stores: Stores) -> Path:
    path = stores.folder / "archive.hcpack"
    stores.run("migrate", stores.whole, f"pack://{path}", *stores.profile)
    return path


def pack_info(stores: Stores) -> Documents:
    yield stores.run("pack", "info", pack(stores))


def pack_repair(stores: Stores) -> Documents:
    path = pack(stores)
    yield stores.run("pack", "repair", path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    yield stores.run("pack", "repair", path, "--dry-run")


def explain(stores: Stores) -> Documents:
    yield stores.run("explain")


SCENES: dict[str, Callable[[Stores], Documents]] = {
    "ls": ls,
    "ls --objects": ls_objects,
    "ls --summary": ls_summary,
    "show": show,
    "verify": verify,
    "hits": hits,
    "hits --summary": hits_summary,
    "simulate": simulate,
    "doctor": doctor,
    "migrate": migrate,
    "bench": bench,
    "diff": diff,
    "prewarm": prewarm,
    "rm": rm,
    "restore": restore,
    "quarantine list": quarantine_list,
    "quarantine purge": quarantine_purge,
    "runs list": runs_list,
    "runs status": runs_status,
    "runs purge": runs_purge,
    "pack info": pack_info,
    "pack repair": pack_repair,
    "explain": explain,
}


@pytest.mark.slow
@pytest.mark.parametrize("title", SCENES)
def test_a_document_has_the_members_of_the_page(invoke: Invoke, tmp_path: Path, title: str) -> None:
    compare_with_page(title, SCENES[title](Stores(invoke, tmp_path)))


def test_every_document_is_compared() -> None:
    in_other_modules = {"pin", "unpin"}  # test_pin.py has a cluster
    assert {document.title for document in DOCUMENTS} == set(SCENES) | in_other_modules


def compare_with_page(title: str, documents: Documents) -> None:
    """Assert that the printed documents of a command have the members of the page, and no other."""
    (document,) = (one for one in DOCUMENTS if one.title == title)
    seen = Seen(document.members)
    for printed in documents:
        seen.add(printed)
        always = {m.path for m in document.members if re.fullmatch(r"\w+", m.path)}
        always -= {m.path for m in document.members if m.optional}
        assert always <= set(printed)
        assert not document.rows or document.rows in printed
    unseen = set(seen.declared) - seen.paths
    # Those of Mooncake; and of `bench --probe-server`, which need a real server.
    elsewhere = ("replicas[]", "prompts[].")
    assert {path for path in unseen if not any(name in path for name in elsewhere)} == set()


@pytest.mark.parametrize(
    ("document", "path", "words"),
    [
        (
            "quarantine list",
            "runs[].state",
            (runs.KEPT, runs.HALF_PURGED, runs.BUSY, runs.EARLIER, runs.UNREADABLE),
        ),
        (
            "runs list",
            "runs[].state",
            (LISTING, UNFINISHED, FINISHED, MERGED, runs.HALF_PURGED, runs.UNREADABLE,
             runs.PURGED_RUN, runs.WOULD_PURGE, runs.BUSY, runs.FAILED),
        ),
        ("runs status", "results[].state", (DONE, NOT_COMPLETE, MISSING, DAMAGED)),
        ("quarantine purge", "runs[].state", (runs.PURGED_RUN, runs.WOULD_PURGE, runs.FAILED)),
        (
            "rm",
            "groups[].state",
            (results.REMOVED, results.WOULD_REMOVE, results.GONE, results.KEPT, results.IN_FLIGHT,
             results.FAILED),
        ),
        (
            "restore",
            "groups[].state",
            (results.RESTORED, results.WOULD_RESTORE, results.CONFLICT, results.FAILED),
        ),
        (
            "prewarm",
            "stopped_by",
            (BUDGET, DEADLINE, FULL, outcome.EVICTS, LOCK),
        ),
        ("migrate", "stopped_by", (FULL, LOCK)),
        ("diff", "sums[].difference", tuple(kind.text for kind in Kind)),
        ("verify", "stopped_by", (DEADLINE, LOCK)),
    ],
)  # fmt: skip
def test_the_page_has_the_words_of_a_member(
    document: str, path: str, words: tuple[str, ...]
) -> None:
    (members,) = [one.members for one in DOCUMENTS if one.title == document]
    (text,) = [member.text for member in members if member.path == path]
    assert [word for word in words if word not in text] == []


def test_a_plan_without_stores_has_the_members_of_the_page(invoke: Invoke, tmp_path: Path) -> None:
    requests = [
        {"timestamp": number, "token_ids": list(range(number, number + 2 * PROFILE.page_size + 1))}
        for number in (1, 1, 2)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(one)}\n" for one in requests))
    profile = profile_file(tmp_path / "profile.toml")
    rows = invoke("prewarm", "--trace", trace, "--profile", profile, "--dry-run").rows
    seen = Seen(tuple(members_of(PlanRow, "[].")))
    for row in rows:
        seen.add(row, "[]")
    assert seen.paths == set(seen.declared)


def test_the_texts_have_no_member_that_no_struct_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[str]] = {}

    class Noted(dict[str, str]):
        def __init__(self, section: str) -> None:
            super().__init__(texts_of(section))
            self.section = section

        def __getitem__(self, name: str) -> str:
            for section in (self.section, *included(self.section)):
                asked.setdefault(section, set()).add(name)
            return super().__getitem__(name)

    def included(section: str) -> Iterator[str]:
        for block in prose("members")[section]:
            if isinstance(block, str):
                yield block.removeprefix("@")
                yield from included(block.removeprefix("@"))

    monkeypatch.setattr(members, "texts_of", Noted)
    for form in (RunDocument, PlanRow, *(document.form for document in DOCUMENTS)):
        list(members_of(form))
    for section, blocks in prose("members").items():
        named = {block.term for block in blocks if isinstance(block, Item)}
        assert named - asked.get(section, set()) == set(), section


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.title)
def test_the_texts_say_when_a_member_is_null_or_absent(document: Any) -> None:
    for member in document.members:
        assert member.null == ("\nNull: " in member.text), member.path
        assert member.optional == ("\nOnly with: " in member.text), member.path


@pytest.mark.slow
@pytest.mark.parametrize("command", list(metrics()))
def test_a_metrics_file_has_the_metrics_of_the_page(
    invoke: Invoke, tmp_path: Path, command: str
) -> None:
    stores = Stores(invoke, tmp_path)
    path = tmp_path / "metrics.prom"
    if command == "verify":
        stores.run("verify", stores.damaged, "--metrics-file", path, exit_code=4)
    elif command == "rm":
        stores.run("rm", stores.whole, "--keep-free", "1KiB", "--yes", "--metrics-file", path)
    else:
        requests = prompts(tmp_path / "requests.jsonl", 8)
        copy = ("--from", stores.whole, *stores.profile, "--token-ids", requests)
        gate = ("--min-usable", 0.5, "--open-after", "1h")
        stores.run("prewarm", tmp_path / "copy", *copy, *gate, "--metrics-file", path)
    samples = re.findall(r"^hicachectl_(\w+?)_(\w+)\{(.*?)\} \S+$", path.read_text(), re.MULTILINE)
    assert {name for of, name, _ in samples if of == command} == set(metrics()[command])
    for _, name, labels in samples:
        extra = [LABELS[name]] if name in LABELS else []
        assert re.findall(r"(\w+)=", labels) == ["store", *extra]
