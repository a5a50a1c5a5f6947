"""Whether a server writes into a store: by its processes, and by what appears in the store.

The server here is two processes of which one listens and the other has a scheduler's title.
tests/conformance/test_doctor_live.py has a real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.base import open_store
from hicachectl.backends.disk.statuses import SERVING, RankStatus, this_host
from hicachectl.doctor.exposition import Look, read_look
from hicachectl.doctor.live_server import LiveServer
from hicachectl.doctor.processes import own_statuses, processes_of
from hicachectl.doctor.same_store import same_store_checks, started_of
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.models.server_info import ServerDeployment
from hicachectl.formats.plugin_status import PluginStatus
from tests.skips import need_tool, needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hicachectl.doctor.checks import Check

VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
NOTHING = Look(1, {})
_SERVER = """
import socket, subprocess, sys
listening = socket.create_server(("127.0.0.1", 0))
wait = [sys.argv[1], "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
child = subprocess.Popen(wait, executable=sys.executable, stdout=subprocess.PIPE)
child.stdout.readline()
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
child.wait()
"""


@contextmanager
def serving(
    folder: Path, title: str = "sglang::scheduler", within: Sequence[str] = (), **variables: str
) -> Iterator[str]:
    """Run a process that listens, and its child with a title; yield the URL.

    within: command that runs the process.
    """
    command = [*within, sys.executable, "-c", _SERVER, title]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


def check(
    url: str,
    store: Path | str,
    extra: dict[str, Any],
    backend: str = "file",
    looks: tuple[Look, Look] = (NOTHING, NOTHING),
    new_pages: int | None = None,
) -> Check:
    flags = DeploymentFlags(page_size=64, prefetch_threshold=256)
    settings = {
        "hicache_storage_backend": backend,
        "hicache_storage_backend_extra_config": extra,
    }
    deployment = ServerDeployment(flags=flags, model_path="/model", settings={})
    server = LiveServer(url=url, settings=settings, deployment=deployment)
    with open_store(str(store)) as opened:
        (found,) = same_store_checks(server, opened, *looks, new_pages)
    return found


def look(**values: int) -> Look:
    """Return a look at counters; `uncached` is one request with so many uncached tokens."""
    uncached = values.pop("uncached", 0)
    name = "sglang:uncached_prompt_tokens_histogram"
    lines = [f"sglang:{counter} {value}" for counter, value in values.items()]
    if uncached:
        lines += [f'{name}_bucket{{le="{le}"}} {int(uncached <= le)}' for le in (100, 300, 500)]
        lines += [f"{name}_sum {uncached}", "sglang:num_requests_total 1"]
    return read_look("\n".join([*lines, "sglang:up 1\n"]).encode(), 2)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return two directories."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    return one, other


def test_a_link_leads_to_the_same_directory(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Device and inode decide, not the path; another directory is named."""
    one, other = folders
    (tmp_path / "link").symlink_to("../" + tmp_path.name + "/one")
    (tmp_path / "away").symlink_to(tmp_path / "link" / ".." / "one")
    with serving(tmp_path) as url:
        for path in (str(one), str(tmp_path / "link"), str(tmp_path / "away"), "one", "link/."):
            assert check(url, one, {"file_storage_path": path}).status == "ok", path
        different = check(url, other, {"file_storage_path": str(one)})
    assert different.status == "fail"
    assert str(one) in different.detail
    assert str(other) in different.detail
    assert different.next == f"hicachectl doctor {one} --server {url}"


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "/" * 5000, "gone", "file", "loop", 5])
def test_settings_of_a_server_are_not_trusted(
    folders: tuple[Path, Path], tmp_path: Path, path: object
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = str(tmp_path / path) if path in ("file", "loop") else path
    with serving(tmp_path) as url:
        found = check(url, folders[0], {"file_storage_path": path})
    assert found.status in ("unknown", "fail")
    assert len(found.detail + found.evidence) < 1000


@needs_root
def test_an_equal_path_in_a_container_is_another_directory(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The server's mounts count, also behind a link that starts at the root."""
    one, other = folders
    (tmp_path / "link").symlink_to(one)
    mounted = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    container = [need_tool("unshare", "util-linux"), "-m", "sh", "-c", mounted, "sh"]
    with serving(tmp_path, within=[*container, str(other), str(one)], PATH=os.defpath) as url:
        for path in (one, tmp_path / "link"):
            assert check(url, other, {"file_storage_path": str(path)}).status == "ok"
            different = check(url, one, {"file_storage_path": str(path)})
            assert different.status == "fail"
            assert "hicachectl doctor" not in different.next  # this process does not see it there


def test_the_environment_of_the_server_wins(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """HiCacheFile looks at its environment first, which no reply of the server shows."""
    one, other = folders
    with serving(tmp_path, **{VARIABLE: str(other)}) as url:
        assert check(url, one, {"file_storage_path": str(one)}).status == "fail"
        assert check(url, other, {"file_storage_path": str(one)}).status == "ok"


def test_the_plugin_writes_the_first_store_of_its_list(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    one, other = folders
    extra = {
        "module_path": "hicachectl.backends.sglang",
        "store": [f"file://{one}", f"file://{other}"],
    }
    with serving(tmp_path) as url:
        assert check(url, one, extra, "dynamic").status == "ok"
        assert check(url, other, extra, "dynamic").status == "fail"
        unknown = check(url, other, {**extra, "module_path": "theirs"}, "dynamic")
    assert unknown.status == "unknown"


def test_two_directories_of_nixl_are_both_compared(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A store of one of the two directories is not the server's store."""
    one, other = folders
    both = {"SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": f"{one},{other}"}
    with serving(tmp_path, **both) as url:
        assert check(url, f"nixl://{one},{other}", {}, "nixl").status == "ok"
        assert check(url, f"nixl://{one}", {}, "nixl").status == "fail"


@pytest.mark.parametrize("title", ["nginx", "sglang::detokenizer"])
def test_a_proxy_is_not_taken_for_the_server(
    folders: tuple[Path, Path], tmp_path: Path, title: str
) -> None:
    with serving(tmp_path, title) as url:
        found = check(url, folders[0], {"file_storage_path": str(folders[1])})
    assert found.status == "unknown"
    assert "no SGLang scheduler" in found.evidence


def test_another_machine_is_unknown(folders: tuple[Path, Path]) -> None:
    """192.0.2.1 is an address for documentation, so never one of this machine."""
    found = check("http://192.0.2.1:30000", folders[0], {"file_storage_path": str(folders[0])})
    assert (found.status, found.server) == ("unknown", "http://192.0.2.1:30000")
    assert "another machine" in found.evidence
    assert "--write-probe" in found.next


@needs_root
def test_processes_of_another_user_are_unknown(tmp_path: Path) -> None:
    """A user who may not look into the server's processes is told so, and the pages decide."""
    with serving(tmp_path) as url:
        assert processes_of(url).schedulers  # it also imports what only root may read
        reader, writer = os.pipe()
        child = os.fork()
        if not child:  # in a process of its own, as users are not given back
            try:
                os.setgid(65534)
                os.setuid(65534)
                os.write(writer, processes_of(url).problem.encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            problem = told.read()
        os.waitpid(child, 0)
    assert "cannot be seen; run hicachectl as the server's user, or as root" in problem


def test_the_start_is_that_of_the_process(tmp_path: Path) -> None:
    """The start of a server on another machine is that of the plug-in's status."""
    before = time.time()
    with serving(tmp_path) as url:
        started = started_of(LiveServer(url=url))
        assert started is not None
        assert abs(started - before) < 60
    away = LiveServer(url="http://192.0.2.1:30000")
    assert started_of(away) is None
    assert started_of(away, [status(started_ns=5 * 10**9)]) == 5
    assert started_of(away, [status(started_ns=5 * 10**9)._replace(standing="ended")]) is None


def test_statuses_of_two_servers_on_one_machine_are_told_apart(tmp_path: Path) -> None:
    """Replicas share host, model and store; their processes tell which is which."""
    host, namespace = this_host()
    with serving(tmp_path) as url:
        (pid,) = processes_of(url).schedulers
        ours, others = (
            status(host=host, pid=one, pid_namespace=namespace) for one in (pid, os.getpid())
        )
        assert own_statuses(LiveServer(url=url), [others, ours]) == [ours.status]
        assert own_statuses(LiveServer(url=url), [others]) == []
        away = status()
        assert own_statuses(LiveServer(url=url), [others, away]) == [away.status]


def status(**members: Any) -> RankStatus:
    told = {"release": "1", "host": "gpu", "pid": 7, "written_ns": time.time_ns(), **members}
    return RankStatus(PluginStatus(**told), SERVING)


@pytest.mark.parametrize(
    ("grown", "new_pages", "status"),
    [
        ({"backuped_tokens_total": 320, "uncached": 330}, 5, "ok"),
        ({"backuped_tokens_total": 320, "uncached": 330}, 0, "fail"),
        # The server counts pages as written that were there: of a prompt below the threshold,
        ({"backuped_tokens_total": 192, "uncached": 197}, 0, "unknown"),
        # and of a prompt whose pages it found and lost.
        (
            {
                "backuped_tokens_total": 320,
                "uncached": 330,
                "storage_prefetch_hit_tokens_total": 320,
            },
            0,
            "unknown",
        ),
        # Before the first look, it may have lost what it found.
        (
            {
                "backuped_tokens_total": 320,
                "uncached": 330,
                "storage_prefetch_unfulfilled_tokens_total": 320,
            },
            0,
            "unknown",
        ),
        # The request's own pages may still be on their way, and those written be of another.
        ({"backuped_tokens_total": 64, "uncached": 480}, 0, "unknown"),
        ({"backuped_tokens_total": 320, "uncached": 330}, None, "unknown"),
        ({"uncached": 330}, 0, "unknown"),
    ],
)
def test_pages_that_appear_tell(
    folders: tuple[Path, Path], grown: dict[str, int], new_pages: int | None, status: str
) -> None:
    """Where processes cannot be seen, counters decide; `fail` only if a page was surely new."""
    found = check(
        "http://192.0.2.1:30000", folders[0], {}, looks=(look(), look(**grown)), new_pages=new_pages
    )
    assert found.status == status


@pytest.mark.parametrize(
    ("backend", "extra"),
    [
        ("mooncake", {}),
        ("mooncake", {"master_server_address": "mc:50051"}),
        ("hf3fs", {}),
        ("nixl", {}),
        ("dynamic", {"module_path": "hicachectl.backends.sglang", "store": "mooncake://mc:50051"}),
    ],
)
def test_another_kind_of_store_is_another_store(
    folders: tuple[Path, Path], backend: str, extra: dict[str, Any]
) -> None:
    """The kinds of two stores are compared without a look at the server's processes."""
    found = check("http://192.0.2.1:1", folders[0], extra, backend)
    assert found.status == "fail"
    assert str(folders[0]) in found.detail


def test_metrics_off_and_restarts_are_named(folders: tuple[Path, Path]) -> None:
    off = Look(1, None, "The server has no /metrics; start the server with --enable-metrics")
    found = check("http://192.0.2.1:1", folders[0], {}, looks=(off, off))
    assert (found.status, found.next) == ("unknown", "start the server with --enable-metrics")
    looks = (look(num_requests_total=5), look(num_requests_total=1))
    assert "restarted" in check("http://192.0.2.1:1", folders[0], {}, looks=looks).detail


def test_without_a_backend_nothing_is_judged(folders: tuple[Path, Path]) -> None:
    """The settings already say that no backend is attached."""
    with open_store(str(folders[0])) as store:
        for server in (LiveServer(url="http://h:1"), LiveServer(url="http://h:1", problem="no")):
            assert same_store_checks(server, store, NOTHING, NOTHING, None) == []
