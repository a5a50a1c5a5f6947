"""CONTRIBUTING.md and SECURITY.md: paths, names, commands and tables are those of the project."""

from __future__ import annotations

import re
import shlex
import tomllib
from datetime import date
from functools import cache
from pathlib import Path

import pytest

from hicachectl import __version__
from hicachectl.cli.manpages.mdoc import RELEASE_DATE
from tests.test_readme import check_arguments

OWN = Path(__file__)
ROOT = OWN.parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ROOMS = ("hicachectl", "backends", "formats")
# Names, and the module that defines them, as in: `COMMANDS` of `hicachectl/cli/group.py`.
_NAMED = re.compile(
    r"((?:`\w+`(?:, | and )?)+)(?: \([^)]*\))?,?\s+(?:of|in)\s+"
    r"`([\w/.]+\.(?:py|txt|toml|yml))`"
)
# The only modules of a folder that may import a package.
IMPORTERS = {
    ("backends/sglang", "sglang"): {"plugin.py", "context.py"},
    ("hicachectl/parts", "ray"): {"cluster.py"},
}


def headings() -> list[str]:
    return re.findall(r"^##+ (.+)$", TEXT, re.MULTILINE)


def section(title: str) -> str:
    """Return the text between a heading and the next one of the same or a higher level."""
    found = re.search(rf"^(##+) {re.escape(title)}\n(.*)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return re.split(rf"^#{{2,{len(found[1])}}} ", found[2], flags=re.MULTILINE)[0]


def cells(text: str) -> list[list[str]]:
    """Return the rows of the tables in a text, without their titles."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [row for at, row in enumerate(rows) if not _is_title(rows, at)]


def _is_title(rows: list[list[str]], at: int) -> bool:
    return any(set(row[0]) == {"-"} for row in rows[at : at + 2])


def in_ticks(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def paths() -> list[str]:
    """Return what looks like a path of the project in the text, outside the tables of modules."""
    above = TEXT.partition("\n## Every module\n")[0]
    runs = " ".join(re.findall(r"^Run: ((?:.|\n)*?)\n\n", above, re.MULTILINE))
    words = [*in_ticks(above), *runs.replace("`", "").rstrip(".").split()]
    tops = {path.name for path in ROOT.iterdir()}
    named = {
        word.rstrip(".,")
        for word in words
        if word.partition("/")[0] in tops and not set(word) & {" ", "*"}
    }
    return sorted(named - {"hicachectl"})


def packages() -> list[str]:
    """Return the folders with modules of the program."""
    rooms = [ROOT / room for room in ROOMS]  # rglob follows no link
    found = {path.parent for room in rooms for path in room.rglob("*.py")}
    return sorted(f"{path.relative_to(ROOT)}/" for path in found - {ROOT / "hicachectl"})


@cache
def modules(package: str) -> set[str]:
    return {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}


def test_every_package_has_a_table_of_its_modules() -> None:
    titled = [name.strip("`") for name in headings() if name.startswith("`")]
    assert sorted(titled) == packages()


@pytest.mark.parametrize("package", packages())
def test_a_table_names_every_module_once(package: str) -> None:
    named = [name for row in cells(section(f"`{package}`")) for name in in_ticks(row[0])]
    assert len(set(named)) == len(named)
    assert modules(package) <= set(named), "name the new module in CONTRIBUTING.md"
    for name in set(named) - modules(package):
        assert list((ROOT / package).glob(name)), name


def test_every_package_has_a_row_with_its_tests() -> None:
    rows = cells(section("How it fits together").partition("###")[0])
    named = {in_ticks(row[0])[0] for row in rows}
    outer = {f"hicachectl/{name}/" for name in _layers() if (ROOT / "hicachectl" / name).is_dir()}
    linked = {"hicachectl/backends/", "hicachectl/formats/"}
    assert outer - linked | {"backends/", "formats/"} <= named
    assert all((ROOT / name).exists() for name in named)
    assert all(in_ticks(tests) for *_, tests in rows)


def _layers() -> dict[str, int]:
    """Return the layer of each module of the package, from the top."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    return {name: at for at, layer in enumerate(layers) for name in layer.split(" | ")}


def test_the_diagram_has_the_layers_that_the_linter_checks() -> None:
    lines = re.findall(r"^    \|(.*)\|$", section("How it fits together"), re.MULTILINE)
    drawn = {cell.split()[0]: at for at, line in enumerate(lines, 1) for cell in line.split("|")}
    assert {"__main__": 0, **drawn} == _layers()


@pytest.mark.parametrize("path", paths())
def test_a_path_exists(path: str) -> None:
    assert list(ROOT.glob(path.replace("NAME", "*"))), path


def test_many_paths_are_found() -> None:
    assert len(paths()) > 100


def test_names_are_defined_where_the_text_says() -> None:
    found = _NAMED.findall(TEXT)
    assert len(found) > 25
    for names, path in found:
        source = (ROOT / path).read_text(encoding="utf-8")
        for name in in_ticks(names):
            assert re.search(rf"\b{name}\b", source), f"{path} has no {name}"


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(
        r"\bmake ([a-z-]+)\b", " ".join(in_ticks(TEXT)) + TEXT.split("## How")[0]
    ):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in re.findall(r"python -m (tests[\w.]+)", TEXT):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    variables = set(re.findall(r"HICACHECTL_\w+", TEXT))
    modules = (path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != OWN)
    used = {name for module in modules for name in re.findall(r"HICACHECTL_\w+", module)}
    assert len(variables) >= 3
    assert variables <= used


def command_lines() -> list[str]:
    """Return the command lines of the program in both documents."""
    words = in_ticks(TEXT + SECURITY)
    return sorted({word for word in words if re.match("hicachectl [a-z]", word)})


@pytest.mark.parametrize("line", command_lines())
def test_a_command_line_is_understood(line: str) -> None:
    check_arguments(shlex.split(line)[1:])


def test_the_newest_version_of_the_changelog_is_that_of_the_program() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, day = re.findall(r"^## (\d\S*) - (\S+)$", changelog, re.MULTILINE)[0]
    assert version == __version__
    assert f"{date.fromisoformat(day):%B %-d, %Y}" == RELEASE_DATE


def test_links_and_pages_exist() -> None:
    anchors = {re.sub("[^a-z0-9 -]", "", name.lower()).replace(" ", "-") for name in headings()}
    linked = re.findall(r"\]\(#([^)]+)\)", TEXT)
    assert linked
    assert set(linked) <= anchors
    assert all((ROOT / name).exists() for name in re.findall(r"\]\(([\w/.-]+)\)", TEXT))
    for document in (TEXT, SECURITY):
        for name, number in re.findall(r"\b((?:hicachectl|hcpack)[\w-]*)\(([157])\)", document):
            assert (ROOT / "man" / f"{name}.{number}").exists(), name


def test_a_word_is_defined_once() -> None:
    """Words of users stand in hicachectl-concepts(7), and only the others here."""
    own = re.findall(r"^- \*\*([^*]+)\*\*", section("Words"), re.MULTILINE)
    page = (ROOT / "man" / "hicachectl-concepts.7").read_text(encoding="utf-8")
    words = [*own, *re.findall(r"^\.It (.+)$", page, re.MULTILINE)]
    assert len(words) > 40
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(("folder", "package"), IMPORTERS)
def test_only_the_named_modules_import_a_package(folder: str, package: str) -> None:
    statement = re.compile(rf"^\s*(?:import|from) {package}\b", re.MULTILINE)
    found = {
        path.name for path in (ROOT / folder).glob("*.py") if statement.search(path.read_text())
    }
    assert found == IMPORTERS[folder, package]


def test_the_example_of_a_store_has_seventy_lines() -> None:
    source = (ROOT / "tests" / "backends" / "test_tar_store.py").read_text()
    code = source.split("class TarStore")[1].split("# --- the tests ---")[0]
    assert 60 <= len(code.splitlines()) <= 80
