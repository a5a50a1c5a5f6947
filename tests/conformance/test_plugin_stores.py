"""The plug-in on Mooncake, 3FS and packs, in SGLang's own controller on all ranks.

What it writes SGLang's own backends read, and the reverse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from hicachectl.formats.identity import profile_tag
from hicachectl.formats.profile import dump_profile, profile_from_mapping
from tests.conformance.store_cases import PLUGIN_CASES
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.formats.profile import Profile
    from tests.conformance.conftest import SglangSession
    from tests.conftest import Invoke
    from tests.hf3fs_server import MetadataServer

PAGES = 8
WEIGHTS = "weights of the tests"
FILE_BYTES = 64 << 20

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-mooncake")]


class Ranks:
    """All ranks of a case."""

    def __init__(self, session: SglangSession, folder: Path, case: str) -> None:
        self._session, self._folder, self.case = session, folder, case
        self.fields: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self.of_ranks: dict[str, dict[str, Any]] = {}  # settings by "PP.CP.TP"

    @property
    def profile(self) -> Profile:
        """The deployment's profile, with the weights' name."""
        stated = PLUGIN_CASES[self.case].deployments[0].profile
        return profile_from_mapping({**stated, **self.fields, "weights": WEIGHTS})

    def run(self, *steps: str, **settings: Any) -> list[list[Any]]:
        """Return each rank's results of the steps."""
        reports = self.reports(*steps, **settings)
        assert [report["error"] for report in reports if report["error"]] == []
        return [report["steps"] for report in reports]

    def reports(
        self, *steps: str, backend: str = "dynamic", **settings: Any
    ) -> list[dict[str, Any]]:
        """Return each rank's report, as plugin_ranks.py prints it."""
        request = {
            "case": self.case,
            "profile": self.fields,
            "pages": PAGES,
            "backend": backend,
            "settings": settings,
            "ranks": self.of_ranks,
            "steps": steps,
            "environment": self.environment,
        }
        reports: list[dict[str, Any]] = self._session.ask("plugin_ranks", request)
        return reports

    def expect_hits(self, results: list[list[Any]], pages: int = PAGES) -> None:
        """Check that the last step of all ranks read the prompt's first pages, and right bytes."""
        for steps in results:
            found = steps[-1]
            assert (found["hit_pages"], found["pages"], found["wrong"]) == (pages, pages, {})


@pytest.fixture
def ranks(request: pytest.FixtureRequest, sglang_session: SglangSession, tmp_path: Path) -> Ranks:
    return Ranks(sglang_session, tmp_path, request.param)


@pytest.fixture(scope="module")
def module_cluster(mooncake_package: None) -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(module_cluster: Cluster) -> Cluster:
    module_cluster.clear()
    return module_cluster


def of_sglang(cluster: Cluster, profile: Profile) -> dict[str, Any]:
    """Return the settings with which SGLang's MooncakeStore has our keys."""
    return {
        "master_server_address": cluster.master,
        "local_hostname": cluster.master.partition(":")[0],
        "protocol": "tcp",
        "global_segment_size": 0,
        "extra_backend_tag": profile_tag(profile),
    }


# Other cases differ in keys and parts only, which tests of formats.keys.parts compare.
@pytest.mark.parametrize("ranks", ["mla_indexer", "mha_draft", "pp2", "mla_draft"], indirect=True)
def test_sglang_reads_from_mooncake_what_the_plug_in_wrote(ranks: Ranks, cluster: Cluster) -> None:
    ranks.expect_hits(ranks.run("write", "read", store=cluster.url))
    theirs = of_sglang(cluster, ranks.profile)
    ranks.expect_hits(ranks.run("read", backend="mooncake", **theirs))


@pytest.mark.parametrize("ranks", ["hybrid_mamba"], indirect=True)
def test_the_plug_in_reads_from_mooncake_what_sglang_wrote(ranks: Ranks, cluster: Cluster) -> None:
    ranks.run("write", backend="mooncake", **of_sglang(cluster, ranks.profile))
    ranks.expect_hits(ranks.run("read", store=cluster.url))


@pytest.fixture
def config_of_3fs(metadata_server: MetadataServer, tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return metadata_server.write_config(tmp_path, FILE_BYTES)


@pytest.mark.parametrize("ranks", ["gqa_tp2", "mla_mamba"], indirect=True)
@pytest.mark.parametrize("writer", ["plug-in", "sglang"])
def test_the_plug_in_and_sglang_share_3fs(ranks: Ranks, config_of_3fs: Path, writer: str) -> None:
    """The first makes the tables; a flat page, and K and V apart, are where the other has them."""
    own = {"store": f"hf3fs:?config={config_of_3fs}"}
    theirs = {"backend": "hf3fs", "use_mock_hf3fs_client": True}
    ranks.environment = {"SGLANG_HICACHE_HF3FS_CONFIG_PATH": str(config_of_3fs)}
    first, second = (own, theirs) if writer == "plug-in" else (theirs, own)
    ranks.run("write", **first)
    ranks.expect_hits(ranks.run("read", **first))
    ranks.expect_hits(ranks.run("read", **second))


@pytest.mark.parametrize("ranks", ["hybrid_mamba"], indirect=True)
def test_a_pack_warms_a_server_without_copying(
    ranks: Ranks, cluster: Cluster, invoke: Invoke, tmp_path: Path
) -> None:
    """Pages of a directory are packed, and attached below an empty Mooncake store.

    What the server then writes is on Mooncake alone: it has its own tag.
    """
    directory, pack, profile = (tmp_path / name for name in ("store", "pages.hcpack", "p.toml"))
    ranks.run("write", store=str(directory))
    profile.write_text(dump_profile(ranks.profile))
    invoke("migrate", directory, f"pack://{pack}", "--profile", profile)
    ranks.expect_hits(ranks.run("read", store=[cluster.url, f"pack://{pack}"]))
    assert cluster.list_keys() == []
    ranks.run("write", store=[cluster.url, f"pack://{pack}"])
    ranks.expect_hits(ranks.run("read", store=cluster.url))


@pytest.mark.parametrize("ranks", ["gqa_tp2"], indirect=True)
@pytest.mark.parametrize("second", ["of other weights", "missing", "the same"])
def test_a_pack_that_one_rank_cannot_use_is_a_miss_for_all(
    ranks: Ranks, invoke: Invoke, tmp_path: Path, second: str
) -> None:
    """No rank refuses it, since the other one would wait in SGLang's collectives."""
    packs = {}
    for weights, profile in (
        ("the same", ranks.profile),
        ("of other weights", structs.replace(ranks.profile, weights="others")),
    ):
        directory, described = tmp_path / weights, tmp_path / f"{weights}.toml"
        ranks.run("write", store=str(directory), identity=profile.weights)
        described.write_text(dump_profile(profile))
        packs[weights] = f"pack://{tmp_path}/{weights.replace(' ', '-')}.hcpack"
        invoke("migrate", directory, packs[weights], "--profile", described)
    packs["missing"] = f"pack://{tmp_path}/missing.hcpack"
    empty = f"{tmp_path}/empty"
    ranks.of_ranks = {"0.0.1": {"store": [empty, packs[second]]}}
    reports = ranks.reports("read", store=[empty, packs["the same"]])
    assert [report["error"] for report in reports] == ["", ""]
    ranks.expect_hits([report["steps"] for report in reports], 8 if second == "the same" else 0)
    reason = {"of other weights": "have weights others instead of", "missing": "unopened"}
    assert reports[0]["log"] == []
    assert reason.get(second, "") in " ".join(reports[1]["log"])
    assert bool(reports[1]["log"]) == (second != "the same")


@pytest.mark.parametrize("ranks", ["gqa_tp2"], indirect=True)
def test_a_pack_alone_is_only_read(ranks: Ranks, invoke: Invoke, tmp_path: Path) -> None:
    """Its pages are hits; backups fail and change nothing."""
    directory, pack, profile = (tmp_path / name for name in ("store", "pages.hcpack", "p.toml"))
    ranks.run("write", store=str(directory))
    profile.write_text(dump_profile(ranks.profile))
    invoke("migrate", directory, f"pack://{pack}", "--profile", profile)
    before = pack.read_bytes()
    results = ranks.run("read", "write", "read", store=f"pack://{pack}")
    assert [steps[1] for steps in results] == [[0, 0, 0]] * 2
    ranks.expect_hits(results)
    assert pack.read_bytes() == before
