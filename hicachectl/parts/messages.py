"""Messages between a driver and the processes on other nodes that do stages of its parts.

A stage opens the job, or does the work of a part. Each message is a frame: eight bytes with the
length (little-endian), then MessagePack. Tables are Arrow IPC streams.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

import msgspec
import pyarrow as pa
from msgspec import Struct

from hicachectl.parts.records import StageResult

if TYPE_CHECKING:
    from collections.abc import Iterator

Stage = Literal["open", "work"]
LENGTH_BYTES = 8
_ROWS_AT_ONCE = 16_384


class Outcome(Struct, tag=True):
    """How a stage ended; its tables were sent before as pieces. facts: JSON."""

    facts: bytes = b"{}"
    settled: bool = True


class Order(Struct, tag=True, kw_only=True):
    """A stage to do. Members without a description are those of `PartInput`.

    job: pickled function that opens the job. It comes from the driver, as the code of a Ray task
        does.
    manifest: the manifest as JSON.
    age: seconds since the listing when the order was written.
    spent: seconds since the driver began.
    """

    stage: Stage
    job: bytes
    manifest: bytes = b""
    part: int = 0
    owner: str = ""
    divided: int = 1
    parts_here: int = 1
    age: float = 0.0
    spent: float = 0.0
    tables: dict[str, bytes] = {}


class Piece(Struct, tag=True):
    """Rows of a result's table."""

    table: str
    content: bytes


class Moved(Struct, tag=True):
    """Progress: new bytes, and the total of the part."""

    new: int
    total: int


class Failed(Struct, tag=True):
    """A stage failed. name: class in `formats.errors`; "" for a bug, with its traceback as text."""

    name: str
    text: str


class Lost(Struct, tag=True):
    """The process of a stage ended without an outcome. text: how."""

    text: str


Answer = Outcome | Piece | Moved | Failed | Lost
_answers = msgspec.msgpack.Decoder(Answer)
_orders = msgspec.msgpack.Decoder(Order)


def frame(message: Order | Answer) -> bytes:
    """Return a message as a frame."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def parse_order(content: bytes) -> Order:
    """Parse an order without its length. Raises msgspec.DecodeError."""
    return _orders.decode(content)


def parse_answer(content: bytes) -> Answer:
    """Parse an answer without its length. Raises msgspec.DecodeError."""
    answer: Answer = _answers.decode(content)
    return answer


def table_bytes(table: pa.Table) -> bytes:
    """Return a table as an IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def table_from(content: bytes) -> pa.Table:
    """Read a table from an IPC stream."""
    return pa.ipc.open_stream(content).read_all()


def outcome_of(result: StageResult) -> Outcome:
    """Return a result without its tables."""
    return Outcome(json.dumps(result.facts).encode(), result.settled)


def pieces_of(result: StageResult) -> Iterator[Piece]:
    """Yield the tables of a result; each has at least one piece."""
    for name, table in result.tables.items():
        for start in range(0, max(len(table), 1), _ROWS_AT_ONCE):
            yield Piece(name, table_bytes(table.slice(start, _ROWS_AT_ONCE)))


def result_from(outcome: Outcome, tables: dict[str, pa.Table]) -> StageResult:
    """Return a result with its tables."""
    return StageResult(json.loads(outcome.facts), tables, outcome.settled)
