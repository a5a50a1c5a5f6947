"""What an earlier run of a migration has settled, and what it has left to be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.move.decisions import Action, decide
from hicachectl.move.survey import compare

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from hicachectl.move.agenda import Agenda, Request
    from hicachectl.move.journal import Progress
    from hicachectl.move.survey import Survey
    from hicachectl.pages.groups import BoolArray
    from hicachectl.pages.inventory import IntArray


def settle_existing(agenda: Agenda, request: Request, earlier: Progress | None) -> None:
    """Settle the turns of groups that the destination has whole.

    What the journal says was copied (and compared, where that is asked for) is not replaced or
    compared again. What is there for another reason is compared before it is deleted from the
    source, and so is what an interrupted run may have written without reading it back.
    """
    manner = request.manner
    compares = manner.move or (manner.verify and request.resume)
    for survey, actions in zip(agenda.surveys, agenda.actions, strict=True):
        if earlier is not None:
            name = survey.route.name
            settled = (
                earlier.verified if compares or request.if_exists == "verify" else (earlier.copied)
            )
            whole = decide(survey, actions != Action.NOTHING, "skip") == Action.SKIP
            actions[whole & _among(survey, settled[name])] = Action.SKIP
        if manner.move:
            actions[actions == Action.SKIP] = Action.COMPARE
        elif compares:
            done = set() if earlier is None else earlier.verified[survey.route.name]
            actions[(actions == Action.SKIP) & ~_among(survey, done)] = Action.COMPARE


def left_in_source(survey: Survey, actions: npt.NDArray[np.int8], earlier: Progress) -> IntArray:
    """List the groups of which an interrupted run had deleted a part from the source: rows.

    They were compared before; what is left of them goes where the destination still has all that
    they touch, in its size.
    """
    unfinished = _among(survey, earlier.unremoved(survey.route.name))
    unfinished &= actions == Action.NOTHING
    _, lacks, differs = compare(survey.touched, survey.there)
    return np.flatnonzero(unfinished & ~lacks & ~differs & ~survey.strays)


def _among(survey: Survey, pages: Collection[str]) -> BoolArray:
    named = pa.array(sorted(pages), pa.string())
    found: BoolArray = pc.is_in(survey.pages, value_set=named).to_numpy(zero_copy_only=False)
    return found.copy()
