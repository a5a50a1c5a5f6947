"""Have SGLang write a store, and list the objects that SGLang wrote.

Runs inside the SGLang environment: `write_store.py CASE PLACE [--backend B] [--manifest FILE]`.
CASE is a name in store_cases.py; PLACE is a directory (backend file), directories separated by
commas (backends nixl and nixl-buffered, with and without direct I/O), host:port of a Mooncake
master, or SGLang's own JSON config (backend hf3fs). With files, `all` writes every case of the
installed release, each to a folder of PLACE (store_cases.store_name).

SGLang hashes the pages, allocates host slots, decides which objects each rank writes, and names
them. This program only fills the host pools (prompt_nodes.py) and, in place of the radix tree,
passes nodes to the controller one by one. The manifest lists every object that went through
`HiCacheFile.set`, HiCacheNixl's transfers, MooncakeStore's puts or HiCacheHF3FS's confirmations:

    case, sglang, layout, page_size, seed
    tokens        token ids of the prompt, a whole number of pages
    pages         page hashes in chain order
    objects       key (of a file: `file`), page, pool, part (null if the object is the whole page),
                  model, tp_rank, tp_size, pp_rank, pp_size, cp_rank, cp_size (null if the key
                  lacks them), nbytes. File and Mooncake: also dcp_rank. Mooncake, where keys have
                  ranks but no sizes: also tag, heads
                  (the slices of split heads) and group (its group id). 3FS, where keys have no
                  model: the model that wrote the object, and its page index
    ignored       file: calls that wrote nothing because the file existed, with the writer's ranks
    deployments   profile, linear_attention, … (see store_cases.Deployment)
    profile       of the first deployment

For `all`, the output is one object that maps store names to manifests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance import prompt_nodes, rank_pools, sglang_env
    from tests.conformance.prompt_nodes import Prompt
    from tests.conformance.rank_pools import Rank, RankPools
    from tests.conformance.store_cases import (
        CASES,
        HF3FS_CASES,
        LAYOUTS,
        MOONCAKE_CASES,
        NIXL_CASES,
        VARIANTS,
        Case,
        Deployment,
        store_name,
    )
else:
    import prompt_nodes
    import rank_pools
    import sglang_env
    from store_cases import (
        CASES,
        HF3FS_CASES,
        LAYOUTS,
        MOONCAKE_CASES,
        NIXL_CASES,
        VARIANTS,
        store_name,
    )


def main() -> None:
    """Write the stores that the command line names."""
    options = _parse_arguments()
    cases = _CASES[options.backend]
    # SGLang sometimes prints to stdout, which must contain only the manifest.
    with contextlib.redirect_stdout(sys.stderr):
        if options.case == "all":
            document = _write_all(options)
        else:
            case = cases[options.case]
            document = write_case(
                options.case, case, place(options.backend, options.place), options
            )
    text = json.dumps(document, indent=1)
    if options.manifest is None:
        print(text)
    else:
        options.manifest.write_text(text)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `place` reads."""
    parser.add_argument(
        "place", help="a directory, host:port of a Mooncake master, or SGLang's config of 3FS"
    )
    parser.add_argument("--backend", choices=tuple(_CASES), default="file")


def place(backend: str, text: str) -> Place:
    """Return the place that the arguments of the command line name."""
    kinds: dict[str, Callable[[str], Place]] = {
        "file": Path,
        "hf3fs": Hf3fsConfig,
        "mooncake": str,
        "nixl": NixlDirectories,
        "nixl-buffered": partial(NixlDirectories, direct=False),
    }
    return kinds[backend](text)


def write_case(name: str, case: Case, place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """Write one store and return its manifest. Raises if SGLang does something unexpected."""
    _check_release(name, case)
    deployments = [_changed(deployment, options) for deployment in case.deployments]
    page_sizes = {deployment.profile["page_size"] for deployment in deployments}
    if len(page_sizes) > 1 or (isinstance(place, Path) and any(place.glob("*"))):
        raise SystemExit(f"{name}: one page size and an empty directory, please")
    page_size = page_sizes.pop()
    prompt = prompt_nodes.random_prompt(options.pages, page_size, case.node_pages, options.seed)
    recorder = _recorder(place)
    for deployment in deployments:
        for rank in rank_pools.ranks(deployment.profile):
            _write_rank(deployment, rank, prompt, place, recorder)
    first = deployments[0].profile
    return {
        "case": name,
        "sglang": first["sglang"],
        "layout": first["layout"],
        "page_size": page_size,
        "seed": options.seed,
        "tokens": prompt.tokens,
        "pages": prompt.pages,
        "objects": recorder.objects,
        "ignored": recorder.ignored,
        "deployments": [dataclasses.asdict(deployment) for deployment in deployments],
        "profile": first,
    }


def make_controller(deployment: Deployment, pools: RankPools, place: Place) -> Any:
    """Return SGLang's controller with only the parts that move pages between host and store.

    It has no threads or process groups. It still decides which rank writes which objects, under
    which coordinates and in which order.
    """
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    try:
        from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
    except ImportError:  # 0.5.18
        from sglang.srt.mem_cache.memory_pool_host import HostPoolGroup, PoolEntry

    entries = [
        PoolEntry(
            name=PoolName(name),
            host_pool=host,
            device_pool=pools.device[name],
            layer_mapper=lambda layer: layer,
            is_primary_index_anchor=name == "kv",
        )
        for name, host in pools.host.items()
    ]
    controller = HybridCacheController.__new__(HybridCacheController)
    controller.mem_pool_device = pools.device["kv"]
    controller.mem_pool_host = HostPoolGroup(entries)
    controller.storage_host_pool = pools.host["kv"]
    controller.page_size = deployment.profile["page_size"]
    controller.enable_storage_metrics = False
    controller.get_attn_cp_rank_and_size = lambda: (pools.rank.cp, deployment.profile.get("cp", 1))
    if isinstance(place, Path):
        _attach_files(controller, deployment, place)
    elif isinstance(place, Hf3fsConfig):
        _attach_hf3fs(controller, deployment, place)
    elif isinstance(place, NixlDirectories):
        _attach_nixl(controller, deployment, place)
    else:
        _attach_mooncake(controller, deployment, place)
    controller.storage_backend.register_mem_pool_host(pools.host["kv"])
    for entry in entries:
        controller.storage_backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
    return controller


def _attach_files(controller: Any, deployment: Deployment, directory: Path) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    controller.storage_backend_type = "file"
    controller.page_set_func = controller._generic_page_set
    config = controller._generate_storage_config(
        deployment.profile["model"], {"file_storage_path": str(directory)}
    )
    controller.storage_config = config
    if not hasattr(type(controller), "backup_skip"):  # 0.5.18 sets it on attaching the backend
        controller.backup_skip = config.is_mla_model and config.tp_rank != 0
        controller.has_draft = False
    # 0.5.18 has no setting file_storage_path.
    controller.storage_backend = HiCacheFile(config, str(directory))


def _attach_hf3fs(controller: Any, deployment: Deployment, place: Hf3fsConfig) -> None:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    os.environ["SGLANG_HICACHE_HF3FS_CONFIG_PATH"] = place.path
    controller.storage_backend_type = "hf3fs"
    controller.page_set_func = controller._page_set_zero_copy
    config = controller._generate_storage_config(
        deployment.profile["model"],
        {"use_mock_hf3fs_client": True},  # SGLang's mock, which uses plain files
    )
    controller.storage_config = config
    controller.storage_backend = StorageBackendFactory.create_backend(
        "hf3fs", config, controller.storage_host_pool
    )


def _attach_nixl(controller: Any, deployment: Deployment, place: NixlDirectories) -> None:
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = place.paths
    controller.storage_backend_type = "nixl"
    controller.page_set_func = controller._page_set_zero_copy
    settings = {
        "plugin": {"posix": {"active": True}},
        "use_direct_io": place.direct,
        "l3_cleaner_enabled": False,
    }
    config = controller._generate_storage_config(deployment.profile["model"], settings)
    controller.storage_config = config
    controller.storage_backend = HiCacheNixl(config)


def _attach_mooncake(controller: Any, deployment: Deployment, master: str) -> None:
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

    profile = deployment.profile
    settings = {
        "master_server_address": master,
        "local_hostname": master.partition(":")[0],
        "protocol": "tcp",
        "global_segment_size": 0,  # the data must outlive this process
        "enable_group_semantics": deployment.groups,
    }
    if "tag" in profile:
        settings["extra_backend_tag"] = profile["tag"]
    if "tp_lcm_size" in profile:
        settings["tp_lcm_size"] = profile["tp_lcm_size"]
    controller.storage_backend_type = "mooncake"
    controller.page_set_func = controller._page_set_zero_copy
    config = controller._generate_storage_config(profile["model"], settings)
    controller.storage_config = config
    controller.storage_backend = MooncakeStore(config, controller.storage_host_pool)
    _CLIENTS.append(controller)  # to close one would take a second


def _write_rank(
    deployment: Deployment, rank: Rank, prompt: Prompt, place: Place, recorder: _Recorder
) -> None:
    """Fill a rank's host pools, and have the controller back them up node by node."""
    with rank_pools.parallel(deployment, rank):
        pools = rank_pools.build_pools(deployment, rank, len(prompt.pages))
        controller = make_controller(deployment, pools, place)
        recorder.attach(controller.storage_backend, controller.storage_config)
        pools.host["kv"].alloc(prompt.page_size)  # shifts page i away from slot i
        for operation in prompt_nodes.back_up_operations(pools, prompt):
            tokens = len(operation.token_ids)
            controller._page_backup(operation)
            if operation.completed_tokens != tokens and not controller.backup_skip:
                raise AssertionError(f"{rank}: {operation.completed_tokens} of {tokens} stored")


@dataclasses.dataclass(frozen=True, slots=True)
class Hf3fsConfig:
    """The JSON config of SGLang's 3FS backend."""

    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class NixlDirectories:
    """The directories of SGLang's NIXL backend, separated by commas; direct: with O_DIRECT."""

    paths: str
    direct: bool = True


# A directory of files, 3FS, directories of NIXL, or host:port of a Mooncake master.
Place = Path | Hf3fsConfig | NixlDirectories | str

_CASES = {
    "file": CASES,
    "hf3fs": HF3FS_CASES,
    "mooncake": MOONCAKE_CASES,
    "nixl": NIXL_CASES,
    "nixl-buffered": NIXL_CASES,
}


_CLIENTS: list[Any] = []


class _Recorder(Protocol):
    """Records the objects that attached backends write."""

    objects: list[dict[str, Any]]
    ignored: list[dict[str, Any]]

    def attach(self, backend: Any, config: Any) -> None: ...


def _recorder(place: Place) -> _Recorder:
    if isinstance(place, Path):
        return _FileRecorder(place)
    if isinstance(place, NixlDirectories):
        return _NixlRecorder()
    return _Hf3fsRecorder() if isinstance(place, Hf3fsConfig) else _MooncakeRecorder()


class _FileRecorder:
    """Records every `set` of attached backends, and the resulting file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.objects: list[dict[str, Any]] = []
        self.ignored: list[dict[str, Any]] = []
        self._seen: set[str] = set()

    def attach(self, backend: Any, config: Any) -> None:
        original: Callable[[str, Any], bool] = backend.set

        def recording_set(key: str, value: Any) -> bool:
            stored = original(key, value)
            page, _, pool = key.partition(".")
            file = backend._get_component_key(page, pool or None) + ".bin"
            entry = {"file": file, "page": page, "pool": pool or "kv", "part": None}
            self._note(entry, config, value.numel() * value.element_size(), stored)
            return stored

        backend.set = recording_set

    def _note(self, entry: dict[str, Any], config: Any, nbytes: int, stored: bool) -> None:
        file = entry["file"]
        appeared = {path.name for path in self.directory.iterdir()} - self._seen
        if stored and not appeared and file in self._seen:
            writer = {"tp_rank": config.tp_rank, "pp_rank": config.pp_rank}
            self.ignored.append({"file": file, **writer, "cp_rank": config.attn_cp_rank})
            return
        if not stored or appeared != {file}:
            raise AssertionError(f"set returned {stored} for {file}, on disk: {appeared}")
        size = (self.directory / file).stat().st_size
        if size != nbytes:
            raise AssertionError(f"{file}: {nbytes} bytes handed over, {size} on disk")
        self._seen |= appeared
        self.objects.append({**entry, **_coordinates(entry, config), "nbytes": nbytes})


class _Hf3fsRecorder:
    """Records every object that attached backends confirm at the metadata server."""

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.ignored: list[dict[str, Any]] = []

    def attach(self, backend: Any, config: Any) -> None:
        client = backend.metadata_client
        original: Callable[..., None] = client.confirm_write
        page_bytes = {"kv": backend.bytes_per_page}
        page_bytes |= {
            str(name): pool.bytes_per_page for name, pool in backend._pool_storage_ctx.items()
        }

        def recording_confirm(
            rank: int, written: list[tuple[str, int]], released: list[int], namespace: Any = "kv"
        ) -> None:
            original(rank, written, released, namespace)
            if released:
                raise AssertionError(f"{rank}:{namespace}: writing failed for {released}")
            for name, index in written:
                entry = {"key": f"{rank}:{namespace}:{name}", "page": name[:64], "index": index}
                entry |= _hf3fs_coordinates(name[64:], str(namespace), rank, config)
                self.objects.append({**entry, "nbytes": page_bytes[str(namespace)]})

        client.confirm_write = recording_confirm


def _hf3fs_coordinates(suffix: str, namespace: str, rank: int, config: Any) -> dict[str, Any]:
    """Return the coordinates of a key and its table, with the model that wrote the object."""
    found: dict[str, Any] = dict.fromkeys(
        ("part", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size")
    )
    found |= {"pool": namespace, "tp_rank": rank, "model": config.model_name.replace("/", "-")}
    if suffix in ("-k", "-v"):
        found["part"] = suffix[1]
    elif suffix == f"_mamba_{config.tp_rank}_{config.tp_size}":
        found |= {"tp_rank": config.tp_rank, "tp_size": config.tp_size}
    elif suffix != ("" if namespace == "kv" else f"_{namespace}"):
        raise AssertionError(f"{suffix} in {namespace} is of no known form")
    return found


class _NixlRecorder:
    """Records every file that attached backends write; a file is written again in place."""

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.ignored: list[dict[str, Any]] = []

    def attach(self, backend: Any, config: Any) -> None:
        transfer: Callable[..., bool] = backend._xfer_pre_registered

        def recording_transfer(buffers: Any, paths: list[str], direction: str) -> bool:
            done = transfer(buffers, paths, direction)
            if direction == "WRITE":
                if not done:
                    raise AssertionError(f"writing failed: {paths}")
                for (_, nbytes), path in zip(buffers, map(Path, paths), strict=True):
                    if path.stat().st_size != nbytes:
                        raise AssertionError(f"{path}: {nbytes} bytes handed over")
                    entry = {"key": path.name, "page": path.name[:64], "nbytes": nbytes}
                    entry |= _nixl_coordinates(path.name[64:], backend, config)
                    if entry not in self.objects:
                        self.objects.append(entry)
            return done

        backend._xfer_pre_registered = recording_transfer


def _nixl_coordinates(suffix: str, backend: Any, config: Any) -> dict[str, Any]:
    """Return the coordinates in a key's suffix, found by rebuilding it."""
    found: dict[str, Any] = dict.fromkeys(
        ("part", "tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size")
    )
    found |= {"pool": "kv", "model": config.model_name.replace("/", "-")}
    if suffix.startswith(backend.tp_config_suffix):
        found |= {"tp_rank": config.tp_rank, "tp_size": config.tp_size}
        rest = suffix.removeprefix(backend.tp_config_suffix)
    elif suffix.startswith(backend.config_suffix):
        rest = suffix.removeprefix(backend.config_suffix)
    else:
        raise AssertionError(f"{suffix} is not of {backend.config_suffix}")
    for name in sorted(map(str, backend.registered_pools), key=len, reverse=True):
        if rest == f"_{name}" or rest.startswith(f"_{name}_"):
            found["pool"] = name
            rest = rest.removeprefix(f"_{name}")
            break
    return {**found, "part": rest.removeprefix("_") or None}


class _MooncakeRecorder:
    """Records every object that attached backends put."""

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.ignored: list[dict[str, Any]] = []

    def attach(self, backend: Any, config: Any) -> None:
        names_of_sidecars: Callable[..., Any] = backend._get_hybrid_page_component_keys
        put: Callable[..., list[int]] = backend._put_batch_zero_copy_impl
        pools: dict[str, str] = {}  # by name without prefix

        def recording_names(page_keys: list[str], transfer: Any) -> Any:
            names, parts = names_of_sidecars(page_keys, transfer)
            pools.update(dict.fromkeys(names, transfer.name.value))
            return names, parts

        def recording_put(
            keys: list[str], pointers: Any, sizes: Any, groups: Any = None, **more: Any
        ) -> list[int]:
            codes = put(keys, pointers, sizes, groups, **more)
            if any(codes):
                raise AssertionError(f"puts failed: {dict(zip(keys, codes, strict=True))}")
            for key, size, group in zip(keys, sizes, groups or [None] * len(keys), strict=True):
                name = key.removeprefix(f"{backend.config_prefix}_")
                entry = {"key": key, "page": name[:64], "pool": pools.get(name, "kv")}
                nbytes = size if isinstance(size, int) else sum(size)
                entry |= _mooncake_coordinates(name[64:], entry["pool"], backend, config)
                self.objects.append({**entry, "nbytes": nbytes, "group": group})
            return codes

        backend._get_hybrid_page_component_keys = recording_names
        backend._put_batch_zero_copy_impl = recording_put


def _mooncake_coordinates(suffix: str, pool: str, backend: Any, config: Any) -> dict[str, Any]:
    """Return the coordinates in a key's suffix, found by rebuilding it; sizes: the deployment's."""
    named = re.search("(?:^|_)(k|v|temporal|conv_[0-9]+)$", suffix)
    part = named[1] if named else None
    words = ("" if pool in ("kv", "mamba") else pool, part or "")
    rank = suffix.removeprefix("_").removesuffix("_".join(filter(None, words)))
    found: dict[str, Any] = dict.fromkeys(
        ("tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size", "dcp_rank", "heads")
    )
    mine = [backend.mha_suffix] if isinstance(backend.mha_suffix, str) else backend.mha_suffix
    first = config.tp_rank * len(mine)
    spelled = {f"{text}_": (first + n, first + n + 1) for n, text in enumerate(mine)}
    spelled[f"{backend.mha_suffix}_"] = (first, first + len(mine))
    if rank in spelled:
        found["tp_size"] = config.tp_size
        if config.should_split_heads:
            found["heads"] = "-".join(map(str, spelled[rank]))
        else:
            found["tp_rank"] = config.tp_rank
    elif rank != f"{backend.mla_suffix}_":
        raise AssertionError(f"{suffix} of {pool} is of no known form")
    elif config.dcp_size > 1:
        found |= {"dcp_rank": config.dcp_rank, "cp_rank": config.attn_cp_rank}
    if config.pp_size > 1:
        found |= {"pp_rank": config.pp_rank, "pp_size": config.pp_size}
    model = config.model_name.replace("/", "-")
    tag = (config.extra_config or {}).get("extra_backend_tag")
    dcp = ""
    if config.dcp_size > 1:
        dcp = f"tp{config.tp_size}_dcp{config.dcp_size}_page{config.logical_page_size}_pp1_cp1"
        found |= {"tp_size": config.tp_size, "pp_size": 1, "cp_size": 1}
    if backend.config_prefix != "_".join(filter(None, (tag, model, dcp))):
        raise AssertionError(f"{backend.config_prefix} is not tag {tag} and model {model}")
    return {"part": part, "model": model, "tag": tag, **found}


def _coordinates(entry: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the ranks in a file's name, found by rebuilding the name."""
    model = config.model_name.replace("/", "-")
    pool = "" if entry["pool"] == "kv" else f".{entry['pool']}"
    ranks: dict[str, int | None] = dict.fromkeys(
        ("tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size", "dcp_rank")
    )
    tail = ""
    if config.pp_size > 1:
        ranks |= {"pp_rank": config.pp_rank, "pp_size": config.pp_size}
        tail += f"_{config.pp_size}_{config.pp_rank}"
    if config.attn_cp_size > 1:
        ranks |= {"cp_rank": config.attn_cp_rank, "cp_size": config.attn_cp_size}
        tail += f"_cp{config.attn_cp_rank}_{config.attn_cp_size}"
    stem = f"{entry['page']}{pool}_{model}"
    dcp = {}
    if getattr(config, "dcp_size", 1) > 1:  # 0.5.18 has none
        dcp = {"tp_size": config.tp_size, "dcp_rank": config.dcp_rank}
        tail += f"_tp{config.tp_size}_dcp{config.dcp_rank}_{config.dcp_size}"
        tail += f"_page{config.logical_page_size}"
    if entry["file"] == f"{stem}_{config.tp_rank}_{config.tp_size}{tail}.bin":
        ranks |= {"tp_rank": config.tp_rank, "tp_size": config.tp_size}
    elif entry["file"] != f"{stem}{tail}.bin":
        raise AssertionError(f"{entry['file']} is of no known form")
    return {"model": model, **ranks, **dcp}


def _changed(deployment: Deployment, options: argparse.Namespace) -> Deployment:
    """Return the deployment with the layout and the dtype of the options."""
    profile = dict(deployment.profile)
    if options.layout is not None:
        profile["layout"] = options.layout
    if options.dtype is not None:
        profile["pools"] = [{**pool, "dtype": options.dtype} for pool in profile["pools"]]
    return dataclasses.replace(deployment, profile=profile)


def _check_release(name: str, case: Case) -> None:
    from sglang.version import __version__

    if __version__ != case.sglang:
        raise SystemExit(f"case {name} is for sglang {case.sglang}, this is {__version__}")


def _write_all(options: argparse.Namespace) -> dict[str, Any]:
    from sglang.version import __version__

    manifests = {}
    for case, layout in VARIANTS:
        if CASES[case].sglang == __version__:
            name = store_name(case, layout)
            choices = argparse.Namespace(**{**vars(options), "layout": layout})
            manifests[name] = write_case(case, CASES[case], Path(options.place) / name, choices)
    return manifests


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a store with SGLang itself.")
    parser.add_argument(
        "case", choices=("all", *dict.fromkeys(chain.from_iterable(_CASES.values())))
    )
    add_place(parser)
    parser.add_argument("--manifest", type=Path, help="write it here instead of stdout")
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--layout", choices=LAYOUTS, help="instead of the case's own")
    parser.add_argument("--dtype", help="of all pools, instead of the case's own")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sglang_env.prepare()
    main()
    if _CLIENTS:
        sys.stdout.flush()
        os._exit(0)
