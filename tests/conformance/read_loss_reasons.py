"""Tell under which names SGLang counts tokens that its storage did not serve or did not take.

Runs inside the SGLang environment.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

# Parameter of the functions that count by reason.
_REASON = "reason"


class Counting:
    """Stands for metrics of `prometheus_client`; keeps each name and the reasons of its label."""

    made: ClassVar[dict[str, set[str] | None]] = {}

    def __init__(self, name: str, labelnames: Iterable[str] = (), **_: Any) -> None:
        self._reasons: set[str] = set()
        self.made[name] = self._reasons if _REASON in labelnames else None

    def labels(self, **labels: str) -> Counting:
        self._reasons |= {labels[_REASON]} if _REASON in labels else set()
        return self


class Ignoring(Counting):
    """Stands for histograms and gauges."""

    made: ClassVar = {}


def answer(_: object) -> dict[str, Any]:
    """Return counters and reasons.

    counters: the counters of SGLang's storage, and those of its cache that have reasons; each with
        the reasons that exist from the start, or null if it has no such label.
    recorded: reasons that SGLang's code records, found by reading it.
    """
    import sglang.srt
    from sglang.srt.observability import metrics_collector as collectors

    classes = (collectors.RadixCacheMetricsCollector, collectors.StorageMetricsCollector)
    stand_ins = {"_counter_cls": Counting, "_gauge_cls": Ignoring, "_histogram_cls": Ignoring}
    counters: dict[str, list[str] | None] = {}
    for cls, has_all in zip(classes, (False, True), strict=True):
        Counting.made.clear()
        type("_", (cls,), dict(stand_ins))(labels={})
        for name, reasons in Counting.made.items():
            if has_all or reasons is not None:
                counters[name] = None if reasons is None else sorted(reasons)
    places = {
        name: list(inspect.signature(method).parameters).index(_REASON) - 1
        for cls in classes
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if _REASON in inspect.signature(method).parameters
    }
    source = Path(next(iter(sglang.srt.__path__)))  # a namespace package has no file
    return {"counters": counters, "recorded": sorted(_recorded(source, places))}


def _recorded(source: Path, places: dict[str, int]) -> set[str]:
    """Return the constants that calls pass as the reason to functions that count it.

    places: position of the reason among the arguments of each such function. A function that
        passes its own parameter on counts, too.
    """
    functions = [
        node
        for path in sorted(source.rglob("*.py"))
        if any(name in (text := path.read_text()) for name in places) or "storage_prefetch" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    ]
    found: set[str] = set()
    known = -1
    while known < len(places):
        known = len(places)
        for function in functions:
            own = [argument.arg for argument in function.args.args]
            assigned = _assigned(function)
            for call in ast.walk(function):
                reason = _argument(call, places)
                for part in () if reason is None else _values(reason):
                    if isinstance(part, ast.Name) and part.id == _REASON in own:
                        places.setdefault(function.name, own.index(_REASON) - 1)
                    values = assigned[part.id] if isinstance(part, ast.Name) else [part]
                    found |= {
                        one.value
                        for value in values
                        for one in _values(value)
                        if isinstance(one, ast.Constant) and isinstance(one.value, str)
                    }
    return found


def _assigned(function: ast.FunctionDef) -> defaultdict[str, list[ast.AST]]:
    """Return what a function assigns to each of its names."""
    assigned: defaultdict[str, list[ast.AST]] = defaultdict(list)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned[target.id].append(node.value)
    return assigned


def _values(node: ast.AST) -> list[ast.AST]:
    """Return the values that an expression can have, without the tests of a conditional one."""
    if isinstance(node, ast.IfExp):
        return [*_values(node.body), *_values(node.orelse)]
    return [node]


def _argument(call: ast.AST, places: dict[str, int]) -> ast.AST | None:
    """Return what a call passes as the reason to a function that counts it."""
    if not isinstance(call, ast.Call):
        return None
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in places:
        return None
    for keyword in call.keywords:
        if keyword.arg == _REASON:
            return keyword.value
    rest = call.args[places[name] :]
    return rest[0] if rest else None
