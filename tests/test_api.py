"""The Python interface does what the commands do, and its manual page's examples run."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hicachectl
from hicachectl.cli.demo_store import PROFILE
from tests.test_readme import manual_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tests.conftest import Invoke

PAGES = 8
BLOCKS = manual_blocks("hicachectl-python.7")


def demo_tokens() -> list[int]:
    """Return the token ids of the demo store's only chain."""
    rng = np.random.default_rng(20_251_120)
    tokens: list[int] = rng.integers(0, 150_000, PAGES * PROFILE.page_size).tolist()
    return tokens


def without_run(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without the members that tell of the run and the release."""
    varies = ("seconds", "schema", "version")
    return {name: value for name, value in document.items() if name not in varies}


def known(value: object) -> object:
    """Return a row without the members that are null."""
    if isinstance(value, dict):
        return {name: known(one) for name, one in value.items() if one is not None}
    return value


def asked(
    requests: Iterable[hicachectl.Request | Sequence[int]], profile: hicachectl.Profile
) -> hicachectl.HitsRequest:
    return hicachectl.HitsRequest(
        requests=hicachectl.hash_requests(requests, profile), profile=profile
    )


@pytest.mark.slow
def test_the_examples_of_the_manual_run(source: Path, profile: Path, tmp_path: Path) -> None:
    """Each example is a whole program; it runs on a store, warnings being errors."""
    programs = "".join(f"exec({block!r}, {{}})\n" for block in BLOCKS)
    for name, path in (("/mnt/hicache", source), ("prod.toml", profile)):
        programs = programs.replace(f'"{name}"', f'"{path}"')
    programs = programs.replace("/mnt/", f"{tmp_path}/")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", programs], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_verify_returns_what_the_command_writes(
    invoke: Invoke, source: Path, profile: Path
) -> None:
    """Same members, findings and counts, for a store with a missing object."""
    next(iter(sorted(source.glob("*_0_2.bin")))).unlink()
    with hicachectl.open_store(str(source)) as store:
        report = hicachectl.verify(
            store, hicachectl.VerifyRequest(profile=hicachectl.read_profile(profile))
        )
    written = invoke.document("verify", source, "--profile", profile, exit_code=4)
    assert report.document["counts"]
    assert {**without_run(report.document), "findings": len(report.rows)} == {
        **without_run(written),
        "findings": len(written["findings"]),
    }


def test_verify_refuses_checks_that_cannot_run(source: Path) -> None:
    """A named check that cannot run is an error, as on the command line."""
    with (
        hicachectl.open_store(str(source)) as store,
        pytest.raises(hicachectl.UsageError, match=r"checks: values cannot run.*profile"),
    ):
        hicachectl.verify(store, hicachectl.VerifyRequest(checks=("values",)))
    with pytest.raises(hicachectl.UsageError, match=r"checks: 'value' is not one of names"):
        hicachectl.VerifyRequest(checks=("value",))
    with pytest.raises(hicachectl.UsageError, match="checks: empty"):
        hicachectl.VerifyRequest(checks=())


@pytest.mark.parametrize("name", ["model", "pool", "page"])
def test_an_empty_filter_is_not_everything(name: str) -> None:
    filters: dict[str, Any] = {name: ""}
    with pytest.raises(hicachectl.UsageError, match=f"{name}: empty"):
        hicachectl.Selection(**filters)


def test_hits_returns_the_rows_of_the_command(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    """Token ids in memory give the rows that the same ids in a file give."""
    requests = [demo_tokens(), demo_tokens()[:100], [1] * 64]
    listed = tmp_path / "requests.jsonl"
    listed.write_text("".join(json.dumps(ids) + "\n" for ids in requests))
    with hicachectl.open_store(str(source)) as store:
        found = hicachectl.hits(store, asked(requests, hicachectl.read_profile(profile)))
    written = invoke.document("hits", source, "--profile", profile, "--token-ids", listed)
    assert list(map(known, found.rows.to_pylist())) == list(map(known, written["chains"]))
    assert found.rows.column("usable_tokens").to_pylist()[0] > 0


def test_simulate_returns_what_the_command_writes(
    invoke: Invoke, source: Path, profile: Path, tmp_path: Path
) -> None:
    """A trace that is read by its path, with the generated tokens, and one of block ids."""
    trace, blocks = tmp_path / "trace.jsonl", tmp_path / "blocks.jsonl"
    rows: list[dict[str, Any]] = [
        {"timestamp": at, "token_ids": demo_tokens()[:100], "output_ids": demo_tokens()[100:]}
        for at in range(2)
    ]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    blocks.write_text('{"hash_ids": [1, 2], "input_length": 900}\n' * 2)
    read = hicachectl.read_profile(profile)
    requests = hicachectl.read_requests(trace, read, outputs=True)
    with hicachectl.open_store(str(source)) as store:
        found = hicachectl.simulate(
            hicachectl.SimulateRequest(requests=requests, profile=read), store
        )
    written = invoke.document("simulate", source, "--trace", trace, "--profile", profile)
    assert found.rows.to_pylist() == written["capacities"]
    assert found.document["losses"] == written["losses"]
    requests = hicachectl.read_requests(blocks, None)
    found = hicachectl.simulate(hicachectl.SimulateRequest(requests=requests))
    assert found.rows["hit_share"].to_pylist()[-1] == 0.5
    with pytest.raises(hicachectl.UsageError, match="needs a page size"):
        hicachectl.read_requests(trace, None)
    with pytest.raises(hicachectl.UsageError, match="record token ids"):
        hicachectl.read_requests(blocks, read)


def test_measure_returns_what_the_command_writes(
    invoke: Invoke, source: Path, profile: Path
) -> None:
    read = hicachectl.read_profile(profile)
    with hicachectl.open_store(str(source)) as store, hicachectl.open_store(str(source)) as other:
        request = hicachectl.BenchRequest(profile=read, prefill=1.0, ranks=1)
        found = hicachectl.measure(store, request, compare=other)
    words = ("--profile", profile, "--prefill", 1, "--ranks", 1, "--compare", source)
    written = invoke.document("bench", source, *words)
    assert found.document.keys() == written.keys() - {"rows", "schema", "version"} | {"rows"}
    assert len(found.document["stores"]) == len(written["stores"]) == 2
    for ours, theirs in zip(found.document["stores"], written["stores"], strict=True):
        assert {**ours, "nbytes": 0} == {**theirs, "nbytes": 0}  # reads are repeated for a second
    steps = [(row["step"], row["cache"]) for row in found.rows.to_pylist()]
    assert steps == [(row["step"], row["cache"]) for row in written["rows"]]


def test_a_salted_request_hits_nothing(source: Path, profile: Path) -> None:
    """A request with a cache salt has other page hashes, as in SGLang."""
    salted = hicachectl.Request("mine", demo_tokens(), cache_salt="tenant")
    with hicachectl.open_store(str(source)) as store:
        request = asked([demo_tokens(), salted], hicachectl.read_profile(profile))
        rows = hicachectl.hits(store, request).rows
    assert rows.column("usable_tokens").to_pylist()[1] == 0 < rows["usable_tokens"][0].as_py()


def test_errors_name_the_request_and_the_store(source: Path, tmp_path: Path) -> None:
    """Bad requests, missing profiles and missing stores are errors of one line."""
    with (
        hicachectl.open_store(str(source)) as store,
        pytest.raises(hicachectl.UsageError, match="records no profile; read a profile"),
    ):
        hicachectl.recorded_profile(store)
    with pytest.raises(hicachectl.FormatError, match=r"request 1: .*-1"):
        hicachectl.hash_requests([[1] * 16, [-1] * 16], PROFILE)
    with pytest.raises(hicachectl.UsageError, match="requests: has no requests"):
        hicachectl.hash_requests([], PROFILE)
    blocks = tmp_path / "blocks.jsonl"
    blocks.write_text('{"hash_ids": [1]}\n')
    with pytest.raises(hicachectl.UsageError, match="has block ids"):
        hicachectl.read_requests(blocks, PROFILE)
    with (
        pytest.raises(hicachectl.StoreUnavailable, match="absent"),
        hicachectl.open_store(str(tmp_path / "absent")),
    ):
        pass


@pytest.mark.slow
def test_migrate_and_prewarm_arrive_whole(source: Path, profile: Path, tmp_path: Path) -> None:
    """A copy to TP 1 is whole for the new profile; a plan is what prewarm copies."""
    old = hicachectl.read_profile(profile)
    new = hicachectl.retargeted(old, tp=1)
    tokens = demo_tokens()
    with (
        hicachectl.open_store(str(source)) as origin,
        hicachectl.open_store(str(tmp_path / "tp1"), create=True) as copy,
        hicachectl.open_store(str(tmp_path / "warm"), create=True) as warm,
    ):
        outcome = hicachectl.migrate(
            origin,
            copy,
            hicachectl.MigrationRequest(
                profile=old,
                destination_profile=new,
                options=hicachectl.CopyOptions(verify=True),
            ),
        )
        assert not outcome.failed
        assert outcome.document["pages"] == PAGES
        report = hicachectl.verify(copy, hicachectl.VerifyRequest(profile=new))
        assert (report.document["pages"], report.document["counts"]) == (PAGES, {})
        hashed = hicachectl.hash_requests([tokens], old)
        request = hicachectl.PrewarmRequest(profile=old, requests=hashed, budget_pages=4)
        planned = hicachectl.plan(origin, warm, request)
        warmed = hicachectl.prewarm(origin, warm, request)
        assert warmed.document["copied_pages"] == planned.num_rows == 4
        found = hicachectl.hits(warm, hicachectl.HitsRequest(requests=hashed, profile=old))
        usable = found.rows["usable_tokens"][0].as_py()
        assert usable == warmed.document["usable_tokens"] == 4 * old.page_size


@pytest.mark.slow
def test_importing_costs_nothing_and_brings_no_click() -> None:
    """The package imports no library; its functions import neither click nor tqdm."""
    script = (
        "import sys, hicachectl\n"
        "assert not {'click', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert 'verify' in dir(hicachectl)\n"
        "hicachectl.verify, hicachectl.prewarm\n"
        "assert not {'click', 'tqdm', 'torch'} & set(sys.modules), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
