"""Checks of `doctor` that compare a server's deployment with the deployments of the store."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from msgspec.structs import replace as replaced

from hicachectl.checks.codes import OPTIONS, STORE
from hicachectl.doctor.checks import FAIL, OK, UNKNOWN, WARN
from hicachectl.formats.errors import HicacheError, ProfileError
from hicachectl.formats.layouts import DTYPE_BYTES
from hicachectl.formats.models.flags import attention_tp, normalised_layout
from hicachectl.formats.objects import NAME_COLUMNS, Names
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.pages.census import SEVERAL, Census
from hicachectl.pages.deployments import profiled_deployment
from hicachectl.pages.naming import deployment_document, deployment_text, place_text
from hicachectl.profiles.identities import markers_of
from hicachectl.profiles.stamps import read_stamp
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hicachectl.doctor.checks import Check
    from hicachectl.doctor.listed_store import ListedStore
    from hicachectl.doctor.live_server import LiveServer
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.deployments import AffixTable, Deployment
    from hicachectl.pages.inventory import Inventory

# Names and sizes that keys may state, each with the profile option that gives it.
_FLAGS = {
    "model": "--served-model-name",
    "tag": "--tag",
    "tp": "--tp",
    "pp": "--pp",
    "cp": "--cp",
    "dcp": "--dcp",
}
_CONVERTED = ("model", "tag", "tp", "pp")  # migrate changes them by --to-model and so on
# Objects of another size count as exceptions if they are fewer than one in this many objects.
_SHARE = 10


@dataclass(frozen=True, slots=True)
class _OwnKeys:
    """Names and sizes in the keys of the pages that a server looks for.

    sizes: number of ranks along each axis.
    """

    names: Names
    sizes: Mapping[str, int]

    def differences(self, other: Deployment) -> dict[str, tuple[str, str]]:
        """Return the names and sizes in which a deployment's keys differ from the server's keys.

        Each entry has two texts: the deployment's value, then the server's value.
        """
        found: dict[str, tuple[str, str]] = {}
        if other.names.columns["model"] is not None and other.names.text != self.names.text:
            pairs = zip(NAME_COLUMNS, other.names, self.names, strict=True)
            found |= {name: (theirs, ours) for name, theirs, ours in pairs if theirs != ours}
        for axis, rank, size in other.shard.axes:
            stated = size
            if size is None and rank is None and axis != "tp":
                stated = 1  # keys state an axis other than TP only if it has several ranks
            if stated is not None and stated != self.sizes[axis]:
                found[axis] = str(stated), str(self.sizes[axis])
        return found


@dataclass(frozen=True, slots=True)
class _Stored:
    """A deployment of the store with its pages.

    pages: number of objects of its most frequent anchor.
    sizes: sizes of its anchors in bytes.
    oldest_ns: first write of its anchors, Unix ns; None if unknown.
    newest_ns: last write of its anchors, Unix ns; None if unknown.
    differences: result of `_OwnKeys.differences`; empty for the server's deployment.
    """

    number: int
    deployment: Deployment
    pages: int
    sizes: frozenset[int]
    oldest_ns: int | None
    newest_ns: int | None
    differences: Mapping[str, tuple[str, str]]

    @property
    def text(self) -> str:
        return deployment_text(deployment_document(self.deployment))


def own_anchors(server: LiveServer, listed: ListedStore, table: AffixTable) -> set[int]:
    """Return the affix ids of the anchors that a server looks for.

    table: affixes of the store of `listed`, read with its profile.
    """
    try:
        own_keys = _own_keys(server)
    except ProfileError:
        return set()
    profiled = _is_profile_of(server, listed)
    own = {
        number
        for number in range(len(table.deployments))
        if not _differences(table, number, own_keys, profiled=profiled)
    }
    return {
        affix
        for affix, (number, spec) in enumerate(zip(table.deployment_ids, table.specs, strict=True))
        if number in own and spec is not None and spec.anchor
    }


def deployment_checks(
    server: LiveServer,
    listed: ListedStore,
    stated: Profile | None = None,
    request_words: str = "",
) -> tuple[list[Check], Fraction | None]:
    """Compare a server's deployment with the deployments that have pages in the store.

    stated: profile that suggested commands name (`ListedStore.mending`); None if they name none.
    request_words: see `DoctorRequest`.
    There is nothing to compare if the store has no page, or if the server does not state its
    deployment.
    Returns the checks, and the ratio of the objects' actual size to their expected size. If no
    check names a setting that explains another size, the ratio is None.
    """
    if listed.inventory is None or server.deployment is None:
        return [], None
    try:
        own_keys = _own_keys(server)
    except ProfileError as error:
        return [server.check_of("deployment", UNKNOWN, f"Not compared: {error}")], None
    census = Census.of(listed.inventory.objects, listed.inventory.affix_ids)
    profiled = _is_profile_of(server, listed)
    stored = list(_stored(listed.inventory, census, own_keys, profiled=profiled))
    if not stored:
        return [], None
    own = [one for one in stored if not one.differences]
    others = [one for one in stored if one.differences]
    if not own:
        return [_missing(server, others, listed, stated)], None
    sizes, scale = _sizes(server, listed, census, own, stated, request_words)
    checks = [*_present(server, own, others, listed, stated), *sizes, *_layout(server, listed)]
    return checks, scale


def _own_keys(server: LiveServer) -> _OwnKeys:
    """Return the names and sizes in a server's keys. Raises ProfileError for impossible flags."""
    if (profile := server.profile) is not None:
        sizes = {axis: getattr(profile, axis) for axis in ("tp", "pp", "cp", "dcp")}
        return _OwnKeys(profile.names, sizes)
    if server.deployment is None:
        raise ProfileError(server.why_no_profile)
    flags = server.deployment.flags
    name = (flags.model or server.deployment.model_path).replace("/", "-")
    sizes = {"tp": attention_tp(flags), "pp": flags.pp, "cp": flags.cp, "dcp": flags.dcp}
    return _OwnKeys(Names(name, flags.tag), sizes)


def _is_profile_of(server: LiveServer, listed: ListedStore) -> bool:
    """Return whether the store was listed with this server's profile, apart from the weights."""
    if server.profile is None or listed.profile is None:
        return False
    unweighted = replaced(
        listed.profile,
        weights=server.profile.weights,
        draft_weights=server.profile.draft_weights,
    )
    return unweighted == server.profile


def _differences(
    table: AffixTable, number: int, own_keys: _OwnKeys, *, profiled: bool
) -> Mapping[str, tuple[str, str]]:
    """Return `_OwnKeys.differences` of a deployment of a table.

    The result is empty for the server's own deployment.

    profiled: whether the first deployment is the server's, and no other deployment is.
    """
    deployment = table.deployments[number]
    if not profiled:
        return own_keys.differences(deployment)
    if not number:
        return {}
    place = place_text(deployment, table.deployments[0])
    return own_keys.differences(deployment) or {"keys": (place, "")}


def _stored(
    inventory: Inventory, census: Census, own_keys: _OwnKeys, *, profiled: bool
) -> Iterator[_Stored]:
    """Yield the deployments of a store that have an anchor. profiled: see `_differences`."""
    table = inventory.table
    rows = list(zip(*census.counts.to_pydict().values(), strict=True))
    for number, deployment in enumerate(table.deployments):
        anchors = {
            affix
            for affix, spec in enumerate(table.specs)
            if table.deployment_ids[affix] == number and spec is not None and spec.anchor
        }
        counted_rows = [row for row in rows if row[0] in anchors]
        if not counted_rows:
            continue
        objects: dict[int, int] = {}
        for affix, _, count, _, _ in counted_rows:
            objects[affix] = objects.get(affix, 0) + count
        differences = _differences(table, number, own_keys, profiled=profiled)
        yield _Stored(
            number,
            deployment,
            max(objects.values()),
            frozenset(row[1] for row in counted_rows),
            min((row[3] for row in counted_rows if row[3] is not None), default=None),
            max((row[4] for row in counted_rows if row[4] is not None), default=None),
            differences,
        )


def _missing(
    server: LiveServer, others: list[_Stored], listed: ListedStore, stated: Profile | None
) -> Check:
    """Return the check of a store that has only pages of other deployments."""
    nearest = min(others, key=lambda one: (len(one.differences), -one.pages))
    return server.check(
        next(iter(nearest.differences)),
        FAIL,
        f"The store has {_theirs(nearest)}, but this server asks for {_ours(nearest)}",
        evidence=f"{counted(nearest.pages, 'page')} of {nearest.text}, no page under the server's "
        "keys" + _more(others, nearest),
        next=_conversion(server, nearest, listed, stated),
    )


def _present(
    server: LiveServer,
    own: list[_Stored],
    others: list[_Stored],
    listed: ListedStore,
    stated: Profile | None,
) -> Iterator[Check]:
    """Yield the checks of a store that has pages of the server's deployment."""
    pages = sum(one.pages for one in own)
    yield server.check(
        "deployment",
        OK,
        f"The store has {counted(pages, 'page')} of {own[0].text}",
        evidence=_more(others, None),
    )
    for one in others:
        if _is_former(one, own):
            yield server.check(
                next(iter(one.differences)),
                WARN,
                f"The store also has {_theirs(one)}, but this server asks for {_ours(one)}, so it "
                "does not find those pages",
                evidence=f"{counted(one.pages, 'page')} of {one.text}, "
                f"{counted(pages, 'page')} of the server's",
                next=_conversion(server, one, listed, stated),
            )


def _is_former(one: _Stored, own: list[_Stored]) -> bool:
    """Return whether a deployment seems to be the server's, from before its settings changed.

    Such a deployment got no page after the first page of the server's deployment. In a store
    without times, it differs in a single name or size, and has more pages than the server's
    deployment. If it has another model name, some of its anchors also have the size of the server's
    anchors. In a store without times, a deployment of another model name never counts.
    """
    if "model" in one.differences and not any(one.sizes & each.sizes for each in own):
        return False
    began = [each.oldest_ns for each in own if each.oldest_ns is not None]
    if one.newest_ns is not None and began:
        return one.newest_ns <= min(began)
    pages = sum(each.pages for each in own)
    return len(one.differences) == 1 and "model" not in one.differences and one.pages > pages


def _theirs(one: _Stored) -> str:
    return ", ".join(_named(name, theirs) for name, (theirs, _) in one.differences.items())


def _ours(one: _Stored) -> str:
    return ", ".join(_named(name, ours) for name, (_, ours) in one.differences.items())


def _named(name: str, value: str) -> str:
    if name == "keys":
        return f"keys with {value}" if value else "other keys"
    return f"{name} {value}" if value else f"no {name}"


def _more(others: Iterable[_Stored], besides: _Stored | None) -> str:
    """Return a text that names the other deployments of a store, most pages first."""
    rest = sorted((one for one in others if one is not besides), key=lambda one: -one.pages)
    if not rest:
        return ""
    named = [f"{counted(one.pages, 'page')} of {one.text}" for one in rest[:2]]
    if len(rest) > 2:
        named.append(f"{len(rest) - 2} more deployments")
    return ("; also " if besides is not None else "also ") + ", ".join(named)


def _conversion(
    server: LiveServer,
    one: _Stored,
    listed: ListedStore,
    stated: Profile | None,
    *,
    same_keys: bool = False,
) -> str:
    """Return the command that makes pages of another deployment usable.

    If no command does, return other advice. The command states the profile of the pages. This is
    `stated`, if `stated` describes them. Otherwise it is the server's profile with the names and
    sizes of the pages.
    same_keys: whether converted pages keep their keys, and so need another store.
    """
    names = list(one.differences)
    if names == ["keys"]:
        return "check that STORE is the server's store, and that the profile is right"
    if not set(names) <= set(_CONVERTED):
        return (
            "start the server with the sizes of the store, or let it write its own pages, because "
            "migrate does not change cp and dcp"
        )
    model_only = names == ["model"]
    if model_only and not _may_fit(server, one, listed):
        return "check STORE: the other model's objects have other sizes than the server's"
    theirs = {name: values[0] for name, values in one.differences.items()}
    words = []
    if stated is None or any(str(_stated(stated, name)) != theirs[name] for name in names):
        words += ["--server", server.url]
        if server.why_no_profile:
            words += ["--model-config", "DIR"]
        for name in names:
            words += [_FLAGS[name], theirs[name]] if theirs[name] else []
    changed = []
    for name in names:
        ours = one.differences[name][1]
        changed += [f"--to-{name}", ours] if ours else ["--to-no-tag"]
    assert listed.store is not None
    # Converted pages cannot be added to an archive, because an archive is written only once.
    target = STORE if listed.store.traits.live and not same_keys else "DST"
    described = shlex.join(words) if words else OPTIONS
    template = f"hicachectl migrate {STORE} {target} {described} {shlex.join(changed)}"
    command = listed.mending.command(template)
    if "model" in names:
        command = f"if both names are of the same weights: {command}"
    if model_only:
        command += f"; or start the server with --served-model-name {shlex.quote(theirs['model'])}"
    return command


def _may_fit(server: LiveServer, one: _Stored, listed: ListedStore) -> bool:
    """Return whether an anchor of a deployment can have the size of one of the server's anchors."""
    assert listed.store is not None
    if server.profile is None:
        return True
    specs = profiled_deployment(server.profile, listed.store.grammar).specs
    return not one.sizes.isdisjoint(spec.nbytes for spec in specs if spec.anchor)


def _stated(profile: Profile, name: str) -> object:
    return profile.key_model if name == "model" else getattr(profile, name)


def _sizes(
    server: LiveServer,
    listed: ListedStore,
    census: Census,
    own: list[_Stored],
    stated: Profile | None,
    request_words: str,
) -> tuple[list[Check], Fraction | None]:
    """Compare object sizes with the server's, because keys show neither page size nor dtype.

    In some stores, keys state the TP rank, but not the TP size. There, sizes and ranks show the TP
    size. Returns the same two values as `deployment_checks`.
    """
    assert listed.inventory is not None
    profile, table = server.profile, listed.inventory.table
    if profile is None or not _is_profile_of(server, listed):
        return [], None
    numbers = {one.number for one in own}
    fitting, unfit = 0, dict[tuple[int, int], int]()
    rows = census.counts.select(["affix", "size", "objects"]).to_pydict()
    for affix, size, objects in zip(*rows.values(), strict=True):
        spec = table.specs[affix] if affix >= 0 else None
        if spec is None or not spec.anchor or table.deployment_ids[affix] not in numbers:
            continue
        if spec.nbytes <= 0 or size == UNKNOWN_SIZE:
            continue
        if size == spec.nbytes:
            fitting += objects
        else:
            unfit[size, spec.nbytes] = unfit.get((size, spec.nbytes), 0) + objects
    dtype = profile.pools[0].dtype
    told = f"page size {profile.page_size}" + (f" and {dtype}" if dtype else "")
    (size, wanted), objects = max(unfit.items(), key=lambda one: one[1], default=((0, 0), 0))
    if objects < SEVERAL or objects * _SHARE < fitting + objects:
        text = f"The sizes of {counted(fitting, 'object')} fit {told}"
        return [server.check("page-size", OK, text)] if fitting else [], None
    ranks = _ranks_seen(listed.inventory, census, own[0])
    if ranks is not None and ranks != profile.tp and not profile.rank_replicated:
        differing = replace(own[0], differences={"tp": (str(ranks), str(profile.tp))})
        check = server.check(
            "tp",
            WARN if fitting else FAIL,
            f"The store has {_theirs(differing)}, but this server asks for {_ours(differing)}",
            evidence=f"kv objects of {human_size(size)}, expected {human_size(wanted)}, of "
            f"{counted(ranks, 'rank')}",
            next=_conversion(server, differing, listed, stated, same_keys=True),
        )
        return [check], Fraction(size, wanted)
    readings = _readings(server, listed, size, wanted)
    what = " or ".join(one.text for one in readings) or "another model or topology"
    check = server.check(
        "dtype" if readings and not readings[0].page_size else "page-size",
        WARN if fitting else FAIL,
        f"{counted(objects, 'object')} of the store have the size of {what}, but this server asks "
        f"for {told}",
        evidence=f"kv objects of {human_size(size)}, expected {human_size(wanted)}"
        + (f", which {counted(fitting, 'object')} have" if fitting else ""),
        next=_deciding(server, listed, readings, stated, request_words)
        + "start the server with the page size and dtype of the store, or remove the old pages "
        "with hicachectl rm; migrate does not convert them",
    )
    return [check], Fraction(size, wanted) if readings else None


def _deciding(
    server: LiveServer,
    listed: ListedStore,
    readings: Sequence[_Reading],
    stated: Profile | None,
    request_words: str,
) -> str:
    """Return advice that shows the user which explanation of a size is right.

    The text is empty if there are fewer than two explanations, or if none is a page size.
    """
    tokens = next((one.page_size for one in readings if one.page_size), None)
    if tokens is None or len(readings) < 2:
        return ""
    described = f"{OPTIONS} --page-size {tokens}"
    if stated is not None:  # --page-size does not change a stated profile
        config = " --model-config DIR" if server.why_no_profile else ""
        described = f"--server {server.url}{config} --page-size {tokens}"
        if stated.page_size == tokens:
            described = OPTIONS
    command = listed.mending.command(f"hicachectl hits {STORE} {described}")
    command += f" {request_words or '--trace FILE'} --summary"
    before = "" if request_words else "give requests of that time: "
    return f"{before}{command}; if it finds pages, they are of page size {tokens}; "


def _ranks_seen(inventory: Inventory, census: Census, own: _Stored) -> int | None:
    """Return the number of TP ranks that wrote anchors under the names of a deployment.

    Return None if keys state the TP size, or if they state no TP rank.
    """
    table, ranks = inventory.table, set()
    for affix in set(census.affixes.tolist()):
        spec = table.specs[affix] if affix >= 0 else None
        if spec is None or not spec.anchor or spec.coordinate.names != own.deployment.names:
            continue
        # The last number of some keys can be a TP rank, or the pipeline stage of a model whose TP
        # ranks share objects. So look at each reading of a key.
        shards = [one.shard for one in table.grammar.readings(*table.affixes[affix])]
        if any(shard.tp_size is not None for shard in shards):
            return None
        ranks |= {shard.tp_rank for shard in shards} - {None}
    return len(ranks) or None


@dataclass(frozen=True, slots=True)
class _Reading:
    """A setting that explains a size of objects.

    page_size: number of tokens of a page; 0 if the setting is the dtype.
    width: number of bytes of a value; 0 if the setting is the page size.
    """

    page_size: int = 0
    width: int = 0

    @property
    def text(self) -> str:
        if self.page_size:
            return f"page size {self.page_size}"
        return f"a dtype of {counted(self.width, 'byte')}"


def _readings(server: LiveServer, listed: ListedStore, size: int, wanted: int) -> list[_Reading]:
    """Return the settings that explain a size.

    If the store records page sizes, the explanation is a recorded page size that fits, or else the
    dtype. If it records none, the explanations are the page size and the dtype that fit.
    """
    profile = server.profile
    assert profile is not None
    tokens, rest = divmod(profile.page_size * size, wanted)
    fits = [_Reading(page_size=tokens)] if tokens and not rest else []
    recorded = _recorded(listed, profile.key_model)
    if tokens in recorded and fits:
        return fits
    if recorded:
        fits = []
    width = DTYPE_BYTES.get(profile.pools[0].dtype, 0) * size / wanted
    if width in DTYPE_BYTES.values():
        fits.append(_Reading(width=int(width)))
    return fits


def _recorded(listed: ListedStore, key_model: str) -> set[int]:
    """Return the page sizes that the stamp and the markers of a model state."""
    assert listed.store is not None
    try:
        markers, stamp = markers_of(listed.store), read_stamp(listed.store, key_model)
    except HicacheError:
        return set()  # `store_checks` reports the error
    sizes = {one.identity.page_size for one in markers if one.identity.model == key_model}
    if stamp is not None:
        sizes.add(stamp.profile.page_size)
    return sizes


def _layout(server: LiveServer, listed: ListedStore) -> Iterator[Check]:
    """Compare the layout with the recorded layout, because neither keys nor sizes show a layout."""
    assert listed.store is not None
    assert server.deployment is not None
    profile = server.profile
    try:
        layout = profile.layout if profile else normalised_layout(server.deployment.flags)
        key_model = profile.key_model if profile else _own_keys(server).names.model
        stamp = read_stamp(listed.store, key_model)
    except HicacheError:
        return  # `store_checks` reports the error
    if stamp is None or not layout:
        return
    if stamp.profile.layout == layout:
        yield server.check("layout", OK, f"The layout is the same as in the stamp: {layout}")
        return
    yield server.check(
        "layout",
        FAIL,
        f"The stamp of the store has layout {stamp.profile.layout}, but this server uses {layout}, "
        "so it would read permuted values",
        next=listed.mending.command(f"hicachectl migrate STORE DST --to-layout {layout}")
        + f"; or start the server with --hicache-mem-layout {stamp.profile.layout}",
    )
