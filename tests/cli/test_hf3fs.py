"""Commands on a 3FS store with SGLang's metadata server."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import Profiled
from hicachectl.cli.demo_store import PROFILE, fill
from hicachectl.formats.identity import profile_tag
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.profile import dump_profile
from hicachectl.formats.spec import object_specs
from tests.report.page_texts import text_of
from tests.skips import missing
from tests.terminals import answering

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.hf3fs_server import MetadataServer

PAGES = 6
FILE_BYTES = 4 << 20
SPELL = grammar_of("hf3fs").affix


class Place:
    """A prefix with data files as engines create them; the demo's pages are written and saved."""

    def __init__(self, folder: Path, server: MetadataServer) -> None:
        self.server = server
        self.folder = folder
        self.page_bytes: dict[tuple[int, str], int] = {}
        for expected in object_specs(PROFILE, "hf3fs"):
            number, pool, _ = SPELL(expected.coordinate)[0].split(":")
            self.page_bytes[int(number), pool] = expected.nbytes
        for (rank, namespace), nbytes in self.page_bytes.items():
            path = self.file(rank, namespace)
            path.touch()
            os.truncate(path, FILE_BYTES)
            server.initialize(rank, FILE_BYTES // nbytes, namespace=namespace)
        self.profile = folder / "profile.toml"
        self.profile.write_text(dump_profile(PROFILE))
        server.save()
        with open_store(self.url) as store:
            assert isinstance(store, Profiled)
            store.use_profile(PROFILE)
            fill(store, PAGES)
        server.save()

    @property
    def url(self) -> str:
        return (
            f"hf3fs://{self.folder}/hicache?server={self.server.url}"
            f"&snapshot={self.server.snapshot}&file_size={FILE_BYTES}"
        )

    def file(self, rank: int, namespace: str) -> Path:
        side = "" if namespace == "kv" else f".{namespace}"
        return self.folder / f"hicache.{rank}.bin{side}"

    def table(self, name: str) -> dict[str, Any]:
        saved: dict[str, dict[str, Any]] = json.loads(self.server.snapshot.read_text())
        return saved[name]

    def index_of(self, name: str, key: str) -> int:
        return int(dict(self.table(name)["key_to_index"])[key])


@pytest.fixture
def place(tmp_path: Path, metadata_server: MetadataServer) -> Place:
    return Place(tmp_path, metadata_server)


def verified(
    invoke: Invoke, place: Place, *arguments: object, exit_code: int = 0
) -> dict[str, Any]:
    outcome = invoke(
        "verify", place.url, "--profile", place.profile, "--grace", "0s", *arguments,
        "--format", "json", exit_code=exit_code,
    )  # fmt: skip
    return outcome.document


def found(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    return sorted((f["code"], f["severity"], f["key"] or "") for f in document["findings"])


def first_key(place: Place, name: str = "0:kv") -> str:
    return str(place.table(name)["key_to_index"][0][0])


def test_a_report_has_values_but_no_times(invoke: Invoke, place: Place, tmp_path: Path) -> None:
    made = tmp_path / "page.html"
    asked = ("--grace", "0s", "--checks", "groups,sizes,values")
    invoke("report", place.url, "--profile", place.profile, *asked, "-o", made)
    text = text_of(made)
    assert "No errors and no warnings by the checks that ran: groups, sizes, values" in text
    assert "The store keeps no write times, so there is no chart." in text
    assert "The first page." in text
    assert "mean magnitude" in text
    invoke("report", place.url, "--grace", "0s", "-o", made)
    text = text_of(made)
    assert "sizes: could not run: see the remarks" in text
    assert "The store lists no sizes for some objects, so objects are counted." in text
    assert "24 in objects of unknown size" in text
    assert "keys without a model name: 6 pages" in text
    assert "Several sizes" not in text


def test_objects_are_listed_with_their_pages(invoke: Invoke, place: Place) -> None:
    arguments = ("--objects", "--profile", place.profile, "--format", "json")
    rows = invoke("ls", place.url, *arguments).document["objects"]
    by_table: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        rank, namespace, key = row["key"].split(":", 2)
        by_table[f"{rank}:{namespace}"][key] = row["offset"]
        assert row["nbytes"] == place.page_bytes[int(rank), namespace]
    for name, listed in by_table.items():
        assert listed == dict(place.table(name)["key_to_index"])


SIZELESS = [
    ("ls",), ("ls", "--objects"), ("ls", "--summary"), ("verify",),
    ("rm", "--no-tag", "--dry-run"),
]  # fmt: skip


@pytest.mark.parametrize("command", SIZELESS)
def test_sizes_that_only_a_profile_tells_are_not_called_zero(
    invoke: Invoke, place: Place, tmp_path: Path, command: tuple[str, ...]
) -> None:
    arguments = (command[0], place.url, *command[1:])
    text = invoke(*arguments).stdout
    assert "0 B" not in text
    assert "? B" in text
    document = invoke(*arguments, "--format", "json").document
    rows = next(value for value in document.values() if isinstance(value, list) and value)
    if command[0] == "ls":
        assert {row["nbytes"] for row in rows} == {None}
    else:
        assert document["bytes"] is None
    if command[0] == "rm":
        assert {row["nbytes"] for row in rows} == {None}
    if command[0] == "verify":
        metrics = tmp_path / "metrics"
        invoke(*arguments, "--metrics-file", metrics)
        assert "hicachectl_verify_objects{" in metrics.read_text()
        assert "hicachectl_verify_bytes{" not in metrics.read_text()


def test_the_question_says_that_a_size_is_not_known(invoke: Invoke, place: Place) -> None:
    before = place.server.saved()
    removal = ("rm", place.url, "--no-tag")
    with answering("n"):
        asked = invoke(*removal).stderr
    assert f"Remove {PAGES} pages (? B) from " in asked
    assert place.server.saved() == before
    with answering("n"):
        asked = invoke(*removal, "--profile", place.profile).stderr
    assert f"Remove {PAGES} pages (" in asked
    assert "? B" not in asked


def test_the_age_of_the_listing_is_said(invoke: Invoke, place: Place) -> None:
    assert "snapshot saved" in invoke("ls", place.url).stderr


def test_a_healthy_store_has_no_findings(invoke: Invoke, place: Place) -> None:
    document = verified(invoke, place)
    assert document["findings"] == []
    assert document["bytes_read"] == document["bytes"] > 0


def test_a_key_on_two_pages_and_a_leak_are_named(invoke: Invoke, place: Place) -> None:
    first, second = (key for key, _ in place.table("0:kv")["key_to_index"][:2])
    index = place.index_of("0:kv", first)
    place.server.confirm(0, [(second, index)])
    place.server.save()
    document = verified(invoke, place, "--checks", "groups", exit_code=4)
    assert found(document) == sorted(
        [
            ("page-index-shared", "error", f"0:kv:{first}"),
            ("page-index-shared", "error", f"0:kv:{second}"),
            ("page-leaked", "warning", ""),
        ]
    )
    assert "1 of 512 pages of 0:kv" in document["findings"][-1]["detail"]


def test_a_page_that_was_never_written_is_an_error(invoke: Invoke, place: Place) -> None:
    key = first_key(place)
    nbytes = place.page_bytes[0, "kv"]
    hole = place.index_of("0:kv", key) * nbytes
    command = ["fallocate", "--punch-hole", "--offset", str(hole), "--length", str(nbytes)]
    done = subprocess.run([*command, place.file(0, "kv")], capture_output=True, check=False)
    if done.returncode:
        missing("a file system with holes", "set TMPDIR to one on tmpfs, ext4 or XFS")
    codes = {code for code, _, _ in found(verified(invoke, place, exit_code=4))}
    assert "unwritten-page" in codes


def test_what_is_left_of_a_page_without_kv_is_only_noted(invoke: Invoke, place: Place) -> None:
    tables = place.server.saved()
    side = next(t for name, t in tables.items() if not name.endswith(":kv") and t["key_to_index"])
    page = side["key_to_index"][0][0][:64]
    left = set()
    for name, table in tables.items():
        rank, namespace = name.split(":")
        keys = [key for key, _ in table["key_to_index"] if key.startswith(page)]
        if namespace == "kv":
            place.server.delete(int(rank), keys)
        else:
            left |= {f"{name}:{key}" for key in keys}
    place.server.save()
    document = verified(invoke, place, "--checks", "groups")
    assert left
    assert found(document) == sorted(("orphan-sidecar", "info", key) for key in left)


def test_a_nan_is_found_and_confirmed(invoke: Invoke, place: Place) -> None:
    key = first_key(place)
    position = place.index_of("0:kv", key) * place.page_bytes[0, "kv"]
    with place.file(0, "kv").open("r+b") as stream:
        stream.seek(position)
        stream.write(b"\xc0\x7f")
    outcome = invoke("verify", place.url, "--profile", place.profile, "--grace", "0s", exit_code=4)
    assert "nan" in outcome.stdout
    assert "2 queries for keys that looked damaged counted as use" in outcome.stderr
    assert place.server.keys_by_recency(0)[-1] == key


def test_the_server_that_is_absent_is_unreachable(invoke: Invoke, place: Place) -> None:
    place.server.kill()
    invoke("verify", place.url, "--profile", place.profile, exit_code=3)
    alone = place.url.replace(f"server={place.server.url}&", "")
    document = json.loads(
        invoke(
            "verify", alone, "--profile", place.profile, "--grace", "0s", "--format", "json"
        ).stdout
    )
    assert document["findings"] == []
    place.server.start()


REPAIR = ("--repair", "delete", "--yes")


def share_a_page(place: Place) -> tuple[str, str]:
    """Map two keys of rank 0 to one page, as a stale snapshot does."""
    first, second = (key for key, _ in place.table("0:kv")["key_to_index"][:2])
    place.server.confirm(0, [(second, place.index_of("0:kv", first))])
    place.server.save()
    return first, second


def test_repair_takes_both_keys_of_a_shared_page(invoke: Invoke, place: Place) -> None:
    keys = share_a_page(place)
    document = verified(invoke, place, *REPAIR, exit_code=4)
    assert document["repaired"] >= 1
    assert place.server.exists(0, list(keys)) == [False, False]
    saved = place.server.saved()["0:kv"]
    assert not {index for _, index in saved["key_to_index"]} & set(saved["free_pages"])
    verified(invoke, place, "--fail-on", "error")


def test_parts_take_both_keys_of_a_shared_page(
    invoke: Invoke, place: Place, tmp_path: Path
) -> None:
    """Each part repairs its own pages; the tables are checked, and reported, once."""
    keys = share_a_page(place)
    whole = verified(invoke, place, "--repair", "delete", "--dry-run", exit_code=4)
    run = ("--run", tmp_path / "run")
    options = ("--profile", place.profile, "--grace", "0s", *REPAIR, *run)
    for part in (0, 2, 1):
        invoke("verify", place.url, *options, "--shard", f"{part}/3")
    document = invoke("merge", run[1], "--format", "json", exit_code=4).document
    assert document["counts"] == whole["counts"]
    assert document["repaired"] >= 1
    assert place.server.exists(0, list(keys)) == [False, False]
    saved = place.server.saved()["0:kv"]
    assert not {index for _, index in saved["key_to_index"]} & set(saved["free_pages"])
    verified(invoke, place, "--fail-on", "error")

    alone = place.url.replace(f"server={place.server.url}&", "")
    other = ("--shard", "0/2", "--run", tmp_path / "other")
    refused = invoke("verify", alone, *options[:-2], *other, exit_code=2).stderr
    assert "without server=, a repair writes one new snapshot; use one process" in refused
    assert not (tmp_path / "other").exists()


def test_a_bad_page_leaves_every_table(invoke: Invoke, place: Place) -> None:
    key = first_key(place)
    position = place.index_of("0:kv", key) * place.page_bytes[0, "kv"]
    with place.file(0, "kv").open("r+b") as stream:
        stream.seek(position)
        stream.write(b"\xc0\x7f")
    verified(invoke, place, *REPAIR, exit_code=4)
    place.server.save()
    page = key[:64]
    for table in place.server.saved().values():
        assert not [k for k, _ in table["key_to_index"] if k.startswith(page)]


def contents(place: Place, rank: int, namespace: str) -> dict[str, bytes]:
    """Return the page of each key, at its index in the saved tables."""
    nbytes, data = place.page_bytes[rank, namespace], place.file(rank, namespace).read_bytes()
    indices = dict(place.table(f"{rank}:{namespace}")["key_to_index"])
    return {key: data[at * nbytes : (at + 1) * nbytes] for key, at in indices.items()}


def test_what_was_quarantined_is_put_back(invoke: Invoke, place: Place, tmp_path: Path) -> None:
    """The remaining objects return under their keys, with their bytes; not for other weights."""
    lost = first_key(place)
    place.server.delete(1, [lost])
    place.server.save()
    before = contents(place, 0, "kv")
    quarantine = tmp_path / "quarantine"
    document = verified(
        invoke, place, "--checks", "groups", "--repair", "quarantine", "--quarantine", quarantine,
        "--repair-code", "missing-part", "--yes", exit_code=4,
    )  # fmt: skip
    assert document["repaired"] == 1
    place.server.save()
    assert before.keys() - contents(place, 0, "kv").keys() == {lost, f"{lost[:-1]}k"}
    put_back = ("restore", quarantine, place.url, "--yes", "--format", "json")
    refused = invoke(*put_back, exit_code=2)
    assert "hf3fs" in refused.stderr
    assert "--profile" in refused.stderr
    claim = place.folder / "hicache.hicachectl-deployment"
    named = replace(PROFILE, weights="a" * 32)
    claim.write_text(str(profile_tag(replace(named, weights="b" * 32))))
    unchanged = contents(place, 0, "kv")
    for profile, said in ((PROFILE, "give --weights"), (named, str(profile_tag(named)))):
        place.profile.write_text(dump_profile(profile))
        for mode in ("--yes", "--dry-run"):
            ask = ("restore", quarantine, place.url, mode, "--profile", place.profile)
            refused = invoke(*ask, exit_code=2)
            assert f"servers of deployment {claim.read_text()} use the store" in refused.stderr
            assert said in refused.stderr
    place.server.save()
    assert contents(place, 0, "kv") == unchanged
    claim.unlink()
    restored = invoke(*put_back, "--profile", place.profile).document
    assert (restored["pages"], restored["failed"]) == (1, 0)
    assert claim.read_text() == profile_tag(named)
    place.server.save()
    assert contents(place, 0, "kv") == before


def test_without_a_server_a_repaired_snapshot_is_written_beside(
    invoke: Invoke, place: Place
) -> None:
    keys = share_a_page(place)
    before = place.server.snapshot.read_bytes()
    alone = place.url.replace(f"server={place.server.url}&", "")
    invoke("verify", alone, "--profile", place.profile, "--grace", "0s", *REPAIR, exit_code=4)
    assert place.server.snapshot.read_bytes() == before
    beside = place.server.snapshot.with_name(place.server.snapshot.name + ".repaired")
    table = json.loads(beside.read_text())["0:kv"]
    held = dict(table["key_to_index"])
    assert not set(keys) & set(held)
    assert sorted([*held.values(), *table["free_pages"]]) == sorted(
        set(held.values()) | set(table["free_pages"])
    )
    beside.unlink()


def test_a_server_that_does_not_save_keeps_its_leaked_pages(
    invoke: Invoke, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.server.reserve(0, ["never-confirmed"])
    place.server.save()
    monkeypatch.setattr("hicachectl.move.table_repair._SAVES_S", 1.0)
    refused = invoke(
        "verify", place.url, "--profile", place.profile, "--grace", "0s", *REPAIR,
        "--writers-stopped", exit_code=2,
    )  # fmt: skip
    (said,) = (line for line in refused.stderr.splitlines() if "saved no snapshot" in line)
    assert said.startswith(f"hicachectl: hf3fs://{place.folder}/hicache?")
    assert (
        ": the metadata server saved no snapshot within 1 s; check its --persistence-path" in said
    )


def test_leaked_pages_are_released_when_writers_have_stopped(invoke: Invoke, place: Place) -> None:
    place.server.reserve(0, ["never-confirmed"])
    place.server.save()

    over = threading.Event()

    def save_often() -> None:
        while not over.wait(0.5):
            place.server.save()

    saver = threading.Thread(target=save_often)
    saver.start()
    try:
        outcome = invoke(
            "verify", place.url, "--profile", place.profile, "--grace", "0s", *REPAIR,
            "--writers-stopped", exit_code=4,
        )  # fmt: skip
    finally:
        over.set()
        saver.join()
    place.server.save()
    assert "1 leaked page released" in outcome.stderr
    document = verified(invoke, place, "--checks", "groups")
    assert document["findings"] == []
