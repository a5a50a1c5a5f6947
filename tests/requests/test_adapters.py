"""Requests for LoRA adapters without an id: each command that reads requests refuses them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.move.repairs import dsa_store
from tests.stores import DSA, contents

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

COMMANDS = {
    "hits": ("hits", "STORE", "--token-ids", "FILE"),
    "report": ("report", "STORE", "--token-ids", "FILE", "-o", "-"),
    "prewarm": ("prewarm", "NEW", "--from", "STORE", "--token-ids", "FILE"),
    "plan": ("prewarm", "--trace", "FILE", "--dry-run"),
    "rm": ("rm", "STORE", "--free", "1B", "--trace", "FILE", "--yes"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_request_for_an_adapter_is_refused(invoke: Invoke, tmp_path: Path, name: str) -> None:
    """Its pages have other hashes: without them, a trace would call used pages unused."""
    store, requests, profile = tmp_path / "store", tmp_path / "requests", tmp_path / "dsa.toml"
    dsa_store(store, 2)
    before = contents(store)
    profile.write_text(DSA)
    line = {"token_ids": [1, 2, 3, 4], "lora_path": None, "lora_id": None}
    requests.write_text(f"{json.dumps(line)}\n{json.dumps({**line, 'lora_path': 'law'})}\n")
    places = {"STORE": store, "NEW": tmp_path / "new", "FILE": requests}
    words = [places.get(word, word) for word in COMMANDS[name]]
    said = invoke(*words, "--profile", profile, exit_code=2).stderr
    assert f"{requests}: line 2: lora_path 'law': the pages of an adapter" in said
    assert contents(store) == before
