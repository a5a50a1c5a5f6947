"""install.sh installs a wheel, which runs outside the checkout; a source archive has its tests."""

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
from packaging.requirements import Requirement

from hicachectl import __version__
from tests.skips import missing, need_tool

ROOT = Path(__file__).parents[1]
PACKAGING = ROOT / "hicachectl" / "packaging"
SOURCES = (
    "backends", "formats", "hicachectl", "man", "tests",
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in",
    "Makefile", "README.md", "constraints.txt", "pyproject.toml",
)  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [re.split("[^A-Za-z0-9-]", text)[0] for text in PROJECT["dependencies"]]
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
    return {Path(str(distribution(name).locate_file(""))).resolve() for name in DEPENDENCIES}


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


def deployment_files() -> set[str]:
    """Return the files of hicachectl/packaging, as paths below it."""
    return {str(path.relative_to(PACKAGING)) for path in PACKAGING.rglob("*") if not path.is_dir()}


def needed(names: list[str]) -> set[str]:
    """Return distributions and those that they need here."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            wanted = map(Requirement, distribution(name).requires or ())
            names += [
                one.name
                for one in wanted
                if one.marker is None or one.marker.evaluate({"extra": ""})
            ]
    return found


def repacked(name: str, folder: Path, *, whole: bool) -> None:
    """Make a wheel of a distribution that this environment has, without its scripts.

    whole: with its modules, else with a pointer to them. To unpack all takes a minute.
    """
    found = distribution(name)
    (tag,) = re.findall(r"^Tag: (\S+)$", found.read_text("WHEEL") or "", re.MULTILINE)[:1]
    title = re.sub("[^A-Za-z0-9]", "_", found.metadata["Name"])
    path = folder / f"{title}-{found.version}-{tag}.whl"
    files = [file for file in found.files or () if whole or file.name in ("METADATA", "WHEEL")]
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            if ".." not in file.parts and file.suffix != ".pyc" and file.name != "RECORD":
                archive.write(Path(str(file.locate())), str(file))
        archive.writestr(f"{title}-{found.version}.dist-info/RECORD", "")
        if not whole:
            archive.writestr(f"{title}.pth", str(Path(str(found.locate_file(""))).resolve()))


def program_that_copies(folder: Path) -> Path:
    """Make a folder with a python3 that makes one environment, and copies it for each other.

    Making one takes seven seconds, in which pip is compiled.
    """
    real, made = Path(sys.base_prefix) / "bin" / "python3", folder / "made"
    program = folder / "bin" / "python3"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
        [ "$1 $2 $3" = "-I -m venv" ] || exec {real} "$@"
        if [ -d {made} ]; then cp -a {made}/. "$4"; else {real} "$@" && cp -a "$4" {made}; fi
        """
    )
    program.chmod(0o755)
    return program.parent


def test_a_wheel_holds_every_module_and_the_marker_of_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert modules_below(ROOT / "hicachectl") == {name for name in names if name.endswith(".py")}
    assert "hicachectl/py.typed" in names
    assert {f"hicachectl/report/templates/report.{kind}" for kind in ("html", "css")} <= names
    assert {f"hicachectl/packaging/{name}" for name in deployment_files()} <= names
    shared = {name.partition(".data/data/share/hicachectl/")[2] for name in names} - {""}
    assert shared == {name for name in deployment_files() if not name.startswith("completions/")}


def test_install_sh_is_clean() -> None:
    tool = need_tool("shellcheck")
    run(ROOT, tool, PACKAGING / "install.sh")


def test_install_sh_installs_what_the_container_file_copies(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    """In an empty environment, then a wheel in the same place, which runs; without a network."""
    recipe = (PACKAGING / "Containerfile").read_text()
    given = tmp_path / "source"
    for copied in re.findall(r"^COPY (.*) /source/?\S*$", recipe, re.MULTILINE):
        for name in copied.split():
            target = given / name
            target.parent.mkdir(exist_ok=True)
            if (source / name).is_dir():
                shutil.copytree(source / name, target, symlinks=True)
            else:
                shutil.copy(source / name, target)
    (command,) = re.findall(r"^RUN (sh .*)$", recipe, re.MULTILINE)
    places = {"/source": str(given), "/usr/local": str(tmp_path / "prefix"), '"${EXTRAS}"': '""'}
    for name, place in places.items():
        command = command.replace(name, place)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in needed(["setuptools", *DEPENDENCIES]):
        repacked(name, wheels, whole=name == "setuptools")
    home = tmp_path / "home"
    home.mkdir()
    settings = {
        "HOME": home,
        "PATH": f"{program_that_copies(tmp_path)}:/usr/bin:/bin",
        "PIP_FIND_LINKS": wheels,
        "PIP_NO_INDEX": 1,
        "PIP_NO_COMPILE": 1,
        "PIP_NO_CACHE_DIR": 1,
    }
    clean = ("env", "-i", *(f"{name}={value}" for name, value in settings.items()))
    before = set(given.rglob("*"))
    prefix = tmp_path / "prefix"
    again = f"sh {PACKAGING / 'install.sh'} --prefix {prefix} {wheel}"
    for line in (command, again):
        assert run(tmp_path, *clean, "sh", "-c", line) == f"hicachectl {__version__}\n"
    assert {path.name for path in (prefix / "share" / "man").glob("*/*")} == {
        path.name for path in (ROOT / "man").iterdir()
    }
    shared = (
        "hicachectl/kubernetes/server.yaml",
        "bash-completion/completions/hicachectl",
        "zsh/site-functions/_hicachectl",
        "fish/vendor_completions.d/hicachectl.fish",
    )
    for name in shared:
        assert (prefix / "share" / name).is_file()
    run(tmp_path, *clean, prefix / "bin" / "hicachectl", "demo", "store")
    assert list(home.iterdir()) == []
    assert set(given.rglob("*")) == before
    nowhere = (*clean[:2], *(word for word in clean[2:] if "PIP_FIND_LINKS" not in word))
    failed = subprocess.run(
        [*nowhere, "sh", "-c", again], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert failed.stderr.endswith("without a network, see --help. Nothing was replaced\n")
    listed = run(tmp_path, *clean, prefix / "bin" / "hicachectl", "ls", "store", "--format", "json")
    assert {page["state"] for page in json.loads(listed)["pages"]} == {"whole"}
    assert len(list((prefix / "lib").iterdir())) == 2  # the environment in use, and its link
    python = prefix / "lib" / "hicachectl" / "bin" / "python"
    place = run(tmp_path, *clean, python, "-c", "import hicachectl; print(hicachectl.__file__)")
    assert Path(place.strip()).resolve().is_relative_to(prefix.resolve())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prefx", "x"), "--prefx: unknown option"),
        (("--prefix",), "--prefix: needs a value"),
        (("a.whl", "b.whl"), "b.whl: only one SOURCE"),
        (("missing.whl",), "missing.whl: no such file"),
        (("--python", "nothing", "."), "nothing: not found"),
        (("--prefix", "", "."), "--prefix: is empty; give a directory"),
        (("--prefix", "/dev/null/x", "."), "/dev/null/x: cannot be created; give another"),
        (("--prefix", "taken", "."), "taken/bin/hicachectl: not a link of this script"),
    ],
)
def test_install_sh_refuses(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    program = tmp_path / "taken" / "bin" / "hicachectl"
    program.parent.mkdir(parents=True)
    program.write_text("")
    done = subprocess.run(
        ["sh", PACKAGING / "install.sh", *arguments],
        env={**ENVIRONMENT, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "; " in done.stderr
    assert not list(tmp_path.rglob("pyvenv.cfg"))


def test_a_source_archive_passes_its_tests(source: Path, tmp_path: Path) -> None:
    """The archive has the tests with their data; one of the Python interface passes in it."""
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
    run(
        unpacked,
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_api.py",
        "-k",
        "rows",
    )
