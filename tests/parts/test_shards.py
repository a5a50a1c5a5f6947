"""`--shard`: the part of a run, given or taken from a scheduler's variables."""

from __future__ import annotations

import pytest

from hicachectl.formats.errors import UsageError
from hicachectl.parts.manifest import Shard, parse_shard


def slurm(number: int, *, least: int = 0, step: int = 1, count: int = 8) -> dict[str, str]:
    """Return the variables of a task of a job array (sbatch(1), --array)."""
    return {
        "SLURM_ARRAY_TASK_ID": str(number),
        "SLURM_ARRAY_TASK_MIN": str(least),
        "SLURM_ARRAY_TASK_STEP": str(step),
        "SLURM_ARRAY_TASK_COUNT": str(count),
    }


@pytest.mark.parametrize(
    ("text", "environ", "number"),
    [
        ("0/8", {}, 0),
        ("7/8", {"JOB_COMPLETION_INDEX": "3"}, 7),
        ("/8", {"JOB_COMPLETION_INDEX": "3"}, 3),
        ("/8", slurm(3), 3),
        ("/8", slurm(8, least=1), 7),
        ("/8", {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "0"}, 5),
    ],
)
def test_a_shard_is_given_or_scheduled(text: str, environ: dict[str, str], number: int) -> None:
    assert parse_shard(text, environ) == Shard(number, 8)


@pytest.mark.parametrize(
    ("text", "environ", "said"),
    [
        ("8", {}, "write I/N with I from 0, such as 0/8"),
        ("a/8", {}, "write I/N with I from 0, such as 0/8"),
        ("-1/8", {}, "write I/N with I from 0, such as 0/8"),
        ("1/8 ", {}, "write I/N with I from 0, such as 0/8"),
        ("0/0", {}, "a run has 1 to 10000 parts; give another N"),
        ("0/10001", {}, "a run has 1 to 10000 parts; give another N"),
        ("8/8", {}, "the last is 7"),
        ("/8", {}, "neither is set; give I/8"),
        ("/8", slurm(1) | {"JOB_COMPLETION_INDEX": "1"}, "both are set; give I/8"),
        ("/8", {"JOB_COMPLETION_INDEX": "8"}, "the last is 7"),
        (
            "/8",
            {"JOB_COMPLETION_INDEX": "x"},
            "JOB_COMPLETION_INDEX: 'x' is not a number; give --shard I/N",
        ),
        ("/8", slurm(2, step=2), "SLURM_ARRAY_TASK_STEP is 2, expected 1; use an array of 8"),
        (
            "/8",
            slurm(7, least=7, count=2),
            "SLURM_ARRAY_TASK_COUNT is 2, expected 8; use an array of 8",
        ),
        ("/8", slurm(9), "the last is 7"),
        ("/8", slurm(1, least=2), "_ID is 1, but SLURM_ARRAY_TASK_MIN is 2; give --shard I/8"),
        ("/8", {"SLURM_ARRAY_TASK_ID": "5"}, "SLURM_ARRAY_TASK_MIN: '' is not a number"),
    ],
)
def test_what_names_no_part_is_refused(text: str, environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=f"(?s).*{said}") as refusal:
        parse_shard(text, environ)
    assert "\n" not in str(refusal.value)
