"""install.sh installs a wheel, which runs outside the checkout; a source archive has its tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import venv
import zipfile
from contextlib import contextmanager
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement

from hicachectl import __version__
from tests.mooncake_cluster import HOST, free_ports, listening_ports
from tests.prewarming.test_prewarm import tokens
from tests.skips import missing, need_tool, needs_root
from tests.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1]
PACKAGING = ROOT / "hicachectl" / "packaging"
SOURCES = (
    "backends", "formats", "hicachectl", "man", "tests",
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "SECURITY.md",
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
    """Return distributions, and the distributions that they need here."""
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


def linked(names: set[str], folder: Path) -> Path:
    """Make a folder with links to the modules of distributions, and to nothing else."""
    folder.mkdir()
    for name in names:
        for top in {file.parts[0] for file in distribution(name).files or ()}:
            if top not in ("..", "__pycache__") and not top.endswith(".dist-info"):
                place = Path(str(distribution(name).locate_file(top)))
                if not (folder / top).exists() and place.exists():
                    (folder / top).symlink_to(place)
    return folder


def repacked(name: str, folder: Path, modules: Path | None) -> None:
    """Make a wheel of a distribution that this environment has.

    modules: folder with its modules, to which the wheel points, because to unpack all takes a
        minute; None if the wheel has them.
    """
    whole, kept = modules is None, ("METADATA", "WHEEL", "entry_points.txt")
    found = distribution(name)
    (tag,) = re.findall(r"^Tag: (\S+)$", found.read_text("WHEEL") or "", re.MULTILINE)[:1]
    title = re.sub("[^A-Za-z0-9]", "_", found.metadata["Name"])
    path = folder / f"{title}-{found.version}-{tag}.whl"
    files = [file for file in found.files or () if whole or file.name in kept]
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            if ".." not in file.parts and file.suffix != ".pyc" and file.name != "RECORD":
                archive.write(Path(str(file.locate())), str(file))
        archive.writestr(f"{title}-{found.version}.dist-info/RECORD", "")
        if not whole:
            archive.writestr(f"{title}.pth", str(modules))


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


class Image(NamedTuple):
    """What the Containerfile installs, below another prefix.

    given: folder with the files that it copies.
    variables: the whole environment of its programs.
    """

    prefix: Path
    given: Path
    variables: dict[str, str]

    def clean(self, more: Mapping[str, object] | None = None, *, without: str = "") -> list[str]:
        """Return the words that run a program with these variables and no others."""
        variables = {**self.variables, **(more or {})}
        given = (f"{name}={value}" for name, value in variables.items() if name != without)
        return ["env", "-i", *given]


@pytest.fixture(scope="module")
def image(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Run the Containerfile's install.sh in an empty environment, without a network."""
    folder = tmp_path_factory.mktemp("image")
    recipe = (PACKAGING / "Containerfile").read_text()
    given, prefix, wheels, home = (folder / name for name in ("source", "prefix", "wheels", "home"))
    for copied in re.findall(r"^COPY (.*) /source/?\S*$", recipe, re.MULTILINE):
        for name in copied.split():
            target = given / name
            target.parent.mkdir(exist_ok=True)
            if (source / name).is_dir():
                shutil.copytree(source / name, target, symlinks=True)
            else:
                shutil.copy(source / name, target)
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", recipe, re.MULTILINE)
    (command,) = re.findall(r"^RUN (sh .*)$", recipe, re.MULTILINE)
    (programs,) = re.findall(r"^ENV PATH=(\S+?):", recipe, re.MULTILINE)
    places = {"/source": str(given), "/usr/local": str(prefix), "${EXTRAS}": extras}
    for name, place in places.items():
        command = command.replace(name, place)
    wheels.mkdir()
    home.mkdir()
    wanted = [Requirement(text).name for text in PROJECT["optional-dependencies"][extras]]
    names = needed([*DEPENDENCIES, *wanted])
    modules = linked(names, folder / "modules")
    for name in names:
        repacked(name, wheels, modules)
    repacked("setuptools", wheels, None)
    variables = {
        "HOME": home,
        "PATH": f"{program_that_copies(folder)}:{prefix}{programs[10:]}:/usr/bin:/bin",
        "PIP_FIND_LINKS": wheels,
        "PIP_NO_INDEX": 1,
        "PIP_NO_COMPILE": 1,
        "PIP_NO_CACHE_DIR": 1,
    }
    made = Image(prefix, given, {name: str(value) for name, value in variables.items()})
    before = set(given.rglob("*"))
    assert run(folder, *made.clean(), "sh", "-c", command) == f"hicachectl {__version__}\n"
    assert set(given.rglob("*")) == before
    return made


@pytest.mark.xdist_group("image")
def test_install_sh_installs_what_the_container_file_copies(
    image: Image, wheel: Path, tmp_path: Path
) -> None:
    """In an empty environment, then a wheel in the same place, which runs."""
    prefix = image.prefix
    again = f"sh {PACKAGING / 'install.sh'} --prefix {prefix} --extras mooncake-cpu {wheel}"
    assert run(tmp_path, *image.clean(), "sh", "-c", again) == f"hicachectl {__version__}\n"
    assert {path.name for path in (prefix / "share" / "man").glob("*/*")} == {
        path.name for path in (ROOT / "man").glob("*.[157]")
    }
    shared = (
        "hicachectl/kubernetes/kustomization.yaml",
        "bash-completion/completions/hicachectl",
        "zsh/site-functions/_hicachectl",
        "fish/vendor_completions.d/hicachectl.fish",
    )
    for name in shared:
        assert (prefix / "share" / name).is_file()
    run(tmp_path, *image.clean(), prefix / "bin" / "hicachectl", "demo", "store")
    assert list(Path(image.variables["HOME"]).iterdir()) == []
    nowhere = image.clean(without="PIP_FIND_LINKS")
    failed = subprocess.run(
        [*nowhere, "sh", "-c", again], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert failed.stderr.endswith("without a network, see --help. Nothing was replaced\n")
    listing = (prefix / "bin" / "hicachectl", "ls", "store", "--format", "json")
    listed = run(tmp_path, *image.clean(), *listing)
    assert {page["state"] for page in json.loads(listed)["pages"]} == {"whole"}
    assert len(list((prefix / "lib").iterdir())) == 2  # the environment in use, and its link
    python = prefix / "lib" / "hicachectl" / "bin" / "python"
    place = run(
        tmp_path, *image.clean(), python, "-c", "import hicachectl; print(hicachectl.__file__)"
    )
    assert Path(place.strip()).resolve().is_relative_to(prefix.resolve())


class Pod:
    """A container of the manifests, run in the image with other places and numbers.

    instead: replacements for texts of the manifests.
    """

    def __init__(self, image: Image, container: dict[str, Any], instead: dict[str, str]) -> None:
        variables: dict[str, object] = {
            "POD_IP": HOST, "RUN": "night", "JOB_COMPLETION_INDEX": 0, "MIN_USABLE": 0.9,
        }  # fmt: skip
        for one in container.get("env", ()):
            variables.setdefault(one["name"], one.get("value"))
        words = [*container.get("command", ["hicachectl"]), *container["args"]]
        for name, value in variables.items():
            words = [word.replace(f"$({name})", str(value)) for word in words]
        for name, value in instead.items():
            words = [word.replace(name, value) for word in words]
        self._image = image
        self.words = words
        self.variables = variables

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as stream:
            return subprocess.Popen(
                [*self._image.clean(self.variables), *self.words],
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
            )

    def run(self, folder: Path, **variables: object) -> str:
        """Run the container to its end, which must be a success. Return stdout."""
        return run(folder, *self._image.clean({**self.variables, **variables}), *self.words)


@contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End the processes after the block."""
    try:
        yield
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def containers_of(name: str, kind: str = "containers") -> list[dict[str, Any]]:
    """Return the containers of a manifest, in order."""
    found: list[dict[str, Any]] = []
    for manifest in yaml.safe_load_all((PACKAGING / "kubernetes" / name).read_text()):
        spec = manifest["spec"]
        spec = spec.get("jobTemplate", manifest)["spec"]
        found += spec.get("template", {}).get("spec", {}).get(kind, [])
    return found


@pytest.mark.xdist_group("image")
def test_the_gate_of_the_manifests_waits_for_their_store_without_cuda(
    image: Image, mooncake_package: None, tmp_path: Path
) -> None:
    """The commands of the manifests in an empty environment; the store comes after the gate."""
    python = image.prefix / "lib" / "hicachectl" / "bin" / "python"
    found = "import importlib.util as u; print(*map(u.find_spec, ('torch', 'triton', 'numba')))"
    assert run(tmp_path, *image.clean(), python, "-c", found) == "None None None\n"
    archive, runs, profile = (tmp_path / name for name in ("archive", "runs", "profile"))
    for folder in (archive, runs, profile, tmp_path / "gate"):
        folder.mkdir()
    hicachectl = [*image.clean(), "hicachectl"]
    run(tmp_path, *hicachectl, "demo", "store", "--pages", 20)
    shutil.copy(tmp_path / "store" / ".hicachectl" / "demo.toml", profile / "profile.toml")
    pack = f"pack://{archive}/monday.hcpack"
    run(tmp_path, *hicachectl, "migrate", "store", pack, "--profile", profile / "profile.toml")
    request = [*tokens(20), 1]  # more than the prefetch threshold
    (archive / "day.jsonl").write_text(json.dumps({"timestamp": 1, "token_ids": request}) + "\n")
    rpc, admin, client = free_ports(3)
    instead = {
        "mooncake-master:50051?": f"{HOST}:{rpc}?admin={HOST}:{admin}&",
        "mooncake-master:50051": f"{HOST}:{rpc}",
        "rpc_port=50051": f"rpc_port={rpc}",
        "metrics_port=9003": f"metrics_port={admin}",
        "port=50052": f"port={client}",
        "200GB": "64MB",
        "/archive/": f"{archive}/",
        "/gate/": f"{tmp_path}/gate/",
        "/etc/hicache/": f"{profile}/",
        "/runs": f"{runs}",
    }
    (gate,) = containers_of("server.yaml", "initContainers")
    log = tmp_path / "gate.log"
    processes = [Pod(image, gate, instead).start(log)]
    with ended(processes):
        wait_until(lambda: "attempt 1 failed: " in log.read_text())
        master, store = containers_of("mooncake.yaml")
        processes.append(Pod(image, master, instead).start(tmp_path / "master.log"))
        probe = f"http://{HOST}:{admin}{master['livenessProbe']['httpGet']['path']}"
        wait_until(lambda: "service_ready" in reply(probe))
        processes.append(Pod(image, store, instead).start(tmp_path / "store.log"))
        assert processes[0].wait(PATIENCE_S) == 0, log.read_text()
        said = log.read_text()
        document = json.loads(said[said.index("{") : said.rindex("}") + 1])
        assert document["opened_anyway"] is False
        assert document["attempts"] >= 2
        assert document["usable_tokens"] == document["requested_tokens"] > 0
        (metrics,) = (tmp_path / "gate").iterdir()
        assert "hicachectl_prewarm_opened_anyway{" in metrics.read_text()
        assert listening_ports(processes[1].pid) == {rpc, admin}
        of_store = listening_ports(processes[2].pid) - {client}  # network-policy.yaml lets these in
        assert of_store
        assert all(15000 <= port <= 17000 for port in of_store)
        (again,) = containers_of("prewarm-cronjob.yaml")
        assert json.loads(Pod(image, again, instead).run(tmp_path))["copied_pages"] == 0
        (verify,) = containers_of("verify-nightly.yaml", "initContainers")
        (merge,) = containers_of("verify-nightly.yaml")
        for index in range(4):
            Pod(image, verify, instead).run(tmp_path, JOB_COMPLETION_INDEX=index)
            merged = Pod(image, merge, instead).run(tmp_path, JOB_COMPLETION_INDEX=index)
            assert ("no findings" in merged) == (index == 3)
            assert (runs / "verify.prom").exists() == (index == 3)
        (purge,) = containers_of("runs-cronjob.yaml")
        Pod(image, purge, instead).run(tmp_path)
        assert {path.name for path in runs.iterdir()} == {"night", "verify.prom"}


def reply(url: str) -> str:
    """Return the answer of a server, or "" if it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


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
        (("--prefix", "taken", "."), "taken/bin/hicachectl: not a link by this script"),
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


@needs_root
@pytest.mark.parametrize("closed", [True, False])
def test_install_sh_warns_of_a_python_that_others_cannot_run(closed: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o700 if closed else 0o755)
        program = shutil.copy(Path(sys.executable).resolve(), folder / "python3")
        done = subprocess.run(
            ["sh", PACKAGING / "install.sh", "--python", program, "--prefix", "", "."],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
    warning = f"{folder}: closed to other users, so they cannot run {program} and hicachectl; give"
    assert (warning in done.stderr) is closed
    assert ("warning" in done.stderr) is closed


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
