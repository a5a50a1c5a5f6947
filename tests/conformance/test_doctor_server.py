"""`doctor` names why a real SGLang server restores nothing, or wrong pages, in its first line.

Two servers show all causes: one whose backends are attached and detached, healthy at first, and one
of float16 pages without metrics, with keys, whose directory only its environment names.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from hicachectl.formats.hashing import page_hashes_hex
from tests.attack.children import NOBODY, as_nobody
from tests.conformance import tiny_llama
from tests.conformance.cpu_server import KEY, PAGE_SIZE, ROOT, CpuServer, page_files, prompt
from tests.conformance.plugin_site import PAGE_BYTES, Site, full_hit
from tests.skips import need_tool, needs_root
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.conftest import Invoke

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

PROMPT = prompt(1)
FULL = full_hit(PROMPT)
PAGES = FULL // PAGE_SIZE
SECRET = "secret-of-the-store"
BAD = ("fail", "warn")
Check = dict[str, Any]


class Doctor:
    """Runs `doctor` with short looks."""

    def __init__(self, invoke: Invoke) -> None:
        self._invoke = invoke

    def checks(
        self, store: object, *options: object, watch: str = "0s", exit_code: int = 0
    ) -> list[Check]:
        """Return the checks, after the comparison of the table with them."""
        arguments = ("doctor", store, "--watch", watch, *options)
        document = self._invoke.document(*arguments, exit_code=exit_code)
        found: list[Check] = document["checks"]
        first = found[0]
        assert document["verdict"] == first["status"]
        table = self._invoke(*arguments, exit_code=exit_code).stdout.splitlines()
        words = [first["status"], first["group"], first["name"]]
        assert table[0].split()[:3] == words
        return found

    def cause(self, store: object, *options: object, status: str = "fail") -> Check:
        """Return the first check, and assert its status.

        Beside it, only counters of tokens that the server has lost may fail.
        """
        found = self.checks(store, *options, exit_code=4 if status == "fail" else 0)
        first, *others = found
        assert first["status"] == status, found
        failing = [check for check in others if check["status"] == "fail"]
        assert all(check["group"] == "live" for check in failing), found
        return first


@pytest.fixture(scope="module")
def shared_cpu_server(module_cpu_server: CpuServer) -> CpuServer:
    return module_cpu_server


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHECTL_API_KEY", KEY)


@pytest.fixture
def doctor(invoke: Invoke) -> Doctor:
    return Doctor(invoke)


class Quiet(NamedTuple):
    """A server of float16 pages that says little, and the directory of its environment."""

    server: CpuServer
    directory: Path


@pytest.fixture(scope="module")
def quiet(
    sglang_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Quiet]:
    folder = tmp_path_factory.mktemp("quiet")
    config = {"prefetch_threshold": PAGE_SIZE, "password": SECRET}
    options = ("--dtype", "float16", "--api-key", KEY, "--hicache-storage-backend", "file")
    extra = ("--hicache-storage-backend-extra-config", json.dumps(config))
    store = folder / "store"
    with CpuServer(
        sglang_python, tiny_model, folder / "log", *options, *extra,
        metrics=False, SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=str(store),
    ) as server:  # fmt: skip
        server.generate(PROMPT)
        await_stored(store, PROMPT)
        server.flush()
        assert server.generate(PROMPT).storage == FULL
        yield Quiet(server, store)


def attach(server: CpuServer, directory: Path, **options: Any) -> None:
    """Attach HiCacheFile."""
    policy = options.pop("write_policy", "write_through")
    server.attach("file", {"file_storage_path": str(directory), **options}, policy)


def stored(server: CpuServer, directory: Path, **options: Any) -> None:
    """Let a server write the prompt's pages into a directory, and detach it."""
    attach(server, directory, **options)
    server.generate(PROMPT)
    await_stored(directory, PROMPT)
    server.detach()


def await_stored(directory: Path, tokens: Sequence[int]) -> None:
    """Wait until the pages of a prompt are in a directory, and let them be a minute old."""
    files = page_files(directory, tokens)
    wait_until(lambda: all(path.exists() for path in files))
    for path in files:
        os.utime(path, (time.time() - 60,) * 2)


def restored(server: CpuServer, tokens: Sequence[int] = PROMPT) -> int:
    """Return the tokens of a prompt that a server with empty pools restores from its store."""
    server.flush()
    return server.generate(tokens).storage


def trace(path: Path, *prompts: Sequence[int]) -> Path:
    """Write requests of prompts."""
    lines = [json.dumps({"timestamp": n, "token_ids": list(p)}) for n, p in enumerate(prompts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def words_of(check: Check) -> str:
    """Return the answer of a check, with its evidence."""
    return f"{check['detail']} {check['evidence'] or ''}"


def follow(invoke: Invoke, check: Check, exit_code: int = 0) -> str:
    """Run the command of a check's next step as it stands; return what it prints."""
    (command,) = re.findall(r"(hicachectl [^;]*)", check["next"])
    return invoke(*shlex.split(command)[1:], exit_code=exit_code).stdout


@contextmanager
def public_place() -> Iterator[Path]:
    """Make a directory that everybody may enter, with a home for NOBODY."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "home").mkdir()
        os.chown(place / "home", NOBODY, NOBODY)
        yield place


def asked(store: Path, server: CpuServer, watch: str = "0s") -> tuple[object, ...]:
    """Return a command line of `doctor`, for JSON."""
    return ("doctor", store, "--server", server.url, "--watch", watch, "--format", "json")


@contextmanager
def traffic(server: CpuServer, prompts: Iterator[Sequence[int]]) -> Iterator[None]:
    """Let a server answer prompts, with empty pools, until the end of the block."""
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            server.flush()
            server.generate(next(prompts))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


# ---- a healthy server


@pytest.mark.parametrize("backend", ["file", "plug-in"])
def test_a_healthy_server_has_no_failing_and_no_warning_check(
    cpu_server: CpuServer, tmp_path: Path, doctor: Doctor, backend: str
) -> None:
    """The server is healthy when idle and under requests, whose restored tokens are counted."""
    store = tmp_path / "store"
    if backend == "file":
        attach(cpu_server, store)
    else:
        Site(cpu_server, store).attach()
    cpu_server.generate(PROMPT)
    await_stored(store, PROMPT)
    assert restored(cpu_server) == FULL
    options = ("--server", cpu_server.url, "--trace", trace(tmp_path / "trace.jsonl", PROMPT))
    assert not [check for check in doctor.checks(store, *options) if check["status"] in BAD]
    with traffic(cpu_server, itertools.repeat(PROMPT)):
        checks = doctor.checks(store, *options, watch="2s")
    assert not [check for check in checks if check["status"] in BAD]
    live = [check for check in checks if check["group"] == "live"]
    assert any(check["status"] == "ok" and "restored" in check["detail"] for check in live), live


# ---- causes that move no counter of losses


def test_a_backend_that_is_not_attached(
    cpu_server: CpuServer, tmp_path: Path, doctor: Doctor
) -> None:
    """The write policy of the detached backend, which the server still shows, matters no more."""
    stored(cpu_server, tmp_path / "store")
    attach(cpu_server, tmp_path / "store", write_policy="write_through_selective")
    cpu_server.detach()
    cpu_server.generate(PROMPT)
    check = doctor.cause(tmp_path / "store", "--server", cpu_server.url)
    assert (check["group"], check["name"]) == ("server", "attached")
    assert "--hicache-storage-backend" in check["next"]


def test_write_through_selective_is_a_warning(
    cpu_server: CpuServer, tmp_path: Path, doctor: Doctor
) -> None:
    """Nothing is stored after one use of a page; the next command changes the policy."""
    attach(cpu_server, tmp_path / "store", write_policy="write_through_selective")
    cpu_server.generate(PROMPT)
    arguments = (tmp_path / "store", "--server", cpu_server.url)
    (empty,) = (one for one in doctor.checks(*arguments) if one["name"] == "pages")
    assert empty["status"] == "warn"
    assert empty["detail"].startswith("The servers have written no page yet")
    cpu_server.generate(PROMPT)
    await_stored(tmp_path / "store", PROMPT)
    check = doctor.cause(*arguments, status="warn")
    assert (check["group"], check["name"]) == ("server", "write-policy")
    assert "write_through_selective" in check["detail"]
    command = check["next"].partition("; ")[0]
    subprocess.run(["bash", "-c", command], env={**os.environ, "ADMIN_KEY": KEY}, check=True)
    changed = doctor.checks(*arguments)
    assert "write-policy" not in {one["name"] for one in changed if one["status"] != "ok"}


def test_a_server_that_requires_another_key(
    quiet: Quiet, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHECTL_API_KEY", "key-of-another-server")
    check = doctor.cause(quiet.directory, "--server", quiet.server.url)
    assert (check["group"], check["name"]) == ("server", "reachable")
    assert "API key" in check["detail"]
    assert "HICACHECTL_API_KEY" in check["next"]
    assert "key-of-another-server" not in json.dumps(check)


def test_a_server_without_metrics_is_unknown(quiet: Quiet, doctor: Doctor) -> None:
    check = doctor.cause(quiet.directory, "--server", quiet.server.url, status="unknown")
    assert (check["group"], check["name"]) == ("live", "metrics")
    assert "--enable-metrics" in check["next"]


class Other(NamedTuple):
    """A store of another deployment: the options that write it, and the check that tells."""

    options: tuple[str, ...]
    check: str
    theirs: str  # words of the store's side
    ours: str


@pytest.mark.parametrize(
    "other",
    [
        Other(("--to-model", "other"), "model", "other", "tiny"),
        Other(("--to-tp", "2"), "tp", "tp 2", "tp 1"),
    ],
    ids=["name", "tp"],
)
def test_a_store_of_another_deployment_is_named_and_the_next_command_mends_it(
    cpu_server: CpuServer, tmp_path: Path, doctor: Doctor, invoke: Invoke, other: Other
) -> None:
    """The store's pages, as a server of another name or TP size writes them, serve again.

    Once the server has written pages of its own, the others are a warning.
    """
    stored(cpu_server, tmp_path / "written")
    cold = cpu_server.generate(PROMPT)
    store, server = tmp_path / "store", ("--server", cpu_server.url)
    invoke("migrate", tmp_path / "written", store, *server, *other.options)
    attach(cpu_server, store)
    assert restored(cpu_server) == 0
    await_stored(store, PROMPT)
    warning = doctor.cause(store, *server, status="warn")
    for path in page_files(store, PROMPT):
        path.unlink()
    check = doctor.cause(store, *server)
    for found in (warning, check):
        assert (found["group"], found["name"]) == ("server", other.check)
        assert other.theirs in found["detail"]
        assert other.ours in found["detail"]
        assert found["next"] == check["next"]
    follow(invoke, check)
    cpu_server.flush()
    warm = cpu_server.generate(PROMPT)
    assert warm.storage == FULL
    assert warm.same(cold)
    assert not [check for check in doctor.checks(store, *server) if check["status"] in BAD]


def test_a_store_of_another_page_size(
    cpu_server: CpuServer, tmp_path: Path, doctor: Doctor, invoke: Invoke
) -> None:
    """Pages of half the size are the one cause, also beside pages that the server wrote.

    With requests, the next command shows that it is the page size, and not the dtype.
    """
    store = tmp_path / "store"
    store.mkdir()
    values = np.random.default_rng(1).standard_normal(PAGE_BYTES // 4, np.float32)
    half = (values.view(np.uint32) >> 16).astype("<u2").tobytes()  # bfloat16
    for page in page_hashes_hex(PROMPT, PAGE_SIZE // 2):
        (store / f"{page}_tiny_0_1.bin").write_bytes(half)
    attach(cpu_server, store)
    check = doctor.cause(store, "--server", cpu_server.url)
    assert (check["group"], check["name"]) == ("server", "page-size")
    assert {"32", "64"} <= set(re.findall(r"\d+", check["detail"]))
    cpu_server.generate(PROMPT)
    await_stored(store, PROMPT)
    for path in store.iterdir():
        os.utime(path, (1e9, 1e9))
    requests = trace(tmp_path / "trace.jsonl", PROMPT)
    options = ("--server", cpu_server.url, "--trace", requests)
    check = doctor.cause(store, *options, status="warn")
    assert (check["group"], check["name"]) == ("server", "page-size")
    command = shlex.split(check["next"].partition("; ")[0])
    assert invoke.document(*command[1:])["served_tokens"] == len(PROMPT) // 32 * 32


def test_pages_of_float16_under_a_server_of_bfloat16(
    quiet: Quiet, cpu_server: CpuServer, tmp_path: Path, doctor: Doctor
) -> None:
    """Names and sizes are equal: the server restores wrong values, and counts hits."""
    store = tmp_path / "store"
    shutil.copytree(quiet.directory, store)
    cold = cpu_server.generate(PROMPT)
    attach(cpu_server, store)
    cpu_server.flush()
    warm = cpu_server.generate(PROMPT)
    assert warm.storage == FULL
    assert not warm.same(cold)
    check = doctor.cause(store, "--server", cpu_server.url)
    assert (check["group"], check["name"]) == ("store", "dtype")
    assert "float16" in words_of(check)
    assert "bfloat16" in words_of(check)


@pytest.mark.parametrize("named", ["extra_config", "environment"])
def test_another_directory_than_the_servers(
    named: str, request: pytest.FixtureRequest, tmp_path: Path, doctor: Doctor
) -> None:
    """The server's directory is found by its settings, or by its processes' environment."""
    if named == "environment":
        quiet: Quiet = request.getfixturevalue("quiet")
        server, theirs = quiet
    else:
        server, theirs = request.getfixturevalue("cpu_server"), tmp_path / "theirs"
        attach(server, theirs)
        server.generate(PROMPT)
        await_stored(theirs, PROMPT)
    store = tmp_path / "store"
    shutil.copytree(theirs, store)
    check = doctor.cause(store, "--server", server.url)
    assert (check["group"], check["name"]) == ("same-store", "same-store")
    assert str(theirs) in words_of(check)
    assert str(store) in words_of(check)


@needs_root
def test_another_directory_is_seen_by_counters_without_the_servers_processes(
    cpu_server: CpuServer,
) -> None:
    """Another user cannot look into the server: it acknowledges new pages, and none appears.

    It is unknown while the last pages are not acknowledged.
    """
    new = (prompt(seed) for seed in itertools.count(1000))

    def judged(store: Path, home: Path) -> str:
        with traffic(cpu_server, new):
            (ended,) = as_nobody([asked(store, cpu_server, watch="2s")], home)
        checks = json.loads(ended.stdout)["checks"]
        (check,) = (check for check in checks if check["name"] == "same-store")
        assert check["status"] != "fail" or check == checks[0], checks
        assert ended.status == (4 if check["status"] == "fail" else 0)
        return str(check["status"])

    with public_place() as place:
        theirs, store, home = place / "theirs", place / "store", place / "home"
        attach(cpu_server, theirs)
        cpu_server.generate(PROMPT)
        await_stored(theirs, PROMPT)
        shutil.copytree(theirs, store)
        for directory, expected in ((store, "fail"), (theirs, "ok")):
            statuses = (judged(directory, home) for _ in range(10))
            assert next(status for status in statuses if status != "unknown") == expected


@needs_root
def test_an_unreadable_file(cpu_server: CpuServer) -> None:
    """Another user than the server's may list the store, but not read one of its files."""
    with public_place() as place:
        attach(cpu_server, place / "store")
        cpu_server.generate(PROMPT)
        await_stored(place / "store", PROMPT)
        closed = page_files(place / "store", PROMPT)[1]
        closed.chmod(0o600)
        (ended,) = as_nobody([asked(place / "store", cpu_server)], place / "home")
    assert ended.status == 4, ended
    check = json.loads(ended.stdout)["checks"][0]
    assert (check["group"], check["name"], check["status"]) == ("store", "readable", "fail")
    assert "ermission denied" in words_of(check)
    assert closed.name[:8] in words_of(check)


def test_a_first_page_that_is_missing(
    cpu_server: CpuServer, tmp_path: Path, doctor: Doctor
) -> None:
    store = tmp_path / "store"
    attach(cpu_server, store)
    cpu_server.generate(PROMPT)
    await_stored(store, PROMPT)
    page_files(store, PROMPT)[0].unlink()
    options = ("--server", cpu_server.url, "--trace", trace(tmp_path / "trace.jsonl", PROMPT))
    check = doctor.cause(store, *options)
    assert (check["group"], check["name"]) == ("requests", "missing-page")
    assert "Page 1 " in check["detail"]
    assert f"{PAGES - 1} stored pages behind" in check["detail"]
    assert "is not in the store" in words_of(check)


def test_prompts_below_the_threshold(cpu_server: CpuServer, tmp_path: Path, doctor: Doctor) -> None:
    """The store has all pages of the prompts, which are too short to be asked for."""
    short = PROMPT[: 3 * PAGE_SIZE + 5]
    store = tmp_path / "store"
    attach(cpu_server, store, prefetch_threshold=256)
    cpu_server.generate(short)
    await_stored(store, short)
    assert restored(cpu_server, short) == 0
    options = ("--server", cpu_server.url, "--trace", trace(tmp_path / "trace.jsonl", short))
    check = doctor.cause(store, *options)
    assert (check["group"], check["name"]) == ("requests", "threshold")
    assert "256" in check["detail"]
    assert "threshold" in check["detail"]
    assert "prefetch_threshold" in check["next"]


# ---- it changes nothing, and shows no secret


CHANGES = re.compile(
    r"^\d+ +(mkdir|mknod|rename|link|symlink|unlink|rmdir|truncate|ftruncate|fallocate|"
    r"chmod|fchmod|chown|fchown|lchown|utime|setxattr|lsetxattr|fsetxattr|removexattr)"
)


def test_it_changes_nothing(cpu_server: CpuServer, tmp_path: Path) -> None:
    """No system call changes or opens a file of the store for writing; requests are all GET."""
    store = tmp_path / "store"
    site = Site(cpu_server, store)
    site.attach()
    site.cold(PROMPT)
    await_stored(store, PROMPT)
    before, output = _tree(store), tmp_path / "strace"
    requests = trace(tmp_path / "trace.jsonl", PROMPT)
    command = [
        *(need_tool("strace"), "-f", "-qq", "-y", "-s", "4096", "-o", str(output)),
        *("-e", "trace=%file,%desc,%network", "-e", "signal=none"),
        *(sys.executable, "-m", "hicachectl", "doctor", str(store), "--server", cpu_server.url),
        *("--watch", "1s", "--trace", str(requests)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _tree(store) == before
    lines = [line for line in output.read_text().splitlines() if str(store) in line]
    assert any("O_RDONLY" in line for line in lines)
    for line in lines:
        assert not CHANGES.match(line), line
        assert not re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC", line), line
        assert not re.match(rf"\d+ +p?writev?(64|2)?\(\d+<{store}", line), line
    sent = re.findall(r'send(?:to|msg)\(.*?"([A-Z]+) (/[^ ]*) HTTP', output.read_text())
    assert {method for method, _ in sent} == {"GET"}
    assert {"/server_info", "/metrics"} <= {path for _, path in sent}


def _tree(store: Path) -> dict[str, tuple[int, ...]]:
    """Return the size, mode, owner and times of every file of a store, also the time of its use.

    The plug-in evicts by the time of use. It writes its status anew every ten seconds.
    """
    return {
        str(path): (
            *(s.st_size, s.st_mode, s.st_uid, s.st_nlink, s.st_mtime_ns, s.st_ctime_ns),
            s.st_atime_ns if path.suffix == ".bin" else 0,
        )
        for path in (store, *store.rglob("*"))
        if "status" not in path.parts
        for s in [path.lstat()]
    }


@pytest.mark.parametrize("output", ["table", "json", "jsonl", "csv"])
def test_no_secret_of_a_server_is_shown(quiet: Quiet, invoke: Invoke, output: str) -> None:
    """The server itself shows its keys, its launch command and its backend's password."""
    shown = json.dumps(quiet.server.get("/server_info"))
    assert KEY in shown
    assert SECRET in shown
    options = ("--server", quiet.server.url, "--watch", "0s", "--format", output)
    outcome = invoke("-vv", "doctor", quiet.directory, *options)
    for secret in (KEY, SECRET, "launch_command", "--admin-api-key"):
        assert secret not in outcome.stdout + outcome.stderr


# ---- causes that lose tokens, which the server counts until its end


def test_a_store_of_other_weights_under_the_plug_in(
    cpu_server: CpuServer, tiny_model: Path, tmp_path: Path, doctor: Doctor
) -> None:
    site = Site(cpu_server, tmp_path / "store")
    site.attach()
    site.cold(PROMPT)
    await_stored(site.directory, PROMPT)
    cpu_server.detach()
    tiny_llama.write_model(tmp_path / "model", seed=8)
    cpu_server.update_weights(tmp_path / "model")
    try:
        site.attach(on_foreign="leave")
        assert site.warm(PROMPT).storage == 0
        check = doctor.cause(site.directory, "--server", cpu_server.url)
        assert check["group"] == "store"
        assert "weights" in check["detail"]
    finally:
        cpu_server.detach()
        cpu_server.update_weights(tiny_model)


def test_a_truncated_page_is_mended_by_the_next_commands(
    cpu_server: CpuServer, tmp_path: Path, doctor: Doctor, invoke: Invoke
) -> None:
    """HiCacheFile loses the whole prompt for it, and never writes the page again by itself."""
    store = tmp_path / "store"
    attach(cpu_server, store)
    cpu_server.generate(PROMPT)
    await_stored(store, PROMPT)
    cut = page_files(store, PROMPT)[1]
    os.truncate(cut, 100)
    await_stored(store, PROMPT)
    assert restored(cpu_server) == 0
    check = doctor.cause(store, "--server", cpu_server.url)
    assert (check["group"], check["name"]) == ("store", "structure")
    assert "truncated" in words_of(check)
    found = follow(invoke, check, exit_code=4)
    repair = next(line.strip() for line in found.splitlines() if "--repair" in line)
    invoke(*shlex.split(repair)[1:], "--yes", exit_code=4)
    assert not cut.exists()
    assert restored(cpu_server) == PAGE_SIZE
    await_stored(store, PROMPT)
    assert restored(cpu_server) == FULL


def test_bench_takes_the_page_size_and_the_prefill_rate(
    invoke: Invoke, cpu_server: CpuServer, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    stored(cpu_server, store)
    document = invoke.document("bench", store, "--server", cpu_server.url)
    assert document["page_size"] == PAGE_SIZE
    assert document["rows"][0]["tokens_per_second"] > 0
    page = cpu_server.metrics()
    tokens = re.search(r"^sglang:uncached_prompt_tokens_histogram_sum{.*} (\S+)$", page, re.M)
    stage = r'^sglang:per_stage_req_latency_seconds_sum{.*stage="prefill_forward".*} (\S+)$'
    seconds = re.search(stage, page, re.M)
    assert tokens is not None
    assert seconds is not None
    assert document["prefill_tokens_per_second"] == float(tokens[1]) / float(seconds[1])
