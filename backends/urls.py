"""Store URLs and the config file. `backends.base` opens the store that a URL names.

    /some/directory                       plain directory: SGLang's file backend
    /some/archive.hcpack                  pack
    /some/archive.hcpack/                 plain directory
    file:///some/directory                plain directory
    file:                                 SGLang's default directory
    file:///some/directory?folders=hex2   plain directory, which gets folders if it is new or empty
    prod:                                 [stores.prod] of the config file
    scheme://host/path?name=value         percent-encoded; see SCHEMES

Parsing imports no slow modules.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from hicachectl.formats.documents import decoded, shown
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.objects import MAX_RANKS
from hicachectl.formats.quarantine import RUN_FILE, SIDE
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Mapping


MAX_FILE_SIZE = (1 << 63) - 1

_BYTES = f"a size in bytes; give 1 to {MAX_FILE_SIZE}"
_RANKS = f"a number of ranks; give 1 to {MAX_RANKS}"
_PERCENTAGE = "a percentage above 0; give one such as 80"


class Params(Struct, frozen=True, kw_only=True):
    """Parameters of a URL as typed fields, which `params_of` reads.

    The description of a type completes the message `NAME: VALUE is not …`.
    """


class FileParams(Params, frozen=True, kw_only=True):
    """Parameters of `file` URLs.

    folders: form of the folders that a new or empty directory gets.
    """

    folders: Literal["hex2"] | None = None


class Hf3fsParams(Params, frozen=True, kw_only=True):
    """Parameters of `hf3fs` URLs, which become `Hf3fsSettings`.

    config: file with SGLang's settings.
    file_size: bytes of each data file.
    ranks: number of ranks to use.
    server: URL of the metadata server.
    snapshot: file that the metadata server saves its tables to.
    """

    config: str | None = None
    file_size: Annotated[int, Meta(ge=1, le=MAX_FILE_SIZE, description=_BYTES)] | None = None
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS, description=_RANKS)] | None = None
    server: str | None = None
    snapshot: str | None = None


class MooncakeParams(Params, frozen=True, kw_only=True):
    """Parameters of `mooncake` URLs, which replace settings of SGLang's config or environment."""

    admin: str | None = None
    device: str | None = None
    metadata: str | None = None
    protocol: str | None = None
    tenant: str | None = None


class MooncakeSsdParams(Params, frozen=True, kw_only=True):
    """Parameters of `mooncake-ssd` URLs.

    tenant: owner of the objects to list.
    """

    tenant: str = ""


class NixlParams(Params, frozen=True, kw_only=True):
    """Parameters of `nixl` URLs.

    direct_io: whether servers open files with O_DIRECT.
    directories: number of the directories that servers use.
    high_watermark: percentage of space in use at which servers remove files.
    side_directory: directory that keeps the side files.
    """

    direct_io: Literal["on", "off"] = "on"
    directories: Annotated[int, Meta(ge=1, description="a number of directories")] | None = None
    # nixl_utils.py :: NixlBackendConfig.get_l3_cleaner_config
    high_watermark: Annotated[float, Meta(gt=0, le=100, description=_PERCENTAGE)] = 80.0
    side_directory: str | None = None


class PackParams(Params, frozen=True, kw_only=True):
    """Parameters of `pack` URLs.

    keys: key grammar of a new pack.
    """

    keys: str | None = None


@dataclass(frozen=True, slots=True)
class Scheme:
    """The store class of a URL scheme, and the parts that its URLs may have.

    target: "module:Class" of a backends.base.Store, imported when a store is opened.
    params: types of the parameters.
    host: whether URLs have a host.
    grammar: key grammar of the stores; "" if each store states its own.
    served: whether servers read and write the stores through the storage plug-in.
    directory: whether the path is the directory with the objects.
    directories: whether the path is a list of directories, separated by commas.
    archive: whether the path is one file with the objects.
    """

    target: str
    params: type[Params] = Params
    host: bool = False
    grammar: str = ""
    served: bool = False
    directory: bool = False
    directories: bool = False
    archive: bool = False


PACK_SUFFIX = ".hcpack"
# Name of the parameter that names a directory of side files. The schemes of stores that keep no
# side files inside have this parameter.
SIDE_PARAMETER = "side_directory"

SCHEMES = {
    "file": Scheme(
        "hicachectl.backends.file.store:FileStore",
        FileParams,
        grammar="file",
        served=True,
        directory=True,
    ),
    # The path is a prefix: /data/hicache for /data/hicache.0.bin and so on.
    "hf3fs": Scheme(
        "hicachectl.backends.hf3fs.store:Hf3fsStore", Hf3fsParams, grammar="hf3fs", served=True
    ),
    "mooncake": Scheme(
        "hicachectl.backends.mooncake.store:MooncakeStore",
        MooncakeParams,
        host=True,
        grammar="mooncake",
        served=True,
    ),
    # The directory of one client's SSD offload, or the parent of its rank_* directories.
    "mooncake-ssd": Scheme(
        "hicachectl.backends.mooncake_ssd.store:MooncakeSsdStore",
        MooncakeSsdParams,
        grammar="mooncake",
    ),
    "nixl": Scheme("hicachectl.backends.nixl.store:NixlStore", NixlParams, directories=True),
    "pack": Scheme("hicachectl.backends.pack.store:PackStore", PackParams, archive=True),
}

MAX_CONFIG_BYTES = 1 << 20
_RUN_TARGET = "hicachectl.backends.runs:QuarantineRun"

_P = TypeVar("_P", bound=Params)
_SCHEME_NAME = re.compile(r"[a-z][a-z0-9+.-]*")  # RFC 3986
_NAMED = re.compile(r"([^/:]*):(.*)", re.DOTALL)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_NUMBERS = {int: re.compile("[0-9]{1,20}"), float: re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,20})?")}


# Secrets in URLs are the text before the @ of a host, and the values of parameters with names like
# "token". A URL can be percent-encoded inside another URL. A port before a path or parameters is
# not a password. Patterns look for the last character of a scheme only.
# Some patterns also match text without a secret. Such a match has no group "end". Without these
# matches, a search would begin again within that text, and hostile text would take quadratic time.
_SCHEME = r"[a-z0-9+.-](?::|%3a)(?:/|%2f){2}(?!/|%2f)"
_PORT = r"[^\s'\"/?#@:%]*(?::|%3a)\d{1,5}(?:[/?#&\s'\"]|%2f|%3f|$)"
_NAME_BEGIN = r"(?:[?&;#]|%3f|%26)"
_NAME_END = r"(?:=|%3d)"
_IN_NAME = r"(?:(?!%3d)[^\s'\"=&])"
_IN_VALUE = r"(?:(?!%26)[^\s'\"&#])"
_SECRET_NAMES = "token|pass|pwd|secret|key|auth|cred|sig|session"
_SECRETS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?P<begin>{_SCHEME})(?!{_PORT})[^\s'\"/?#&@%:]*+"
        r"(?:(?:(?::|%3a)\S*)?(?P<end>@|%40)|(?::|%3a)\S*)",
        r"(?P<begin>^|[\s=(,'\"]|//)[^\s'\"/&?=@:]++(?::(?:[^\s'\"/&?=@]++(?P<end>@)?)?)?",
        r"(?P<begin>=)(?:(?!%40|%2f)[^\s'\"/&?=@])++(?P<end>@|%40)",
        rf"(?P<begin>{_NAME_BEGIN}(?!keys{_NAME_END})"
        rf"(?={_IN_NAME}*+{_NAME_END}{_IN_VALUE}){_IN_NAME}*(?:{_SECRET_NAMES}){_IN_NAME}*+"
        rf"{_NAME_END}){_IN_VALUE}++(?P<end>)|{_NAME_BEGIN}{_IN_NAME}*+",
        # The variable $ADMIN_KEY in a command that we print is no secret.
        r"(?P<begin>bearer )(?!\$ADMIN_KEY\")[^\s'\"]++(?P<end>)",
    )
]


MASK = "***"
"""The text that messages show in place of a secret."""


def without_secrets(text: str) -> str:
    """Replace passwords and tokens in URLs by `MASK`. Every message passes through here."""
    for pattern in _SECRETS:
        text = pattern.sub(_masked, text)
    return text


def _masked(match: re.Match[str]) -> str:
    return match[0] if match["end"] is None else f"{match['begin']}{MASK}{match['end']}"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A parsed URL with decoded parts. `str` returns a URL that parses to an equal value.

    path: absolute path; "" if the URL has no path. Bytes that are not UTF-8 become surrogates.
    """

    scheme: str
    path: str = ""
    host: str = ""
    params: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> Scheme:
        """The entry of the scheme in SCHEMES."""
        return SCHEMES[self.scheme]

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories that the path lists; only the path for a scheme without a list."""
        return tuple(self.path.split(",")) if self.kind.directories else (self.path,)

    def __str__(self) -> str:
        host = quote(self.host, safe=":[]@,;")
        path = quote_from_bytes(os.fsencode(self.path), safe="/:@,=+~")
        values = {
            name: quote(os.fsencode(value), safe="/:,") for name, value in self.params.items()
        }
        pairs = [f"{name}={value}" for name, value in values.items()]
        return f"{self.scheme}://{host}{path}" + ("?" + "&".join(pairs) if pairs else "")


@dataclass(frozen=True, slots=True)
class NamedStore:
    """A store of the config file, with its URL and the files that commands use with it.

    The paths of the files are absolute. Options of a command replace these paths.
    """

    url: str
    profile: Path | None = None
    catalog: Path | None = None
    lock: Path | None = None


_PATHS = ("profile", "catalog", "lock")  # members of NamedStore


@dataclass(frozen=True, slots=True)
class Config:
    """The named stores of the config file."""

    stores: Mapping[str, NamedStore] = field(default_factory=dict)
    source: str = "the config file, by default ~/.config/hicachectl/config.toml"


def params_of(url: StoreUrl, form: type[_P]) -> _P:
    """Return a URL's parameters as typed fields. Raises UsageError, which names the parameter."""
    values = {
        param.name: _value(url, param.name, param.type)
        for param in fields(form)
        if param.name in url.params
    }
    return form(**values)


def _value(url: StoreUrl, name: str, kind: Any) -> Any:
    text = url.params[name]
    if get_origin(kind) is UnionType or get_origin(kind) is Union:
        kind = get_args(kind)[0]  # with None among the types, "null" would be read as None
    if kind is str:
        return text
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise UsageError(f"{url}: {not_one_of(name, text, get_args(kind))}")
        return text
    digits = _NUMBERS.get(getattr(kind, "__origin__", kind))
    try:
        if digits is not None and not digits.fullmatch(text):  # msgspec would also read 1e9
            raise ValueError
        return msgspec.convert(text, kind, strict=False)
    except (ValueError, msgspec.ValidationError):
        (meta,) = kind.__metadata__
        raise UsageError(f"{url}: {name}: {shown(text)} is not {meta.description}") from None


def default_file_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Return the default directory of SGLang's file backend.

    Source: hicache_storage.py :: HiCacheFile.__init__.
    """
    return environ.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR") or "/tmp/hicache"


def written_store(
    backend: str, extra: Mapping[str, Any], environ: Mapping[str, str]
) -> StoreUrl | None:
    """Return the store that a server writes; None if the backend is not known.

    The URL has neither host nor path if these settings do not name the place. The path of a `file`
    URL is relative if the server's path is relative.

    backend: value of --hicache-storage-backend.
    extra: extra config of that backend. For `dynamic`, the config must load this package's plug-in.
    environ: the server's environment.
    Raises UsageError for a malformed URL. Sources: hicache_storage.py :: HiCacheFile.__init__,
    hicache_nixl.py :: HiCacheNixl.__init__, mooncake_store.py :: MooncakeBaseStore._load_config.
    """
    store = extra.get("store")
    first = store[0] if isinstance(store, list) and store else store
    master = extra.get("master_server_address")
    if master is None and "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH" not in environ:
        master = environ.get("MOONCAKE_MASTER")
    match backend:
        case "file":
            stated = environ.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR")
            stated = stated or extra.get("file_storage_path") or default_file_directory({})
            return StoreUrl("file", stated) if isinstance(stated, str) else None
        case "nixl":
            stated = environ.get("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR")
            return StoreUrl("nixl", stated or "/tmp/hicache_storage")
        case "mooncake":
            return StoreUrl("mooncake", host=master if isinstance(master, str) else "")
        case "hf3fs":
            return StoreUrl("hf3fs")  # a file on the server's host names the place
        case "dynamic" if isinstance(first, str):
            return parse_url(first)
    return None


def register_scheme(name: str, scheme: Scheme) -> None:
    """Make URLs NAME://... open a store class. Raises ValueError for an invalid or used name."""
    if not _SCHEME_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a URL scheme; use a-z, then a-z, 0-9, +, . and -")
    if SCHEMES.get(name, scheme) != scheme:
        raise ValueError(f"the scheme {name!r} is already registered for {SCHEMES[name].target}")
    SCHEMES[name] = scheme


def is_pack_path(path: str) -> bool:
    """Return whether a path without a scheme names a pack, which is so if it ends in .hcpack."""
    return path.endswith(PACK_SUFFIX)


def target_of(url: StoreUrl) -> str:
    """Return the "module:Class" that opens a URL. A quarantine run has its own class."""
    run_file = os.path.join(url.path, SIDE, RUN_FILE)  # noqa: PTH118 - names that are not UTF-8
    if url.kind.directory and os.path.lexists(run_file):
        return _RUN_TARGET
    return url.kind.target


def parse_url(text: str, config: Config | None = None) -> StoreUrl:
    """Parse a STORE argument: a path, a named store or a URL. Raises UsageError."""
    config = config or Config()
    seen: list[str] = []
    while (match := _NAMED.fullmatch(text)) and match[1] not in SCHEMES:
        name = match[1]
        if name in seen:
            chain = " -> ".join([*seen, name])
            raise UsageError(
                f"{config.source}: named stores refer to one another: {chain}; give one of them "
                "the URL of a store"
            )
        seen.append(name)
        text = _named_store(text, name, match[2], config)
    return _scheme_url(text, match[1], match[2]) if match else _path_url(text, named=bool(seen))


def load_config(path: str | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Read the config file: `path`, else $HICACHECTL_CONFIG, else the user's file if it exists.

    The user's file is $XDG_CONFIG_HOME/hicachectl/config.toml, by default in ~/.config.
    Raises UsageError if a requested file cannot be read, FormatError if its content is wrong.
    """
    asked = path or environ.get("HICACHECTL_CONFIG")
    file = Path(asked) if asked else _user_config(environ)
    if file is None:
        return Config()
    from hicachectl.backends.disk.bounded import read_bounded

    data = read_bounded(file, MAX_CONFIG_BYTES, what="a config", where=f"config {file}")
    return parse_config(decoded(data, f"config {file}"), source=str(file), directory=file.parent)


def parse_config(text: str, *, source: str = "config", directory: str | Path = "") -> Config:
    """Parse a config from TOML text. Raises FormatError, which names the key.

    directory: start of relative paths; by default the current directory.
    """
    from hicachectl.formats.documents import parse_toml

    try:
        document = parse_toml(text, source)
    except FormatError as error:
        raise FormatError(f"{error}; write [stores.NAME] tables, see hicachectl(1)") from None
    _refuse_unknown(document, {"stores"}, source)
    stores = document.get("stores", {})
    if not isinstance(stores, dict):
        raise FormatError(f"{source}: stores: expected tables; write [stores.NAME]")
    base = Path(directory).absolute()
    return Config(
        {name: _named(name, table, source, base) for name, table in stores.items()}, source
    )


def named_store(text: str, config: Config) -> NamedStore | None:
    """Return the named store of a STORE argument; None if the argument names no store.

    If the URL of a named store is the name of another store, the other store supplies the paths
    that the first one lacks.
    """
    found: NamedStore | None = None
    seen: set[str] = set()
    while (match := _NAMED.fullmatch(text)) and not match[2] and match[1] not in seen:
        seen.add(match[1])
        if (store := config.stores.get(match[1])) is None:
            break
        text = store.url
        if found is None:
            found = store
        else:
            paths = {name: getattr(found, name) or getattr(store, name) for name in _PATHS}
            found = NamedStore(url=text, **paths)
    return found


def _user_config(environ: Mapping[str, str]) -> Path | None:
    """Return the user's config file; None if the file is missing or not accessible."""
    base = Path(environ.get("XDG_CONFIG_HOME") or "")
    try:
        if not base.is_absolute():  # the XDG specification ignores relative values
            base = Path(environ.get("HOME") or Path.home()) / ".config"
        file = base / "hicachectl" / "config.toml"
        return file if file.is_file() else None
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return None


def _named(name: str, table: Any, source: str, base: Path) -> NamedStore:
    where = f"{source}: stores.{name}"
    if not name or {":", "/"} & set(name) or name in SCHEMES:
        raise FormatError(
            f'{where}: a store name must not contain ":" or "/", nor be a URL scheme; rename it'
        )
    if not isinstance(table, dict):
        raise FormatError(f'{where}: expected a table; write url = "URL" in it')
    _refuse_unknown(table, {"url", *_PATHS}, where)
    url = table.get("url")
    if not isinstance(url, str) or not url:
        raise FormatError(f'{where}: url: expected a store URL as text; write url = "URL"')
    paths = {
        key: _config_path(table[key], f"{where}: {key}", base) for key in table.keys() - {"url"}
    }
    return NamedStore(url, **paths)


def _config_path(value: Any, where: str, base: Path) -> Path:
    if not isinstance(value, str) or not value or "://" in value or "\0" in value:
        raise FormatError(
            f"{where}: {value!r} is not the path of a file; give one, or leave it out"
        )
    return base / value


def _refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in table:
        if name not in known:
            raise FormatError(f"{where}: unknown key {name!r}; known: {', '.join(sorted(known))}")


def meant_store(text: str, config: Config | None) -> str:
    """Return `prod:` for the missing path `prod` if a store has this name; else ""."""
    named = config is not None and text in config.stores
    return f"{text}:" if named and not os.path.lexists(text) else ""


def _named_store(text: str, name: str, rest: str, config: Config) -> str:
    if name in config.stores and not rest:
        return config.stores[name].url
    if name in config.stores:
        raise UsageError(f"{text}: {name!r} is a named store; remove the text after its colon")
    schemes = ", ".join(sorted(SCHEMES))
    if rest.startswith("/"):
        raise UsageError(f"{text}: unknown store scheme {name!r}; known: {schemes}")
    stores = ", ".join(sorted(config.stores)) or "none"
    unknown = f"No store {name!r} in {config.source} (it names {stores})"
    if not rest and (close := get_close_matches(name, config.stores, n=1)):
        raise UsageError(f"{unknown}; did you mean {close[0]}:?")
    raise UsageError(
        f"{unknown}; define it there with two "
        f'lines, [stores.{name}] and url = "file:///DIR"; URL schemes: {schemes}; write a '
        f"directory with a colon as ./{text}"
    )


def _path_url(text: str, *, named: bool) -> StoreUrl:
    """Return the URL of a plain directory or pack. Percent signs in its path are literal."""
    if not text:
        raise UsageError("STORE: the text is empty; give a directory or a URL")
    scheme = "pack" if is_pack_path(text) else "file"
    if named and not text.startswith("/"):
        raise UsageError(
            f"{text!r}: the path of a store in the config file must be absolute, as in "
            f"{scheme}://{quote(str(Path(text).absolute()))}"
        )
    _refuse_nul(text, text)
    return StoreUrl(scheme, str(Path(text).absolute()))


def _scheme_url(text: str, name: str, rest: str) -> StoreUrl:
    scheme = SCHEMES[name]
    place, _, query = rest.partition("?")
    host, path = _split_place(text, name, place)
    if name == "file" and host == "localhost":  # RFC 8089 takes this host for no host
        host = ""
    if host and not scheme.host:
        named = host.rpartition("@")[2]
        raise UsageError(f"{text}: {name} stores have no host; write {name}:///{named}{path}")
    params = _params(text, name, query, scheme.params.__struct_fields__)
    path = _decode(text, path)
    if name == "file":
        path = str(Path(path or default_file_directory()).absolute())
    return StoreUrl(name, path, _decode(text, host), params)


def _split_place(text: str, name: str, place: str) -> tuple[str, str]:
    if place.startswith("//"):
        host, slash, path = place[2:].partition("/")
        return host, slash + path
    if place and not place.startswith("/"):
        raise UsageError(
            f"{text}: the path must be absolute, as in {name}://{quote(str(Path(place).absolute()))}"
        )
    return "", place


def _params(text: str, scheme: str, query: str, known: tuple[str, ...]) -> dict[str, str]:
    params: dict[str, str] = {}
    for pair in query.split("&") if query else []:
        name, equals, value = pair.partition("=")
        if name not in known:
            allowed = ", ".join(sorted(known)) or "none"
            raise UsageError(f"{text}: unknown parameter {name!r}; known: {allowed}")
        if name in params:
            raise UsageError(f"{text}: parameter {name!r} is given twice; give it once")
        if not equals:
            raise UsageError(f"{text}: parameter {name!r} has no value; write {name}=VALUE")
        params[name] = _decode(text, value)
    return params


def _decode(text: str, part: str) -> str:
    if bad := _BAD_ESCAPE.search(part):
        raise UsageError(
            f"{text}: {part[bad.start() :][:3]!r} is not a percent escape; write %25 for a % sign"
        )
    _refuse_nul(text, decoded := os.fsdecode(unquote_to_bytes(os.fsencode(part))))
    return decoded


def _refuse_nul(text: str, part: str) -> None:
    if "\0" in part:
        raise UsageError(f"{text!r}: a store name must not contain a zero byte; leave it out")
