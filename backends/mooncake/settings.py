"""Settings of a Mooncake cluster.

Each parameter of the store URL overrides one setting. As in SGLang, all other settings come from
one source. It is the JSON file of SGLANG_HICACHE_MOONCAKE_CONFIG_PATH if that is set, else the
MOONCAKE_* variables. With a JSON file, variables still set this machine's name, and the protocol if
the file has none.
Source: sglang srt/mem_cache/storage/mooncake_store/mooncake_store.py :: MooncakeStoreConfig,
MooncakeBaseStore._load_config; srt/environ.py.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from hicachectl.backends.disk.bounded import read_config
from hicachectl.backends.urls import MooncakeParams, StoreUrl, params_of, without_secrets
from hicachectl.formats.errors import FormatError, HicacheError, UsageError
from hicachectl.formats.forms import convert

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_VARIABLE = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"
# From 0.3.14 on, this variable chooses the store implementation that Mooncake's package loads.
BACKEND_VARIABLE, _BACKEND = "MOONCAKE_STORE_BACKEND", "cpp"

_DEFAULT_METRICS_PORT = 9003
_DEFAULT_METADATA = "P2PHANDSHAKE"
_DEFAULT_PROTOCOL = "rdma"
_DEFAULT_HOSTNAME = "localhost"
_DEFAULT_TENANT = "default"

_ADDRESS = re.compile(r"(?:\[([^\[\]]+)\]|([A-Za-z0-9_](?:[A-Za-z0-9_.-]*))):([0-9]{1,5})")
_PROTOCOL = re.compile(r"[A-Za-z0-9_+-]+")
_FLAGS = {"true": True, "1": True, "yes": True, "y": True,
          "false": False, "0": False, "no": False, "n": False}  # fmt: skip

# Names of the settings in SGLang's environment and JSON config.
_VARIABLES = {
    "master": "MOONCAKE_MASTER",
    "client": "MOONCAKE_CLIENT",
    "standalone": "MOONCAKE_STANDALONE_STORAGE",
    "metrics_port": "MOONCAKE_MASTER_METRICS_PORT",
    "metadata": "MOONCAKE_TE_META_DATA_SERVER",
    "protocol": "MOONCAKE_PROTOCOL",
    "device": "MOONCAKE_DEVICE",
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "tenant": "MOONCAKE_TENANT_ID",
}
_KEYS = {
    "master": "master_server_address",
    "client": "client_server_address",
    "standalone": "standalone_storage",
    "metrics_port": "master_metrics_port",
    "metadata": "metadata_server",
    "device": "device_name",
    "tenant": "tenant_id",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """Settings of a guest, a client that contributes no memory to a Mooncake cluster.

    `str` returns a URL without secrets.
    """

    master: str  # host:port of the RPC service
    admin: str  # host:port of the master's HTTP service
    metadata: str
    protocol: str
    device: str
    local_hostname: str

    def __str__(self) -> str:
        params = {"admin": self.admin, "protocol": self.protocol}
        if self.metadata != _DEFAULT_METADATA:
            params["metadata"] = self.metadata
        if self.device:
            params["device"] = self.device
        return without_secrets(str(StoreUrl("mooncake", host=self.master, params=params)))


class _SettingsForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_KEYS):
    """Settings of one source, with SGLang's defaults. Decoding checks only types."""

    master: str | None = None
    client: str | None = None
    standalone: bool = False
    metrics_port: int | str = _DEFAULT_METRICS_PORT
    metadata: str = _DEFAULT_METADATA
    protocol: str = _DEFAULT_PROTOCOL
    device: str = ""
    local_hostname: str = ""
    tenant: str | None = None
    # Memory and disk that a server contributes; unused by a guest.
    global_segment_size: int | str = 0
    check_server: bool = False
    enable_ssd_offload: bool = False
    ssd_offload_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SettingsSource:
    """Settings of one source, with the source's names for messages."""

    where: str  # prefix of a setting's name
    error: type[HicacheError]
    names: Mapping[str, str]  # name of each setting in that source
    stated: _SettingsForm

    def name(self, field: str) -> str:
        return self.where + self.names.get(field, field)


def settings_from(url: StoreUrl, environ: Mapping[str, str]) -> MooncakeSettings:
    """Return the settings of the cluster that a URL names.

    Raises UsageError for a bad URL or environment and for modes that a guest cannot use,
    FormatError for a bad JSON config.
    """
    if url.path not in ("", "/"):
        raise UsageError(
            f"{_shown(url)}{url.path}: a Mooncake URL has no path; write {_shown(url)}"
        )
    _refuse_backend(environ)
    path = environ.get(CONFIG_VARIABLE)
    given = _from_environment(environ) if path is None else _from_file(path, environ)
    master = _master(url, given)
    _refuse_tenant(url, given)
    return MooncakeSettings(
        master=master,
        admin=_admin(url, given, master),
        metadata=_text(url, given, "metadata"),
        protocol=_protocol(url, given),
        device=_device(_text(url, given, "device", empty=True)),
        local_hostname=_text(url, given, "local_hostname"),
    )


def split_address(text: str, what: str, error: type[HicacheError] = UsageError) -> tuple[str, int]:
    """Split host:port, with an IPv6 host in brackets. Raises `error`, which names `what`."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match[3]) <= 65535 or (match[1] and not _is_ipv6(match[1])):
        raise error(f"{what}: {text!r} is not an address; write HOST:PORT or [IPV6]:PORT")
    return match[1] or match[2], int(match[3])


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _shown(url: StoreUrl) -> str:
    """Return a URL without parameters, which may hold the metadata server's password."""
    return f"mooncake://{url.host}"


# single settings


def _master(url: StoreUrl, given: _SettingsSource) -> str:
    if url.host:
        split_address(url.host, f"{_shown(url)}: master")
        return url.host
    stated = given.stated
    if stated.standalone:
        raise UsageError(
            f"{given.name('standalone')} is set, so servers use a store process on their host, "
            "which hicachectl cannot use; name the master, as in mooncake://HOST:50051"
        )
    if stated.master is None:
        only = (
            f"{given.name('client')} alone is not enough" if stated.client else "no master address"
        )
        raise UsageError(
            f"{_shown(url)}: {only}; write mooncake://HOST:50051, or set MOONCAKE_MASTER or "
            f"{CONFIG_VARIABLE}"
        )
    name = given.name("master")
    if "://" in stated.master:
        raise UsageError(
            f"{name}: leader election by {stated.master.partition('://')[0]} is not supported; "
            "name the leading master, as in mooncake://HOST:50051?admin=HOST:9003"
        )
    split_address(stated.master, name, given.error)
    return stated.master


def _admin(url: StoreUrl, given: _SettingsSource, master: str) -> str:
    stated = params_of(url, MooncakeParams).admin
    if stated is not None:
        split_address(stated, f"{_shown(url)}: admin")
        return stated
    name = given.name("metrics_port")
    port = str(given.stated.metrics_port)
    if not port.isdecimal() or not port.isascii() or not 1 <= int(port[:6]) <= 65535:
        raise given.error(f"{name}: {port!r} is not a port number; give 1 to 65535")
    return f"{master.rpartition(':')[0]}:{int(port)}"


def _text(url: StoreUrl, given: _SettingsSource, field: str, *, empty: bool = False) -> str:
    """Return a setting that only Mooncake interprets."""
    stated = getattr(params_of(url, MooncakeParams), field, None)
    value: str = getattr(given.stated, field) if stated is None else stated
    if not value.isprintable() or not (value or empty):
        error, name = (given.error, given.name(field)) if stated is None else (UsageError, field)
        raise error(
            f"{name}: {value!r} is empty or has unprintable characters; give printable text"
        )
    return value


def _protocol(url: StoreUrl, given: _SettingsSource) -> str:
    value = _text(url, given, "protocol")
    if not _PROTOCOL.fullmatch(value):
        raise UsageError(
            f"protocol: {value!r} is not a protocol name; give tcp or rdma, for example"
        )
    return value


def _device(value: str) -> str:
    """Return a device name; return "" for SGLang's map from ranks to devices."""
    return "" if value.strip().startswith("{") else value


def _refuse_backend(environ: Mapping[str, str]) -> None:
    backend = environ.get(BACKEND_VARIABLE, _BACKEND)
    if backend != _BACKEND:
        raise UsageError(
            f"{BACKEND_VARIABLE}: {backend!r} is not supported, because hicachectl reads only "
            f"Mooncake's store in C++; set {_BACKEND}, or unset the variable"
        )


def _refuse_tenant(url: StoreUrl, given: _SettingsSource) -> None:
    stated = params_of(url, MooncakeParams).tenant
    tenant = given.stated.tenant if stated is None else stated
    tenant = (tenant or "").strip() or _DEFAULT_TENANT
    if tenant != _DEFAULT_TENANT:
        name = given.name("tenant") if stated is None else f"{_shown(url)}: tenant"
        raise UsageError(
            f"{name}: {tenant!r} cannot be used, because the master lists only the objects of the "
            f"tenant {_DEFAULT_TENANT!r}; leave the tenant out"
        )


# sources


def _from_environment(environ: Mapping[str, str]) -> _SettingsSource:
    values: dict[str, Any] = {
        name: environ[variable] for name, variable in _VARIABLES.items() if variable in environ
    }
    values["standalone"] = _flag(environ, _VARIABLES["standalone"])
    values["local_hostname"] = _hostname(environ, "")
    return _SettingsSource(
        where="", error=UsageError, names=_VARIABLES, stated=_SettingsForm(**values)
    )


def _from_file(path: str, environ: Mapping[str, str]) -> _SettingsSource:
    """Read SGLang's JSON config. Variables set only the host name and, if missing, the protocol."""
    where = f"{CONFIG_VARIABLE} {path}"
    config = read_config(path, where)
    if "protocol" not in config and "MOONCAKE_PROTOCOL" in environ:
        config["protocol"] = environ["MOONCAKE_PROTOCOL"]
    stated = convert(config, _SettingsForm, where)
    if "master_server_address" not in config and "client_server_address" not in config:
        raise FormatError(
            f"{where}: master_server_address is missing; add it, or write mooncake://HOST:50051"
        )
    stated = replace(stated, local_hostname=_hostname(environ, stated.local_hostname))
    return _SettingsSource(where=f"{where}: ", error=FormatError, names=_KEYS, stated=stated)


def _hostname(environ: Mapping[str, str], configured: str) -> str:
    """Return this machine's name, from the environment or else from the JSON config."""
    own = environ.get("MOONCAKE_LOCAL_HOSTNAME")
    return (
        own
        if own is not None
        else (environ.get("LOCAL_HOSTNAME") or configured or _DEFAULT_HOSTNAME)
    )


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name)
    if value is None:
        return False
    if value.lower() not in _FLAGS:
        raise UsageError(f"{name}: {value!r} is neither true nor false; set true or false")
    return _FLAGS[value.lower()]
