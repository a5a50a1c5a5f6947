"""Reasons why a server did not use tokens of its store."""

from __future__ import annotations

import pytest

from hicachectl.checks.reasons import SOURCES, Reason, reason_named, reasons


@pytest.mark.parametrize("reason", reasons(), ids=lambda reason: reason.name)
def test_every_reason_is_explained(reason: Reason) -> None:
    texts = reason.explanation()
    for title in ("meaning", "effect", "remedy"):
        assert texts[title].endswith("."), title
        assert "{" not in texts[title], title
    assert ("the command below" in texts["remedy"]) == bool(texts["command"])
    assert reason.source in SOURCES


def test_a_reason_is_found_by_its_exact_name() -> None:
    """Names differ by more than `-` and `_`, so that `explain` takes both."""
    assert all(reason_named(reason.name) is reason for reason in reasons())
    assert reason_named("of_a_later_release") is None
    assert len({reason.name.replace("_", "-") for reason in reasons()}) == len(reasons())
