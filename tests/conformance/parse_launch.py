"""Tell how SGLang's own parser reads arguments of a server.

Runs inside the SGLang environment: `parse_launch.py REQUEST`. The request is a JSON object of lists
of arguments by name. Prints a JSON object of answers by name: the fields of ServerArgs as given, or
`refusal`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import sglang_env
else:
    import sglang_env


def main() -> None:
    """Answer the request that the command line names."""
    parser = argparse.ArgumentParser(description="Parse arguments.")
    parser.add_argument("request", type=Path)
    request = json.loads(parser.parse_args().request.read_text())
    with contextlib.redirect_stdout(sys.stderr):
        answers = {name: _answer(arguments) for name, arguments in request.items()}
    print(json.dumps(answers, default=str))


def _answer(arguments: list[str]) -> dict[str, Any]:
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = prepare_server_args(arguments)
    except (SystemExit, ValueError) as error:
        return {"refusal": said.getvalue() or str(error)}
    return {field.name: getattr(found, field.name) for field in record_fields(ServerArgs)}


if __name__ == "__main__":
    sglang_env.prepare()
    main()
