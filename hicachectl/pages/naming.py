"""Name deployments, and keys with several readings, in documents and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from hicachectl.formats.objects import AXES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.keys.base import Grammar
    from hicachectl.formats.objects import Coordinate
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.deployments import AffixTable, Deployment


NAMELESS = "keys without a model name"


class DeploymentDocument(TypedDict):
    """A deployment in a document."""

    model: str
    tag: str
    tp_size: int | None
    pp_size: int | None
    cp_size: int | None
    dcp_size: int | None
    page_size: int | None
    layout: str | None


def profile_document(profile: Profile) -> DeploymentDocument:
    """Return the deployment of a profile in JSON types."""
    return {
        "model": profile.model,
        "tag": profile.tag,
        "tp_size": profile.tp,
        "pp_size": profile.pp,
        "cp_size": profile.cp,
        "dcp_size": profile.dcp,
        "page_size": profile.page_size,
        "layout": profile.layout,
    }


def deployment_document(deployment: Deployment, page_size: int | None = None) -> DeploymentDocument:
    """Return a deployment in JSON types. A value that no profile and no key states is None.

    page_size: page size to state if neither profile nor keys state one; None if it is not known.
    """
    profile = deployment.profile
    if profile is not None and not profile.inferred:
        return profile_document(profile)
    shard, stated = deployment.shard, deployment.names.columns
    return {
        "model": stated["model"] or "",
        "tag": stated["tag"] or "",
        "tp_size": shard.tp_size,
        "pp_size": shard.pp_size,
        "cp_size": shard.cp_size,
        "dcp_size": shard.dcp_size,
        "page_size": shard.dcp_page_size or page_size,
        "layout": None,
    }


def deployment_text(document: Mapping[str, Any]) -> str:
    """Return a deployment document as text: `org/model tp 8`."""
    sizes = [
        f"{axis} {size}"
        for axis in AXES
        if (size := document[f"{axis}_size"]) is not None and (axis == "tp" or size > 1)
    ]
    return " ".join(filter(None, [document["model"] or NAMELESS, *sizes]))


def place_text(deployment: Deployment, own: Deployment) -> str:
    """Return how another deployment differs from `own`, such as `tp 4` or `model b tp 4`."""
    texts = []
    stated, mine = deployment.names.columns, own.names.columns
    if (model := stated["model"]) != mine["model"]:
        texts.append(f"model {model}" if model else NAMELESS)
    if (tag := stated["tag"]) != mine["tag"]:
        texts.append(f"tag {tag}" if tag else "no tag")
    named = bool(texts)
    ranks = zip(deployment.shard.axes, own.shard.axes, strict=True)
    for (axis, rank, size), (_, our_rank, ours) in ranks:
        if size is None and rank is not None:
            continue  # keys state the rank, but not the size
        if axis == "tp" and rank is None and size is None:
            texts += ["no tp ranks"] if our_rank is not None else []
        elif (size or 1) != (ours or 1) or (named and size is not None):
            texts.append(f"{axis} {size or 1}")
    tokens = deployment.shard.dcp_page_size
    if tokens is not None and tokens != own.shard.dcp_page_size:
        texts.append(f"page size {tokens}")
    return " ".join(texts) or _ranks_text(deployment, own)


def _ranks_text(deployment: Deployment, own: Deployment) -> str:
    """Return the ranks of a deployment that `own` does not have.

    They distinguish deployments whose keys state no sizes.
    """
    found = []
    for axis in AXES:
        theirs, ours = (
            {getattr(spec.coordinate.shard, f"{axis}_rank") for spec in one.specs}
            for one in (deployment, own)
        )
        ranks = sorted(theirs - ours - {None})
        if ranks:
            found.append(f"{axis} ranks {', '.join(map(str, ranks))}")
        elif theirs - ours:
            found.append(f"no {axis} ranks")
    return " ".join(found) or "other keys"


def same_model(deployment: Deployment, own: Deployment, grammar: Grammar) -> bool:
    """Return whether a deployment has the model of `own`.

    Without a profile, the tag in keys is a part of the model's name.
    """
    theirs, ours = deployment.names.model, own.names.model
    return theirs == ours or (grammar.has_tag and theirs.endswith(f"_{ours}"))


def ambiguous_affixes(table: AffixTable, objects: IntArray) -> dict[int, str]:
    """Return the number and the readings of the ambiguous keys of each affix, as text.
    objects: [affixes + 1] number of objects by affix, from `pages.tally`.
    """
    found = {}
    for affix, resolved in enumerate(table.resolved):
        if resolved.ambiguous and objects[affix]:
            meanings = " or ".join(map(_reading_words, resolved.readings))
            noun = "key" if objects[affix] == 1 else "keys"
            form = "<hash>".join(table.affixes[affix])
            found[affix] = f"{objects[affix]} {noun} {form} can be {meanings}"
    return found


def ambiguity_remark(table: AffixTable, objects: IntArray) -> str:
    """Return one line about the ambiguous keys and the remedy; "" if no key is ambiguous."""
    found = list(ambiguous_affixes(table, objects).values())
    if not found:
        return ""
    more = f" (and {len(found) - 1} more forms)" if len(found) > 1 else ""
    return f"{found[0]}{more}; {ambiguity_remedy(table)}"


def ambiguity_remedy(table: AffixTable) -> str:
    """Return the next step for ambiguous keys."""
    profile = table.profile
    if profile is None or profile.inferred:
        return "give --profile to decide"
    return (
        "the profile does not decide; give the profile of the servers that wrote the pages, or "
        "remove them with hicachectl rm STORE --state unknown if no server uses them"
    )


def _reading_words(reading: Coordinate) -> str:
    return f"{reading.pool} of model {reading.names.model!r} {reading.shard.ranks_text()}".rstrip()
