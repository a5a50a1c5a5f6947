"""Operations on a store whose calls wait, against the same calls by 64 threads in C; run by hand.

    python -m tests.bench.bench_waiting [--objects 20000] [--bytes 1000] [--flat]
        [--delays 0,0.5,2,10] [--operations ls,structure,digests,migrate,rm] [--runs 1]
        [--before WORKTREE] [--directory DIR] [--no-rclone]

Fills a directory of /dev/shm, or DIR, with objects in 256 folders, or with --flat in one. Each
delay but 0 is a mount of `slow_files`, new for each command, so that none finds attributes in
memory; at 0 ms commands work on the directory itself. Prints a row for each delay and operation,
start-up included:

- ours: seconds, median over the runs.
- of the ceiling: ours divided by `slow_files/ceiling.c` with 64 threads, in the same round.
- of rclone: ours divided by `rclone --transfers 64 --checkers 64` (lsf, size, hashsum md5, copy,
  delete), if it is installed. --no-rclone leaves it out.
- of before: ours divided by another worktree's, at 0 ms, with --before.
- calls: calls an object, ours and the ceiling's, as the mount counts them; most at once, ours.

At 0 ms, a round that warms up goes first. `rm` removes a copy of the directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.file.folders import ObjectDirectory
from tests.bench.runner import HICACHECTL, Command, alternating, options_of, scratch
from tests.bench.slow_files.mounting import built, slow_mount
from tests.stores import OLD, page

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

THREADS = 64
SUFFIX = "_Qwen-Qwen3-32B_0_1.bin"


class Bench:
    """The places and programs of one measurement."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.backing = folder / "backing"
        self.calls: dict[str, tuple[str, str]] = {}
        self.ceiling = built("ceiling.c", folder)
        self.form = "" if options.flat else "?folders=hex2"

    def fill(self) -> None:
        """Write the objects, cut out of one block of noise."""
        nbytes, objects = self.options.bytes, self.options.objects
        noise = os.urandom(nbytes + objects)
        source = self.backing / "source"
        source.mkdir(parents=True)
        with ObjectDirectory.create(str(source), folders=not self.options.flat or None) as place:
            for number in range(objects):
                where, name = place.place_for_new(f"{page(number)}{SUFFIX}".encode())
                descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=where)
                os.write(descriptor, noise[number : number + nbytes])
                os.utime(descriptor, (OLD, OLD))
                os.close(descriptor)

    def command(self, program: str, operation: str, root: Path) -> list[object]:
        """Return the words that do an operation below a directory."""
        source, target = root / "source", root / program
        catalog = self.folder / "catalog.parquet"
        catalog.unlink(missing_ok=True)
        if program == "ceiling":
            call = {"ls": "list", "structure": "list", "digests": "read", "migrate": "copy",
                    "rm": "remove"}[operation]  # fmt: skip
            places = {"copy": [source, target], "remove": [target]}.get(call, [source])
            return [self.ceiling, call, THREADS, *places]
        if program == "rclone":
            words: list[object] = {
                "ls": ["lsf", "-R", "--format", "pst", source],
                "structure": ["size", source],
                "digests": ["hashsum", "md5", source],
                "migrate": ["copy", source, target],
                "rm": ["delete", target],
            }[operation]
            return ["rclone", "--transfers", THREADS, "--checkers", THREADS, "--config", "", *words]
        words = {
            "ls": ["ls", source, "--objects", "--format", "parquet", "-o", self.folder / "rows"],
            "structure": ["verify", source, "--checks", "names,groups,sizes"],
            "digests": ["verify", source, "--checks", "digests", "--catalog", catalog,
                        "--update-catalog"],
            "migrate": ["migrate", source, f"file://{target}{self.form}"],
            "rm": ["rm", target, "--yes", "--model", "Qwen/Qwen3-32B"],
        }[operation]  # fmt: skip
        return [*HICACHECTL, *words]

    def run(self, program: str, operation: str, delay_ms: float) -> float:
        """Run one command, below a new mount if there is a delay; return its seconds."""
        target = self.backing / program
        if operation == "rm":
            subprocess.run(["cp", "-a", self.backing / "source", target], check=True)
        env = {**os.environ, "XDG_STATE_HOME": str(self.folder)}
        if program == "before":
            env["PYTHONPATH"] = str(self.options.before.resolve())
        with self._mounted(program, delay_ms) as root:
            seconds = Command(*self.command(program, operation, root), env=env)()
        if operation == "migrate":
            assert _files(target) >= self.options.objects, f"{program} has not copied all"
        if operation == "rm":
            assert _files(target) <= 1, f"{program} has not removed all"
        subprocess.run(["rm", "-rf", target], check=True)
        return seconds

    @contextmanager
    def _mounted(self, program: str, delay_ms: float) -> Iterator[Path]:
        if not delay_ms:
            yield self.backing
            return
        mount = self.folder / f"mount-{time.time_ns()}"
        with slow_mount(self.backing, mount, delay_ms) as slow:
            yield slow.path
            count = sum(slow.calls().values()) / self.options.objects
            self.calls[program] = f"{count:.1f}", str(slow.most_in_flight)

    def measure(self, operation: str, delay_ms: float) -> str:
        """Run the programs in turn; return a row."""
        self.calls.clear()
        programs = ["ours", "ceiling"]
        programs += ["before"] if self.options.before and not delay_ms else []
        programs += ["rclone"] if shutil.which("rclone") and not self.options.no_rclone else []
        ways = {name: partial(self.run, name, operation, delay_ms) for name in programs}
        turns = alternating(ways, self.options.runs, warm_up=0 if delay_ms else 1)
        ratios = [
            f"{turns.ratio('ours', to=other):.2f}" if other in programs else ""
            for other in ("ceiling", "rclone", "before")
        ]
        nothing = ("", "")
        ours, ceiling = (self.calls.get(program, nothing) for program in programs[:2])
        calls = f"{ours[0]} / {ceiling[0]}" if ours[0] else ""
        cells = (f"{delay_ms:g}", operation, f"{turns.median('ours'):.2f}", *ratios, calls, ours[1])
        return f"| {' | '.join(cells)} |"


def _files(directory: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(directory))


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__, objects=20_000, bytes=1000, flat=False, delays="0,0.5,2,10", runs=1,
        operations="ls,structure,digests,migrate,rm", before=Path, no_rclone=False,
        directory=Path("/dev/shm"),
    )  # fmt: skip
    with scratch(options.directory) as folder:
        bench = Bench(folder, options)
        bench.fill()
        form = "one directory" if options.flat else "256 folders"
        print(f"{options.objects} objects of {options.bytes} bytes in {form}, runs {options.runs}")
        print(
            "| ms | operation | ours, s | of the ceiling | of rclone | of before | calls | most |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for delay_ms in map(float, options.delays.split(",")):
            for operation in options.operations.split(","):
                print(bench.measure(operation, delay_ms), flush=True)


if __name__ == "__main__":
    main()
