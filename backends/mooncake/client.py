"""Our data client of a Mooncake cluster: a guest, which contributes no segment.

Data put on a segment of ours would vanish with our process. Every call that reads grants the
objects a lease: they are not evicted, and cannot be removed, until it ends.
Source: Mooncake mooncake-store/include/types.h :: ErrorCode, and the calls as tried on
mooncake-transfer-engine 0.3.13.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hicachectl.backends.mooncake.settings import split_address
from hicachectl.formats.errors import StoreUnavailable, UnsupportedByBackend, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.backends.mooncake.settings import MooncakeSettings

    Codes = npt.NDArray[np.int64]

NO_SPACE = -200
INVALID = -600  # among others: the buffer is smaller than the object
NOT_READY = -703  # its writer has not finished
NOT_FOUND = -704
EXISTS = -705
HAS_LEASE = -706
LEASE_EXPIRED = -707  # between the question where it lies and the transfer
TRANSFER_FAILED = -800
CHECKSUM_FAILED = -801
RPC_FAILED = -900
RPC_TIMEOUT = -901
NOT_AVAILABLE = -1010
# These say nothing against the object itself, which may be read the next time.
NOT_TRANSFERRED = (LEASE_EXPIRED, TRANSFER_FAILED, CHECKSUM_FAILED)
# The master does not answer: no answer about one object means anything.
LOST = (RPC_FAILED, RPC_TIMEOUT, NOT_AVAILABLE)

MESSAGES = {
    NO_SPACE: "the cluster has no room; remove pages, or add a storage process",
    INVALID: "refused by the client as invalid",
    NOT_READY: "it is being written",
    HAS_LEASE: "a reader holds a lease on it; wait longer with --lease-wait",
    LEASE_EXPIRED: "its lease ended before it was transferred; raise the master's "
    "--default_kv_lease_ttl",
    TRANSFER_FAILED: "its storage process does not answer",
    CHECKSUM_FAILED: "its bytes were changed in transfer",
    -1700: "the tenant has no quota left",
    -1701: "the tenant is not registered with the master",
    -1702: "the tenant is unknown",
}
_LOCAL_BUFFER_BYTES = 16 << 20  # SGLang's; reads and writes of ours go to the arena instead
_REACH_SECONDS = 5.0
# Of one question to the master, where the environment does not say; Mooncake's own is 30 s.
_RPC_TIMEOUT_VARIABLE, _RPC_TIMEOUT_MS = "MC_RPC_TIMEOUT_MS", "15000"
_PATIENCE_SECONDS = 25.0
# Added in the thread that waits for a large transfer: Mooncake has it wait in a loop, where it
# would take a core from the threads that copy, ours among them. Short calls would only be slower
# on a busy machine, and outlast the leases that they grant.
_NICENESS = 10
_LARGE_BYTES = 1 << 20
_ABANDONED: list[Any] = []  # never given back: their end would wait for what hangs
_PROBE_KEY = "hicachectl-probe"
_CALLS = ("batch_get_into", "batch_put_from", "batch_remove", "register_buffer")
_OLDEST = "0.3.13"

_INSTALL = (
    "pip install 'hicachectl[mooncake]', "
    "or mooncake-transfer-engine-non-cuda where there is no CUDA"
)


def message_of(code: int) -> str:
    """Say what an error code means for one object."""
    return MESSAGES.get(code, f"Mooncake error {code}")


class MooncakeClient:
    """`mooncake.store.MooncakeDistributedStore`, made safe to hold: no call after `close`.

    Calls return Mooncake's codes, [n] int64, and raise StoreUnavailable when the master does not
    answer. Keys are text: Mooncake has no others.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        """Connect. Raises UsageError without the package, StoreUnavailable without the cluster."""
        self._settings = settings
        self._calls = threading.Condition()
        self._running = 0
        self.abandoned = False  # a call hangs, so that memory it may write to has to stay
        module = _module()
        self._configuration = module.ReplicateConfig
        self._soft_pin = getattr(module, "SoftPinAction", None)
        _reach(settings.master)
        os.environ.setdefault(_RPC_TIMEOUT_VARIABLE, _RPC_TIMEOUT_MS)
        self._store: Any = module.MooncakeDistributedStore()
        code = self._store.setup(
            _with_port(settings.local_hostname),
            settings.metadata,
            0,  # our segment
            _LOCAL_BUFFER_BYTES,
            settings.protocol,
            settings.device,
            settings.master,
        )
        if code:
            self._store = None
            raise StoreUnavailable(
                f"mooncake://{settings.master}: no client could be set up (error {code}); check "
                f"that this is the master's --rpc_port, protocol {settings.protocol!r}, device "
                f"{settings.device!r} and metadata {settings.metadata!r}"
            )
        try:
            self._probe()
        except BaseException:
            self.close()
            raise

    def register(self, address: int, nbytes: int) -> None:
        """Make memory fit for transfers. Raises StoreUnavailable where that is refused."""
        if self._call("register_buffer", address, nbytes)[0]:
            raise StoreUnavailable(
                f"mooncake://{self._settings.master}: {nbytes} bytes of memory could not be "
                "registered for transfers; raise `ulimit -l`, or give a smaller --buffer-bytes"
            )

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._call("unregister_buffer", address)

    def get_into(
        self, keys: Sequence[str], addresses: Sequence[int], capacities: Sequence[int]
    ) -> Codes:
        """Read objects into registered memory: sizes, or codes. Grants leases."""
        return self._call("batch_get_into", keys, addresses, capacities, nbytes=sum(capacities))

    def put_from(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        *,
        pin: bool = False,
        pin_seconds: float | None = None,
    ) -> Codes:
        """Write objects from registered memory; 0 also for those that exist, which stay.

        pin_seconds: None for the master's --default_kv_soft_pin_ttl.
        """
        configuration = self._configuration()
        if pin:
            if self._soft_pin is None:
                raise UnsupportedByBackend("this version of Mooncake cannot pin objects")
            configuration.soft_pin_action = self._soft_pin.ENABLE
            if pin_seconds is not None:
                configuration.soft_pin_ttl_ms = int(pin_seconds * 1000)
        return self._call(
            "batch_put_from", keys, addresses, sizes, configuration, nbytes=sum(sizes)
        )

    def remove(self, keys: Sequence[str]) -> Codes:
        """Remove objects that nobody has leased."""
        return self._call("batch_remove", keys)

    def lease(self, keys: Sequence[str]) -> Codes:
        """Ask which objects are there: 1, or 0. Each is leased, and so evicted later."""
        return self._call("batch_is_exist", keys)

    def size(self, key: str) -> int:
        """Ask for an object's size; a code where it has none. Grants a lease."""
        return int(self._call("get_size", key)[0])

    def close(self) -> None:
        """Leave the cluster, once the calls of other threads have returned."""
        with self._calls:
            store, self._store = self._store, None
            while self._running and not self.abandoned:
                self._calls.wait()
        if store is not None and not self.abandoned:
            store.close()

    def _call(self, name: str, *arguments: Any, nbytes: int = 0) -> Codes:
        """Call the module. nbytes: to be transferred."""
        # The module crashes on calls after its close.
        with self._calls:
            if self._store is None:
                raise ValueError("the store is closed")
            store = self._store
            self._running += 1
        answer = self._awaited(store, name, arguments, _NICENESS * (nbytes >= _LARGE_BYTES))
        codes = np.atleast_1d(np.array(answer, dtype=np.int64))
        if lost := next((int(code) for code in LOST if (codes == code).any()), 0):
            raise StoreUnavailable(
                f"mooncake://{self._settings.master}: the master does not answer (error {lost}); "
                "is it running, and of the version of the mooncake package here?"
            )
        return codes

    def _awaited(self, store: Any, name: str, arguments: tuple[Any, ...], niceness: int) -> Any:
        """Give what a call answers. Raises StoreUnavailable where it does not within a time.

        A storage process that hangs keeps a transfer for minutes, and nothing ends it: the call is
        left to a thread that nobody waits for.
        """
        answers: list[Any] = []
        failures: list[Exception] = []

        def call() -> None:
            try:
                os.nice(niceness)  # of this thread alone, on Linux
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
                self._calls.notify_all()  # `close` waits no longer either
            _ABANDONED.append(store)
            raise StoreUnavailable(
                f"mooncake://{self._settings.master}: no answer to a transfer within "
                f"{_PATIENCE_SECONDS:.0f} s; does a storage process of the cluster hang?"
            )
        if failures:
            raise failures[0]
        return answers[0]

    def _probe(self) -> None:
        """Find out now whether the master understands us; `setup` says 0 to any version."""
        try:
            code = int(self._call("is_exist", _PROBE_KEY)[0])
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"mooncake://{self._settings.master}: the master was reached, but does not "
                "understand the mooncake package here; install the version that the cluster runs"
            ) from error
        if code < 0:
            raise StoreUnavailable(
                f"mooncake://{self._settings.master}: the master refused us: {message_of(code)}"
            )


def _reach(master: str) -> None:
    """Raise StoreUnavailable where nothing listens; `setup` would try on, deaf to Ctrl-C."""
    try:
        socket.create_connection(split_address(master, "the master"), _REACH_SECONDS).close()
    except OSError as error:
        raise StoreUnavailable(
            f"mooncake://{master}: cannot connect to the master ({error.strerror or error}); is it "
            "running, and is this its --rpc_port, 50051 by default?"
        ) from error


def _with_port(hostname: str) -> str:
    """Add a free port to our name; without one `setup` fails 20 times, with a port of its own each.

    A name with a colon has one already, or is an IPv6 address, which Mooncake takes as it is.
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
        raise UsageError(f"Mooncake stores need a package that is missing: {_INSTALL}") from error
    except ImportError as error:  # the CUDA build without a driver, or without libibverbs
        raise UsageError(
            f"the mooncake package cannot be loaded ({error}): install what it lacks, or {_INSTALL}"
        ) from error
    if lacks := [name for name in _CALLS if not hasattr(store.MooncakeDistributedStore, name)]:
        raise UsageError(
            f"the mooncake package is too old: it has no {lacks[0]}; {_OLDEST} or later is needed"
        )
    return store
