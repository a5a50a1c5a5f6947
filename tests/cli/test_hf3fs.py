"""Commands on a 3FS store with SGLang's metadata server."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.identity import profile_tag
from hicachectl.formats.profile import dump_profile
from tests.hf3fs_places import PAGES, Place
from tests.report.page_texts import text_of
from tests.terminals import answering

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke
    from tests.hf3fs_server import MetadataServer


@pytest.fixture
def place(tmp_path: Path, metadata_server: MetadataServer) -> Place:
    return Place(tmp_path, metadata_server, metadata_server.snapshot)


def verified(
    invoke: Invoke, place: Place, *arguments: object, exit_code: int = 0
) -> dict[str, Any]:
    outcome = invoke(
        "verify", place.url(), "--profile", place.profile, "--grace", "0s", *arguments,
        "--format", "json", exit_code=exit_code,
    )  # fmt: skip
    return outcome.document


def found(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    return sorted((f["code"], f["severity"], f["key"] or "") for f in document["findings"])


def first_key(place: Place, name: str = "0:kv") -> str:
    return str(place.tables()[name]["key_to_index"][0][0])


def test_a_report_has_values_but_no_times(invoke: Invoke, place: Place, tmp_path: Path) -> None:
    made = tmp_path / "page.html"
    asked = ("--grace", "0s", "--checks", "groups,sizes,values")
    invoke("report", place.url(), "--profile", place.profile, *asked, "-o", made)
    text = text_of(made)
    assert "No errors and no warnings by the checks that ran: groups, sizes, values" in text
    assert "The store keeps no write times, so there is no chart." in text
    assert "The first page." in text
    assert "mean magnitude" in text
    invoke("report", place.url(), "--grace", "0s", "-o", made)
    text = text_of(made)
    assert "sizes: could not run; the remarks say why" in text
    assert (
        "The store lists no sizes for some objects, so the bars count objects, not bytes." in text
    )
    assert "24 in objects of unknown size" in text
    assert "keys without a model name: 6 pages" in text
    assert "Several sizes" not in text


SIZELESS = [
    ("ls",), ("ls", "--objects"), ("ls", "--summary"), ("verify",),
    ("rm", "--no-tag", "--dry-run"),
]  # fmt: skip


@pytest.mark.parametrize("command", SIZELESS)
def test_sizes_that_only_a_profile_tells_are_not_called_zero(
    invoke: Invoke, place: Place, tmp_path: Path, command: tuple[str, ...]
) -> None:
    arguments = (command[0], place.url(), *command[1:])
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
    removal = ("rm", place.url(), "--no-tag")
    with answering("n"):
        asked = invoke(*removal).stderr
    assert f"Remove {PAGES} pages (? B) from " in asked
    assert place.server.saved() == before
    with answering("n"):
        asked = invoke(*removal, "--profile", place.profile).stderr
    assert f"Remove {PAGES} pages (" in asked
    assert "? B" not in asked


def test_the_age_of_the_listing_is_said(invoke: Invoke, place: Place) -> None:
    assert "snapshot saved" in invoke("ls", place.url()).stderr


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
    place.save()
    document = verified(invoke, place, "--checks", "groups")
    assert left
    assert found(document) == sorted(("orphan-sidecar", "info", key) for key in left)


REPAIR = ("--repair", "delete", "--yes")


def share_a_page(place: Place) -> tuple[str, str]:
    """Map two keys of rank 0 to one page, as a stale snapshot does."""
    first, second = (key for key, _ in place.tables()["0:kv"]["key_to_index"][:2])
    place.server.confirm(0, [(second, place.held("0:kv")[first])])
    place.save()
    return first, second


def test_parts_take_both_keys_of_a_shared_page(
    invoke: Invoke, place: Place, tmp_path: Path
) -> None:
    """Each part repairs its own pages; the tables are checked, and reported, once."""
    keys = share_a_page(place)
    whole = verified(invoke, place, "--repair", "delete", "--dry-run", exit_code=4)
    run = ("--run", tmp_path / "run")
    options = ("--profile", place.profile, "--grace", "0s", *REPAIR, *run)
    for part in (0, 2, 1):
        invoke("verify", place.url(), *options, "--shard", f"{part}/3")
    document = invoke("merge", run[1], "--format", "json", exit_code=4).document
    assert document["counts"] == whole["counts"]
    assert document["repaired"] >= 1
    assert place.server.exists(0, list(keys)) == [False, False]
    saved = place.server.saved()["0:kv"]
    assert not {index for _, index in saved["key_to_index"]} & set(saved["free_pages"])
    verified(invoke, place, "--fail-on", "error")

    alone = place.url("")
    other = ("--shard", "0/2", "--run", tmp_path / "other")
    refused = invoke("verify", alone, *options[:-2], *other, exit_code=2).stderr
    assert "without server=, a repair writes one new snapshot, so parts of a run" in refused
    assert not (tmp_path / "other").exists()


def test_a_bad_page_leaves_every_table(invoke: Invoke, place: Place) -> None:
    key = first_key(place)
    position = place.held("0:kv")[key] * place.page_bytes[0, "kv"]
    with place.file(0, "kv").open("r+b") as stream:
        stream.seek(position)
        stream.write(b"\xc0\x7f")
    verified(invoke, place, *REPAIR, exit_code=4)
    place.save()
    page = key[:64]
    for table in place.server.saved().values():
        assert not [k for k, _ in table["key_to_index"] if k.startswith(page)]


def contents(place: Place, rank: int, namespace: str) -> dict[str, bytes]:
    """Return the page of each key, at its index in the saved tables."""
    nbytes, data = place.page_bytes[rank, namespace], place.file(rank, namespace).read_bytes()
    indices = dict(place.tables()[f"{rank}:{namespace}"]["key_to_index"])
    return {key: data[at * nbytes : (at + 1) * nbytes] for key, at in indices.items()}


def test_what_was_quarantined_is_put_back(invoke: Invoke, place: Place, tmp_path: Path) -> None:
    """The remaining objects return under their keys, with their bytes; not for other weights."""
    lost = first_key(place)
    place.server.delete(1, [lost])
    place.save()
    before = contents(place, 0, "kv")
    quarantine = tmp_path / "quarantine"
    document = verified(
        invoke, place, "--checks", "groups", "--repair", "quarantine", "--quarantine", quarantine,
        "--repair-code", "missing-part", "--yes", exit_code=4,
    )  # fmt: skip
    assert document["repaired"] == 1
    place.save()
    assert before.keys() - contents(place, 0, "kv").keys() == {lost, f"{lost[:-1]}k"}
    put_back = ("restore", quarantine, place.url(), "--yes", "--format", "json")
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
            ask = ("restore", quarantine, place.url(), mode, "--profile", place.profile)
            refused = invoke(*ask, exit_code=2)
            assert f"servers of deployment {claim.read_text()} use the store" in refused.stderr
            assert said in refused.stderr
    place.save()
    assert contents(place, 0, "kv") == unchanged
    claim.unlink()
    restored = invoke(*put_back, "--profile", place.profile).document
    assert (restored["pages"], restored["failed"]) == (1, 0)
    assert claim.read_text() == profile_tag(named)
    place.save()
    assert contents(place, 0, "kv") == before


def test_without_a_server_a_repaired_snapshot_is_written_beside(
    invoke: Invoke, place: Place
) -> None:
    keys = share_a_page(place)
    before = place.server.snapshot.read_bytes()
    alone = place.url("")
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
    place.save()
    monkeypatch.setattr("hicachectl.move.table_repair._SAVES_S", 1.0)
    refused = invoke(
        "verify", place.url(), "--profile", place.profile, "--grace", "0s", *REPAIR,
        "--writers-stopped", exit_code=2,
    )  # fmt: skip
    (said,) = (line for line in refused.stderr.splitlines() if "saved no snapshot" in line)
    assert said.startswith(f"hicachectl: hf3fs://{place.folder}/hicache?")
    assert (
        ": the metadata server saved no snapshot within 1 s; check its --persistence-path" in said
    )


def test_leaked_pages_are_released_when_writers_have_stopped(invoke: Invoke, place: Place) -> None:
    place.server.reserve(0, ["never-confirmed"])
    place.save()

    over = threading.Event()

    def save_often() -> None:
        while not over.wait(0.5):
            place.save()

    saver = threading.Thread(target=save_often)
    saver.start()
    try:
        outcome = invoke(
            "verify", place.url(), "--profile", place.profile, "--grace", "0s", *REPAIR,
            "--writers-stopped", exit_code=4,
        )  # fmt: skip
    finally:
        over.set()
        saver.join()
    place.save()
    assert "1 leaked page released" in outcome.stderr
    document = verified(invoke, place, "--checks", "groups")
    assert document["findings"] == []
