"""hicachectl-concepts(7) explains each word of the manual once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "man" / "hicachectl-concepts.7"
# Words of CONTRIBUTING.md that only the code uses, or that the page that uses them explains.
FOR_DEVELOPERS = {
    "affix", "arena", "batch", "epoch", "grammar", "inventory", "kind", "listing", "slot", "spec",
    "survey", "withdrawal",
}  # fmt: skip


def explained() -> list[str]:
    """Return the words that the page explains."""
    words = PAGE.read_text().split(".Sh WORDS\n")[1].split(".Sh SEE ALSO")[0]
    return re.findall(r"^\.It ([a-z][a-z -]+)$", words.replace("\\-", "-"), re.MULTILINE)


def test_each_word_is_explained_once() -> None:
    assert len(set(explained())) == len(explained()) > 40


def test_the_words_of_contributors_are_those_of_users() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Words\n")[1].split("\n## ")[0]
    words = set(re.findall(r"\*\*([^*]+)\*\*", section))
    assert words >= FOR_DEVELOPERS
    assert words - FOR_DEVELOPERS <= set(explained())


def test_each_word_is_used_on_another_page() -> None:
    others = [path for path in PAGE.parent.glob("*.[157]") if path != PAGE]
    text = " ".join(" ".join(path.read_text() for path in others).replace("\\-", "-").split())
    plurals = {word: word.replace(" ", "s? ", 1) for word in explained()}
    assert [word for word, form in plurals.items() if not re.search(rf"\b{form}", text)] == []
