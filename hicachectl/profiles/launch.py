"""Read the command that launches a server, from a text, a script, a container or a process.

Nothing is executed.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.backends.disk.weights import hub_snapshot
from hicachectl.formats.documents import decoded, parse_json, parse_json_object, parse_toml, shown
from hicachectl.formats.errors import FormatError, ProfileError, UsageError
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.flag_table import OPTIONS
from hicachectl.formats.models.launch import (
    WAYS_OUT,
    config_arguments,
    launched_deployment,
    logged_deployment,
    parse_arguments,
)
from hicachectl.formats.models.recorded import recorded
from hicachectl.formats.wording import failed, install_step
from hicachectl.profiles.server import ServerProfile, is_file, local_models, read_models
from hicachectl.profiles.shell_words import SEVERAL_WORDS, Command, ScriptReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Most bytes of a script, a file of flags or a process's command line.
_MAX_BYTES = 256 << 10
_DEEPEST_SCRIPT = 4  # most scripts inside one another, such as `bash -c` in `bash -c`
_DEEPEST = 64  # most lists and mappings of YAML inside one another
_MOST_YAML = 4 << 20  # most characters of YAML, including what aliases repeat
_PROCESS = re.compile(r"pid:([0-9]{1,10})")
_VARIABLE = re.compile(r"(?:--env=|-e)?(SGLANG_\w+)=(.*)", re.DOTALL)  # `env` and `docker run`
# References that Kubernetes, Compose and Helm replace in the words of a container.
_REFERENCE = re.compile(r"(?<!\$)\$\(([A-Za-z_]\w*)\)|\$\{[^}]*\}|\{\{.*?\}\}")
_SET_ELSEWHERE = "the file does not set it"
_LOGGED = re.compile(r"server_args=((?:ServerArgs\(|\{).*)")
_MOST_LAUNCHES = 16  # most launch commands for which profiles are made
_HUGE_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxX_:]{1000}")
_MODULE = "sglang.launch_server"
# Programs that do not pass on the environment that a script exports.
_OWN_ENVIRONMENT = ("docker", "kubectl", "mpirun", "nerdctl", "podman", "ssh", "sudo")
_EXAMPLE = "python -m sglang.launch_server … or sglang serve …"
_EXTRA = "hicache_storage_backend_extra_config"


@dataclass(frozen=True, slots=True)
class Launch:
    """A server's command line, or the arguments that its log shows.

    arguments: words after the program.
    environment: SGLang's environment variables that the command sets.
    folder: working directory of the server.
    root: root directory of the server, as this process sees it.
    unknown: parts of the words and the environment whose value is unknown, each with the reason.
    logged: fields of ServerArgs in a server's log, after SGLang's changes; None without a log.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    root: Path = Path("/")
    unknown: Mapping[str, str] = field(default_factory=dict)
    logged: Mapping[str, Any] | None = None

    def path(self, text: str) -> Path:
        """Return a path of the server as this process sees it."""
        path = self.folder / text
        return self.root / path.relative_to("/") if path.is_absolute() else path


def profile_from_launch(
    text: str,
    *,
    model_config: Path | None = None,
    draft_model_config: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ServerProfile:
    """Return the profile of the server that a launch command starts.

    text: see `read_launches`.
    `profile_of_replies` explains the other arguments.
    Raises UsageError if there is no launch command, or if launch commands give different profiles.
    Raises FormatError, and ProfileError that names the faulty flag.
    """
    launches = read_launches(text)
    if len(launches) <= _MOST_LAUNCHES:
        found: dict[Any, ServerProfile] = {}
        for launch in launches:
            one = _profile_of(launch, model_config, draft_model_config, overrides or {})
            server = one.deployment
            weights = server.model_path, server.draft_model_path, repr(server.settings)
            found.setdefault((one.profile, weights, server.tagged), one)
        if len(found) == 1:
            return next(iter(found.values()))
    raise UsageError(
        f"--launch: has {len(launches)} launch commands of different servers; give one of them"
    )


def _profile_of(
    launch: Launch,
    model_config: Path | None,
    draft_model_config: Path | None,
    given: Mapping[str, Any],
) -> ServerProfile:
    version = given.get("sglang", "")
    # An option can state a value that is unknown in the command.
    replaced = {flag.argument: given[flag.field] for flag in OPTIONS if flag.field in given}
    replaced.pop("", None)
    if launch.logged is not None:
        fields = {**launch.logged, **replaced}
        server = logged_deployment(fields, unknown=launch.unknown, version=version)
    else:
        server = launched_deployment(
            {**_stated(launch), **replaced},
            {**launch.environment, **{n: v for n, v in replaced.items() if n.isupper()}},
            unknown=launch.unknown,
            version=version,
        )

    def places(name: str) -> Iterator[Path]:
        """Yield the places of a model: its path on the server, and this user's Hub cache."""
        yield launch.path(name)
        if snapshot := hub_snapshot(name):
            yield snapshot

    paths = local_models(server, (model_config, draft_model_config), places)
    config, flags = read_models(paths, replace(server.flags, **given), server.settings)
    profile = profile_from_config(config, flags, source=str(paths[0]))
    return ServerProfile(profile, server, tuple(server.notes))


def read_launches(text: str) -> list[Launch]:
    """Return the distinct launch commands of a text, at least one.

    text: one of these:

    - the command as in a shell, or its words as a JSON list
    - the path of a file, with or without "@", that has a script, such a list, a server's log, or
    YAML with a container
    - `pid:N` for a running process

    Raises UsageError, FormatError.
    """
    if match := _PROCESS.fullmatch(text):
        return _of_process(int(match[1]))
    if not text.startswith("@") and not is_file(Path(text)):
        try:
            return _some(_launches(text), "--launch", text)
        except FormatError as error:
            raise FormatError(f"--launch: {error}") from error
    path = Path(text.removeprefix("@")).expanduser()
    content = decoded(read_bounded(path, _MAX_BYTES, what="a launch script"), str(path))
    try:
        is_yaml = path.suffix.lower() in (".yaml", ".yml")
        launches = _launches_of_yaml(content) if is_yaml else _launches(content)
        return _some(launches, str(path), content)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def _some(launches: Iterator[Launch], where: str, text: str) -> list[Launch]:
    # A script can have thousands of launches. Equal launches have the same text, so a dict by text
    # keeps each distinct launch once.
    by_text = {repr((one.arguments, dict(one.environment), one.logged)): one for one in launches}
    found = list(by_text.values())
    if found:
        return found
    none = f"{where}: has no command that launches an SGLang server; give one, such as {_EXAMPLE}"
    if "sglang" in text:
        none += (
            f"; here-documents (<<) and variables that the text can change are not read: {WAYS_OUT}"
        )
    raise UsageError(none)


def _launches(text: str) -> Iterator[Launch]:
    """Yield the launch commands of a shell script, a JSON list of words, or a server's log."""
    if logged := list(_LOGGED.finditer(text)):
        for match in logged:
            yield _of_log(match[1])
        return
    # A text that is a list ends with the bracket of the list. A text that begins with a shell's
    # test, `[ … ]`, ends with a command.
    if text.lstrip().startswith("[") and text.rstrip().endswith("]"):
        words = parse_json(text, "the list of words")
        for word in words:
            if not isinstance(word, str):
                raise FormatError(f"the list of words: {shown(word)} is no text; put it in quotes")
        yield from _of_words(Command(tuple(words), {}, {}), {})
        return
    for command in ScriptReader().commands(text):
        yield from _of_words(command, {})


def _of_words(
    command: Command, variables: Mapping[str, str | None], depth: int = 0
) -> Iterator[Launch]:
    """Yield the launch of a command that starts a server, or the launches in the command's scripts.

    A script is a word such as the word after `bash -c`, or the words after `eval`.

    variables: environment of the script, as far as it is known.
    depth: number of scripts around the command.
    """
    words = command.words
    found = None if "eval" in words else _server_arguments(words)
    before = words if found is None else words[: len(words) - len(found)]
    environment, unknown = dict(command.environment), dict(command.unknown)
    if any(word.rsplit("/", 1)[-1] in _OWN_ENVIRONMENT for word in before):
        unknown |= {f"${name}": "the program before the command decides" for name in environment}
        environment = {name: f"${name}" for name in environment}
    environment |= {match[1]: match[2] for word in before if (match := _VARIABLE.fullmatch(word))}
    if found:
        yield Launch(found, environment, unknown=unknown)
        return
    given = {name: None if value in unknown else value for name, value in environment.items()}
    scripts = [" ".join(words[words.index("eval") + 1 :])] if "eval" in words else words
    for script in scripts if depth < _DEEPEST_SCRIPT and found is None else ():
        if "sglang" in script and len(script.split()) > 1:
            # Unknown text can change any variable.
            is_known = not any(part in script for part in unknown)
            reader = ScriptReader({**variables, **given} if is_known else None, trusts=is_known)
            for inner in reader.commands(script):
                yield from _of_words(inner, {}, depth + 1)


def _of_log(text: str) -> Launch:
    """Return the launch in a line of a server's log: `ServerArgs(name=value, …)`, or a dict."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise FormatError("the text after server_args= is not whole; give the whole line") from None
    pairs: list[tuple[Any, ast.expr]] = []
    if isinstance(parsed, ast.Call):
        pairs = [(keyword.arg, keyword.value) for keyword in parsed.keywords]
    elif isinstance(parsed, ast.Dict):
        pairs = [
            (getattr(key, "value", None), value)
            for key, value in zip(parsed.keys, parsed.values, strict=True)
        ]
    fields: dict[str, Any] = {}
    unknown = {}
    for name, value in pairs:
        try:
            fields[str(name)] = ast.literal_eval(value)
        except ValueError:  # the value is an object of SGLang
            fields[str(name)] = ast.unparse(value)
            unknown[fields[str(name)]] = "the log does not show its value"
    return Launch((), unknown=unknown, logged=fields)


def _server_arguments(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words after the program that launches a server; None if no word launches one.

    Words that begin with --model are the arguments that a container gives to its entry point.
    """
    if words and words[0].startswith("--model"):
        return tuple(words)
    for at, word in enumerate(words):
        if word.endswith("launch_server.py") or words[at - 1 : at + 1] == ("-m", _MODULE):
            return tuple(words[at + 1 :])
        is_cli = word.rsplit("/", 1)[-1] in ("sglang", "sglang.cli.main")
        if is_cli and tuple(words[at + 1 : at + 2]) == ("serve",):
            return _of_serve(words[at + 2 :])
    return None


def _of_serve(words: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of `sglang serve`, which may have the model as first word.

    Source: SGLang cli/serve.py.
    """
    kept, after = [], ""
    for word in words:
        if "--model-type" not in (word.split("=", 1)[0], after):
            kept.append(word)
        after = word
    if kept and not kept[0].startswith("-"):
        kept.insert(0, "--model-path")
    return tuple(kept)


def _launches_of_yaml(text: str) -> Iterator[Launch]:
    """Yield the launch commands of containers in YAML documents, such as Kubernetes'."""
    for document in _parse_yaml(text):
        for container in _containers(document):
            environment = _container_environment(container)
            # In words, Compose replaces variables of the shell that runs Compose, not variables of
            # the container.
            is_compose = "environment" in container
            variables = {
                name: value
                for name, value in environment.items()
                if not is_compose or name.startswith("SGLANG_")
            }
            unknown: dict[str, str] = {}
            settings = ScriptReader(variables).environment(unknown)
            words: list[str] = []
            for stated in (container.get("command"), container.get("args")):
                for one in _commands(stated, {} if is_compose else environment):
                    words += one.words
                    unknown |= one.unknown
            yield from _of_words(Command(tuple(words), settings, unknown), variables)


def _commands(stated: Any, environment: Mapping[str, str | None]) -> Iterator[Command]:
    """Yield the commands of a container's command or args: a list of words, or a shell's text."""
    if isinstance(stated, str):
        yield from ScriptReader().commands(stated)
    for word in stated if isinstance(stated, list) else ():
        text = _REFERENCE.sub(lambda match: environment.get(match[1]) or match[0], str(word))
        unknown = {match[0]: _SET_ELSEWHERE for match in _REFERENCE.finditer(text)}
        yield Command((text,), {}, unknown)


def _containers(document: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings that have a command or args, at any depth.

    A list of words alone counts as args.
    """
    if isinstance(document, dict):
        own = document.keys() & {"command", "args"}
        if own:
            yield document
        for name in document.keys() - own:
            yield from _containers(document[name])
    elif isinstance(document, list):
        if all(isinstance(word, str) for word in document):
            yield {"args": document}
        for value in document:
            yield from _containers(value)


def _container_environment(container: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the variables of a container of Kubernetes (`env`) or Compose (`environment`).

    The value is None if it is set elsewhere.
    """
    stated = container.get("env") or container.get("environment") or []
    if isinstance(stated, dict):
        return {str(name): None if value is None else str(value) for name, value in stated.items()}
    found: dict[str, str | None] = {}
    for one in stated if isinstance(stated, list) else []:
        if isinstance(one, dict):
            found[str(one.get("name"))] = str(one["value"]) if "value" in one else None
        elif isinstance(one, str):
            name, equals, value = one.partition("=")
            found[name] = value if equals else None
    return {
        name: None if value is None or _REFERENCE.search(value) else value
        for name, value in found.items()
    }


def _of_process(number: int) -> list[Launch]:
    """Return the launch of a running process, with its command line and SGLang's variables."""
    place = Path(f"/proc/{number}")
    if not place.is_dir():
        raise UsageError(f"pid:{number}: no such process on this machine; see ps -ef")
    try:
        words = _null_separated(place / "cmdline")
        stated = (word.split("=", 1) for word in _null_separated(place / "environ") if "=" in word)
        environment = {name: value for name, value in stated if name.startswith("SGLANG_")}
        folder = (place / "cwd").readlink()
    except OSError as error:
        why = "run as the server's user, or give its command line"
        raise UsageError(failed(f"pid:{number}", "read the process", error, why)) from error
    command = Command(tuple(words), environment, {})
    found = _some(_of_words(command, {}), f"pid:{number}", "")
    return [replace(one, folder=folder, root=place / "root") for one in found]


def _null_separated(path: Path) -> list[str]:
    with path.open("rb") as file:
        return os.fsdecode(file.read(_MAX_BYTES)).rstrip("\0").split("\0")


def read_arguments(
    arguments: Sequence[str], path_of: Callable[[str], Path] = Path
) -> dict[str, Any]:
    """Return the fields of ServerArgs that arguments, or the file of their --config, state.

    path_of: function that returns a path of the server as this process sees it.
    Raises UsageError, FormatError.
    """
    words = list(arguments)
    if "--config" in words:
        at = words.index("--config")
        if at + 1 == len(words) or words.count("--config") > 1:
            raise UsageError("--config: SGLang takes one file of flags; give one")
        path = path_of(words[at + 1])
        words = [*config_arguments(_read_mapping(path), str(path)), *words[:at], *words[at + 2 :]]
    stated = parse_arguments(words)
    if "config" in stated:
        raise UsageError("--config=FILE: SGLang does not read the file; write --config FILE")
    return stated


def _stated(launch: Launch) -> dict[str, Any]:
    """Return the fields of ServerArgs that a command states.

    If a file has the options of the storage backend, the field of these options is a mapping.
    """
    switches = {name for flag in recorded().flags if flag.values == 0 for name in flag.names}
    for before, word in zip(("", *launch.arguments), launch.arguments, strict=False):
        is_value = before.startswith("-") and "=" not in before and before not in switches
        for part, why in launch.unknown.items():
            lists = (
                part[-4:] in ("[@]}", "${@}") or part == "$@" or why == SEVERAL_WORDS
            ) and part in word
            if lists or (word.startswith(part) and (not is_value or before == "--config")):
                raise ProfileError(
                    f"launch command: {part:.80} can hold any flag ({why}); {WAYS_OUT}"
                )
    stated = read_arguments(launch.arguments, launch.path)
    extra = stated.get(_EXTRA, "")
    if extra.startswith("@") and is_file(launch.path(extra[1:])):
        stated[_EXTRA] = _read_mapping(launch.path(extra[1:]))
    return stated


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON, TOML or YAML file of named values, as SGLang does."""
    data = read_bounded(path, _MAX_BYTES, what="a file of flags")
    suffix = path.suffix.lower()
    if suffix == ".json":
        return parse_json_object(data, str(path))
    text = decoded(data, str(path))
    if suffix == ".toml":
        return parse_toml(text, str(path))
    try:
        found = next(iter(_parse_yaml(text)), None) or {}
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: expected names and values, found {shown(found)}")
    return found


def _is_huge(scalar: Any) -> bool:
    """Return whether a YAML scalar is a number too long to read fast, or to show as text."""
    is_text = bool(scalar.style) and scalar.tag is None
    return not is_text and _HUGE_NUMBER.match(scalar.value) is not None


def _check_bounds(events: Iterator[Any]) -> None:
    """Raise FormatError for YAML that takes much memory or time to read."""
    sizes: dict[str | None, int] = {}  # characters of each anchor, with aliases replaced
    open_: list[tuple[str | None, int]] = []  # anchors of open collections, and sizes before them
    size = 0
    for event in events:
        kind = type(event).__name__
        if kind == "AliasEvent":
            size += sizes.get(event.anchor, 0)
            if any(anchor == event.anchor for anchor, _ in open_):
                raise FormatError("a YAML alias contains itself; write the values out")
        elif kind == "ScalarEvent":
            if _is_huge(event):
                raise FormatError(
                    f"{event.value[:20]}… is not a number that a flag can have; correct it"
                )
            sizes[event.anchor] = 1 + len(event.value)
            size += sizes[event.anchor]
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            open_.append((event.anchor, size))
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            anchor, before = open_.pop()
            size += 1
            sizes[anchor] = size - before
        if size > _MOST_YAML:
            raise FormatError("YAML aliases repeat too much text; write the values out")
        if len(open_) > _DEEPEST:
            raise FormatError(f"YAML is nested more than {_DEEPEST} times; give the command alone")


def _parse_yaml(text: str) -> list[Any]:
    """Parse YAML documents. Their depth and size are bounded, also with aliases replaced."""
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f"YAML needs the package pyyaml; {install_step('pyyaml')}, or give the flags in the "
            "command"
        ) from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # some builds lack the fast loader
    try:
        _check_bounds(yaml.parse(text, loader))
        return list(yaml.load_all(text, loader))
    except yaml.MarkedYAMLError as error:
        # The text of the error quotes the line, which can have a password. So do not show the text.
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise FormatError(f"not YAML: {line}{error.problem}"[:200]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise FormatError(f"not YAML: {' '.join(str(error).split())[:200]}") from error
