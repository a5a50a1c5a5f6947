"""Location of a 3FS store, from the store URL or the JSON config of SGLang's servers.

A URL is `hf3fs:///PREFIX?server=&snapshot=&file_size=&ranks=`. If the URL has `config=FILE`, then
prefix and file size come from this file, and the server, too, if the file names one. For the URL
`hf3fs:`, they come from the file that SGLANG_HICACHE_HF3FS_CONFIG_PATH names.
Source: sglang srt/mem_cache/storage/hf3fs/storage_hf3fs.py :: HiCacheHF3FS.from_env_config.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from hicachectl.backends.disk.bounded import read_config
from hicachectl.backends.http import service_url
from hicachectl.backends.urls import MAX_FILE_SIZE, Hf3fsParams, StoreUrl, params_of
from hicachectl.formats.documents import shown
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.forms import convert
from hicachectl.formats.objects import ANCHOR

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_VARIABLE = "SGLANG_HICACHE_HF3FS_CONFIG_PATH"

_PREFIX = re.compile(r"/[^\0\ud800-\udc7f\udd00-\udfff]*(?<!/)")  # a path that can be encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Hf3fsSettings:
    """Location of pages and tables; `str` returns a URL with equal settings.

    prefix: SGLang's file_path_prefix, absolute.
    file_size: bytes of each data file; None if not stated.
    ranks: number of ranks to use, from rank 0 on; None for all ranks.
    server: URL of the metadata server.
    snapshot: absolute path of the metadata server's snapshot.
    """

    prefix: str
    file_size: int | None = None
    ranks: int | None = None
    server: str | None = None
    snapshot: str | None = None

    def data_file(self, rank: int, namespace: str) -> str:
        """Return the path of a pool's data file. Only the anchor's file has no pool in its name.

        Source: register_mem_host_pool_v2.
        """
        path = f"{self.prefix}.{rank}.bin"
        return path if namespace == ANCHOR else f"{path}.{namespace}"

    def __str__(self) -> str:
        stated = {
            "server": self.server,
            "snapshot": self.snapshot,
            "file_size": self.file_size,
            "ranks": self.ranks,
        }
        params = {name: str(value) for name, value in stated.items() if value is not None}
        return str(StoreUrl("hf3fs", self.prefix, params=params))


class _Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file_path_prefix: str
    file_size: int | float | str
    numjobs: Any
    entries: Any
    metadata_server_url: str | None = None
    client_timeout: Any = None


def settings_from(url: StoreUrl, environ: Mapping[str, str]) -> Hf3fsSettings:
    """Return the settings that a URL names.

    Raises UsageError if the URL is invalid or contradicts the JSON config, FormatError if the
    config is invalid.
    """
    params = params_of(url, Hf3fsParams)
    where, config = _config(url, params, environ)
    server = None if params.server is None else _service(params.server, "server")
    _refuse_other("file_size", params.file_size, f"{where}: file_size", config.file_size)
    _refuse_other("server", server, f"{where}: metadata_server_url", config.server)
    settings = Hf3fsSettings(
        prefix=config.prefix,
        file_size=config.file_size or params.file_size,
        ranks=params.ranks,
        server=config.server or server,
        snapshot=_snapshot(params.snapshot),
    )
    if settings.server is None and settings.snapshot is None:
        raise UsageError(
            f"{settings}: the URL names neither a metadata server nor a snapshot; give "
            "server=http://HOST:18000, and snapshot=FILE, the file that this server saves its "
            "tables to (without a server, SGLang keeps the tables in its own process, and no other "
            "program can read its pages)"
        )
    return settings


def _config(
    url: StoreUrl, params: Hf3fsParams, environ: Mapping[str, str]
) -> tuple[str, Hf3fsSettings]:
    """Return the JSON config's name and settings. Without a config, return "" and the prefix."""
    if params.config is not None:
        return _read_config(params.config, "config")
    if url.path:
        return "", Hf3fsSettings(prefix=_prefix(url.path, "hf3fs", UsageError))
    path = environ.get(CONFIG_VARIABLE)
    if path:
        return _read_config(path, CONFIG_VARIABLE)
    raise UsageError(
        "hf3fs: the URL names no data files; write hf3fs:///DIRECTORY/PREFIX?server=…&snapshot=…, "
        f"give config=FILE, or set {CONFIG_VARIABLE}"
    )


def _refuse_other(name: str, stated: object, where: str, known: object) -> None:
    """Raise UsageError if the URL and the config state different values of a setting."""
    if None not in (stated, known) and stated != known:
        raise UsageError(
            f"{name}={stated} contradicts {where} {known}; remove {name}= from the URL"
        )


# single settings


def _prefix(path: str, where: str, error: type[UsageError | FormatError]) -> str:
    if not _PREFIX.fullmatch(path):
        raise error(
            f"{where}: {path!r} is not a prefix of data files; give the absolute path PREFIX of "
            "files named PREFIX.RANK.bin"
        )
    return path


def _service(text: str, where: str, error: type[UsageError | FormatError] = UsageError) -> str:
    """Return the address of a metadata server without a final slash; raise `error` if invalid."""
    parts = service_url(text)
    if parts is None or parts.scheme != "http" or parts.query or parts.fragment:
        raise error(f"{where}: {shown(text)} is not an address; write http://HOST:18000")
    if "@" in parts.netloc:
        raise error(f"{where}: a metadata server takes no password; write http://HOST:18000")
    return text.rstrip("/")


def _snapshot(path: str | None) -> str | None:
    if path is None:
        return None
    if not path:
        raise UsageError(
            "snapshot: the file name is empty; give the file that the metadata server saves its "
            "tables to"
        )
    return str(Path(path).absolute())


# SGLang's JSON config


def _read_config(path: str, source: str) -> tuple[str, Hf3fsSettings]:
    where = f"{source} {path}"
    document = convert(read_config(path, where), _Document, where)
    server = document.metadata_server_url  # SGLang: null and "" mean no server
    return where, Hf3fsSettings(
        prefix=_prefix(document.file_path_prefix, f"{where}: file_path_prefix", FormatError),
        file_size=_whole(document.file_size, f"{where}: file_size"),
        server=_service(server, f"{where}: metadata_server_url", FormatError) if server else None,
    )


def _whole(value: float | str, where: str) -> int:
    """Return Python's int() of a JSON value, as SGLang does. Raises FormatError for bad sizes."""
    if isinstance(value, str):
        is_whole = value.isascii() and value.isdecimal() and len(value) < 20
    else:
        is_whole = value == value // 1  # False for infinity and NaN, too
    if not is_whole or not 1 <= int(value) <= MAX_FILE_SIZE:
        raise FormatError(
            f"{where}: {shown(value)} is not a size in bytes; give 1 to {MAX_FILE_SIZE}"
        )
    return int(value)
