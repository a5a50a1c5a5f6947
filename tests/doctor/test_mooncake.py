"""`doctor` on a real Mooncake cluster, whose keys state neither TP size, page size nor dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import open_store
from hicachectl.cli.demo_store import PROFILE, fill
from tests.doctor.replies import answering, info
from tests.mooncake_cluster import Cluster
from tests.move.migrations import profile_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Invoke

PAGES = 6


@pytest.fixture(scope="module")
def cluster(mooncake_package: None) -> Iterator[Cluster]:
    with Cluster() as started:
        with open_store(started.url) as store:
            fill(store, PAGES)
        yield started


@pytest.mark.parametrize("tp", [1, 4])
def test_the_ranks_in_keys_show_another_tp(
    invoke: Invoke, cluster: Cluster, tmp_path: Path, tp: int
) -> None:
    """Sizes differ, and so does the number of ranks: the cause is the TP size, and no other."""
    profile = profile_file(tmp_path / "profile.toml")
    with answering(info(tp_size=tp, hicache_storage_backend="mooncake")) as url:
        asked = ("doctor", cluster.url, "--server", url, "--profile", profile, "--sample", 0)
        document = invoke.document(*asked, exit_code=4)
    first = document["checks"][0]
    assert (first["group"], first["name"], first["status"]) == ("server", "tp", "fail")
    assert first["detail"] == f"The store has tp {PROFILE.tp}, but this server asks for tp {tp}"
    assert f" DST --profile {profile} --to-tp {tp}" in first["next"]


def test_its_own_deployment_is_found(invoke: Invoke, cluster: Cluster, tmp_path: Path) -> None:
    """A server of the stored deployment has no failing check, and no lease is granted for it."""
    profile = profile_file(tmp_path / "profile.toml")
    with answering(info(hicache_storage_backend="mooncake")) as url:
        asked = ("doctor", cluster.url, "--server", url, "--profile", profile)
        document = invoke.document(*asked)
    status = {f"{check['group']}/{check['name']}": check["status"] for check in document["checks"]}
    assert (status["server/deployment"], status["server/page-size"]) == ("ok", "ok")
    assert not {"fail", "warn"} & set(status.values())
