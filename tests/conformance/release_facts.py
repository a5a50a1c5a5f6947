"""Tell what the code of an SGLang release does with keys and layouts.

    release_facts.py WHEEL…

A WHEEL is a file, or a folder with the package `sglang`. Runs without SGLang: the classes that make
keys run with stand-ins for all that they import and call. Prints a JSON object of facts by release.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import inspect
import json
import os
import re
import sys
import threading
import uuid
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

PAGE = "H"
_MEM_CACHE = "sglang/srt/mem_cache"
_FILE_STORE = f"{_MEM_CACHE}/hicache_storage.py"
_MOONCAKE_STORE = f"{_MEM_CACHE}/storage/mooncake_store/mooncake_store.py"
_DRAFTS = "sglang/srt/speculative/base_spec_worker.py"
_INDEXER = f"{_MEM_CACHE}/pool_host/dsa.py"
# Where each release states the defaults of its flags.
_FLAGS = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/memory.py")
_RANKS: dict[str, dict[str, Any]] = {
    "mha": {},
    "mha pp": {"pp_rank": 1, "pp_size": 2},
    "mha cp": {"attn_cp_rank": 1, "attn_cp_size": 2},
    "mla": {"is_mla_model": True},
    "mla pp": {"is_mla_model": True, "pp_rank": 1, "pp_size": 2},
}  # fmt: skip


def main() -> None:
    """Print the facts of the wheels that the command line names."""
    print(json.dumps({version(Path(path)): facts(Path(path)) for path in sys.argv[1:]}))


def version(wheel: Path) -> str:
    """Return the release of a wheel or of an installed package."""
    found = re.match(r"sglang-([^-]+?)(?:\.dist-info)?(?:-|$)", wheel.name)
    if found:
        return found[1]
    (info,) = wheel.glob("sglang-*.dist-info")
    return version(info)


def facts(wheel: Path) -> dict[str, Any]:
    """Return the default layout, the keys of both stores for each of _RANKS, and other facts.

    compact_indexer: the host pool of index keys has only the layers that own such keys.
    seeds: extra_key and cache_salt seed the page hashes.
    packed_drafts: layers of an MTP draft follow the target's in one object.
    draft_pool: drafts have a pool of their own.
    indexer_pool: index keys have a pool of their own.
    temporary: the file that HiCacheFile.set writes first; "" if it writes under the key.
    """
    return {
        "seeds": "def storage_namespace_seed(" in _source(wheel, f"{_MEM_CACHE}/utils.py"),
        "packed_drafts": "HiCacheDraftMode.PACKED" in _source(wheel, _DRAFTS),
        "draft_pool": 'DRAFT = "draft"' in _source(wheel, _FILE_STORE),
        "indexer_pool": '    INDEXER = "indexer"' in _source(wheel, _FILE_STORE),
        "temporary": _temporary(wheel),
        "compact_indexer": "owned_device_layers" in _source(wheel, _INDEXER),
        "layout": _default(wheel, "hicache_mem_layout"),
        "file": {name: _file_keys(wheel, ranks) for name, ranks in _RANKS.items()},
        "mooncake": {name: _mooncake_keys(wheel, ranks) for name, ranks in _RANKS.items()},
    }


def _source(wheel: Path, name: str) -> str:
    if wheel.is_dir():
        return (wheel / name).read_text() if (wheel / name).exists() else ""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name).decode() if name in archive.namelist() else ""


def _default(wheel: Path, flag: str) -> Any:
    for name in _FLAGS:
        for node in ast.walk(ast.parse(_source(wheel, name))):
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == flag:
                assert isinstance(node.value, ast.Constant)
                return node.value.value
    raise ValueError(f"{wheel}: no default of {flag}")


class _Names(dict[str, Any]):
    """The names of a module, of which those that are not defined are stand-ins."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name) if hasattr(builtins, name) else mock.MagicMock(name=name)


def _class(wheel: Path, file: str, name: str) -> Any:
    """Return a class of a file. Its annotations, decorators and bases are left out."""
    tree = ast.parse(_source(wheel, file))
    nodes = {x.name: x for x in tree.body if isinstance(x, ast.ClassDef)}
    chosen = [nodes[x] for x in (name, *_bases(nodes, name))]
    for node in chosen:
        node.bases = [x for x in node.bases if getattr(x, "id", "") in _bases(nodes, name)]
        node.decorator_list = []
    module = ast.fix_missing_locations(ast.Module(list(reversed(chosen)), []))
    config = mock.MagicMock(standalone_storage=False)
    loaders = ("from_file", "load_from_env", "load_from_extra_config")
    configs = mock.MagicMock(**{f"{loader}.return_value": config for loader in loaders})
    pool_names = SimpleNamespace(**{x: SimpleNamespace(value=x.lower()) for x in ("MAMBA", "KV")})
    names = _Names(
        __name__="release",
        isinstance=_isinstance,
        MooncakeStoreConfig=configs,
        PoolName=pool_names,
    )
    exec(compile(module, file, "exec", __future__.annotations.compiler_flag), names)
    return names[name]


def _isinstance(value: Any, kind: Any) -> bool:
    return not isinstance(kind, mock.Mock) and isinstance(value, kind)


def _bases(nodes: dict[str, ast.ClassDef], name: str) -> list[str]:
    own = [x.id for x in nodes[name].bases if isinstance(x, ast.Name) and x.id in nodes]
    return [x for x in own if x != "HiCacheStorage"]


def _config(ranks: dict[str, Any]) -> SimpleNamespace:
    usual = {
        "tp_rank": 1, "tp_size": 4, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "model_name": "org/m", "dp_rank": 0,
        "dcp_rank": 0, "dcp_size": 1, "logical_page_size": None, "tp_lcm_size": None,
        "should_split_heads": False, "is_page_first_layout": True, "is_storage_writer": True,
        "enable_storage_metrics": False,
        "extra_config": {"master_server_address": "a:1"},
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **ranks})


def _file_keys(wheel: Path, ranks: dict[str, Any]) -> list[str]:
    """Return the names of a page's kv and Mamba states, as the release suffixes them."""
    store = _class(wheel, _FILE_STORE, "HiCacheFile")
    made = store.__new__(store)
    with contextlib.suppress(Exception):  # what follows the suffixes needs SGLang
        store.__init__(made, _config(ranks), "/")
    return [made._get_suffixed_key(key) for key in (PAGE, f"{PAGE}.mamba")]


def _temporary(wheel: Path) -> str:
    """Return the name of the temporary file of page H, with its numbers and UUID as N and U."""
    store = _class(wheel, _FILE_STORE, "HiCacheFile")
    names = store.set.__globals__
    names.update(os=os, threading=threading, uuid=uuid)
    store.__getattr__ = lambda _self, name: mock.MagicMock(name=name)
    made = store.__new__(store)
    made.__dict__.update(file_path="/", config_suffix="_m", metadata_cache=None)
    made._get_suffixed_key = lambda key, *_: f"{key}_m"
    written: list[str] = []
    page = mock.MagicMock()
    page.contiguous().view().numpy().tofile.side_effect = written.append
    with mock.patch("os.path.exists", return_value=False), mock.patch("os.replace"):
        made.set(PAGE, page)
    name = re.sub("[0-9a-f]{32}", "U", Path(written[0]).name)
    name = re.sub("[0-9]+", "N", name)
    return "" if name == f"{PAGE}_m.bin" else name


def _mooncake_keys(wheel: Path, ranks: dict[str, Any]) -> list[str]:
    """Return the keys of a page's kv."""
    store = _class(wheel, _MOONCAKE_STORE, "MooncakeStore")
    made = store.__new__(store)
    client = mock.MagicMock()
    client.MooncakeDistributedStore.return_value.setup.return_value = 0
    absent = {"mooncake": mock.MagicMock(store=client), "mooncake.store": client}
    store._import_mooncake_store = lambda _self: client.MooncakeDistributedStore
    store.check_server = mock.Mock()
    store.warmup = mock.Mock()
    with mock.patch.dict(sys.modules, absent):
        pools = [mock.MagicMock()] * ("mem_pool" in inspect.signature(store.__init__).parameters)
        store.__init__(made, _config(ranks), *pools)
    made.mem_pool_host = mock.MagicMock(page_size=64)
    objects = [0] * (1 if "is_mla_model" in ranks else 2)
    made.mem_pool_host.get_page_buffer_meta.return_value = (objects, objects)
    found = made._batch_preprocess([PAGE], range(64))[0]
    tag = getattr(made, "_tag_keys", list)
    return list(tag(found))


if __name__ == "__main__":
    main()
