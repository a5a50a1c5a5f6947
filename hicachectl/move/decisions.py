"""What is to be done with each group of a survey: nothing, copy, complete, replace, compare."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import numpy as np

from hicachectl.move.survey import compare
from hicachectl.pages.group_table import UNSIZED

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.move.survey import Survey
    from hicachectl.pages.groups import BoolArray

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
    some, lacks, differs = compare(survey.wanted, survey.there)
    actions = np.full(len(survey.groups), Action.COPY, dtype=np.int8)
    actions[some] = Action.COMPLETE
    actions[some & ~lacks] = Action.COMPARE if if_exists == "verify" else Action.SKIP
    if if_exists == "overwrite":
        actions[some] = Action.REPLACE
    else:
        actions[differs] = Action.CONFLICT
    actions[~chosen | ~(some | lacks) | unreadable(survey)] = Action.NOTHING
    return actions


def unreadable(survey: Survey) -> BoolArray:
    """Say of which groups a source has not the bytes that its route takes it to have: [n]."""
    unsized = survey.wanted.where(block.values == UNSIZED for block in survey.wanted.blocks)
    return unsized.having()
