"""Make a live SGLang server load prefixes from its store into its memory.

Each prefix is a /generate request for one new token. The server fetches from L3 what L1 and L2
lack, and reports how many tokens each of the three has served. Sources, in SGLang's srt:

- entrypoints/http_server.py :: generate_request
- managers/io_struct.py :: GenerateReqInput
- managers/scheduler_components/output_streamer.py :: get_cached_tokens_details
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from msgspec.structs import replace

from hicachectl.backends.http import fit
from hicachectl.formats.documents import parse_json_object, shown
from hicachectl.formats.errors import FormatError, ProfileError, StoreUnavailable
from hicachectl.formats.hashing import tokens_to_restore
from hicachectl.formats.objects import MAX_RANKS
from hicachectl.formats.profile import MAX_ALL_RANKS, above
from hicachectl.io.interrupts import deferred, persistent
from hicachectl.profiles.server import API_KEY_VARIABLE, server_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hicachectl.backends.http import Reply
    from hicachectl.requests.chains import Hashing
    from hicachectl.requests.forms import Request

REQUEST_TIMEOUT_S = 120.0
BUSY_PATIENCE_S = 300.0  # longest time in which a server gives only "busy" answers
_TRIES = 3  # most times that a failing request is sent
_GIVE_UP_AFTER = 3  # failed requests in a row after which a server is given up
_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
_BUSY = (http.client.TOO_MANY_REQUESTS, http.client.SERVICE_UNAVAILABLE)
_CHECK_SERVER = "check that --through-server names an SGLang server"
_SAID_CHARS = 200  # longest error text of a server that is shown
_SOURCES = ("device", "host", "storage")


class PulledRequest(TypedDict):
    """Row for a request that was sent to a server."""

    request: int
    dp_rank: int | None
    tokens: int
    cached_tokens: int
    cached_tokens_details: dict[str, int] | None
    error: str | None


class PulledServer(TypedDict):
    """Row for a server that was asked to load pages."""

    server: str
    requests: list[PulledRequest]
    failed: int
    cached_tokens: int
    complete: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class Prefix:
    """Beginning of a request, which makes a server restore pages.

    number: number of the request.
    tokens: number of tokens in the pages to restore.
    request: the request, cut to these tokens and the tokens that the server must compute.
    """

    number: int
    tokens: int
    request: Request

    def pulled(
        self,
        dp_rank: int | None,
        cached_tokens: int = 0,
        sources: dict[str, int] | None = None,
        error: str | None = None,
    ) -> PulledRequest:
        """Return the row of the document.

        dp_rank: number of the DP rank; None for a single rank.
        cached_tokens: number of tokens that the server did not compute.
        sources: number of cached tokens from device, host and storage; None if the server does not
            report them.
        error: why the request failed; None if it succeeded.
        """
        return {
            "request": self.number,
            "dp_rank": dp_rank,
            "tokens": self.tokens,
            "cached_tokens": cached_tokens,
            "cached_tokens_details": sources or None,
            "error": error,
        }


def prefix_of(number: int, request: Request, pages: int, hashing: Hashing) -> Prefix:
    """Cut a request to the tokens that make a server restore its first pages.

    A server computes at least one token after the pages. If the request ends with the pages, its
    last token is repeated, because any token will do.
    Raises FormatError if the request is too short, as after a change of the file.
    """
    wanted = tokens_to_restore(pages, hashing.page_size, bigram=hashing.bigram)
    token_ids = request.token_ids[:wanted]
    if len(token_ids) < wanted - 1:
        raise FormatError(
            f"{request.where}: tokens ({len(token_ids)}) are too few for the pages to restore "
            f"({pages}); if the file has changed, run again"
        )
    token_ids += token_ids[-1:] * (wanted - len(token_ids))
    return Prefix(number, pages * hashing.page_size, replace(request, token_ids=token_ids))


def dp_ranks(server_info: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the DP ranks of a server, each with its own cache; (None,) for a single rank.

    server_info: parsed reply of /server_info.
    Source: srt/runtime_context.py :: num_dp_ranks_of.
    Raises ProfileError for more ranks than a server can have.
    """
    ranks = 1
    for name in ("dp_size", "attn_dp_size"):
        size = server_info.get(name)
        if type(size) is int and size > 0:
            for problem in above(name, size, MAX_RANKS):
                raise ProfileError(f"server_info: {problem}; {_CHECK_SERVER}")
            ranks *= size
    for problem in above("dp_size x attn_dp_size", ranks, MAX_ALL_RANKS):
        raise ProfileError(f"server_info: {problem}; {_CHECK_SERVER}")
    return tuple(range(ranks)) if ranks > 1 else (None,)


def generate_body(request: Request, dp_rank: int | None) -> dict[str, Any]:
    """Return the body of a /generate request for one new token."""
    body: dict[str, Any] = {
        "input_ids": request.token_ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "stream": False,
    }
    optional = {
        "extra_key": request.extra_key,
        "cache_salt": request.cache_salt,
        "routed_dp_rank": dp_rank,
    }
    return body | {name: value for name, value in optional.items() if value is not None}


def _ended(
    running: set[Future[None]],
    deadline: float | None,
    on_done: Callable[[int], None],
    check: Callable[[], None],
) -> bool:
    """Wait until a request ends, and remove it from `running`.

    Return False if no request ends before the deadline. Raises the exception of the request.
    """
    left = None if deadline is None else max(deadline - time.monotonic(), 0)
    ended, _ = wait(running, left, FIRST_COMPLETED)
    running -= ended
    for request in ended:
        request.result()
        on_done(1)
        check()
    return bool(ended)


class ThroughServer:
    """Requests to one live server. Call `pull` once.

    pulled: results so far, in the order of completion. An interruption of `pull` loses no result.
    complete: whether every prefix was requested.
    error: why the server was given up; None if it was not.
    api_key: key of the server; None for the value of HICACHECTL_API_KEY.
    jobs: most requests at the same time.
    Raises UsageError for a malformed URL or key.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        jobs: int = 8,
        ranks: Sequence[int | None] = (None,),
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        busy_patience_s: float = BUSY_PATIENCE_S,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._service, base = server_service(
            url, "--through-server", api_key=api_key, timeout_s=request_timeout_s
        )
        self._path = f"{base}/generate"
        self._url, self._jobs, self._ranks = url, jobs, tuple(ranks)
        self._pauses = _Backoff(pause_s, busy_patience_s)
        self._lock = threading.Lock()
        self._failed_in_a_row = 0
        self.complete = False
        self.error: str | None = None
        self.pulled: list[PulledRequest] = []

    def document(self) -> PulledServer:
        """Return the row for the server, with its requests so far. May be called during `pull`."""
        pulled = list(self.pulled)
        return {
            "server": self._url,
            "requests": pulled,
            "failed": sum(bool(request["error"]) for request in pulled),
            "cached_tokens": sum(request["cached_tokens"] for request in pulled),
            "complete": self.complete,
            "error": self.error,
        }

    def pull(
        self,
        prefixes: Iterable[Prefix],
        deadline: float | None = None,
        on_done: Callable[[int], None] = lambda requests: None,
    ) -> None:
        """Request prefixes in order, from every rank.

        prefixes: prefixes to request. They are taken from the iterable one at a time.
        deadline: `time.monotonic()` at which unfinished requests are abandoned; None for no limit.
        on_done: function that is called with 1 after each result, in this thread.
        Raises StoreUnavailable if the server refuses the key, lacks the endpoint, keeps failing or
        stays busy.
        """
        pool = ThreadPoolExecutor(self._jobs, thread_name_prefix="pull-")
        running = set[Future[None]]()
        try:
            with persistent() as check:
                for prefix, rank in ((each, rank) for each in prefixes for rank in self._ranks):
                    # A signal within `submit` could start a thread that the pool never joins.
                    with deferred():
                        running.add(pool.submit(self._take, prefix, rank))
                    full = len(running) == self._jobs
                    if full and not _ended(running, deadline, on_done, check):
                        return
                while running:
                    if not _ended(running, deadline, on_done, check):
                        return
            self.complete = True
        except StoreUnavailable as error:
            self.error = str(error)
            raise
        finally:
            with deferred():
                self._pauses.stop()
                self._service.close()
                pool.shutdown()

    def _take(self, prefix: Prefix, rank: int | None) -> None:
        """Request a prefix, and record the result unless the request was abandoned."""
        pulled = self._pull(prefix, rank)
        if not (pulled["error"] and self._pauses.stopped):
            self.pulled.append(pulled)

    def _pull(self, prefix: Prefix, rank: int | None) -> PulledRequest:
        body = json.dumps(generate_body(prefix.request, rank)).encode()
        try:
            reply = self._asked(body)
        except _RefusedForAllError:
            raise
        except StoreUnavailable as error:
            with self._lock:
                self._failed_in_a_row += 1
                if self._failed_in_a_row >= _GIVE_UP_AFTER:
                    raise
            return prefix.pulled(rank, error=str(error))
        with self._lock:
            self._failed_in_a_row = 0
        if reply.status != http.client.OK:
            return prefix.pulled(rank, error=self._service.said(reply))
        return self._read(prefix, rank, reply)

    def _asked(self, body: bytes) -> Reply:
        """Send a request until the server accepts it, or refuses it with a status below 500.

        Raises StoreUnavailable if the server keeps failing, stays busy, or refuses every request.
        """
        tries = _TRIES
        while True:
            self._pauses.wait()
            try:
                reply = self._service.post(self._path, body, repeatable=True)
                self._refuse_for_all(reply)
                if reply.status in _BUSY:
                    if not self._pauses.busy(reply.retry_after):
                        raise _RefusedForAllError(str(self._service.refused(self._path, reply)))
                    continue
                if reply.status < http.client.INTERNAL_SERVER_ERROR:
                    self._pauses.answered()
                    return reply
                raise self._service.refused(self._path, reply)
            except StoreUnavailable as error:
                tries -= 1
                hung = isinstance(error.__cause__, TimeoutError)
                if isinstance(error, _RefusedForAllError) or hung or not tries:
                    raise
                self._pauses.failed()

    def _refuse_for_all(self, reply: Reply) -> None:
        if reply.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            what = f"HTTP {reply.status}: the server requires its API key"
            step = f"set {API_KEY_VARIABLE} to the --api-key of the server"
            raise _RefusedForAllError(str(self._service.lost(what, step)))
        if reply.status == http.client.NOT_FOUND or 300 <= reply.status < 400:
            raise _RefusedForAllError(str(self._service.refused(self._path, reply)))

    def _read(self, prefix: Prefix, rank: int | None, reply: Reply) -> PulledRequest:
        try:
            meta = parse_json_object(reply.body, "answer")["meta_info"]
            cached = meta["cached_tokens"]
            details = meta.get("cached_tokens_details") or {}
            reason = meta.get("finish_reason") or {}
            sources = {name: details[name] for name in _SOURCES if details.get(name) is not None}
            aborted = reason.get("type") == "abort"
        except (FormatError, KeyError, TypeError, AttributeError):
            what = "the answer is not from an SGLang server"
            raise _RefusedForAllError(str(self._service.lost(what, self._service.hint))) from None
        if aborted:
            said = fit(str(reason.get("message") or "aborted"), _SAID_CHARS)
            return prefix.pulled(rank, error=said)
        asked = len(prefix.request.token_ids)
        for name, count in {"cached_tokens": cached, **sources}.items():
            if type(count) is not int or not 0 <= count <= asked:
                what = f"{name}: the server reports {shown(count)} for a request of {asked} tokens"
                return prefix.pulled(rank, error=what)
        return prefix.pulled(rank, cached, sources)


class _RefusedForAllError(StoreUnavailable):
    """The server refuses every request."""


class _Backoff:
    """Pauses of all threads while a server is busy or fails."""

    def __init__(self, pause_s: float, patience_s: float) -> None:
        self._pause_s, self._patience_s = pause_s, patience_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._next_s = pause_s
        self._until = 0.0  # `time.monotonic()` at which requests resume
        self._answered = time.monotonic()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def wait(self) -> None:
        """Wait until requests resume. Raises StoreUnavailable after `stop`."""
        while (left := self._until - time.monotonic()) > 0 and not self.stopped:
            self._stop.wait(left)
        if self.stopped:
            raise StoreUnavailable("stopped")

    def answered(self) -> None:
        with self._lock:
            self._answered = time.monotonic()
            self._next_s = self._pause_s

    def busy(self, retry_after: str) -> bool:
        """Pause all requests as long as the server asks.

        Return False if the server has given only "busy" answers for too long.
        """
        now = time.monotonic()
        with self._lock:
            asked = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
            self._extend(now, max(asked, self._next_s))
            return now - self._answered < self._patience_s

    def failed(self) -> None:
        with self._lock:
            self._extend(time.monotonic(), self._next_s)

    def _extend(self, now: float, seconds: float) -> None:
        if self._until <= now:  # several failures at once make one pause
            self._until = now + min(seconds, _MAX_PAUSE_S)
            self._next_s = min(2 * self._next_s, _MAX_PAUSE_S)
