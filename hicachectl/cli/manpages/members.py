"""Members of the JSON documents that commands print, as hicachectl-output(7) lists them.

The types follow from the structs of the documents and of their rows. `texts/members.txt` has a
section for each struct, which says what each member means, and when it is null or absent.
"""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import UnsetType

from hicachectl.bench.report import BenchDocument
from hicachectl.cli.commands.explain import ExplainDocument
from hicachectl.cli.commands.pack import InfoDocument, RepairDocument
from hicachectl.cli.prose import Item, prose
from hicachectl.doctor.examine import DoctorDocument
from hicachectl.move.difference_outcome import DiffDocument
from hicachectl.move.migration_outcome import MigrationDocument
from hicachectl.move.quarantine import PurgeDocument, RunsDocument
from hicachectl.move.results import PinDocument, RemovalDocument, RestoreDocument
from hicachectl.pages.listing import ObjectsDocument, PagesDocument, SummaryDocument
from hicachectl.parts.results import RunDocument
from hicachectl.parts.runs import RunDirectoriesDocument, RunDirectoryPurge, RunStatusDocument
from hicachectl.prewarming.outcome import PrewarmDocument
from hicachectl.requests.measuring import HitsDocument, HitsTotals
from hicachectl.simulation.simulate import SimulateDocument
from hicachectl.verification.inspection import ShowDocument
from hicachectl.verification.report import VerifyDocument

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_KINDS: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "text"}
_LISTS: dict[Any, str] = {int: "list of integers", str: "list of texts"}


class Member(NamedTuple):
    """A member of a document.

    path: place of the member, with [] for each entry of a list and NAME for each name of an object
        whose names vary.
    kind: type of the value in words.
    text: meaning of the member.
    null: whether the member can be null.
    optional: whether only some documents or rows have the member.
    """

    path: str
    kind: str
    text: str
    null: bool
    optional: bool


class Document(NamedTuple):
    """The JSON document of a command.

    form: struct of the document.
    rows: member that lists the rows of jsonl, csv, parquet and arrow; "" if these formats
        print one row, or the command does not have these formats.
    divided: whether a run in parts adds members.
    """

    title: str
    form: type
    rows: str = ""
    divided: bool = False

    @property
    def members(self) -> tuple[Member, ...]:
        """The members in the order of the page: an object stands before its own members.

        A written document always has its rows, so the page never calls them null.
        """
        found = [
            member._replace(null=False, optional=False) if member.path == self.rows else member
            for member in members_of(self.form)
        ]
        of_runs = members_of(RunDocument) if self.divided else ()
        return (*found, *(member._replace(optional=True) for member in of_runs))


DOCUMENTS = (
    Document("doctor", DoctorDocument, "checks"),
    Document("ls", PagesDocument, "pages"),
    Document("ls --objects", ObjectsDocument, "objects"),
    Document("ls --summary", SummaryDocument, "summary"),
    Document("show", ShowDocument, "objects"),
    Document("verify", VerifyDocument, "findings", divided=True),
    Document("hits", HitsDocument, "chains"),
    Document("hits --summary", HitsTotals, "causes"),
    Document("simulate", SimulateDocument, "capacities"),
    Document("bench", BenchDocument, "rows"),
    Document("migrate", MigrationDocument, "problems", divided=True),
    Document("diff", DiffDocument, "differences"),
    Document("prewarm", PrewarmDocument, divided=True),
    Document("rm", RemovalDocument, "groups"),
    Document("pin", PinDocument, "groups"),
    Document("unpin", PinDocument, "groups"),
    Document("restore", RestoreDocument, "groups"),
    Document("quarantine list", RunsDocument, "runs"),
    Document("quarantine purge", PurgeDocument, "runs"),
    Document("runs list", RunDirectoriesDocument, "runs"),
    Document("runs status", RunStatusDocument, "results"),
    Document("runs purge", RunDirectoryPurge, "runs"),
    Document("pack info", InfoDocument),
    Document("pack repair", RepairDocument),
    Document("explain", ExplainDocument, "codes"),
)


@cache
def texts_of(section: str) -> Mapping[str, str]:
    """Return the texts of a struct's members. `@NAME` includes the texts of another struct."""
    texts: dict[str, str] = {}
    for block in prose("members").get(section, ()):
        if isinstance(block, Item):
            texts[block.term] = block.text
        else:
            texts |= texts_of(block.removeprefix("@"))
    return texts


def members_of(form: type, path: str = "") -> Iterator[Member]:
    """Yield the members of a struct and their own members. path: first part of their paths."""
    for name, hint in get_type_hints(form, include_extras=True).items():
        yield from _member(f"{path}{name}", hint, form, name)


def _member(path: str, hint: Any, form: type, name: str) -> Iterator[Member]:
    """Yield a member and its own members. name: name of the member in the texts of the form."""
    optional = get_origin(hint) is NotRequired
    if optional:
        (hint,) = get_args(hint)
    others = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    others = tuple(get_args(one)[0] if get_origin(one) is Annotated else one for one in others)
    null, optional = NoneType in others, optional or UnsetType in others
    (hint,) = (one for one in others if one not in (NoneType, UnsetType))
    entry = get_args(hint)[-1] if get_args(hint) else hint
    is_list, is_dict = get_origin(hint) is list, get_origin(hint) is dict
    kinds = _LISTS if is_list else {} if is_dict else _KINDS
    kind = kinds.get(entry, "list of rows" if is_list else "object")
    yield Member(path, kind, texts_of(form.__name__)[name], null, optional)
    if is_dict and entry in _KINDS:
        yield from _member(f"{path}.NAME", entry, form, f"{name}.NAME")
    elif entry not in _KINDS:
        yield from members_of(entry, f"{path}{'[]' * is_list}{'.NAME' * is_dict}.")
