"""What is to be done with each group of a survey: nothing, copy, complete, replace, compare."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import numpy as np

from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.migrating.survey import ABSENT, UNSIZED

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.groups import BoolArray
    from hicachectl.migrating.survey import Survey

IfExists = Literal["skip", "verify", "overwrite"]


class Action(IntEnum):
    """What is to be done with a group."""

    NOTHING = 0  # it has nothing that could be moved, or was not chosen
    SKIP = 1  # the destination has it whole
    COPY = 2
    COMPLETE = 3  # the destination has a part: add the rest, if that part is the same
    COMPARE = 4  # the destination has it whole: read both
    REPLACE = 5  # remove what the destination has, and copy
    CONFLICT = 6  # the destination has another object under one of its keys


@dataclass(frozen=True, slots=True)
class Problem:
    """What kept a group from being done: its page, the key at fault where one is, and why."""

    page: str
    key: str | None
    detail: str


WRITING = (Action.COPY, Action.COMPLETE, Action.REPLACE)
READS_BACK = (Action.COMPLETE, Action.COMPARE)


def decide(survey: Survey, chosen: BoolArray, if_exists: IfExists) -> npt.NDArray[np.int8]:
    """Decide for each group: [n] of Action. chosen: [n], which groups are wanted."""
    needed = survey.needed
    there = needed & (survey.there != ABSENT)
    some, all_ = there.any(axis=1), ~(needed & ~there).any(axis=1)
    wanted = survey.wanted_bytes
    sized = there & (survey.there != UNSIZED) & (wanted != UNKNOWN_SIZE)
    another = (sized & (survey.there != wanted)).any(axis=1)
    actions = np.full(len(survey.groups), Action.COPY, dtype=np.int8)
    actions[some] = Action.COMPLETE
    actions[some & all_] = Action.COMPARE if if_exists == "verify" else Action.SKIP
    if if_exists == "overwrite":
        actions[some] = Action.REPLACE
    else:
        actions[another] = Action.CONFLICT
    actions[~chosen | ~needed.any(axis=1) | ~_readable(survey)] = Action.NOTHING
    return actions


def unreadable(survey: Survey) -> BoolArray:
    """Say of which groups a source has not the bytes that its route takes it to have: [n]."""
    return ~_readable(survey)


def _readable(survey: Survey) -> BoolArray:
    """Say which groups' sources are of the size that their units need: [n]."""
    fine = np.ones(len(survey.groups), dtype=np.bool_)
    target_bytes = survey.route.target_bytes
    for number, unit in enumerate(survey.route.units):
        for source in unit.sources:
            sizes = survey.sizes[:, source]
            expected = survey.route.sizes[source]
            right = sizes != UNKNOWN_SIZE
            if not (unit.identity and target_bytes[unit.destinations[0]] == UNKNOWN_SIZE):
                right &= sizes == expected
            fine &= right | ~survey.due[:, number]
    return fine
