"""The prompt of --write-probe: what is sent, and what its pages say."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.doctor import probing
from hicachectl.formats.hashing import page_hashes_hex
from tests.doctor.replies import answering, checks_of, info
from tests.move.migrations import demo_store, profile_file
from tests.stores import put

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Invoke

PAGE_SIZE = 16


@pytest.fixture
def doctor(tmp_path: Path, invoke: Invoke) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return the checks of a server that writes the pages of its prompts into a directory."""
    store, profile = demo_store(tmp_path / "store"), profile_file(tmp_path / "profile.toml")
    (tmp_path / "other").mkdir()
    prompts: list[list[int]] = []

    def serve(place: str, tokens: list[int]) -> None:
        prompts.append(tokens)
        for page in page_hashes_hex(tokens, PAGE_SIZE):
            put(tmp_path / place, f"{page}_demo-hybrid-1b_1_2.bin")

    def examined(place: str, *more: object, exit_code: int = 0, **changes: Any) -> Any:
        with answering(info(**changes), on_prompt=partial(serve, place)) as url:
            arguments = ("--server", url, "--profile", profile, *more)
            checks = checks_of(invoke, store, *arguments, exit_code=exit_code)
        return {**checks, "prompts": prompts}

    return examined


def test_without_the_option_no_prompt_is_sent(doctor: Callable[..., Any]) -> None:
    """The command only reads, unless it is asked for a prompt."""
    checks = doctor("store")
    assert (checks["prompts"], "same-store/write-probe" in checks) == ([], False)


def test_pages_that_appear_prove_one_store(doctor: Callable[..., Any]) -> None:
    """The prompt is longer than the threshold; a question that it answers is not asked again."""
    checks = doctor("store", "--write-probe")
    assert checks["same-store/write-probe"]["status"] == "ok"
    assert "same-store/same-store" not in checks
    (prompt,) = checks["prompts"]
    assert len(prompt) > 256


def test_pages_that_do_not_appear_are_the_one_cause(
    doctor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that writes elsewhere fails, and its deployment is not judged by this store."""
    monkeypatch.setattr(probing, "_PATIENCE_S", 0.5)
    checks = doctor("other", "--write-probe", exit_code=4)
    prompts = checks.pop("prompts")
    assert len(prompts) == 1
    assert [name for name, check in checks.items() if check["status"] == "fail"] == [
        "same-store/write-probe"
    ]
    assert "server/deployment" not in checks


def test_a_policy_decides_about_the_prompt(doctor: Callable[..., Any]) -> None:
    """A page is written at its second use under write_through_selective, and late by write_back."""
    checks = doctor("store", "--write-probe", hicache_write_policy="write_through_selective")
    assert [len(set(map(tuple, checks["prompts"]))), len(checks["prompts"])] == [1, 2]
    checks["prompts"].clear()
    checks = doctor("store", "--write-probe", hicache_write_policy="write_back")
    assert (checks["prompts"], checks["same-store/write-probe"]["status"]) == ([], "unknown")


def test_a_server_that_refuses_the_prompt(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused prompt says nothing of the store: the answer is unknown, with the reason."""
    store, profile = demo_store(tmp_path / "store"), profile_file(tmp_path / "profile.toml")
    with answering(info()) as url:
        arguments = ("--server", url, "--profile", profile, "--write-probe")
        check = checks_of(invoke, store, *arguments)["same-store/write-probe"]
    assert check["status"] == "unknown"
    assert "/generate" in check["detail"]
