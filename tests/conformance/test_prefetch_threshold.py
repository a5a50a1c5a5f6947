"""The prefetch threshold that SGLang reads from the options of its storage backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.models.server_info import flags_from_server_info

if TYPE_CHECKING:
    from tests.conformance.conftest import SglangSession

pytestmark = pytest.mark.conformance

STATED = (None, "{}", '{"prefetch_threshold": 64}')


def test_the_threshold_is_what_sglang_reads(sglang_session: SglangSession) -> None:
    info = {"model_path": "m", "tp_size": 1, "page_size": 16}
    found = [
        flags_from_server_info({**info, "hicache_storage_backend_extra_config": stated})
        for stated in STATED
    ]
    read = sglang_session.ask("read_thresholds", STATED)
    assert [one.flags.prefetch_threshold for one in found] == read
