"""Pings of --healthcheck-url, which tell a service whether a scheduled run happened.

A run pings URL/start when it begins, and URL or URL/fail when it ends, as healthchecks.io expects.
A run that did nothing, because another process has the lock, pings only the start.
"""

from __future__ import annotations

import http.client
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from hicachectl.backends.http import HttpService
from hicachectl.cli.session import SUCCEEDED, remark
from hicachectl.formats.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from urllib.parse import SplitResult

    import click

_TIMEOUT_S = 10.0
_MAX_REPLY_BYTES = 1 << 20
_ALLOWED = "/%:@!$&'()*+,;=~"
_ENDS = {"/start": "begin", "/fail": "failure", "": "success"}  # what each ping reports


@contextmanager
def pinged(ctx: click.Context, url: SplitResult) -> Iterator[None]:
    """Report the start and the end of the `with` block, in which a command runs.

    Failed pings make one message on stderr after the block, so that cron mails it. The message
    leaves out the path of the URL, which is a secret.
    """
    tls = url.scheme == "https"
    service = HttpService(
        str(url.hostname),
        url.port or (443 if tls else 80),
        who="Health check service",
        hint="check --healthcheck-url",
        timeout_s=_TIMEOUT_S,
        tls=tls,
        max_reply_bytes=_MAX_REPLY_BYTES,
    )
    failed = True
    lost = dict[str, list[str]]()  # for each reason, the reports that did not arrive
    try:
        _ping(service, url, "/start", lost)
        yield
        failed = False
    except BrokenPipeError:  # the reader needs no more output
        failed = False
        raise
    finally:
        succeeded = ctx.meta.get(SUCCEEDED)
        if failed or succeeded is False:
            _ping(service, url, "/fail", lost)
        elif succeeded:
            _ping(service, url, "", lost)
        service.close()
        if lost:
            said = (f"{' and '.join(ends)} not reported: {why}" for why, ends in lost.items())
            remark(ctx, f"--healthcheck-url: {'; '.join(said)}", failure=True)


def _ping(service: HttpService, url: SplitResult, end: str, lost: dict[str, list[str]]) -> None:
    """Ping the service. If the ping fails, add what it reports to `lost` under the reason."""
    query = f"?{quote(url.query, safe=_ALLOWED + '?')}" if url.query else ""
    path = f"{quote(url.path.rstrip('/') + end, safe=_ALLOWED)}{query}"
    try:
        status = service.get(path or "/").status
        if status // 100 == http.client.MULTIPLE_CHOICES // 100:
            raise service.lost(f"HTTP {status}: redirects are not followed", "give the final URL")
        if status // 100 != http.client.OK // 100:
            raise service.lost(f"HTTP {status}")
    except StoreUnavailable as error:
        lost.setdefault(str(error), []).append(_ENDS[end])
