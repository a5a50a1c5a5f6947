"""Pages that SGLang wrote by rank, cut anew, are the objects of its own unified key scheme."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.profile import profile_from_mapping
from hicachectl.formats.transfer import transfer_plan
from hicachectl.kernels.relayout import relayout

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from hicachectl.formats.expectation import ExpectedObject
    from tests.conformance.conftest import SglangSession, WriteStore

pytestmark = pytest.mark.conformance

Pages = list["npt.NDArray[np.uint8]"]


def read(directory: Path, pages: list[str], objects: tuple[ExpectedObject, ...]) -> Pages:
    """[pages, bytes] of each object of a store of files."""
    affixes = [codec_for("file").affix(each.coordinate) for each in objects]
    return [
        np.stack(
            [np.frombuffer((directory / f"{page}{end}").read_bytes(), np.uint8) for page in pages]
        )
        for _, end in affixes
    ]


@pytest.mark.parametrize(
    ("case", "grid"),
    [
        ("gqa_tp2", {}),
        ("gqa_tp2", {"tp": 4, "unified_head_group": 1, "unified_layer_partition": 2}),
        ("gqa_tp2", {"tp": 1, "unified_head_group": 2, "unified_layer_partition": 3}),
        ("pp2", {}),
        ("pp2", {"pp_partition": [2, 3], "unified_head_group": 1, "unified_layer_partition": 2}),
        ("two_models", {"tp": 1}),  # the first is MLA
    ],
)
def test_objects_of_the_unified_scheme_have_the_keys_and_bytes_that_sglang_gives_them(
    case: str,
    grid: dict[str, Any],
    sglang_store: WriteStore,
    sglang_session: SglangSession,
    tmp_path: Path,
) -> None:
    directory, manifest = sglang_store(case)
    source = profile_from_mapping(manifest["profile"])
    wanted = {**manifest["profile"], **grid}
    destination = profile_from_mapping(wanted)
    request = tmp_path / "request.json"
    request.write_text(json.dumps({**manifest, "profile": wanted}))
    expected = sglang_session.run("unified_pages", request)

    plan = transfer_plan(source, "file", destination, "unified")
    objects = read(directory, manifest["pages"], plan.sources)
    made = [np.zeros((len(manifest["pages"]), e.nbytes), np.uint8) for e in plan.destinations]
    for unit in plan.units:
        relayout(unit, [objects[i] for i in unit.sources], [made[i] for i in unit.destinations])
    spell = codec_for("unified").affix
    found = {
        page + spell(each.coordinate)[1]: hashlib.sha256(values[number].tobytes()).hexdigest()
        for each, values in zip(plan.destinations, made, strict=True)
        for number, page in enumerate(manifest["pages"])
    }
    assert found == expected

    back = transfer_plan(destination, "unified", source, "file")
    returned = [np.zeros_like(values) for values in objects]
    for unit in back.units:
        relayout(unit, [made[i] for i in unit.sources], [returned[i] for i in unit.destinations])
    assert all(np.array_equal(one, two) for one, two in zip(returned, objects, strict=True))
