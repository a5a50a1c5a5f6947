"""Untrusted TOML, JSON and endless files are refused in one line, within time and memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.attack.children import Ended, attacked
from tests.backends.pack.pack_files import INDEX, header, index, metadata, record, trailer
from tests.stores import DSA, page, put_pages
from tests.tiny_tokenizers import make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
MODEL = CONFIGS / "qwen3-32b.json"
LONG_KEY = ".".join(["a"] * 50_000)
TOML = {
    "a key of 50,000 parts": f"{LONG_KEY} = 1",
    "a quoted key of 50,000 parts": LONG_KEY.replace("a", '"a"') + " = 1",
    "a spaced key of 50,000 parts": LONG_KEY.replace(".", " . ") + " = 1",
    "a table of 50,000 parts": f"[{LONG_KEY}]",
    "10,000 tables of 1,000 parts": "\n".join(
        f"[{'.'.join(['a'] * 50)}.a{n}]" for n in range(20_000)
    ),
    "600,000 tables": "\n".join(f"[{n:x}]" for n in range(600_000)),
    "300,000 tables of a list": "[[a]]\n" * 300_000,
    "700,000 keys": "\n".join(f"{n:x}=1" for n in range(700_000)),
    "a long key in an inline table": f"a = {{ {LONG_KEY} = 1 }}",
    "inline tables in one another": "a = " + "{a=" * 50_000 + "1" + "}" * 50_000,
    "lists in one another": "a = " + "[" * 50_000 + "]" * 50_000,
    "a million lists": "a = [" + "[]," * 1_000_000 + "]",
    "a number of many digits": "a = " + "9" * 10_000,
    "an unterminated text": 'a = "' + "a.a=[" * 500_000,
    "an unterminated long text": 'a = """' + "a.a=[" * 500_000,
    "a key said twice": "tp = 1\ntp = 2",
}
JSON = {
    "lists in one another": '{"tp": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "lists in one another, few": '{"tp": ' + "[" * 90 + "]" * 90 + "}",
    "tables in one another": '{"a": ' * 200_000 + "1" + "}" * 200_000,
    "five million lists": '{"tp": [' + "[]," * 5_000_000 + "[]]}",
    "a number of many digits": '{"tp": ' + "9" * 10_000 + "}",
    "a number that is infinite": '{"tp": 1e9999}',
    "a number that is none": '{"tp": NaN}',
    "half a character": '{"model": "\\ud800"}',
    "no end": '{"model": "',
    "a member said twice": '{"model": "a", "tp": 1, "tp": 2, "pools": []}',
}


@pytest.mark.parametrize("name", TOML)
def test_hostile_toml_is_refused_as_profile_and_config(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.toml"
    path.write_text(TOML[name])
    assert str(path) in attacked("profile", "--profile", path).refusal
    assert str(path) in attacked("--config", path, "ls", "prod:").refusal


@pytest.mark.parametrize("name", JSON)
def test_hostile_json_is_refused_as_profile_and_model_config(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.json"
    path.write_text(JSON[name])
    assert str(path) in attacked("profile", "--profile", path).refusal
    flags = ("--served-model-name", "m", "--page-size", 1)
    assert str(path) in attacked("profile", "--model-config", path, *flags).refusal


@pytest.mark.parametrize("name", ["a key of 50,000 parts", "600,000 tables"])
def test_a_pack_may_carry_a_hostile_profile(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.hcpack"
    front = header() + metadata(profile=TOML[name])
    listing = record(INDEX, b"", index([], profile=TOML[name]))
    path.write_bytes(front + listing + trailer(len(front), len(listing)))
    for command in (("ls",), ("verify", "--checks", "names"), ("pack", "info")):
        found = attacked(*command, path if command[0] == "pack" else f"pack://{path}")
        assert found.status in (2, 3)
        assert str(path) in found.stderr


OPTIONS: dict[str, Callable[[Path], list[object]]] = {
    "--config": lambda path: ["--config", path, "ls", "prod:"],
    "--profile": lambda path: ["profile", "--profile", path],
    "--model-config": lambda path: ["profile", "--model-config", path, "--page-size", 1],
    "--pages": lambda path: ["rm", "STORE", "--pages", path, "--dry-run"],
    "--token-ids": lambda path: ["hits", "STORE", "--token-ids", path, "--profile", "PROFILE"],
    "--trace": lambda path: ["prewarm", "--trace", path, "--dry-run"],
    "--plan": lambda path: [
        "prewarm",
        "STORE",
        "--from",
        "STORE",
        "--profile",
        "PROFILE",
        "--plan",
        path,
    ],
    "--prompts": lambda path: [
        "hits",
        "STORE",
        "--profile",
        "PROFILE",
        "--tokenizer",
        "TOKENIZER",
        "--prompts",
        path,
    ],
    "--draft-model-config": lambda path: [
        "profile",
        "--model-config",
        MODEL,
        "--page-size",
        1,
        "--draft-model-config",
        path,
    ],
    "--catalog": lambda path: ["verify", "STORE", "--catalog", path],
    "mooncake": lambda path: ["ls", "mooncake:"],
    "hf3fs": lambda path: ["ls", f"hf3fs:?config={path}"],
    "snapshot": lambda path: ["ls", f"hf3fs:///none?ranks=1&snapshot={path}"],
    "metrics": lambda path: ["verify", "STORE", "--profile", "PROFILE", "--metrics-file", path],
    "pack": lambda path: ["ls", f"pack://{path}"],
}


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "metrics"])
def test_an_endless_file_is_refused(option: str, tmp_path: Path) -> None:
    found = _given(option, Path("/dev/zero"), tmp_path)
    assert found.status in (2, 3)
    assert not found.stdout
    assert "/dev/zero" in found.stderr


def test_the_config_of_the_environment_may_be_endless(tmp_path: Path) -> None:
    assert (
        "/dev/zero" in attacked("ls", "prod:", variables={"HICACHECTL_CONFIG": "/dev/zero"}).refusal
    )


@pytest.mark.parametrize("option", ["--config", "--profile", "--pages", "--token-ids", "--trace"])
def test_a_pipe_serves_where_a_file_does(option: str, tmp_path: Path) -> None:
    contents = {
        "--config": f'[stores.prod]\nurl = "{tmp_path / "store"}"',
        "--profile": DSA,
        "--pages": f"{page(0)}\n",
        "--token-ids": "[1, 2, 3, 4]\n",
        "--trace": '{"timestamp": 1, "hash_ids": [1, 2]}\n',
    }
    reader, writer = os.pipe()
    os.write(writer, contents[option].encode())
    os.close(writer)
    try:
        found = _given(option, Path(f"/dev/fd/{reader}"), tmp_path, pass_fds=(reader,))
    finally:
        os.close(reader)
    assert found.status == 0, found
    assert found.stdout


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["zeros", "fifo", "sparse", "deep"])
def test_a_tokenizer_may_be_hostile(name: str, kind: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"Hello"\n')
    path = make_tokenizer(tmp_path / "tokenizer", "qwen") / name
    path.unlink()
    if kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_text('{"a":' * 100_000)
        os.truncate(path, 1 << 40 if kind == "sparse" else 500_000)
    found = _given("--prompts", prompts, tmp_path)
    assert str(path.parent) in found.refusal


def test_metrics_may_replace_what_is_endless(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.symlink_to("/dev/zero")
    found = _given("metrics", path, tmp_path)
    assert found.status == 4
    assert path.is_char_device()


def _given(option: str, path: Path, tmp_path: Path, pass_fds: tuple[int, ...] = ()) -> Ended:
    store, profile = tmp_path / "store", tmp_path / "profile.toml"
    store.mkdir()
    put_pages(store, range(2), "_x-dsa")
    profile.write_text(DSA)
    places = {"STORE": store, "PROFILE": profile, "TOKENIZER": tmp_path / "tokenizer"}
    if option == "--prompts" and not (tmp_path / "tokenizer").exists():
        make_tokenizer(tmp_path / "tokenizer", "qwen")
    variables = {"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": str(path)}
    arguments = [places.get(str(word), word) for word in OPTIONS[option](path)]
    return attacked(*arguments, variables=variables, pass_fds=pass_fds)


@pytest.mark.parametrize(
    "content", ["[" + "[]," * 40_000_000, '{"a":' * 1_000_000], ids=["long", "deep"]
)
def test_a_record_of_a_quarantine_may_be_hostile(content: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    run = store / ".hicachectl" / "quarantine" / "20260101T000000Z-abcdef"
    run.mkdir(parents=True)
    put_pages(store, range(2), "_m_0_1")
    side = run / ".hicachectl"
    side.mkdir()
    path = side / "run.json"
    path.write_text(content)
    found = attacked("restore", run.parent, store, "--dry-run")
    assert found.status in (2, 3)
    assert str(path) in found.stderr
