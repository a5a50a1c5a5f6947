"""A directory that a CPU server serves out of through the plug-in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.formats.trailer import TRAILER_BYTES, digest_function, parse_trailer
from tests.conformance.cpu_server import PAGE_SIZE, page_files
from tests.conformance.tiny_llama import HEAD_DIM, KV_HEADS, LAYERS
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.conformance.cpu_server import Answer, CpuServer

PAGE_BYTES = 2 * LAYERS * PAGE_SIZE * KV_HEADS * HEAD_DIM * 2  # K and V, two bytes a number


def plugin_config(store: object, **options: Any) -> dict[str, Any]:
    """Return the extra config that makes SGLang load the plug-in."""
    return {
        "backend_name": "hicachectl",
        "module_path": "hicachectl.backends.sglang",
        "class_name": "HiCacheStore",
        "interface_v1": 1,
        "store": store if isinstance(store, list) else f"file://{store}",
        **options,
    }


def is_whole(path: Path) -> bool:
    """Return whether a file has a page's bytes and a trailer that fits them."""
    data = path.read_bytes() if path.is_file() else b""
    if len(data) != PAGE_BYTES + TRAILER_BYTES:
        return False
    trailer = parse_trailer(data[PAGE_BYTES:])
    return (
        trailer is not None
        and trailer.page.hex() == path.name[:64]
        and trailer.digest == digest_function(trailer.digest_kind)((data[:PAGE_BYTES],))
    )


def full_hit(tokens: Sequence[int]) -> int:
    """Return the tokens of a prompt that a store can restore."""
    return len(tokens) // PAGE_SIZE * PAGE_SIZE


class Site:
    """A server, and a store's directory."""

    def __init__(self, server: CpuServer, directory: Path) -> None:
        self.server = server
        self.directory = directory

    def attach(self, write_policy: str = "write_through", **options: Any) -> None:
        """Attach the plug-in with this directory."""
        config = plugin_config(self.directory, **options)
        self.server.attach("dynamic", config, write_policy)

    def files(self, tokens: Sequence[int]) -> list[Path]:
        """Return where the pages of a prompt are stored, in order."""
        return page_files(self.directory, tokens)

    def cold(self, tokens: Sequence[int]) -> Answer:
        """Answer a prompt that is not in the store, and wait until it is."""
        answer = self.server.generate(tokens)
        assert (answer.device, answer.host, answer.storage) == (0, 0, 0)
        self.await_stored(tokens)
        return answer

    def warm(self, tokens: Sequence[int]) -> Answer:
        """Answer a prompt with empty pools, out of the store as far as it has the prompt."""
        self.server.flush()
        answer = self.server.generate(tokens)
        assert (answer.device, answer.host) == (0, 0)
        return answer

    def await_stored(self, tokens: Sequence[int]) -> None:
        """Wait until every page of a prompt is stored whole."""
        wait_until(
            lambda: all(map(is_whole, self.files(tokens))),
            f"pages are not stored: {self.server.log_end()}",
        )
