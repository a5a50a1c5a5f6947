"""Read and write objects of a Mooncake cluster as a guest, which is a client without a segment.

Objects on a segment of ours would vanish with our process. Every read grants a lease on the object.
Until the lease ends, the object is neither evicted nor removable.
Source: Mooncake mooncake-store/include/types.h :: ErrorCode. The calls were tried on
mooncake-transfer-engine 0.3.13.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hicachectl.backends.disk.io import errors_as, undo_on_error
from hicachectl.backends.mooncake.ports import close_ports, names_of_sockets
from hicachectl.backends.mooncake.settings import split_address
from hicachectl.formats.errors import StoreUnavailable, UnsupportedByBackend, UsageError
from hicachectl.formats.wording import install_step

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from hicachectl.backends.mooncake.settings import MooncakeSettings

    Codes = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)


class Code(IntEnum):
    """Error codes of the mooncake package. The master's replies use the same names for errors."""

    INTERNAL_ERROR = -1
    NO_SPACE = -200
    INVALID_KEY = -400
    INVALID_PARAMS = -600  # for example: the buffer is smaller than the object
    REPLICA_IS_NOT_READY = -703  # the object's writer has not finished
    OBJECT_NOT_FOUND = -704
    EXISTS = -705
    HAS_LEASE = -706
    LEASE_EXPIRED = -707  # the lease ended between the look-up of the location and the transfer
    REPLICA_IS_GONE = -712
    TRANSFER_FAILED = -800
    CHECKSUM_FAILED = -801
    RPC_FAILED = -900
    RPC_TIMEOUT = -901
    NOT_AVAILABLE = -1010
    NO_QUOTA = -1700
    TENANT_NOT_REGISTERED = -1701
    UNKNOWN_TENANT = -1702


# Codes of keys without a readable object.
MISSING = (Code.OBJECT_NOT_FOUND, Code.REPLICA_IS_NOT_READY)
# Codes of objects that a later read may transfer.
NOT_TRANSFERRED = (Code.LEASE_EXPIRED, Code.TRANSFER_FAILED, Code.CHECKSUM_FAILED)
# Codes that show an unreachable master. If one object has such a code, no result of the call is
# valid.
LOST = (Code.RPC_FAILED, Code.RPC_TIMEOUT, Code.NOT_AVAILABLE)

MESSAGES: dict[int, str] = {
    Code.NO_SPACE: "the cluster has no room; remove pages, or add a storage process",
    Code.INVALID_PARAMS: "the mooncake package refused the call as invalid; check that the "
    "package has the cluster's version",
    Code.REPLICA_IS_NOT_READY: "another writer is still writing the object; run again",
    Code.HAS_LEASE: "a reader holds a lease on the object; wait longer with --lease-wait",
    Code.LEASE_EXPIRED: "the lease ended before the object was transferred; raise the master's "
    "--default_kv_lease_ttl",
    Code.TRANSFER_FAILED: "the object's storage process does not answer; check the cluster's "
    "processes",
    Code.CHECKSUM_FAILED: "the object's bytes changed during the transfer; run again",
    Code.NO_QUOTA: "the tenant has no quota left; remove pages, or raise the quota",
    Code.TENANT_NOT_REGISTERED: "the tenant is not registered with the master",
    Code.UNKNOWN_TENANT: "the tenant is unknown",
}
_LOCAL_BUFFER_BYTES = 16 << 20  # SGLang's value; our reads and writes use the arena instead
_REACH_SECONDS = 5.0
_AT_ONCE_SECONDS = 1.0
# Time limit of a request to the master, unless the environment sets another. Mooncake's default is
# 30 s.
_RPC_TIMEOUT_VARIABLE, _RPC_TIMEOUT_MS = "MC_RPC_TIMEOUT_MS", "15000"
_PATIENCE_SECONDS = 25.0
# Niceness of threads in large transfers, so that Mooncake's busy loop does not take a core from the
# threads that copy. Short calls keep the normal priority, because on a busy machine slow calls
# could outlast their leases.
_NICENESS = 10
_LARGE_BYTES = 1 << 20
_ABANDONED: list[Any] = []  # never freed, because the destructor would wait for a hanging call
_PROBE_KEY = "hicachectl-probe"
_CALLS = ("batch_get_into", "batch_put_from", "batch_remove", "register_buffer")
_OLDEST = "0.3.13"

_INSTALL = (
    f"{install_step('mooncake-transfer-engine')}, or on a host without CUDA "
    "mooncake-transfer-engine-non-cuda"
)


def message_of(code: int) -> str:
    """Return the message for one object's error code."""
    return MESSAGES.get(code, f"Mooncake error {code} (see ErrorCode in Mooncake's types.h)")


class MooncakeClient:
    """`mooncake.store.MooncakeDistributedStore` with time limits and a safe `close`.

    Calls return Mooncake's codes, [n] int64, and raise StoreUnavailable if the master does not
    answer. Mooncake's keys are text.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        """Connect. Raises StoreUnavailable, and UsageError if the package is missing or too old."""
        self._settings = settings
        self._calls = threading.Condition()
        self._running = 0
        # True if a call hangs. Memory that the call may write to must then stay mapped.
        self.abandoned = False
        module = _module()
        self._configuration = module.ReplicateConfig
        self._soft_pin = getattr(module, "SoftPinAction", None)
        _reach(settings.master)
        os.environ.setdefault(_RPC_TIMEOUT_VARIABLE, _RPC_TIMEOUT_MS)
        self._store: Any = None
        before = names_of_sockets()
        began = time.monotonic()
        code = self._set_up(module)
        if code and time.monotonic() - began < _AT_ONCE_SECONDS:
            # The package keeps the connections of this process, and 0.3.14 tries only one of them.
            # After a restart of the master, this connection is dead, and `setup` fails at once.
            code = self._set_up(module)
        if code:
            self._store = None
            raise StoreUnavailable(
                f"mooncake://{settings.master}: cannot set up a client (error {code}); check the "
                f"port (the master's --rpc_port), protocol {settings.protocol!r}, device "
                f"{settings.device!r} and metadata {settings.metadata!r}"
            )
        with undo_on_error(self.close):
            if settings.protocol == "tcp":
                self._close_ports(before)
            self._probe()

    def _set_up(self, module: Any) -> int:
        """Make a client, and return Mooncake's code."""
        settings = self._settings
        self._store = module.MooncakeDistributedStore()
        code: int = self._store.setup(
            _with_port(settings.local_hostname),
            settings.metadata,
            0,  # bytes of our segment
            _LOCAL_BUFFER_BYTES,
            settings.protocol,
            settings.device,
            settings.master,
        )
        return code

    def register(self, address: int, nbytes: int) -> None:
        """Register memory for transfers. Raises StoreUnavailable if Mooncake refuses."""
        if self._call("register_buffer", address, nbytes)[0]:
            raise StoreUnavailable(
                f"mooncake://{self._settings.master}: cannot register {nbytes} bytes of memory "
                "for transfers; raise `ulimit -l`, or give a smaller --buffer-bytes"
            )

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._call("unregister_buffer", address)

    def get_into(
        self, keys: Sequence[str], addresses: Sequence[int], capacities: Sequence[int]
    ) -> Codes:
        """Read objects into registered memory; return sizes or codes. Grants leases."""
        return self._call("batch_get_into", keys, addresses, capacities, nbytes=sum(capacities))

    def put_from(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        *,
        pin_seconds: float | None = None,
    ) -> Codes:
        """Write objects from registered memory; existing objects stay, but their code is also 0.

        pin_seconds: duration of soft pins; None sets none.
        """
        configuration = self._configuration()
        if pin_seconds is not None:
            if self._soft_pin is None:
                raise UnsupportedByBackend(
                    "The mooncake package here cannot pin objects; install a newer version, or "
                    "leave out --pin"
                )
            configuration.soft_pin_action = self._soft_pin.ENABLE
            configuration.soft_pin_ttl_ms = round(pin_seconds * 1000)
        return self._call(
            "batch_put_from", keys, addresses, sizes, configuration, nbytes=sum(sizes)
        )

    def remove(self, keys: Sequence[str]) -> Codes:
        """Remove objects; an object with a lease stays and gets HAS_LEASE."""
        return self._call("batch_remove", keys)

    def lease(self, keys: Sequence[str]) -> Codes:
        """Return 1 for existing objects, else 0. Grants leases."""
        return self._call("batch_is_exist", keys)

    def size(self, key: str) -> int:
        """Return an object's size in bytes, or an error code. Grants a lease."""
        return int(self._call("get_size", key)[0])

    def close(self) -> None:
        """Leave the cluster after the calls of other threads have returned.

        If a call hangs, the client stays in the cluster until this process ends.
        """
        with self._calls:
            store, self._store = self._store, None
            while self._running and not self.abandoned:
                self._calls.wait()
        if store is not None and not self.abandoned:
            store.close()

    def _close_ports(self, before: Set[str]) -> None:
        if left := close_ports(before):
            _log.warning(
                "mooncake://%s: this kernel cannot close the client's ports, so ports %s stay open "
                "to the network during the run; restrict them with a firewall",
                self._settings.master,
                ", ".join(map(str, left)),
            )

    def _call(self, name: str, *arguments: Any, nbytes: int = 0) -> Codes:
        """Call the module with a time limit.

        nbytes: bytes that the call transfers.
        """
        # The module crashes on calls after `close`.
        with self._calls:
            if self._store is None:
                raise ValueError("The store is closed")
            store = self._store
            self._running += 1
        answer = self._awaited(store, name, arguments, _NICENESS * (nbytes >= _LARGE_BYTES))
        codes = np.atleast_1d(np.array(answer, dtype=np.int64))
        if lost := next((int(code) for code in LOST if (codes == code).any()), 0):
            raise StoreUnavailable(
                f"mooncake://{self._settings.master}: the master does not answer (error {lost}); "
                "check that it is running, and has the version of the mooncake package here"
            )
        return codes

    def _awaited(self, store: Any, name: str, arguments: tuple[Any, ...], niceness: int) -> Any:
        """Return a call's answer. Raises StoreUnavailable after _PATIENCE_SECONDS.

        A hanging storage process blocks a transfer for minutes. The transfer cannot be cancelled,
        so its thread is abandoned.
        """
        answers: list[Any] = []
        failures: list[Exception] = []

        def call() -> None:
            try:
                os.nice(niceness)  # on Linux, this changes this thread only
                answers.append(getattr(store, name)(*arguments))
            except Exception as error:
                failures.append(error)
            finally:
                with self._calls:
                    self._running -= 1
                    self._calls.notify_all()

        thread = threading.Thread(target=call, name=f"mooncake-{name}", daemon=True)
        thread.start()
        thread.join(_PATIENCE_SECONDS)
        if thread.is_alive():
            with self._calls:
                self.abandoned = True
                self._calls.notify_all()  # ends the wait of `close`
            _ABANDONED.append(store)
            raise StoreUnavailable(
                f"mooncake://{self._settings.master}: {name} got no answer within "
                f"{_PATIENCE_SECONDS:.0f} s; check whether the master or a storage process hangs"
            )
        if failures:
            raise failures[0]
        return answers[0]

    def _probe(self) -> None:
        """Raise StoreUnavailable if the master is incompatible, which `setup` does not check."""
        try:
            code = int(self._call("is_exist", _PROBE_KEY)[0])
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"mooncake://{self._settings.master}: the master accepts connections, but does not "
                "answer the mooncake package here; install the version that the cluster runs"
            ) from error
        if code < 0:
            raise StoreUnavailable(
                f"mooncake://{self._settings.master}: the master refused to look up a key: "
                f"{message_of(code)}; check the master's log"
            )


def _reach(master: str) -> None:
    """Raise StoreUnavailable if nothing listens at the master's address.

    Without this check, `setup` would retry, and would ignore Ctrl-C during the retries.
    """
    url = f"mooncake://{master}"
    next_step = "check that the master is running and that this is its --rpc_port (default 50051)"
    with errors_as(StoreUnavailable, url, "connect to the master", next_step):
        socket.create_connection(split_address(master, "the master"), _REACH_SECONDS).close()


def _with_port(hostname: str) -> str:
    """Add a free port to our host name, because without a port `setup` tries 20 ports and fails.

    A name with a colon has a port, or is an IPv6 address, which needs no port.
    """
    if ":" in hostname:
        return hostname
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{hostname}:{free.getsockname()[1]}"


def _module() -> Any:
    try:
        from mooncake import store
    except ModuleNotFoundError as error:
        raise UsageError(f"The mooncake package is missing; {_INSTALL}") from error
    # An example is the CUDA build on a host without a driver or without libibverbs.
    except ImportError as error:
        raise UsageError(
            f"The mooncake package cannot be loaded ({error}); install the missing library, or "
            f"{_INSTALL}"
        ) from error
    if lacks := [name for name in _CALLS if not hasattr(store.MooncakeDistributedStore, name)]:
        raise UsageError(
            f"The mooncake package is too old: {lacks[0]} is missing; install {_OLDEST} or later"
        )
    return store
