"""CHANGELOG.md has a dated section for each version, and short entries."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

from packaging.version import Version

from hicachectl import __version__

CHANGELOG = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
KINDS = ["Added", "Changed", "Fixed", "Security"]
FIRST = "0.1.0"  # its headings name what there is, since nothing was changed


def sections() -> dict[str, str]:
    """Return the text of each version by its heading."""
    parts = re.split(r"^## (.*)\n", CHANGELOG, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_versions_have_dates_and_stand_newest_first() -> None:
    unreleased, *dated = sections()
    assert unreleased == "Unreleased"
    versions = [(Version(name), date.fromisoformat(day)) for name, day in
                (heading.split(" - ") for heading in dated)]  # fmt: skip
    assert versions == sorted(versions, reverse=True)
    assert str(versions[0][0]) == __version__
    assert str(versions[-1][0]) == FIRST


def test_the_headings_of_a_version_are_the_kinds_of_changes_in_order() -> None:
    for heading, text in sections().items():
        kinds = re.findall(r"^### (.*)", text, re.MULTILINE)
        if not heading.startswith(FIRST):
            assert kinds == [kind for kind in KINDS if kind in kinds], heading


def test_an_entry_has_at_most_25_words() -> None:
    for text in sections().values():
        for entry in re.findall(r"^- (.*(?:\n  .*)*)", text, re.MULTILINE):
            assert len(entry.split()) <= 25, entry
