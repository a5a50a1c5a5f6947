"""Tests of backends.urls."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends import urls
from hicachectl.backends.base import Store, open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.urls import (
    Config,
    NamedStore,
    Params,
    Scheme,
    StoreUrl,
    default_file_directory,
    load_config,
    named_store,
    parse_config,
    parse_url,
    register_scheme,
    without_secrets,
    written_store,
)
from hicachectl.formats.errors import FormatError, StoreUnavailable, UsageError
from tests.skips import need_module

OK = '[stores.prod]\nurl = "/data"\n'


class ExampleParams(Params, frozen=True, kw_only=True):
    admin: str | None = None
    metadata: str | None = None
    device: str | None = None


EXAMPLE = Scheme("nowhere:Nothing", ExampleParams, host=True)


@pytest.fixture
def example_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(urls.SCHEMES, "example", EXAMPLE)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/data/hicache", "/data/hicache"),
        ("/data/a:b?c=d#e%20", "/data/a:b?c=d#e%20"),
        ("file:///data/hicache", "/data/hicache"),
        ("file:/data/hicache", "/data/hicache"),
        ("file://localhost/data", "/data"),
        ("file:///a%20b%3Fc", "/a b?c"),
        ("file:///a+b", "/a+b"),
        ("file:///%ff", "/\udcff"),
    ],
)
def test_a_directory_and_its_url(text: str, path: str) -> None:
    assert parse_url(text) == StoreUrl("file", path)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("/backup/a.hcpack", StoreUrl("pack", "/backup/a.hcpack")),
        ("/100%/a.hcpack", StoreUrl("pack", "/100%/a.hcpack")),
        ("/backup/a.hcpack/", StoreUrl("file", "/backup/a.hcpack")),
        ("file:///backup/a.hcpack", StoreUrl("file", "/backup/a.hcpack")),
        ("/a.hcpack/store", StoreUrl("file", "/a.hcpack/store")),
        ("saved:", StoreUrl("pack", "/backup/a.hcpack")),
    ],
)
def test_a_path_that_ends_in_hcpack_is_a_pack(text: str, url: StoreUrl) -> None:
    config = Config({"saved": NamedStore("/backup/a.hcpack")})
    assert parse_url(text, config) == url
    assert parse_url(str(url)) == url


def test_a_relative_directory_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_url("cache").path == str(tmp_path / "cache")
    assert parse_url("./a:b").path == str(tmp_path / "a:b")


def test_an_empty_file_url_is_the_directory_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)
    assert parse_url("file:").path == "/tmp/hicache"
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/srv/kv")
    assert parse_url("file:").path == parse_url("file://").path == "/srv/kv"
    assert default_file_directory({"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": ""}) == "/tmp/hicache"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("file:cache", r"absolute, as in file:///.*cache"),
        ("file://data/hicache", r"no host; write file:///data/hicache"),
        ("file:///d?size=1", r"unknown parameter 'size'; known: folders"),
        ("file:///d?", None),
        ("file:///d%zz", r"'%zz' is not a percent escape"),
        ("file:///d%00", "zero byte; leave it out"),
        ("/d\0", "zero byte; leave it out"),
        ("redis://host/0", r"unknown store scheme 'redis'; known: .*file"),
        (
            "prod:",
            r"^No store 'prod' in the config file, by default ~/.config/hicachectl/config.toml "
            r"\(it names none\); define it there with two lines, \[stores\.prod\] and "
            r'url = "file:///DIR"; .*schemes: .*file',
        ),
        ("a:b", r"with a colon as \./a:b"),
        (":", "No store ''"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(text: str, message: str | None) -> None:
    if message is None:
        parse_url(text)
        return
    with pytest.raises(UsageError, match=message):
        parse_url(text)


@pytest.mark.usefixtures("example_scheme")
def test_hosts_and_parameters_are_decoded() -> None:
    url = parse_url("example://h:50051?metadata=http%3A%2F%2Fm%3A80/x%26y&device=&admin=a+b")
    params = {"metadata": "http://m:80/x&y", "device": "", "admin": "a+b"}
    assert url == StoreUrl("example", "", "h:50051", params)


@pytest.mark.usefixtures("example_scheme")
@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("admin=1&admin=2", "parameter 'admin' is given twice; give it once"),
        ("admin", "parameter 'admin' has no value"),
        ("admn=1", "unknown parameter 'admn'; known: admin, device, metadata"),
        ("admin=1&", "unknown parameter ''"),
        ("ADMIN=1", "unknown parameter 'ADMIN'"),
    ],
)
def test_parameters_are_refused_by_name(query: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_url(f"example://h?{query}")


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
)
def test_a_url_reads_back_to_an_equal_value(path: str, value: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(urls.SCHEMES, "example", EXAMPLE)
        url = StoreUrl("example", "/" + path, "host:1", {"admin": value})
        assert parse_url(str(url)) == url


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse_url(text)


def test_named_stores_resolve_one_another() -> None:
    config = parse_config(
        '[stores.prod]\nurl = "file:///srv"\n[stores.main]\nurl = "prod:"\n'
        '[stores.plain]\nurl = "/data"\n'
    )
    assert parse_url("main:", config).path == "/srv"
    assert parse_url("plain:", config).path == "/data"


def test_a_named_store_has_the_paths_of_its_own_and_then_of_the_one_that_it_names() -> None:
    config = parse_config(
        '[stores.prod]\nurl = "/srv"\nprofile = "prod.toml"\nlock = "/run/l"\n'
        '[stores.main]\nurl = "prod:"\nlock = "main.lock"\n',
        directory="/etc/hicache",
    )
    assert named_store("main:", config) == NamedStore(
        "/srv", profile=Path("/etc/hicache/prod.toml"), lock=Path("/etc/hicache/main.lock")
    )
    for text in ("none:", "/srv", "main:/sub", "file:///srv", ""):
        assert named_store(text, config) is None


def test_named_stores_that_go_in_circles_are_refused() -> None:
    config = parse_config('[stores.a]\nurl = "b:"\n[stores.b]\nurl = "a:"\n', source="c.toml")
    with pytest.raises(UsageError, match=r"c\.toml.*a -> b -> a; give one of them"):
        parse_url("a:", config)


def test_nothing_follows_a_named_store() -> None:
    config = Config({"prod": NamedStore("/srv")})
    with pytest.raises(UsageError, match="remove the text after its colon"):
        parse_url("prod:/sub", config)


def test_a_named_directory_must_be_absolute() -> None:
    with pytest.raises(UsageError, match=r"'srv': .* must be absolute, as in file:///.*/srv$"):
        parse_url("prod:", Config({"prod": NamedStore("srv")}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[store.prod]\nurl = '/a'", "unknown key 'store'; known: stores"),
        ("[stores.prod]\nurl = '/a'\nuri = '/b'", "stores.prod: unknown key 'uri'; known: .*url"),
        ("[stores.prod]\n", "stores.prod: url: expected a store URL as text; write url ="),
        ("[stores.prod]\nurl = 3", "stores.prod: url: expected a store URL as text; write url ="),
        (
            "[stores.prod]\nurl = '/a'\nlock = 3",
            "stores.prod: lock: 3 is not the path of a file; give",
        ),
        ("[stores.prod]\nurl = '/a'\ncatalog = ''", "stores.prod: catalog: '' is not .*; give one"),
        ("[stores.prod]\nurl = '/a'\nprofile = 'http://h/p'", "stores.prod: profile: 'http://h/p'"),
        ("stores = 3", r"config: stores: expected tables; write \[stores.NAME\]"),
        ("stores.prod = 3", "stores.prod: expected a table; write url ="),
        ("[stores.'a/b']\nurl = '/a'", "stores.a/b: .*; rename it"),
        ("[stores.file]\nurl = '/a'", "stores.file: .* URL scheme; rename it"),
        ("[stores", r"config: not TOML: .*; write \[stores.NAME\]"),
    ],
)
def test_a_bad_config_names_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_config(text)


def test_the_config_is_looked_for_in_order(tmp_path: Path) -> None:
    def written(name: str) -> str:
        path = tmp_path / name / "hicachectl" / "config.toml"
        path.parent.mkdir(parents=True)
        path.write_text(f"[stores.here]\nurl = '/{name}'\n")
        return str(path)

    asked, variable = written("asked"), written("variable")
    written("xdg")
    written("home/.config")
    environ = {"HOME": str(tmp_path / "home")}
    assert load_config(None, environ).stores == {"here": NamedStore("/home/.config")}
    environ["XDG_CONFIG_HOME"] = "relative"
    assert load_config(None, environ).stores == {"here": NamedStore("/home/.config")}
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    assert load_config(None, environ).stores == {"here": NamedStore("/xdg")}
    environ["HICACHECTL_CONFIG"] = variable
    assert load_config(None, environ).stores == {"here": NamedStore("/variable")}
    assert load_config(asked, environ).stores == {"here": NamedStore("/asked")}
    assert load_config(asked, environ).source == asked


def test_a_config_is_needed_only_when_asked_for(tmp_path: Path) -> None:
    nobody = {"HOME": str(tmp_path)}
    assert load_config(None, nobody) == Config()
    for asked in (load_config, lambda p: load_config(None, {**nobody, "HICACHECTL_CONFIG": p})):
        with pytest.raises(UsageError, match=r"missing\.toml: cannot read: No such file"):
            asked(str(tmp_path / "missing.toml"))
    (tmp_path / "latin.toml").write_bytes(b"\xff")
    with pytest.raises(FormatError, match="UTF-8"):
        load_config(str(tmp_path / "latin.toml"), nobody)


def test_open_store_opens_what_is_named(tmp_path: Path) -> None:
    with open_store("here:", config=Config({"here": NamedStore(str(tmp_path))})) as store:
        assert isinstance(store, FileStore)
        assert parse_url(store.url).path == str(tmp_path)
    with pytest.raises(StoreUnavailable, match="nothing-here: cannot use the store: No such file"):
        open_store(f"file://{tmp_path}/nothing-here")


def test_every_scheme_has_its_class() -> None:
    for name, scheme in urls.SCHEMES.items():
        module, _, cls = scheme.target.partition(":")
        need_module(module)
        assert issubclass(getattr(sys.modules[module], cls), Store), name


@pytest.fixture
def _schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "SCHEMES", dict(urls.SCHEMES))


@pytest.mark.usefixtures("_schemes")
def test_a_registered_scheme_is_parsed_and_named_among_the_known() -> None:
    for _ in range(2):  # registering again changes nothing
        register_scheme("our-own+1", EXAMPLE)
    assert parse_url("our-own+1://h/d?admin=1") == StoreUrl("our-own+1", "/d", "h", {"admin": "1"})
    with pytest.raises(UsageError, match=r"known: .*our-own\+1"):
        parse_url("redis://host")


@pytest.mark.usefixtures("_schemes")
@pytest.mark.parametrize("name", ["file", "", "Tar", "a:b", "a/b", "1a", "a_b"])
def test_a_scheme_that_cannot_be_registered_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name or "not a URL scheme"):
        register_scheme(name, EXAMPLE)


@pytest.mark.slow
def test_parsing_needs_neither_pyarrow_nor_numpy() -> None:
    code = (
        "import sys; from hicachectl.backends.urls import parse_url; parse_url('file:///d');"
        "print({'pyarrow', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(OK, encoding="utf-8-sig")
    assert load_config(str(path)).stores == {"prod": NamedStore("/data")}


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "9" * 5000])
def test_what_the_parser_cannot_take_is_a_format_error(text: str) -> None:
    with pytest.raises(FormatError, match=r"not TOML|100001 keys"):
        parse_config(text)


def test_a_user_config_that_cannot_be_seen_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_file", refuse)
    assert load_config(environ={"HOME": str(tmp_path)}) == Config()


def test_a_user_without_a_home_has_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", refuse)
    assert load_config(environ={}) == Config()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:hunter2@host:80/x", "http://***@host:80/x"),
        ("redis://hunter2@r:6379", "redis://***@r:6379"),
        ("http://user:hun/hunter2@host", "http://***@host"),
        ("http://u:p@hunter2@h", "http://***@h"),
        ("http://u:p%40hunter2@h", "http://***@h"),
        ("http://u:hunter2?x@h", "http://***@h"),
        ("http://u:p'hunter2@h", "http://***@h"),
        ("HTTP://u:hunter2@h", "HTTP://***@h"),
        ("//user:hunter2@host", "//***@host"),
        ("user:hunter2@host:30000", "***@host:30000"),
        ("etcd://root:hunter2@h1:2379,h2:2379", "etcd://***@h1:2379,h2:2379"),
        ("mooncake://u:hunter2@m:1?admin=h:2", "mooncake://***@m:1?admin=h:2"),
        ("mooncake://m:1?admin=u:hunter2@h", "mooncake://m:1?admin=***@h"),
        ("mooncake://m:1?metadata=hunter2@r:6379", "mooncake://m:1?metadata=***@r:6379"),
        ("mooncake://m:1?metadata=hunter2%40r:6379", "mooncake://m:1?metadata=***%40r:6379"),
        (
            "mooncake://m:50051?metadata=http://u:hunter2@h:80/a",
            "mooncake://m:50051?metadata=http://***@h:80/a",
        ),
        (
            "mooncake://m:1?metadata=http%3A%2F%2Fu%3Ahunter2%40h&protocol=tcp",
            "mooncake://m:1?metadata=http%3A%2F%2F***%40h&protocol=tcp",
        ),
        ("http://h/?access_token=hunter2&x=1", "http://h/?access_token=***&x=1"),
        ("http://h/?x=1&Api-Key=hunter2", "http://h/?x=1&Api-Key=***"),
        (
            "mooncake://m:1?metadata=http%3a%2f%2fh%3fpassword%3dhunter2%26y=1",
            "mooncake://m:1?metadata=http%3a%2f%2fh%3fpassword%3d***%26y=1",
        ),
        ("http://h/p#token=hunter2", "http://h/p#token=***"),
        ("cannot open 'http://u:hunter2@h': no", "cannot open 'http://***@h': no"),
        ("Authorization: Bearer hunter2", "Authorization: Bearer ***"),
        ('-H "Authorization: Bearer $ADMIN_KEYhunter2" x', '-H "Authorization: Bearer ***" x'),
        ("a://a://u:hunter2@h", "a://***@h"),
        ("a://h:1/b://u:hunter2@h", "a://h:1/b://***@h"),
        ("a://x:y/b://u:hunter2@h", "a://***@h"),
        ("/(a(u:hunter2@h,u:hunter2@i", "/(***@h,***@i"),
        ("?a?b;token=hunter2&=hunter2@h", "?a?b;token=***&=***@h"),
        ("?keys=file?key=hunter2", "?keys=file?key=***"),
    ],
)
def test_no_secret_of_a_url_is_shown(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(f"one {text} two") == f"one {shown} two"


@pytest.mark.parametrize(
    "text",
    [
        'curl -H "Authorization: Bearer $ADMIN_KEY" http://h:80/flush_cache',
        "file:///x@y/z",
        "hf3fs:///a/b@c?server=http://h:1&snapshot=/s",
        "/a/b:c@d/e",
        "pack:///a?keys=file",
        "http://h:80/p@x",
        "mooncake://m:50051?admin=h:9003&protocol=tcp",
        "No store 'prod' in /etc/c.toml; write a directory with a colon as ./prod:x",
        "3:namespace:key, 12:30",
    ],
)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    ("backend", "extra", "environ", "store"),
    [
        ("file", {}, {}, "file:///tmp/hicache"),
        ("file", {"file_storage_path": "/a"}, {}, "file:///a"),
        (
            "file",
            {"file_storage_path": "/a"},
            {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "/b"},
            "file:///b",
        ),
        ("nixl", {}, {"SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": "/a,/b"}, "nixl:///a,/b"),
        ("mooncake", {"master_server_address": "mc:1"}, {}, "mooncake://mc:1"),
        ("mooncake", {}, {"MOONCAKE_MASTER": "mc:2"}, "mooncake://mc:2"),
        (
            "mooncake",
            {},
            {"MOONCAKE_MASTER": "mc:2", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": "/c"},
            "mooncake://",
        ),
        ("hf3fs", {}, {}, "hf3fs://"),
        ("dynamic", {"store": ["mooncake://mc:3", "file:///a"]}, {}, "mooncake://mc:3"),
        ("dynamic", {}, {}, "None"),
        ("lmcache", {}, {}, "None"),
    ],
)
def test_settings_name_the_store_that_a_server_writes(
    backend: str, extra: dict[str, Any], environ: dict[str, str], store: str
) -> None:
    """The environment wins for files, the extra config for Mooncake, as in SGLang's classes."""
    assert str(written_store(backend, extra, environ)) == store
