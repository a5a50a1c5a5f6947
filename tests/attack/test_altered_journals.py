"""An altered journal of a migration loses nothing.

A move is cut off while it deletes from its source, its journal is altered, and the same command
runs again. Whatever the journal says, each object remains at one of the two places with its bytes.
Once the journal is moved away, the same command completes the move. HICACHECTL_TEST_SEED repeats a
run, HICACHECTL_ATTACK_ROUNDS makes it longer.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import socket
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.__main__ import run
from hicachectl.backends.file.store import FileStore
from tests.move.migrations import demo_store, journals
from tests.stores import contents

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Invoke

PAGES = 12
ROUNDS = int(os.environ.get("HICACHECTL_ATTACK_ROUNDS") or 3)
SEED = int(os.environ.get("HICACHECTL_TEST_SEED") or random.randrange(1 << 32))
SMALL = ("--buffer-bytes", "512KiB", "--jobs", "1")

Lines = list[bytes]


class KilledError(BaseException):
    """Stand-in for a kill: ends a run."""


class Cut:
    """A move that was cut off, and can be restored to that moment."""

    def __init__(self, invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._invoke = invoke
        self._folder = folder
        self.home = folder / "home"
        self.source = demo_store(folder / "source", PAGES)
        self.target = folder / "target"
        self.before = contents(self.source)
        self.other = self._other_journal(monkeypatch)
        self._cut(monkeypatch, self.target)
        (self.journal,) = journals(self.home)
        self.written = self.journal.read_bytes()
        assert len(self.written.splitlines()) > 3
        assert 0 < len(contents(self.source)) < len(self.before)
        for path in (self.source, self.target):
            shutil.copytree(path, folder / "kept" / path.name)

    def _other_journal(self, monkeypatch: pytest.MonkeyPatch) -> bytes:
        """Write the journal of another migration of the same pages."""
        elsewhere = self._folder / "elsewhere"
        self._cut(monkeypatch, elsewhere)
        (path,) = journals(self.home)
        written = path.read_bytes()
        path.unlink()
        shutil.rmtree(elsewhere)
        shutil.rmtree(self.source)
        demo_store(self.source, PAGES)
        for name, (_, time_ns) in self.before.items():
            os.utime(self.source / name, ns=(time_ns, time_ns))
        return written

    def _cut(
        self, monkeypatch: pytest.MonkeyPatch, target: Path, *options: str, deletes: int = 4
    ) -> None:
        """Move until half the pages have left the source, one of them in part."""
        delete = FileStore.delete
        left = itertools.count(1)

        def killed(store: FileStore, rows: Any) -> Any:
            if next(left) == deletes:
                delete(store, rows.slice(0, 1))
                raise KilledError
            return delete(store, rows)

        with monkeypatch.context() as patch:
            patch.setattr(FileStore, "delete", killed)
            with pytest.raises(KilledError):
                self._invoke("migrate", self.source, target, "--move", "--yes", *SMALL, *options)

    def cut_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Resume, and cut the run off again."""
        self._cut(monkeypatch, self.target, "--resume", deletes=3)

    def put_back(self) -> None:
        """Restore both stores to the moment of the cut, without a journal."""
        for path in (self.source, self.target):
            shutil.rmtree(path)
            shutil.copytree(self._folder / "kept" / path.name, path)
        if self.journal.is_dir() and not self.journal.is_symlink():
            shutil.rmtree(self.journal)
        self.journal.unlink(missing_ok=True)

    def run(self, *options: str) -> tuple[int, str]:
        """Run the same command; return its exit code and the path of the journal."""
        arguments = ["migrate", str(self.source), str(self.target), "--move", "--yes", *SMALL]
        return run([*arguments, "--format", "json", *options]), str(self.journal)

    def check_nothing_lost(self, words: str) -> None:
        here, there = contents(self.source), contents(self.target)
        for name, held in self.before.items():
            found = [place[name] for place in (here, there) if name in place]
            assert found, f"{name} is lost; {words}"
            assert all(each == held for each in found), f"{name} has other bytes; {words}"


@pytest.fixture
def cut(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cut:
    return Cut(invoke, tmp_path, monkeypatch)


def flip_bits(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    data = bytearray(b"".join(lines))
    for _ in range(chance.randint(1, 3)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def truncate(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    data = b"".join(lines)
    return data[: chance.randrange(len(data))]


def swap_lines(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    one, two = chance.sample(range(len(lines)), 2)
    lines[one], lines[two] = lines[two], lines[one]
    return b"".join(lines)


def drop_line(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    del lines[chance.randrange(len(lines) - 1)]
    return b"".join(lines)


def repeat_line(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    return b"".join([*lines, chance.choice(lines)])


def take_lines_of_another(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    return b"".join([*lines, *chance.sample(other[1:], 2)])


def take_another(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    return b"".join(other)


def call_copied_removed(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    return b"".join(lines).replace(b'"verified"', b'"removed"')


def call_it_older(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    """An earlier release's journal has no digests, so this one, with digests, is invalid."""
    text = b"".join(lines)
    assert b'"migration": 2' in text
    return text.replace(b'"migration": 2', b'"migration": 1')


def fill_with_noise(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    return lines[0] + chance.randbytes(1000) + b"\n" + lines[-1]


def nest_deeply(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    return lines[0] + b"[" * 200_000 + b"\n"


def name_odd_pages(chance: random.Random, lines: Lines, other: Lines) -> bytes:
    odd: list[dict[str, Any]] = [
        {"pages": "\ud800" * 64},
        {"pages": "0" * 63},
        {"pages": 1e999},
        {"route": [{}]},
        {},
    ]
    entry = {"route": "r", "what": "verified", "pages": "f" * 64, **chance.choice(odd)}
    return b"".join([*lines, json.dumps(entry).encode() + b"\n"])


ALTERATIONS = (
    flip_bits,
    truncate,
    swap_lines,
    drop_line,
    repeat_line,
    take_lines_of_another,
    take_another,
    call_copied_removed,
    call_it_older,
    fill_with_noise,
    nest_deeply,
    name_odd_pages,
)
# The other alterations may leave a journal that is true and says less or the same.
REFUSED = (swap_lines, take_lines_of_another, take_another, call_copied_removed, call_it_older,
           fill_with_noise, nest_deeply, name_odd_pages)  # fmt: skip


@pytest.mark.parametrize("alter", ALTERATIONS, ids=lambda function: function.__name__)
def test_an_altered_journal_loses_nothing(
    cut: Cut, capfd: pytest.CaptureFixture[str], alter: Callable[..., bytes]
) -> None:
    for number in range(ROUNDS):
        words = f"HICACHECTL_TEST_SEED={SEED}, round {number}"
        chance = random.Random(f"{SEED} {number} {alter.__name__}")
        cut.put_back()
        lines, other = (w.splitlines(keepends=True) for w in (cut.written, cut.other))
        cut.journal.write_bytes(alter(chance, lines, other))
        capfd.readouterr()
        code, path = cut.run(*(["--resume"] if number % 2 == 0 else []))
        said = capfd.readouterr()
        assert "Traceback" not in said.err, words
        cut.check_nothing_lost(words)
        if alter in REFUSED:
            assert code == 2, words
        if code == 2:
            assert said.out == "", words
            (line,) = said.err.splitlines()
            assert path in line, words
            cut.journal.unlink()
            code, _ = cut.run()
        assert code == 0, (words, said.err)
        # A page in part at the source is completed only if the journal says so.
        cut.check_nothing_lost(words)
        assert contents(cut.target) == cut.before, words


def test_lines_that_a_power_failure_has_torn_are_left_out(
    cut: Cut, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that never reached the disk read as zeros, with or without the line ends."""
    lines = cut.written.splitlines(keepends=True)
    ends = list(itertools.accumulate(map(len, lines)))
    spans = [(0, 40), (0, ends[0]), (ends[0], ends[1]), (ends[0] + 30, ends[1] + 30)]
    spans += [(ends[1] + 5, ends[1] + 9), (0, ends[-1])]
    for (begin, end), options in itertools.product(spans, ((), ("--resume",))):
        cut.put_back()
        data = bytearray(cut.written)
        data[begin:end] = bytes(end - begin)
        cut.journal.write_bytes(data)
        cut.cut_again(monkeypatch)
        json.loads(cut.journal.read_bytes().splitlines()[0])  # a torn head was replaced
        capfd.readouterr()
        code, _ = cut.run(*options)
        said = capfd.readouterr()
        assert code == 0, (begin, end, said.err)
        cut.check_nothing_lost(f"zeros from {begin} to {end}")
        assert contents(cut.target) == cut.before


def test_a_journal_of_an_earlier_release_is_resumed(
    cut: Cut, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Form 1 has the same lines without digests; a run that resumes it can be cut off too."""
    cut.put_back()
    entries = [json.loads(line) for line in cut.written.splitlines()]
    for entry in entries:
        del entry["digest"]
    entries[0]["migration"] = 1
    cut.journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    cut.cut_again(monkeypatch)
    capfd.readouterr()
    code, _ = cut.run("--resume")
    said = capfd.readouterr()
    assert code == 0, said.err
    assert json.loads(said.out)["resumed"]
    assert contents(cut.target) == cut.before
    assert not contents(cut.source)


def test_a_run_that_goes_on_after_a_torn_line_leaves_a_journal_that_can_be_read(
    cut: Cut, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = len(cut.written.splitlines(keepends=True)[-1])
    for torn in (1, 2, last // 2, last - 1, last, last + 1, len(cut.written) - 5):
        cut.put_back()
        cut.journal.write_bytes(cut.written[:-torn])
        cut.cut_again(monkeypatch)
        capfd.readouterr()
        code, _ = cut.run("--resume")
        said = capfd.readouterr()
        assert code == 0, said.err
        assert json.loads(said.out)["resumed"]
        assert contents(cut.target) == cut.before
        # The page in part stays: no line says any longer that it was compared.
        assert len({name[:64] for name in contents(cut.source)}) <= 1


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "sparse", "zero", "socket"])
@pytest.mark.parametrize("resumes", [False, True], ids=["", "resume"])
def test_what_is_no_journal_is_named_and_left_alone(
    cut: Cut,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    resumes: bool,
) -> None:
    cut.put_back()
    victim = tmp_path / "victim"
    victim.write_bytes(cut.written)
    if kind == "fifo":
        os.mkfifo(cut.journal)
    elif kind == "link":
        cut.journal.symlink_to(victim)
    elif kind == "directory":
        cut.journal.mkdir()
    elif kind == "sparse":
        cut.journal.touch()
        os.truncate(cut.journal, 1 << 42)
    elif kind == "zero":
        cut.journal.symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(cut.journal.parent)  # a socket's path must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(cut.journal.name)
    capfd.readouterr()
    code, path = cut.run(*(["--resume"] if resumes else []))
    said = capfd.readouterr()
    assert (code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert path in line
    assert victim.read_bytes() == cut.written
    cut.check_nothing_lost(kind)


def test_a_page_that_only_another_migration_has_copied_is_not_removed(
    cut: Cut, capfd: pytest.CaptureFixture[str]
) -> None:
    """The destination has other bytes under the same keys, and the source has part of the page."""
    cut.put_back()
    page = max(name[:64] for name in contents(cut.source))
    (anchor, *_) = sorted(name for name in cut.before if name.startswith(f"{page}_"))
    left = {n: held for n, held in cut.before.items() if n.startswith(page) and n != anchor}
    (cut.source / anchor).unlink(missing_ok=True)
    for name, (data, time_ns) in left.items():
        (cut.source / name).write_bytes(data)
        os.utime(cut.source / name, ns=(time_ns, time_ns))
    for name in (anchor, *left):
        (cut.target / name).write_bytes(bytes(len(cut.before[name][0])))
    lines = [line for line in cut.other.splitlines(keepends=True) if b'"verified"' in line]
    entry = json.loads(lines[0])
    entry["pages"] = page
    cut.journal.write_bytes(cut.written + json.dumps(entry).encode() + b"\n")
    cut.run("--resume")
    capfd.readouterr()
    kept = contents(cut.source)
    assert {name: kept.get(name) for name in left} == left
