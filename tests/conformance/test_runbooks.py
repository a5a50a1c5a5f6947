"""The commands of hicachectl-runbooks(7) do what the page says, on stores that SGLang wrote.

The page shows everything that a command prints. After a change of its outputs,
`HICACHECTL_TEST_RECORD=1 pytest -n 0 tests/conformance/test_runbooks.py` writes the outputs that
have changed into the page.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from hicachectl.__main__ import run
from hicachectl.formats.hashing import page_hashes_hex
from tests.conformance.cpu_server import KEY, page_files, prompt
from tests.skips import needs_root
from tests.small_file_system import small_file_system
from tests.test_readme import check_arguments, manual_blocks
from tests.verification.drawn_stores import Model, write
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.conformance.conftest import Manifest, WriteStore
    from tests.conformance.cpu_server import CpuServer

RECORDS = os.environ.get("HICACHECTL_TEST_RECORD") == "1"
PAGE = Path(__file__).parents[2] / "man" / "hicachectl-runbooks.7"
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
}
LAUNCH = (
    "python -m sglang.launch_server --model-path /models/tiny --served-model-name "
    "Qwen/Qwen3-FP8-Tiny --page-size 8 --enable-hierarchical-cache --hicache-mem-layout page_first "
    "--hicache-storage-backend file "
    "--hicache-storage-backend-extra-config '{\"prefetch_threshold\": 8}' --tp "
)
SERVERS = 65534  # user and group of the servers
COLUMNS = 75  # of a terminal with 80 columns, less the margin of a page
LONGEST = 80  # characters of a line of an output that is not wrapped
ESCAPES = (
    ("\\", r"\e"), ("-", r"\-"), ('"', r"\(dq"), ("…", r"\[u2026]"), ("█", r"\[u2588]"),
)  # fmt: skip
# These differ from run to run; tables shorten URLs of files. The tests choose the times of 2025.
DIFFERING = {
    r"(?!2025)\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z| UTC)?": "TIME",
    r"\b\d{8}\S*-[0-9a-f]{6}\b": "RUN",  # before AGE, because a name can end with 72784d
    r"\b\d+[smhd]\b": "AGE",
    r"\b[1-9][0-9.]* [KMGT]iB(?=( are)? free)": "SPACE",
    r"file:///\S+": "URL",
    r"\b\d+\.\d s\b": "SECONDS",
}
FP8 = " --kv-cache-dtype fp8_e4m3"
LITERAL = re.compile(r"^\.Bd -literal$\n(.*?)^\.Ed$", re.MULTILINE | re.DOTALL)
WRAPPER = textwrap.TextWrapper(
    COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
)


class Step(NamedTuple):
    """A command, the text that it must print on a terminal, and its exit status."""

    words: list[str]
    printed: str
    status: int


class Terminal(io.StringIO):
    """What a terminal shows: stdout and stderr, in the order in which they are written."""

    def isatty(self) -> bool:
        return True


class Diverted(io.TextIOBase):
    """Stderr that ends up on a terminal, but asks for no progress."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def write(self, text: str) -> int:
        return self._terminal.write(text)


def section(title: str) -> str:
    """Return a section of the page."""
    return PAGE.read_text().split(f"\n.Sh {title}\n")[1].split("\n.Sh ")[0]


def blocks(title: str) -> list[str]:
    """Return what a section shows as it is typed."""
    text = section(title).replace(r"\&", "")
    for plain, escape in reversed(ESCAPES):
        text = text.replace(escape, plain)
    return LITERAL.findall(text)


def steps(title: str) -> list[Step]:
    """Return the commands of a section."""
    found: list[Step] = []
    tried = (text for text in blocks(title) if "$ hicachectl " in text)
    for line in chain.from_iterable(map(str.splitlines, tried)):
        if line.startswith("$ hicachectl "):
            found.append(Step(shlex.split(line)[2:], "", 0))
        elif status := re.fullmatch(r"\(status (\d+)\)", line):
            found[-1] = found[-1]._replace(status=int(status[1]))
        else:
            found[-1] = found[-1]._replace(printed=f"{found[-1].printed}{line}\n")
    return found


def words(text: str) -> list[str]:
    """Return the words of an output, with a name in place of each that differs between runs."""
    flat = " ".join(text.split())  # the page wraps long lines
    for form, name in DIFFERING.items():
        flat = re.sub(form, name, flat)
    return flat.split()


def record(title: str, done: Iterable[tuple[int, str]]) -> None:
    """Write the outputs and statuses of a section's commands into the page."""
    outcomes = iter(done)

    def block(found: re.Match[str]) -> str:
        commands = [line for line in found[1].splitlines() if line.startswith("$ hicachectl ")]
        if not commands:
            return found[0]
        lines = list(chain.from_iterable(map(shown, commands, outcomes)))
        return "\n".join([".Bd -literal", *lines, ".Ed"])

    before = section(title)
    PAGE.write_text(PAGE.read_text().replace(before, LITERAL.sub(block, before)))


def shown(command: str, outcome: tuple[int, str]) -> Iterator[str]:
    """Yield the lines of the page for a command: long lines of the output are wrapped."""
    status, printed = outcome
    yield command
    for line in re.sub(r"file:///\S*…\S*", "file:///mnt/hicache", printed).strip("\n").splitlines():
        yield from map(escaped, [line] if len(line) <= LONGEST else WRAPPER.wrap(line))
    if status:
        yield f"(status {status})"


def escaped(line: str) -> str:
    """Return a line of a literal block in mdoc."""
    for plain, escape in ESCAPES:
        line = line.replace(plain, escape)
    return rf"\&{line}" if line.startswith((".", "'")) else line


class Machine:
    """Folders in place of those of the page, and a shell's current directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "hicache"
        self._places = {
            "/mnt/hicache": str(self.store),
            "/mnt/new": str(folder / "new"),
            "/backup": str(folder),
        }
        (config,) = [block for block in manual_blocks(PAGE.name) if "[stores.prod]" in block]
        (folder / "new").mkdir()
        (folder / "hicachectl").mkdir()
        (folder / "hicachectl" / "config.toml").write_text(self._here(config))
        (folder / "config.json").write_text(json.dumps(MODEL))

    def _here(self, text: str) -> str:
        for name, place in self._places.items():
            text = text.replace(name, place)
        return text

    def write(self, manifest: Manifest, directory: Path, age: float) -> None:
        """Copy a store of SGLang, last written to some seconds ago."""
        then = time.time() - age
        for entry in manifest["objects"]:
            shutil.copy(directory / entry["file"], self.store)
            os.utime(self.store / entry["file"], (then, then))

    def serve(self, url: str) -> None:
        """Put the URL of a server in place of the page's."""
        self._places["http://127.0.0.1:30000"] = url

    def ask(self, tokens: list[int]) -> None:
        """Write the requests and the trace, of the same prompts."""
        prompts = [[*tokens, 1], tokens[:41]]
        lines = [json.dumps(prompt) for prompt in prompts]
        (self.folder / "requests.jsonl").write_text("\n".join(lines))
        day = [json.dumps({"timestamp": at, "token_ids": prompts[0]}) for at in range(3)]
        (self.folder / "day.jsonl").write_text("\n".join(day))

    def do(self, words: list[str]) -> tuple[int, str]:
        """Run a command; return its status, and what it prints, with the page's paths."""
        terminal = Terminal()
        with (
            contextlib.redirect_stdout(terminal),
            contextlib.redirect_stderr(Diverted(terminal)),
        ):
            status = run([self._here(word) for word in words])
        printed = terminal.getvalue()
        for name, place in self._places.items():
            printed = printed.replace(place, name)
        return status, printed

    def shell(self, title: str, **users: str) -> None:
        """Do the commands of a section that are not hicachectl's. users: in place of the page's."""
        text = "".join(text for text in blocks(title) if "$ hicachectl " not in text)
        for name, user in users.items():
            text = re.sub(rf"(?<=[ :]){name}\b", user, text)
        subprocess.run(["sh", "-euc", self._here(text)], check=True)

    def follow(self, title: str, between: Callable[[Step], None] = lambda step: None) -> None:
        """Do the steps of a section. between: called after each of them."""
        done: list[tuple[int, str]] = []
        for step in steps(title):
            status, printed = self.do(step.words)
            # `show` lists the objects of a page in the order of their directory.
            order = sorted if step.words[0] == "show" else list
            now, before = order(words(printed)), order(words(step.printed))
            if not RECORDS:
                assert now == before, step.words
                assert status == step.status, step.words
            done.append((status, step.printed if now == before else printed))
            between(step)
        if RECORDS:
            record(title, done)


def fill(path: Path) -> None:
    """Write a file until the file system, of 1 MiB, is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(512):
            file.write(bytes(4096))


@pytest.fixture(scope="module")
def shared_cpu_server(module_cpu_server: CpuServer) -> CpuServer:
    return module_cpu_server


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    machine.store.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HICACHECTL_CONFIG", raising=False)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("NO_COLOR", "1")
    return machine


@pytest.fixture(scope="session")
def before(sglang_store: WriteStore) -> tuple[Path, Manifest]:
    """The store of bfloat16 servers."""
    return sglang_store("fp8_mha", dtype="bfloat16", seed=1, pages=12)


@pytest.mark.xdist_group("sglang-server")
def test_no_hits(machine: Machine, cpu_server: CpuServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server misses pages under another name, and then prompts below its threshold."""
    long, short = prompt(1, 6), prompt(2, 3)
    monkeypatch.setenv("HICACHECTL_API_KEY", KEY)
    machine.serve(cpu_server.url)
    days = [{"timestamp": n, "token_ids": tokens} for n, tokens in enumerate((long, short))]
    (machine.folder / "day.jsonl").write_text("\n".join(map(json.dumps, days)))

    def attach(threshold: int) -> None:
        config = {"file_storage_path": str(machine.store), "prefetch_threshold": threshold}
        cpu_server.attach("file", config)

    def restored() -> list[int]:
        cpu_server.flush()
        return [cpu_server.generate(tokens).storage for tokens in (long, short)]

    attach(256)
    assert restored() == [0, 0]
    written = [file for tokens in (long, short) for file in page_files(machine.store, tokens)]
    wait_until(lambda: all(file.exists() for file in written))
    for file in written:
        os.utime(file, (time.time() - 3600,) * 2)
        file.rename(file.with_name(file.name.replace("_tiny_", "_org-tiny_")))

    def change(step: Step) -> None:
        if step.words[0] == "migrate":
            assert restored() == [384, 0]
        if step.words[0] == "explain":
            cpu_server.detach()
            attach(64)
            assert restored() == [384, 192]
        if step.words[0] == "doctor" and not step.status:
            said = machine.do([*step.words, "--watch", "0s"])[1]
            assert not re.search("^(fail|warn)", said, re.MULTILINE), said

    machine.follow("NO HITS", change)
    cpu_server.detach()


def test_missing_objects(machine: Machine, before: tuple[Path, Manifest]) -> None:
    """A truncated page, one that a rank lacks, and one that a server is about to write."""
    directory, manifest = before
    machine.write(manifest, directory, 3600)
    machine.ask(manifest["tokens"])
    (machine.folder / "serve.sh").write_text(f"{LAUNCH}2")
    pages = page_hashes_hex(manifest["tokens"], 8)
    first, second = (sorted(machine.store.glob(f"{pages[n]}*")) for n in (2, 9))
    os.truncate(first[0], 4096)
    os.utime(first[0], (time.time() - 3600,) * 2)
    shutil.copy(second[0], machine.store / f"{'ab' * 32}{second[0].name[64:]}")
    second[1].unlink()
    machine.follow("MISSING OBJECTS")


def test_a_dtype_change(
    machine: Machine, before: tuple[Path, Manifest], sglang_store: WriteStore
) -> None:
    machine.write(before[1], before[0], 3 * 3600 + 60)
    directory, manifest = sglang_store("fp8_mha")
    machine.write(manifest, directory, 10 * 60 + 5)
    (machine.folder / "serve.sh").write_text(f"{LAUNCH}2{FP8}")
    (machine.folder / "old.sh").write_text(f"{LAUNCH}2")
    machine.follow("A DTYPE CHANGE POISONS THE STORE")
    files = {path.name: path.read_bytes() for path in machine.store.iterdir() if path.is_file()}
    assert files == {path.name: path.read_bytes() for path in before[0].iterdir()}


def test_a_dtype_change_of_equal_size(machine: Machine) -> None:
    changed = 1764235800  # the time in the page
    old = Model(
        name="Qwen/Qwen3-FP8-Tiny", kind="mha", dtype="float8_e4m3fn", layout="page_first",
        layers=3, heads=4, width=64, page_size=8, tp=2, seed=1, noise=False,
    )  # fmt: skip
    write(machine.store, old, range(12), changed - 60.0 * np.arange(12, 0, -1))
    new = replace(old, dtype="float8_e5m2")
    write(machine.store, new, range(12, 20), changed + 60.0 * np.arange(8))
    (machine.folder / "serve.sh").write_text(f"{LAUNCH}2 --kv-cache-dtype fp8_e5m2")
    machine.follow("A DTYPE CHANGE THAT NO SIZE SHOWS")


def test_a_tp_change(machine: Machine, before: tuple[Path, Manifest]) -> None:
    directory, manifest = before
    machine.write(manifest, directory, 3600)
    machine.ask(manifest["tokens"])
    (machine.folder / "serve.sh").write_text(f"{LAUNCH}4")
    (machine.folder / "old.sh").write_text(f"{LAUNCH}2")
    late = [path for page in page_hashes_hex(manifest["tokens"], 8)[-2:]
            for path in machine.store.glob(f"{page}*")]  # fmt: skip
    hidden = [path.rename(machine.folder / path.name) for path in late]

    def serve(step: Step) -> None:
        if "--to-tp" in step.words and "--verify" in step.words:
            while hidden:  # the old servers write them during the first copy
                path = hidden.pop()
                path.rename(machine.store / path.name)

    machine.follow("A TP CHANGE LOSES ALL HITS", serve)
    for entry in manifest["objects"]:  # converted, and converted back
        name = entry["file"]
        assert (machine.store / name).read_bytes() == (directory / name).read_bytes()


def test_a_full_disk(
    machine: Machine, before: tuple[Path, Manifest], sglang_store: WriteStore
) -> None:
    with small_file_system(machine.store, "1m"):
        machine.write(before[1], before[0], 3600)
        directory, manifest = sglang_store("fp8_mha")
        machine.write(manifest, directory, 7200)  # before the servers of the profile
        machine.ask(before[1]["tokens"])
        for name in sorted({path.name[:64] for path in before[0].glob("*.bin")})[:2]:
            for path in before[0].glob(f"{name}*"):  # servers that are gone
                old = machine.store / path.name.replace("FP8-Tiny", "Old")
                shutil.copy(path, old)
                os.utime(old, (1e9, 1e9))
        (machine.folder / "serve.sh").write_text(f"{LAUNCH}2")
        made = "profile --launch @serve.sh --model-config config.json -o prod.toml"
        repair = "verify prod: --profile prod.toml --repair quarantine --yes"
        assert [machine.do(line.split())[0] for line in (made, repair)] == [0, 4]
        stale = machine.store / f".{'0a' * 16}.tmp"
        stale.write_bytes(bytes(4096))
        os.utime(stale, (1e9, 1e9))
        lone = next(before[0].glob("*.bin"))  # the other rank found no room
        partial = machine.store / f"{'ab' * 32}{lone.name[64:]}"
        shutil.copy(lone, partial)
        os.utime(partial, (1e9, 1e9))
        fill(machine.store / ".hicachectl" / "filler")
        free: list[Any] = []

        def look(_: Step) -> None:
            free.append(shutil.disk_usage(machine.store).free)

        machine.follow("A FULL DISK", look)
        assert free[0] == 0
        assert max(free) > 100 << 10


@needs_root
def test_a_stranger(machine: Machine, before: tuple[Path, Manifest]) -> None:
    """After the last catalog, an object gets other bytes, and a page appears."""
    directory, manifest = before
    machine.write(manifest, directory, 24 * 3600)
    (machine.folder / "serve.sh").write_text(f"{LAUNCH}2")
    recorded = machine.do(["verify", "prod:", "--catalog", "prod.parquet", "--update-catalog"])
    assert recorded[0] == 0, recorded
    changed, *_, other = sorted(machine.store.glob("*.bin"))
    changed.write_bytes(bytes(reversed(changed.read_bytes())))
    forged = [
        shutil.copy(path, machine.store / f"{'ab' * 32}{path.name[64:]}")
        for path in machine.store.glob(f"{other.name[:64]}*")
    ]
    for path in (changed, *forged):
        os.utime(path, (time.time() - 3600,) * 2)
    planted = machine.store / ".hicachectl" / "quarantine" / "run"
    planted.mkdir(parents=True)
    for path in machine.store.iterdir():
        if path not in forged and path.name != ".hicachectl":
            os.chown(path, SERVERS, SERVERS)
    machine.shell("A STRANGER COULD WRITE TO THE STORE", sglang=str(SERVERS))
    evidence = machine.folder / "evidence"
    listed = {line.split()[-1] for line in (evidence / "strangers").read_text().splitlines()}
    assert listed >= {str(path) for path in (*forged, planted)}
    assert str(changed) not in listed
    assert (evidence / ".hicachectl" / "quarantine" / "run").is_dir()
    assert {path.stat().st_uid for path in (machine.store, *machine.store.iterdir())} == {SERVERS}
    machine.follow("A STRANGER COULD WRITE TO THE STORE")
    left = {path.name[:64] for path in machine.store.glob("*.bin")}
    assert left == {path.name[:64] for path in directory.glob("*.bin")} - {changed.name[:64]}


def test_a_new_cluster(machine: Machine, before: tuple[Path, Manifest]) -> None:
    directory, manifest = before
    machine.write(manifest, directory, 3600)
    machine.ask(manifest["tokens"])
    (machine.folder / "serve.sh").write_text(f"{LAUNCH}2")
    machine.follow("WARM A NEW CLUSTER FROM CRON")


def test_the_worth_of_the_cache(machine: Machine, before: tuple[Path, Manifest]) -> None:
    directory, manifest = before
    machine.write(manifest, directory, 3600)
    here: list[int] = manifest["tokens"]
    crm, mail = ([token + more for token in here] for more in (1000, 2000))
    day = [(crm, "crm"), (crm, "crm"), (mail, "mail"), (here, ""), (here, ""), (crm, "crm"),
           (here, ""), (here[:50] + mail[:30], "")]  # fmt: skip
    lines = [
        {"timestamp": time.time() + 3600 * (hour - 8), "token_ids": [*tokens, 1], "cache_salt": s}
        for hour, (tokens, s) in enumerate(day)
    ]
    (machine.folder / "day.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (machine.folder / "serve.sh").write_text(f"{LAUNCH}2")
    machine.follow(r"IS THE CACHE WORTH ITS DISKS?\&")


def test_the_line_for_cron_is_the_command_that_was_tried() -> None:
    (line,) = [text for block in manual_blocks(PAGE.name) for text in block.splitlines()
               if "* * " in text]  # fmt: skip
    words = shlex.split(line.split(None, 5)[5])
    assert words[:2] == ["hicachectl", "-q"]
    check_arguments(words[1:])
    assert words[2:] in [step.words for step in steps("WARM A NEW CLUSTER FROM CRON")]
