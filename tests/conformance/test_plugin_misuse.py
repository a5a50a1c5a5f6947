"""No call raises into SGLang, and no KV is written whose sidecar could not be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conformance.conftest import SglangSession

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def report(
    sglang_session: SglangSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    directory = str(tmp_path_factory.mktemp("misused"))
    found: dict[str, Any] = sglang_session.ask("plugin_misuse", directory)
    return found


def test_no_call_raises(report: dict[str, Any]) -> None:
    """Not with wrong arguments, nor with host pools of unknown classes that come late."""
    assert report["raised"] == []


def test_kv_is_refused_after_sidecars_that_raise(report: dict[str, Any]) -> None:
    """Not after sidecars that were written meanwhile: SGLang may never ask for the KV between."""
    written = report["written"]
    assert written.pop("right") == [[True, True], 2]
    assert written.pop("repeated") == [[True, True], 2]
    assert set(written) == {"none", "short", "outside", "text"}
    assert all(answer == [[False, False], 0] for answer in written.values())


def test_after_close_all_are_misses_and_no_thread_is_left(report: dict[str, Any]) -> None:
    no = [False, False]
    assert report["closed"] == [0, 0, no, no, [no], None, None]
    assert report["threads"] == []
