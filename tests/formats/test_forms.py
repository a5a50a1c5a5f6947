"""The converter of documents accepts valid fields and names wrong ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from hicachectl.formats.errors import FormatError, ProfileError
from hicachectl.formats.forms import convert


class Inner(Struct):
    count: Annotated[int, Meta(ge=0, le=9)]
    names: dict[str, str | None] = {}


class Outer(Struct, forbid_unknown_fields=True, rename={"kind": "type"}):
    kind: Literal["a", "b"]
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    share: float = 0.0


def problems(document: Any, form: type[Struct] = Outer) -> list[str]:
    with pytest.raises(ProfileError) as caught:
        convert(document, form, "FILE", refusal=ProfileError)
    source, told = str(caught.value).split(": ", 1)
    assert source == "FILE"
    return told.split("; ")


def test_a_document_becomes_its_struct() -> None:
    document = {"type": "b", "inner": {"count": 1, "other": 2}, "many": [{"count": 9}], "share": 1}
    assert convert(document, Outer, "FILE") == Outer("b", Inner(1), (Inner(9),), 1.0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"inner": {"count": -1}}, "inner.count: expected int >= 0, found -1"),
        ({"inner": {"count": 10**30}}, f"inner.count: expected int <= 9, found {10**30}"),
        ({"inner": {"count": True}}, "inner.count: expected int, found True"),
        ({"inner": {"count": 1.0}}, "inner.count: expected int, found 1.0"),
        ({"inner": {"count": 1, "names": {"x": 2}}}, "inner.names: expected str, found {'x': 2}"),
        ({"inner": []}, "inner: expected table, found []"),
        ({"inner": {}}, "inner: field 'count' is missing"),
        ({"many": {}}, "many: expected list, found {}"),
        ({"many": [{"count": 1}, 5]}, "many[1]: expected table, found 5"),
        ({"many": [{"count": "1"}]}, "many[0].count: expected int, found '1'"),
        ({"type": "c"}, "type: invalid enum value 'c', found 'c'"),
        ({"share": "x" * 99}, f"share: expected float, found '{'x' * 56}..."),
        ({"share": 10**4400}, "share: number out of range, found a huge value"),
    ],
)
def test_a_field_is_named_with_what_was_expected_and_found(
    changes: dict[str, Any], problem: str
) -> None:
    assert problems({"type": "a", **changes}) == [problem]


def test_every_problem_is_named_at_once() -> None:
    document = {"kind": "a", "inner": {"count": "1"}, "many": [{}, {"count": 10}]}
    assert problems(document) == [
        "unknown field 'kind'",
        "known fields: type, inner, many, share",
        "field 'type' is missing",
        "inner.count: expected int, found '1'",
        "many[0]: field 'count' is missing",
        "many[1].count: expected int <= 9, found 10",
    ]


def test_the_known_fields_are_listed_once_for_all_unknown_ones() -> None:
    assert problems({"type": "a", "x": 1, "y": 2}) == [
        "unknown field 'x'",
        "unknown field 'y'",
        "known fields: type, inner, many, share",
    ]


def test_many_problems_are_cut_short() -> None:
    assert len(problems({"type": "a", "many": [None] * 10_000})) == 20


@pytest.mark.parametrize("document", [None, 5, [], "x"])
def test_what_is_no_table_is_refused(document: Any) -> None:
    (problem,) = problems(document)
    assert problem.startswith("expected table, found ")


@pytest.mark.parametrize("document", [{"\ud800": 1, "type": "a"}, {"type": "\ud800"}])
def test_half_a_character_is_refused(document: dict[str, Any]) -> None:
    assert "\\ud800" in problems(document)[0]
    with pytest.raises(FormatError, match="ud800"):
        convert({"count": 1, "\ud800": 2}, Inner, "FILE")


def test_half_a_character_where_a_number_belongs_is_told_as_what_it_is() -> None:
    (problem,) = problems({"type": "a", "inner": {"count": "\ud800"}})
    assert problem == r"inner.count: expected int, found '\ud800'"
    (problem,) = problems({"type": "a", "many": "\ud800"})
    assert problem == r"many: expected list, found '\ud800'"


def test_nothing_else_than_the_refusal_is_raised() -> None:
    deep: Any = 1
    for _ in range(60):
        deep = {"inner": deep}
    values = [None, True, -1, 2**70, float("nan"), float("inf"), "", b"", {}, [], deep]
    for value in values:
        for name in msgspec.structs.asdict(Outer("a")):
            with pytest.raises(ProfileError):
                convert({name: value}, Outer, "FILE", refusal=ProfileError)


FIRST_USES = """
import sys, threading, msgspec
from hicachectl.formats.forms import convert

sys.setswitchinterval(1e-6)
document = {"one": {f"n{i}": 1 for i in range(30)}}
for _ in range(100):
    inner = msgspec.defstruct("Inner", [(name, int) for name in document["one"]])
    form = msgspec.defstruct("Form", [("one", inner)])
    together = threading.Barrier(4)

    def use():
        together.wait()
        convert(document, form, "FILE")

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.slow
def test_threads_may_use_a_class_for_the_first_time_together() -> None:
    """msgspec alone ends the process with SIGSEGV."""
    subprocess.run([sys.executable, "-c", FIRST_USES], check=True)
