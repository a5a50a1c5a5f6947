"""What `doctor` says of requests: the threshold, the page that stops them, what was restored."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.hashing import page_hashes_hex
from tests.doctor.replies import answering, checks_of, info
from tests.requests.test_server_logs import logged, record
from tests.stores import DSA, OLD, put

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

PAGE = 4
TOKENS = [list(range(100 * n, 100 * n + 22)) for n in range(4)]  # five pages and a rest each
KV, INDEXER = 9216, 1056


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with all pages of the prompts, of a model with an indexer."""
    directory = tmp_path / "store"
    directory.mkdir()
    for tokens in TOKENS:
        for name in page_hashes_hex(tokens, PAGE):
            put(directory, f"{name}_x-dsa.bin", KV)
            put(directory, f"{name}.indexer_x-dsa.bin", INDEXER)
    return directory


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "dsa.toml"
    path.write_text(re.sub("prefetch_threshold = .*", "prefetch_threshold = 8", DSA))
    return path


def trace(folder: Path, *prompts: list[int], **cached: list[int]) -> Path:
    """Write a server's log. cached: tokens that storage, and device, served of each request."""
    path = folder / "requests.log"
    lines = []
    for number, tokens in enumerate(prompts):
        found = {"device": 0, "host": 0, "storage": 0}
        found |= {tier: counts[number] for tier, counts in cached.items()}
        out: dict[str, Any] = {"cached_tokens": sum(found.values()), "cached_tokens_details": found}
        lines.append(logged(record(tokens, out if cached else {})))
    path.write_text("\n".join(lines) + "\n")
    return path


def asked(
    invoke: Invoke, store: Path, profile: Path, requests: Path, *more: object, exit_code: int = 0
) -> dict[str, dict[str, Any]]:
    """Return the checks about requests, by name, the worst first. The store's values are noise."""
    arguments = ("--profile", profile, "--trace", requests, "--sample", "0", *more)
    checks = checks_of(invoke, store, *arguments, exit_code=exit_code)
    return {name[9:]: one for name, one in checks.items() if name.startswith("requests/")}


def test_requests_that_the_store_serves_are_right(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    """Every request came twice; the second time the server took all pages from its store."""
    served = [0, 0, 0, 0, 20, 20, 20, 20]
    checks = asked(invoke, store, profile, trace(tmp_path, *TOKENS, *TOKENS, storage=served))
    assert {name: check["status"] for name, check in checks.items()} == {
        "missing-page": "ok", "restored": "ok",
    }  # fmt: skip
    assert checks["restored"]["detail"] == (
        "The store can serve 160 tokens of 8 requests; servers took 80 from it and 0 from their "
        "memory"
    )


def test_a_missing_first_page_is_the_cause(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    """The check names the page's position, its missing object and the pages behind it."""
    for tokens in TOKENS[:2]:
        (store / f"{page_hashes_hex(tokens, PAGE)[0]}_x-dsa.bin").unlink()
    checks = asked(invoke, store, profile, trace(tmp_path, *TOKENS), exit_code=4)
    first = next(iter(checks.values()))
    assert (first["name"], first["status"]) == ("missing-page", "fail")
    assert first["detail"] == (
        "Page 1 stops 2 of 4 requests, and 8 stored pages behind such pages cannot be reached"
    )
    assert first["evidence"].startswith("its object kv is not in the store; the server writes")
    command = shlex.split(first["next"])
    assert command[:2] == ["hicachectl", "hits"]
    rows = invoke.document(*command[1:])["chains"]
    assert [row["usable_pages"] for row in rows] == [0, 0, 5, 5]


def test_a_missing_sidecar_is_named(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    (store / f"{page_hashes_hex(TOKENS[0], PAGE)[2]}.indexer_x-dsa.bin").unlink()
    checks = asked(invoke, store, profile, trace(tmp_path, *TOKENS), exit_code=4)
    assert checks["missing-page"]["detail"].startswith("Page 3 stops 1 of 4 requests")
    assert checks["missing-page"]["evidence"] == "its object indexer is not in the store"


def test_an_object_of_a_wrong_size_is_not_called_missing(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    put(store, f"{page_hashes_hex(TOKENS[0], PAGE)[2]}_x-dsa.bin", KV - 8)
    checks = asked(invoke, store, profile, trace(tmp_path, *TOKENS), exit_code=4)
    assert checks["missing-page"]["evidence"] == (
        "its object kv is in the store with a wrong size, so servers cannot use it"
    )


@pytest.mark.parametrize(
    ("prompts", "status", "exit_code"),
    [([TOKENS[0][:7]] * 3, "fail", 4), ([*[TOKENS[0][:7]] * 3, TOKENS[1]], "warn", 0)],
)
def test_prompts_below_the_threshold_are_never_looked_up(
    invoke: Invoke,
    store: Path,
    profile: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    status: str,
    exit_code: int,
) -> None:
    checks = asked(invoke, store, profile, trace(tmp_path, *prompts), exit_code=exit_code)
    first = next(iter(checks.values()))
    assert (first["name"], first["status"]) == ("threshold", status)
    assert first["detail"] == (
        f"3 of {len(prompts)} prompts are shorter than the threshold 8, so servers never ask L3 "
        "for them"
    )
    assert "prefetch_threshold" in first["next"]


def test_too_few_stored_pages_are_found_and_not_fetched(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    for tokens in TOKENS:
        for name in page_hashes_hex(tokens, PAGE)[1:]:
            (store / f"{name}_x-dsa.bin").unlink()
            (store / f"{name}.indexer_x-dsa.bin").unlink()
    checks = asked(invoke, store, profile, trace(tmp_path, *TOKENS))
    assert checks["threshold"]["status"] == "warn"
    assert (
        "For 4 of 4 prompts, the store has fewer tokens than the threshold 8"
        in checks["threshold"]["detail"]
    )


@pytest.mark.parametrize("warned", [False, True])
def test_pages_that_no_server_wrote_fail_unless_an_earlier_check_warns(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path, warned: bool
) -> None:
    """The user says that these requests should have hits. A cause stays the first line."""
    if warned:
        put(store, f".{'0' * 32}.tmp", 8)
    unknown = [list(range(9000 + 50 * n, 9022 + 50 * n)) for n in range(3)]
    log = trace(tmp_path, *unknown, storage=[0] * 3)
    checks = asked(invoke, store, profile, log, exit_code=0 if warned else 4)
    assert checks["missing-page"]["status"] == ("warn" if warned else "fail")
    assert checks["missing-page"]["detail"] == "The store serves nothing of 3 requests"
    assert "restored" not in checks


def test_repeated_requests_that_took_nothing_are_a_warning(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    """First requests cannot have hits; the second ones could, and only memory excuses them."""
    none = [0] * 8
    log = trace(tmp_path, *TOKENS, *TOKENS, storage=none)
    checks = asked(invoke, store, profile, log)
    assert checks["restored"]["status"] == "warn"
    assert "servers took 0 from it" in checks["restored"]["detail"]
    log = trace(tmp_path, *TOKENS, *TOKENS, storage=none, device=[0, 0, 0, 0, 20, 20, 20, 20])
    assert asked(invoke, store, profile, log)["restored"]["status"] == "ok"
    log = trace(tmp_path, *TOKENS, storage=[0] * 4)
    assert asked(invoke, store, profile, log)["restored"]["status"] == "ok"


@pytest.mark.parametrize(("restored", "status"), [(0, "unknown"), (60, "ok")])
def test_metrics_stand_in_for_counts_of_a_log(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path, restored: int, status: str
) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(f"{json.dumps(tokens)}\n" for tokens in TOKENS))
    metrics = f'sglang:cached_tokens_total{{cache_source="storage"}} {restored}\n'
    settings = info(
        enable_metrics=True, served_model_name="x/dsa", page_size=PAGE, tp_size=1,
        hicache_storage_backend_extra_config='{"prefetch_threshold": 8}',
    )  # fmt: skip
    with answering(settings, metrics=metrics.encode()) as url:
        checks = asked(
            invoke, store, profile, requests, "--server", url, "--watch", "0s", exit_code=0
        )
    assert checks["restored"]["status"] == status
    assert f"the server has restored {restored} since it started" in checks["restored"]["detail"]


def test_pages_of_the_store_are_left_alone(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    before = sorted((path.name, path.stat().st_mtime) for path in store.iterdir())
    asked(invoke, store, profile, trace(tmp_path, *TOKENS))
    assert sorted((path.name, path.stat().st_mtime) for path in store.iterdir()) == before
    assert {mtime for _, mtime in before} == {OLD}
