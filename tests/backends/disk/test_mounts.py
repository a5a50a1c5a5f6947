"""Mounts whose locks hold on one host only are known by type and options."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.disk.io import lock_reach, locks_reach_all_hosts

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("kind", "options", "reaches"),
    [
        ("ext4", "rw,relatime", True),
        ("xfs", "rw", True),
        ("fuseblk", "rw,user_id=0", True),
        ("nfs4", "rw,vers=4.2,hard,proto=tcp,local_lock=none,addr=10.0.0.1", True),
        ("nfs", "rw,vers=3,local_lock=posix,addr=10.0.0.1", True),
        ("nfs", "rw,vers=3,nolock,local_lock=all,addr=10.0.0.1", False),
        ("nfs", "rw,vers=3,local_lock=flock,addr=10.0.0.1", False),
        ("ceph", "rw,name=admin", True),
        ("lustre", "rw,flock,lazystatfs", True),
        ("lustre", "rw,localflock", False),
        ("fuse.juicefs", "rw,allow_other", False),
        ("fuse", "rw", False),
        ("virtiofs", "rw", False),
        ("9p", "rw,trans=virtio", False),
        ("cifs", "rw,nobrl", False),
    ],
)
def test_the_reach_of_locks_follows_from_the_mount(kind: str, options: str, reaches: bool) -> None:
    assert lock_reach(kind, options) is reaches


def test_the_mount_of_a_directory_is_found(tmp_path: Path) -> None:
    """procfs stands for a mount whose type is known on every Linux."""
    from hicachectl.backends.disk import io

    descriptor = os.open("/proc", os.O_RDONLY)
    mount = io._mount_of(descriptor)
    os.close(descriptor)
    assert mount is not None
    assert mount[0] == "proc"
    local = os.open(tmp_path, os.O_RDONLY)
    assert locks_reach_all_hosts(local)
    os.close(local)
