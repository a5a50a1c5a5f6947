"""Manifests for Kubernetes: each is valid, and the base fits together.

tests/test_wheel.py runs the commands of the base.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from tests.skips import need_tool
from tests.test_readme import check_arguments, manual_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Invoke

    Manifest = dict[str, Any]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "hicachectl" / "packaging" / "kubernetes"
BASE = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
PATHS = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
# Examples of other stores, a run that is started by hand, and a pod for copies.
BESIDE_THE_BASE = {
    "copy-pod.yaml", "room-cronjob.yaml", "verify-cronjob.yaml", "verify-first.yaml",
    "verify-merge.yaml", "verify-parts.yaml",
}  # fmt: skip
OURS = "registry.example/hicachectl:latest"


def manifests_of(text: str) -> list[Manifest]:
    return list(yaml.safe_load_all(text))


def base() -> list[Manifest]:
    """Return the manifests of the base as they are written."""
    return [one for name in BASE["resources"] for one in manifests_of((FOLDER / name).read_text())]


def pods_of(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the name of each workload with the template of its pods."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        spec = spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec
        if "template" in spec:
            yield manifest["metadata"]["name"], spec["template"]


def containers(template: Manifest) -> list[Manifest]:
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def arguments(container: Manifest) -> list[str]:
    """Return the arguments, with the values of the variables that the base sets."""
    given = {
        each["name"]: dict(text.split("=") for text in each.get("literals", ()))
        for each in BASE["configMapGenerator"]
    }
    words = container["args"]
    for one in container.get("env", ()):
        place = one.get("valueFrom", {}).get("configMapKeyRef")
        if place is not None:
            value = given[place["name"]][place["key"]]
            words = [word.replace(f"$({one['name']})", value) for word in words]
    return list(words)


def words_of(manifests: list[Manifest]) -> Iterator[str]:
    """Yield the arguments and the variables of all containers."""
    for _, template in pods_of(manifests):
        for container in containers(template):
            yield from container["args"]
            yield from (one["value"] for one in container.get("env", ()) if "value" in one)


def names_of(manifests: list[Manifest], kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in manifests if one["kind"] == kind}


def validate(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_manifest_is_valid(path: Path) -> None:
    manifests = manifests_of(path.read_text())
    for manifest in manifests:
        validate(manifest)
    for _, template in pods_of(manifests):
        own = [one for one in containers(template) if one["image"] == OURS]
        assert own or path.name == "metrics.yaml"
        for container in own:
            if "command" not in container:
                check_arguments(arguments(container))
        mounts = {
            one["name"] for each in containers(template) for one in each.get("volumeMounts", ())
        }
        assert mounts == {one["name"] for one in template["spec"].get("volumes", ())}


def test_a_manifest_that_is_wrong_would_be_noticed() -> None:
    (manifest,) = manifests_of((FOLDER / "verify-cronjob.yaml").read_text())
    manifest["spec"]["jobTemplate"]["spec"]["restartPolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(manifest)


def test_each_manifest_is_in_the_base_or_beside_it() -> None:
    names = {path.name for path in PATHS}
    assert names == {*BASE["resources"], *BESIDE_THE_BASE}
    assert not BESIDE_THE_BASE & set(BASE["resources"])


def kustomized(folder: Path) -> str:
    """Return what kubectl builds of a folder."""
    tool = need_tool("kubectl", "kubernetes-client")
    done = subprocess.run([tool, "kustomize", folder], capture_output=True, text=True, check=True)
    return done.stdout


def used_maps(text: str) -> set[str]:
    """Return the names of the ConfigMaps that the manifests of a text use."""
    return set(re.findall(r"configMap(?:KeyRef)?:(?:\n +key: \S+)?\n +name: (\S+)", text))


@pytest.mark.slow
def test_kubectl_builds_the_base() -> None:
    text = kustomized(FOLDER)
    built = manifests_of(text)
    for manifest in built:
        validate(manifest)
    assert len(built) == len(base()) + len(BASE["configMapGenerator"])
    assert used_maps(text) == names_of(built, "ConfigMap")
    assert {name.rpartition("-")[0] for name in used_maps(text)} == {
        "hicache-gate",
        "hicache-profile",
    }


@pytest.mark.slow
def test_kubectl_builds_the_overlay_of_the_page(tmp_path: Path, invoke: Invoke) -> None:
    """hicachectl-kubernetes(7) has it; the images, the profile and the namespace become its own."""
    blocks = manual_blocks("hicachectl-kubernetes.7")
    (block,) = (block for block in blocks if "behavior: replace" in block)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(block.replace("\\(dq", '"'))
    (overlay / "profile.toml").write_text("own = 1\n")
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    text = kustomized(overlay)
    built = manifests_of(text)
    assert len(built) == len(base()) + len(BASE["configMapGenerator"])
    images = {one["image"] for _, pod in pods_of(built) for one in containers(pod)}
    assert images == {
        "registry.local/hicachectl:1",
        "registry.local/sglang:v0.5.23",
        "registry.local/node-exporter:v1.8.2",
    }
    assert {one["metadata"]["namespace"] for one in built} == {"llm"}
    maps = [one["data"] for one in built if one["kind"] == "ConfigMap"]
    assert sorted(maps, key=str) == [{"min-usable": "0.4"}, {"profile.toml": "own = 1\n"}]
    (store,) = (one for one in built if one["metadata"]["name"] == "mooncake-store"
                and one["kind"] == "Deployment")  # fmt: skip
    assert store["spec"]["replicas"] == 2
    for manifest in built:
        validate(manifest)
    (server,) = (pod for name, pod in pods_of(built) if name == "sglang")
    container, exporter = server["spec"]["containers"]
    assert exporter["name"] == "metrics"
    assert "--served-model-name=Qwen/Qwen3-8B" in container["args"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert {one["name"] for one in server["spec"]["initContainers"]} == {"prewarm"}
    (tmp_path / "rendered.yaml").write_text(text)
    config = ROOT / "tests" / "data" / "configs" / "qwen3-32b.json"
    launch = ("--launch", f"@{tmp_path / 'rendered.yaml'}", "--model-config", config)
    profile_of_overlay = tomllib.loads(invoke("profile", *launch).stdout)
    assert (profile_of_overlay["model"], profile_of_overlay["page_size"]) == ("Qwen/Qwen3-8B", 64)
    assert profile_of_overlay["tp"] == 1  # the base has 8


def test_the_pod_for_copies_writes_the_archive_as_the_user_of_the_gate() -> None:
    path = FOLDER / "copy-pod.yaml"
    (pod,) = manifests_of(path.read_text())
    ((_, archive),) = pods_of(manifests_of((FOLDER / "archive-cronjob.yaml").read_text()))
    ((_, server),) = pods_of(manifests_of((FOLDER / "server.yaml").read_text()))
    (volume,) = pod["spec"]["volumes"]
    assert volume in archive["spec"]["volumes"]
    assert volume in server["spec"]["volumes"]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == OURS
    assert container["volumeMounts"] == archive["spec"]["containers"][0]["volumeMounts"][:1]
    assert pod["spec"]["securityContext"] == archive["spec"]["securityContext"]
    (command,) = re.findall(r"-- hicachectl (.+)", path.read_text())
    check_arguments(command.split())
    (gate,) = server["spec"]["initContainers"]
    paths = set(re.findall(r"hicache-copy:(\S+)", path.read_text()))
    assert paths == {*command.split()[1:2], *command.split()[3:]}
    assert all(any(word.endswith(path) for word in gate["args"]) for path in paths)


def test_run_directories_are_removed_each_night() -> None:
    """As hicachectl-scaling(7) says."""
    (job,) = manifests_of((FOLDER / "runs-cronjob.yaml").read_text())
    assert job["spec"]["schedule"].split()[2:] == ["*"] * 3


def test_a_server_waits_for_its_store() -> None:
    ((_, template),) = pods_of(manifests_of((FOLDER / "server.yaml").read_text()))
    (gate,) = template["spec"]["initContainers"]
    assert gate["args"][0] == "prewarm"
    given = {text.partition("=")[0] for text in gate["args"]}
    assert given >= {"--min-usable", "--open-after", "--open-since"}


def test_the_base_names_only_what_it_has() -> None:
    """Hosts are services, with ports that pods open; claims and profiles are there."""
    manifests = base()
    services = {
        f"{one['metadata']['name']}:{port['port']}": (one["spec"]["selector"], port["targetPort"])
        for one in manifests if one["kind"] == "Service"
        for port in one["spec"]["ports"]
    }  # fmt: skip
    hosts = {
        host for word in words_of(manifests) for host in re.findall(r"[a-z][a-z-]+:\d{4,5}", word)
    }
    assert hosts <= services.keys()
    assert {"mooncake-master:50051", "sglang:30000"} <= hosts
    opened = [
        (template["metadata"]["labels"], port["name"])
        for _, template in pods_of(manifests)
        for container in containers(template)
        for port in container.get("ports", ())
    ]
    assert all(aimed in opened for aimed in services.values())
    text = yaml.safe_dump_all(manifests)
    assert set(re.findall(r"claimName: (\S+)", text)) == names_of(
        manifests, "PersistentVolumeClaim"
    )
    configured = {one["name"] for one in BASE["configMapGenerator"]}
    assert used_maps(text) == configured


def test_the_policies_of_the_base_let_in_who_connects() -> None:
    manifests = base()
    policies = {
        one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"
    }
    apps = {template["metadata"]["labels"]["app"] for _, template in pods_of(manifests)}
    assert {spec["podSelector"]["matchLabels"]["app"] for spec in policies.values()} == apps
    assert set(policies) == apps
    assert "ingress" not in policies["hicachectl"]  # nobody connects to a job
    for name in ("mooncake-master", "mooncake-store"):
        ((rule,),) = [policies[name]["ingress"]]
        (place,) = rule["from"]
        (chosen,) = place["podSelector"]["matchExpressions"]
        assert set(chosen["values"]) == apps - {"mooncake-master", "hicache-metrics"}
    ports = {
        (name, port["port"], port.get("endPort"))
        for name, spec in policies.items()
        for rule in spec.get("ingress", ())
        for port in rule["ports"]
    }
    variables = {
        one["name"]: one.get("value")
        for name, template in pods_of(manifests) if name == "mooncake-store"
        for one in containers(template)[0]["env"]
    }  # fmt: skip
    transfers = (int(variables["MC_MIN_RPC_PORT"]), int(variables["MC_MAX_RPC_PORT"]))
    assert ports == {
        ("mooncake-master", 50051, None), ("mooncake-master", 9003, None),
        ("mooncake-store", *transfers), ("sglang", 30000, None),
        ("sglang", 9100, None), ("hicache-metrics", 9100, None),
    }  # fmt: skip


def test_the_base_runs_under_the_restricted_standard_of_pod_security() -> None:
    """Except the servers: their image decides."""
    for name, template in pods_of(base()):
        of_pod = template["spec"].get("securityContext", {})
        assert not any("hostPath" in volume for volume in template["spec"].get("volumes", ()))
        for container in containers(template):
            if container["name"] != "sglang":
                context = {**of_pod, **container["securityContext"]}
                assert context["runAsNonRoot"], name
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
                assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize(
    ("reader", "writer"),
    [("server.yaml", "server.yaml"), ("metrics.yaml", "verify-nightly.yaml")],
    ids=["gate", "verify"],
)
def test_an_exporter_reads_the_metrics_that_the_base_writes(reader: str, writer: str) -> None:
    """One file for each exporter: it drops the second of two files with the same metrics."""
    ((_, reads),), ((_, writes),) = (
        pods_of(manifests_of((FOLDER / name).read_text())) for name in (reader, writer)
    )
    exporters = [one for one in containers(reads) if one["name"] == "metrics"]
    written = [
        (container, word.partition("=")[2])
        for container in containers(writes)
        for word in container["args"]
        if word.startswith("--metrics-file=")
    ]
    ((exporter,), ((container, path),)) = (exporters, written)
    assert path.endswith(".prom")  # the exporter reads no others
    assert f"--collector.textfile.directory={Path(path).parent}" in exporter["args"]
    mounts = [
        {one["mountPath"]: one["name"] for one in each["volumeMounts"]}[str(Path(path).parent)]
        for each in (exporter, container)
    ]
    of_reader, of_writer = (
        next(one for one in pod["spec"]["volumes"] if one["name"] == name)
        for pod, name in zip((reads, writes), mounts, strict=True)
    )
    assert of_reader == of_writer
    (port,) = exporter["ports"]
    assert port == {"name": "metrics", "containerPort": 9100}


def test_the_profile_of_the_base_is_that_of_its_servers(invoke: Invoke) -> None:
    config = ROOT / "tests" / "data" / "configs" / "qwen3-32b.json"
    launch = f"@{FOLDER / 'server.yaml'}"
    printed = invoke("profile", "--launch", launch, "--model-config", config).stdout
    assert printed == (FOLDER / "profile.toml").read_text()


def test_the_image_has_the_libraries_that_mooncake_links(mooncake_package: None) -> None:
    """The packages that the Containerfile installs, on the distribution that it is based on."""
    import mooncake

    reader, owners = need_tool("readelf", "binutils"), need_tool("dpkg-query", "dpkg")
    recipe = (FOLDER.parent / "Containerfile").read_text()
    (listed,) = re.findall(r'^ARG PACKAGES="(.*)"$', recipe, re.MULTILINE)
    folder = Path(next(iter(mooncake.__path__)))
    wanted: set[str] = set()
    for name in ("store.so", "libasio.so", "mooncake_master", "mooncake_client"):
        done = subprocess.run(
            [reader, "-d", folder / name], capture_output=True, text=True, check=True
        )
        wanted |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", done.stdout))
    of_wheel = {path.name for place in (folder, *folder.parent.glob("mooncake*.libs"))
                for path in place.iterdir()}  # fmt: skip
    owners_of = {}
    for library in wanted - of_wheel:
        of_library = [owners, "-S", f"*/{library}"]
        done = subprocess.run(of_library, capture_output=True, text=True, check=False)
        owners_of[library] = {line.partition(":")[0] for line in done.stdout.splitlines()}
    every_image_has = {"libc6", "libstdc++6", "libgcc-s1"}
    installed = set(listed.split())
    for library, packages in owners_of.items():
        assert packages & {*every_image_has, *installed}, library
    needless = installed - set().union(*owners_of.values())
    assert needless == {"ibverbs-providers"}  # libibverbs1 loads them for RDMA
