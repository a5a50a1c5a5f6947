"""How `doctor` names the difference between a server and what the store has, and its remedy."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from hicachectl.backends.file.store import FileStore
from hicachectl.cli.demo_store import PROFILE
from hicachectl.profiles.stamps import Stamp, write_stamp
from tests.doctor.replies import answering, checks_of, info
from tests.move.migrations import PAGES, profile_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


def doctor(
    invoke: Invoke, store: Path, *more: object, exit_code: int = 0, **changes: Any
) -> dict[str, dict[str, Any]]:
    """Return the checks of a server with changed settings."""
    with answering(info(**changes)) as url:
        return checks_of(invoke, store, "--server", url, *more, exit_code=exit_code)


def first_cause(checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return next(check for check in checks.values() if check["status"] in ("fail", "warn"))


@pytest.mark.parametrize("with_profile", [True, False])
@pytest.mark.parametrize(
    ("changes", "name", "theirs", "ours"),
    [
        ({"tp_size": 4}, "tp", "tp 2", "tp 4"),
        ({"served_model_name": "demo"}, "model", "model demo-hybrid-1b", "model demo"),
        ({"pp_size": 2}, "pp", "pp 1", "pp 2"),
    ],
)
def test_another_deployment_is_named(
    invoke: Invoke,
    store: Path,
    profile: Path,
    with_profile: bool,
    changes: dict[str, Any],
    name: str,
    theirs: str,
    ours: str,
) -> None:
    """The first line says what the store has and what the server asks for, with all its pages."""
    more = ("--profile", profile) if with_profile else ()
    check = first_cause(doctor(invoke, store, *more, exit_code=4, **changes))
    assert (check["group"], check["name"], check["status"]) == ("server", name, "fail")
    assert check["detail"] == f"The store has {theirs}, but this server asks for {ours}"
    assert check["evidence"].startswith(f"{PAGES} pages of demo-hybrid-1b tp 2")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"tp_size": 4}, {"served_model_name": "new/name"}])
def test_the_named_command_mends_it(
    invoke: Invoke, store: Path, profile: Path, changes: dict[str, Any]
) -> None:
    """The command of the first cause, run as it stands, mends it."""
    with answering(info(**changes)) as url:
        arguments = (store, "--server", url, "--profile", profile)
        check = first_cause(checks_of(invoke, *arguments, exit_code=4))
        command = check["next"].removeprefix("if both names are of the same weights: ")
        words = shlex.split(command.partition("; ")[0])
        assert words[:4] == ["hicachectl", "migrate", str(store), str(store)]
        invoke(*words[1:])
        checks = checks_of(invoke, *arguments)
    assert checks["server/deployment"]["status"] == "ok"


def test_another_model_is_not_renamed(invoke: Invoke, store: Path, profile: Path) -> None:
    """Objects of other sizes are of another model: no command gives them the server's name."""
    for path in store.glob("*_2.bin"):
        path.write_bytes(path.read_bytes() * 3)
    more = ("--profile", profile)
    check = first_cause(doctor(invoke, store, *more, exit_code=4, served_model_name="new"))
    assert (check["name"], "migrate" in check["next"]) == ("model", False)


def test_a_pack_is_converted_into_another_store(
    invoke: Invoke, store: Path, profile: Path, tmp_path: Path
) -> None:
    """A pack is written once, so the command names another destination."""
    pack = tmp_path / "pages.hcpack"
    invoke("migrate", store, pack, "--profile", profile)
    check = first_cause(doctor(invoke, pack, "--profile", profile, exit_code=4, tp_size=4))
    assert check["next"] == f"hicachectl migrate {pack} DST --profile {profile} --to-tp 4"


def test_the_command_describes_the_pages_by_the_server(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    """Without a profile of the pages, the command takes the server's, with the pages' tp."""
    wider = profile_file(tmp_path / "wider.toml", replace(PROFILE, tp=4))
    with answering(info(tp_size=4)) as url:
        arguments = (store, "--server", url, "--profile", wider)
        check = first_cause(checks_of(invoke, *arguments, exit_code=4))
    assert check["next"].endswith(
        f"{store} {store} --server {url} --model-config DIR --tp 2 --to-tp 4"
    )


def test_an_earlier_deployment_beside_the_servers_own_is_told(
    invoke: Invoke, store: Path, profile: Path
) -> None:
    """Pages that were last written before the server's first one look like its own, lost."""
    invoke("migrate", store, store, "--profile", profile, "--to-tp", 4)
    for path in store.glob("*_4.bin"):
        os.utime(path, (2e9, 2e9))
    checks = doctor(invoke, store, "--profile", profile, tp_size=4)
    assert (checks["server/deployment"]["status"], checks["server/tp"]["status"]) == ("ok", "warn")
    assert "--to-tp 4" in checks["server/tp"]["next"]


def test_another_model_beside_the_servers_own_is_no_cause(
    invoke: Invoke, store: Path, profile: Path
) -> None:
    """A store of two models has no warning: the other one's objects have other sizes."""
    for path in list(store.iterdir()):
        if path.name.endswith("_2.bin") and ".mamba" not in path.name:
            other = path.with_name(path.name.replace("demo-hybrid-1b", "other"))
            other.write_bytes(bytes(100))
            os.utime(other, (1, 1))
    checks = doctor(invoke, store, "--profile", profile)
    assert "server/model" not in checks
    assert "of other tp 2" in checks["server/deployment"]["evidence"]


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"page_size": 32}, "page-size", "page size 16"),
        ({"page_size": 64}, "page-size", "page size 16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "page-size", "a dtype of 2 bytes"),
    ],
)
def test_sizes_that_no_key_shows(
    invoke: Invoke, store: Path, profile: Path, changes: dict[str, Any], name: str, words: str
) -> None:
    """Another page size or dtype shows in the sizes only; both are named where both fit."""
    checks = doctor(invoke, store, "--profile", profile, exit_code=4, **changes)
    check = first_cause(checks)
    assert (check["group"], check["name"], check["status"]) == ("server", name, "fail")
    assert words in check["detail"]


def test_the_stamp_decides_between_page_size_and_dtype(
    invoke: Invoke, store: Path, profile: Path
) -> None:
    """A stamp records the page size: half the bytes at the same page size are another dtype."""
    with FileStore(store) as opened:
        write_stamp(opened, Stamp(PROFILE))
    checks = doctor(invoke, store, "--profile", profile, exit_code=4, kv_cache_dtype="fp8_e4m3")
    assert "a dtype of 2 bytes" in checks["server/dtype"]["detail"]
    assert "page size 32" not in checks["server/dtype"]["detail"]


def test_the_stamp_shows_another_layout(invoke: Invoke, store: Path, profile: Path) -> None:
    """Neither keys nor sizes show a layout; a stamp does, and migrate converts it."""
    with FileStore(store) as opened:
        write_stamp(opened, Stamp(PROFILE))
    more = ("--profile", profile)
    assert doctor(invoke, store, *more)["server/layout"]["status"] == "ok"
    changes = {"hicache_mem_layout": "page_first_direct", "hicache_io_backend": "direct"}
    check = doctor(invoke, store, *more, exit_code=4, **changes)["server/layout"]
    assert check["status"] == "fail"
    assert "--to-layout page_first_direct" in check["next"]


@pytest.mark.parametrize("page_size", [16, 32])
def test_a_command_decides_between_page_size_and_dtype(
    invoke: Invoke, store: Path, tmp_path: Path, page_size: int
) -> None:
    """With requests, the command of the next step measures them with the other page size."""
    requests = tmp_path / "requests.jsonl"
    requests.write_text(f"{list(range(100))}\n")
    stated = profile_file(tmp_path / "p.toml", replace(PROFILE, page_size=page_size))
    with answering(info(page_size=32)) as url:
        arguments = (store, "--server", url, "--watch", "0s", "--profile", stated)
        check = first_cause(checks_of(invoke, *arguments, exit_code=4))
        assert check["next"].startswith("give requests of that time: hicachectl hits")
        check = first_cause(checks_of(invoke, *arguments, "--token-ids", requests, exit_code=4))
        words = shlex.split(check["next"].partition("; ")[0])
        assert words[:2] == ["hicachectl", "hits"]
        if page_size == 16:
            assert invoke.document(*words[1:])["requests"] == 1
        else:  # the profile is not that of the pages, and the server's model is unknown
            assert words[3:] == [
                "--server", url, "--model-config", "DIR", "--page-size", "16", "--token-ids",
                str(requests), "--summary",
            ]  # fmt: skip


@pytest.mark.parametrize("damage", [0, 1])
def test_a_store_of_two_page_sizes_warns(
    invoke: Invoke, store: Path, profile: Path, damage: int
) -> None:
    """Pages of an earlier page size are one warning, and no damage; a truncated page is damage."""
    paths = [path for path in sorted(store.glob("*_2.bin")) if ".mamba" not in path.name]
    for path in paths[:8]:
        path.write_bytes(path.read_bytes() * 2)
    for path in paths[8 : 8 + damage]:
        path.write_bytes(path.read_bytes()[:-8])
    for path in paths:
        os.utime(path, (1e9, 1e9))
    checks = doctor(invoke, store, "--profile", profile, exit_code=4 if damage else 0)
    check, structure = checks["server/page-size"], checks["store/structure"]
    assert check["status"] == "warn"
    assert "page size 32" in check["detail"]
    if damage:
        assert (structure["status"], structure["evidence"]) == ("fail", "1 truncated")
    else:
        assert (first_cause(checks), structure["status"]) == (check, "ok")
        assert "4 pages of another size" in structure["evidence"]


def test_without_sizes_the_names_are_compared(invoke: Invoke, store: Path) -> None:
    """A server whose model is on another machine is compared by its keys; the rest is unknown."""
    checks = doctor(invoke, store)
    assert checks["server/deployment"]["status"] == "ok"
    assert checks["server/profile"]["status"] == "unknown"
    assert "--model-config" in checks["server/profile"]["next"]
    assert "server/page-size" not in checks


def test_an_empty_store_has_no_other_deployment(invoke: Invoke, tmp_path: Path) -> None:
    """A store without pages says nothing of a deployment: its emptiness is another check's."""
    empty = tmp_path / "empty"
    empty.mkdir()
    with answering(info()) as url:
        arguments = ("doctor", empty, "--server", url, "--format", "jsonl")
        document = invoke(*arguments, exit_code=4).stdout
    assert '"deployment"' not in document


def test_several_servers_are_judged_apart(invoke: Invoke, store: Path, profile: Path) -> None:
    """Each server has its own checks, and its URL stands in the table before what is wrong."""
    with answering(info()) as one, answering(info(tp_size=4)) as two:
        arguments = ("doctor", store, "--server", one, "--server", two, "--profile", profile)
        text = invoke(*arguments, exit_code=4).stdout
    assert text.split()[:3] == ["fail", "server", "tp"]
    assert f"{two}: The store has tp 2" in text.splitlines()[0]
