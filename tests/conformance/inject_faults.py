"""Put wrong files in place of pages, and read them through SGLang's own host pools.

Runs inside the SGLang environment: `inject_faults.py REQUEST`. The request is a JSON object: case
(a name of PLUGIN_CASES), profile (fields that replace those of the case's), directory, seed,
faults (how many at least), pages (of a prompt, 24), settings (keys of the plug-in).

First each file of a store of three pages takes the place of each other file, of every pool and
rank. Then random faults follow, many files at a time. After each turn the ranks read all pages, and
the files are as before.

Prints a JSON object: faults, kinds (number of faults by kind), read (pages reported as read), wrong
(of these, those with another byte than was written: rank, pool, page, kind), accepted (those whose
file had a fault that must show), missed (pages whose file had no such fault, but were not read).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conformance import (
        attached_rank,
        host_pages,
        page_values,
        prompt_nodes,
        rank_pools,
    )
    from tests.conformance.prompt_nodes import Prompt
    from tests.conformance.rank_pools import Rank
    from tests.conformance.store_cases import PLUGIN_CASES, Deployment, is_trailing
else:
    import attached_rank
    import host_pages
    import page_values
    import prompt_nodes
    import rank_pools
    from store_cases import PLUGIN_CASES, Deployment, is_trailing

_SWAPPED_PAGES = 3
_PAGES = 24
_SHARE = 0.7  # of the files of a turn that get a fault
_MOST_LISTED = 20
_TRAILER = 128
_SECTORS = (512, 4096)  # what a power failure may tear
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

Files = dict[str, bytes]  # by name


def answer(question: dict[str, Any]) -> Any:
    """Inject the faults that the request asks for; return what the readers saw."""
    deployment = PLUGIN_CASES[question["case"]].deployments[0]
    profile = {**deployment.profile, **question.get("profile", {})}
    deployment = dataclasses.replace(deployment, profile=profile)
    report, seed = Report(), question["seed"]
    # Of every deployment, the swaps alone are some hundred faults.
    for pages, act in ((_SWAPPED_PAGES, _swap), (question.get("pages", _PAGES), _spoil)):
        prompt = prompt_nodes.random_prompt(pages, profile["page_size"], pages, seed)
        with _site(deployment, prompt, question) as site:
            act(site, report, random.Random(seed), question["faults"])
    return report.document()


class Report:
    """What the readers saw."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.read = 0
        self.lists: dict[str, list[Any]] = {"wrong": [], "accepted": [], "missed": []}
        self.counts: Counter[str] = Counter()

    def note(self, name: str, *what: object) -> None:
        """Count a page in one of the lists, which keep the first ones."""
        self.counts[name] += 1
        if len(self.lists[name]) < _MOST_LISTED:
            self.lists[name].append(what)

    def document(self) -> dict[str, Any]:
        """Return the report for JSON."""
        faults = sum(self.kinds.values())
        sums = {f"{name}_pages": self.counts[name] for name in self.lists}
        return {"faults": faults, "kinds": self.kinds, "read": self.read, **self.lists, **sums}


class Fault(NamedTuple):
    """The bytes of a file with a fault; None removes it. harmless: it is to be served."""

    kind: str
    content: bytes | None
    harmless: bool = False


class Reader:
    """One rank: its plug-in, its host pages, and the bytes that they had when they were written."""

    def __init__(self, deployment: Deployment, rank: Rank, prompt: Prompt, settings: Any) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        self.rank = rank
        self.pages = prompt.pages
        with _server(deployment, rank):
            self.attached = attached_rank.AttachedRank(deployment, rank, len(prompt.pages))
            self.attached.attach(settings)
        self.backend = self.attached.controller.storage_backend
        hosts, count = self.attached.pools.host, len(prompt.pages)
        own = {
            name: hosts[name].alloc(count * prompt_nodes.page_indices(hosts[name]))
            for name in hosts
            if name in ("kv", "swa", "mamba")
        }
        self.indices = {name: own[_source(name, own)] for name in hosts}
        policies = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
        self.transfers = [
            PoolTransfer(
                name=PoolName(name),
                keys=prompt.pages,
                host_indices=self.indices[name],
                hit_policy=policies[is_trailing(name)],
            )
            for name in hosts
            if name != "kv"
        ]
        self.views: dict[tuple[str, str], list[Any]] = {}
        for name, host in hosts.items():
            kind = next(p["kind"] for p in deployment.profile["pools"] if p["name"] == name)
            for page, index in zip(prompt.pages, self._firsts(name, host), strict=True):
                view = host_pages.page_view(host, kind, index)
                salt = page_values.page_salt(page, name, prompt.seed)
                host_pages.fill(view, self.attached.pools.values(name, salt), kind)
                self.views[name, page] = [_bits(tensor) for tensor in view.values()]
        self.expected = {at: [one.clone() for one in views] for at, views in self.views.items()}

    def _firsts(self, name: str, host: Any) -> list[int]:
        firsts: list[int] = self.indices[name][:: prompt_nodes.page_indices(host)].tolist()
        return firsts

    def write(self) -> None:
        """Write all pages, those of shared objects on one rank only."""
        self.backend.batch_set_v2(self.transfers)
        self.backend.batch_set_v1(self.pages, self.indices["kv"])

    def read(self) -> Iterator[tuple[str, str, bool, bool]]:
        """Read all pages; yield pool, page, whether it was read, and whether its bytes are right.

        Kv comes first, since a damaged sidecar takes its page's kv away.
        """
        import torch

        for views in self.views.values():
            for view in views:
                view.fill_(0x5A)
        read = {"kv": self.backend.batch_get_v1(self.pages, self.indices["kv"])}
        answers = self.backend.batch_get_v2(self.transfers)
        read |= {str(name.value): done for name, done in answers.items()}
        for name, done in read.items():
            for page, ok in zip(self.pages, done, strict=True):
                pairs = zip(self.views[name, page], self.expected[name, page], strict=True)
                yield name, page, ok, ok and all(torch.equal(one, two) for one, two in pairs)

    def names(self) -> dict[tuple[str, str], str]:
        """Return the name of each page's file, by pool and page."""
        from hicachectl.formats.keys.file import FileGrammar

        pools = {name: self.backend._pools[name].coordinate for name in self.indices}
        ends = {name: FileGrammar().affix(coordinate)[1] for name, coordinate in pools.items()}
        return {(name, page): page + end for name, end in ends.items() for page in self.pages}


class Site(NamedTuple):
    """A store whose readers are attached.

    names: of the files of each reader, by pool and page. files: as they were written.
    """

    directory: Path
    readers: list[Reader]
    names: list[dict[tuple[str, str], str]]
    files: Files

    def turn(self, faults: dict[str, Fault], report: Report) -> None:
        """Put faults in place, let every reader that has one of them read, and mend the files."""
        report.kinds.update(fault.kind for fault in faults.values())
        self._put({name: fault.content for name, fault in faults.items()})
        for reader, names in zip(self.readers, self.names, strict=True):
            if faults.keys().isdisjoint(names.values()):
                continue
            for pool, page, ok, right in reader.read():
                fault = faults.get(names[pool, page])
                what = (*dataclasses.astuple(reader.rank), pool, page, fault and fault.kind)
                report.read += ok
                if ok and not right:
                    report.note("wrong", *what)
                if ok != (fault is None or fault.harmless):
                    report.note("accepted" if ok else "missed", *what)
            # The next rank that shares a file meets its fault, although this one removed it.
            gone = [name for name in names.values() if not (self.directory / name).exists()]
            wholes = {name: Fault("", self.files[name]) for name in gone}
            self._put({name: faults.get(name, wholes[name]).content for name in gone})
        self._put({name: self.files[name] for name in faults})

    def _put(self, contents: dict[str, bytes | None]) -> None:
        """Write files, and remove those without content."""
        for name, content in contents.items():
            if content is None:
                (self.directory / name).unlink(missing_ok=True)
            else:
                (self.directory / name).write_bytes(content)


@contextlib.contextmanager
def _server(deployment: Deployment, rank: Rank) -> Iterator[None]:
    with rank_pools.parallel(deployment, rank), attached_rank.server_arguments(deployment):
        yield


@contextlib.contextmanager
def _site(deployment: Deployment, prompt: Prompt, request: dict[str, Any]) -> Iterator[Site]:
    """Write a prompt on all ranks, and leave them attached."""
    directory = Path(request["directory"])
    settings = {"store": f"file://{directory}", **request.get("settings", {})}
    ranks = rank_pools.ranks(deployment.profile)
    readers = [Reader(deployment, rank, prompt, settings) for rank in ranks]
    with _server(deployment, ranks[0]):
        for reader in readers:
            reader.write()
        files = {path.name: path.read_bytes() for path in directory.glob("*.bin")}
        names = [reader.names() for reader in readers]
        missing = {name for each in names for name in each.values()} ^ files.keys()
        assert not missing, missing
        try:
            yield Site(directory, readers, names, files)
        finally:
            for reader in readers:
                reader.attached.detach()
            shutil.rmtree(directory)


def _swap(site: Site, report: Report, _: random.Random, __: int) -> None:
    """Put each file in place of each other one."""
    names = sorted(site.files)
    for shift in range(1, len(names)):
        others = names[shift:] + names[:shift]
        pairs = zip(names, others, strict=True)
        site.turn({name: Fault("swapped", site.files[other]) for name, other in pairs}, report)


def _spoil(site: Site, report: Report, chance: random.Random, faults: int) -> None:
    """Give random files random faults, until there were so many faults."""
    strict = site.readers[0].backend._settings.unranked == "refuse"
    makers = [*_MAKERS, *(_STRICT if strict else (_unranked,))]
    names = sorted(site.files)
    while sum(report.kinds.values()) < faults:
        turn = {}
        for name in names:
            if chance.random() < _SHARE:
                other = chance.choice(names)
                content, strange = site.files[name], site.files[other]
                fault = chance.choice(makers)(chance, content, strange)
                same = fault.content == content
                turn[name] = fault._replace(harmless=True) if same else fault
        site.turn(turn, report)


def _flipped(chance: random.Random, content: bytes, _: bytes) -> Fault:
    data = bytearray(content)
    for _bit in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(data) * 8)
        data[at // 8] ^= 1 << at % 8
    return Fault("flipped", bytes(data))


def _flipped_trailer(chance: random.Random, content: bytes, _: bytes) -> Fault:
    data = bytearray(content)
    data[-1 - chance.randrange(_TRAILER)] ^= 1 << chance.randrange(8)
    return Fault("flipped in the trailer", bytes(data))


def _truncated(chance: random.Random, content: bytes, _: bytes) -> Fault:
    length = len(content)
    ends = (0, length - _TRAILER, length - 1, length - _TRAILER - 1, chance.randrange(length))
    return Fault("truncated", content[: chance.choice(ends)])


def _extended(chance: random.Random, content: bytes, strange: bytes) -> Fault:
    more = (b"\0", content[-_TRAILER:], chance.randbytes(_TRAILER), strange)
    return Fault("extended", content + chance.choice(more))


def _torn(chance: random.Random, content: bytes, strange: bytes) -> Fault:
    """Leave some sectors unwritten: zeros, or what the blocks had before."""
    sector = chance.choice(_SECTORS)
    data = bytearray(content)
    before = chance.choice((bytes(len(data)), strange[: len(data)].ljust(len(data), b"\0")))
    for start in range(0, len(data), sector):
        if chance.random() < 0.5:
            data[start : start + sector] = before[start : start + sector]
    return Fault("torn", bytes(data))


def _random(chance: random.Random, content: bytes, _: bytes) -> Fault:
    whole = chance.choice((bytes(len(content)), chance.randbytes(len(content))))
    kept = chance.choice((0, _TRAILER))  # its own trailer, or none
    return Fault("other bytes", whole[: len(content) - kept] + content[len(content) - kept :])


def _replaced(_: random.Random, content: bytes, strange: bytes) -> Fault:
    del content
    return Fault("another file", strange)


def _mixed(chance: random.Random, content: bytes, strange: bytes) -> Fault:
    """Combine the bytes of one file with the trailer of another one."""
    one, two = chance.choice(((content, strange), (strange, content)))
    return Fault("another trailer", one[:-_TRAILER] + two[-_TRAILER:])


def _removed(_: random.Random, content: bytes, strange: bytes) -> Fault:
    del content, strange
    return Fault("removed", None)


def _bare(_: random.Random, content: bytes, strange: bytes) -> Fault:
    del strange
    return Fault("without a trailer", content[:-_TRAILER])


def _foreign(chance: random.Random, content: bytes, strange: bytes) -> Fault:
    """Change one statement of a trailer, with the right checksum."""
    trailer, other = _trailer(content), _trailer(strange)
    rank = chance.choice([n for n in (1 | 2 << 10, 2 | 2 << 10, 5, 0xFFFF) if n != trailer.rank])
    changes: list[dict[str, Any]] = [
        {"identity": chance.randbytes(16)},
        {"rank": rank},
        {"page": chance.randbytes(32)},
        {"nbytes": trailer.nbytes + chance.choice((-1, 1, _TRAILER))},
        {"name": chance.randbytes(24)},
        {"digest": chance.randbytes(16) + bytes(16)},
        {"digest": trailer.digest[:16] + chance.randbytes(16)},
        {"digest_kind": chance.choice(sorted({"xxh3", "blake3"} - {trailer.digest_kind}))},
    ]
    # Statements of another file that differ.
    pairs = zip(trailer._fields, trailer, other, strict=True)
    # Without a rank, a file of another one is what a store of an older release has.
    taken = {f: theirs for f, own, theirs in pairs if own != theirs and f not in ("digest", "rank")}
    changes += [{field: value} for field, value in taken.items()]
    return Fault("a foreign trailer", _with(content, **chance.choice(changes)))


def _another_version(chance: random.Random, content: bytes, _: bytes) -> Fault:
    data = bytearray(content[-_TRAILER:])
    data[8:10] = chance.choice((b"\0", b"\2")) + data[9:10] if chance.random() < 0.5 else b"\1\3"
    data[12:16] = bytes(4)
    data[12:16] = zlib.crc32(data).to_bytes(4, "little")
    return Fault("a trailer of another form", content[:-_TRAILER] + data)


def _other_digest(chance: random.Random, content: bytes, _: bytes) -> Fault:
    """Change the kind of the digest, as a server with another setting writes it: a right page."""
    from hicachectl.formats.trailer import digest_function

    kind = chance.choice(("off", "blake3", "xxh3"))
    digest = digest_function(kind)([content[:-_TRAILER]])
    return Fault("another digest", _with(content, digest_kind=kind, digest=digest), harmless=True)


def _unranked(_: random.Random, content: bytes, strange: bytes) -> Fault:
    """Write the trailer of an older release: a right page."""
    del strange
    return Fault("an older trailer", _with(content, rank=0), harmless=True)


def _refused_unranked(chance: random.Random, content: bytes, strange: bytes) -> Fault:
    """Write the trailer of an older release, for this file or another one: refused."""
    return Fault("an older trailer, refused", _with(chance.choice((content, strange)), rank=0))


def _trailer(content: bytes) -> Any:
    from hicachectl.formats.trailer import parse_trailer

    trailer = parse_trailer(content[-_TRAILER:])
    assert trailer is not None
    return trailer


def _with(content: bytes, **changes: Any) -> bytes:
    """Return a file whose trailer states something else."""
    from hicachectl.formats.trailer import dump_trailer

    return content[:-_TRAILER] + dump_trailer(_trailer(content)._replace(**changes))


_MAKERS: list[Callable[[random.Random, bytes, bytes], Fault]] = [
    _flipped,
    _flipped_trailer,
    _truncated,
    _extended,
    _torn,
    _random,
    _replaced,
    _mixed,
    _removed,
    _bare,
    _foreign,
    _another_version,
    _other_digest,
]
_STRICT = (_refused_unranked,)


def _source(name: str, own: Any) -> str:
    """Return the pool whose host indices a pool uses."""
    if name in own:
        return name
    return "swa" if name.endswith("_state") else "kv"


def _bits(tensor: Any) -> Any:
    """Return a tensor with the same bits as integers, which compare bit by bit."""
    import torch

    return tensor.view(getattr(torch, _BITS[tensor.element_size()]))
