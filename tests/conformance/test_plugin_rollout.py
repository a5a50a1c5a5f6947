"""Two real SGLang servers of one model name share a directory through the plug-in.

They differ in dtype, then in weights; then one is killed while it writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance import tiny_llama
from tests.conformance.cpu_server import CpuServer, prompt
from tests.conformance.plugin_site import Site, full_hit
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-server")]

PROMPT = prompt(5)
FULL = full_hit(PROMPT)


def test_a_directory_is_shared_with_another_dtype_other_weights_and_a_killed_writer(
    sglang_python: Path, cpu_server: CpuServer, tmp_path: Path
) -> None:
    """One test, since the second server takes twenty seconds to start."""
    model = tmp_path / "tiny"
    tiny_llama.write_model(model, seed=7)
    log = tmp_path / "server.log"
    with CpuServer(sglang_python, model, log, "--dtype", "float16") as server:
        here, there = Site(cpu_server, tmp_path / "store"), Site(server, tmp_path / "store")
        _replace_each_other(here, there)
        _miss_other_weights(there, model)
        _miss_while_updated(there, model, seed=9, version=None)
        _miss_while_updated(there, model, seed=10, version="next")
        _die_while_writing(here, there)


def _replace_each_other(here: Site, there: Site) -> None:
    """One server's bfloat16 pages are misses for the other's float16, and the reverse."""
    here.attach()
    cold = here.cold(PROMPT)
    alone = there.server.generate(PROMPT)
    there.attach()
    missed = there.warm(PROMPT)
    assert missed.storage == 0
    assert missed.same(alone)
    _await_hit(there)
    again = here.warm(PROMPT)
    assert again.storage == 0
    assert again.same(cold)
    here.server.detach()


def _miss_other_weights(there: Site, model: Path) -> None:
    """Weights that change between two attachments make the pages of before misses."""
    _await_hit(there)
    before = there.server.generate(PROMPT)
    there.server.detach()
    tiny_llama.write_weights(model, seed=8)
    there.server.update_weights(model)
    alone = there.server.generate(PROMPT)
    assert not alone.same(before)
    there.server.flush()
    there.attach()
    missed = there.warm(PROMPT)
    assert missed.storage == 0
    assert missed.same(alone)
    _await_hit(there)
    assert there.warm(PROMPT).same(alone)


def _miss_while_updated(there: Site, model: Path, seed: int, version: str | None) -> None:
    """After an update from files, nothing is read or written until the next attachment."""
    tiny_llama.write_weights(model, seed)
    there.server.update_weights(model, version)
    there.server.flush()
    unseen = prompt(1000 + seed)
    first, other = there.server.generate(PROMPT), there.server.generate(unseen)
    assert (first.storage, other.storage) == (0, 0)
    assert there.warm(PROMPT).same(first)
    assert not any(path.exists() for path in there.files(unseen))
    there.server.detach()
    there.attach()
    assert there.warm(PROMPT).same(first)
    _await_hit(there)
    assert there.warm(PROMPT).same(first)


def _die_while_writing(here: Site, there: Site) -> None:
    """A killed writer's unfinished pages are misses, and are written again."""
    unseen = prompt(7)
    with there.server.holding(there.directory, "rename", "link", "replace") as held:
        there.server.generate(unseen)
        wait_until(lambda: held.begun, there.server.log_end())
        there.server.close()
    assert any(path.name.endswith(".tmp") for path in there.directory.rglob("*"))
    assert not any(path.exists() for path in here.files(unseen))
    here.attach()
    cold = here.cold(unseen)
    warm = here.warm(unseen)
    assert warm.storage == full_hit(unseen)
    assert warm.same(cold)


def _await_hit(site: Site) -> None:
    """Answer the prompt until it is read out of the store."""
    wait_until(lambda: site.warm(PROMPT).storage == FULL, site.server.log_end())
