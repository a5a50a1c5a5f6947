"""Reasons why a server did not use tokens of its store."""

from __future__ import annotations

import pytest

from hicachectl.checks.reasons import PLUGIN, SOURCES, Reason, reason_named, reasons
from hicachectl.formats.plugin_status import COUNTED
from hicachectl.requests.rows import BELOW_LOAD_BACK, BELOW_THRESHOLD


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


def test_the_reasons_of_the_plug_in_are_those_that_it_counts() -> None:
    """The plug-in's calls are typed by the same names."""
    counted = {name for kind, names in COUNTED.items() if kind != "tokens" for name in names}
    explained = {one.name: one.counters for one in reasons() if one.source == PLUGIN}
    assert explained.keys() == counted
    assert explained["unranked"] == (
        "hicachectl_plugin_refused_pages_total",
        "hicachectl_plugin_noted_pages_total",
    )


@pytest.mark.parametrize("name", [BELOW_THRESHOLD, BELOW_LOAD_BACK])
def test_the_reasons_of_hits_are_explained(name: str) -> None:
    assert reason_named(name) is not None
