"""The table of releases says what the code of each published SGLang wheel does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.formats.keys.base import TEMPORARY_PATTERN
from hicachectl.formats.releases import (
    NEWEST,
    NEWEST_SGLANG,
    release_of,
    sglang_version,
    unknown_release,
)
from hicachectl.formats.spec import object_specs
from tests.formats.small_models import kda, mha, mla, profile

# Recorded from the wheels (tests/conformance/record_releases.py).
RECORDS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "releases.json").read_text()
)


def test_all_releases_are_recorded() -> None:
    """From the oldest to the newest that this package knows."""
    known = [sglang_version(name) for name in RECORDS]
    assert (known[0][:3], known[-1]) == ((0, 5, 6), NEWEST)
    assert {(0, 5, patch) for patch in range(6, 24)} == {version[:3] for version in known}


def test_the_probe_is_for_the_newest_release() -> None:
    """It is printed alone, so it has the number itself."""
    probe = Path(__file__).parents[2] / "hicachectl" / "profiles" / "probe.py"
    assert f'RELEASE = "{NEWEST_SGLANG}"\n' in probe.read_text()


@pytest.mark.parametrize("name", RECORDS)
def test_facts(name: str) -> None:
    """The default layout, page-hash seeds, index keys and drafts."""
    release, found = release_of(name), RECORDS[name]
    assert release.layout == found["layout"]
    assert release.compact_indexer == found["compact_indexer"]
    assert release.seeds == found["seeds"]
    drafts = (found["draft_pool"], found["packed_drafts"])
    assert (release.indexer, release.draft, release.packed_drafts) == (
        found["indexer_pool"], *drafts
    )  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_temporaries(name: str) -> None:
    """Unfinished writes of each release are found by their names; objects are none."""
    page = "0a" * 32
    form = RECORDS[name]["temporary"] or "H_m.bin"
    written = form.replace("N", "4711").replace("U", "0b" * 16).replace("H", page)
    assert bool(re.search(TEMPORARY_PATTERN, written)) == bool(RECORDS[name]["temporary"])


@pytest.mark.parametrize("scheme", ["file", "mooncake"])
@pytest.mark.parametrize("name", RECORDS)
def test_keys(name: str, scheme: str) -> None:
    """TP rank 1 of 4 has the keys that the wheel's own class makes, on each stage and CP rank."""
    for ranks, theirs in RECORDS[name][scheme].items():
        model, _, axis = ranks.partition(" ")
        pools = (mha(kv_heads=8),) if model == "mha" else (mla(), kda())
        sizes = {axis: 2} if axis else {}
        ours = profile(*pools, model="org/m", tp=4, sglang=name, **sizes)
        if theirs == RECORDS[name][scheme][model] and scheme + axis != "mooncakecp" and axis:
            # The wheel ignores the rank, so ranks overwrite each other.
            with pytest.raises(UnsupportedByBackend, match="overwrite each other"):
                object_specs(ours, scheme)
            continue
        keys = {"H".join(spec.affix).removesuffix(".bin") for spec in object_specs(ours, scheme)}
        kv = {key for key in theirs if ".mamba" not in key}
        assert kv <= keys
        if scheme == "file" and model == "mla":
            assert set(theirs) <= keys


@pytest.mark.parametrize(
    ("name", "words"),
    [("0.5.23.post1", None), ("0.5.6", None), ("0.5.24", "newer than 0.5.23"),
     ("0.6.0.dev1", "newer than 0.5.23"), ("0.5.5.post3", "older than 0.5.6")],
)  # fmt: skip
def test_other_releases_are_told(name: str, words: str | None) -> None:
    """The nearest known rules are used, and said to be assumed."""
    found = unknown_release(name)
    assert (found is None) if words is None else (found and words in found)
    nearest = "0.5.6" if "5.5" in name or name == "0.5.6" else NEWEST_SGLANG
    assert release_of(name) == release_of(nearest)
