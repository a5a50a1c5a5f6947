"""Examples in hicachectl-scaling(7): command lines parse, and each part is started once."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from hicachectl.parts.manifest import parse_shard
from tests.test_readme import check_arguments, manual_blocks

PAGE = "hicachectl-scaling.7"
BLOCKS = manual_blocks(PAGE)
JOBS = [yaml.safe_load(block) for block in BLOCKS if "kind: Job" in block]
(SLURM,) = [block for block in BLOCKS if "#SBATCH" in block]

# Options of sbatch and the forms of their values, as in sbatch(1).
SBATCH = {
    "--array": r"(\d+)-(\d+)(%\d+)?",
    "--cpus-per-task": r"\d+",
    "--job-name": r"[\w-]+",
    "--mem": r"\d+[KMGT]?",
    "--ntasks": r"\d+",
    "--output": r"([\w.-]|%[Aaj])+",
    "--time": r"(\d+-)?\d+(:\d\d){0,2}",
}
SBATCH_FLAGS = ("--requeue",)


def command_lines() -> list[list[str]]:
    """Return the arguments of each hicachectl in the page's scripts."""
    lines = "\n".join(BLOCKS).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("hicachectl ")]


def sbatch_options() -> argparse.Namespace:
    """Parse the options for sbatch; raise SystemExit or ValueError for a wrong one."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in SBATCH:
        parser.add_argument(name, required=True)
    for name in SBATCH_FLAGS:
        parser.add_argument(name, action="store_true")
    first, *rest = SLURM.splitlines()
    assert first == "#!/bin/bash"  # sbatch reads no option after the first command
    given = [line for line in rest if line.startswith("#SBATCH ")]
    assert rest[: len(given)] == given
    options = parser.parse_args([line.removeprefix("#SBATCH ") for line in given])
    for name, form in SBATCH.items():
        value = getattr(options, name.lstrip("-").replace("-", "_"))
        if not re.fullmatch(form, value):
            raise ValueError(f"{name}={value}")
    return options


def parts_of(arguments: list[str]) -> int:
    """Return the number of parts of a run, by --shard."""
    (text,) = [
        value.removeprefix("--shard=")
        for at, value in enumerate(arguments)
        if value.startswith("--shard=") or arguments[at - 1] == "--shard"
    ]
    return parse_shard(text if text[0] != "/" else f"0{text}").count


def arguments_of(job: dict[str, Any]) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    arguments: list[str] = container["args"]
    return arguments


@pytest.mark.parametrize("arguments", command_lines(), ids=lambda line: line[0])
def test_command_lines_are_understood(arguments: list[str]) -> None:
    check_arguments(arguments)


def test_the_schedulers_start_each_part_once() -> None:
    """The indexes of the Indexed Job and of the array are the parts of the run."""
    first, indexed, _ = JOBS
    assert indexed["spec"]["completionMode"] == "Indexed"
    (script,) = [line for line in command_lines() if "/256" in line]
    counts = {parts_of(arguments_of(first)), parts_of(arguments_of(indexed)), parts_of(script)}
    start, end = re.fullmatch(SBATCH["--array"], sbatch_options().array).group(1, 2)  # type: ignore[union-attr]
    assert counts == {indexed["spec"]["completions"], int(end) - int(start) + 1}


def test_the_script_of_slurm_is_valid() -> None:
    done = subprocess.run(["bash", "-n"], input=SLURM, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sbatch_options().requeue
