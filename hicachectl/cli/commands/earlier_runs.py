"""Complete the removals of earlier, killed runs, after the operator has agreed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicachectl.cli.consent import agreed
from hicachectl.cli.session import remark

if TYPE_CHECKING:
    import click

    from hicachectl.backends.base import Store


@dataclass(slots=True)
class EarlierRuns:
    """Unfinished removals of killed runs on a store.

    quarantine: the directory from the command line; None for the store's own. pages: number of
    groups still to complete. removed: whether earlier runs removed pages, which may be all.
    """

    ctx: click.Context
    store: Store
    quarantine: str | None
    yes: bool
    dry_run: bool
    pages: int = 0
    removed: bool = False

    def begin(self) -> None:
        """With --yes, complete the removals before the store is listed; else count their pages."""
        from hicachectl.move.withdrawal import count_unfinished
        from hicachectl.text.units import counted

        if self.yes and not self.dry_run:
            self._finish()
            return
        self.pages = count_unfinished(self.store, self.quarantine)
        self.removed = self.pages > 0
        if self.pages and self.dry_run:
            pages = counted(self.pages, "page")
            remark(self.ctx, f"An earlier run began to remove {pages}; that removal would be "
                             "completed first")  # fmt: skip

    def agreed(self, question: str | None) -> bool:
        """Ask whether to go on; if so, complete the removals and return True.

        question: the action of this run, such as "remove 3 pages (1 KiB) from STORE"; None if there
        is none. Returns True without asking if there is nothing to do at all.
        """
        from hicachectl.text.units import counted

        asked = [] if question is None else [question]
        if self.pages and not self.dry_run:
            pages = counted(self.pages, "page")
            asked.insert(0, f"complete the removal of {pages} that an earlier run began in "
                            f"{self.store.url}")  # fmt: skip
        if not asked:
            return True
        text = ", and ".join(asked)
        if not agreed(f"{text[0].upper()}{text[1:]}?", yes=self.yes, dry_run=self.dry_run):
            return False
        if self.pages and not self.dry_run:
            self._finish()
        return True

    def _finish(self) -> None:
        from hicachectl.move.reports import finished_remarks
        from hicachectl.move.withdrawal import finish_removals

        report = finish_removals(self.store, self.quarantine)
        for text in finished_remarks(report):
            self.removed = True
            remark(self.ctx, text, failure=bool(report.failures or report.unrecorded))
