"""hicachectl-plugin(7): its keys, examples and reasons are those of the code."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from hicachectl.backends.sglang import settings
from hicachectl.backends.sglang.exported import LABELS
from hicachectl.backends.sglang.settings import parse_settings
from hicachectl.checks.reasons import PLUGIN, reasons
from hicachectl.formats.plugin_status import COUNTED, metric_of
from tests.served_stores import INDEXED, served_by, served_store
from tests.stores import page
from tests.test_readme import check_arguments

ROOT = Path(__file__).parents[3]
MANUAL = (ROOT / "man" / "hicachectl-plugin.7").read_text()
NEWLINE = "\n"


def section(name: str) -> str:
    return MANUAL.split(f".Sh {name}\n")[1].split("\n.Sh ")[0]


def test_the_keys_are_those_that_servers_accept() -> None:
    keys = re.findall(r"^\.It Li (\S+)$", section("KEYS"), re.MULTILINE)
    assert sorted(keys) == sorted(["store", *settings._PARSERS])


def test_the_configuration_to_copy_is_accepted() -> None:
    text = section("START A SERVER").split("'")[1].replace("\\-", "-").replace(NEWLINE, " ")
    configuration = json.loads(text)
    assert configuration["module_path"] == "hicachectl.backends.sglang"
    assert [str(store) for store in parse_settings(configuration).stores] == ["file:///mnt/hicache"]


def test_the_commands_are_accepted() -> None:
    lines = section("ADOPT AN EXISTING DIRECTORY").replace("\\-", "-").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("hicachectl ")]
    assert [command[0] for command in commands] == ["profile", "verify", "migrate"]
    for command in commands:
        check_arguments(command)


def test_defaults_are_as_stated() -> None:
    defaults = parse_settings({"interface_v1": 1, "store": "file:///mnt/hicache"})
    assert (defaults.op_timeout, defaults.threads) == (5, 4)
    assert (defaults.digest, defaults.unstamped, defaults.unranked, defaults.on_foreign) == (
        "xxh3",
        "refuse",
        "read",
        "replace",
    )
    with pytest.raises(ValueError, match="at most 8 seconds"):
        parse_settings({"interface_v1": 1, "store": "/x", "op_timeout": 9})


def test_every_reason_and_metric_is_explained() -> None:
    """The reasons of the code are those of COUNTED, which mypy checks, and those of the page."""
    refused, failed = section("REASONS").split("Reasons of failed operations:")
    named = [
        set(re.findall(r"Li ([a-z-]+)", " ".join(re.findall(r"^\.It .*", text, re.MULTILINE))))
        for text in (refused, failed)
    ]
    assert named == [set(COUNTED["refused"]), set(COUNTED["failed"])]
    assert set(COUNTED["noted"]) | set(COUNTED["removed"]) <= named[0]
    metrics = {metric_of(kind, one) for kind, names in COUNTED.items() for one in names}
    assert set(re.findall(r"^\.It Li (\w+)$", section("METRICS"), re.MULTILINE)) == metrics


def test_explain_knows_every_reason_and_where_it_is_counted() -> None:
    stated = {
        (reason.name, metric)
        for reason in reasons()
        if reason.source == PLUGIN
        for metric in reason.counters
    }
    kinds = COUNTED.keys() - {"tokens"}
    assert stated == {(name, metric_of(kind, name)) for kind in kinds for name in COUNTED[kind]}


def test_the_labels_of_the_metrics_are_stated() -> None:
    stated = section("METRICS").partition(".Bl")[0]
    assert all(label in stated for label in LABELS)


def test_markers_that_were_removed_come_back_with_the_next_attach(tmp_path: Path) -> None:
    served_store(tmp_path, INDEXED, range(1))
    markers = tmp_path / ".hicachectl/plugin"
    before = {path.name: path.read_bytes() for path in markers.iterdir()}
    shutil.rmtree(markers)
    assert served_by(tmp_path, INDEXED, [page(0)]) == [True]
    assert {path.name: path.read_bytes() for path in markers.iterdir()} == before
