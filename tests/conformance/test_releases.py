"""The recorded facts of the two installed releases are what their code does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.record_releases import RECORDS
from tests.conformance.release_facts import facts, version

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("packages", ["lib/python3.11/site-packages", "legacy"])
def test_records_are_the_wheels(packages: str, sglang_python: Path) -> None:
    """Keys, default layout and index layers of 0.5.23 and 0.5.18."""
    installed = Path(sglang_python).parents[1] / packages
    recorded = json.loads(RECORDS.read_text())[version(installed)]
    assert json.loads(json.dumps(facts(installed))) == recorded
