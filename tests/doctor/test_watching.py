"""Two looks at servers: the wait between them, and the pages that are new after it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from hicachectl import open_store
from hicachectl.cli.demo_store import PROFILE
from hicachectl.doctor.listed_store import list_store
from hicachectl.doctor.live_server import ask_server
from hicachectl.doctor.request import DoctorRequest
from hicachectl.doctor.watching import watch
from tests.doctor.replies import answering, info
from tests.move.migrations import demo_store
from tests.stores import page, put

if TYPE_CHECKING:
    from pathlib import Path

WATCH_S = 2.0  # a machine under load loses tenths of a second
METRICS = b'sglang:num_requests_total{model_name="x"} 1.0\n'


@pytest.mark.parametrize("request_", [DoctorRequest(), DoctorRequest(profile=PROFILE)])
def test_new_pages_are_those_of_the_servers_deployment(
    tmp_path: Path, request_: DoctorRequest
) -> None:
    """A page counts once for all its ranks; a page of another TP size or model does not count."""
    directory = demo_store(tmp_path / "store")

    def write(_: float) -> None:
        for number in (1, 2):
            for rank in (0, 1):
                put(directory, f"{page(number)}_demo-hybrid-1b_{rank}_2.bin")
        put(directory, f"{page(3)}_demo-hybrid-1b_0_4.bin")
        put(directory, f"{page(4)}_other_0_2.bin")

    with open_store(str(directory)) as store, answering(info(), metrics=METRICS) as url:
        seen = list_store(store, request_.profile)
        server = ask_server(url, request_)
        (look,) = watch([server], seen, WATCH_S, write)
        assert look.new_pages == 2
        assert look.second.at - look.first.at >= WATCH_S
        (look,) = watch([server], list_store(store, request_.profile), 0.0, write)
        assert look.new_pages == 0


def test_a_new_page_counts_in_an_empty_store(tmp_path: Path) -> None:
    """The first page of a deployment is new, although the listing knew nothing of its keys."""

    def write(_: float) -> None:
        for rank in (0, 1):
            put(tmp_path, f"{page(1)}_demo-hybrid-1b_{rank}_2.bin")

    with open_store(str(tmp_path)) as store, answering(info(), metrics=METRICS) as url:
        server = ask_server(url, DoctorRequest())
        (look,) = watch([server], list_store(store), WATCH_S, write)
    assert look.new_pages == 1


def test_servers_without_counters_are_not_waited_for(tmp_path: Path) -> None:
    """Nothing could be compared, so the command ends at once and counts no pages."""
    with open_store(str(tmp_path)) as store, answering(info()) as url:
        server = ask_server(url, DoctorRequest())
        began = time.monotonic()
        (look,) = watch([server], list_store(store), 60.0)
    assert time.monotonic() - began < 30
    assert (look.new_pages, look.second.samples) == (None, None)
