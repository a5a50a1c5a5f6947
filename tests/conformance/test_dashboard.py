"""The dashboard's metrics of servers are those that SGLang exports."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.packaging.test_files import THEIRS

if TYPE_CHECKING:
    from pathlib import Path


def test_the_metrics_of_servers_exist(sglang_python: Path) -> None:
    (site,) = (sglang_python.parents[1] / "lib").glob("python3*/site-packages")
    collector = site / "sglang" / "srt" / "observability" / "metrics_collector.py"
    assert set(re.findall(r'name="(sglang:\w+)"', collector.read_text())) >= THEIRS
