"""How to reach a Mooncake cluster: the store URL, SGLang's JSON config, SGLang's environment.

A URL's parameters win one by one; the rest comes from a single source, as SGLang has it: the
JSON file that SGLANG_HICACHE_MOONCAKE_CONFIG_PATH names, if that is set, else the MOONCAKE_*
variables. Source: sglang srt/mem_cache/storage/mooncake_store/mooncake_store.py ::
MooncakeStoreConfig, MooncakeBaseStore._load_config; srt/environ.py.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicachectl.backends.sglang_config import read_config
from hicachectl.backends.urls import StoreUrl
from hicachectl.formats.errors import FormatError, HicacheError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_VARIABLE = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"

_DEFAULT_METRICS_PORT = 9003
_DEFAULT_METADATA = "P2PHANDSHAKE"
_DEFAULT_PROTOCOL = "rdma"
_DEFAULT_HOSTNAME = "localhost"
_DEFAULT_TENANT = "default"

_ADDRESS = re.compile(r"(?:\[([^\[\]]+)\]|([A-Za-z0-9_](?:[A-Za-z0-9_.-]*))):([0-9]{1,5})")
_PROTOCOL = re.compile(r"[A-Za-z0-9_+-]+")
_FLAGS = {"true": True, "1": True, "yes": True, "y": True,
          "false": False, "0": False, "no": False, "n": False}  # fmt: skip

# What SGLang reads from the file; what contributes memory or disk is of no use to a guest.
_CONFIG_TYPES: Mapping[str, tuple[type, ...]] = {
    "local_hostname": (str,),
    "metadata_server": (str,),
    "protocol": (str,),
    "device_name": (str,),
    "master_server_address": (str,),
    "master_metrics_port": (int, str),
    "standalone_storage": (bool,),
    "client_server_address": (str,),
    "tenant_id": (str,),
    "global_segment_size": (int, str),
    "check_server": (bool,),
    "enable_ssd_offload": (bool,),
    "ssd_offload_path": (str,),
}
_NULLABLE = frozenset(
    {"client_server_address", "master_server_address", "ssd_offload_path", "tenant_id"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """What a guest of a Mooncake cluster needs; `str` gives a URL for messages, without secrets."""

    master: str  # host:port of the RPC service
    admin: str  # host:port of the master's HTTP service
    metadata: str
    protocol: str
    device: str
    local_hostname: str
    tenant: str

    def __str__(self) -> str:
        params = {"admin": self.admin, "protocol": self.protocol}
        if self.metadata != _DEFAULT_METADATA:
            params["metadata"] = _without_secrets(self.metadata)
        if self.device:
            params["device"] = self.device
        return str(StoreUrl("mooncake", host=self.master, params=params))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What a file or the environment says, still unchecked."""

    where: str  # for messages, put before a setting's name
    error: type[HicacheError]
    names: Mapping[str, str]  # of our fields in that source
    master: str | None
    client: str | None
    standalone: bool
    metrics_port: str
    metadata: str
    protocol: str
    device: str
    local_hostname: str
    tenant: str

    def name(self, field: str) -> str:
        """Name a setting as the source does."""
        return self.where + self.names[field]


def settings_from(url: StoreUrl, environ: Mapping[str, str]) -> MooncakeSettings:
    """Find out how to reach the cluster that a URL names.

    Raises UsageError for the URL, the environment, and modes that a guest cannot use; FormatError
    for the JSON config.
    """
    if url.path not in ("", "/"):
        raise UsageError(
            f"{_shown(url)}{url.path}: a Mooncake URL has no path; write {_shown(url)}"
        )
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
        tenant=_DEFAULT_TENANT,
    )


def split_address(text: str, what: str, error: type[HicacheError] = UsageError) -> tuple[str, int]:
    """Split host:port, an IPv6 host in brackets; raises `error`, which names `what`."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match[3]) <= 65535 or (match[1] and not _is_ipv6(match[1])):
        raise error(f"{what}: {text!r} is no address; write HOST:PORT, or [IPV6]:PORT")
    return match[1] or match[2], int(match[3])


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _shown(url: StoreUrl) -> str:
    """Name a URL without its parameters, which may hold a password of the metadata server."""
    return f"mooncake://{url.host}"


# the settings, one by one


def _master(url: StoreUrl, given: _Given) -> str:
    if url.host:
        split_address(url.host, f"{_shown(url)}: master")
        return url.host
    if given.standalone:
        raise UsageError(
            f"{given.name('standalone')} is set: servers use a store process of their host, which "
            "a guest cannot; name the master, as in mooncake://HOST:50051"
        )
    if given.master is None:
        only = f"{given.name('client')} alone does not do" if given.client else "no master is named"
        raise UsageError(
            f"{_shown(url)}: {only}; write mooncake://HOST:50051, or set MOONCAKE_MASTER or "
            f"{CONFIG_VARIABLE}"
        )
    name = given.name("master")
    if "://" in given.master:
        raise UsageError(
            f"{name}: masters elect a leader by {given.master.partition('://')[0]}; name the "
            "leader, as in mooncake://HOST:50051?admin=HOST:9003"
        )
    split_address(given.master, name, given.error)
    return given.master


def _admin(url: StoreUrl, given: _Given, master: str) -> str:
    if "admin" in url.params:
        split_address(url.params["admin"], f"{_shown(url)}: admin")
        return url.params["admin"]
    name = given.name("metrics_port")
    port = given.metrics_port
    if not port.isdecimal() or not port.isascii() or not 1 <= int(port[:6]) <= 65535:
        raise given.error(f"{name}: {port!r} is no port number")
    return f"{master.rpartition(':')[0]}:{int(port)}"


def _text(url: StoreUrl, given: _Given, field: str, *, empty: bool = False) -> str:
    """Take a setting that Mooncake itself will understand or not."""
    stated = url.params.get(field)
    value: str = getattr(given, field) if stated is None else stated
    if not value.isprintable() or not (value or empty):
        error, name = (given.error, given.name(field)) if stated is None else (UsageError, field)
        raise error(f"{name}: {value!r} cannot be used")
    return value


def _protocol(url: StoreUrl, given: _Given) -> str:
    value = _text(url, given, "protocol")
    if not _PROTOCOL.fullmatch(value):
        raise UsageError(f"protocol: {value!r} cannot be used; give tcp or rdma, for example")
    return value


def _device(value: str) -> str:
    """Take a device's name; SGLang's map from ranks to devices has no entry for us."""
    return "" if value.strip().startswith("{") else value


def _refuse_tenant(url: StoreUrl, given: _Given) -> None:
    stated = url.params.get("tenant")
    tenant = (given.tenant if stated is None else stated).strip() or _DEFAULT_TENANT
    if tenant != _DEFAULT_TENANT:
        name = given.name("tenant") if stated is None else f"{_shown(url)}: tenant"
        raise UsageError(
            f"{name}: {tenant!r} cannot be used: the master lists the objects of the tenant "
            f"{_DEFAULT_TENANT!r} only"
        )


def _without_secrets(metadata: str) -> str:
    """Show of a metadata server's URL only the scheme where the rest may hold a password."""
    if "@" not in metadata and "?" not in metadata:
        return metadata
    scheme, separator, _ = metadata.partition("://")
    return f"{scheme}://..." if separator else "..."


# sources


def _from_environment(environ: Mapping[str, str]) -> _Given:
    return _Given(
        where="",
        error=UsageError,
        names={
            "master": "MOONCAKE_MASTER",
            "client": "MOONCAKE_CLIENT",
            "standalone": "MOONCAKE_STANDALONE_STORAGE",
            "metrics_port": "MOONCAKE_MASTER_METRICS_PORT",
            "metadata": "MOONCAKE_TE_META_DATA_SERVER",
            "protocol": "MOONCAKE_PROTOCOL",
            "device": "MOONCAKE_DEVICE",
            "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
            "tenant": "MOONCAKE_TENANT_ID",
        },
        master=environ.get("MOONCAKE_MASTER"),
        client=environ.get("MOONCAKE_CLIENT"),
        standalone=_flag(environ, "MOONCAKE_STANDALONE_STORAGE"),
        metrics_port=environ.get("MOONCAKE_MASTER_METRICS_PORT", str(_DEFAULT_METRICS_PORT)),
        metadata=environ.get("MOONCAKE_TE_META_DATA_SERVER", _DEFAULT_METADATA),
        protocol=environ.get("MOONCAKE_PROTOCOL", _DEFAULT_PROTOCOL),
        device=environ.get("MOONCAKE_DEVICE", ""),
        local_hostname=_hostname(environ, None),
        tenant=environ.get("MOONCAKE_TENANT_ID", _DEFAULT_TENANT),
    )


def _from_file(path: str, environ: Mapping[str, str]) -> _Given:
    """Read SGLang's JSON config; what it leaves out has SGLang's defaults, not the variables'."""
    where = f"{CONFIG_VARIABLE} {path}"
    config = _read_config(path, where)
    names = {
        "master": "master_server_address",
        "client": "client_server_address",
        "standalone": "standalone_storage",
        "metrics_port": "master_metrics_port",
        "metadata": "metadata_server",
        "protocol": "protocol",
        "device": "device_name",
        "local_hostname": "local_hostname",
        "tenant": "tenant_id",
    }
    return _Given(
        where=f"{where}: ",
        error=FormatError,
        names=names,
        master=config.get("master_server_address"),
        client=config.get("client_server_address"),
        standalone=config.get("standalone_storage", False),
        metrics_port=str(config.get("master_metrics_port", _DEFAULT_METRICS_PORT)),
        metadata=config.get("metadata_server", _DEFAULT_METADATA),
        # The one setting that the environment gives where the file does not.
        protocol=config.get("protocol", environ.get("MOONCAKE_PROTOCOL", _DEFAULT_PROTOCOL)),
        device=config.get("device_name", ""),
        local_hostname=_hostname(environ, config.get("local_hostname")),
        tenant=config.get("tenant_id") or _DEFAULT_TENANT,
    )


def _hostname(environ: Mapping[str, str], configured: str | None) -> str:
    """Take the name of this machine; the environment wins over the file."""
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
        raise UsageError(f"{name}: {value!r} is neither true nor false")
    return _FLAGS[value.lower()]


def _read_config(path: str, where: str) -> dict[str, Any]:
    config = read_config(path, where)
    _check_types(config, where)
    if "master_server_address" not in config and "client_server_address" not in config:
        raise FormatError(f"{where}: master_server_address is missing")
    return config


def _check_types(config: Mapping[str, Any], where: str) -> None:
    for name, value in config.items():
        if name not in _CONFIG_TYPES:
            known = ", ".join(sorted(_CONFIG_TYPES))
            raise FormatError(f"{where}: unknown key {name!r}; known: {known}")
        if value is None and name in _NULLABLE:
            continue
        types = _CONFIG_TYPES[name]
        # JSON's true is an int to Python, and an integer of any length.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(kind.__name__ for kind in types)
            raise FormatError(f"{where}: {name}: expected {wanted}, found {type(value).__name__}")
