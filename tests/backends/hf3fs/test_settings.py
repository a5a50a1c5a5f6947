"""Tests of backends.hf3fs.settings: URLs, SGLang's JSON config, and contradictions."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicachectl.backends.hf3fs.settings import CONFIG_VARIABLE, Hf3fsSettings, settings_from
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import FormatError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

SERVER = "http://host:18000"
CONFIG = {
    "file_path_prefix": "/data/hicache",
    "file_size": 1 << 40,
    "numjobs": 16,
    "entries": 8,
    "metadata_server_url": f"{SERVER}/",
}


def settings_of(text: str, **environ: str) -> Hf3fsSettings:
    return settings_from(parse_url(text), environ)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Return a function that writes a config and returns its path."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "hf3fs.json"
        document = {**CONFIG, **changes}
        path.write_text(json.dumps({k: v for k, v in document.items() if v is not ...}))
        return path

    return write


def test_a_url_states_everything() -> None:
    found = settings_of(
        f"hf3fs:///data/hicache?server={SERVER}&snapshot=/s/meta.json&file_size=4096&ranks=8"
    )
    assert found == Hf3fsSettings(
        prefix="/data/hicache", server=SERVER, snapshot="/s/meta.json", file_size=4096, ranks=8
    )


def test_files_are_named_as_sglang_names_them() -> None:
    found = Hf3fsSettings(prefix="/data/hicache")
    assert found.data_file(0, "kv") == "/data/hicache.0.bin"
    assert found.data_file(3, "mamba") == "/data/hicache.3.bin.mamba"


def test_sglangs_config_leads_to_the_same_settings(config: Any) -> None:
    wanted = settings_of(f"hf3fs:///data/hicache?server={SERVER}&file_size={1 << 40}")
    path = config()
    assert settings_of(f"hf3fs:?config={path}") == wanted
    assert settings_of("hf3fs:", **{CONFIG_VARIABLE: str(path)}) == wanted
    # With a config, the path is ignored.
    assert settings_of(f"hf3fs:///elsewhere?config={path}") == wanted


def test_a_url_with_a_path_does_not_look_at_the_environment() -> None:
    found = settings_of(
        f"hf3fs:///data/other?server={SERVER}", **{CONFIG_VARIABLE: "/no/such/file"}
    )
    assert found.prefix == "/data/other"


def test_a_config_with_local_metadata_needs_a_snapshot_of_somebodys(config: Any) -> None:
    for none in (..., None, ""):
        path = config(metadata_server_url=none)
        with pytest.raises(UsageError, match="in its own process"):
            settings_of(f"hf3fs:?config={path}")
        assert settings_of(f"hf3fs:?config={path}&snapshot=/s/meta.json").server is None


def test_what_is_stated_twice_must_agree(config: Any) -> None:
    path = config()
    assert settings_of(f"hf3fs:?config={path}&server={SERVER}&file_size={1 << 40}").server == SERVER
    with pytest.raises(UsageError, match=r"server=.* contradicts .*metadata_server_url"):
        settings_of(f"hf3fs:?config={path}&server=http://other:18000")
    with pytest.raises(UsageError, match=r"file_size=4096 contradicts .*file_size 10995"):
        settings_of(f"hf3fs:?config={path}&file_size=4096")


def test_a_relative_snapshot_is_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = settings_of("hf3fs:///data/hicache?snapshot=meta.json")
    assert found.snapshot == str(tmp_path / "meta.json")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hf3fs:", CONFIG_VARIABLE),
        (f"hf3fs:?server={SERVER}", CONFIG_VARIABLE),
        (f"hf3fs:///?server={SERVER}", "'/' is not a prefix"),
        (f"hf3fs:///data/?server={SERVER}", "'/data/' is not a prefix"),
        ("hf3fs:///data/hicache", "in its own process"),
        ("hf3fs:///data/hicache?server=", "server"),
        ("hf3fs:///data/hicache?server=host:18000", "server"),
        ("hf3fs:///data/hicache?server=ftp://host", "server"),
        ("hf3fs:///data/hicache?server=https://host", "write http://"),
        ("hf3fs:///data/hicache?server=http://host:99999", "server"),
        ("hf3fs:///data/hicache?server=http://host:x", "server"),
        ("hf3fs:///data/hicache?server=http://host:0", "server"),
        ("hf3fs:///data/hicache?server=http://[::1", "server"),
        ("hf3fs:///data/hicache?server=http://host/%3Fa=b", "server"),
        ("hf3fs:///data/hicache?server=http://user:pass@host", "password"),
        ("hf3fs:///data/hicache?snapshot=", "snapshot"),
        (
            f"hf3fs:///data/hicache?server={SERVER}&file_size=0",
            "'0' is not a size in bytes; give 1 to 92",
        ),
        (
            f"hf3fs:///data/hicache?server={SERVER}&file_size=1GB",
            "'1GB' is not a .*; give 1 to",
        ),
        (
            f"hf3fs:///data/hicache?server={SERVER}&file_size=1e9",
            "file_size: '1e9' is not a size in bytes; give 1 to 92",
        ),
        (f"hf3fs:///data/hicache?server={SERVER}&ranks=8.0", "'8.0' is not a number of ranks"),
        (f"hf3fs:///data/hicache?server={SERVER}&file_size={1 << 63}", "file_size"),
        (f"hf3fs:///data/hicache?server={SERVER}&file_size={'9' * 5000}", "file_size"),
        (
            f"hf3fs:///data/hicache?server={SERVER}&ranks=0",
            "ranks: '0' is not a number of ranks",
        ),
        (f"hf3fs:///data/hicache?server={SERVER}&ranks=٣", "ranks"),
        (f"hf3fs:///data/hicache?server={SERVER}&ranks=-1", "ranks"),
        (f"hf3fs:///data/hicache?server={SERVER}&pool=kv", "unknown parameter 'pool'"),
        ("hf3fs://host/data/hicache", "no host"),
        ("hf3fs:?config=/no/such/file", "No such file"),
        ("hf3fs:?config=/dev/null", "not a regular file"),
    ],
)
def test_a_url_that_cannot_be_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named.replace("(", r"\(")):
        settings_of(text)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"file_path_prefix": ...}, "field 'file_path_prefix' is missing"),
        ({"numjobs": ..., "entries": ...}, "field 'numjobs' is missing; field 'entries' is"),
        ({"prefix": "/x"}, "unknown field 'prefix'"),
        ({"file_path_prefix": 1}, "file_path_prefix: expected str, found 1"),
        ({"file_path_prefix": "data/hicache"}, "absolute"),
        ({"file_path_prefix": "/data/\ud800"}, "not a prefix"),
        ({"file_path_prefix": "/data/\0"}, "not a prefix"),
        ({"file_size": True}, "file_size: expected int or float or str, found True"),
        ({"file_size": 0}, "file_size: 0 is not a size in bytes; give 1 to 92"),
        ({"file_size": 1.5}, "file_size: 1.5 is not a size in bytes; give 1 to"),
        ({"file_size": 1 << 63}, "file_size"),
        ({"file_size": "1 TB"}, "file_size"),
        ({"file_size": None}, "file_size: .*found None"),
        ({"metadata_server_url": 18000}, "metadata_server_url: expected str, found 18000"),
        ({"metadata_server_url": "host:18000"}, "metadata_server_url"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(
    config: Any, changes: dict[str, Any], named: str
) -> None:
    path = config(**changes)
    with pytest.raises(FormatError, match=named) as caught:
        settings_of(f"hf3fs:?config={path}")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [1 << 40, float(1 << 40), str(1 << 40)])
def test_a_file_size_is_what_pythons_int_takes(config: Any, size: Any) -> None:
    assert settings_of(f"hf3fs:?config={config(file_size=size)}").file_size == 1 << 40


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"NaN"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(FormatError, match=r"bad\.json"):
        settings_of(f"hf3fs:?config={path}")


def test_a_huge_config_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(FormatError, match="larger than"):
        settings_of(f"hf3fs:?config={path}")


# No lone high surrogates; low surrogates stand for bytes that are not UTF-8.
NAMES = st.text(
    st.characters(exclude_characters="\0/", exclude_categories=["Cs"])
    | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    min_size=1,
    max_size=20,
).filter(
    lambda text: text.encode(errors="surrogateescape").decode(errors="surrogateescape") == text
)


@given(
    prefix=NAMES,
    snapshot=st.none() | NAMES.filter(lambda name: name not in (".", "..")),
    file_size=st.none() | st.integers(1, (1 << 63) - 1),
    ranks=st.none() | st.integers(1, 4096),
)
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_settings_written_as_a_url_lead_to_equal_settings(
    prefix: str, snapshot: str | None, file_size: int | None, ranks: int | None
) -> None:
    wanted = Hf3fsSettings(
        prefix=f"/data/{prefix}",
        server=SERVER,
        snapshot=None if snapshot is None else f"/s/{snapshot}",
        file_size=file_size,
        ranks=ranks,
    )
    assert settings_of(str(wanted)) == wanted
