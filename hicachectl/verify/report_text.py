"""Text of a verification report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.text.tables import table_lines
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.verify.report import VerifyReport


def report_lines(report: VerifyReport, *, colour: bool) -> Iterator[str]:
    """Yield the lines of the `table` format: the findings, then the sums."""
    document = report.document
    if len(report.findings):
        columns = report.findings.select(["severity", "code", "key", "detail"])
        yield from table_lines(columns, colour=colour)
    pages = counted(document["pages"], "page")
    in_flight = f", {document['in_flight']} in flight" if document["in_flight"] else ""
    gone = f", {document['gone']} vanished during the run" if document["gone"] else ""
    read = ""
    if document["bytes_read"]:
        part = document["sampled"] < document["pages"]
        share = f" ({document['sampled']} of {pages})" if part else ""
        read = f", {human_size(document['bytes_read'])} read{share}"
    cut = "" if document["complete"] else ", time limit reached"
    fixed = f"; {counted(document['repaired'], 'page')} repaired" if document["repaired"] else ""
    yield (
        f"{counted(document['objects'], 'object')}, {pages}{in_flight}{gone}, "
        f"{human_size(document['bytes'])}{read}{cut}: {_verdict(document)}{fixed}"
    )


def _verdict(document: dict[str, Any]) -> str:
    """Return finding counts per code, and the checks that did not run."""
    found = ", ".join(f"{count} {code}" for code, count in document["counts"].items())
    skipped = document["skipped_checks"]
    if skipped == ["everything"]:
        return found or "nothing was checked"
    left_out = f"; not checked: {', '.join(skipped)}" if skipped else ""
    return (found or "no findings") + left_out
