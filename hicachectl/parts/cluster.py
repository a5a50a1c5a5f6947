"""Do stages of parts on the nodes of a Ray cluster. Only this module imports Ray."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hicachectl import __version__
from hicachectl.backends.disk.io import Closing
from hicachectl.formats.errors import DeviceError, HicacheError, StoreUnavailable, UsageError
from hicachectl.formats.wording import install_step
from hicachectl.io.forking import unpacked_error
from hicachectl.parts.child import (
    ANSWERS,
    STOP_SECONDS,
    Failed,
    Lost,
    Order,
    encoded,
    in_child,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping

    from hicachectl.parts.child import Answer

_LOCAL_STORE_BYTES = 100 << 20
_PROBE_SECONDS = 60.0
_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_CANCEL_SECONDS = STOP_SECONDS + 15
_ADDRESS = re.compile(r"auto|local|[^\s:/]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}")
# In HTTP/2 (RFC 9113, sections 3.4 and 6.5), both sides first send a SETTINGS frame. The frame sent
# here is empty.
# A frame begins with a head of nine bytes. The fourth byte is the type of the frame.
_HTTP2_HEAD_BYTES = 9
_HTTP2_SETTINGS = b"\x04"
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _HTTP2_SETTINGS + bytes(5)
# Items of a task that Ray produces before the driver takes the first.
_AHEAD = 4


class LostError(Exception):
    """An attempt at a part is lost.

    error: the error of the stage; None if there was none.
    """

    def __init__(self, reason: str, error: HicacheError | None = None) -> None:
        super().__init__(reason)
        self.error = error


class StoppedError(Exception):
    """The run is stopped, so a stage was cancelled or did not begin."""


class Node(NamedTuple):
    """A node of the cluster.

    number: id of the node.
    name: host of the node. If several nodes have this host, the start of the id follows.
    """

    number: str
    name: str


def parse_address(text: str) -> str:
    """Return a valid address of a cluster. Raises UsageError."""
    if text.startswith("ray://"):
        raise UsageError(
            f"--ray {text}: a Ray client cannot run parts; run on a node of the cluster with "
            "--ray auto"
        )
    if not _ADDRESS.fullmatch(text):
        raise UsageError(f"--ray {text}: give auto, local or HOST:PORT")
    return text


# the cluster


class Cluster(Closing):
    """A connection to a cluster; a context manager. Ray's own output on stdout is discarded."""

    def __init__(self, address: str) -> None:
        """Connect. Raises UsageError if Ray is missing, StoreUnavailable if connecting fails."""
        self._stack = ExitStack()
        try:
            import ray
        except ImportError as error:
            raise UsageError(f"--ray {address}: needs Ray; {install_step('ray')}") from error
        self._ray: Any = ray
        try:
            self._stack.enter_context(_stdout_discarded())
            self._connect(address)
            self._task = self._ray.remote(
                num_returns="streaming",
                max_retries=0,
                _generator_backpressure_num_objects=_AHEAD,
            )(in_child)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect; Ray ends the tasks of this connection."""
        self._stack.close()

    def _connect(self, address: str) -> None:
        meant = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        parse_address(meant)
        options: dict[str, Any] = {}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # so that Ray sends no reports
            options = {"include_dashboard": False, "object_store_memory": _LOCAL_STORE_BYTES}
        elif meant not in ("auto", "local"):
            _refuse_unreachable(meant)
        self._stack.callback(self._ray.shutdown)
        # `ray.init` sets a handler of SIGTERM, so put back the handlers of this process afterwards.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        terminated = False
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
        except SystemExit:  # Ray's handler of SIGTERM
            terminated = True
        # Ray raises ConnectionError, RuntimeError for other versions, ValueError, and more.
        except Exception as error:
            raise StoreUnavailable(
                f"--ray {address}: {_line(error)}; check that the cluster runs, with the Ray and "
                "Python of this environment"
            ) from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if terminated:
            signal.raise_signal(signal.SIGTERM)

    def nodes(self) -> list[Node]:
        """Return the living nodes that have a CPU for tasks."""
        living = [
            (node["NodeID"], node["NodeManagerHostname"])
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
        ]
        hosts = Counter(host for _, host in living)
        return [
            Node(number, host if hosts[host] == 1 else f"{host} ({number[:8]})")
            for number, host in living
        ]

    def refusals(self, nodes: Collection[Node], job: bytes) -> dict[Node, str]:
        """Return the nodes that cannot work, each with the reason.

        A node cannot work if it has another release, does not answer, or cannot open the job.
        job: see `Order`.
        """
        mine = {
            "hicachectl": __version__,
            "Python": platform.python_version(),
            "Ray": self._ray.__version__,
        }
        task = self._ray.remote(max_retries=0)(_probe_function())
        order = encoded(Order(job=job))
        living = {node.number for node in self.nodes()}  # a task for a lost node would wait
        refused = {node: "it left the cluster" for node in nodes if node.number not in living}
        asked = {
            node: self._on(task, node).remote(mine, order) for node in nodes if node not in refused
        }
        until = time.monotonic() + _PROBE_SECONDS
        for node, answer in asked.items():
            try:
                reason = self._ray.get(answer, timeout=max(until - time.monotonic(), 0))
                if isinstance(reason, bytes):
                    reason = _refusal(ANSWERS.decode(reason))
            except self._ray.exceptions.GetTimeoutError:
                self._ray.cancel(answer, force=True)
                reason = f"did not answer for {_PROBE_SECONDS:.0f} s"
            except self._ray.exceptions.RayError as error:
                reason = _line(error)
            if reason:
                refused[node] = reason
        return refused

    def answers(
        self, node: Node, order: Order, stopped: Callable[[], bool]
    ) -> Generator[Answer, None, None]:
        """Do a stage on a node. Yield its answers, of which the last is an Outcome.

        stopped: function that returns whether to stop. If so, the stage is cancelled, and
            StoppedError is raised.
        Closing the iterator cancels the stage, too. Raises LostError, HicacheError, and
        RuntimeError with a traceback for a bug.
        """
        task = self._on(self._task, node).remote(encoded(order))
        try:
            while True:
                if stopped():
                    raise StoppedError
                if not self._ray.wait([task], timeout=_LOOK_SECONDS)[0]:
                    continue
                answer = ANSWERS.decode(self._ray.get(next(task)))
                match answer:
                    case Lost(text):
                        raise LostError(text)
                    case Failed(name, text):
                        raise _raised(name, text)
                yield answer
        except StopIteration:
            return
        except self._ray.exceptions.RayError as error:
            raise LostError(_line(error)) from error
        finally:
            self._cancel(task)

    def _on(self, task: Any, node: Node) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return task.options(
            num_cpus=1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.number, soft=False),
        )

    def _cancel(self, task: Any) -> None:
        """Cancel a task, and wait until it has ended. Do nothing if it has ended already.

        After _CANCEL_SECONDS, cancel the task by force, and do not wait.
        """
        until = time.monotonic() + _CANCEL_SECONDS
        with suppress(self._ray.exceptions.RayError, StopIteration):
            self._ray.cancel(task)
            while time.monotonic() < until:
                if self._ray.wait([task], timeout=_LOOK_SECONDS)[0]:
                    self._ray.get(next(task))
            self._ray.cancel(task, force=True)


def _refuse_unreachable(address: str) -> None:
    """Raise StoreUnavailable if no gRPC server listens at an address.

    Ray itself would try for minutes. With TLS, only the connection is tried.
    """
    host, _, port = address.rpartition(":")
    place = (host.strip("[]"), int(port))
    problem = "nothing answers there"
    try:
        with socket.create_connection(place, _CONNECT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            problem = "another program than Ray listens there"
            connection.sendall(_HTTP2_PREFACE)
            with connection.makefile("rb") as answers:
                head = answers.read(_HTTP2_HEAD_BYTES)
        if head[3:4] == _HTTP2_SETTINGS:
            return
        reason = ""
    except (OSError, OverflowError) as error:
        reason = f" ({_line(error)})"
    raise StoreUnavailable(
        f"--ray {address}: {problem}{reason}; give the address of the cluster's head node, with "
        "the port of its GCS (by default 6379)"
    )


@contextmanager
def _stdout_discarded() -> Iterator[None]:
    """Discard all output of this process on stdout, from Python and from libraries."""
    sys.stdout.flush()
    kept = os.dup(1)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            with contextlib.redirect_stdout(nowhere):
                yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _probe_function() -> Callable[[Mapping[str, str], bytes], str | bytes]:
    """Return a function for a node to run. It returns a reason, or the last answer of `in_child`.

    A reason is a text that says why the node cannot work.
    The function is nested, because Ray sends nested functions by value. So it runs even on a node
    that has another hicachectl, or none.
    """

    def probe(mine: Mapping[str, str], order: bytes) -> str | bytes:
        import platform

        import ray

        try:
            import hicachectl
            from hicachectl.parts.child import in_child
        except ImportError as error:
            return f"cannot import hicachectl ({error})"
        theirs = {
            "hicachectl": hicachectl.__version__,
            "Python": platform.python_version(),
            "Ray": ray.__version__,
        }
        for name, version in mine.items():
            if theirs[name] != version:
                return f"has {name} {theirs[name]}, but this host has {version}"
        return list(in_child(order))[-1]

    return probe


def _refusal(answer: Answer) -> str:
    return " ".join(answer.text.split()) if isinstance(answer, Failed | Lost) else ""


def _raised(name: str, text: str) -> Exception:
    """Return the exception for a failed stage.

    The loss of a store or device may be the node's fault, so only the attempt is lost, not the run.
    """
    error = unpacked_error(name, text, where="On another node")
    if isinstance(error, StoreUnavailable | DeviceError):
        return LostError(text, error)
    return error


def _line(error: BaseException) -> str:
    """Return the start of an error's text in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"
