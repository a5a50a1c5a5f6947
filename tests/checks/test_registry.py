"""The registry: checks from outside work like built-in ones, and names are unique."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicachectl.checks.codes import Code
from hicachectl.checks.findings import object_findings
from hicachectl.checks.registry import (
    GROUPS,
    VALUES,
    Check,
    CheckInput,
    ValueCheck,
    ValueIssue,
    checks,
    codes,
    group_names,
    register,
    resolved,
    unregister,
)
from tests.checks.repeats import REPEATS, registered
from tests.move.repairs import dsa_store, kv
from tests.report.page_texts import text_of
from tests.stores import DSA, OLD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

    from tests.conftest import Invoke

OWN_GROUPS = ("names", "groups", "sizes", "values", "digests")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three pages; every byte of the second kv is the same, and the values are finite."""
    directory = dsa_store(tmp_path / "store", 3)
    path = directory / kv(1)
    path.write_bytes(b"\x11" * path.stat().st_size)
    os.utime(path, (OLD, OLD))  # repairs watch a store with recent writes for a second
    (tmp_path / "dsa.toml").write_text(DSA)
    return directory


@pytest.fixture
def repeats() -> Iterator[ValueCheck]:
    with registered() as check:
        yield check


def verified(invoke: Invoke, store: Path, *arguments: object, exit_code: int = 4) -> dict[str, Any]:
    options = ("--profile", store.parent / "dsa.toml", "--grace", "0s", "--format", "json")
    return invoke("verify", store, *options, *arguments, exit_code=exit_code).document


def repeated(document: dict[str, Any]) -> list[tuple[str, str]]:
    found = [f for f in document["findings"] if f["code"] == "repeated-byte"]
    return [(finding["key"], finding["severity"]) for finding in found]


@pytest.mark.usefixtures("repeats")
def test_a_check_from_outside_is_chosen_like_any_other(invoke: Invoke, store: Path) -> None:
    document = verified(invoke, store, "--checks", "repeats")
    assert document["checks"] == ["repeats"]
    assert document["counts"] == {"repeated-byte": 1}
    assert repeated(document) == [(kv(1), "warning")]
    verified(invoke, store, "--checks", "repeats", "--fail-on", "error", exit_code=0)


@pytest.mark.usefixtures("repeats")
def test_a_check_from_outside_is_of_the_default_set(invoke: Invoke, store: Path) -> None:
    document = verified(invoke, store)
    assert document["checks"] == [*OWN_GROUPS[:-1], "repeats"]
    assert repeated(document) == [(kv(1), "warning")]


@pytest.mark.usefixtures("repeats")
def test_a_check_from_outside_needs_what_it_says(invoke: Invoke, store: Path) -> None:
    refused = invoke("verify", store, "--checks", "repeats", exit_code=2).stderr
    assert "--checks repeats: no given profile describes the bytes of objects" in refused
    document = invoke("verify", store, "--format", "json").document
    assert {"values", "repeats", "digests"} <= set(document["skipped_checks"])
    nothing = verified(invoke, store, "--checks", "repeats", "--page", "f" * 64, exit_code=0)
    assert nothing["checks"] == []


@pytest.mark.usefixtures("repeats")
def test_repair_acts_on_a_code_from_outside_when_asked(invoke: Invoke, store: Path) -> None:
    repair = ("--checks", "repeats", "--repair", "delete", "--yes")
    assert verified(invoke, store, *repair)["repaired"] == 0
    assert verified(invoke, store, *repair, "--repair-code", "repeated-byte")["repaired"] == 1
    assert not (store / kv(1)).exists()


@pytest.mark.usefixtures("repeats")
def test_a_page_is_shown_with_what_a_check_from_outside_finds(invoke: Invoke, store: Path) -> None:
    profile = ("--profile", store.parent / "dsa.toml")
    shown = invoke("show", store, kv(1)[:64], *profile, "--format", "json").document
    assert repeated(shown) == [(kv(1), "warning")]


def test_a_check_from_outside_may_join_a_group(invoke: Invoke, store: Path) -> None:
    with registered(group=VALUES):
        assert group_names() == OWN_GROUPS
        assert repeated(verified(invoke, store, "--checks", "values")) == [(kv(1), "warning")]


def judge_second_page(given: CheckInput) -> Iterator[pa.Table]:
    """Find an error in each object of the second page."""
    keys = given.inventory.objects.column("key").to_pylist()
    rows = [row for row, key in enumerate(keys) if key.decode().startswith(kv(1)[:64])]
    yield object_findings(given.inventory, np.array(rows, np.int64), "cursed", "by another package")


@pytest.mark.slow
def test_all_commands_see_the_errors_of_a_check_from_outside(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    profile = ("--profile", tmp_path / "dsa.toml")
    register(
        Check(
            name="curses",
            group=GROUPS,
            codes=(Code("cursed", "error"),),
            function=judge_second_page,
        )
    )
    try:
        shown = invoke("show", store, kv(1)[:64], *profile, "--format", "json").document
        (tmp_path / "target").mkdir()
        said = invoke("migrate", store, tmp_path / "target", *profile).stderr
        made = tmp_path / "page.html"
        invoke("report", store, *profile, "-o", made, exit_code=4)
        assert verified(invoke, store, "--checks", "groups")["counts"] == {"cursed": 2}
        repaired = verified(invoke, store, "--checks", "groups", "--repair", "delete", "--yes")
    finally:
        unregister("curses")
    assert [finding["code"] for finding in shown["findings"]].count("cursed") == 2
    assert "Not copied: 1 page with errors" in said
    assert len([*(tmp_path / "target").glob("*.bin")]) == 4
    assert "cursed" in text_of(made)
    assert repaired["repaired"] == 1


def test_help_and_refusals_name_what_is_registered(invoke: Invoke, store: Path) -> None:
    assert group_names() == OWN_GROUPS
    with registered():
        assert group_names() == (*OWN_GROUPS, "repeats")
        text = invoke("verify", "--help-all").stdout
        assert ",digests,repeats" in text
        assert f"  repeats  {REPEATS.summary}" in text
    assert "repeats" not in invoke("verify", "--help-all").stdout
    refused = invoke("verify", store, "--checks", "repeats", exit_code=2).stderr
    assert "'repeats' is not one of names, groups, sizes, values, digests" in refused
    assert "repeated-byte" not in {code.name for code in codes()}


def test_a_code_that_its_check_does_not_declare_is_an_error_of_ours(
    invoke: Invoke, store: Path
) -> None:
    def prepare(spec: object, profile: object) -> Any:
        return lambda objects: [ValueIssue(0, "nan", "a code of another check")]

    with (
        registered(prepare=prepare),
        pytest.raises(ValueError, match="repeats: the check does not declare code nan"),
    ):
        verified(invoke, store, "--checks", "repeats")


def test_names_and_codes_are_declared_once() -> None:
    with registered() as check:
        with pytest.raises(ValueError, match="repeats: a check of this name already exists"):
            register(check)
        other = Check(name="other", group=None, codes=(Code("repeated-byte", "error"),))
        with pytest.raises(
            ValueError, match="repeated-byte: another check declares this code differently"
        ):
            register(other)
    wrong = Check(name="other", group=None, codes=(Code("other-code", "fatal"),))
    with pytest.raises(ValueError, match="other-code: severities must be one of"):
        register(wrong)


def test_a_code_stays_as_long_as_a_check_has_it() -> None:
    shared = Code("shared-code", "info")
    for name in ("one", "two"):
        register(Check(name=name, group=None, codes=(shared,)))
    unregister("one")
    assert shared in codes()
    unregister("two")
    assert shared not in codes()


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.name)
def test_every_function_is_where_it_is_said_to_be(check: Check) -> None:
    places: list[Any] = [check.function]
    if isinstance(check, ValueCheck):
        places = [check.prepare]
        assert check.kernel is not None or check.name == "dtype"  # which looks at few numbers
    for place in places:
        assert place is None or callable(resolved(place))
