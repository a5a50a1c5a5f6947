"""`rm --free` against a reference in plain Python, on small random stores.

The reference knows each group as the test wrote it: name, deployment, bytes and times.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, dropwhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from hicachectl.__main__ import run
from hicachectl.formats.hashing import page_hashes_hex
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.profile import Profile, dump_profile
from hicachectl.formats.spec import object_specs
from tests.speed import examples
from tests.stores import OLD, page

PROFILE = Profile(
    model="x/m",
    page_size=4,
    layout="page_first",
    tp=2,
    pools=(
        Pool(name="kv", kind="mha", dtype="bfloat16", layers=(1,), kv_heads=2, head_dim=8),
        Pool(
            name="mamba",
            kind="mamba",
            layers=(0,),
            temporal=StateTensor(shape=(2, 4, 4), dtype="float32"),
            conv=(StateTensor(shape=(16, 3), dtype="bfloat16", groups=(4, 4, 8)),),
        ),
    ),
)
SPECS = object_specs(PROFILE, "file")
OWN, OTHER, WIDE, UNCLEAR = "x-m", "y", "z", "open"
STEMS = {OTHER: ["_y_0_1"], WIDE: [f"_z_{rank}_4" for rank in range(4)], UNCLEAR: ["_open_0_2"]}

Group = tuple[str, str]  # page, model


@dataclass
class Case:
    """A store, as the test knows it, and what is asked of it.

    files: of each group, name to (bytes, write, read). order: "last-use", "trace" or "plan".
    """

    prompts: list[list[int]]
    files: dict[Group, dict[str, tuple[int, int, int]]]
    order: str
    planned: list[str]
    profiled: bool
    model: str | None
    before: int | None
    listed: list[str] | None
    asked: int
    chains: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chains = [page_hashes_hex(prompt, PROFILE.page_size) for prompt in self.prompts]

    def size(self, group: Group) -> int:
        return sum(nbytes for nbytes, _, _ in self.files[group].values())

    def used(self, group: Group) -> int:
        return max(max(times) for _, *times in self.files[group].values())

    def spans(self) -> dict[int, int]:
        """Return the first use of the span of each use. A use within a minute is of the span."""
        spans: dict[int, int] = {}
        start = 0
        for use in sorted(map(self.used, self.candidates())):
            pause = use - max(spans, default=0) > 60
            if pause:
                start = use
            elif use - start >= 60:
                start += (use - start) // 60 * 60
            spans[use] = start
        return spans

    def candidates(self) -> set[Group]:
        """Return the groups that the filters match, and that a value can be known of."""
        one = self.order != "last-use" and self.profiled
        return {
            (name, model)
            for name, model in self.files
            if (model != UNCLEAR or self.listed is not None)
            and (not one or model == OWN)
            and self.model in (None, model)
            and (self.before is None or self.newest((name, model)) < self.before)
            and (self.listed is None or name in self.listed)
        }

    def incomplete(self, group: Group) -> bool:
        """Return whether no server can use the group, as far as that is known."""
        name, model = group
        if model != OWN:
            return False
        kv, states = (
            [name.join(spec.affix) in self.files[group] for spec in SPECS if spec.trailing == late]
            for late in (False, True)
        )
        return not any(kv) or (self.profiled and not (all(kv) and len({*states}) == 1))

    def newest(self, group: Group) -> int:
        return max(written for _, written, _ in self.files[group].values())

    @property
    def foreign(self) -> bool:
        """Whether the store has no page of the trace or plan."""
        if self.order == "last-use" or not self.candidates():
            return False
        named = set(self.planned) if self.order == "plan" else set(chain(*self.chains))
        return not any(
            name in named and (model == OWN or not self.profiled) for name, model in self.files
        )

    @property
    def filtered(self) -> bool:
        return (self.model, self.before, self.listed) != (None, None, None)


def prompts_of(paths: list[list[int]], extra: list[int]) -> list[list[int]]:
    """Return a prompt for each path of pages; equal paths share their pages."""
    size = PROFILE.page_size
    return [
        [number + 10 * at for at, number in enumerate(path) for _ in range(size)] + [7] * more
        for path, more in zip(paths, extra, strict=True)
    ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    paths = draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4), min_size=1,
                          max_size=5))  # fmt: skip
    extra = draw(st.lists(st.integers(0, 2), min_size=len(paths), max_size=len(paths)))
    prompts = prompts_of(paths, extra)
    traced = sorted({name for prompt in prompts for name in page_hashes_hex(prompt, 4)})
    times = st.integers(0, draw(st.sampled_from([0, 2, 50, 400])))
    whole = {spec.affix for spec in SPECS}
    bare = {spec.affix for spec in SPECS if not spec.trailing}
    order = draw(st.sampled_from(["last-use", "trace", "trace", "plan"]))
    profiled = order == "trace" or draw(st.booleans())
    held = st.sampled_from([whole, bare])
    if profiled:  # without a profile, many partial pages make keys ambiguous
        held |= st.sets(st.sampled_from(sorted(whole)))
    files: dict[Group, dict[str, tuple[int, int, int]]] = defaultdict(dict)

    def put(group: Group, name: str, nbytes: int) -> None:
        files[group][name] = (nbytes, OLD + draw(times), OLD + draw(times))

    for name in [page(0), *traced, *(page(n) for n in range(1, draw(st.integers(1, 4))))]:
        chosen = whole if name == page(0) else draw(held)
        for spec in SPECS:
            if spec.affix in chosen:
                put((name, OWN), name.join(spec.affix), spec.nbytes)
    everyone = [*traced, *(page(n) for n in range(3))]
    for other, stems in STEMS.items():
        for name in draw(st.lists(st.sampled_from(everyone), unique=True, max_size=3)):
            for stem in stems:
                put((name, other), f"{name}{stem}.bin", draw(st.sampled_from([0, 100, 300])))
    model = draw(st.sampled_from([None, None, OWN, OTHER]))
    if order == "plan" and not profiled:
        model = OWN
    total = sum(nbytes for named in files.values() for nbytes, _, _ in named.values())
    return Case(
        prompts=prompts,
        files=dict(files),
        order=order,
        planned=draw(st.permutations(traced))[: draw(st.integers(1, len(traced)))],
        profiled=profiled,
        model=model,
        before=draw(st.sampled_from([None, None, OLD + 1, OLD + 25])),
        listed=draw(st.none() | st.lists(st.sampled_from(everyone), min_size=1, unique=True)),
        asked=draw(st.integers(1, total + 1)),
    )


class Place:
    """Directory with the store of a case and the files of its options."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case = case
        self.store = directory / "store"
        self.store.mkdir()
        self._directory = directory
        for named in case.files.values():
            for name, (nbytes, written, read) in named.items():
                path = self.store / name
                path.touch()
                os.truncate(path, nbytes)
                os.utime(path, (read, written))
        self._profile = self._file("profile.toml", [dump_profile(PROFILE)])
        rows = ({"timestamp": at, "token_ids": prompt} for at, prompt in enumerate(case.prompts))
        self._trace = self._file("trace.jsonl", map(json.dumps, rows))
        self._ids = self._file("ids.jsonl", map(json.dumps, case.prompts))

    def _file(self, name: str, lines: Any) -> Path:
        path = self._directory / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def document(self, *arguments: object, codes: tuple[int, ...] = (0,)) -> dict[str, Any] | None:
        """Return the JSON document of a command; None if it was refused."""
        output = self._directory / "output"
        output.unlink(missing_ok=True)
        words = [*map(str, arguments), "--format", "json", "-o", str(output)]
        code = run(words)
        assert code in codes, (code, words)
        return None if code == 2 else json.loads(output.read_text())

    def remove(self, *more: str) -> dict[str, Any] | None:
        case = self.case
        words: list[object] = ["rm", self.store, "--free", f"{case.asked}B", *more]
        if case.profiled:
            # tests/prewarming/test_targets.py has doubtful profiles.
            words += ["--profile", self._profile, "--despite-profile"]
        if case.order == "trace":
            words += ["--trace", self._trace]
        if case.order == "plan":
            rows = (json.dumps({"page": name}) for name in case.planned)
            words += ["--keep-plan", self._file("plan.jsonl", rows)]
        if case.model is not None:
            words += ["--model", case.model]
        if case.before is not None:
            words += ["--before", datetime.fromtimestamp(case.before, UTC).isoformat()]
        if case.listed is not None:
            words += ["--pages", self._file("pages", case.listed), "--all-deployments"]
        return self.document(*words, codes=(0, 2, 4))

    def usable(self) -> int:
        """Return the tokens that `hits` finds usable."""
        found = self.document("hits", self.store, "--token-ids", self._ids, "--profile",
                              self._profile)  # fmt: skip
        assert found is not None
        return sum(row["usable_tokens"] for row in found["chains"])

    def values(self) -> dict[str, tuple[float, ...]]:
        """Return the value of the pages of the trace or plan: the greater the better."""
        if self.case.order == "plan":
            return {name: (-at,) for at, name in enumerate(self.case.planned)}
        if self.case.order == "last-use":
            return {}
        plan = self._directory / "planned.jsonl"
        words = ["prewarm", "--trace", self._trace, "--profile", self._profile, "--dry-run",
                 "--format", "jsonl", "-o", plan]  # fmt: skip
        assert run([*map(str, words)]) == 0
        rows = map(json.loads, plan.read_text().splitlines())
        return {row["page"]: (row["value"], -row["depth"]) for row in rows}

    def names(self) -> set[str]:
        return {path.name for path in self.store.glob("*.bin")}


@pytest.mark.slow
@examples(30)
@given(cases())
def test_what_leaves_is_the_least_useful_and_no_more_than_asked(case: Case) -> None:
    with TemporaryDirectory() as directory:
        check(Place(case, Path(directory)))


def check(place: Place) -> None:
    case = place.case
    candidates = case.candidates()
    before, names = place.usable(), place.names()
    rehearsed = place.remove("--dry-run")
    assert place.names() == names
    document = place.remove("--yes")
    if document is None:
        event("refused")
        assert rehearsed is None
        sizes = [case.size(group) for group in candidates]
        assert case.foreign or (not case.filtered and sum(sizes) - max(sizes) < case.asked)
        assert place.names() == names
        return
    assert rehearsed is not None
    assert not case.foreign
    facts = document["free"]
    assert rehearsed["free"] == facts
    assert [row["page"] for row in rehearsed["groups"]] == [r["page"] for r in document["groups"]]

    left = place.names()
    chosen = {group for group, named in case.files.items() if not named.keys() & left}
    gone = {name for group in chosen for name in case.files[group]}
    assert names - left == gone, "a group is half gone"
    assert chosen <= candidates
    assert case.filtered or not candidates or chosen < candidates, "all would leave"

    values = place.values()
    freed = sum(map(case.size, chosen))
    assert facts["bytes"] == document["bytes"] == freed
    assert (facts["kept_pages"], facts["kept_bytes"]) == (
        len(candidates - chosen),
        sum(map(case.size, candidates - chosen)),
    )

    spans = case.spans()

    def usefulness(group: Group) -> tuple[Any, ...]:
        value, complete = values.get(group[0]), not case.incomplete(group)
        if value is None:
            return (complete, False, spans[case.used(group)], -case.newest(group))
        return (complete, True, *value)

    event(f"{case.order}, {'short' if freed < case.asked else 'enough'}")
    if freed < case.asked:
        assert chosen == candidates
    else:
        worst = max(map(usefulness, chosen))
        assert all(usefulness(kept) >= worst for kept in candidates - chosen)
        last = max(case.size(group) for group in chosen if usefulness(group) == worst)
        assert freed - last < case.asked, "the last group was not needed"
    if case.order != "trace":
        return
    useful = {group for group in chosen if not case.incomplete(group)}
    for names_of in case.chains:
        tail = dropwhile(lambda group: group not in useful, ((name, OWN) for name in names_of))
        assert set(tail) & candidates <= chosen, "a prefix left before its tail"
    known = {(name, OWN) for name in values} & candidates
    assert facts["valued_pages"] == len(known)
    assert facts["valued_pages_removed"] == len(known & chosen)
    assert facts["usable_tokens_before"] == before
    assert facts["usable_tokens_after"] == place.usable()
