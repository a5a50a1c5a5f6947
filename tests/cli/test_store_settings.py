"""Profile, catalog and lock of a store in the config file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.test_lock_held import content, held
from tests.stores import page, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.fixture
def config(tmp_path: Path, source: Path, profile: Path) -> Path:
    """A config with the stores prod (profile, catalog, lock) and new (a lock)."""
    path = tmp_path / "config.toml"
    path.write_text(
        f'[stores.prod]\nurl = "{source}"\nprofile = "{profile.name}"\n'
        'catalog = "prod.parquet"\nlock = "prod.lock"\n'
        f'[stores.new]\nurl = "{tmp_path / "new"}"\nlock = "new.lock"\n'
    )
    return path


def test_the_profile_holds_for_every_command_unless_one_is_given(
    invoke: Invoke, config: Path, tmp_path: Path
) -> None:
    call = ["--config", config]
    assert invoke(*call, "profile", "prod:").stdout == (
        invoke("profile", "--profile", tmp_path / "profile.toml").stdout
    )
    assert "No --profile" not in invoke(*call, "ls", "prod:").stderr
    assert invoke(*call, "verify", "prod:", "--format", "json").document["profile"]
    bad = tmp_path / "bad.toml"
    bad.write_text("model = 3")
    assert "bad.toml" in invoke(*call, "ls", "prod:", "--profile", bad, exit_code=2).stderr
    said = invoke(*call, "ls", "prod:", "--layout", "page_first", exit_code=2).stderr
    assert "--layout needs --model-config or --server" in said


def test_a_variable_beats_the_config(
    invoke: Invoke, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHECTL_PROFILE", "/none.toml")
    assert "/none.toml" in invoke("--config", config, "ls", "prod:", exit_code=2).stderr


def test_a_store_named_by_its_directory_has_no_settings(
    invoke: Invoke, config: Path, source: Path
) -> None:
    assert "No --profile" in invoke("--config", config, "ls", source).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stated", "wrong", "why"),
    [("tp = 2", "tp = 4", "tp 4"), ("nbytes = 64", "nbytes = 32", "expected 32 bytes")],
    ids=["topology", "sizes"],
)
def test_a_profile_that_the_store_contradicts_stops_no_look_and_no_removal(
    invoke: Invoke, tmp_path: Path, stated: str, wrong: str, why: str
) -> None:
    """Servers with new settings have not written yet; the pages are those of their predecessors."""
    store, profile, config = (tmp_path / name for name in ("store", "p.toml", "config.toml"))
    store.mkdir()
    put_pages(store, range(4), "_m_0_2", "_m_1_2")
    described = 'model = "m"\npage_size = 4\ntp = 2\n[[pools]]\nname = "kv"\n'
    described += 'kind = "opaque"\nnbytes = 64\n'
    profile.write_text(described.replace(stated, wrong))
    config.write_text(f'[stores.prod]\nurl = "{store}"\nprofile = "p.toml"\n')
    call = ["--config", config]
    listed = invoke(*call, "ls", "prod:", "--format", "jsonl")
    assert why in listed.stderr
    assert [(row["tp_size"], row["state"]) for row in listed.rows] == [(2, "whole")] * 4
    assert why in invoke(*call, "show", "prod:", page(0)).stderr
    for command in ("ls", "verify"):
        given = ("--profile", profile) if command == "ls" else ()
        assert why in invoke(*call, command, "prod:", *given, exit_code=2).stderr
    assert why in invoke(*call, "rm", "prod:", "--state", "whole", "--yes", exit_code=2).stderr
    assert len(list(store.glob("*.bin"))) == 8
    removed = invoke(*call, "rm", "prod:", "--tp", 2, "--yes")
    assert why in removed.stderr
    assert not list(store.glob("*.bin"))


def test_the_model_that_hits_and_profile_choose_says_otherwise(
    invoke: Invoke, config: Path, source: Path
) -> None:
    (row, *_) = invoke("ls", source, "--format", "jsonl").rows
    said = invoke("--config", config, "profile", "prod:", "--model", row["model"]).stderr
    assert "inferred" in said


@pytest.mark.slow
def test_migrate_takes_the_profile_of_the_source_and_the_lock_of_the_destination(
    invoke: Invoke, config: Path, tmp_path: Path
) -> None:
    call = ["--config", config, "migrate", "prod:", "new:", "--format", "json"]
    with held(tmp_path / "new.lock"):
        before = content(tmp_path / "source")
        document = invoke(*call, "--to-tp", 1).document
        assert (document["stopped_by"], document["complete"]) == ("lock", False)
        assert not (tmp_path / "new").exists()
        assert invoke(*call, "--to-tp", 1, "--dry-run").document["stopped_by"] is None
        other = invoke(*call, "--to-tp", 1, "--lock", tmp_path / "other.lock").document
        assert other["complete"] is True
        assert content(tmp_path / "source") == before
    with held(tmp_path / "prod.lock"):
        assert invoke(*call, "--to-tp", 1).document["complete"] is True
    with held(tmp_path / "new.lock"):
        invoke("--config", config, "migrate", "prod:", "new:", "--shard", "0/1", "--run",
               tmp_path / "run")  # fmt: skip


def test_prewarm_takes_the_profile_of_from_and_the_lock_of_the_destination(
    invoke: Invoke, config: Path, tmp_path: Path
) -> None:
    call = ["--config", config, "prewarm", "new:", "--from", "prod:", "--all"]
    with held(tmp_path / "new.lock"):
        assert invoke(*call).document["stopped_by"] == "lock"
    assert invoke(*call).document["copied_pages"] > 0


@pytest.mark.slow
def test_removals_and_repairs_take_the_lock_but_looking_does_not(
    invoke: Invoke, config: Path, tmp_path: Path
) -> None:
    call = ["--config", config]
    with held(tmp_path / "prod.lock"):
        rm = invoke(*call, "rm", "prod:", "--before", "0s", "--yes", "--format", "json").document
        assert rm["stopped_by"] == "lock"
        repair = ["--repair", "delete", "--yes", "--format", "json"]
        assert invoke(*call, "verify", "prod:", *repair).document["stopped_by"] == "lock"
        assert invoke(*call, "verify", "prod:", "--format", "json").document["complete"] is True
    assert invoke(*call, "rm", "prod:", "--temporaries", "--yes").stdout  # needs no profile


@pytest.mark.slow
def test_verify_compares_with_the_catalog_once_there_is_one(
    invoke: Invoke, config: Path, tmp_path: Path
) -> None:
    call = ["--config", config, "verify", "prod:"]
    said = invoke(*call).stderr
    assert f"{tmp_path / 'prod.parquet'}: the catalog does not exist yet" in said
    invoke(*call, "--update-catalog")
    assert (tmp_path / "prod.parquet").exists()
    assert "does not exist yet" not in invoke(*call).stderr
    victim = max((tmp_path / "source").glob("*.bin"))
    data = bytearray(victim.read_bytes())
    data[:4] = bytes(x ^ 1 for x in data[:4])
    victim.write_bytes(data)
    found = invoke(*call, "--checks", "digests", "--identity", "size", "--grace", "0s",
                   "--format", "json", exit_code=4)  # fmt: skip
    assert found.document["counts"] == {"digest-mismatch": 1}
    invoke(*call, "--checks", "names")  # reads no digest, so the catalog has no part in it


def test_restore_takes_profile_and_lock_of_the_store(
    invoke: Invoke, config: Path, tmp_path: Path
) -> None:
    quarantine = tmp_path / "quarantine"
    quarantine.mkdir()
    call = ["--config", config, "restore", quarantine, "prod:", "--yes", "--format", "json"]
    with held(tmp_path / "prod.lock"):
        assert invoke(*call).document["stopped_by"] == "lock"
    assert invoke(*call).document["complete"] is True


@pytest.mark.parametrize(
    ("member", "value", "command"),
    [
        ("profile", "gone.toml", ["ls", "STORE"]),
        ("profile", "gone.toml", ["migrate", "STORE", "new:"]),
        ("profile", "broken.toml", ["verify", "STORE"]),
        ("catalog", "broken.toml", ["verify", "STORE"]),
        ("lock", "none/prod.lock", ["rm", "STORE", "--before", "0s", "--yes"]),
    ],
)
@pytest.mark.parametrize("store", ["prod:", "alias:"])
def test_a_file_that_cannot_be_read_is_named_with_the_entry_that_states_it(
    invoke: Invoke, tmp_path: Path, source: Path, store: str, member: str, value: str,
    command: list[str],
) -> None:  # fmt: skip
    """alias: has its settings from prod:, which its URL names."""
    path = tmp_path / "c.toml"
    (tmp_path / "broken.toml").write_text("model = 3")
    path.write_text(
        f'[stores.alias]\nurl = "prod:"\n[stores.prod]\nurl = "{source}"\n{member} = "{value}"\n'
        f'[stores.new]\nurl = "{tmp_path / "new"}"\n'
    )
    call = [store if word == "STORE" else word for word in command]
    said = invoke("--config", path, *call, exit_code=2).stderr.splitlines()[-1]
    where = f"hicachectl: {path}: stores.prod: {member}: {tmp_path / value}"
    assert said.startswith(where), said
    direct = [str(source) if word == "STORE" else word for word in command]
    if member != "lock" and command[0] != "migrate":
        own = invoke(*direct, f"--{member}", tmp_path / value, exit_code=2).stderr
        assert str(path) not in own


def test_next_commands_of_findings_name_the_store_and_not_its_settings(
    invoke: Invoke, config: Path, tmp_path: Path
) -> None:
    next(iter(sorted((tmp_path / "source").glob("*.bin")))).unlink()
    shown = invoke("--config", config, "verify", "prod:", exit_code=4).stdout
    assert f"hicachectl --config {config} verify prod:" in shown
    assert "profile.toml" not in shown
