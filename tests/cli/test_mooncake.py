"""Commands on a real Mooncake cluster: behaviour that only Mooncake has."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest

from hicachectl.backends.base import open_store
from hicachectl.cli.demo_store import fill
from hicachectl.pages import in_flight
from hicachectl.pages.listing import ReplicaRow
from tests.mooncake_cluster import Cluster
from tests.report.page_texts import text_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Invoke

LEASE_MS = 3000
PAGES = 6


@pytest.fixture(scope="module")
def brief_cluster(mooncake_package: None) -> Iterator[Cluster]:
    """Return a cluster with short leases: objects can be removed soon after a read."""
    with Cluster(lease_ms=LEASE_MS) as started:
        yield started


@pytest.fixture
def cluster(brief_cluster: Cluster) -> Cluster:
    brief_cluster.clear()
    with open_store(brief_cluster.url) as store:
        fill(store, PAGES)
    return brief_cluster


def verified(invoke: Invoke, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    return invoke("verify", *arguments, "--format", "json", exit_code=exit_code).document


def found(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(f["code"], f["severity"], f["key"]) for f in document["findings"]]


def keys_of_page(cluster: Cluster, number: int = 0) -> list[str]:
    pages = sorted({key.split("_")[1] for key in cluster.list_keys()})
    return sorted(key for key in cluster.list_keys() if pages[number] in key)


def test_objects_are_listed_with_their_replicas(invoke: Invoke, cluster: Cluster) -> None:
    rows = invoke("ls", cluster.url, "--objects", "--format", "json").document["objects"]
    assert {row["key"] for row in rows} == set(cluster.list_keys())
    for row in rows:
        (replica,) = row["replicas"]
        assert set(replica) == set(get_type_hints(ReplicaRow))
        assert replica["kind"] == "memory"
        assert replica["nbytes"] == row["nbytes"] > 0
        assert row["mtime"] is None


def test_a_report_reads_no_object_and_says_that_there_are_no_times(
    invoke: Invoke, cluster: Cluster, profile: Path, tmp_path: Path
) -> None:
    made = tmp_path / "page.html"
    time.sleep(LEASE_MS / 1000)  # that the writes have granted
    invoke("report", cluster.url, "--profile", profile, "--grace", "0s", "-o", made)
    text = text_of(made)
    assert "No errors and no warnings by the checks that ran: names, groups, sizes" in text
    assert "The store keeps no write times, so there is no chart." in text
    assert "Reads of this store grant leases, so no page was read." in text
    assert "Several sizes" not in text  # states have two
    asked = ("--page", cluster.list_keys()[0].split("_")[1][:12])
    assert cluster.client().remove(cluster.list_keys()[-1], False) == 0  # nothing is leased
    arguments = (cluster.url, "--profile", profile, "--grace", "0s", "--fail-on", "never")
    invoke("report", *arguments, *asked, "-o", made)
    assert "Chosen with --page." in text_of(made)


@pytest.mark.slow
def test_a_report_while_objects_come_and_go(
    invoke: Invoke, cluster: Cluster, profile: Path, tmp_path: Path
) -> None:
    """Proves that pages that servers write or evict meanwhile are no findings."""
    keys, client, ended = keys_of_page(cluster), cluster.client(), threading.Event()
    sizes = {key: len(client.get(key)) for key in keys}
    turns = 0

    def come_and_go() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            mine = [key.replace(key.split("_")[1], f"{turns:064x}") for key in keys]
            for key, like in reversed([*zip(mine, keys, strict=True)]):
                cluster.put(key, bytes(sizes[like]))
            for key in mine:
                client.remove(key, True)

    server = threading.Thread(target=come_and_go)
    server.start()
    try:
        wait_until(lambda: turns > 1)
        made = tmp_path / "page.html"
        # The checks look again at what is incomplete; one of such pages is gone by then.
        invoke("report", cluster.url, "--profile", profile, "--grace", "5s", "-o", made)
        before = turns
        wait_until(lambda: turns > before)
    finally:
        ended.set()
        server.join()
    text = text_of(made)
    assert "No errors and no warnings by the checks that ran: names, groups, sizes" in text
    assert f"Page groups: {PAGES} whole, 0 partial, 0 orphan" in text or "in flight" in text


def test_an_empty_cluster_is_said_to_be_empty(
    invoke: Invoke, mooncake_cluster: Cluster, profile: Path
) -> None:
    """A restarted master has forgotten every object."""
    refused = ("verify", mooncake_cluster.url, "--profile", profile)
    assert "check the mount, or give --allow-empty" in invoke(*refused, exit_code=3).stderr
    out = invoke(*refused, "--allow-empty")
    assert f"{mooncake_cluster.url} is empty; check the URL" in out.stderr
    assert "nothing was checked" in out.stdout
    for command in (["ls"], ["ls", "--objects"], ["rm", "--model", "m", "--yes"]):
        invoke(command[0], mooncake_cluster.url, *command[1:])


def test_a_warm_up_key_is_information(invoke: Invoke, cluster: Cluster, profile: Path) -> None:
    key = "sglang_mooncake_store_warmup_key" + "0123456789abcdef" * 2
    cluster.put(key, bytes(4096))
    document = verified(invoke, cluster.url, "--profile", profile)
    assert found(document) == [("foreign-object", "info", key)]
    cluster.clear()
    cluster.put(key, bytes(4096))
    said = invoke("ls", cluster.url).stderr
    assert f"{cluster.url} has no pages, only other objects (1), such as {key}; " in said


def test_a_page_that_is_completed_within_the_grace_is_no_finding(
    invoke: Invoke, cluster: Cluster, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys_of_page(cluster)[0]
    value = cluster.client().get(key)
    cluster.remove(key)
    waits: list[float] = []

    def complete(seconds: float) -> None:
        waits.append(seconds)
        cluster.put(key, value)

    monkeypatch.setattr(
        in_flight, "time", SimpleNamespace(sleep=complete, monotonic=time.monotonic)
    )
    document = verified(
        invoke, cluster.url, "--profile", profile, "--grace", "1h", "--checks", "groups"
    )
    assert len(waits) == 1
    assert 0 < waits[0] <= 3600
    assert found(document) == []
    assert document["in_flight"] == 1


def test_a_page_that_is_completed_within_the_grace_is_not_removed(
    invoke: Invoke, cluster: Cluster, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys_of_page(cluster)[0]
    value, before = cluster.client().get(key), set(cluster.list_keys())
    cluster.remove(key)
    complete = SimpleNamespace(
        sleep=lambda seconds: cluster.put(key, value), monotonic=time.monotonic
    )
    monkeypatch.setattr(in_flight, "time", complete)
    states = ("--state", "partial,orphan", "--profile", profile)
    arguments = (cluster.url, *states, "--grace", "1h", "--yes", "--format", "json")
    document = invoke("rm", *arguments).document
    assert (document["pages"], document["in_flight"]) == (0, 1)
    assert set(cluster.list_keys()) == before


def test_a_page_that_stays_incomplete_is_a_finding_after_the_grace(
    invoke: Invoke, cluster: Cluster, profile: Path
) -> None:
    key = next(key for key in keys_of_page(cluster) if key.endswith("_1_v"))
    cluster.remove(key)
    began = time.monotonic()
    document = verified(
        invoke, cluster.url, "--profile", profile, "--grace", "1s", "--checks", "groups",
        exit_code=4,
    )  # fmt: skip
    assert time.monotonic() - began >= 1
    assert found(document) == [("missing-part", "error", key)]


@pytest.mark.slow
def test_a_comparison_looks_again_at_a_page_that_is_not_whole(
    invoke: Invoke,
    cluster: Cluster,
    profile: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = tmp_path / "files"
    invoke("migrate", cluster.url, files, "--profile", profile)
    compared = ("diff", files, cluster.url, "--profile", profile)
    for pair in (compared, ("diff", cluster.url, files, *compared[3:])):
        assert invoke.document(*pair, "--verify", "--grace", "1h")["equal"] == PAGES
    key = keys_of_page(cluster)[0]
    value = cluster.client().get(key)
    cluster.remove(key)
    document = invoke.document(*compared, "--grace", "1s", exit_code=4)
    assert [row["difference"] for row in document["differences"]] == ["incomplete"]
    complete = SimpleNamespace(
        sleep=lambda seconds: cluster.put(key, value), monotonic=time.monotonic
    )
    monkeypatch.setattr(in_flight, "time", complete)
    document = invoke.document(*compared, "--grace", "1h")
    assert (document["in_flight"], document["equal"]) == (1, PAGES - 1)


def test_a_catalog_notices_changed_bytes(
    invoke: Invoke, cluster: Cluster, profile: Path, tmp_path: Path
) -> None:
    catalog = ("--catalog", tmp_path / "catalog.parquet")
    verified(invoke, cluster.url, "--profile", profile, *catalog, "--update-catalog")
    assert found(verified(invoke, cluster.url, "--profile", profile, *catalog)) == []
    key = keys_of_page(cluster)[0]
    value = bytearray(cluster.client().get(key))
    value[10] ^= 1
    cluster.put(key, bytes(value))
    document = verified(invoke, cluster.url, "--profile", profile, *catalog, "--fail-on", "never")
    (code, severity, where) = found(document)[0]
    # Freed memory is reused, so a rewritten object can look like the recorded object.
    assert (code, severity) in {("re-recorded", "info"), ("digest-mismatch", "warning")}
    assert where == key


def test_another_name_of_the_cluster_is_refused(
    invoke: Invoke, cluster: Cluster, profile: Path
) -> None:
    """Proves that --move between two names of a cluster does not empty it."""
    keys = cluster.list_keys()
    other = cluster.url.replace("127.0.0.1", "localhost")
    assert other != cluster.url
    said = invoke(
        "migrate", cluster.url, other, "--profile", profile, "--move", "--yes", exit_code=2
    ).stderr
    assert "source and destination are the same" in said
    assert sorted(cluster.list_keys()) == sorted(keys)


def test_a_tag_that_only_a_profile_can_tell_is_not_silently_absent(
    invoke: Invoke, cluster: Cluster, profile: Path
) -> None:
    before = sorted(cluster.list_keys())
    said = invoke("rm", cluster.url, "--tag", "prod", "--yes").stderr
    assert "--tag prod: no page matches" in said
    assert "give --profile" in said
    said = invoke("rm", cluster.url, "--tag", "prod", "--profile", profile, "--yes").stderr
    assert "--tag prod: no page matches; no key in the store has a tag" in said
    assert sorted(cluster.list_keys()) == before


def test_a_size_that_the_master_does_not_say_is_not_called_zero(
    invoke: Invoke, cluster: Cluster
) -> None:
    """The size of a key with a comma cannot be queried without a lease."""
    cluster.put(f"slices_{'0a' * 32}_['4', '5']_temporal", bytes(4096))
    for options in ((), ("--objects",), ("--summary",)):
        rows = invoke("ls", cluster.url, *options, "--format", "jsonl").stdout.splitlines()
        (odd,) = (row for row in map(json.loads, rows) if row["model"] == "slices")
        assert odd["nbytes"] is None
        assert all(row["nbytes"] for row in map(json.loads, rows) if row != odd)
        (line,) = (
            line
            for line in invoke("ls", cluster.url, *options).stdout.splitlines()
            if "slices" in line
        )
        assert "? B" in line
        assert "0 B" not in line
    choice = ("--model", "slices", "--dry-run", "--grace", "0s")
    removal = invoke("rm", cluster.url, *choice, "--format", "json").document
    assert (removal["objects"], removal["bytes"]) == (1, None)
    assert [row["nbytes"] for row in removal["groups"]] == [None]


def test_the_package_is_asked_for_only_to_read(cluster: Cluster, profile: Path) -> None:
    program = (
        "import sys; sys.modules['mooncake'] = None; "
        "from hicachectl.__main__ import main; main(sys.argv[1:])"
    )
    for words, code in ((["ls"], 0), (["verify", "--profile", str(profile)], 2)):
        done = subprocess.run(
            [sys.executable, "-c", program, *words, cluster.url],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"{sys.executable} -m pip install mooncake-transfer-engine," in line


def test_the_library_logs_are_kept_off_the_terminal(cluster: Cluster, profile: Path) -> None:
    command = [sys.executable, "-m", "hicachectl", "verify", cluster.url, "--profile", str(profile)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert all(line.startswith("hicachectl: ") for line in done.stderr.splitlines()), done.stderr
    told = subprocess.run(
        [*command[:3], "-v", *command[3:]], capture_output=True, text=True, check=False
    )
    assert "client" in told.stderr


def test_the_limit_of_bytes_a_second_is_kept(
    invoke: Invoke, cluster: Cluster, profile: Path
) -> None:
    nbytes = verified(invoke, cluster.url, "--profile", profile)["bytes"]
    limit = nbytes // 2
    limited = verified(invoke, cluster.url, "--profile", profile, "--bwlimit", limit)
    assert limited["seconds"] >= 0.8 * (nbytes / limit - 1)
    assert limited["bytes_read"] == nbytes


def test_what_a_cluster_cannot_do_is_refused_before_it_is_read(
    invoke: Invoke, cluster: Cluster, profile: Path, tmp_path: Path
) -> None:
    catalog = ("--catalog", tmp_path / "c", "--update-catalog")
    for named, *arguments in (
        ("--stamp",),
        ("--weights-version", "v2"),
        ("--identity", "inode", *catalog),
        ("--buffer-bytes", "0"),
        ("--bwlimit", "0"),
    ):
        given = ("--profile", profile, named, *arguments)
        assert named in invoke("verify", cluster.url, *given, exit_code=2).stderr


def test_parts_repair_as_one_process(
    invoke: Invoke, cluster: Cluster, tmp_path: Path, profile: Path
) -> None:
    """Each part deletes its own bad pages, of a store that keeps no times."""
    first, second = (keys_of_page(cluster, number) for number in (0, PAGES - 1))
    cluster.put(first[0], b"\xc0\x7f" * (len(cluster.client().get(first[0])) // 2))
    cluster.remove(second[-1])
    options = ("--profile", profile, "--grace", "1s", "--repair-code", "missing-rank", "--repair")
    command = (cluster.url, *options, "delete")
    rehearsed = verified(invoke, *command, "--dry-run", exit_code=4)
    run = ("--run", tmp_path / "run")
    for number in (0, 1):
        invoke("verify", *command, "--yes", "--shard", f"{number}/2", *run)
    document = invoke("merge", run[1], "--format", "json", exit_code=4).document
    assert document["counts"] == rehearsed["counts"]
    assert document["counts"]["nan"] == 1
    assert document["repaired"] == 2
    assert not {*first, *second} & set(cluster.list_keys())
    assert verified(invoke, cluster.url, "--profile", profile)["pages"] == PAGES - 2
