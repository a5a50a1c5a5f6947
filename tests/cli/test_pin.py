"""`pin` and `unpin` on a real cluster, which evicts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import Pins
from hicachectl.backends.mooncake.master import MasterAdmin
from hicachectl.backends.testing import rows_of
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.cli.exit_codes import DONE
from hicachectl.cli.manpages.access import access
from hicachectl.move import pinning
from hicachectl.move.pinning import NOT_PINNED, PINNED, UNPINNED, WOULD_PIN, WOULD_UNPIN
from tests.cli.test_access import Site, environment
from tests.cli.test_output_page import compare_with_page, headless
from tests.effects import Effect, traced
from tests.mooncake_cluster import Cluster
from tests.move.migrations import demo_store, profile_file
from tests.prewarming.test_cli import prompts
from tests.prewarming.test_prewarm import HASHES
from tests.skips import lacking
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from tests.conftest import Invoke

PAGES = 6
WHOLE = ("--state", "whole")


def fill_with_pages(cluster: Cluster, pages: int = PAGES) -> None:
    with open_store(cluster.url) as store:
        fill(store, pages)


@pytest.fixture
def cluster(pinning_cluster: Cluster) -> Cluster:
    fill_with_pages(pinning_cluster)
    return pinning_cluster


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_file(tmp_path / "profile.toml")


def pinned(cluster: Cluster) -> int:
    """Return the number of objects that the master counts as pinned."""
    (line,) = (
        line
        for line in cluster.ask("metrics").splitlines()
        if line.startswith("master_soft_pin_key_count ")
    )
    return int(line.split()[1])


def page_of(key: str) -> str:
    return next(part for part in key.replace("-", "_").split("_") if len(part) == 64)


def pages_in(cluster: Cluster) -> list[str]:
    return sorted({page_of(key) for key in cluster.list_keys()})


def test_all_objects_of_the_chosen_pages_are_pinned_and_unpinned(
    invoke: Invoke, cluster: Cluster, tmp_path: Path
) -> None:
    page, *others = pages_in(cluster)
    of_page = [key for key in cluster.list_keys() if page in key]
    before = time.time()
    document = invoke.document("pin", cluster.url, "--page", page, "--ttl", "2h")
    assert before + 7200 - 0.001 <= document["until"] <= time.time() + 7200
    assert (document["pages"], document["objects"]) == (1, len(of_page))
    assert document["groups"][0]["state"] == PINNED
    assert pinned(cluster) == len(of_page)

    listed = tmp_path / "pages.txt"
    listed.write_text("\n".join(others))
    table = invoke("pin", cluster.url, "--pages", listed).stdout
    assert "pinned until 2" in table
    assert pinned(cluster) == len(cluster.list_keys())

    invoke("unpin", cluster.url, "--page", page)
    assert pinned(cluster) == len(cluster.list_keys()) - len(of_page)
    document = invoke.document("unpin", cluster.url, "--model", PROFILE.model)
    assert (document["pages"], document["until"]) == (PAGES, None)
    assert {row["state"] for row in document["groups"]} == {UNPINNED}
    assert pinned(cluster) == 0


def test_a_pin_grants_no_lease(invoke: Invoke, pinning_cluster: Cluster) -> None:
    with Cluster(lease_ms=60_000) as cluster:
        fill_with_pages(cluster, 2)
        for key in cluster.list_keys():
            cluster.put(key, cluster.client().get(key))  # without the lease of the read
        invoke("pin", cluster.url, *WHOLE)
        assert {cluster.client().remove(key) for key in cluster.list_keys()} == {0}


def test_a_dry_run_pins_nothing(invoke: Invoke, cluster: Cluster) -> None:
    for command, state in (("pin", WOULD_PIN), ("unpin", WOULD_UNPIN)):
        document = invoke.document(command, cluster.url, *WHOLE, "--dry-run")
        assert document["pages"] == PAGES
        assert {row["state"] for row in document["groups"]} == {state}
    assert pinned(cluster) == 0


def test_a_page_that_loses_an_object_before_its_pin_is_not_pinned(
    invoke: Invoke, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin, lost = MasterAdmin.pin, cluster.list_keys()[0]

    def evicted_before(
        self: MasterAdmin, keys: Sequence[str], milliseconds: int | None
    ) -> npt.NDArray[np.int64]:
        if milliseconds is not None and lost in cluster.list_keys():
            cluster.remove(lost)
        return pin(self, keys, milliseconds)

    monkeypatch.setattr(MasterAdmin, "pin", evicted_before)
    monkeypatch.setattr(pinning, "_STEP", 7)  # several calls
    outcome = invoke("pin", cluster.url, *WHOLE, "--format", "json", exit_code=4)
    assert (outcome.document["pages"], outcome.document["failed"]) == (PAGES - 1, 1)
    states = {row["page"]: row["state"] for row in outcome.document["groups"]}
    assert [page for page, state in states.items() if state == NOT_PINNED] == [page_of(lost)]
    assert "objects of 1 page vanished before they were pinned; run again" in outcome.stderr
    # For unpin it is as if the pin had ended.
    assert invoke.document("unpin", cluster.url, "--model", PROFILE.model)["failed"] == 0


def test_pages_that_are_not_whole_are_left_out_unless_they_are_named(
    invoke: Invoke, cluster: Cluster, profile: Path
) -> None:
    cluster.remove(next(key for key in cluster.list_keys() if key.endswith("_1_v")))
    choice = ("pin", cluster.url, "--profile", profile)
    outcome = invoke(*choice, "--model", PROFILE.model, "--format", "json")
    assert (outcome.document["pages"], outcome.document["not_whole"]) == (PAGES - 1, 1)
    assert "1 page left out as not whole" in outcome.stderr
    only = invoke.document(*choice, "--state", "partial")
    assert (only["pages"], only["not_whole"]) == (1, 0)
    assert pinned(cluster) == len(cluster.list_keys())


def test_a_cluster_evicts_what_is_not_pinned(invoke: Invoke, pinning_cluster: Cluster) -> None:
    with Cluster(16 << 20, lease_ms=50, eviction_high_watermark_ratio=0.5) as cluster:
        fill_with_pages(cluster)
        page, *others = pages_in(cluster)
        invoke("pin", cluster.url, "--page", page, "--ttl", "1h")
        invoke("pin", cluster.url, "--page", others[0], "--ttl", "1h")
        invoke("unpin", cluster.url, "--page", others[0])
        before = [key for key in cluster.list_keys() if page in key]

        def only_pinned_are_left() -> bool:
            cluster.client().put(f"more-{time.monotonic_ns()}", bytes(1 << 20))
            return not any(other in key for key in cluster.list_keys() for other in others)

        wait_until(only_pinned_are_left, "unpinned pages stay")
        assert [key for key in cluster.list_keys() if page in key] == before


@pytest.mark.parametrize("drops", [True, False])
def test_pinned_pages_are_evicted_if_all_is_pinned_and_the_master_allows_it(
    invoke: Invoke, pinning_cluster: Cluster, drops: bool
) -> None:
    with Cluster(16 << 20, lease_ms=50, allow_evict_soft_pinned_objects=drops) as cluster:
        fill_with_pages(cluster)
        invoke("pin", cluster.url, *WHOLE)
        whole = set(cluster.list_keys())
        with open_store(cluster.url) as store:
            assert isinstance(store, Pins)
            for number in range(40):
                cluster.client().put(f"more-{number}", bytes(1 << 20))
                time.sleep(0.05)  # the master evicts in the background
                store.pin(rows_of([key.encode() for key in cluster.list_keys()]), 60)
        assert (whole <= set(cluster.list_keys())) is not drops


def test_the_pages_of_requests_are_pinned(
    invoke: Invoke, pinning_cluster: Cluster, profile: Path, tmp_path: Path
) -> None:
    source, listed = demo_store(tmp_path / "source", 12), tmp_path / "pages.jsonl"
    four, eight = (prompts(tmp_path / f"{count}.jsonl", count) for count in (4, 8))
    invoke("prewarm", pinning_cluster.url, "--from", source, "--profile", profile,
           "--token-ids", eight)  # fmt: skip
    invoke("prewarm", "--trace", four, "--profile", profile, "--dry-run", "-o", listed)
    document = invoke.document(
        "pin", pinning_cluster.url, "--pages", listed, "--profile", profile, "--ttl", "12h"
    )
    assert document["pages"] == 4
    assert {row["page"] for row in document["groups"]} == set(HASHES[:4])


def test_a_time_that_the_master_does_not_allow_is_refused_before_the_listing(
    invoke: Invoke, cluster: Cluster
) -> None:
    outcome = invoke("pin", cluster.url, *WHOLE, "--ttl", "30d", exit_code=2)
    assert "pins of 2592000 s are longer than the master's --max_kv_soft_pin_ttl" in outcome.stderr
    assert pinned(cluster) == 0


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_a_filter_that_chooses_no_page_is_said(
    invoke: Invoke, cluster: Cluster, command: str
) -> None:
    outcome = invoke(command, cluster.url, "--page", "ffff", "--format", "json")
    assert (outcome.document["pages"], outcome.document["until"]) == (0, None)
    assert "--page ffff: no page matches" in outcome.stderr
    assert "Give a filter" in invoke(command, cluster.url, exit_code=2).stderr


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_the_document_has_the_members_of_the_page(
    invoke: Invoke, cluster: Cluster, command: str
) -> None:
    document = invoke.document(command, cluster.url, *WHOLE)
    compare_with_page(command, iter([headless(document)]))


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_a_command_connects_to_the_master_only_and_writes_no_file(
    cluster: Cluster, tmp_path: Path, command: str
) -> None:
    assert {row.words: row.places for row in access().commands}[command,] == {}
    (row,) = [row for row in access().network["mooncake"] if row.words == (command,)]
    assert row.places == {"connects": ["admin"]}
    done = traced([command, cluster.url, *WHOLE], environment(Site(tmp_path)), tmp_path / "trace")
    assert done.status == DONE
    effects = {effect for effect in done.effects if effect.verb not in ("reads", "runs")}
    effects.discard(Effect("writes", "/dev/null"))
    assert effects == {Effect("connects", cluster.admin)}


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_a_master_that_cannot_pin_is_refused_by_name(
    invoke: Invoke, mooncake_cluster: Cluster, command: str
) -> None:
    if mooncake_cluster.can_pin:
        lacking("masters that cannot pin")
    outcome = invoke(command, mooncake_cluster.url, *WHOLE, exit_code=2)
    assert "the master cannot pin objects that it has; upgrade the master to Mooncake 0.3.14" in (
        outcome.stderr
    )
