"""Names of deployments, ranks and objects in the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.formats.keys.columns import SPAN_COLUMNS
from hicachectl.formats.objects import AXES
from hicachectl.pages.naming import deployment_text
from hicachectl.text.terminal import escape_controls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.pages.deployments import Deployment

AMBIGUOUS = "ambiguous keys"
FOREIGN = "other objects"  # objects that SGLang does not write
NO_RANKS = "all ranks"
_SIZES = tuple(f"{axis}_size" for axis in AXES)


def deployment_name(deployment: Deployment) -> str:
    """Return the name of a deployment: its model, and the sizes as in `ls`."""
    shard = deployment.shard
    return _named(deployment.names.text, {n: getattr(shard, n) for n in _SIZES})


def summary_name(row: Mapping[str, Any], *, models: bool) -> str:
    """Return the name of the deployment in a row of `ls --summary`, like `deployment_name`.

    models: whether the keys of the store name models.
    """
    if row["pool"] is None:
        return FOREIGN
    sizes = {name: row[name] for name in _SIZES}
    if models and row["model"] is None and not any(sizes.values()):
        return AMBIGUOUS
    return _named("_".join(filter(None, (row["tag"], row["model"]))), sizes)


def _named(name: str, sizes: Mapping[str, int | None]) -> str:
    return escape_controls(deployment_text({"model": name, **sizes}))


def pool_text(pool: str | None, part: str | None) -> str:
    """Return the pool of an object with its part, as text."""
    return escape_controls(" ".join(filter(None, (pool, part))))


def rank_text(fields: Mapping[str, Any]) -> str:
    """Return the rank of an object as text: `tp 0 pp 1` or `layers 0-16`.

    fields: see `shard_fields`.
    """
    ranks = {axis: fields[f"{axis}_rank"] for axis in AXES}
    stated = [
        *(f"{axis} {rank}" for axis, rank in ranks.items() if rank is not None),
        *(f"{name} {fields[name]}" for name in SPAN_COLUMNS if fields[name]),
    ]
    return " ".join(stated) or NO_RANKS
