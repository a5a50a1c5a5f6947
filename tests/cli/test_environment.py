"""Options from the environment: which are read, what they give way to, and which never are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest

from hicachectl.cli.environment import NEVER, OF_REMOVERS, long_name, variable_of
from tests.cli.test_help import every_command
from tests.stores import page, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of three pages."""
    directory = tmp_path / "store"
    directory.mkdir()
    put_pages(directory, range(3), "_m_0_1")
    return directory


def test_a_variable_is_named_after_the_option_in_every_command() -> None:
    read = set()
    for words, command in every_command():
        for option in command.params:
            if isinstance(option, click.Option) and option.envvar is not None:
                assert option.envvar == variable_of(option), words
                assert long_name(option) not in NEVER
                assert words[-1] not in ("rm", "purge") or long_name(option) in OF_REMOVERS
                read.add(option.envvar)
    assert {"HICACHECTL_PROFILE", "HICACHECTL_FORMAT", "HICACHECTL_BUFFER_BYTES"} <= read
    dangerous = ("YES", "REPAIR", "REPAIR_CODE", "MOVE", "WRITERS_STOPPED", "TEMPORARIES", "CONFIG")
    assert not {f"HICACHECTL_{name}" for name in (*dangerous, "ALL_DEPLOYMENTS")} & read


def test_the_command_line_beats_the_environment_which_beats_the_default(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    assert invoke("ls", store).stdout.startswith("PAGE")
    monkeypatch.setenv("HICACHECTL_FORMAT", "json")
    assert len(invoke("ls", store).document["pages"]) == 3
    assert len(invoke("ls", store, "--format", "jsonl").rows) == 3
    monkeypatch.setenv("HICACHECTL_FORMAT", "")
    assert invoke("ls", store).stdout.startswith("PAGE")


def test_flags_lists_and_numbers(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_OBJECTS", "1")
    monkeypatch.setenv("HICACHECTL_LIMIT", "2")
    assert len(invoke("ls", store, "--format", "json").document["objects"]) == 2
    monkeypatch.setenv("HICACHECTL_OBJECTS", "0")
    monkeypatch.setenv("HICACHECTL_STATE", "partial,orphan")
    assert invoke("ls", store, "--format", "json").document["pages"] == []


def test_options_of_the_program_are_read(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    assert "No --profile" in invoke("ls", store).stderr
    monkeypatch.setenv("HICACHECTL_QUIET", "1")
    assert invoke("ls", store).stderr == ""


@pytest.mark.parametrize(
    ("name", "value", "words", "said"),
    [
        ("FORMAT", "xml", ["ls"], "HICACHECTL_FORMAT: 'xml' is not one of"),
        ("BUFFER_BYTES", "much", ["verify"], "HICACHECTL_BUFFER_BYTES: "),
        ("STATE", "half", ["ls"], "HICACHECTL_STATE: 'half' is not one of whole, partial"),
        ("OBJECTS", "perhaps", ["ls"], "HICACHECTL_OBJECTS: 'perhaps' is not a valid boolean"),
        ("LIMIT", "0", ["ls"], "HICACHECTL_LIMIT: 0 is not in the range"),
        ("QUIET", "perhaps", ["ls"], "HICACHECTL_QUIET: 'perhaps' is not a valid boolean"),
    ],
)
def test_a_wrong_value_names_the_variable_in_one_line(
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    store: Path,
    name: str,
    value: str,
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setenv(f"HICACHECTL_{name}", value)
    stderr = invoke(*words, store, exit_code=2).stderr
    assert stderr.startswith(f"hicachectl: {said}")
    assert stderr.count("\n") == 1


def test_the_same_value_on_the_command_line_names_the_option(invoke: Invoke, store: Path) -> None:
    assert "'--format'" in invoke("ls", store, "--format", "xml", exit_code=2).stderr


def test_consent_and_removals_are_never_read(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_YES", "1")
    said = invoke("rm", store, "--before", "1d", exit_code=2).stderr
    assert "give --yes or --dry-run" in said
    assert "HICACHECTL_YES: --yes is not read from the environment" in said
    monkeypatch.setenv("HICACHECTL_TEMPORARIES", "1")
    assert "Give a filter" in invoke("rm", store, "--yes", exit_code=2).stderr
    monkeypatch.setenv("HICACHECTL_REPAIR", "delete")
    invoke("verify", store)
    assert len(list(store.glob("*.bin"))) == 3


@pytest.mark.parametrize(("name", "value"), [("MODEL", "m"), ("STATE", "whole"), ("BEFORE", "1d")])
def test_a_removal_refuses_filters_of_the_environment(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path, name: str, value: str
) -> None:
    """ls shows what the filter leaves; a removal that ignored it would remove more."""
    monkeypatch.setenv(f"HICACHECTL_{name}", value)
    said = invoke("rm", store, "--tp", "1", "--yes", exit_code=2).stderr
    assert said.startswith(f"hicachectl: HICACHECTL_{name} is set, but hicachectl rm takes its")
    assert f"give --{name.lower()}, or unset HICACHECTL_{name}" in said
    assert len(list(store.glob("*.bin"))) == 3
    invoke("rm", store, f"--{name.lower()}", value, "--yes")
    assert not list(store.glob("*.bin"))


def test_a_dry_run_of_the_environment_holds_for_removals(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_DRY_RUN", "1")
    assert "Dry run" in invoke("rm", store, "--model", "m", "--yes").stderr
    assert len(list(store.glob("*.bin"))) == 3
    invoke("verify", store)  # which takes --dry-run only with --repair


def test_another_source_on_the_command_line_replaces_that_of_the_environment(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: Path, profile: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text("[1, 2, 3]\n")
    chain = tmp_path / "chain.jsonl"
    chain.write_text(f'["{page(0)}"]\n')
    monkeypatch.setenv("HICACHECTL_TOKEN_IDS", str(tokens))
    monkeypatch.setenv("HICACHECTL_PROFILE", str(profile))
    monkeypatch.setenv("HICACHECTL_TOKENIZER", "/models/none")
    monkeypatch.setenv("HICACHECTL_TP", "7")
    monkeypatch.setenv("HICACHECTL_MODEL", "none")
    (chained,) = invoke("hits", source, "--pages", chain, "--format", "json").document["chains"]
    assert chained["tokens"] is not None  # of the profile's page size
    (hashed,) = invoke("hits", source, "--format", "json").document["chains"]
    assert hashed["tokens"] == 3
    said = invoke("ls", source, "--model-config", tmp_path / "config.json", exit_code=2).stderr
    assert "config.json" in said
    assert "cannot be combined" not in said


def test_what_a_part_refuses_has_no_effect_from_the_environment(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_FORMAT", "json")
    monkeypatch.setenv("HICACHECTL_LOCK", str(tmp_path / "lock"))
    monkeypatch.setenv("HICACHECTL_LIMIT", "3")
    monkeypatch.setenv("HICACHECTL_RUN", str(tmp_path / "run"))
    invoke("verify", source, "--shard", "0/1")
    assert not (tmp_path / "lock").exists()
    assert "findings" in invoke("merge", tmp_path / "run").document
    assert "findings" in invoke("verify", source).document
    monkeypatch.setenv("HICACHECTL_DRY_RUN", "1")
    words = ("prewarm", tmp_path / "new", "--from", source, "--all", "--shard", "0/1")
    assert "--dry-run cannot be combined" in invoke(*words, exit_code=2).stderr


def test_unknown_variables_get_a_remark_with_a_close_name(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_FROMAT", "json")
    monkeypatch.setenv("HICACHECTL_ZZZ", "1")
    monkeypatch.setenv("HICACHECTL_BUDGET", "1GiB")  # of another command
    monkeypatch.setenv("HICACHECTL_API_KEY", "secret")
    monkeypatch.setenv("HICACHECTL_TEST_SEED", "1")
    said = invoke("ls", store, "--format", "json").stderr.splitlines()
    assert said[0].startswith("hicachectl: HICACHECTL_FROMAT: no option has this name; did you mean"
                              " HICACHECTL_FORMAT?")  # fmt: skip
    assert said[1].startswith("hicachectl: HICACHECTL_ZZZ: no option has this name; unset it")
    assert "HICACHECTL" not in "".join(said[2:])
    assert invoke("-q", "ls", store, "--format", "json").stderr == ""


def test_print_probe_ignores_the_environment(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHECTL_PROFILE", "prod.toml")
    monkeypatch.setenv("HICACHECTL_TP", "2")
    assert "SGLang" in invoke("profile", "--print-probe").stdout
