"""Repairs, removals and restores, and rules for every state after a power failure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from tests.move.repairs import indexer, kv, shorten
from tests.power.crash_states import Kind
from tests.power.nixl_writers import OnNixl, name_in_files
from tests.power.writers import BUFFER, Writer, document_of, half_pages, run_here, wrong_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.power.crash_states import State


class _Repair(Writer):
    """A command on a store with two damaged pages. Sidecars may be left without their anchor."""

    def prepare(self) -> None:
        super().prepare()
        for number in (1, 2):
            shorten(self.file(indexer(number)), number)
        self.original = self.present()
        self.bad = {kv(1), indexer(1), kv(2), indexer(2)}

    @property
    def quarantine(self) -> Path:
        return self.store / ".hicachectl" / "quarantine"

    def arguments(self) -> list[object]:
        command = ["verify", self.place, "--profile", self.profile, "--checks", "groups,sizes"]
        options = ["--repair", "quarantine", "--quarantine", self.quarantine, "--yes"]
        return [*command, *options, "--fail-on", "never", *BUFFER, "--format", "json"]

    def name_of(self, key: str) -> str:
        """Return a file store's name of one of the store's keys."""
        return key

    def held(self, state: State) -> dict[str, bytes]:
        """Return the quarantined objects by key."""
        files = state.below(self.quarantine).items()
        return {
            self.name_of(name.rpartition("/")[2]): data
            for name, data in files
            if ".hicachectl" not in name and not name.endswith(".tmp")
        }

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        here = self.present_in(state)
        yield from wrong_bytes(here, self.original)
        for name in sorted(half_pages(set(here), orphans=False)):
            yield f"page {name[:8]} has an anchor without its sidecar"
        yield from self.lost(state, here)
        if document is not None:
            yield from self.undone(state, here)

    def lost(self, state: State, here: dict[str, bytes]) -> Iterator[str]:
        held = self.held(state)
        yield from wrong_bytes(held, self.original)
        for name in sorted(self.original.keys() - here.keys() - held.keys()):
            yield f"{name} is nowhere"
        files = state.below(self.quarantine)
        for run in {name.partition("/")[0] for name in files if ".hicachectl" not in name}:
            if document_of(files.get(f"{run}/.hicachectl/run.json", b"")) is None:
                yield f"{run} has objects, but its run.json is torn"
            lines = files.get(f"{run}/.hicachectl/findings.jsonl", b"").splitlines()
            if len(lines) < 2 or None in map(document_of, lines):
                yield f"{run} has objects, but its findings are torn"

    def undone(self, state: State, here: dict[str, bytes]) -> Iterator[str]:
        if self.bad & here.keys():
            yield "the repair was reported, and damaged pages are still there"

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments(), "--repair-code", "orphan-sidecar")
        if set(self.objects()) != self.original.keys() - self.bad:
            yield "the repair was run again, and damaged pages are still there"
        yield from self.run("restore", self.quarantine, self.place, "--yes")
        if self.objects() != self.original:
            yield "what was quarantined does not come back"


class Quarantine(_Repair):
    """Objects are moved by rename."""

    kinds: ClassVar[dict[str, Kind]] = {
        "form": Kind("fsync", "*/.run.json.tmp"),
        "findings": Kind("fsync", "*/findings.jsonl"),
        "names": Kind("fsync", "*/quarantine/*Z-??????/.hicachectl"),
        "run-name": Kind("fsync", "*/quarantine"),
        "gained-names": Kind("fsync", "*/quarantine/*Z-??????"),
        "lost-names": Kind("fsync", "*/disk/store"),
    }


class QuarantineTakenBack(Quarantine):
    """The repair is not run again: what it has done is restored."""

    kinds: ClassVar[dict[str, Kind]] = {"gained-names": Kind("fsync", "*/quarantine/*Z-??????")}

    def recover(self, state: State) -> Iterator[str]:
        if self.quarantine.exists():
            yield from self.run("restore", self.quarantine, self.place, "--yes")
        if self.objects() != self.original:
            yield "what was quarantined does not come back"


class _Elsewhere(_Repair):
    """The quarantine is on another file system."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.elsewhere = folder / "mount"

    @property
    def roots(self) -> list[Path]:
        return [self.store.parent, self.elsewhere]

    @property
    def quarantine(self) -> Path:
        return self.elsewhere / "quarantine"


class QuarantineByCopy(_Elsewhere):
    """Objects are copied, and then deleted."""

    kinds: ClassVar[dict[str, Kind]] = {
        "copies": Kind("syncfs", "*/quarantine/*Z-??????"),
        "delete": Kind("fsync", "*/disk/store"),
    }


class Remove(_Repair):
    """Pages are removed for good."""

    kinds: ClassVar[dict[str, Kind]] = {"lost-names": Kind("fsync", "*/disk/store")}

    def arguments(self) -> list[object]:
        return ["rm", self.place, "--model", "x/dsa", "--yes", "--format", "json"]

    def lost(self, state: State, here: dict[str, bytes]) -> Iterator[str]:
        yield from ()

    def undone(self, state: State, here: dict[str, bytes]) -> Iterator[str]:
        if self.original.keys() & here.keys():
            yield "the removal was reported, and objects are still there"

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments())
        if self.objects():
            yield "the removal was run again, and objects are still there"


class Restore(_Repair):
    """Quarantined objects come back by rename."""

    kinds: ClassVar[dict[str, Kind]] = {
        "gained-names": Kind("fsync", "*/disk/store"),
    }

    def prepare(self) -> None:
        super().prepare()
        code, text = run_here(*_Repair.arguments(self), home=self.home)
        assert code == 0, text

    def arguments(self) -> list[object]:
        return ["restore", self.quarantine, self.place, "--yes", "--format", "json"]

    def undone(self, state: State, here: dict[str, bytes]) -> Iterator[str]:
        if self.original.keys() - here.keys():
            yield "the restore was reported, and objects are missing"

    def recover(self, state: State) -> Iterator[str]:
        yield from self.run(*self.arguments())
        if self.objects() != self.original:
            yield "what was quarantined does not come back"


class RestoreByCopy(_Elsewhere, Restore):
    """Quarantined copies come back as copies."""

    kinds: ClassVar[dict[str, Kind]] = {
        "copies": Kind("syncfs", "*/disk/store"),
        "gained-names": Kind("fsync", "*/disk/store"),
    }


class RestoreAgain(RestoreByCopy):
    """A killed restore has copied all objects, and its copies are not durable."""

    kinds: ClassVar[dict[str, Kind]] = {"found": Kind("syncfs", "*/disk/store")}

    def prepare(self) -> None:
        super().prepare()
        for name in self.bad:
            data, mtime_ns = self.original[name]
            (self.store / name).write_bytes(data)
            os.utime(self.store / name, ns=(mtime_ns, mtime_ns))

    @property
    def unsynced(self) -> list[Path]:
        return [self.store]

    def wrong(self, state: State, document: dict[str, Any] | None) -> Iterator[str]:
        """Check that a whole copy is left: the copies of the killed run may be torn."""
        here, held = state.directly_in(self.store), self.held(state)
        for name in sorted(self.bad):
            if self.original[name][0] not in (here.get(name), held.get(name)):
                yield f"{name} is nowhere"

    def recover(self, state: State) -> Iterator[str]:
        # 4: a torn object in the store is a conflict; its copy stays in quarantine.
        yield from self.run(*self.arguments(), codes=(0, 4))
        kept = [path.read_bytes() for path in self.quarantine.rglob("*") if path.is_file()]
        for name in sorted(self.bad):
            data = self.original[name][0]
            if data not in kept and self.objects().get(name, (b"",))[0] != data:
                yield f"the restore was run again, and {name} is nowhere"


class _NixlRepair(_Repair, OnNixl):
    """The store is one of the NIXL backend, in which nothing of ours can lie."""

    @property
    def quarantine(self) -> Path:
        return self.store.parent / "quarantine"

    def name_of(self, key: str) -> str:
        return name_in_files(key)


class NixlQuarantine(_NixlRepair, Quarantine):
    """Objects are moved out of two directories by rename."""

    # The syncfs of the store also makes the names in the quarantine durable.
    kinds: ClassVar[dict[str, Kind]] = {
        "form": Kind("fsync", "*/.run.json.tmp"),
        "run-name": Kind("fsync", "*/quarantine"),
        "lost-names": Kind("syncfs", "*/disk/store/???"),
    }


class NixlRemove(_NixlRepair, Remove):
    """Pages are removed for good."""

    kinds: ClassVar[dict[str, Kind]] = {"lost-names": Kind("fsync", "*/disk/store/???/??")}

    def arguments(self) -> list[object]:
        # Keys of sidecars alone may be of several pools.
        return [*super().arguments(), "--profile", self.profile]


class NixlRestore(_NixlRepair, Restore):
    """Quarantined objects come back to two directories by rename."""

    kinds: ClassVar[dict[str, Kind]] = {"gained-names": Kind("syncfs", "*/disk/store/???")}


WRITERS = (
    Quarantine,
    QuarantineTakenBack,
    QuarantineByCopy,
    Remove,
    Restore,
    RestoreByCopy,
    RestoreAgain,
    NixlQuarantine,
    NixlRemove,
    NixlRestore,
)
