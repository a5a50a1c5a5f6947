"""Have SGLang parse bodies of /generate, as its HTTP server does.

Runs inside the SGLang environment: `parse_generate.py FILE`, a JSON list of bodies. Prints a JSON
list with an entry for each body: error, from the check against the wire schema, or null; and the
fields of the normalised GenerateReqInput that control the prefix cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass
else:
    pass

_FIELDS = ("input_ids", "sampling_params", "stream", "extra_key", "cache_salt", "routed_dp_rank")


def answer(question: list[Any]) -> list[Any]:
    """Parse bodies."""
    return [_parsed(body) for body in question]


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
