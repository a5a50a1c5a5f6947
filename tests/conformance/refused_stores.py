"""Have SGLang write cases that it cannot store; print what it says.

Runs inside the SGLang environment: `refused_stores.py REQUEST`. The request is a JSON list of case
(a name in store_cases.REFUSED_CASES), backend and place, as for write_store.py. Prints a JSON list
of the messages of the exceptions; null for what was written.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import attached_rank, write_store
    from tests.conformance.store_cases import REFUSED_CASES
else:
    import attached_rank
    import write_store
    from store_cases import REFUSED_CASES


def answer(question: list[Any]) -> list[Any]:
    """Write what the requests name; return the refusals."""
    return [_refusal(*entry) for entry in question]


def _refusal(name: str, backend: str, place: str) -> str | None:
    case = REFUSED_CASES[name]
    options = argparse.Namespace(
        backend=backend, place=place, layout=None, dtype=None, pages=3, seed=0
    )
    try:
        if case.deployments[0].profile.get("dcp", 1) > 1:  # refused when a store is attached
            with attached_rank.sole_rank(case.deployments[0], options.pages) as rank:
                rank.attach({}, backend)
        write_store.write_case(name, case, write_store.place(backend, place), options)
    except Exception as error:
        return str(error)
    return None
