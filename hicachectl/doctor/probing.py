"""Send the prompt of `doctor --write-probe`, and find out whether its pages reach the store."""

from __future__ import annotations

import http.client
import json
import random
import time
from typing import TYPE_CHECKING

import pyarrow as pa

from hicachectl.doctor.checks import FAIL, OK, SAME_STORE, UNKNOWN, Check
from hicachectl.doctor.deployments import own_anchors
from hicachectl.formats.errors import HicacheError
from hicachectl.pages.deployments import profiled_deployment
from hicachectl.prewarming.through_server import generate_body
from hicachectl.profiles.server import server_service
from hicachectl.requests.chains import hex_pages
from hicachectl.requests.forms import Request
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from hicachectl.doctor.listed_store import ListedStore
    from hicachectl.doctor.live_server import LiveServer
    from hicachectl.requests.chains import Hashing

_PAGES = 3  # pages beyond the fewest tokens that a server looks up
_MOST_TOKENS = 1 << 15
_TOKENS = range(10, 250)  # ids that every vocabulary has
_ANSWER_S = 60.0
_PATIENCE_S = 15.0
_PAUSE_S = 0.25
_ELSEWHERE = "compare the place that the server's storage backend names with STORE"


def write_probe(server: LiveServer, listed: ListedStore, hashing: Hashing) -> Check:
    """Send a server one random prompt, and look for its pages for some seconds.

    The server adds the pages to its memory and its store. Under write_through_selective the prompt
    is sent twice.
    """
    if server.deployment is None or listed.store is None:
        return _check(
            server, UNKNOWN, "No prompt was sent, because the server or the store is unknown"
        )
    policy = server.settings.get("hicache_write_policy")
    if policy == "write_back":
        return _check(
            server,
            UNKNOWN,
            "No prompt was sent, because under write_back its pages are not written soon",
        )
    count = server.deployment.flags.least_looked_up + _PAGES * hashing.page_size
    tokens = random.choices(_TOKENS, k=min(count, _MOST_TOKENS))
    prompt = Request("the prompt of --write-probe", tokens)
    try:
        keys = _keys(server, listed, prompt, hashing)
        if not len(keys):
            why = "No prompt was sent, because without a profile the keys of its pages are unknown"
            return _check(server, UNKNOWN, why, next="give --model-config or --profile")
        for _ in range(2 if policy == "write_through_selective" else 1):
            _send(server, prompt)
        return _answer(server, listed, keys, len(tokens))
    except HicacheError as error:
        message = f"The prompt proves nothing: {error}"
        return server.check_of("write-probe", UNKNOWN, message, group=SAME_STORE)


def _keys(server: LiveServer, listed: ListedStore, prompt: Request, hashing: Hashing) -> pa.Array:
    """Return the keys of the anchors of a prompt's pages, of every rank."""
    assert listed.store is not None
    affixes = set()
    if listed.inventory is not None:
        table = listed.inventory.table
        affixes |= {table.affixes[one] for one in own_anchors(server, listed, table)}
    if server.profile is not None:
        specs = profiled_deployment(server.profile, listed.store.grammar).specs
        affixes |= {spec.affix for spec in specs if spec.anchor}
    pages = hex_pages(hashing.hashes(prompt)).to_pylist()
    return pa.array(
        [f"{before}{page}{after}".encode() for before, after in affixes for page in pages],
        pa.binary(),
    )


def _send(server: LiveServer, prompt: Request) -> None:
    """Send the prompt. Raises StoreUnavailable if the server does not answer it."""
    service, base = server_service(server.url, "--server", timeout_s=_ANSWER_S)
    try:
        body = json.dumps(generate_body(prompt, None)).encode()
        reply = service.post(f"{base}/generate", body, repeatable=False)
        if reply.status != http.client.OK:
            raise service.refused(f"{base}/generate", reply)
    finally:
        service.close()


def _answer(server: LiveServer, listed: ListedStore, keys: pa.Array, tokens: int) -> Check:
    """Look for keys until one exists, or for `_PATIENCE_S`. Return the check.

    Raises StoreUnavailable.
    """
    assert listed.store is not None
    sent = time.monotonic()
    while True:
        found = len(listed.store.look(pa.table({"key": keys}), ("nbytes",)))
        seconds = time.monotonic() - sent
        if found:
            return _check(
                server,
                OK,
                f"Pages of a prompt appeared in the store {seconds:.1f} s after the answer",
                evidence=f"{counted(found, 'object')} of a random prompt of {tokens} tokens",
            )
        if seconds > _PATIENCE_S:
            return _check(
                server,
                FAIL,
                "The server answered a prompt, but none of its pages appeared in the store, so the "
                "server writes elsewhere, or not at all",
                evidence=f"a random prompt of {tokens} tokens, looked for in {seconds:.0f} s",
                next=_ELSEWHERE,
            )
        time.sleep(_PAUSE_S)


def _check(
    server: LiveServer, status: str, detail: str, *, evidence: str = "", next: str = ""
) -> Check:
    return server.check(
        "write-probe", status, detail, evidence=evidence, next=next, group=SAME_STORE
    )
