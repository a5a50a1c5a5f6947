"""Files and replies mutated by a seed give a result or one refusal, never a traceback."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.__main__ import run
from hicachectl.formats.errors import HicacheError
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.models.server_info import flags_from_server_info
from hicachectl.formats.profile import dump_profile, profile_from_mapping
from hicachectl.prewarming.through_server import dp_ranks
from hicachectl.profiles.server import told_pools
from tests.attack.test_hostile_servers import INFO, LAYOUT
from tests.stores import DSA, page, put_pages
from tests.tiny_tokenizers import make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
ROUNDS = 25
# Insertions into a text: the syntax of all formats, and values that a reader may not expect.
PIECES = [
    b"", b"\x00", b"\xff\xfe", b"\n", b'"', b"'", b"[", b"]", b"{", b"}", b",", b":", b"=", b".",
    b"\\ud800", b"\\u0000", b"\x1b[2J", "\u202e".encode(), b"null", b"true", b"NaN", b"1e9999",
    b"-1", b"0.5", b"9" * 30, b"9" * 5000, b"[" * 300, b'{"a":' * 300, b'"x" = 1\n', b"#",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1, 0.5, 10**9, 10**12, 2**63, 2**70, 10**4000, float("inf"), float("nan"),
    "", "x", "\ud800", "\x00", "../../x", "9" * 5000, [], [None], [1] * 50, {}, {"a": {}},
]  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Change some places of a text: flip, cut, repeat, insert."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(changed) + 1)
        end = min(len(changed), at + chance.choice([0, 1, 4, 50]))
        kind = chance.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del changed[at:end]
        elif kind == 2:
            changed[at:at] = changed[at:end] * chance.choice([1, 3])
        else:
            changed[at:end] = chance.choice(PIECES)
    return bytes(changed[: chance.choice([len(changed), len(changed), at])])


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every list or table of a document, with each index or key."""
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(inner):
        yield document, key
        if isinstance(value, (dict, list)):
            yield from places(value)


def deranged(document: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Put an unexpected value at some places of a document."""
    changed = copy.deepcopy(document)
    for _ in range(chance.choice([1, 1, 3])):
        outer, key = chance.choice([*places(changed)] or [(changed, "x")])
        outer[key] = copy.deepcopy(chance.choice(VALUES))
    return changed


class Scene:
    """A store, and every other file that a command reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        store, profile = directory / "store", directory / "profile.toml"
        store.mkdir()
        self.fill(store)
        profile.write_text(DSA)
        catalog = directory / "catalog.parquet"
        pack = directory / "store.hcpack"
        aside = store / ".hicachectl" / "quarantine"
        files = {
            "config.toml": f'[stores.prod]\nurl = "{store}"\n',
            "ids.jsonl": '{"token_ids": [1, 2, 3, 4, 5], "extra_key": "a"}\n[1, 2]\n',
            "prompts.jsonl": '{"messages": [{"role": "user", "content": "Hi"}]}\n"text"\n',
            "pages.jsonl": f'{page(0)}\n["{page(1)}"]\n{{"page": "{page(2)}"}}\n',
            "trace.jsonl": '{"timestamp": 1.5, "hash_ids": [1, 2], "input_length": 900}\n' * 3,
            "plan.jsonl": f'{{"page": "{page(0)}", "parent": null}}\n{{"page": "{page(1)}"}}\n',
            "mooncake.json": '{"master_server_address": "127.0.0.1:9", "protocol": "tcp"}',
            "hf3fs.json": '{"file_path_prefix": "/none/x", "file_size": 100, "numjobs": 1, '
            '"entries": 1, "metadata_server_url": "http://127.0.0.1:9"}',
        }
        for name, text in files.items():
            (directory / name).write_text(text)
        make_tokenizer(directory / "tokenizer", "qwen")
        cheap: tuple[object, ...] = (
            "-q", "verify", store, "--profile", profile, "--grace", "0s",
            "--checks", "names,groups,sizes,digests", "--catalog", catalog,
        )  # fmt: skip
        assert self.run(*cheap, "--update-catalog", "--stamp") == 0
        os.truncate(store / f"{page(0)}_x-dsa.bin", 10)
        assert self.run(*cheap, "--repair", "quarantine", "--yes") == 4
        self.fill(store)
        assert self.run("-q", "migrate", store, f"pack://{pack}") == 0
        (stamp,) = (store / ".hicachectl" / "stamps").iterdir()
        record = next(path for path in aside.rglob("*.json"))
        requests = ("hits", store, "--profile", profile, "--token-ids")
        asked = ("--profile", profile, "--tokenizer", directory / "tokenizer")
        self.calls: dict[str, tuple[Path, list[tuple[object, ...]]]] = {
            "profile": (profile, [("verify", store, "--profile", profile, "--grace", "0s")]),
            "config": self._call("config.toml", "--config", "FILE", "ls", "prod:"),
            "catalog": (catalog, [cheap]),
            "stamp": (stamp, [cheap, ("rm", store, "--model", "none", "--yes")]),
            "record": (
                record,
                [
                    ("restore", aside, store, "--dry-run"),
                    ("-q", "rm", store, "--model", "none", "--yes"),
                ],
            ),
            "pack": (
                pack,
                [("ls", f"pack://{pack}"), ("verify", f"pack://{pack}"), ("pack", "info", pack)],
            ),
            "token ids": self._call("ids.jsonl", *requests, "FILE"),
            "prompts": self._call("prompts.jsonl", "hits", store, *asked, "--prompts", "FILE"),
            "pages": self._call("pages.jsonl", "rm", store, "--pages", "FILE", "--dry-run"),
            "trace": self._call("trace.jsonl", "prewarm", "--dry-run", "--trace", "FILE"),
            "plan": self._call(
                "plan.jsonl", "prewarm", f"file://{directory / 'to'}", "--from", store,
                "--profile", profile, "--plan", "FILE",
            ),
            "mooncake": self._call("mooncake.json", "ls", "mooncake:"),
            "hf3fs": self._call("hf3fs.json", "ls", f"hf3fs:?config={directory / 'hf3fs.json'}"),
            "tokenizer": (
                directory / "tokenizer" / "tokenizer_config.json",
                [("hits", store, *asked, "--prompts", directory / "prompts.jsonl")],
            ),
        }  # fmt: skip

    def _call(self, name: str, *arguments: object) -> tuple[Path, list[tuple[object, ...]]]:
        path = self.directory / name
        return path, [tuple(path if word == "FILE" else word for word in arguments)]

    @staticmethod
    def fill(store: Path) -> None:
        put_pages(store, range(4), "_x-dsa", nbytes=9216)
        put_pages(store, range(4), ".indexer_x-dsa", nbytes=1056)

    @staticmethod
    def run(*arguments: object) -> int:
        return run([str(argument) for argument in arguments])


TARGETS = [
    "profile", "config", "catalog", "stamp", "record", "pack", "token ids", "prompts", "pages",
    "trace", "plan", "mooncake", "hf3fs", "tokenizer",
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_a_mutated_file_is_read_or_refused(
    target: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", os.fspath(tmp_path / "mooncake.json"))
    scene = Scene(tmp_path)
    path, calls = scene.calls[target]
    original = path.read_bytes()
    chance = random.Random(target)
    for turn in range(ROUNDS):
        path.write_bytes(mutated(original, chance) if turn else original)
        for call in calls:
            capfd.readouterr()
            status = scene.run(*call)
            said = capfd.readouterr()
            assert status in ((0, 3, 4) if not turn else (0, 2, 3, 4)), said
            assert status not in (2, 3) or said.err
            assert "\x1b" not in said.out + said.err
            assert "\u202e" not in said.out + said.err


def documents() -> list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], object]]]:
    flags = DeploymentFlags(model="m", page_size=64, tp=2)
    configs = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.iterdir())}
    models = [
        (name, config, lambda document: dump_profile(profile_from_config(document, flags)))
        for name, config in configs.items()
    ]
    own = profile_from_config(configs["qwen3-next-80b-a3b"], flags)
    profile = json.loads(json.dumps(_mapping(own)))
    return [
        *models,
        ("server_info", INFO, lambda info: (flags_from_server_info(info), dp_ranks(info))),
        ("layout", LAYOUT, told_pools),
        ("profile", profile, lambda document: dump_profile(profile_from_mapping(document))),
    ]


def _mapping(profile: Any) -> dict[str, Any]:
    from hicachectl.formats.profile import profile_to_mapping

    return profile_to_mapping(profile)


def _ids(value: object) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("name", "document", "read"), documents(), ids=_ids)
def test_a_deranged_document_is_read_or_refused(
    name: str, document: dict[str, Any], read: Callable[[dict[str, Any]], object]
) -> None:
    chance = random.Random(name)
    for _ in range(300):
        changed = deranged(document, chance)
        try:
            read(changed)
        except HicacheError:
            continue
