"""The reasons of `explain` are those that SGLang and the plug-in count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicachectl.checks.reasons import SGLANG, reasons

if TYPE_CHECKING:
    from tests.conformance.conftest import SglangSession

pytestmark = pytest.mark.conformance

# Counters of tokens that the store did serve, or did take.
SERVED = {
    "sglang:backuped_tokens_total",
    "sglang:prefetched_tokens_total",
    "sglang:storage_prefetch_hit_tokens_total",
}


def test_sglang_counts_the_reasons_that_are_explained(sglang_session: SglangSession) -> None:
    """A counter or a reason of another release of SGLang fails this.

    Reasons are declared with their counters, or recorded without a declaration.
    """
    told = sglang_session.ask("read_loss_reasons", None)
    explained = {reason.name: reason.counters for reason in reasons() if reason.source == SGLANG}
    losses = {name: told["counters"][name] for name in told["counters"].keys() - SERVED}
    assert {counter for counters in explained.values() for counter in counters} == losses.keys()
    declared = {name for names in losses.values() for name in names or ()}
    whole = {
        name.removeprefix("sglang:").removesuffix("_tokens_total")
        for name, names in losses.items()
        if names is None
    }
    assert explained.keys() == declared | set(told["recorded"]) | whole
    for name, counters in explained.items():
        assert {counter for counter in losses if name in (losses[counter] or ())} <= {*counters}
        assert all((name in whole) == (losses[counter] is None) for counter in counters)
