"""Read the requests or pages to warm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import UsageError
from hicachectl.formats.keys.labels import label_text
from hicachectl.requests.chain_options import asked_hashing, asked_requests

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hicachectl.prewarming.page_plan import PrewarmRequest


def asked_in(request: PrewarmRequest, grammar: str, options: Mapping[str, Any]) -> PrewarmRequest:
    """Return the request for the requests or pages that the options name.

    grammar: grammar of the source's keys. Raises UsageError and FormatError.
    """
    if options["all_"]:
        return request
    if options["pages"]:
        return _listed_pages(request, grammar, options)
    if options["plan"]:
        return _planned_pages(request, options["plan"])
    hashing = asked_hashing(request.profile, options)
    remedy = "record token ids, or give --dry-run without DST and --from"
    return replace(request, requests=asked_requests(options, hashing, remedy=remedy))


def _listed_pages(
    request: PrewarmRequest, grammar: str, options: Mapping[str, Any]
) -> PrewarmRequest:
    import pyarrow as pa

    from hicachectl.formats.keys.base import codec_for
    from hicachectl.pages.deployments import profiled_deployment
    from hicachectl.requests.chains import Hashing, requests_of_pages
    from hicachectl.requests.files import read_page_list
    from hicachectl.text.units import counted

    profile, source = request.profile, str(options["pages"])
    listed = read_page_list(options["pages"], requests=True)
    label = profiled_deployment(profile, grammar).label(codec_for(grammar))
    in_others = listed.only_in_others(label)
    if not listed.is_chained:
        pages, others = (pa.array(names, pa.string()) for names in (listed.pages, in_others))
        return replace(request, pages=pages, in_others=others)
    if in_others:
        raise UsageError(
            f"{source}: {counted(len(in_others), 'row')} of other deployments than the profile's "
            f"({label_text(label)}); remove such rows from a file with chains"
        )
    chains = requests_of_pages(listed.chains(), Hashing.of(profile), source=source)
    return replace(request, requests=chains)


def _planned_pages(request: PrewarmRequest, path: Path) -> PrewarmRequest:
    from hicachectl.prewarming.plan_file import read_plan
    from hicachectl.prewarming.ranking import rank_by_plan
    from hicachectl.requests.chains import Hashing

    planned = read_plan(path)
    requests = planned.requests(Hashing.of(request.profile))
    if (requests.reach < 2).all():
        # The plan names single pages; the pages before them are unknown.
        return replace(request, pages=planned.pages)
    return replace(request, requests=requests, rank=rank_by_plan(planned.pages))
