"""`hicachectl explain`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl import doctor
from hicachectl.checks.reasons import reasons
from hicachectl.checks.registry import codes
from hicachectl.cli.commands.explain import doctor_checks
from hicachectl.doctor.checks import GROUPS
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


def test_json_has_a_row_for_each_code_and_each_reason(invoke: Invoke) -> None:
    document = invoke("explain", "--format", "json").document
    assert [row["code"] for row in document["codes"]] == [code.name for code in codes()]
    assert [row["reason"] for row in document["reasons"]] == [one.name for one in reasons()]
    assert [tuple(row.values()) for row in document["checks"]] == list(doctor_checks())
    alone = invoke("explain", "stale-temporary", "--format", "json").document
    (one,) = alone["codes"]
    assert one["command"] == "hicachectl rm STORE --temporaries"
    assert one in document["codes"]
    assert not alone["reasons"]


def test_rows_are_those_of_codes_reasons_and_checks(invoke: Invoke) -> None:
    rows = invoke("explain", "--format", "jsonl").stdout.splitlines()
    assert len(rows) == len(codes()) + len(reasons()) + len(list(doctor_checks()))


def test_without_a_name_every_code_has_a_line_the_worst_first_then_the_others(
    invoke: Invoke,
) -> None:
    tables = invoke("explain").stdout.split("\n\n")
    findings, others, checks = ([line.split()[:2] for line in t.splitlines()[1:]] for t in tables)
    assert sorted(name for _, name in findings) == sorted(code.name for code in codes())
    severities = [severity for severity, _ in findings]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    assert others == [[reason.source, reason.name] for reason in reasons()]
    assert checks == [[check.group, check.name] for check in doctor_checks()]


def test_every_check_that_doctor_shows_is_explained(invoke: Invoke) -> None:
    """The names are those in the source of doctor; reasons and those of keys have own texts."""
    source = Path(doctor.__file__).parent
    text = "".join(path.read_text() for path in sorted(source.glob("*.py")))
    names = set(re.findall(r'\b_?[cC]heck(?:_of)?\(\s*"([a-z-]+)"', text))
    explained = {check.name for check in doctor_checks()}
    assert len(names) > 25
    assert names <= explained, names - explained
    assert {check.group for check in doctor_checks()} == set(GROUPS)


@pytest.mark.parametrize(("name", "group"), [("missing-page", "requests"), ("tp", "server")])
def test_a_check_of_doctor_is_explained_as_in_its_man_page(
    invoke: Invoke, name: str, group: str
) -> None:
    text = invoke("explain", name).stdout
    assert text.startswith(f"{name}: a check of hicachectl doctor, in its group {group}\n")
    assert "NO HITS in hicachectl-runbooks(7)" in text
    (check,) = (one for one in doctor_checks() if one.name == name)
    assert check.meaning in " ".join(text.split())


def test_checks_of_one_name_are_explained_together(invoke: Invoke) -> None:
    text = invoke("explain", "reachable").stdout
    assert "in its group server" in text
    assert "in its group store" in text


@pytest.mark.parametrize("name", ["below_threshold", "below-threshold", "Below_Threshold"])
def test_a_reason_is_explained_with_its_counter_and_the_next_command(
    invoke: Invoke, name: str
) -> None:
    text = invoke("explain", name).stdout
    assert text.startswith("below_threshold: counted by SGLang\n")
    for title in ("Meaning:", "Effect:", "Remedy:", "Counters: sglang:storage_prefetch_unful"):
        assert f"\n{title}" in text
    assert text.endswith("\n  hicachectl hits STORE --profile FILE --trace FILE\n")
    assert max(map(len, text.splitlines())) <= 100


def test_a_name_of_a_code_and_of_a_reason_is_explained_as_both(invoke: Invoke) -> None:
    first, second = invoke("explain", "unreadable").stdout.split("\nunreadable: ")
    assert first.startswith("unreadable: error\n")
    assert second.startswith("counted by the plug-in\n")
    document = invoke("explain", "unreadable", "--format", "json").document
    assert [len(document[name]) for name in ("codes", "reasons")] == [1, 1]


def test_an_unknown_name_is_refused_with_the_closest_one(invoke: Invoke) -> None:
    refused = invoke("explain", "missing-pol", exit_code=2).stderr
    assert (
        "'missing-pol' is no finding code, reason or check; did you mean missing-pool?" in refused
    )
    assert "did you mean host_pressure?" in invoke("explain", "host-presure", exit_code=2).stderr
    nothing = invoke("explain", "xyzzy", exit_code=2).stderr
    assert "did you mean" not in nothing
    assert nothing.endswith("; for all names, run hicachectl explain\n")


def test_a_code_from_outside_has_an_explanation_too(invoke: Invoke) -> None:
    with registered():
        text = invoke("explain", "repeated-byte").stdout
    assert text.startswith("repeated-byte: warning\n")
    assert "--repair-code repeated-byte" in text
