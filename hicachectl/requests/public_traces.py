"""Read public traces of block ids: kvcache-simulator's, Bailian's, and LMCache's lookup logs.

Mooncake's and AIPerf's records with chained hash_ids are read as hicachectl's own form. Sources:

- kvcache-simulator 0.1.3: trace.py
- alibaba-edu/qwen-bailian-usagetraces-anon: README.md
- LMCache 0.5.6: v1/mp_observability/subscribers/logging/lookup_hash.py
- LMCache 0.5.6: v1/lookup_client/record_strategies/file_hash.py
- HPMLL/BurstGPT: README.md
- Azure: AzureLLMInferenceDataset2023.md
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.forms import decode
from hicachectl.requests.forms import SECONDS, Form, Request, members, time_of, token_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicachectl.requests.forms import Context
    from hicachectl.requests.inputs import Line

    Read = Callable[[Line], Iterable[Request]]

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_BAILIAN_TOKENS = 16
_TEXT_IDS = re.compile(rb'"hash_ids"\s*:\s*\[\s*"')
_LENGTHS = re.compile(rb"\s*timestamp,(.*,)?(request tokens|contexttokens),", re.IGNORECASE)


class _Simulated(msgspec.Struct):
    """A record of kvcache-simulator's traces, which have no times.

    block_tokens: number of tokens of each block.
    """

    hash_ids: list[int | str]
    input_length: _Size
    output_length: int | None = None
    block_size: _Size | None = None
    block_tokens: list[_Size] | None = None


class _Chat(msgspec.Struct):
    """A record of Bailian's traces.

    parent_chat_id: request that this request continues; -1 if there is none.
    """

    chat_id: _Int64
    hash_ids: list[_Int64]
    timestamp: float
    input_length: int
    output_length: int | None = None
    parent_chat_id: _Int64 = -1


class _Lookup(msgspec.Struct):
    """A record of LMCache's lookup logs. Only full chunks have hashes.

    chunk_size: number of tokens of a chunk; 0 if LMCache does not know it.
    """

    chunk_hashes: list[str]
    timestamp: float
    seq_len: int | None = None
    chunk_size: int = 0
    model_name: str | None = None


_SIMULATED = msgspec.json.Decoder(_Simulated)
_CHAT = msgspec.json.Decoder(_Chat)
_LOOKUP = msgspec.json.Decoder(_Lookup)


class PrefixIds:
    """Numbers for blocks with their prefixes, made from ids that depend on the block alone."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int | str, int | str], int] = {}

    def of(self, blocks: Iterable[int | str], root: str = "") -> list[int]:
        """Return the number of each block of a chain.

        root: text that tells chains apart; equal blocks of different roots get different numbers.
        """
        numbers, chain = self._numbers, []
        before: int | str = root
        for block in blocks:
            before = numbers.setdefault((before, block), len(numbers))
            chain.append(before)
        return chain


def _simulated(context: Context) -> Read:
    prefixes = PrefixIds()

    def read(line: Line) -> Iterable[Request]:
        found: _Simulated = decode(_SIMULATED, line.data)
        tokens, size = found.input_length, found.block_size or context.block_size or 0
        if sizes := found.block_tokens:
            size = size or sizes[0]
            tokens = sum(sizes)
            if len(sizes) != len(found.hash_ids):
                raise FormatError(
                    f"block_tokens: has {len(sizes)} numbers, but hash_ids has "
                    f"{len(found.hash_ids)}"
                )
            if sizes[-1] > size or any(other != size for other in sizes[:-1]):
                raise FormatError(
                    f"block_tokens: has other blocks than those of {size} tokens; only the last "
                    "block of a prompt may be smaller"
                )
        return (
            Request(
                line.where,
                [],
                block_ids=prefixes.of(map(str, found.hash_ids)),
                input_tokens=tokens,
                output_tokens=token_count(found.output_length, "output_length"),
                start=line.place,
                block_tokens=size,
            ),
        )

    return read


def _bailian(context: Context) -> Read:
    prefixes = PrefixIds()
    sessions: dict[int, int] = {}

    def read(line: Line) -> Iterable[Request]:
        found: _Chat = decode(_CHAT, line.data)
        chat, parent = found.chat_id, found.parent_chat_id
        sessions[chat] = session = chat if parent == -1 else sessions.get(parent, parent)
        return (
            Request(
                line.where,
                [],
                block_ids=prefixes.of(found.hash_ids),
                time=time_of(found.timestamp),
                input_tokens=token_count(found.input_length, "input_length"),
                output_tokens=token_count(found.output_length, "output_length"),
                start=line.place,
                block_tokens=context.block_size or _BAILIAN_TOKENS,
                session=str(session),
            ),
        )

    return read


def _lmcache(context: Context) -> Read:
    prefixes = PrefixIds()

    def read(line: Line) -> Iterable[Request]:
        found: _Lookup = decode(_LOOKUP, line.data)
        size = token_count(found.chunk_size, "chunk_size") or context.block_size or 0
        if not size:
            context.note("Without chunk_size", "give --block-size with LMCache's chunk_size")
        return (
            Request(
                line.where,
                [],
                block_ids=prefixes.of(found.chunk_hashes, found.model_name or ""),
                time=time_of(found.timestamp),
                input_tokens=token_count(found.seq_len, "seq_len"),
                start=line.place,
                block_tokens=size,
                model=found.model_name,
            ),
        )

    return read


def _lengths(_: Context) -> Read:
    def read(line: Line) -> NoReturn:
        raise UsageError(
            f"{line.file}: has only lengths and no prefixes, so nothing tells which tokens repeat; "
            "give a trace with hash_ids, token ids or texts"
        )

    return read


def _has_text_ids(line: bytes) -> bool:
    return _TEXT_IDS.search(line) is not None


FORMS = (
    Form(
        "bailian",
        "Bailian's traces",
        lambda line: members(line) >= {"chat_id", "hash_ids"},
        _bailian,
        unit=SECONDS,
    ),
    Form(
        "kvcache-simulator",
        "traces for kvcache-simulator",
        lambda line: (
            (found := members(line)) >= {"hash_ids", "block_tokens"}
            or ("hash_ids" in found and _has_text_ids(line))
        ),
        _simulated,
    ),
    Form(
        "lmcache",
        "LMCache's lookup logs",
        lambda line: "chunk_hashes" in members(line),
        _lmcache,
        unit=SECONDS,
    ),
)

# This form is tried last.
LENGTHS = Form(
    "lengths",
    "lengths only (BurstGPT, Azure), which are refused",
    lambda line: _LENGTHS.match(line) is not None or "input_length" in members(line),
    _lengths,
)
