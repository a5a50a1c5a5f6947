"""The plug-in's settings: defaults, values, and every refusal by key, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from hicachectl.backends.sglang.settings import Settings, parse_settings
from hicachectl.backends.urls import parse_url

LOADED_BY_SGLANG = {
    "backend_name": "hicachectl",
    "module_path": "hicachectl.backends.sglang",
    "class_name": "HiCacheStore",
    "interface_v1": 1,
}
FILES = "file:///mnt/hicache"
MOONCAKE = "mooncake://host:50051"


def settings(**keys: Any) -> Settings:
    return parse_settings({**LOADED_BY_SGLANG, "store": FILES, **keys})


def test_defaults_are_those_of_the_manual() -> None:
    assert settings() == Settings(
        stores=(parse_url(FILES),),
        digest="xxh3",
        identity="auto",
        unstamped="refuse",
        unranked="read",
        on_foreign="replace",
        op_timeout=5.0,
        threads=4,
        max_size=None,
        min_free_space=0,
        evict="owner",
        on_clear="own",
    )


def test_every_key_has_its_value() -> None:
    given = {
        "digest": "blake3",
        "identity": "step 4000",
        "unstamped": "read",
        "unranked": "refuse",
        "on_foreign": "leave",
        "op_timeout": 2,
        "threads": 8,
        "max_size": "1.5TB",
        "min_free_space": "200GiB",
        "evict": "this",
        "on_clear": "refuse",
    }
    found = settings(**given)
    sizes = {"max_size": 1_500_000_000_000, "min_free_space": 200 << 30}
    assert {name: getattr(found, name) for name in given} == {**given, **sizes}


def test_sizes_can_be_numbers() -> None:
    assert settings(max_size=1 << 40).max_size == 1 << 40


def test_keys_that_sglang_reads_are_left_alone() -> None:
    """As decode offload passes them: it does not remove what it reads itself."""
    read = {
        "allocator": "shm",
        "prefetch_threshold": 64,
        "prefetch_timeout_base": 1,
        "prefetch_timeout_per_ki_token": 0.25,
        "hicache_storage_pass_prefix_keys": True,
        "tp_lcm_size": 8,
    }
    assert settings(**read) == settings()


def test_stores_are_a_url_or_a_list_of_them() -> None:
    urls = [FILES, "pack:///data/warm.hcpack"]
    assert settings(store=urls).stores == tuple(map(parse_url, urls))
    assert settings(store="/mnt/hicache") == settings()


def test_packs_alone_are_only_read() -> None:
    packs = ["pack:///a.hcpack", "pack:///b.hcpack"]
    assert settings(store=packs).reads_only
    assert not settings(store=[FILES, *packs]).reads_only


@pytest.mark.parametrize("store", [MOONCAKE, "hf3fs:///path/prefix"])
def test_only_files_have_a_digest(store: str) -> None:
    assert settings(store=store).digest == "off"
    assert settings(store=store, digest="off").digest == "off"
    with pytest.raises(ValueError, match=r"digest: 'xxh3' has no room in a .* store; remove"):
        settings(store=store, digest="xxh3")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sotre": FILES}, r"'sotre' is not a key of hicachectl; known: digest, .*unstamped"),
        ({"store": None}, "store: None is not a store URL"),
        ({"store": []}, r"store: \[\] is not a store URL"),
        ({"store": [FILES, 3]}, "store: .* is not a store URL or a list"),
        ({"store": ["/mnt/hicache", FILES]}, "store: file:///mnt/hicache is given twice"),
        ({"store": "prod:"}, "store: 'prod:' names a store of a config file, which servers do not"),
        ({"store": "s3://bucket"}, "store: .*unknown store scheme 's3'"),
        ({"store": "file:///x?depth=2"}, "store: .*unknown parameter 'depth'"),
        (
            {"store": ["pack:///a.hcpack", FILES]},
            "store: pack:///a.hcpack cannot be written by a server; put file:///mnt/hicache first",
        ),
        (
            {"store": [FILES, "nixl:///mnt/nixl"]},
            "store: nixl:///mnt/nixl is no store that servers can use; migrate it to one of file, ",
        ),
        ({"store": "mooncake-ssd:///mnt/ssd"}, "store: .* is no store that servers can use"),
        ({"store": "pack:///a.hcpack", "max_size": 1}, "max_size: has no effect on a pack store"),
        ({"digest": "md5"}, "digest: 'md5' is not one of off, xxh3, blake3"),
        ({"digest": ["xxh3"]}, r"digest: \['xxh3'\] is not one of"),
        ({"identity": ""}, "identity: has 0 characters"),
        ({"identity": "a" * 201}, "identity: has 201 characters"),
        ({"identity": "a\n"}, "identity: .* is not printable text"),
        ({"identity": 7}, "identity: 7 is not printable text"),
        ({"unstamped": True}, "unstamped: True is not one of refuse, read"),
        ({"unranked": "serve"}, "unranked: 'serve' is not one of refuse, read"),
        ({"on_foreign": "keep"}, "on_foreign: 'keep' is not one of replace, leave"),
        (
            {"op_timeout": 0},
            "op_timeout: 0 is not a number in range; give more than 0 and at most 8",
        ),
        (
            {"op_timeout": 8.5},
            "op_timeout: 8.5 is not a number in range; give more than 0 and at most 8",
        ),
        ({"op_timeout": float("nan")}, "op_timeout: nan is not a number in range"),
        ({"op_timeout": "5"}, "op_timeout: '5' is not a number in range"),
        ({"op_timeout": True}, "op_timeout: True is not a number in range"),
        ({"threads": 0}, "threads: 0 is not a whole number from 1 to 64"),
        ({"threads": 65}, "threads: 65 is not a whole number from 1 to 64"),
        ({"threads": 2.5}, "threads: 2.5 is not a whole number"),
        ({"threads": True}, "threads: True is not a whole number"),
        ({"max_size": "200 GiBs"}, "max_size: '200 GiBs' is not a size; write 200GiB"),
        ({"max_size": 0}, "max_size: '0' is less than 1 bytes"),
        ({"max_size": True}, "max_size: 'True' is not a size"),
        ({"max_size": -1}, "max_size: '-1' is not a size"),
        ({"min_free_space": None}, "min_free_space: 'None' is not a size"),
        ({"evict": "all"}, "evict: 'all' is not one of owner, this"),
        ({"on_clear": "all"}, "on_clear: 'all' is not one of own, refuse"),
        ({"interface_v1": 0}, 'interface_v1: 0 makes SGLang copy each page; set "interface_v1"'),
        ({"store": MOONCAKE, "max_size": 1}, "max_size: has no effect on a mooncake store"),
        ({"store": MOONCAKE, "unstamped": "read"}, "unstamped: has no effect on a mooncake store"),
        (
            {"store": "pack:///mnt/a.hcpack", "unranked": "read"},
            "unranked: has no effect on a pack store",
        ),
        ({"store": [MOONCAKE, FILES], "evict": "this"}, "evict: has no effect on a mooncake"),
    ],
)
def test_refusals_name_key_and_value(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as refusal:
        settings(**keys)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("config", [None, {}, {"store": FILES}])
def test_interface_v1_is_required(config: dict[str, Any] | None) -> None:
    with pytest.raises(ValueError, match=r"^interface_v1: 0 .*set \"interface_v1\": 1$"):
        parse_settings(config)


def test_a_list_may_read_files_behind_another_store() -> None:
    assert settings(store=[MOONCAKE, FILES], unstamped="read").unstamped == "read"
    assert settings(store=[MOONCAKE, FILES], unranked="refuse").unranked == "refuse"
    assert settings(store=[MOONCAKE, "pack:///mnt/a.hcpack"], unstamped="read").unstamped == "read"


def test_no_message_shows_a_password() -> None:
    with pytest.raises(ValueError, match="unknown parameter") as refusal:
        settings(store="mooncake://user:hunter2@host:50051?token=hunter2")
    assert "hunter2" not in str(refusal.value)
