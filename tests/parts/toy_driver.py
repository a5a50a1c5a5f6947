"""Runs the toy command on a cluster.

`python -m tests.parts.toy_driver ADDRESS FOLDER [NAME=VALUE …]`

FOLDER is a `ToyRun`'s. Prints the document; remarks go to stderr. `kept=1` gives a run directory;
`other_ray=1` is a driver of another release of Ray.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hicachectl.__main__ import _say
from hicachectl.formats.errors import HicacheError
from hicachectl.parts.driver import Driver
from hicachectl.parts.job import MODULES
from tests.parts.toy import opened


def _main(address: str, folder: Path, *settings: str) -> None:
    given = {name: float(value) for name, value in (text.split("=") for text in settings)}
    path = folder / "run" if given.pop("kept", 0) else None
    if given.pop("other_ray", 0):
        import ray

        ray.__version__ = "2.0.0"
    MODULES["toy"] = "tests.parts.toy"
    open_job = partial(opened, folder / "store", folder / "destination", **given)
    try:
        with ExitStack() as opening:
            job = opening.enter_context(open_job())
            driver = opening.enter_context(Driver(address, job, open_job, path=path, say=_say))
            driver.begin()
            driver.work()
            merged = driver.merged()
            for text in merged.remarks:
                _say(text)
            rows = merged.document.pop("numbers")
            merged.document["numbers"] = sorted(rows["number"].to_pylist())
            print(json.dumps(merged.document))
        status = 0
    except HicacheError as error:
        _say(str(error))
        status = 2
    sys.stdout.flush()
    os._exit(status)  # as the command line does


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
