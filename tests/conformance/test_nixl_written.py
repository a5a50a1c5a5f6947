"""Stores written by SGLang's own HiCacheNixl and NIXL's POSIX plug-in are understood."""

from __future__ import annotations

import json
import os
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.keys.nixl import route
from tests.conformance.object_bytes import expected_bytes
from tests.conformance.store_cases import NIXL_VARIANTS, is_trailing
from tests.conformance.test_cli_stores import on_pages_of_their_own
from tests.conformance.test_hits import ask, chains_of, hits_of, some_objects
from tests.conformance.test_mooncake_written import (
    Entry,
    WrittenFiles,
    affix_of,
    check_predicted,
    complaints,
    damage,
    listed,
    loss_findings,
    one_of_each_kind,
    thirds,
    verified,
)
from tests.stores import OLD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.conftest import Manifest, SglangSession
    from tests.conftest import Invoke

_COORDINATES = ("key", "page", "model", "pool", "part", "tp_rank", "tp_size", "pp_rank", "cp_rank",
                "nbytes")  # fmt: skip

# All these tests run in the worker with the SGLang process.
pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-nixl")]


@dataclass(frozen=True)
class Written(WrittenFiles):
    """A store with the objects that SGLang wrote for one case. backend: of write_store.py."""

    backend: str
    folder: Path
    manifest: Manifest

    @property
    def directories(self) -> tuple[Path, ...]:
        return tuple(self.folder / name for name in ("one", "two", "three"))

    @property
    def place(self) -> tuple[str, str]:
        """The arguments of SGLang's scripts."""
        return ",".join(map(str, self.directories)), f"--backend={self.backend}"

    @property
    def url(self) -> str:
        return url_of(self.backend, self.directories)

    def file(self, entry: Entry) -> Path:
        number, folder = route(entry["key"].encode(), len(self.directories))
        return self.directories[number] / os.fsdecode(folder) / str(entry["key"])

    @contextmanager
    def holding(self, entry: Entry, value: bytes | None) -> Iterator[None]:
        """Replace an object's bytes, or remove it, for the duration of the block."""
        path = self.file(entry)
        before, facts = path.read_bytes(), path.stat()
        if value is None:
            path.unlink()
        else:
            path.write_bytes(value)
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def url_of(backend: str, directories: tuple[Path, ...]) -> str:
    """Return a store's URL; the test machine's disks may be fuller than a server's."""
    direct = "on" if backend == "nixl" else "off"
    return f"nixl://{','.join(map(str, directories))}?direct_io={direct}&high_watermark=100"


@pytest.fixture(scope="module", params=NIXL_VARIANTS, ids="-".join)
def written(
    request: pytest.FixtureRequest,
    nixl_package: None,
    sglang_session: SglangSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Written:
    """Each case in turn; a test that changes the store restores it."""
    backend, case, layout = request.param
    store = Written(backend, tmp_path_factory.mktemp("nixl"), {})
    manifest = sglang_session.run("write_store", case, *store.place, f"--layout={layout}")
    return Written(backend, store.folder, manifest)


def written_into(
    folder: Path, backend: str, session: SglangSession, *cases: str
) -> tuple[Written, ...]:
    """Let SGLang write several cases into the same directories."""
    place = Written(backend, folder, {}).place
    manifests = [session.run("write_store", case, *place) for case in cases]
    return tuple(Written(backend, folder, manifest) for manifest in manifests)


def test_the_pages_of_two_models_are_apart(
    nixl_package: None, sglang_session: SglangSession, invoke: Invoke, tmp_path: Path
) -> None:
    """Proves that each profile judges its model's pages, and a removal takes those of one model."""
    one, two = written_into(tmp_path, "nixl", sglang_session, "gqa_tp2", "mla_blocks")
    keys = {name for each in one.directories for name in (p.name for p in each.glob("*/*"))}
    models = {written.manifest["profile"]["model"].replace("/", "-") for written in (one, two)}
    for number, written in enumerate((one, two)):
        profile = tmp_path / f"{number}.json"
        profile.write_text(json.dumps(written.manifest["profile"]))
        rows = listed(invoke, written.url, "--profile", profile)
        assert rows.keys() == keys
        assert {row["model"] for row in rows.values()} == models
        document = verified(invoke, written.url, "--profile", profile)
        assert document["findings"] == []
        assert "other-deployments" in document["skipped_checks"]
        assert 0 < document["objects_read"] < document["objects"] == len(keys)
    for path in (file for each in one.directories for file in each.glob("*/*")):
        os.utime(path, (OLD, OLD))  # rm waits until pages are not in flight
    invoke("rm", one.url, "--model", one.manifest["profile"]["model"], "--yes")
    left = listed(invoke, one.url)
    assert {row["model"].replace("/", "-") for row in left.values()} == {
        two.manifest["profile"]["model"].replace("/", "-")
    }


def test_stages_that_overwrote_each_other_are_a_finding(
    nixl_package: None, sglang_session: SglangSession, invoke: Invoke, tmp_path: Path
) -> None:
    """Proves that SGLang's stages have the same keys, and that verify says so."""
    (stages,) = written_into(tmp_path, "nixl", sglang_session, "stages")
    rows = listed(invoke, stages.url, "--profile", stages.profile)
    assert rows
    assert all(row["pp_rank"] is None for row in rows.values())
    # Each stage has K and V of its layers.
    assert len(rows) == 2 * len({row["page"] for row in rows.values()})
    document = verified(invoke, stages.url, "--profile", stages.profile, exit_code=4)
    assert "colliding-keys" in document["counts"]


def test_states_that_sglang_never_finds_again_are_refused(
    nixl_package: None, sglang_session: SglangSession, invoke: Invoke, tmp_path: Path
) -> None:
    """Proves that SGLang restores no page whose states are convolutions only."""
    (store,) = written_into(tmp_path, "nixl-buffered", sglang_session, "zaya")
    chains = [store.manifest["pages"]]
    told = ask(sglang_session, store.manifest, chains, store.place[0], backend=store.backend)
    assert [(answer["kv"], answer["restorable"]) for answer in told] == [([8], [[0]])] * 2
    refused = invoke("verify", store.url, "--profile", store.profile, exit_code=2)
    assert "never finds states without a temporal one again" in refused.stderr


@pytest.mark.parametrize("command", ["show", "hits", "migrate"])
def test_a_part_of_sglangs_directories_is_refused(
    many_pages: Written, invoke: Invoke, tmp_path: Path, command: str
) -> None:
    """Proves that nothing is said of pages, and no page is written, that the others complete."""
    part = url_of("nixl", many_pages.directories[:1])
    page = many_pages.manifest["pages"][0]
    profile, pages = ("--profile", many_pages.profile), tmp_path / "pages.json"
    pages.write_text(json.dumps([page]))
    command_line = {
        "show": ("show", part, page, *profile),
        "hits": ("hits", part, *profile, "--pages", pages),
        "migrate": ("migrate", many_pages.url, part, *profile),
    }[command]
    said = invoke(*command_line, exit_code=2).stderr
    assert "has the objects of one of 3 directories, but the URL has 1" in said


@pytest.fixture(scope="module")
def many_pages(
    nixl_package: None, sglang_session: SglangSession, tmp_path_factory: pytest.TempPathFactory
) -> Written:
    """A store whose directories have enough objects to tell that one is missing."""
    store = Written("nixl", tmp_path_factory.mktemp("nixl"), {})
    manifest = sglang_session.run("write_store", "gqa_tp2", *store.place, "--pages=72")
    return Written("nixl", store.folder, manifest)


def times_in(directories: tuple[Path, ...]) -> dict[str, int]:
    """Return the modification time of each file, by name."""
    return {file.name: file.stat().st_mtime_ns for one in directories for file in one.glob("*/*")}


def test_every_written_object_was_predicted_and_holds_its_values_at_its_place(
    written: Written,
) -> None:
    check_predicted(written.manifest, written.objects, written.expected)
    wrong = [
        key
        for key, entry in written.objects.items()
        if written.file(entry).read_bytes() != expected_bytes(written.manifest, entry)
    ]
    assert wrong == []
    found = {
        path.name for each in written.directories for path in each.rglob("*") if path.is_file()
    }
    assert found == written.objects.keys()


def test_ls_lists_exactly_what_sglang_wrote_with_and_without_a_profile(
    written: Written, invoke: Invoke
) -> None:
    for options in (("--profile", written.profile), ()):
        rows = listed(invoke, written.url, *options)
        assert rows.keys() == written.objects.keys()
        for key, entry in written.objects.items():
            assert {name: rows[key][name] for name in _COORDINATES} == {
                name: entry[name] for name in _COORDINATES
            }


def test_verify_is_clean_and_each_damage_is_named(written: Written, invoke: Invoke) -> None:
    """Proves that lost, short, long and bad objects are found, and nothing else."""
    profile = ("--profile", written.profile)
    document = verified(invoke, written.url, *profile)
    assert document["findings"] == []
    assert document["objects"] == len(written.objects)
    logical = {p["name"] for p in written.manifest["profile"]["pools"] if p["kind"] == "logical"}
    assert document["bytes_read"] == sum(
        entry["nbytes"] for entry in written.objects.values() if entry["pool"] not in logical
    )
    assert {"names", "groups", "sizes", "values"} <= set(document["checks"])
    entries = list(written.objects.values())
    for lost in on_pages_of_their_own(entries):
        wanted = [one for entry in lost for one in loss_findings(entries, entry)]
        with ExitStack() as damaged:
            for entry in lost:
                damaged.enter_context(written.holding(entry, None))
            document = verified(invoke, written.url, *profile, exit_code=4 if wanted else 0)
        assert complaints(document) == sorted(wanted)
    planted = []
    with ExitStack() as damaged:
        for code, pages in zip(
            ("nan", "truncated", "oversized"), thirds(written.manifest["pages"]), strict=True
        ):
            for entry in one_of_each_kind([e for e in entries if e["page"] in pages]):
                value = written.file(entry).read_bytes()
                bad = damage(code, value, written.expected[affix_of(entry)])
                if bad is not None:
                    damaged.enter_context(written.holding(entry, bad))
                    planted.append((code, "error", entry["key"]))
        document = verified(invoke, written.url, *profile, exit_code=4)
    # Rows of bytes and scales have no NaN.
    assert {code for code, _, _ in planted} >= {"truncated", "oversized"}
    assert complaints(document) == sorted(planted)


def test_chains_reach_no_farther_than_sglang_says(
    written: Written, sglang_session: SglangSession, invoke: Invoke
) -> None:
    """HiCacheNixl returns the minimum of its pools' longest prefixes, which may not be usable."""
    chance = random.Random(written.manifest["case"])
    manifest = written.manifest
    chains = chains_of(manifest["pages"], chance)
    trailing = any(is_trailing(entry["pool"]) for entry in manifest["objects"])
    with ExitStack() as gone:
        for entry in some_objects(manifest, chance, share=0.1):
            gone.enter_context(written.holding(entry, None))
        answers = ask(sglang_session, manifest, chains, written.place[0], backend=written.backend)
        rows = hits_of(invoke, chains, written.folder, written.url, "--profile", written.profile)
    for number, row in enumerate(rows):
        theirs = min(answer["restorable"][number][0] for answer in answers)
        assert row["kv_pages"] == min(answer["kv"][number] for answer in answers)
        assert row["usable_pages"] <= theirs
        assert trailing or row["usable_pages"] == theirs


def test_sglang_reads_what_went_to_a_file_store_and_back(
    written: Written, sglang_session: SglangSession, invoke: Invoke, tmp_path: Path
) -> None:
    """Proves that migrations in both directions keep all pages and times, for SGLang itself."""
    files, again = tmp_path / "files", (tmp_path / "one", tmp_path / "two")
    options = ("--profile", written.profile, "--verify", "--grace", "0s")
    invoke("migrate", written.url, files, *options)
    url = url_of(written.backend, again)
    invoke("migrate", files, url, *options)
    place = ",".join(map(str, again))
    for rank in sglang_session.read_back(place, written.backend, written.manifest):
        assert rank["hit_pages"] == len(written.manifest["pages"]), rank
        assert not any(rank["wrong"].values()), rank
    times = times_in(again)
    assert times.keys() == written.objects.keys()
    # Where a file joins K and V, both get one of their times.
    assert set(times.values()) <= set(times_in(written.directories).values())
    assert verified(invoke, url, "--profile", written.profile)["findings"] == []
