"""How fast a store fills, in `hicachectl report`."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.pages.selection import Selection
from hicachectl.report.filling import Owner, Use, Window
from hicachectl.report.tenants import Tenant
from hicachectl.requests.chains import Hashing, Labels, requests_of_pages
from hicachectl.requests.measuring import HitsRequest
from tests.report.page_texts import picture_of, text_of
from tests.stores import OLD, page, put, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.requests.chains import Requests
    from tests.conftest import Invoke

HOUR, DAY = 3600, 86400
KIB = 1024


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store of two deployments: pages of 2, 20 and 100 hours, and of 8 and 20 days ago."""
    store, now = tmp_path / "store", time.time()
    for number, age in enumerate((2 * HOUR, 20 * HOUR, 100 * HOUR, 8 * DAY)):
        put_pages(store, range(number, number + 1), "_a_0_1", nbytes=8 * KIB, mtime=now - age)
    put_pages(store, range(4), "_b_0_1", nbytes=KIB, mtime=now - 20 * DAY)
    return store


def test_growth_is_the_bytes_of_each_window_and_what_is_left_is_divided_by_it(
    store: Path,
) -> None:
    read = store / f"{page(0)}_b_0_1.bin"
    os.utime(read, (time.time() - 2 * DAY, read.stat().st_mtime))
    picture = picture_of(store)
    filling = picture.filling
    assert [(window.nbytes, window.is_all) for window in filling.windows] == [
        (16 * KIB, False),
        (24 * KIB, False),
        (36 * KIB, True),
    ]
    assert [round(window.seconds / DAY) for window in filling.windows] == [1, 7, 20]
    assert filling.main == Window(7 * DAY, 24 * KIB)
    assert filling.main.per_day * 7 == 24 * KIB
    assert filling.main.days_until_full(240 * KIB) == pytest.approx(70)
    assert filling.owners == (Owner("a tp 1", 32 * KIB, 24 * KIB), Owner("b tp 1", 4 * KIB, 0))
    assert filling.uses == (
        Use("under 1 h", 0, 0),
        Use("1 h to 1 d", 2, 16 * KIB),
        Use("1 to 7 d", 2, 9 * KIB),
        Use("7 to 30 d", 4, 11 * KIB),
        Use("over 30 d", 0, 0),
    )
    assert filling.read_pages == 1


@pytest.mark.slow
def test_the_page_says_growth_with_its_denominators(
    store: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileStore, "free_bytes", lambda self: 241 * KIB)
    made = tmp_path / "page.html"
    invoke("report", store, "--title", "Prod <&>", "-o", made)
    text = text_of(made)
    assert text.startswith("Prod <&> Prod <&> HiCache store file://")
    growth = "In the last 7 days, the store grew by at most 3.4 KiB a day. At this rate, its "
    assert f"{growth}241.0 KiB of free space last 70 days or longer." in text
    assert "last 24 hours 16.0 KiB 16.0 KiB 15 last 7 days 24.0 KiB 3.4 KiB 70" in text
    assert "20d since the first write 36.0 KiB 1.8 KiB 133" in text
    assert "share of 36.0 KiB in the last 7 days share of 24.0 KiB" in text
    assert "a tp 1 32.0 KiB 88.8 % 24.0 KiB 100 % b tp 1 4.0 KiB 11.1 % 0 B 0 %" in text
    assert "share of 8 bytes under 1 h 0 0 % 0 B 1 h to 1 d 2 25 % 16.0 KiB" in text
    assert "0 of 8 groups show a read after their last write." in text
    invoke("report", store, "--model", "a", "-o", made)
    text = text_of(made)
    assert "Only pages that match the filters count, so days until full are unknown." in text
    assert "last 7 days 24.0 KiB 3.4 KiB \u2013" in text


@pytest.mark.slow
def test_what_times_do_not_tell_is_said(tmp_path: Path, invoke: Invoke) -> None:
    store, made = tmp_path / "store", tmp_path / "page.html"
    put_pages(store, range(3), "_m_0_1", mtime=OLD)
    put(store, "stray", mtime=1)
    invoke("report", store, "-o", made)
    assert "Nothing in the store was written in the last 7 days." in text_of(made)
    windows = picture_of(store).filling.windows
    assert windows[-1].seconds == pytest.approx(time.time() - OLD, abs=HOUR)  # no page is older
    young = tmp_path / "young"
    put_pages(young, range(3), "_m_0_1", mtime=time.time() - 100)
    invoke("report", young, "-o", made)
    assert (
        "The first write was less than an hour ago, which is too short to tell a rate"
        in text_of(made)
    )
    put_pages(young, range(3, 4), "_m_0_1", mtime=time.time() - 2 * HOUR)
    (window,) = picture_of(young).filling.windows
    assert (window.is_all, window.nbytes, round(window.seconds / HOUR)) == (True, 256, 2)


@pytest.mark.slow
def test_a_store_without_times_or_sizes_has_no_numbers_of_them(
    tmp_path: Path, invoke: Invoke
) -> None:
    made, url = tmp_path / "page.html", f"pack://{tmp_path}/store.hcpack"
    with open_store(f"{url}?keys=file", create=True) as store, Arena(4096) as arena:
        store.attach(arena)
        rows = pa.table({"key": pa.array([f"{page(1)}_m_0_1.bin".encode()], pa.binary())})
        sizes = np.array([64])
        assert store.write_from(rows, np.array([0]), sizes, if_absent=True).all_ok
        store.detach()
    invoke("report", url, "-o", made)
    text = text_of(made)
    assert "Without write times, growth and days until full are unknown." in text
    assert "m tp 1 64 B 100 %" in text
    assert "The store keeps no times, so the last use of its pages is unknown." in text


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    """Return a store of ten pages of a model, and three of another."""
    store = tmp_path / "store"
    put_pages(store, range(10), "_m_0_1", nbytes=KIB)
    put_pages(store, range(3), "_other_0_1", nbytes=KIB)
    return store


def requests_of_tenants() -> Requests:
    """Return requests that reach seven of the ten pages."""
    chains = [range(4), [0, 1, 4, 5], [0, 1, 4, 77], [8]]
    labels = {
        "salt": Labels(("acme", "<b>", None), np.array([0, 1, 1, 2], np.int32)),
        "adapter": Labels((None, "de"), np.array([0, 0, 1, 1], np.int32)),
    }
    names = [[page(n) for n in chain] for chain in chains]
    return replace(requests_of_pages(names, Hashing(16)), labels=labels)


def test_pages_count_once_by_the_tenants_that_reach_them(tenants: Path) -> None:
    hits = HitsRequest(requests=requests_of_tenants(), choice=Selection(model="m"))
    salts, adapters = picture_of(tenants, hits=hits).requested.tenancies
    assert (salts.kind, salts.pages, salts.nbytes) == ("salt", 10, 10 * KIB)
    assert salts.tenants == (
        Tenant("acme", 1, 2, 2 * KIB, 4),
        Tenant("<b>", 2, 2, 2 * KIB, 4),
        Tenant(None, 1, 1, KIB, 1),
    )
    assert (salts.shared, salts.unreached) == ((2, 2 * KIB), (3, 3 * KIB))
    assert (adapters.shared, adapters.unreached) == ((3, 3 * KIB), (3, 3 * KIB))
    assert [one.pages for one in adapters.tenants] == [3, 1]


@pytest.mark.slow
def test_the_page_has_the_shares_of_tenants(
    tenants: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, made = tmp_path / "asked.jsonl", tmp_path / "page.html"
    asked.write_text(json.dumps([page(0)]))
    arguments = ("report", tenants, "--pages", asked, "--model", "m", "-o", made)
    invoke(*arguments)
    assert "The requests name no salts and no adapters." in text_of(made)
    monkeypatch.setattr(
        "hicachectl.cli.asked.asked_requests", lambda *_, **__: requests_of_tenants()
    )
    invoke(*arguments)
    text = text_of(made)
    head = "Bytes by salt of the requests salt requests pages in the store only of this salt"
    assert f"{head} bytes of these share of 10.0 KiB acme 1 4 2 2.0 KiB 20 % <b> 2 4 2" in text
    assert "several salts 2 2.0 KiB 20 % no request 3 3.0 KiB 30 %" in text
