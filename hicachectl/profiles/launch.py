"""Read the command that launches a server: a text, a script, a container, or a running process.

Nothing is executed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicachectl.backends.disk.bounded import read_bounded
from hicachectl.formats.documents import parse_json, parse_json_object, parse_toml, shown
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.launch import launched_deployment
from hicachectl.formats.models.loading import overridden_config
from hicachectl.formats.models.server_flags import config_arguments, parse_arguments
from hicachectl.formats.wording import failed
from hicachectl.profiles.server import ServerProfile, flags_with, not_here, read_model_config
from hicachectl.profiles.shell_words import ScriptReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_MAX_BYTES = 256 << 10  # of a script, a file of flags or a process's command line
_DEEPEST_SCRIPT = 4  # `bash -c` in `bash -c` …
_DEEPEST = 64  # nested lists and mappings of YAML
_PROCESS = re.compile(r"pid:([0-9]{1,10})")
_VARIABLE = re.compile(r"(?:--env=|-e)?(SGLANG_\w+)=(.*)", re.DOTALL)  # `env` and `docker run`
_REFERENCE = re.compile(r"\$\(([A-Za-z_]\w*)\)")  # in a container's args
_HUGE_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxX_:]{1000}")
_EXAMPLE = "python -m sglang.launch_server … or sglang serve …"
_EXTRA = "hicache_storage_backend_extra_config"


@dataclass(frozen=True, slots=True)
class Launch:
    """A server's command line.

    arguments: words behind the program. environment: variables of SGLang that are set with it.
    folder: where the server runs. root: its file system, as seen from here. unknown: parts of the
    words that only a shell could tell. passes_on: whether a script passes on arguments of its own.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    root: Path = Path("/")
    unknown: frozenset[str] = frozenset()
    passes_on: bool = False

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return a value that only equal commands have, and that can be hashed."""
        environment = frozenset(self.environment.items())
        return self.arguments, environment, self.unknown, self.passes_on

    def path(self, text: str) -> Path:
        """Return a path of the server as seen from here."""
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

    text: see `read_launch`; the others as of `profile_from_server`. Raises UsageError unless there
    is one launch command, FormatError, and ProfileError naming the flag at fault.
    """
    launch = read_launch(text)
    given = overrides or {}
    server = launched_deployment(
        _stated(launch),
        launch.environment,
        unknown=launch.unknown,
        version=given.get("sglang", ""),
    )
    path = model_config or _local_model(launch, server.model_path, "--model-config")
    draft = draft_model_config
    if draft is None and server.draft_model_path:
        draft = _local_model(launch, server.draft_model_path, "--draft-model-config")
    config = overridden_config(read_model_config(path), server.settings)
    profile = profile_from_config(config, flags_with(server, draft, given), source=str(path))
    notes = [*server.notes]
    if launch.passes_on:
        notes.append("the script passes on arguments of its own, which are not read")
    return ServerProfile(profile, server, tuple(notes))


def read_launch(text: str) -> Launch:
    """Return the one launch command of a text.

    text: the command as in a shell, or its words as a JSON list; the path of a file, with or
    without "@", with a script, such a list, or YAML with a container; or `pid:N`. Raises
    UsageError, FormatError.
    """
    if match := _PROCESS.fullmatch(text):
        return _of_process(int(match[1]))
    reader = ScriptReader()
    if not text.startswith("@") and not _is_file(text):
        try:
            return _only(_launches(text, reader), "--launch", reader)
        except FormatError as error:
            raise FormatError(f"--launch: {error}") from error
    path = Path(text.removeprefix("@")).expanduser()
    data = read_bounded(path, _MAX_BYTES, what="a launch script")
    try:
        content = data.decode("utf-8-sig")
        is_yaml = path.suffix.lower() in (".yaml", ".yml")
        launches = _launches_of_yaml(content, reader) if is_yaml else _launches(content, reader)
        return _only(launches, str(path), reader)
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text; save the file as UTF-8") from error
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def _is_file(path: str | Path) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long for a path, or with a null character
        return False


def _only(launches: Iterator[Launch], where: str, reader: ScriptReader) -> Launch:
    # A script can have thousands, so each is not compared with each.
    found = list({launch.identity: launch for launch in launches}.values())
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{where}: has {len(found)} launch commands; give one of them")
    none = f"{where}: has no command that launches an SGLang server; give one, such as {_EXAMPLE}"
    if reader.has_documents:
        none += "; here-documents (<<) are not read: give such a script in a file of its own"
    raise UsageError(none)


def _launches(text: str, reader: ScriptReader, depth: int = 0) -> Iterator[Launch]:
    """Yield the launch commands of a shell script, or of a JSON list of words.

    depth: scripts that the script is in.
    """
    # A list ends with its bracket; the test of a shell, `[ … ]`, is followed by a command.
    if text.lstrip().startswith("[") and text.rstrip().endswith("]"):
        words = parse_json(text, "the list of words")
        for word in words:
            if not isinstance(word, str):
                raise FormatError(f"the list of words: {shown(word)} is no text; put it in quotes")
        yield from _of_words(words, {}, reader)
        return
    for command in reader.commands(text):
        yield from _of_words(command.words, command.environment, reader, depth)


def _of_words(
    words: Sequence[str],
    environment: Mapping[str, str],
    reader: ScriptReader,
    depth: int = 0,
) -> Iterator[Launch]:
    """Yield the launch command that a command is, or has in a script of its own (`bash -c`)."""
    found = _server_arguments(words)
    if found is None:
        for word in words if depth < _DEEPEST_SCRIPT else ():
            if "sglang" in word and len(word.split()) > 1:
                yield from _launches(word, reader.inner(environment), depth + 1)
        return
    before = (_VARIABLE.fullmatch(word) for word in words[: len(words) - len(found)])
    own = {**environment, **{match[1]: match[2] for match in before if match}}
    yield Launch(
        found,
        {name: value for name, value in own.items() if name.startswith("SGLANG_")},
        unknown=frozenset(reader.unknown),
        passes_on=reader.takes_arguments,
    )


def _server_arguments(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words behind the program that launches a server; None if there is none.

    A list that begins with a flag is what a container gives to its entry point.
    """
    if words and words[0].startswith("--model"):
        return tuple(words)
    for at, word in enumerate(words):
        if word == "sglang.launch_server" or word.endswith("launch_server.py"):
            return tuple(words[at + 1 :])
        is_cli = word.rsplit("/", 1)[-1] in ("sglang", "sglang.cli.main")
        if is_cli and tuple(words[at + 1 : at + 2]) == ("serve",):
            return _of_serve(words[at + 2 :])
    return None


def _of_serve(words: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of `sglang serve`, which also takes the model as its first word.

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


def _launches_of_yaml(text: str, reader: ScriptReader) -> Iterator[Launch]:
    """Yield the launch commands of the containers in YAML documents, as of Kubernetes."""
    for document in _parse_yaml(text):
        for container in _containers(document):
            environment = _container_environment(container)
            stated = (container.get("command"), container.get("args"))
            words = [word for one in stated for word in _words(one, reader)]
            known = [_with_variables(word, environment) for word in words]
            yield from _of_words(known, environment, reader)


def _with_variables(word: str, environment: Mapping[str, str]) -> str:
    """Return a word of a container's args with the values of $(NAME)."""
    return _REFERENCE.sub(lambda match: environment.get(match[1], match[0]), word)


def _containers(document: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings with a command or args, at any depth; a list of words alone is args."""
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


def _words(stated: Any, reader: ScriptReader) -> list[str]:
    """Return the words of a container's command or args: a list, or a text as in a shell."""
    if isinstance(stated, str):
        return [word for command in reader.inner({}).commands(stated) for word in command.words]
    return [str(word) for word in stated] if isinstance(stated, list) else []


def _container_environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a container of Kubernetes (`env`) or Compose (`environment`)."""
    stated = container.get("env") or container.get("environment") or []
    if isinstance(stated, dict):
        return {str(name): str(value) for name, value in stated.items()}
    found = {}
    for one in stated if isinstance(stated, list) else []:
        if isinstance(one, dict) and "value" in one:
            found[str(one.get("name"))] = str(one["value"])
        elif isinstance(one, str) and "=" in one:
            name, value = one.split("=", 1)
            found[name] = value
    return found


def _of_process(number: int) -> Launch:
    """Return the command line of a running process, and of its environment what is SGLang's."""
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
    reader = ScriptReader()
    found = _only(_of_words(words, environment, reader), f"pid:{number}", reader)
    return replace(found, folder=folder, root=place / "root")


def _null_separated(path: Path) -> list[str]:
    with path.open("rb") as file:
        return os.fsdecode(file.read(_MAX_BYTES)).rstrip("\0").split("\0")


def read_arguments(
    arguments: Sequence[str], path_of: Callable[[str], Path] = Path
) -> dict[str, Any]:
    """Return the fields of ServerArgs that arguments state, themselves or by their --config.

    path_of: returns a path of the server as seen from here. Raises UsageError, FormatError.
    """
    words = list(arguments)
    if "--config" in words:
        at = words.index("--config")
        if at + 1 == len(words) or words.count("--config") > 1:
            raise UsageError("--config: SGLang takes one file of flags; give one")
        words = [*_config_arguments(path_of(words[at + 1])), *words[:at], *words[at + 2 :]]
    stated = parse_arguments(words)
    if "config" in stated:
        raise UsageError("--config=FILE: SGLang does not read the file; write --config FILE")
    return stated


def _stated(launch: Launch) -> dict[str, Any]:
    """Return the fields of ServerArgs that a command states; options of its store as a mapping."""
    stated = read_arguments(launch.arguments, launch.path)
    extra = stated.get(_EXTRA, "")
    if extra.startswith("@") and _is_file(launch.path(extra[1:])):
        stated[_EXTRA] = _read_mapping(launch.path(extra[1:]))
    return stated


def _config_arguments(path: Path) -> list[str]:
    stated = _read_mapping(path)
    try:
        return config_arguments(stated)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON, TOML or YAML file with named values, as SGLang takes them."""
    data = read_bounded(path, _MAX_BYTES, what="a file of flags")
    suffix = path.suffix.lower()
    if suffix == ".json":
        return parse_json_object(data, str(path))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text; save the file as UTF-8") from error
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
    """Return whether YAML has a number that takes long to read, or that no text can show."""
    is_text = bool(scalar.style) and scalar.tag is None
    return not is_text and _HUGE_NUMBER.match(scalar.value) is not None


def _parse_yaml(text: str) -> list[Any]:
    """Parse YAML documents, but no aliases, which can take all memory, and no deep nesting."""
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "YAML needs the package pyyaml; run pip install 'hicachectl[yaml]', or give the flags "
            "in the command"
        ) from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # some builds lack the fast one
    try:
        depth = 0
        for event in yaml.parse(text, loader):
            if isinstance(event, yaml.AliasEvent):
                raise FormatError("YAML aliases are not read; write the values out")
            if isinstance(event, yaml.ScalarEvent) and _is_huge(event):
                raise FormatError(
                    f"{event.value[:20]}… is not a number that a flag can have; correct it"
                )
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise FormatError(
                    f"YAML is nested more than {_DEEPEST} times; give the command alone"
                )
        return list(yaml.load_all(text, loader))
    except yaml.MarkedYAMLError as error:  # as a text, it has the line, which can have a password
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise FormatError(f"not YAML: {line}{error.problem}"[:200]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise FormatError(f"not YAML: {' '.join(str(error).split())[:200]}") from error


def _local_model(launch: Launch, model_path: str, option: str) -> Path:
    """Return a model's directory: a path of the server, or a snapshot in this user's Hub cache."""
    for path in (launch.path(model_path), _hub_snapshot(model_path)):
        if path is not None and _is_file(path / "config.json"):
            return path
    raise not_here(model_path, option)


def _hub_snapshot(name: str) -> Path | None:
    """Return the snapshot of a Hub model's main revision, where huggingface_hub keeps it."""
    if name.count("/") != 1 or name.startswith(("/", ".")) or ".." in name:
        return None
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    model = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = (model / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return model / "snapshots" / commit if re.fullmatch(r"[0-9a-f]{40}", commit) else None
