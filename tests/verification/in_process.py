"""Verify an open store in the test's process, as the command does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicachectl.verification.report import describe_store, report_of
from hicachectl.verification.verify import check_store

if TYPE_CHECKING:
    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.formats.catalog import Catalog
    from hicachectl.verification.request import VerifyRequest


@dataclass(frozen=True, slots=True)
class Verified:
    """Members of a report, and the catalog."""

    document: dict[str, Any]
    findings: pa.Table
    remarks: tuple[str, ...]
    catalog: Catalog | None


def verify_store(store: Store, request: VerifyRequest, **callbacks: Any) -> Verified:
    """Scan a store, run the checks, and return their report. callbacks: see `check_store`."""
    checked = check_store(store, request, **callbacks)
    described = describe_store(store, request)
    report = report_of([checked.result], described, checked.groups.inventory.table, request)
    return Verified(report.document, report.result().rows, report.remarks, checked.catalog)


def brief(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the code, severity and key of each finding, sorted."""
    return sorted((f["code"], f["severity"], f["key"]) for f in document["findings"])
