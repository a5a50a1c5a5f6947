"""The list of finding codes: every check keeps to it, and `--repair-code` knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from hicachectl.checks.findings import findings
from hicachectl.text.vocabulary import CODES, PAGE_CODES, STORE_CODES
from tests.move.repairs import dsa_store, kv
from tests.stores import DSA, contents, put

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

ONE_KEY = pa.array(["some key"])


def test_a_check_that_emits_an_undeclared_code_fails() -> None:
    with pytest.raises(ValueError, match="no-such-code"):
        findings("no-such-code", "error", keys=ONE_KEY, detail="")
    codes = pa.array(["truncated", "no-such-code"])
    with pytest.raises(ValueError, match="no-such-code"):
        findings(codes, "error", keys=pa.array(["a", "b"]), detail="")


@pytest.mark.parametrize("code", CODES)
def test_every_declared_code_makes_a_finding(code: str) -> None:
    assert findings(code, "info", keys=ONE_KEY, detail="").column("code").to_pylist() == [code]


def test_a_code_is_of_pages_or_of_something_else() -> None:
    assert not set(PAGE_CODES) & set(STORE_CODES)
    assert set(CODES) == {*PAGE_CODES, *STORE_CODES}


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


@pytest.mark.parametrize("code", STORE_CODES)
def test_a_code_that_repair_cannot_act_on_is_refused_with_what_can_be_done(
    invoke: Invoke, store: Path, code: str
) -> None:
    said = refused(invoke, store, code)
    assert code in said
    assert STORE_CODES[code] in " ".join(said.split())


def test_stale_temporaries_are_for_rm(invoke: Invoke, store: Path) -> None:
    assert "rm STORE --temporaries" in refused(invoke, store, "stale-temporary")


def test_an_error_that_is_about_no_page_is_not_left_without_a_word(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    invoke("verify", store, "--profile", tmp_path / "dsa.toml", "--stamp", exit_code=4)
    other = tmp_path / "other.toml"
    other.write_text(DSA.replace('"x/dsa"', '"x/dsa"\nsglang = "0.5.23"\nhash_unit = "bigram"'))
    (store / kv(0)).unlink()
    repair = ("--repair", "delete", "--yes")
    said = invoke("verify", store, "--profile", other, *repair, exit_code=4).stderr
    assert "1 stamp-mismatch" in said
    assert STORE_CODES["stamp-mismatch"] in " ".join(said.split())
