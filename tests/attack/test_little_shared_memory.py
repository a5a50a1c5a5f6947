"""A small /dev/shm of 64 KiB, as in containers: only USRBIO needs more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.hf3fs_places import Place
from tests.move.migrations import PAGES, demo_store, profile_file
from tests.skips import missing, need_tool

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hf3fs_server import MetadataServer
    from tests.mooncake_cluster import Cluster


def run(
    *arguments: object, home: Path, modules: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line with a /dev/shm of 64 KiB."""
    own = [need_tool("unshare", "util-linux"), "--mount", "sh", "-c"]
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if subprocess.run([*own, mount], capture_output=True, check=False).returncode:
        missing("the right to mount a tmpfs", "run the tests as root, with CAP_SYS_ADMIN")
    command = [sys.executable, "-m", "hicachectl", *map(str, arguments)]
    variables = {**os.environ, "HOME": str(home)}
    if modules is not None:
        variables["PYTHONPATH"] = str(modules)
    return subprocess.run(
        [*own, f'{mount} && exec "$@"', "sh", *command],
        env=variables, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def test_pages_are_verified_and_copied(tmp_path: Path) -> None:
    store, profile = demo_store(tmp_path / "store"), profile_file(tmp_path / "p.toml")
    options = ("--profile", profile, "--format", "json")
    verified = run("verify", store, *options, home=tmp_path)
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["bytes_read"] > 64 << 10
    copied = run("migrate", store, tmp_path / "new", "--verify", *options, home=tmp_path)
    assert json.loads(copied.stdout)["pages"] == PAGES, copied.stderr


def test_a_3fs_store_is_written_and_verified(
    tmp_path: Path, metadata_server: MetadataServer
) -> None:
    place = Place(tmp_path, metadata_server)
    verified = run(*place.arguments(), home=tmp_path)
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["bytes_read"] > 64 << 10
    for page in place.pages():
        place.evict(page)
    source = demo_store(tmp_path / "source")
    options = ("--profile", place.profile, "--verify", "--format", "json")
    copied = run("migrate", source, place.url(), *options, home=tmp_path)
    assert json.loads(copied.stdout)["pages"] == PAGES, copied.stderr


def test_a_mooncake_cluster_is_written_and_verified(
    tmp_path: Path, mooncake_cluster: Cluster
) -> None:
    source, profile = demo_store(tmp_path / "source"), profile_file(tmp_path / "p.toml")
    options = ("--profile", profile, "--format", "json")
    copied = run("migrate", source, mooncake_cluster.url, "--verify", *options, home=tmp_path)
    assert json.loads(copied.stdout)["pages"] == PAGES, copied.stderr
    verified = run("verify", mooncake_cluster.url, *options, "--grace", "0s", home=tmp_path)
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["bytes_read"] > 64 << 10


def test_memory_that_3fs_is_to_share_is_refused_by_its_size(
    tmp_path: Path, metadata_server: MetadataServer
) -> None:
    """USRBIO needs a name under /dev/shm: memory too large for it is refused, and not touched."""
    place = Place(tmp_path, metadata_server)
    module = tmp_path / "hf3fs_fuse" / "io.py"
    module.parent.mkdir()
    (module.parent / "__init__.py").touch()
    module.write_text(f"def extract_mount_point(path): return {str(tmp_path)!r}\n")
    refused = run(*place.arguments(), home=tmp_path, modules=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert "--buffer-bytes: cannot allocate 1073741824 bytes: " in line
    assert "give a smaller size" in line
