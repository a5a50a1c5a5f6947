"""Prometheus metrics of the plug-in, which SGLang exports with its own metrics.

This module is imported only if SGLang exports metrics. SGLang has then set
PROMETHEUS_MULTIPROC_DIR, and its /metrics sums the files of all processes (utils/common.py ::
add_prometheus_middleware). prometheus_client refuses a second metric of the same name, so the
metrics stay when the backend is detached. All metrics are counters, because a gauge would need a
rule for the values of processes that have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter

from hicachectl.formats.plugin_status import COUNTED, metric_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# SGLang's own labels of a rank's storage metrics (unified_cache/storage_attachment.py).
LABELS = ("tp_rank", "dp_rank", "pp_rank", "attn_cp_rank")
_STAGE_TEXTS = {
    "asked": "Tokens of pages that SGLang asked for. SGLang asks again for requests that wait.",
    "found": "Tokens of leading pages that could be restored when SGLang asked.",
    "restored": "Tokens of leading pages that were read whole into host memory.",
    "written": "Tokens of pages whose kv was written. Pages stored before are not counted.",
    "evicted": "Tokens of pages whose kv was evicted by this process.",
}
_STAGES = {
    stage: Counter(metric_of("tokens", stage), text, LABELS) for stage, text in _STAGE_TEXTS.items()
}
_KIND_TEXTS = {
    "refused": "Pages of a pool that were misses or were not written, by reason.",
    "noted": "Pages of a pool that were served in spite of the reason.",
    "removed": "Files that were removed, by reason.",
    "failed": "Operations other than reads and writes that failed, by reason.",
}
_REASONS = {
    kind: Counter(metric_of(kind, ""), text, (*LABELS, "reason"))
    for kind, text in _KIND_TEXTS.items()
}


def exporter(ranks: Sequence[int]) -> Callable[[str, str, int], None]:
    """Return a function that adds to a rank's metrics: (kind, name, count), as in `counters.Tally`.

    ranks: the rank's values of LABELS.
    From now on, /metrics has all metrics of the rank, including metrics with the value 0.
    """
    children = {("tokens", stage): metric.labels(*ranks) for stage, metric in _STAGES.items()}
    for kind, metric in _REASONS.items():
        children |= {(kind, reason): metric.labels(*ranks, reason) for reason in COUNTED[kind]}

    def export(kind: str, name: str, count: int) -> None:
        children[kind, name].inc(count)

    return export
