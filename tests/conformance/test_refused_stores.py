"""What SGLang's own classes cannot store, hicachectl refuses for the same store and profile."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.conformance.store_cases import REFUSED, REFUSED_CASES
from tests.hf3fs_server import MetadataServer
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conformance.conftest import SglangSession
    from tests.conftest import Invoke

    Stores = dict[tuple[str, str], tuple[str, str]]

FILE_SIZE = 1 << 24

pytestmark = [pytest.mark.conformance, pytest.mark.xdist_group("sglang-mooncake")]


@pytest.fixture(scope="module")
def stores(
    sglang_python: Path,
    nixl_package: None,
    mooncake_package: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stores]:
    """Return place and URL of an empty store for each case."""
    folder = tmp_path_factory.mktemp("refused")
    with Cluster() as cluster, MetadataServer(sglang_python) as server:
        found = {}
        for case, backend in REFUSED:
            own = folder / f"{case}-{backend}"
            own.mkdir()
            if backend == "hf3fs":
                config = server.write_config(own, FILE_SIZE)
                (own / "data").mkdir(exist_ok=True)  # SGLang may fail before it makes one
                url = f"hf3fs:?config={config}&snapshot={server.save()}"
                found[case, backend] = str(config), url
                continue
            place = cluster.master if backend == "mooncake" else str(own)
            urls = {"file": place, "nixl": f"nixl://{place}", "mooncake": cluster.url}
            found[case, backend] = place, urls[backend]
        yield found


@pytest.fixture(scope="module")
def said(stores: Stores, sglang_session: SglangSession) -> dict[tuple[str, str], str | None]:
    """Return what SGLang says to each case; None if it wrote it."""
    question = [(*which, str(place)) for which, (place, _) in stores.items()]
    answers = sglang_session.ask("refused_stores", question)
    return dict(zip(stores, answers, strict=True))


@pytest.mark.parametrize(("case", "backend"), REFUSED)
def test_what_sglang_cannot_store_is_refused_by_name(
    stores: Stores,
    said: dict[tuple[str, str], str | None],
    invoke: Invoke,
    tmp_path: Path,
    case: str,
    backend: str,
) -> None:
    """SGLang fails; verify never says that the store is clean, and migrate does not write to it."""
    theirs, ours = REFUSED[case, backend]
    answer = said[case, backend]
    assert answer is not None
    assert theirs in answer
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(REFUSED_CASES[case].deployments[0].profile))
    url = stores[case, backend][1]
    # NIXL stores of such servers exist: their objects overwrote each other, which is a finding.
    collide = (case, backend) == ("dcp2", "nixl")
    words = ("verify", url, "--profile", profile, "--allow-empty")  # no key there names a page
    refused = invoke(*words, exit_code=4 if collide else 2)
    assert ours in (refused.stdout if collide else refused.stderr)
    refused = invoke("migrate", tmp_path, url, "--profile", profile, exit_code=2)
    assert ours in refused.stderr
