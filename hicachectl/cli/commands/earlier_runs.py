"""Complete what earlier, killed runs began, but never before the operator has agreed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicachectl.cli.consent import agreed
from hicachectl.cli.session import remark, remark_unrecorded

if TYPE_CHECKING:
    import click

    from hicachectl.backends.base import Store


@dataclass(slots=True)
class EarlierRuns:
    """Removals that killed runs began on a store.

    quarantine: the directory named on the command line, None for the store's own. pages: how many
    page groups are still to be completed.
    """

    ctx: click.Context
    store: Store
    quarantine: str | None
    yes: bool
    dry_run: bool
    pages: int = 0

    def begin(self) -> None:
        """Complete them at once with --yes, so that the listing is of what is left; else count."""
        from hicachectl.move.withdrawal import count_unfinished

        if self.yes and not self.dry_run:
            self._finish()
            return
        self.pages = count_unfinished(self.store, self.quarantine)
        if self.pages and self.dry_run:
            remark(self.ctx, f"{self.pages} pages of a removal that was cut short would be "
                             "completed first")  # fmt: skip

    def agreed(self, question: str | None) -> bool:
        """Ask whether to go on, and then complete them.

        question: what else is to be done, such as "remove 3 pages (1 KiB) from STORE"; None where
        there is nothing else. Nothing at all is not asked about.
        """
        asked = [] if question is None else [question]
        if self.pages and not self.dry_run:
            asked.insert(0, f"complete the removal of {self.pages} pages of {self.store.url} that "
                            "an earlier run began")  # fmt: skip
        if not asked:
            return True
        text = ", and ".join(asked)
        if not agreed(f"{text[0].upper()}{text[1:]}?", yes=self.yes, dry_run=self.dry_run):
            return False
        if self.pages and not self.dry_run:
            self._finish()
        return True

    def _finish(self) -> None:
        from hicachectl.move.withdrawal import finish_removals

        finished = finish_removals(self.store, self.quarantine)
        if len(finished.rows):
            remark(
                self.ctx,
                f"completed {len(finished.rows)} pages that an earlier run had begun with",
            )
        for key, message in finished.failures:
            remark(self.ctx, f"{key}: {message}")
        remark_unrecorded(self.ctx, finished.unrecorded)
