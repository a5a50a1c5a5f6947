"""`-o` and `--metrics-file` replace no file that another command may need."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.pack.records import build_header
from tests.move.migrations import demo_store, profile_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

TEXTS = {
    "a config file of hicachectl": '[stores.prod]\nurl = "/mnt/hicache"\n',
    "a model's config": '{"architectures": ["LlamaForCausalLM"]}',
    "the record of a run": '{"form": 1, "run": "x", "version": "1", "store": "file:///x"}',
    "a marker of a store": '{"form": 1, "suffix": "_m_0_2.bin", "nbytes": 3}',
}


@pytest.mark.parametrize("kind", [*TEXTS, "a profile", "a pack", "a catalog"])
def test_a_file_that_may_be_needed_stays(invoke: Invoke, tmp_path: Path, kind: str) -> None:
    store = demo_store(tmp_path / "store")
    target = tmp_path / "target"
    if kind == "a profile":
        profile_file(target)
    elif kind == "a catalog":
        invoke("verify", store, "--catalog", target, "--update-catalog")
    else:
        target.write_bytes(build_header(b"p" * 16) if kind == "a pack" else TEXTS[kind].encode())
    before = target.read_bytes()
    said = invoke("ls", store, "-o", target, exit_code=2).stderr
    assert f"-o {target}: is {kind}, and is not replaced; give another file" in said
    assert target.read_bytes() == before


def test_a_file_in_a_store_stays(invoke: Invoke, tmp_path: Path) -> None:
    store = demo_store(tmp_path / "store")
    page = next(store.glob("*.bin"))
    before = page.read_bytes()
    assert "is an object of a store" in invoke("ls", store, "-o", page, exit_code=2).stderr
    (store / ".hicachectl" / "markers").mkdir(parents=True, exist_ok=True)
    for path in (store / "notes", store / ".hicachectl" / "markers" / "x"):
        path.write_text("text")
        assert "is a file in a store" in invoke("ls", store, "-o", path, exit_code=2).stderr
        assert path.read_text() == "text"
    assert page.read_bytes() == before


@pytest.mark.slow
def test_other_files_are_replaced(invoke: Invoke, tmp_path: Path) -> None:
    """A result replaces an earlier one in each format, and `profile` a profile."""
    store = demo_store(tmp_path / "store")
    for output_format in ("table", "json", "jsonl", "csv", "parquet", "arrow"):
        target = tmp_path / output_format
        for _ in range(2):
            invoke("ls", store, "--format", output_format, "-o", target)
            assert target.stat().st_size
    report = tmp_path / "report.json"
    for command in ("verify", "ls"):
        invoke(command, store, "--format", "json", "-o", report)
    profile = profile_file(tmp_path / "p.toml")
    text = profile.read_text()
    invoke("profile", "--profile", profile, "-o", profile)
    assert text.split("\n")[0] in profile.read_text()
    invoke("profile", "--profile", profile, "--format", "json", "-o", profile)
    assert "pools" in json.loads(profile.read_text())
    invoke("ls", store, "-o", "-")


@pytest.mark.slow
def test_only_metrics_are_replaced_by_metrics(invoke: Invoke, tmp_path: Path) -> None:
    store = demo_store(tmp_path / "store")
    target = tmp_path / "hicache.prom"
    for text in ("", "\n"):
        target.write_text(text)
        invoke("verify", store, "--metrics-file", target)
        invoke("verify", store, "--metrics-file", target)
    for text in ("# HELP node_cpu Seconds.\n", "important"):
        target.write_text(text)
        said = invoke("verify", store, "--metrics-file", target, exit_code=2).stderr
        assert f"--metrics-file {target}: exists and has no metrics of hicachectl; give" in said
        assert target.read_text() == text
