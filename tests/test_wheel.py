"""A wheel has every module and runs outside the checkout; a source archive has its own tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.skips import missing

ROOT = Path(__file__).parents[1]
SOURCES = (
    "backends", "formats", "hicachectl", "man", "tests",
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in",
    "Makefile", "README.md", "constraints.txt", "pyproject.toml",
)  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

pytestmark = pytest.mark.slow


def run(folder: Path, *command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env=ENVIRONMENT,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, (command, done.stdout, done.stderr)
    return done.stdout


def modules_below(folder: Path) -> set[str]:
    """Return the paths of the modules as imported: `backends` and `formats` are links."""
    found = set()
    for base, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        here = Path(base).relative_to(folder.parent)
        found |= {str(here / name) for name in files if name.endswith(".py")}
    return found


def dependency_folders() -> set[Path]:
    """Return the folders of this environment with the project's dependencies."""
    names = [re.split("[^A-Za-z0-9-]", text)[0] for text in PROJECT["dependencies"]]
    return {Path(str(distribution(name).locate_file(""))).resolve() for name in names}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project, since setuptools leaves folders where it builds."""
    for name in ("pip", "setuptools"):
        if find_spec(name) is None:
            missing(f"the module {name}", f"`python -m pip install {name}` installs it")
    source = tmp_path_factory.mktemp("source")
    for name in filter(lambda name: (ROOT / name).exists(), SOURCES):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, source)
    run(folder, sys.executable, "-m", "pip", "--disable-pip-version-check", *build)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_every_module_and_the_marker_of_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert modules_below(ROOT / "hicachectl") == {name for name in names if name.endswith(".py")}
    assert "hicachectl/py.typed" in names
    assert {f"hicachectl/report/templates/report.{kind}" for kind in ("html", "css")} <= names


def test_an_installed_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(tmp_path, *pip, "install", "-q", "--no-deps", "--no-index", wheel)
    (site,) = environment.glob("lib/python*/site-packages")
    # A line of a .pth file adds a folder without its .pth files, so without editable installs.
    (site / "dependencies.pth").write_text("\n".join(map(str, dependency_folders())))
    place = run(tmp_path, python, "-c", "import hicachectl; print(hicachectl.__file__)")
    assert Path(place.strip()).is_relative_to(environment)
    command = environment / "bin" / "hicachectl"
    run(tmp_path, command, "demo", "store")
    pages = json.loads(run(tmp_path, command, "ls", "store", "--format", "json"))["pages"]
    manuals = {path.name for path in (environment / "share" / "man").glob("man[157]/*.[157]")}
    assert manuals == {path.name for path in (ROOT / "man").iterdir()}
    assert pages
    assert {page["state"] for page in pages} == {"whole"}


def test_a_source_archive_passes_its_tests(source: Path, tmp_path: Path) -> None:
    """The archive has the tests with their data; those of the Python interface pass in it."""
    build = "import setuptools.build_meta as build, sys; build.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=source, check=True, capture_output=True
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("hicachectl-*/")
    missing_files = {
        path.relative_to(source / "tests")
        for path in (source / "tests").rglob("*")
        if not (unpacked / "tests" / path.relative_to(source / "tests")).exists()
    }
    assert not missing_files
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    places = {unpacked, *dependency_folders(), Path(pytest.__file__).parents[1]}
    (site / "dependencies.pth").write_text("\n".join(map(str, places)))
    python = environment / "bin" / "python"
    run(unpacked, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_api.py")
