"""hicachectl-security(7): commands do to files and to the network what its tables state.

`strace` records each command line below. The command tree says which commands and options exist: a
new one needs its row in access.toml, and a line here.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import pytest
from msgspec.structs import replace

from hicachectl.__main__ import run
from hicachectl.cli.demo_store import PROFILE
from hicachectl.cli.exit_codes import DONE, FINDINGS
from hicachectl.cli.manpages.access import VERBS, access
from tests.checkpoints import write_checkpoint
from tests.cli.test_help import every_command
from tests.cli.test_parameters import with_values
from tests.doctor.replies import answering, info
from tests.effects import ROOT, Effect, traced
from tests.hf3fs_places import Place
from tests.move.migrations import demo_store, profile_file
from tests.move.repairs import shorten
from tests.speed import ALL
from tests.tiny_tokenizers import make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicachectl.cli.manpages.access import Row
    from tests.hf3fs_server import MetadataServer
    from tests.mooncake_cluster import Cluster

ACCESS = access()
# Words in capitals are places, each in a directory of its own. A whole run has the rare lines, too.
LINES = """
doctor STORE --profile PROFILE
doctor STORE --server SERVER --watch 0s
ls STORE --pages PAGES
ls STORE: --config CONFIG
show STORE PAGE --profile PROFILE
verify STORE --profile PROFILE --catalog CATALOG
verify STORE --profile PROFILE --repair delete --yes --lock LOCK
verify STORE --profile PROFILE --repair quarantine --quarantine HELD --yes
verify STORE --profile PROFILE --stamp --update-catalog --catalog CATALOG --metrics-file METRICS
verify STORE --profile PROFILE --shard 0/1 --run WORK
report STORE --output OUT
explain missing-rank
hits STORE --prompts PROMPTS --tokenizer TOKENIZER --profile PROFILE
simulate STORE --trace TOKENS --profile PROFILE
simulate --trace PACKED --profile PROFILE --capacity 1MiB --what-if page_size=32
bench STORE --profile PROFILE --compare SRC
bench STORE --profile PROFILE --write --most 256KiB --device cpu
restore QUARANTINE STORE --yes
quarantine list QUARANTINE
quarantine purge QUARANTINE --before 0s --yes
prewarm --profile PROFILE --trace TOKENS --dry-run --output OUT
prewarm DST --from SRC --profile PROFILE --plan PLAN
prewarm DST --from SRC --profile PROFILE --token-ids TOKENS --min-usable 0 \
--open-after 1m --open-since SINCE
prewarm DST2 --profile PROFILE --token-ids PACKED --through-server SERVER
migrate SRC DST --profile PROFILE --pages-from PAGES
migrate SRC DST --profile PROFILE --to-profile OTHER --move --yes
migrate SRC DST --profile PROFILE --dry-run
migrate SRC SRC --profile NAMED --trailers write
diff A B --profile PROFILE --verify
merge RUN --catalog CATALOG --healthcheck-url SERVER
runs list DIRECTORY
runs status RUN
runs purge DIRECTORY --before 0s --yes
rm STORE --before 0s --yes
rm STORE --profile PROFILE --free 1KiB --keep-plan PLAN --yes
pack info PACK
pack repair PACK
profile STORE
profile --profile PROFILE --weights WEIGHTS --draft-weights DRAFTWEIGHTS
profile --model-config MODEL --page-size 16 --served-model-name x/m --draft-model-config DRAFT
demo DIR
completion bash
help
version
"""
RARE = """
verify STORE --profile PROFILE --repair quarantine --quarantine HELD --dry-run
restore QUARANTINE STORE --dry-run
quarantine purge QUARANTINE --before 0s --dry-run
prewarm DST --from SRC --profile PROFILE --all --dry-run
runs purge DIRECTORY --before 0s --dry-run
rm STORE --before 0s --dry-run
rm STORE --temporaries --yes
"""

# What makes the places that are there before a command.
BEFORE = [
    (FINDINGS, "verify STORE --profile PROFILE --repair quarantine --quarantine QUARANTINE --yes"),
    (DONE, "verify SRC --profile PROFILE --update-catalog --catalog CATALOG"),
    (DONE, "verify SRC --profile PROFILE --update-catalog --catalog CATALOG --shard 0/1 --run RUN"),
    (DONE, "verify SRC --shard 0/1 --run DIRECTORY/night"),
    (DONE, "merge DIRECTORY/night"),
    (DONE, "migrate SRC PACK"),
    (DONE, "prewarm DST --from SRC --profile PROFILE --all --dry-run --output PLAN"),
]
LEAVES = {
    "PACK": "x.hcpack",
    "PROFILE": "p.toml",
    "OTHER": "p.toml",
    "NAMED": "p.toml",
    "CONFIG": "c.toml",
}
PLACES = sorted({w.rstrip(":") for w in LINES.split() if w.isupper()} - {"PAGE", "SERVER"})
UNTRACED = {"--ray"}  # Ray starts programs of its own
ON_CLUSTERS = {"pin", "unpin"}  # test_pin.py traces these
COMMANDS = [" ".join(words) for words, _ in every_command()]
CONFIGS = ROOT / "tests" / "data" / "configs"


def lines_of(command: str) -> list[list[str]]:
    """Return the command lines of a command, in words."""
    text = LINES + RARE if ALL else LINES
    words, lines = command.split(), map(str.split, text.strip().splitlines())
    return [line for line in lines if line[: len(words)] == words]


def names_a_place(option: click.Option) -> bool:
    kinds = {"FILE", "DIR", "URL", "SRC", "ADDRESS"}
    return isinstance(option.type, click.Path) or bool(kinds & {*str(option.metavar).split("|")})


def test_every_command_and_every_option_that_names_a_place_has_a_row_and_a_line() -> None:
    options = {
        name
        for _, command in every_command()
        for option, name, _ in with_values(command)
        if isinstance(option, click.Option) and names_a_place(option)
    }
    assert {*ACCESS.options} == options
    assert {*COMMANDS} <= {" ".join(row.words) for row in ACCESS.commands}
    assert all(lines_of(command) for command in {*COMMANDS} - ON_CLUSTERS)
    assert options - {*LINES.split()} == UNTRACED


class Site(NamedTuple):
    """A folder with a directory for each place. server: URL of a server."""

    folder: Path
    server: str = "http://127.0.0.1:1"

    def path(self, word: str) -> Path:
        return self.folder / word / LEAVES.get(word, "it")

    def filled(self, words: list[str]) -> list[str]:
        """Return a command line with paths in place of the words in capitals."""
        known = {word: str(self.path(word)) for word in PLACES} | {"SERVER": self.server}
        if "PAGE" in words:
            known["PAGE"] = max(self.path("STORE").glob("*.bin")).name[:64]
        split = (word.partition("/") for word in words)
        return ["".join([known.get(first, first), *others]) for first, *others in split]

    def about(self, effect: Effect) -> str | None:
        """Return the place that an effect is about; None if any command may have the effect."""
        verb, name = effect
        path = Path(name)
        if self.folder in path.parents and (verb != "reads" or path.parent != self.folder):
            return path.relative_to(self.folder).parts[0]
        if verb == "connects" and self.server == f"http://{name}":
            return "SERVER"
        if verb == "reads" and not self._is_common(path):
            return "PROCESSES" if path.is_relative_to("/proc") else name
        common = {"writes": "/dev/null", "runs": os.path.normpath(sys.executable)}
        return None if verb == "reads" or common.get(verb) == name else name

    def _is_common(self, path: Path) -> bool:
        program = [sys.prefix, sys.base_prefix, str(ROOT)]
        inside = any(path.is_relative_to(each) for each in (*program, *ACCESS.system))
        return inside or self.folder.is_relative_to(path) or path.parent == self.folder


def environment(site: Site) -> dict[str, str]:
    """Return all variables of a command."""
    search = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
    return {
        **{name: os.environ[name] for name in search if name in os.environ},
        "HOME": "/nonexistent",
        "XDG_STATE_HOME": str(site.folder / "MARKS"),
        "TMPDIR": str(site.folder / "TMPDIR"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the places once."""
    site = Site(tmp_path_factory.mktemp("access"))
    for word in (*PLACES, "MARKS", "TMPDIR"):
        (site.folder / word).mkdir()
    stores = [demo_store(site.path(word)) for word in ("STORE", "SRC", "DST2", "A", "B")]
    anchors = sorted(path for path in stores[0].glob("*.bin") if "mamba" not in path.name)
    profile_file(site.path("PROFILE"))
    profile_file(site.path("OTHER"), replace(PROFILE, model="another/model"))
    profile_file(site.path("NAMED"), replace(PROFILE, weights="one", draft_weights=""))
    make_tokenizer(site.path("TOKENIZER"), "qwen")
    for word in ("WEIGHTS", "DRAFTWEIGHTS"):
        write_checkpoint(site.path(word), {"model.safetensors": {"a": ("BF16", (4, 4))}})
    shutil.copy(CONFIGS / "llama-3.1-8b.json", site.path("MODEL"))
    shutil.copy(CONFIGS / "llama-3.1-8b-eagle.json", site.path("DRAFT"))
    site.path("TOKENS").write_text(json.dumps(list(range(200))) + "\n")
    site.path("PACKED").write_bytes(gzip.compress(site.path("TOKENS").read_bytes()))
    site.path("PROMPTS").write_text(json.dumps("the cat sat on the mat") + "\n")
    site.path("PAGES").write_text(anchors[-1].name[:64] + "\n")
    shorten(anchors[0])
    for status, line in BEFORE:
        assert run(["-q", *site.filled(line.split())]) == status, line
    shorten(anchors[2])
    return site.folder


@pytest.fixture
def site(template: Path, tmp_path: Path) -> Iterator[Site]:
    with answering(info(), on_prompt=lambda _: None) as server:
        yield Site(tmp_path / "site", server)


def stated(words: list[str]) -> set[Effect]:
    """Return the effects that the tables state for a command line."""
    effects = {effect for row in rows_of(words) for effect in effects_of(row, words)}
    for option, verbs in ACCESS.options.items():
        if option in words:
            effects |= {Effect(verb, value_of(option, words)) for verb in verbs.split(" and ")}
    return effects


def rows_of(words: list[str]) -> list[Row]:
    return [row for row in ACCESS.commands if {*row.words} <= {*words}]


def effects_of(row: Row, words: list[str]) -> set[Effect]:
    named = arguments_of(words)
    return {
        Effect(
            verb,
            value_of(place, words)
            if place.startswith("--")
            else named.get(place.removeprefix("a new "), place),
        )
        for verb in (VERBS if "--dry-run" in row.words or "--dry-run" not in words else VERBS[:1])
        for place in row.places.get(verb, ())
    }


def arguments_of(words: list[str]) -> dict[str, str]:
    """Return the arguments of a command line, which stand before its options, by name."""
    own, command = next(x for x in every_command() if x[0] == words[: len(x[0])])
    context = click.Context(command)
    arguments = [x for x in command.params if isinstance(x, click.Argument)]
    names = [x.make_metavar(context).strip("[]") for x in arguments]
    given = takewhile(lambda word: not word.startswith("-"), words[len(own) :])
    return dict(zip(names, (word.rstrip(":") for word in given), strict=False))


def value_of(option: str, words: list[str]) -> str:
    return words[words.index(option) + 1]


@pytest.mark.slow
@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ON_CLUSTERS])
def test_a_command_does_what_is_stated(
    command: str, site: Site, template: Path, tmp_path: Path
) -> None:
    seen: set[Effect] = set()
    expected: set[Effect] = set()
    for words in lines_of(command):
        shutil.rmtree(site.folder, ignore_errors=True)
        shutil.copytree(template, site.folder)
        site.path("CONFIG").write_text(f"[stores.STORE]\nurl = '{site.path('STORE')}'\n")
        done = traced(site.filled(words), environment(site), tmp_path / "trace")
        assert done.status in (DONE, FINDINGS), (words, done.stderr)
        about = ((effect, site.about(effect)) for effect in done.effects)
        found = {Effect(effect.verb, place) for effect, place in about if place is not None}
        allowed = stated(words)
        touched = {effect.object for effect in allowed}
        beyond = {e for e in found - allowed if e.verb != "reads" or e.object not in touched}
        assert not beyond, (words, sorted(beyond))
        seen |= found
        expected |= allowed
    assert expected <= seen, sorted(expected - seen)


# ---- stores on the network

MOONCAKE = """
prewarm STORE --from SRC --profile PROFILE --all
migrate STORE COPY --profile PROFILE
ls STORE
hits STORE --token-ids TOKENS --profile PROFILE
verify STORE
bench STORE --write --most 256KiB
rm STORE --model demo/hybrid-1b --dry-run
verify STORE --profile PROFILE
rm STORE --model demo/hybrid-1b --yes
migrate SRC STORE --profile PROFILE
"""
HF3FS = """
ls STORE
verify STORE --profile PROFILE
rm STORE --page 0 --profile PROFILE --yes
"""
OWNERS = range(15000, 17001)


def check_network(
    kind: str, lines: str, paths: Mapping[str, object], services: Mapping[str, str], trace: Path
) -> None:
    """Compare the connections of command lines with a row. services: names by address."""
    site = Site(trace.parent)
    for words in map(str.split, lines.strip().splitlines()):
        row = [row for row in ACCESS.network[kind] if {*row.words} <= {*words}][-1]
        done = traced([paths.get(word, word) for word in words], environment(site), trace)
        assert done.status == DONE, (words, done.stderr)
        asked = {effect.object for effect in done.effects if effect.verb == "connects"}
        assert {service_of(address, services) for address in asked} == {*row.places["connects"]}, (
            words
        )
        ports = {effect.object for effect in done.effects if effect.verb == "listens"}
        assert {service_of(port, services) for port in ports} <= {"owners"}, words
        assert len(ports) == (2 if row.places.get("listens") else 0), (words, ports)


def service_of(address: str, services: Mapping[str, str]) -> str:
    """Return the name of a service; the owners of memory have the ports of Mooncake's range."""
    own = "owners" if int(address.rpartition(":")[2]) in OWNERS else address
    return services.get(address, own)


@pytest.mark.slow
def test_a_mooncake_cluster(template: Path, mooncake_cluster: Cluster, tmp_path: Path) -> None:
    site = Site(template)
    paths: dict[str, object] = {word: site.path(word) for word in ("SRC", "PROFILE", "TOKENS")}
    paths |= {"STORE": mooncake_cluster.url, "COPY": tmp_path / "copy"}
    services = {mooncake_cluster.master: "master", mooncake_cluster.admin: "admin"}
    check_network("mooncake", MOONCAKE, paths, services, tmp_path / "trace")


@pytest.mark.slow
def test_a_3fs_store(metadata_server: MetadataServer, tmp_path: Path) -> None:
    (tmp_path / "3fs").mkdir()
    place = Place(tmp_path / "3fs", metadata_server, metadata_server.snapshot)
    services = {metadata_server.url.removeprefix("http://"): "server"}
    paths = {"STORE": place.url(), "PROFILE": place.profile}
    check_network("hf3fs", HF3FS, paths, services, tmp_path / "trace")
