"""What the product knows of SGLang's models and flags is what the installed SGLang says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.conformance.record_sglang import FOLDER, recorded, requested

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import SglangSession

pytestmark = pytest.mark.conformance


@pytest.mark.weekly
def test_the_file_of_the_release_is_what_the_recorder_writes(
    sglang_session: SglangSession, tmp_path: Path
) -> None:
    """Ask SGLang of every architecture and flag.

    On every run, test_models.py compares SGLang's pools with the records of tests/data, which
    tests/formats/models compare with profiles made from this file; test_launch.py compares flags.
    """
    request = tmp_path / "request.json"
    request.write_text(json.dumps(requested()))
    facts = sglang_session.run("sglang_facts", request)
    assert recorded(facts) == (FOLDER / f"sglang-{facts['release']}.json").read_text()
