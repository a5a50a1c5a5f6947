"""Read SGLang's request log and its metrics files, as servers and containers write them.

A line of the log has a bracketed time before its JSON value, and stands among other lines of the
server. Docker's json-file driver and Kubernetes' CRI wrap each line in a line of their own, and cut
long lines. Sources, in SGLang's srt:

- utils/request_logger.py :: RequestLogger
- utils/log_utils.py :: log_json
- observability/request_metrics_exporter.py :: FileRequestMetricsExporter
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from hicachectl.backends.disk.bounded import MAX_LINE_BYTES
from hicachectl.formats.errors import FormatError
from hicachectl.requests.forms import SECONDS, Form, Prompted, Request, seeding_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hicachectl.requests.forms import Context
    from hicachectl.requests.inputs import Line

# `2026-11-28T13:00:00.123456789Z stdout F …`. After a line with P instead of F, the next line
# continues it.
_CRI = re.compile(rb"[0-9T:.+Z-]{20,40} (stdout|stderr) ([PF])(?: |$)")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_RECORD = re.compile(rb'\{"timestamp": "[^"]*", "event": "request\.(\w+)')
_AS_TEXT = re.compile(rb"(?:^|\] )(?:Finish|Receive): obj=\w+ReqInput\(")
_MEASURED = re.compile(rb'\{"request_parameters": "')
_HEALTH_CHECK = "HEALTH_CHECK"  # prefix of the rid (srt/constants.py :: HEALTH_CHECK_RID_PREFIX)
_CUT = "..."
_CUT_AT = 1024  # characters of a text, or items of a list, that stay on each side of "..."
_SHOW_ALL = 'set --log-requests-level 3, or POST /configure_logging {"log_requests_level": 3}'

# What a log lacks, and the remedy, as `Context.note` takes them.
_NO_TOKENS = "Without tokens, since the log has level 0 or 1", _SHOW_ALL
_SHORTENED = "With a prompt that the log has cut at level 2", _SHOW_ALL
_NOT_JSON = "Logged as text", "set --log-requests-format json"
_DAMAGED = "On damaged lines", "log to a directory (--log-requests-target DIR), not to stdout"
_CUT_OFF = "On damaged lines", "they are left out; the server may have ended while it wrote them"
_OTHER_BYTES = (
    "With images, video, audio or embeddings, whose bytes name the pages",
    "they are left out, since no log has these bytes",
)
_NOT_WHOLE = (
    "With only a part of the prompt, as in sessions that go on (session_params)",
    "they are left out",
)
_WARM_UP = (
    "Made by SGLang before it generates n samples, and logged without their adapter",
    "they are left out",
)
_LOCAL_TIME = (
    "With a time that has no zone",
    "it counts as local time of this machine; set TZ to the zone of the server",
)


class _Docker(msgspec.Struct):
    """A line of Docker's json-file driver, which cuts lines at 16 KiB."""

    log: str
    stream: str = "stdout"


_DOCKER = msgspec.json.Decoder(_Docker)


def unwrapped(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines that a program wrote, without the wrapping of container logs.

    The pieces of a line that a container has cut are joined. The joined line has the place of its
    first piece.
    """
    begun: dict[tuple[str, str], tuple[Line, bytearray]] = {}
    for line in lines:
        data = line.data
        if data.startswith(b'{"log":'):
            try:
                found = _DOCKER.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                yield line
                continue
            data, stream = found.log.encode(), f"docker {found.stream}"
            goes_on = not found.log.endswith("\n")
        elif data[:1].isdigit() and (match := _CRI.match(data)):
            data, stream = data[match.end() :].rstrip(b"\r\n"), f"cri {match[1].decode()}"
            goes_on = match[2] == b"P"
        else:
            yield line
            continue
        place = line.file.partition(".log")[0], stream  # a line can go on in the next rotated file
        if not goes_on and place not in begun:
            yield line._replace(data=data)
            continue
        first, written = begun.setdefault(place, (line, bytearray()))
        written += data
        if not goes_on or len(written) > MAX_LINE_BYTES:
            del begun[place]
            yield first._replace(data=bytes(written))
    for first, written in begun.values():
        yield first._replace(data=bytes(written))


class _Details(msgspec.Struct):
    device: _Count = 0
    host: _Count = 0
    storage: _Count = 0


class _Reason(msgspec.Struct):
    type: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    """Members of `meta_info` in an answer. Times are in Unix seconds, durations in seconds."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count = -1
    cached_tokens: _Count | None = None
    cached_tokens_details: _Details | None = None
    finish_reason: _Reason | None = None
    dp_rank: int | None = None
    e2e_latency: float = 0.0
    request_received_ts: float | None = None
    response_sent_to_client_ts: float | None = None

    @property
    def refused(self) -> bool:
        """Whether the server refused the request before it looked for its pages."""
        reason = self.finish_reason
        return reason is not None and reason.type == "abort" and reason.status_code is not None

    @property
    def cached(self) -> tuple[int, int, int] | None:
        """Number of prompt tokens that each tier served; (sum, -1, -1) if the tiers are unknown."""
        if (found := self.cached_tokens_details) is not None:
            return found.device, found.host, found.storage
        if self.cached_tokens is None:
            return None
        return (self.cached_tokens, -1, -1) if self.cached_tokens else (0, 0, 0)


class _Out(msgspec.Struct):
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    output_ids: list[int | str] | None = None
    prompt_token_ids: list[int | str] | None = None


class _Sampling(msgspec.Struct):
    n: int | None = None


class _Object(msgspec.Struct):
    """Members of a request (srt/managers/io_struct.py :: GenerateReqInput)."""

    rid: str | None = None
    input_ids: list[int | str] | None = None
    text: msgspec.Raw = msgspec.Raw(b"null")
    sampling_params: _Sampling | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None
    lora_id: str | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    session_id: str | None = None
    stream: bool = False

    @property
    def has_other_bytes(self) -> bool:
        """Whether other bytes than the tokens decide the names of the pages."""
        return bool(self.image_data or self.video_data or self.audio_data or self.input_embeds)


class _Logged(msgspec.Struct):
    """A record of the log."""

    timestamp: str
    obj: _Object
    out: _Out


class _Measured(_Meta):
    """A record of the metrics files."""

    request_parameters: str = ""


_LOG_RECORD = msgspec.json.Decoder(_Logged)
_METRICS_RECORD = msgspec.json.Decoder(_Measured)
_PARAMETERS = msgspec.json.Decoder(_Object)
_TEXT = msgspec.json.Decoder(str | None)
_FAULTS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _log_reader(context: Context) -> Callable[[Line], Iterable[Request | Prompted]]:
    def read(line: Line) -> Iterable[Request | Prompted]:
        match = _RECORD.search(line.data)
        if match is None:
            if _MEASURED.match(line.data):
                raise FormatError("is no line of a request log")
            if (text := _AS_TEXT.search(line.data)) and b"Finish" in text[0]:
                context.note(*_NOT_JSON)
            return ()
        if match[1] != b"finished":
            context.unfinished += match[1] == b"received"
            return ()
        try:
            record = _LOG_RECORD.decode(line.data[match.start() :])
            return _requests(line, record.obj, record.out, record.timestamp, context)
        except _FAULTS:
            context.note(*_DAMAGED)
            return ()

    return read


def _metrics_reader(context: Context) -> Callable[[Line], Iterable[Request | Prompted]]:
    latest: float | None = None

    def read(line: Line) -> Iterable[Request | Prompted]:
        nonlocal latest
        try:
            record = _METRICS_RECORD.decode(line.data)
            obj = _PARAMETERS.decode(record.request_parameters)
            # The samples of a streamed request (n > 1) can lack the time. An earlier record has it.
            if (time := _arrival(record, None, context, streamed=obj.stream)) is None:
                record.request_received_ts = latest
            else:
                latest = time
            return _requests(line, obj, _Out(record), None, context)
        except _FAULTS as error:
            if _is_logged(line.data):
                raise FormatError("is no line of a metrics file") from error
            context.note(*_CUT_OFF)
            return ()

    return read


def _requests(
    line: Line, obj: _Object, out: _Out, timestamp: str | None, context: Context
) -> Iterable[Request | Prompted]:
    """Return the request of a record, if the record shows its pages."""
    meta, tokens = out.meta_info, out.meta_info.prompt_tokens
    if tokens is None or meta.refused or (obj.rid or "").startswith(_HEALTH_CHECK):
        return ()
    ids = out.prompt_token_ids or obj.input_ids
    text = _TEXT.decode(obj.text) if ids is None else None
    if (lack := _lack_of(obj, meta, ids, text)) is not None:
        context.note(*lack)
        return ()
    context.note_adapter(obj.lora_id)
    outputs = out.output_ids or ()
    # If the record has only a part of the answer, leave the answer out.
    if len(outputs) != meta.completion_tokens or _CUT in outputs:
        outputs = ()
    request = Request(
        line.where,
        ids or [],  # type: ignore[arg-type]
        seeding_key(obj.extra_key, obj.lora_id),
        obj.cache_salt or None,
        time=_arrival(meta, timestamp, context, streamed=obj.stream),
        input_tokens=tokens,
        output_tokens=meta.completion_tokens,
        start=line.place,
        output_ids=outputs,  # type: ignore[arg-type]
        cached=meta.cached,
        adapter=obj.lora_path or obj.lora_id,
        session=obj.session_id,
        server=_server(line.file, meta.dp_rank),
    )
    return (request if text is None else Prompted(text, request, tokens),)


def _lack_of(
    obj: _Object, meta: _Meta, ids: list[int | str] | None, text: str | None
) -> tuple[str, str] | None:
    """Return why a record does not show the pages of its request; None if it shows them."""
    samples = 1 if obj.sampling_params is None else obj.sampling_params.n or 1
    if obj.has_other_bytes:
        return _OTHER_BYTES
    if samples > 1 and not meta.completion_tokens:
        return _WARM_UP
    if ids is None:
        if text is None:
            return _NO_TOKENS
        was_cut = len(text) == 2 * _CUT_AT + len(_CUT) and text[_CUT_AT:-_CUT_AT] == _CUT
        return _SHORTENED if was_cut else None
    if _CUT in ids:
        return _SHORTENED
    return None if len(ids) == meta.prompt_tokens else _NOT_WHOLE


def _arrival(
    meta: _Meta, timestamp: str | None, context: Context, *, streamed: bool
) -> float | None:
    """Return the time at which a request arrived, in Unix seconds.

    SGLang writes the time of arrival only with --enable-metrics. Otherwise, return the time of the
    first piece of a streamed answer, or the time of any other answer minus its duration. If the
    record has neither, return the time of its line in the log minus the duration; None without such
    a time.
    """
    if meta.request_received_ts is not None:
        return meta.request_received_ts
    if (sent := meta.response_sent_to_client_ts) is not None:
        return sent if streamed else sent - meta.e2e_latency
    if timestamp is None:
        return None
    try:
        ended = datetime.fromisoformat(timestamp)
    except ValueError as error:
        raise FormatError(f"timestamp: {timestamp!a:.60} is not ISO 8601") from error
    if ended.tzinfo is None:
        context.note(*_LOCAL_TIME)
    return ended.timestamp() - meta.e2e_latency


def _server(file: str, rank: int | None) -> str:
    """Return the name of the server that wrote a file: HOST_0 for HOST_0.log.2026-11-28_15."""
    path = PurePath(file)
    name = path.name.partition(".log")[0]
    if name.startswith("sglang-request-metrics-"):  # hourly files in the server's directory
        name = path.parent.name or name
    elif name.isdigit():  # /var/log/pods/NAMESPACE_POD_UID/CONTAINER/0.log
        name = path.parent.parent.name or name
    return name if rank is None else f"{name}/dp{rank}"


def _is_logged(line: bytes) -> bool:
    return _RECORD.search(line) is not None or _AS_TEXT.search(line) is not None


FORMS = (
    Form("sglang-log", "SGLang's request log", _is_logged, _log_reader, SECONDS, in_log=True),
    Form(
        "sglang-metrics",
        "SGLang's metrics files",
        lambda line: _MEASURED.match(line) is not None,
        _metrics_reader,
        SECONDS,
        in_log=True,
    ),
)
