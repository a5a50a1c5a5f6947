"""The plug-in's pools are SGLang's: keys, bytes, writers, and the identities of their profiles."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.formats.identity import profile_identities
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.profile import Profile, profile_from_mapping
from hicachectl.formats.spec import object_specs
from tests.speed import some

if TYPE_CHECKING:
    from tests.conformance.conftest import SglangSession
    from tests.conformance.store_cases import LAYOUTS, PLUGIN_CASES, PLUGIN_REFUSES
else:
    from store_cases import LAYOUTS, PLUGIN_CASES, PLUGIN_REFUSES

pytestmark = pytest.mark.conformance

Row = dict[str, Any]
_HEADED = ("gqa_tp2", "mha_draft", "packed_draft", "pp2", "swa")
_LATENT = ("mla_draft", "deepseek_v4")
# Each case in its own layout and another one, and one case in all layouts.
_LAYOUTS = some(
    [
        *((case, layout) for case in _HEADED for layout in LAYOUTS),
        *((case, layout) for case in _LATENT for layout in LAYOUTS[:3]),
    ],
    *(("gqa_tp2", layout) for layout in LAYOUTS),
    ("mha_draft", "layer_first"),
    ("packed_draft", "page_head"),
    ("pp2", "page_first_direct"),
    ("swa", "layer_first"),
    ("mla_draft", "page_first_direct"),
    ("deepseek_v4", "layer_first"),
)
_SPECULATIVE = {"speculative_algorithm": "EAGLE"}
REQUESTS: list[Row] = [
    *({"case": case} for case in PLUGIN_CASES if case not in PLUGIN_REFUSES),
    *({"case": case, "profile": {"layout": layout}} for case, layout in _LAYOUTS),
    *(
        {"case": case, "profile": {"layout": "page_first_direct"}}
        for case in ("mla_indexer", "mla_fp8_indexer", "hybrid_mamba", "mla_mamba", "cp2")
    ),
    {"case": "gqa_tp2", "pools": {"kv": {"dtype": "float8_e4m3fn"}}},
    {"case": "gqa_tp2", "pools": {"kv": {"dtype": "float8_e5m2"}}},
    {"case": "gqa_tp2", "pools": {"kv": {"dtype": "float16"}}},
    {"case": "mla_draft", "pools": {"kv": {"row": "fp8"}}},
    {"case": "pp2", "profile": _SPECULATIVE, "pools": {"kv": {"packed_draft_layers": 2}}},
    {"case": "mha_draft", "profile": {"draft_weights": ""}},  # as the target's
    {"case": "hybrid_mamba", "profile": {"tp": 4}},
    {"case": "inkling", "pools": {"draft_swa": {"hit_policy": "trailing_pages"}}},
    {
        "case": "mha_draft",
        "pools": {"kv": {"dtype": "float8_e4m3fn"}, "draft": {"dtype": "float8_e5m2"}},
    },
]


@pytest.fixture(scope="module")
def rows(sglang_session: SglangSession) -> list[Row]:
    """Return every pool of every rank of REQUESTS."""
    found: list[Row] = sglang_session.ask("describe_pools", REQUESTS)
    return found


def _name(row: Row) -> str:
    profile = row["profile"]
    return (
        f"{profile['model']} {profile['layout']} {row['pool']} {row['pp']} {row['cp']} {row['tp']}"
    )


def _is_compressed(row: Row) -> bool:
    """Return whether a pool is one of DeepSeek-V4's with bytes."""
    return "DeepSeek-V4" in row["profile"]["model"] and row["pool"] != "kv"


def test_every_pool_of_every_rank_is_served(rows: list[Row]) -> None:
    """All object specs of the profiles appear, so that no rank or pool is left out."""
    served: dict[str, set[str]] = {}
    for row in rows:
        served.setdefault(json.dumps(row["profile"]), set()).add(row["key"][64:])
    for profile, suffixes in served.items():
        specs = object_specs(profile_from_mapping(json.loads(profile)), "file")
        assert suffixes == {spec.affix[1] for spec in specs}


def test_keys_are_hicachefiles(rows: list[Row]) -> None:
    assert {_name(row): row["key"] for row in rows} == {
        _name(row): row["sglang_key"] for row in rows
    }


def test_bytes_are_hicachefiles(rows: list[Row]) -> None:
    """In every layout, the pieces of a page are the bytes of its flat page, in order."""
    assert [_name(row) for row in rows if row["wrong"]] == []


def test_the_same_ranks_write_as_with_hicachefile(rows: list[Row]) -> None:
    assert [_name(row) for row in rows if row["writes"] != row["sglang_writes"]] == []


def test_sizes_and_identities_are_the_profiles(rows: list[Row]) -> None:
    """A profile names the objects that a server writes, fp8 and packed layers included."""
    wrong = []
    for row in rows:
        profile = profile_from_mapping(row["profile"])
        affix = ("", row["key"][64:])
        spec = next(spec for spec in object_specs(profile, "file") if spec.affix == affix)
        identity = profile_identities(profile, "file").get(affix)
        # The plug-in does not see the form of compressed rows.
        if not spec.nbytes or (spec.tensors and not _is_compressed(row)):
            assert identity is not None
            if row["identity"] != identity.hash().hex():
                wrong.append(_name(row))
        if spec.nbytes != row["nbytes"] or spec.trailing != row["trailing"]:
            wrong.append(_name(row))
    assert wrong == []


def test_parts_are_those_of_mooncake(rows: list[Row]) -> None:
    """Parts cover the page; they have the names of Mooncake's keys, or none."""
    for row in rows:
        pool = next(one for one in row["profile"]["pools"] if one["name"] == row["pool"])
        names = [name for name, _ in row["parts"]]
        convolutions = [f"conv_{number}" for number, _ in enumerate(pool.get("conv", ()))]
        expected = {
            "mha": ["k", "v"],
            "mamba": [*(["temporal"] if "temporal" in pool else []), *convolutions],
            "logical": [],
        }.get(pool["kind"], [None])
        assert names == expected, _name(row)
        assert sum(nbytes for _, nbytes in row["parts"]) == row["nbytes"]
        states = pool["kind"] == "mamba"
        assert row["page_indices"] == (1 if states else row["profile"]["page_size"])


def test_identities_tell_dtypes_layouts_and_drafts_apart(rows: list[Row]) -> None:
    """Pages of equal size under one key differ in identity where their bytes differ."""
    first = [row for row in rows if row["key"].endswith("_Qwen-Qwen3-Tiny_0_2.bin")]
    forms = {(row["profile"]["layout"], row["profile"]["pools"][0]["dtype"]) for row in first}
    assert len(forms) == 7
    assert len({row["identity"] for row in first}) == len(forms)


def test_identities_depend_on_what_the_bytes_depend_on(rows: list[Row]) -> None:
    """Other weights, rows, fp8 or stages do; another draft only if the page has its bytes."""
    wrong = []
    for row in rows:
        table = next(pool for pool in row["profile"]["pools"] if pool["name"] == row["pool"])
        last = row["pp"] == row["profile"].get("pp", 1) - 1
        draft = row["pool"].startswith("draft")
        # Compressed pages may pack layers of the draft.
        compressed = _is_compressed(row)
        packs = compressed or (last and "packed_draft_layers" in table)
        fp8 = "float8" in table.get("dtype", "") or table.get("row") == "fp8"
        expected = {
            "weights": True,
            "draft_weights": draft or packs,
            "page_size": True,
            "fp8": fp8 and not draft,
            "draft_fp8": fp8 and draft,
            "row_form": True,
            "opaque_rows": compressed,
            "pp_partition": row["profile"].get("pp", 1) > 1,
        }
        if row["contexts"] != [field for field, changes in expected.items() if changes]:
            wrong.append((_name(row), row["contexts"]))
    assert wrong == []


# Each refusal names the object and the remedy; None: served.
REFUSED = {
    "asymmetric": r"pool kv: K and V differ in width, .*; use --hicache-storage-backend mooncake",
    "dcp": r"dcp_size: 2 is not supported: .*; start with --dcp-size 1",
    "headed_draft_beside_latents": r"pool draft: its TP ranks .* .tp_size 2.; start without",
    "headed_draft_on_one_rank": None,
    "indexer_in_layer_first": (
        r"pool indexer: DSAIndexerPoolHost in layout layer_first: .* \(Unsupported layout: "
        r"layer_first\); start with --hicache-mem-layout page_first or page_first_direct"
    ),
    "mxfp8": r"pool kv: the scales of MXFP8 lie outside its pages; give another --kv-cache-dtype",
    "no_memory": r"pool kv: MLATokenToKVPoolHost: has no memory on this rank .*; attach the store",
    "no_model": r"model_name: missing, .*; give --served-model-name",
    "page_envelope": r"pool kv: one page holds all pools \(page envelope\); start without",
    "pages_elsewhere": r"pool kv: MHATokenToKVPoolHost in .*outside its memory; use a newer",
    "sharded_pages": r"pool kv: its pages are divided over ranks; start without --enable-kv-cache-",
    "split_heads": r"tp_lcm_size: 4 is not supported: objects hold all heads .*; remove the key",
    "states_beside_slots": r"pool mamba: MambaPoolHost in layout page_first: .*slot side states.*;",
    "tp_lcm_size": r"tp_lcm_size: 2 is not supported: .*; remove the key",
    "uneven_pages": r"pool kv: MHATokenToKVPoolHost in layout page_first: its pages are unevenly",
    "unknown_form": r"pool kv: InterleavedPoolHost: the host pool's form is not known; use a newer",
    "unknown_layout": r"pool kv: layout: 'page_first_kv_split' is not one of .*; start with --hica",
    "unknown_pool": r"pool: 'c9000' is not one of kv, .*; use a newer hicachectl",
}


@pytest.fixture(scope="module")
def refusals(sglang_session: SglangSession) -> dict[str, str | None]:
    """Return what the plug-in says to each offer of refuse_pools.py."""
    found: dict[str, str | None] = sglang_session.ask("refuse_pools")
    return found


def test_every_offer_is_judged(refusals: dict[str, str | None]) -> None:
    assert refusals.keys() == REFUSED.keys()


@pytest.mark.parametrize("offer", REFUSED)
def test_refusals_name_the_object_and_the_remedy(
    refusals: dict[str, str | None], offer: str
) -> None:
    message, expected = refusals[offer], REFUSED[offer]
    if expected is None:
        assert message is None
    else:
        assert message is not None
        assert re.match(expected, message)
        assert "\n" not in message


_SCATTERED = r"pool \w+: \w+ in layout layer_first: SGLang cannot store it from its place in memory"
# Bytes of the parts of a page, by pool of describe_other_pools.py.
OTHERS: dict[str, list[list[Any]]] = {
    "compressed states": [[None, 3 * 4 * 6 * 4]],
    "compressed keys": [[None, 3 * 2 * 16 * 2]],
    "only keys": [[None, 3 * 8 * 16 * 2]],
    "packed keys": [[None, 3 * 40]],
    "packed rows": [["k", 2 * 40], ["v", 40]],
}


@pytest.fixture(scope="module")
def other_rows(sglang_session: SglangSession) -> list[Row]:
    """Return the pools of describe_other_pools.py."""
    found: list[Row] = sglang_session.ask("describe_other_pools")
    return found


def test_pools_without_a_profile_are_served_too(other_rows: list[Row]) -> None:
    """DeepSeek-V4, QSA and MiniMax: HiCacheFile's bytes where SGLang knows the places of pages."""
    assert {row["name"] for row in other_rows} == OTHERS.keys()
    served = {row["name"] for row in other_rows if "refusal" not in row}
    assert served == OTHERS.keys()
    for row in other_rows:
        scattered = row["layout"] == "layer_first" and not row["name"].startswith("compressed")
        if scattered:
            assert re.match(_SCATTERED, row["refusal"])
        else:
            assert (row["parts"], row["wrong"]) == (OTHERS[row["name"]], [])


def test_pools_that_may_pack_a_draft_are_named_by_it(other_rows: list[Row]) -> None:
    """They do not show whether they do; other drafts then never share their pages."""
    served = [row for row in other_rows if "refusal" not in row]
    shared = {row["name"] for row in served if row["identity"] == row["drafted"]}
    assert shared == {"only keys"}


# Pools of profiles, by pool of describe_other_pools.py: of 3 layers and pages of 8 tokens.
DESCRIBED = {
    "compressed states": Pool(name="deepseek_v4_c4_state", kind="blocks", layers=3, nbytes=96),
    "compressed keys": Pool(
        name="indexer",
        kind="index_keys",
        dtype="bfloat16",
        layers=3,
        index_head_dim=16,
        compress_ratio=4,
    ),
    "only keys": Pool(
        name="indexer", kind="index_keys", dtype="bfloat16", layers=3, index_head_dim=16
    ),
}


def test_bytes_lie_as_their_kind_says(other_rows: list[Row]) -> None:
    """In every layout, the bytes of a page are those of its layers in the order of the kind."""
    for row in other_rows:
        if row["name"] not in DESCRIBED:
            continue
        (plain,) = kind_of(pool := DESCRIBED[row["name"]]).tensors(pool, 3, 8, 1)
        by_layer = np.frombuffer(bytes.fromhex(row["by_layer"]), f"u{plain.itemsize}")
        stored = plain.in_layout(row["layout"])
        order = [plain.axes.index(axis) for axis in stored.axes]
        expected = by_layer.reshape(plain.shape).transpose(order)
        assert expected.tobytes().hex() == row["page"], (row["name"], row["layout"])


def test_identities_of_index_keys_are_the_profiles(other_rows: list[Row]) -> None:
    """Rows of which the plug-in names the server's settings have none in a profile."""
    kv = Pool(name="kv", kind="mha", dtype="bfloat16", layers=3, kv_heads=1, head_dim=16)
    for name, pool in DESCRIBED.items():
        served = {row["layout"]: row.get("identity") for row in other_rows if row["name"] == name}
        profile = Profile(
            model="tests/Tiny", page_size=8, layout="page_first", weights="w", pools=(kv, pool)
        )
        found = profile_identities(profile, "file")
        ours = {x.hash().hex() for x in found.values() if x.pool == pool.name}
        assert ours == ({served["page_first"]} if name == "only keys" else set())
