"""Tell how SGLang's own parser reads arguments of a server.

Runs inside the SGLang environment: `parse_launch.py REQUEST`. The request is a JSON object of lists
of arguments by name. Prints a JSON object of answers by name: the fields of ServerArgs as given, or
`refusal`.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass
else:
    pass


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer each request by its name."""
    return {name: _answer(arguments) for name, arguments in question.items()}


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
