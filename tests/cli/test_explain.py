"""`hicachectl explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.checks.registry import codes
from tests.checks.repeats import registered

if TYPE_CHECKING:
    from tests.conftest import Invoke


def test_a_code_is_explained_with_the_command_that_mends_it(invoke: Invoke) -> None:
    text = invoke("explain", "missing-pool").stdout
    assert text.startswith(
        "missing-pool: error; warning for drafts and trailing pools (Mamba states, sliding windows)"
    )
    for title in ("Meaning:", "Effect:", "Remedy:", "Cost:"):
        assert f"\n{title}" in text
    assert text.endswith("\n  hicachectl verify STORE --profile FILE --repair quarantine\n")
    assert max(map(len, text.splitlines())) <= 100


def test_a_warning_is_repaired_by_its_code(invoke: Invoke) -> None:
    assert "--repair quarantine --repair-code all-zero\n" in invoke("explain", "all-zero").stdout


def test_json_has_a_row_for_each_code(invoke: Invoke) -> None:
    rows = invoke("explain", "--format", "json").document["codes"]
    assert [row["code"] for row in rows] == [code.name for code in codes()]
    (one,) = invoke("explain", "stale-temporary", "--format", "json").document["codes"]
    assert one["command"] == "hicachectl rm STORE --temporaries"
    assert one in rows


def test_without_a_code_every_code_has_a_line_the_worst_first(invoke: Invoke) -> None:
    lines = invoke("explain").stdout.splitlines()[1:]
    assert sorted(line.split()[1] for line in lines) == sorted(code.name for code in codes())
    severities = [line.split()[0] for line in lines]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)


def test_an_unknown_code_is_refused_with_the_closest_one_and_the_list(invoke: Invoke) -> None:
    refused = invoke("explain", "missing-pol", exit_code=2).stderr
    assert "'missing-pol' is no finding code; did you mean missing-pool?" in refused
    assert all(code.name in refused for code in codes())
    assert "did you mean" not in invoke("explain", "xyzzy", exit_code=2).stderr


def test_a_code_from_outside_has_an_explanation_too(invoke: Invoke) -> None:
    with registered():
        text = invoke("explain", "repeated-byte").stdout
    assert text.startswith("repeated-byte: warning\n")
    assert "--repair-code repeated-byte" in text
