"""Settings from the environment: which are read, and what they give way to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest

from hicachectl.cli.parameters import variable_of
from tests.cli.test_help import every_command
from tests.cli.test_lock_held import held
from tests.stores import put_pages

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
                read.add(option.envvar)
    for name in ("PROFILE", "FORMAT", "BUFFER_BYTES", "LEASE_WAIT", "CATALOG", "DEVICE"):
        assert f"HICACHECTL_{name}" in read
    for name in ("YES", "REPAIR", "DRY_RUN", "MODEL", "STATE", "OUTPUT", "SHARD", "TO_TP", "PIN",
                 "METRICS_FILE", "STAMP", "LAUNCH", "TP"):  # fmt: skip
        assert f"HICACHECTL_{name}" not in read


def test_what_is_removed_is_chosen_on_the_command_line_only() -> None:
    for words in (["rm"], ["quarantine", "purge"]):
        (command,) = [command for own, command in every_command() if own == words]
        settings = {option.envvar for option in command.params if option.envvar}
        known = ("FORMAT", "HEALTHCHECK_URL", "JOBS", "LEASE_WAIT", "LOCK", "PROFILE")
        assert settings <= {f"HICACHECTL_{name}" for name in known}


def test_the_command_line_beats_the_environment_which_beats_the_default(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    assert invoke("ls", store).stdout.startswith("PAGE")
    monkeypatch.setenv("HICACHECTL_FORMAT", "json")
    assert len(invoke("ls", store).document["pages"]) == 3
    assert len(invoke("ls", store, "--format", "jsonl").rows) == 3
    monkeypatch.setenv("HICACHECTL_FORMAT", "")
    assert invoke("ls", store).stdout.startswith("PAGE")


def test_flags_and_numbers(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text("[1, 2, 3]\n")
    words = ("hits", store, "--token-ids", tokens, "--page-size", "2")
    assert invoke(*words).stderr
    monkeypatch.setenv("HICACHECTL_QUIET", "1")
    assert not invoke(*words).stderr
    monkeypatch.setenv("HICACHECTL_QUIET", "0")
    assert invoke(*words).stderr
    monkeypatch.setenv("HICACHECTL_LIMIT", "0")
    assert "HICACHECTL_LIMIT: 0 is too small" in invoke("verify", store, exit_code=2).stderr


@pytest.mark.parametrize(
    ("name", "option"),
    [("TP", "--tp"), ("PAGE_SIZE", "--page-size"), ("ENABLE_DP_ATTENTION", "--enable-dp-attention"),
     ("KV_CACHE_DTYPE", "--kv-cache-dtype")],
)  # fmt: skip
def test_flags_of_servers_are_refused_by_name(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path, name: str, option: str
) -> None:
    """An earlier release read them. Commands without the option only have a remark."""
    monkeypatch.setenv(f"HICACHECTL_{name}", "1")
    for command in ("hits", "profile"):
        said = invoke(command, store, exit_code=2).stderr
        assert (
            f"HICACHECTL_{name}: flags of servers are no longer read from the environment; unset "
            f"it, and give {option} or --profile"
        ) in said
    assert f"no command reads it; give {option}" in invoke("explain", "missing-pool").stderr
    monkeypatch.setenv(f"HICACHECTL_{name}", "")
    invoke("ls", store)


@pytest.mark.parametrize(
    ("name", "value", "words", "said"),
    [
        ("FORMAT", "xml", ["ls"], "HICACHECTL_FORMAT: 'xml' is not one of"),
        ("BUFFER_BYTES", "much", ["verify"], "HICACHECTL_BUFFER_BYTES: "),
        (
            "ALLOW_LEASES",
            "maybe",
            ["ls"],
            "HICACHECTL_ALLOW_LEASES: 'maybe' is not a valid boolean",
        ),
        ("QUIET", "perhaps", ["ls"], "HICACHECTL_QUIET: 'perhaps' is not a valid boolean"),
        ("SERVER", "http://h:bad", ["ls"], "HICACHECTL_SERVER: not a URL; give http://host:port"),
        ("PROFILE", "/no/p", ["ls"], "HICACHECTL_PROFILE: /no/p: cannot read: No such file"),
        ("CONFIG", "/no/c", ["ls"], "HICACHECTL_CONFIG: config /no/c: cannot read: No such file"),
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


def test_consent_and_removals_are_never_read(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_YES", "1")
    said = invoke("rm", store, "--before", "1d", exit_code=2).stderr
    assert "give --yes or --dry-run" in said
    assert "HICACHECTL_YES: no command reads it; give --yes on the command line" in said
    monkeypatch.setenv("HICACHECTL_TEMPORARIES", "1")
    assert "Give a filter" in invoke("rm", store, "--yes", exit_code=2).stderr
    monkeypatch.setenv("HICACHECTL_REPAIR", "delete")
    invoke("verify", store)
    assert len(list(store.glob("*.bin"))) == 3


def test_a_filter_in_the_environment_gets_a_remark_and_chooses_nothing(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_MODEL", "other")
    monkeypatch.setenv("HICACHECTL_DRY_RUN", "1")
    shown = invoke("ls", store, "--format", "json")
    assert len(shown.document["pages"]) == 3
    assert "HICACHECTL_MODEL: no command reads it; give --model on the command" in shown.stderr
    said = invoke("rm", store, "--tp", "1", "--yes").stderr
    assert "HICACHECTL_DRY_RUN: no command reads it; give --dry-run on the command" in said
    assert not list(store.glob("*.bin"))


def test_a_profile_of_the_environment_gives_way_to_options_and_replaces_variables(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: Path, profile: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text("[1, 2, 3]\n")
    monkeypatch.setenv("HICACHECTL_PROFILE", str(profile))
    words = ("hits", source, "--token-ids", tokens, "--format", "json")
    assert invoke(*words).document["chains"][0]["tokens"] == 3
    said = invoke("ls", source, "--model-config", tmp_path / "config.json", exit_code=2).stderr
    assert "config.json" in said
    assert "cannot be combined" not in said
    monkeypatch.setenv("HICACHECTL_MODEL_CONFIG", str(tmp_path / "config.json"))
    assert invoke(*words, "--profile", profile).document["chains"][0]["tokens"] == 3


def test_what_a_part_refuses_has_no_effect_from_the_environment(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_FORMAT", "json")
    monkeypatch.setenv("HICACHECTL_LOCK", str(tmp_path / "lock"))
    monkeypatch.setenv("HICACHECTL_LIMIT", "3")
    invoke("verify", source, "--shard", "0/1", "--run", tmp_path / "run")
    assert not (tmp_path / "lock").exists()
    assert "findings" in invoke("merge", tmp_path / "run").document
    assert "findings" in invoke("verify", source).document


def test_a_lock_of_the_environment_holds_for_commands_that_write(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_LOCK", str(tmp_path / "lock"))
    with held(tmp_path / "lock"):
        assert invoke("verify", store, "--format", "json").document["stopped_by"] is None
        rm = invoke("rm", store, "--tp", "1", "--yes", "--format", "json").document
    assert rm["stopped_by"] == "lock"


def test_a_catalog_of_the_environment_may_not_exist_yet(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_CATALOG", str(tmp_path / "catalog"))
    assert "the catalog does not exist yet" in invoke("verify", store).stderr


def test_unknown_variables_get_a_remark_with_a_close_name(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_FROMAT", "json")
    monkeypatch.setenv("HICACHECTL_ZZZ", "1")
    monkeypatch.setenv("HICACHECTL_LOCK", "lock")  # of another command
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
    assert "SGLang" in invoke("profile", "--print-probe").stdout
