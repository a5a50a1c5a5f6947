"""Finding codes: declared by checks, accepted by `--repair-code`."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from hicachectl.checks.codes import SEVERITIES as SEVERITY_NAMES
from hicachectl.checks.findings import SCHEMA, combine, findings, packed
from hicachectl.checks.registry import codes, page_codes, remedies
from tests.move.migrations import profile_file
from tests.move.repairs import dsa_store, kv, lacking_store
from tests.stores import DSA, contents, put

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.checks.codes import Code
    from tests.conftest import Invoke

ONE_KEY = pa.array(["some key"])
PAGE_CODES = page_codes()
STORE_CODES = remedies()
# The design's table of codes, and the rules that change severities.
SEVERITIES = {
    "error": {
        "missing-pool", "missing-part", "truncated", "oversized", "unreadable", "nan", "inf",
        "bad-scale", "digest-mismatch", "dtype-mismatch", "layout-mismatch", "stamp-mismatch",
        "identity-mismatch",
        "unwritten-page", "page-index-shared", "page-index-out-of-range", "page-index-free",
        "colliding-keys", "values-changed",
    },
    "warning": {
        "missing-rank", "orphan-sidecar", "all-zero", "replica-mismatch", "page-leaked",
        "page-count-mismatch", "no-replica", "stale-temporary", "snapshot-stale", "ambiguous-key",
        "mixed-sizes", "misplaced-object", "lost-objects",
    },
    "info": {"foreign-object", "re-recorded", "disk-only", "other-deployment"},
}  # fmt: skip
CHANGED = {
    ("missing-pool", "costs-hits-only"): "warning",  # a draft, or part of a trailing pool
    ("missing-part", "costs-hits-only"): "warning",
    ("missing-rank", "costs-hits-only"): "warning",
    ("orphan-sidecar", "pools-apart"): "info",  # the store evicts each pool separately
    ("oversized", "refused-whole"): "warning",  # on Mooncake: a miss
    ("digest-mismatch", "versions-recur"): "warning",  # the identity is not known
}


def test_a_check_that_emits_an_undeclared_code_fails() -> None:
    with pytest.raises(ValueError, match="no-such-code"):
        findings("no-such-code", keys=ONE_KEY, detail="")
    with pytest.raises(ValueError, match="no-such-code"):
        findings("no-such-code", keys=ONE_KEY[:0], detail="")


def test_a_severity_changes_by_declared_rules_only() -> None:
    with pytest.raises(ValueError, match="pools-apart: not a rule of truncated"):
        findings("truncated", keys=ONE_KEY, detail="", rule="pools-apart")
    with pytest.raises(ValueError, match="pools-apart: not a rule of truncated"):
        findings("truncated", keys=ONE_KEY[:0], detail="", rule="pools-apart")


def test_findings_of_many_tables_are_sorted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves the order: severity, code, page, key, nulls last, then that of the tables."""
    monkeypatch.setattr("hicachectl.checks.findings._ROWS_AT_ONCE", 7)
    chance = random.Random(7)
    tables = [
        pa.Table.from_pylist(
            [
                {
                    "code": chance.choice(("nan", "inf", "truncated")),
                    "severity": chance.choice(SEVERITY_NAMES),
                    "page": chance.choice((None, "aa", "bb")),
                    "pool": chance.choice((None, "kv")),
                    "key": chance.choice((None, "x", "y", "z")),
                    "detail": f"{number} {row}",
                }
                for row in range(chance.randint(0, 40))
            ],
            schema=SCHEMA,
        )
        for number in range(5)
    ]

    def place(row: dict[str, str | None]) -> tuple[object, ...]:
        texts = ((row[name] is None, row[name] or "") for name in ("code", "page", "key"))
        return (-SEVERITY_NAMES.index(row["severity"] or ""), *texts)

    wanted = sorted((row for table in tables for row in table.to_pylist()), key=place)
    assert combine(tables).to_pylist() == wanted
    assert combine(map(packed, tables)).to_pylist() == wanted
    assert combine([]).schema == combine(tables).schema == SCHEMA


def test_codes_and_severities_are_those_of_the_design() -> None:
    assert {(code.name, code.severity) for code in codes()} == {
        (name, severity) for severity, names in SEVERITIES.items() for name in names
    }
    assert {
        (code.name, rule): severity for code in codes() for rule, severity in code.rules.items()
    } == CHANGED


def test_an_exception_has_another_severity_than_its_code() -> None:
    for code in codes():
        said = {text.split()[0] for text in filter(None, code.exceptions.split("; "))}
        assert code.severity not in said, code.name


@pytest.mark.parametrize(
    ("code", "rule", "severity"),
    [
        ("truncated", None, "error"),
        ("missing-pool", None, "error"),
        ("missing-pool", "costs-hits-only", "warning"),
        ("orphan-sidecar", "pools-apart", "info"),
    ],
)
def test_findings_have_the_severity_of_their_code_and_rule(
    code: str, rule: str | None, severity: str
) -> None:
    found = findings(code, keys=pa.array(list("ab")), detail="", rule=rule)
    assert found.column("severity").to_pylist() == [severity] * 2


@pytest.mark.parametrize("code", [*PAGE_CODES, *STORE_CODES])
def test_every_declared_code_makes_a_finding(code: str) -> None:
    assert findings(code, keys=ONE_KEY, detail="").column("code").to_pylist() == [code]


@pytest.mark.parametrize("code", codes(), ids=lambda code: code.name)
def test_every_code_is_explained(code: Code) -> None:
    texts = code.explanation()
    for title in ("meaning", "effect", "remedy", "cost"):
        assert texts[title].endswith("."), title
        assert "{" not in texts[title], title
    assert texts["command"] or code.remedy, "a repair has a command"


def test_a_code_is_of_pages_or_of_something_else() -> None:
    assert not set(PAGE_CODES) & set(STORE_CODES)
    assert {code.name for code in codes()} == {*PAGE_CODES, *STORE_CODES}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    directory = dsa_store(tmp_path / "store", 3)
    put(directory, "." + "ab" * 16 + ".tmp")
    put(directory, "notes.txt")
    (tmp_path / "dsa.toml").write_text(DSA)
    return directory


def refused(invoke: Invoke, store: Path, code: str) -> str:
    before = contents(store)
    profile = ("--profile", store.parent / "dsa.toml")
    repair = ("--repair", "delete", "--yes", "--repair-code", code)
    out = invoke("verify", store, *profile, *repair, exit_code=2)
    assert contents(store) == before
    assert not out.stdout
    return out.stderr


def test_an_unknown_repair_code_is_refused_with_those_that_are_known(
    invoke: Invoke, store: Path
) -> None:
    said = refused(invoke, store, "missing-rnk")
    assert "'missing-rnk'" in said
    for code in PAGE_CODES:
        assert code in said


@pytest.mark.parametrize(
    "given", [["missing-rank,orphan-sidecar"], ["missing-rank", "orphan-sidecar"]]
)
def test_repair_codes_are_a_list_or_several_options(
    invoke: Invoke, tmp_path: Path, given: list[str]
) -> None:
    """A page lacks a rank, and another page all its kv."""
    store = lacking_store(tmp_path / "store")
    repair = ("--profile", profile_file(tmp_path / "demo.toml"), "--repair", "delete", "--dry-run")
    named = [word for codes in given for word in ("--repair-code", codes)]
    said = invoke("verify", store, *repair, *named, exit_code=4).stderr
    assert "2 pages would be deleted" in said


def test_a_repair_says_which_codes_it_lacks_if_all_findings_are_warnings(
    invoke: Invoke, tmp_path: Path
) -> None:
    store = lacking_store(tmp_path / "store")
    repair = ("--profile", profile_file(tmp_path / "demo.toml"), "--repair", "quarantine", "--yes")
    said = invoke("-q", "verify", store, *repair, exit_code=4).stderr
    lacked = "missing-rank,orphan-sidecar"
    assert said == (
        "hicachectl: Not repaired: 2 pages, because no finding of the pages is an error; add "
        f"--repair-code {lacked}\n"
    )
    repaired = invoke("verify", store, *repair, "--repair-code", lacked, exit_code=4)
    assert "2 pages repaired" in repaired.stdout
    assert "Not repaired" not in repaired.stderr


def test_each_of_several_repair_codes_must_be_known(invoke: Invoke, store: Path) -> None:
    said = refused(invoke, store, "missing-rank,missing-rnk")
    assert "'missing-rnk' is not one of missing-pool, " in said


@pytest.mark.parametrize("code", STORE_CODES)
def test_a_code_that_repair_cannot_act_on_is_refused_with_what_can_be_done(
    invoke: Invoke, store: Path, code: str
) -> None:
    said = refused(invoke, store, code)
    assert code in said
    assert STORE_CODES[code] in " ".join(said.split())


@pytest.mark.slow
def test_a_page_without_a_sidecar_is_said_to_be_a_miss_everywhere(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    """`verify`, `show` and `explain` agree with `hits`, which counts as 0.5.19 and later do."""
    words = "SGLang 0.5.19 and later miss the page; earlier releases may restore it without"
    (store / kv(0).replace("_x-dsa", ".indexer_x-dsa")).unlink()
    profile = ("--profile", tmp_path / "dsa.toml")
    pages = tmp_path / "pages.json"
    pages.write_text(json.dumps([kv(0)[:64]]))
    hits = invoke("hits", store, "--pages", pages, *profile, "--format", "json").document
    assert hits["chains"][0]["usable_pages"] == 0
    for exit_code, command in (
        (4, ("verify", store, *profile)),
        (0, ("show", store, kv(0)[:64], *profile)),
        (0, ("explain", "missing-pool")),
    ):
        assert words in " ".join(invoke(*command, exit_code=exit_code).stdout.split())


@pytest.mark.slow
def test_an_error_that_is_about_no_page_is_not_left_without_a_word(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    invoke("verify", store, "--profile", tmp_path / "dsa.toml", "--stamp", exit_code=4)
    other = tmp_path / "other.toml"
    other.write_text(DSA.replace('"x/dsa"', '"x/dsa"\nsglang = "0.5.23"\nhash_unit = "bigram"'))
    (store / kv(0)).unlink()
    repair = ("--checks", "groups,sizes", "--repair", "delete", "--yes")
    said = invoke("verify", store, "--profile", other, *repair, exit_code=4).stderr
    assert "1 stamp-mismatch" in said
    assert STORE_CODES["stamp-mismatch"] in " ".join(said.split())
    options = (*repair, "--stamp", "--allow-empty")
    stamped = invoke("verify", store, "--profile", other, *options, exit_code=4)
    assert "stamp-mismatch" not in stamped.stderr  # the new stamp mends it
    assert "nothing to do, because this run compared with the old stamp" in stamped.stdout
