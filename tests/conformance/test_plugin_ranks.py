"""The plug-in under SGLang's own controller, with its host pools, threads and collectives.

Each rank is a process (plugin_ranks.py). These pools need no GPU, but no CPU server can run models
that have them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.statuses import read_statuses
from tests.small_file_system import small_file_system

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Serve = Callable[..., list[dict[str, Any]]]

    from tests.conformance.conftest import SglangSession
    from tests.conformance.store_cases import PLUGIN_CASES
else:
    from store_cases import PLUGIN_CASES

pytestmark = pytest.mark.conformance

Report = list[dict[str, Any]]

PAGES = 8
# Every pool at TP 2, and every layout. Pipeline and context parallelism once each.
SERVED = (
    ("gqa_tp2", "layer_first"),
    ("gqa_tp2", "page_first"),
    ("gqa_tp2", "page_first_direct"),
    ("gqa_tp2", "page_head"),
    ("mla_indexer", "page_first"),
    ("mla_fp8_indexer", "page_first_direct"),
    ("hybrid_mamba", "page_first"),
    ("mla_mamba", "page_first_direct"),
    ("mha_draft", "page_first"),
    ("mla_draft", "layer_first"),
    ("packed_draft", "page_head"),
    ("swa", "page_first_direct"),
    ("deepseek_v4", "page_first"),
    ("pp2", "page_first"),
    ("cp2", "page_first"),
)


@pytest.fixture
def serve(sglang_session: SglangSession, tmp_path: Path) -> Serve:
    """Return a function that runs the steps of a case on all ranks, on a store in tmp_path."""

    def run(case: str, *steps: str, settings: dict[str, Any] | None = None, **more: Any) -> Report:
        request = {
            "case": case,
            "pages": PAGES,
            "steps": steps,
            "settings": {"store": f"file://{tmp_path}/store", **(settings or {})},
            **more,
        }
        reports: Report = sglang_session.ask("plugin_ranks", request)
        assert [report["error"] for report in reports] == [""] * len(reports)
        (tmp_path / "pages.json").write_text(json.dumps(reports[0]["pages"]))
        return reports

    return run


def whole(report: dict[str, Any], step: int, pages: int = PAGES) -> bool:
    """Return whether a rank read so many pages in a step, all bytes right."""
    read = report["steps"][step]
    return read["hit_pages"] == read["pages"] == pages and not read["wrong"]


@pytest.mark.parametrize(("case", "layout"), SERVED)
def test_every_rank_reads_every_byte_that_it_wrote(
    serve: Serve, tmp_path: Path, case: str, layout: str
) -> None:
    """All pools of all ranks come back through SGLang's queues, and nothing is refused.

    Each rank counts them.
    """
    reports = serve(case, "write", "read", profile={"layout": layout})
    for report in reports:
        assert whole(report, 1), report
        assert report["steps"][1]["trailing"] == trailing_of(case)
        assert report["log"] == []
    assert reports[0]["steps"][0] == [3, 3, 2]
    for stage in ("asked", "found", "restored"):
        assert counted(tmp_path, case, stage) == [PAGES] * len(reports)
    # Ranks that share kv leave the writing to one of them.
    assert set(counted(tmp_path, case, "written")) in ({PAGES}, {PAGES, 0})


def counted(tmp_path: Path, case: str, stage: str) -> list[float]:
    """Return the pages that each rank of the last run counted at a stage, as its status says."""
    with Directory.named(str(tmp_path / "store" / ".hicachectl"), writes=False) as side:
        seen = read_statuses(side)
    assert not seen.problems
    ended = sorted((one.status for one in seen.statuses), key=lambda one: one.attached_ns)
    latest = {(one.pp_rank, one.cp_rank, one.tp_rank): one for one in ended}
    tokens = PLUGIN_CASES[case].deployments[0].profile["page_size"]
    return [one.tokens.get(stage, 0) / tokens for one in latest.values()]


def trailing_of(case: str) -> dict[str, int]:
    pools = PLUGIN_CASES[case].deployments[0].profile["pools"]
    windows = {"mamba": 1, "swa": 2}
    return {pool["name"]: windows[pool["name"]] for pool in pools if pool["name"] in windows}


def test_the_comparison_notices_wrong_bytes(serve: Serve, tmp_path: Path) -> None:
    """HiCacheFile returns a flipped bit, which the harness calls wrong."""
    files = {"backend": "file", "settings": {"file_storage_path": str(tmp_path / "store")}}
    (tmp_path / "store").mkdir()
    serve("gqa_tp2", "write", **files)
    flip(stored(tmp_path, "kv", 2, tp=0))
    reports = serve("gqa_tp2", "read", **files)
    assert [report["steps"][0]["wrong"] for report in reports] == [{"kv": [2]}, {}]


def test_a_rank_without_a_directory_makes_all_ranks_miss(serve: Serve, tmp_path: Path) -> None:
    """The other ranks neither hang nor read, and the rank says why."""
    serve("gqa_tp2", "write")
    (tmp_path / "file").touch()
    blocked = {"0.0.1": {"store": f"file://{tmp_path}/file"}}
    first, second = serve("gqa_tp2", "read", "write", "read", ranks=blocked)
    for report in (first, second):
        assert [report["steps"][n]["hit_pages"] for n in (0, 2)] == [0, 0]
    assert first["steps"][1] == [3, 3, 2]
    assert second["steps"][1] == [0, 0, 0]
    assert first["log"] == []
    assert f"{tmp_path}/file" in second["log"][0]


def test_a_pool_that_only_the_last_stage_refuses_makes_all_ranks_miss(serve: Serve) -> None:
    """The first stage has no draft. It would wait if the last stage alone did not attach.

    The last stage says why, once for each attachment.
    """
    staged = {"pp": 2, "pp_partition": [2, 1]}
    reports = serve("mla_mha_draft", "write", "read", profile=staged)
    assert [report["pp"] for report in reports] == [0, 0, 1, 1]
    for report in reports:
        assert whole(report, 1, 0)
        refusal = [text for text in report["log"] if "start without this draft" in text]
        assert len(refusal) == 2 * report["pp"]


# The damage is done to one rank's object of a pool. Trailing states lie on the last page of a node.
DAMAGED = (
    ("gqa_tp2", "kv", 1, 4),
    ("mla_indexer", "kv", None, 4),
    ("mla_indexer", "indexer", None, 4),
    ("hybrid_mamba", "mamba", 1, 7),
    ("mha_draft", "draft", 0, 4),
    ("swa", "swa", 1, 6),
    ("inkling", "draft_swa", 0, 3),
    ("packed_draft", "kv", 0, 4),
    ("deepseek_v4", "deepseek_v4_c128", None, 3),
)


@pytest.mark.parametrize(("case", "pool", "tp", "position"), DAMAGED)
def test_a_flipped_bit_is_a_miss_for_that_page_and_healed(
    serve: Serve, tmp_path: Path, case: str, pool: str, tp: int | None, position: int
) -> None:
    """The page is read as missing, removed anchor first, and written again; no other changes."""
    serve(case, "write")
    flip(stored(tmp_path, pool, position, tp))
    before = files(tmp_path)
    reports = serve(case, "read", "read", "write", "read")
    trailing = trailing_of(case)
    for report in reports:
        first, second, _, healed = report["steps"]
        # SGLang asks for lengths and identities only, so the first read discovers the damage.
        assert first["hit_pages"] == PAGES
        assert not any(read["wrong"] for read in (first, second, healed))
        if pool in trailing:
            assert first["pages"] == PAGES
            assert first["trailing"][pool] < trailing[pool]
            assert second["hit_pages"] == {"mamba": 6, "swa": 6}[pool]
        else:
            assert first["pages"] == second["hit_pages"] == second["pages"] == position
        assert whole(report, 3)
    # SGLang takes what all ranks have: what the rank with the damage has counted.
    read = [reports[0]["steps"][n] for n in (0, 1, 3)]
    assert min(counted(tmp_path, case, "found")) == sum(step["hit_pages"] for step in read)
    assert min(counted(tmp_path, case, "restored")) == sum(step["pages"] for step in read)
    after = files(tmp_path)
    changed = {name for name, file in before.items() if after.get(name) != file}
    anchor = stored(tmp_path, "kv", position, tp).name
    expected = {stored(tmp_path, pool, position, tp).name}
    assert changed == (expected if pool in trailing else expected | {anchor})


@pytest.mark.parametrize(("case", "pool", "tp", "position"), DAMAGED)
def test_a_truncated_object_is_a_miss_before_it_is_read(
    serve: Serve, tmp_path: Path, case: str, pool: str, tp: int | None, position: int
) -> None:
    """Its page is not part of the hit, and the next backup writes it again."""
    serve(case, "write")
    path = stored(tmp_path, pool, position, tp)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    for report in serve(case, "read", "write", "read"):
        hit = {"mamba": 6, "swa": 6}.get(pool, position)
        assert whole(report, 0, hit), report
        assert whole(report, 2)


def test_objects_of_other_weights_are_misses_and_replaced(serve: Serve) -> None:
    """Two servers with one name and other weights never read each other's pages."""
    serve("mla_indexer", "write")
    other = {"identity": "other weights"}
    for report in serve("mla_indexer", "read", "write", "read", settings=other):
        assert whole(report, 0, 0)
        assert whole(report, 2)
    for report in serve("mla_indexer", "read"):
        assert whole(report, 0, 0)


def test_objects_of_other_weights_can_be_left(serve: Serve) -> None:
    """With on_foreign: leave, backups fail and the owner keeps its pages."""
    serve("mla_indexer", "write")
    other = {"identity": "other weights", "on_foreign": "leave"}
    for report in serve("mla_indexer", "write", "read", settings=other):
        assert report["steps"][0] == [0, 0, 0]
        assert whole(report, 1, 0)
    assert all(whole(report, 0) for report in serve("mla_indexer", "read"))


def test_kv_is_not_written_where_a_sidecar_failed(serve: Serve, tmp_path: Path) -> None:
    """The page stays missing until its sidecar can be written; the refusal is not remembered."""
    pages = serve("mla_indexer")[0]["pages"]
    sidecar = f"{pages[4]}.indexer_deepseek-ai-DeepSeek-Tiny.bin"
    obstacle = tmp_path / "store" / sidecar  # nothing can be renamed to a directory's name
    obstacle.mkdir(parents=True)
    first, second = serve("mla_indexer", "write+read+clear+write+read", obstacle=str(obstacle))
    assert first["steps"][0] == [3, 0, 2]
    assert first["steps"][2] == [3, 3, 2]
    for report in (first, second):
        assert whole(report, 1, 4)
        assert whole(report, 3)
    assert any("kv is not written where a sidecar failed" in text for text in first["log"])


def test_a_full_file_system_leaves_no_half_group(serve: Serve, tmp_path: Path) -> None:
    """Pages that fit are whole; the others are written when there is room."""
    with small_file_system(tmp_path / "small", "1m") as small:
        settings = {"store": f"file://{small}/store"}
        filler = small / "filler"
        filler.write_bytes(bytes(800_000))
        reports = serve("mha_draft", "write", "read", settings=settings)
        names = {path.name for path in (small / "store").glob("*.bin")}
        kv = [name for name in names if ".draft" not in name]
        assert kv
        assert not {name[:64] + ".draft" + name[64:] for name in kv} - names
        hits = {report["steps"][1]["hit_pages"] for report in reports}
        assert len(hits) == 1
        assert hits.pop() < PAGES
        assert not any(report["steps"][1]["wrong"] for report in reports)
        assert not list((small / "store").glob(".hicachectl-*"))
        filler.unlink()
        for report in serve("mha_draft", "write", "read", settings=settings):
            assert whole(report, 1)


def stored(folder: Path, pool: str, position: int, tp: int | None) -> Path:
    """Return the file of a page in the store of `serve`."""
    page = json.loads((folder / "pages.json").read_text())[position]
    name = page if pool == "kv" else f"{page}.{pool}"
    rank = "*" if tp is None else f"*_{tp}_2"
    (path,) = (folder / "store").glob(f"{name}_{rank}.bin")
    return path


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and modification time of each object of the store."""
    facts = {path.name: path.stat() for path in (folder / "store").glob("*.bin")}
    return {name: (fact.st_ino, fact.st_mtime_ns) for name, fact in facts.items()}
