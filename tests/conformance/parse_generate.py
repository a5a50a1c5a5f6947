"""Have SGLang parse bodies of /generate, as its HTTP server does.

Runs inside the SGLang environment: `parse_generate.py FILE`, a JSON list of bodies. Prints a JSON
list with an entry for each body: error, from the check against the wire schema, or null; and the
fields of the normalised GenerateReqInput that control the prefix cache.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import sglang_env
else:
    import sglang_env

_FIELDS = ("input_ids", "sampling_params", "stream", "extra_key", "cache_salt", "routed_dp_rank")


def main() -> None:
    """Parse the bodies of the file that the command line names."""
    bodies = json.loads(Path(sys.argv[1]).read_text())
    with contextlib.redirect_stdout(sys.stderr):
        parsed = [_parsed(body) for body in bodies]
    print(json.dumps(parsed))


def _parsed(body: dict[str, Any]) -> dict[str, Any]:
    from pydantic import TypeAdapter
    from sglang.srt.entrypoints.api_contract import generate_contract_error
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = TypeAdapter(GenerateReqInput).validate_python(body)  # as FastAPI does
    request.normalize_batch_and_arguments()
    return {
        "error": generate_contract_error(body),
        "single": request.is_single,
        **{name: getattr(request, name) for name in _FIELDS},
    }


if __name__ == "__main__":
    sglang_env.prepare()
    main()
