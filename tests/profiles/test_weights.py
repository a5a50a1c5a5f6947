"""The weights in a profile: from options, and compared with a stamp's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.weights import read_checkpoint
from hicachectl.formats.profile import dump_profile, parse_profile
from tests.checkpoints import write_checkpoint
from tests.stores import put_pages

if TYPE_CHECKING:
    from tests.conftest import Invoke

CONFIG = Path(__file__).parent.parent / "data" / "configs" / "qwen3-32b.json"
SHARDS: dict[str, Any] = {"model.safetensors": {"a": ("BF16", (100, 100))}}
FLAGS = ("--model-config", CONFIG, "--served-model-name", "m", "--page-size", 64)
NAME, OTHER, THIRD = "0123456789abcdef" * 2, "fedcba9876543210" * 2, "5" * 32
TEXT = 'model = "m"\ntp = 2\n[[pools]]\nname = "kv"\nkind = "opaque"\nnbytes = 64\n'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", SHARDS)


def named(invoke: Invoke, *arguments: object) -> tuple[str, str]:
    profile = parse_profile(invoke("profile", *arguments).stdout)
    return profile.weights, profile.draft_weights


def test_a_directory_or_its_digits_name_the_weights(invoke: Invoke, model: Path) -> None:
    name = read_checkpoint(model).fingerprint
    assert named(invoke, *FLAGS) == ("", "")
    assert named(invoke, *FLAGS, "--weights", model) == (name, "")
    assert named(invoke, *FLAGS, "--weights", model / "config.json") == (name, "")
    assert named(invoke, *FLAGS, "--weights", name) == (name, "")
    assert named(invoke, *FLAGS, "--weights", OTHER, "--draft-weights", model) == (OTHER, name)
    assert named(invoke, *FLAGS, "--weights", model, "--draft-weights", model) == (name, "")


def test_the_options_complete_a_profile_file(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(f'weights = "{OTHER}"\n' + TEXT)
    name = read_checkpoint(model).fingerprint
    assert named(invoke, "--profile", file) == (OTHER, "")
    assert named(invoke, "--profile", file, "--weights", model) == (name, "")
    assert named(invoke, "--profile", file, "--draft-weights", model) == (OTHER, name)
    assert named(invoke, "--profile", file, "--draft-weights", OTHER) == (OTHER, "")


def test_a_text_of_ones_own_is_kept_by_a_profile_file() -> None:
    profile = parse_profile(f'weights = "release 7"\ndraft_weights = "eagle"\n{TEXT}')
    assert (profile.weights, profile.draft_weights) == ("release 7", "eagle")
    assert parse_profile(dump_profile(profile)) == profile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weights", "missing"), "--weights: 'missing' is neither a model directory nor 32 hexa"),
        (("--weights", NAME.upper()), "is neither a model directory nor 32 hexadecimal digits"),
        (("--weights", NAME + "0"), "is neither a model directory nor 32 hexadecimal digits"),
        (("--draft-weights", "missing"), "--draft-weights: 'missing' is neither a model directory"),
        (("--draft-weights", NAME), "--draft-weights needs --weights"),
        (("--weights", "."), ": no config.json; give the directory of a model"),
    ],
)
def test_what_names_no_weights_is_refused(
    invoke: Invoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in invoke("profile", *FLAGS, *arguments, exit_code=2).stderr


def test_weights_without_a_profile_are_refused(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(2), "_m_0_2", "_m_1_2")
    for option in ("--weights", "--draft-weights"):
        said = invoke("ls", tmp_path, option, NAME, exit_code=2).stderr
        assert f"{option} needs a profile; give --profile" in said


@pytest.mark.parametrize(
    ("stamped", "now", "found"),
    [
        ({}, {}, []),
        ({}, {"weights": NAME}, []),
        ({"weights": NAME}, {}, []),
        ({"weights": NAME}, {"weights": NAME, "draft_weights": OTHER}, []),
        (
            {"weights": NAME},
            {"weights": OTHER},
            [f"weights: stamped '{NAME}', now '{OTHER}'"],
        ),
        (
            {"weights": NAME, "draft_weights": THIRD},
            {"weights": NAME, "draft_weights": OTHER},
            [f"draft_weights: stamped '{THIRD}', now '{OTHER}'"],
        ),
    ],
)
def test_weights_are_compared_with_the_stamp_where_both_know_them(
    invoke: Invoke, tmp_path: Path, stamped: dict[str, str], now: dict[str, str], found: list[str]
) -> None:
    store, file = tmp_path / "store", tmp_path / "p.toml"
    store.mkdir()
    put_pages(store, range(2), "_m_0_2", "_m_1_2")

    def verify(names: dict[str, str], *arguments: str, exit_code: int = 0) -> list[str]:
        file.write_text("".join(f'{n} = "{text}"\n' for n, text in names.items()) + TEXT)
        options = ("--profile", file, "--checks", "sizes", "--format", "json", "--fail-on", "error")
        document = invoke("verify", store, *options, *arguments, exit_code=exit_code).document
        return [row["detail"] for row in document["findings"] if row["code"] == "stamp-mismatch"]

    assert verify(stamped, "--stamp") == []
    assert verify(now, exit_code=4 if found else 0) == found
