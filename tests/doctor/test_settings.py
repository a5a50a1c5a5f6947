"""What `doctor` says of a server's own replies, for replies that no real CPU server gives."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl import open_store
from hicachectl.doctor.examine import examine
from hicachectl.doctor.request import DoctorRequest
from tests.doctor.replies import SETTINGS, answering, checks_of, info
from tests.move.migrations import demo_store, profile_file
from tests.speed import some

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Invoke

    Doctor = Callable[..., dict[str, dict[str, Any]]]

ODD_VALUES: tuple[object, ...] = (None, "", "x", -1, 2**70, 1e300, [], {"a": [1]}, True)


@pytest.fixture
def doctor(tmp_path: Path, invoke: Invoke) -> Doctor:
    """Return the checks of a server with these replies, over the demo's store."""
    store, profile = demo_store(tmp_path / "store"), profile_file(tmp_path / "profile.toml")

    def examined(reply: Any, *more: object, exit_code: int = 0, **serving: Any) -> Any:
        with answering(reply, **serving) as url:
            arguments = ("--server", url, "--profile", profile, *more)
            return checks_of(invoke, store, *arguments, exit_code=exit_code)

    return examined


def of_server(checks: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: check["status"] for name, check in checks.items() if name.startswith("server/")}


def test_a_usual_server_has_no_failing_setting(doctor: Doctor) -> None:
    """Each setting of a usual server is judged, and none is a cause."""
    assert of_server(doctor(info())) == dict.fromkeys(
        map(
            "server/{}".format,
            (
                "reachable", "hicache", "attached", "write-policy", "prefetch-policy",
                "threshold", "host-pool", "weights", "release", "deployment", "page-size",
            ),
        ),
        "ok",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("state", "name", "status", "words"),
    [
        ({"enable_hierarchical_cache": False}, "hicache", "fail", "--enable-hierarchical-cache"),
        (
            {"disable_radix_cache": True, "disaggregation_mode": "decode"},
            "hicache",
            "fail",
            "prefill server",
        ),
        ({"hicache_storage_backend": None}, "attached", "fail", "/hicache/storage-backend"),
        (
            {"hicache_write_policy": "write_through_selective"},
            "write-policy",
            "warn",
            "--hicache-write-policy write_through",
        ),
        ({"hicache_write_policy": "write_back"}, "write-policy", "warn", "write_through"),
        ({"hicache_write_policy": ["a"]}, "write-policy", "unknown", ""),
        ({"hicache_storage_prefetch_policy": "best_effort"}, "prefetch-policy", "warn", "timeout"),
        ({"hicache_ratio": 0.5}, "host-pool", "warn", "--hicache-ratio"),
        (
            {"hicache_size": 10, "memory_usage": {"kvcache": 20.0}},
            "host-pool",
            "warn",
            "--hicache-size",
        ),
        ({"hicache_size": 30, "memory_usage": {"kvcache": 20.0}}, "host-pool", "ok", ""),
        ({"model_path": "/models/new"}, "weights", "warn", "hicachectl rm"),
        ({"weight_version": "step-2"}, "weights", "warn", "hicachectl-plugin(7)"),
        (
            {
                "weight_version": "step-2",
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config": json.dumps(
                    {"module_path": "hicachectl.backends.sglang"}
                ),
            },
            "weights",
            "ok",
            "",
        ),
        (
            {"hicache_storage_backend_extra_config": "@/etc/hicache.json"},
            "threshold",
            "unknown",
            "--prefetch-threshold",
        ),
    ],
)
def test_a_setting_of_a_rank_counts(
    doctor: Doctor, state: dict[str, Any], name: str, status: str, words: str
) -> None:
    """The live settings of internal_states decide, although the top level says otherwise."""
    check = doctor(info(state), exit_code=4 if status == "fail" else 0)[f"server/{name}"]
    assert (check["status"], words in str(check["next"])) == (status, True)


def test_only_one_cause_of_a_server_without_hicache(doctor: Doctor) -> None:
    """Nothing that needs HiCache is judged without it, and --disable-radix-cache is named."""
    checks = doctor(info(enable_hierarchical_cache=False, disable_radix_cache=True), exit_code=4)
    assert [name for name, status in of_server(checks).items() if status == "fail"] == [
        "server/hicache"
    ]
    assert "--disable-radix-cache" in checks["server/hicache"]["next"]
    assert "server/attached" not in checks


def test_ranks_that_disagree_are_counted(doctor: Doctor) -> None:
    """An attach that reached one of two data-parallel ranks fails; other differences warn."""
    checks = doctor(info({}, {"hicache_storage_backend": None}), exit_code=4)
    assert checks["server/attached"]["detail"].startswith("1 of 2 data-parallel ranks")
    checks = doctor(info({}, {}, {"hicache_write_policy": "write_back"}))
    assert checks["server/ranks"]["status"] == "warn"
    assert "'write_through' (2 ranks), 'write_back' (1 rank)" in checks["server/ranks"]["evidence"]


def test_a_text_of_megabytes_is_cut(doctor: Doctor) -> None:
    """A hostile name of a dtype or a model is shown in part."""
    config = Path(__file__).parents[1] / "data" / "configs" / "llama-3.1-8b.json"
    checks = doctor(info(kv_cache_dtype="x" * 10**6), "--model-config", config)
    checks |= doctor(info(served_model_name="y" * 10**6), exit_code=4)
    longest = max(len(text) for check in checks.values() for text in check.values() if text)
    assert 1000 < longest <= 4000


def test_a_version_that_is_none_ends_no_run(doctor: Doctor) -> None:
    """A fork's own name of its release is unknown; everything else is judged."""
    config = Path(__file__).parents[1] / "data" / "configs" / "llama-3.1-8b.json"
    reply = {**info(), "version": "main-1a2b3c"}
    checks = doctor(reply, "--model-config", config)
    assert checks["server/release"]["status"] == "unknown"
    names = ("server/deployment", "server/page-size", "store/reachable", "store/structure")
    assert {checks[name]["status"] for name in names} == {"ok"}


def test_a_reply_of_an_older_release_is_judged_as_far_as_it_goes(doctor: Doctor) -> None:
    """Members that a release does not know are unknown, never a cause."""
    reply = info(version="0.4.9")
    for values in (reply, *reply["internal_states"]):
        for name in list(values):
            if name.startswith(("hicache_", "weight_")) and name != "hicache_storage_backend":
                del values[name]
        del values["enable_hierarchical_cache"]
    reply["version"] = "0.4.9"
    checks = doctor(reply)
    assert {
        checks[f"server/{name}"]["status"] for name in ("hicache", "write-policy", "release")
    } == {"unknown"}


@pytest.mark.parametrize(
    ("serving", "words"),
    [
        ({"status": 401}, "HICACHECTL_API_KEY"),
        ({"status": 500}, "HTTP 500"),
        ({"status": 404}, "/server_info"),
        ({"body": b"<html>portal</html>"}, "JSON"),
        ({"body": b"[" * 100_000}, "JSON"),
        ({"body": b'{"a": "' + b"x" * (33 << 20) + b'"}'}, "larger than"),
    ],
)
def test_a_reply_that_is_of_no_use_is_a_failing_check(
    doctor: Doctor, serving: dict[str, Any], words: str
) -> None:
    """Such a server is not reached; the store is checked all the same, and the status is 4."""
    checks = doctor({}, exit_code=4, **serving)
    check = checks["server/reachable"]
    assert check["status"] == "fail"
    assert words in f"{check['detail']}; {check['next']}"
    assert any(name.startswith("store/") for name in checks)


@pytest.mark.slow
@pytest.mark.parametrize("value", some(ODD_VALUES, {"a": [1]}, "x", 2**70), ids=repr)
def test_no_value_of_a_setting_ends_the_command(tmp_path: Path, value: object) -> None:
    """A reply is untrusted: each member may be anything, and the other checks are made."""
    replies = [info({name: value}) for name in SETTINGS]
    replies += [{**info(), name: value} for name in ("version", "internal_states", "tp_size")]
    with open_store(str(demo_store(tmp_path / "store"))) as store:
        for reply in replies:
            with answering(reply) as url:
                request = DoctorRequest(servers=(url,), sample_pages=0)
                names = {check["group"] for check in examine(request, store).document["checks"]}
            assert {"server", "store"} <= names


def test_a_router_is_told_apart(doctor: Doctor) -> None:
    """A reply without a model is a router's: its URL is of no use, and the message says so."""
    check = doctor({"version": "0.5.23"}, exit_code=4)["server/reachable"]
    assert ("router" in check["detail"], check["next"]) == (True, "give the URL of a worker")


def test_a_server_that_does_not_listen(tmp_path: Path, invoke: Invoke) -> None:
    """Neither the server nor the store can be reached: two failing checks, each with its reason."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        checks = checks_of(invoke, tmp_path / "missing", "--server", url, exit_code=4)
    assert checks["server/reachable"]["status"] == "fail"
    assert checks["store/reachable"]["status"] == "fail"


def test_a_url_with_a_password_is_refused_without_showing_it(
    tmp_path: Path, invoke: Invoke
) -> None:
    """The message names neither the user nor the password."""
    outcome = invoke("doctor", tmp_path, "--server", "http://me:hunter2@host:1", exit_code=2)
    assert "hunter2" not in outcome.stderr
