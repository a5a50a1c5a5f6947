"""The facts in which releases of SGLang differ, for all releases since 0.5.6.

Source: the published wheels, hicache_storage.py :: HiCacheFile, mooncake_store.py :: MooncakeStore,
ServerArgs.hicache_mem_layout, pool_host/dsa.py and the symbols named below.
`tests/data/releases.json` records the results of each wheel's own code
(tests/conformance/record_releases.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hicachectl.formats.errors import ProfileError

NEWEST_SGLANG = "0.5.23"  # the newest release that is known
_VERSION = re.compile(r"v?([0-9]{1,9}(?:\.[0-9]{1,9})*)(?!\.?[0-9])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Facts that hold from a release of SGLang on, until the release of the next row of RELEASES.

    layout: default of --hicache-mem-layout.
    file_stage: file keys name the pipeline stage.
    file_cp: file keys name the context-parallel rank.
    file_state_rank: file and 3FS keys of Mamba states name the TP rank even if the target is MLA.
    mooncake_stage: Mooncake keys name the stage, and keys of MLA have a rank field. The field may
        be empty, as in `__k`; earlier keys have `_k`.
    mooncake_model: Mooncake keys begin with the model's name, after any tag.
    compact_indexer: layers that reuse another layer's top-k have no index keys in objects.
    indexer: index keys have objects, and a look-up asks for them (hicache_storage.py :: PoolName).
    draft: drafts have a pool (cache_controller.py :: set_draft_kv_pool, PoolName.DRAFT).
    packed_drafts: MTP drafts have no pool. Their layers follow the target's layers in the target's
        objects (speculative/base_spec_worker.py :: HiCacheDraftMode).
    seeds: extra_key and cache_salt of a request seed its page hashes
        (mem_cache/utils.py :: storage_namespace_seed).
    """

    since: tuple[int, ...]
    layout: str = "layer_first"
    file_stage: bool = False
    file_cp: bool = False
    file_state_rank: bool = False
    mooncake_stage: bool = False
    mooncake_model: bool = False
    compact_indexer: bool = False
    indexer: bool = False
    draft: bool = False
    packed_drafts: bool = False
    seeds: bool = False


def _rows(first: Release, *changes: dict[str, object]) -> tuple[Release, ...]:
    rows = [first]
    for change in changes:
        rows.append(replace(rows[-1], **change))  # type: ignore[arg-type]
    return tuple(rows)


RELEASES = _rows(
    Release(since=(0, 5, 6)),
    {"since": (0, 5, 8), "mooncake_stage": True},
    {"since": (0, 5, 10), "file_stage": True},
    {"since": (0, 5, 11), "indexer": True},
    {"since": (0, 5, 13), "draft": True},
    {"since": (0, 5, 14), "file_cp": True, "layout": "page_first"},
    {"since": (0, 5, 17), "mooncake_model": True},
    {"since": (0, 5, 18), "packed_drafts": True},
    {"since": (0, 5, 20), "seeds": True},
    {"since": (0, 5, 22), "compact_indexer": True},
    {"since": (0, 5, 23), "file_state_rank": True},
)
NEWEST = tuple(map(int, NEWEST_SGLANG.split(".")))


def sglang_version(text: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version. Raises ProfileError without a number."""
    match = _VERSION.match(text)
    if match is None:
        raise ProfileError(f"sglang: {text!r:.60} is not a version; give one like {NEWEST_SGLANG}")
    return tuple(int(number) for number in match[1].split("."))


def release_of(text: str) -> Release:
    """Return the facts that hold for a version. Raises ProfileError.

    For a version before the first row of RELEASES, return the first row.
    """
    version = sglang_version(text)
    return next((x for x in reversed(RELEASES) if x.since <= version), RELEASES[0])


def since(fact: str) -> str:
    """Return the first release for which a fact of `Release` holds."""
    return next(".".join(map(str, x.since)) for x in RELEASES if getattr(x, fact))


def before(fact: str) -> str:
    """Return the newest release of RELEASES for which a fact of `Release` does not hold."""
    return next(".".join(map(str, x.since)) for x in reversed(RELEASES) if not getattr(x, fact))


def unknown_release(text: str) -> str | None:
    """Return a warning for a version outside RELEASES; else None. Raises ProfileError."""
    version = sglang_version(text)
    if version[:3] > NEWEST:
        return f"sglang {text}: newer than {NEWEST_SGLANG}, whose keys and defaults are assumed"
    if version < RELEASES[0].since:
        oldest = ".".join(map(str, RELEASES[0].since))
        return f"sglang {text}: older than {oldest}, whose keys and defaults are assumed"
    return None
