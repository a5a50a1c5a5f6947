"""The plug-in's keys of --hicache-storage-backend-extra-config.

Unknown keys, and values that no store could honour, are refused here, on all ranks alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicachectl.backends.urls import SCHEMES, parse_url, without_secrets
from hicachectl.formats.documents import shown
from hicachectl.formats.errors import UsageError
from hicachectl.formats.sizes import parse_size
from hicachectl.formats.trailer import DEFAULT_DIGEST, DIGEST_KINDS
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hicachectl.backends.urls import StoreUrl

LONGEST_CALL_S = 8.0  # cache_controller.py :: _stop_storage_threads gives up after 10 s
MOST_THREADS = 64

# Keys that SGLang reads: backend_factory.py :: _create_dynamic_backend, cache_controller.py ::
# attach_storage_backend and _generate_storage_config, hybrid_cache_controller.py ::
# parse_storage_backend_extra_config, pool_host/common.py :: get_allocator_type.
_SGLANG_KEYS = (
    "allocator",
    "backend_name",
    "class_name",
    "hicache_storage_pass_prefix_keys",
    "interface_v1",
    "module_path",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "tp_lcm_size",
)
_NAMED_STORE = re.compile(r"([^/:]+):")
_LONGEST_IDENTITY = 200
# Keys that have an effect only if the first store is a directory.
_WRITTEN_FILES = ("max_size", "min_free_space", "evict", "on_foreign")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of the keys.

    stores: the stores in order. The first is written, unless `reads_only`; the others are read on a
        miss.
    digest: kind of the digests of written objects, one of DIGEST_KINDS.
    identity: "auto", or a text in place of the fingerprint of the weights.
    op_timeout: most seconds for a call; a write of more than 128 pages has this time for each 128.
    max_size: most bytes of the files of one rank; None without a limit.
    min_free_space: bytes to leave free on the file system.
    """

    stores: tuple[StoreUrl, ...]
    digest: str = "xxh3"
    identity: str = "auto"
    unstamped: str = "refuse"
    unranked: str = "read"
    on_foreign: str = "replace"
    op_timeout: float = 5.0
    threads: int = 4
    max_size: int | None = None
    min_free_space: int = 0
    evict: str = "owner"
    on_clear: str = "own"

    @property
    def names(self) -> tuple[str, ...]:
        """The stores' URLs without secrets."""
        return tuple(without_secrets(str(url)) for url in self.stores)

    @property
    def reads_only(self) -> bool:
        """Whether the server only reads, because no store of the list can be written."""
        return not self.stores[0].kind.served


def parse_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """Return the settings of a server.

    extra_config: SGLang's HiCacheStorageConfig.extra_config.
    Raises ValueError with key, value and remedy. SGLang reports the error when it starts or
    attaches a store.
    """
    config = dict(extra_config or {})
    given = {key: value for key, value in config.items() if key not in _SGLANG_KEYS}
    known = {"store", *_PARSERS}
    if unknown := sorted(map(str, given.keys() - known)):
        raise ValueError(
            f"{unknown[0]!r} is not a key of hicachectl; known: {', '.join(sorted(known))}"
        )
    interface = config.get("interface_v1", 0)
    if not interface:
        raise ValueError(
            f'interface_v1: {shown(interface)} makes SGLang copy each page; set "interface_v1": 1'
        )
    stores = _stores(given.pop("store", None))
    _refuse_idle(given, stores)
    has_trailers = stores[0].kind.directory
    values = {key: _PARSERS[key](key, value) for key, value in given.items()}
    settings = Settings(
        **{"stores": stores, "digest": DEFAULT_DIGEST if has_trailers else "off", **values}
    )
    if settings.digest != "off" and not has_trailers:
        raise ValueError(
            f"digest: {settings.digest!r} has no room in a {stores[0].scheme} store; remove the "
            'key, or give "off"'
        )
    return settings


def _stores(value: Any) -> tuple[StoreUrl, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise ValueError(
            f"store: {shown(value)} is not a store URL or a list of store URLs; give a URL such "
            "as file:///mnt/hicache"
        )
    stores = tuple(map(_store, texts))
    for position, store in enumerate(stores):
        if store in stores[:position]:
            raise ValueError(f"store: {_safe(store)} is given twice; give each store once")
    for store in stores:
        if not (store.kind.served or store.kind.archive):
            served = ", ".join(name for name, kind in SCHEMES.items() if kind.served)
            raise ValueError(
                f"store: {_safe(store)} is no store that servers can use; migrate it to one of "
                f"{served}, or to a pack"
            )
    writable = [store for store in stores if store.kind.served]
    if writable and stores[0] not in writable:
        raise ValueError(
            f"store: {_safe(stores[0])} cannot be written by a server; put {_safe(writable[0])} "
            "first"
        )
    return stores


def _store(text: str) -> StoreUrl:
    named = _NAMED_STORE.fullmatch(text)
    if named and named[1] not in SCHEMES:
        raise ValueError(
            f"store: {text!r} names a store of a config file, which servers do not read; give the "
            "URL of the store"
        )
    try:
        return parse_url(text)
    except UsageError as error:
        raise ValueError(f"store: {without_secrets(str(error))}") from None


def _safe(store: StoreUrl) -> str:
    return without_secrets(str(store))


def _refuse_idle(given: Iterable[str], stores: tuple[StoreUrl, ...]) -> None:
    """Refuse keys that would have no effect on these stores."""
    has_files = any(store.kind.directory for store in stores)
    has_archive = any(store.kind.archive for store in stores)
    effects = dict.fromkeys(_WRITTEN_FILES, stores[0].kind.directory)
    effects |= {"unranked": has_files, "unstamped": has_files or has_archive}
    for key in given:
        if not effects.get(key, True):
            raise ValueError(f"{key}: has no effect on a {stores[0].scheme} store; remove the key")


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def parse(key: str, value: Any) -> str:
        if value not in choices:
            raise ValueError(not_one_of(key, value, choices))
        return str(value)

    return parse


def _identity(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(
            f"{key}: {shown(value)} is not printable text; give a text that names the weights"
        )
    if not 0 < len(value) <= _LONGEST_IDENTITY:
        raise ValueError(
            f"{key}: has {len(value)} characters; give 1 to {_LONGEST_IDENTITY}, or auto"
        )
    return value


def _seconds(key: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= LONGEST_CALL_S:
        raise ValueError(
            f"{key}: {shown(value)} is not a number in range; give more than 0 and at most "
            f"{LONGEST_CALL_S:.0f} seconds, because SGLang waits 10 s for a call and then fails"
        )
    return float(value)


def _threads(key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_THREADS:
        raise ValueError(f"{key}: {shown(value)} is not a whole number from 1 to {MOST_THREADS}")
    return value


def _size(least: int) -> Callable[[str, Any], int]:
    def parse(key: str, value: Any) -> int:
        # The config may have a number instead of a text. `parse_size` refuses other values.
        text = value if isinstance(value, str) else shown(value)
        try:
            return parse_size(text, least)
        except UsageError as error:
            raise ValueError(f"{key}: {error}") from None

    return parse


_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    "digest": _one_of(*DIGEST_KINDS),
    "identity": _identity,
    "unstamped": _one_of("refuse", "read"),
    "unranked": _one_of("refuse", "read"),
    "on_foreign": _one_of("replace", "leave"),
    "op_timeout": _seconds,
    "threads": _threads,
    "max_size": _size(1),
    "min_free_space": _size(0),
    "evict": _one_of("owner", "this"),
    "on_clear": _one_of("own", "refuse"),
}
