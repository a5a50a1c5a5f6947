"""Name the weights in a profile, from options or from the model directory of a live server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.weights import FINGERPRINT_DIGITS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicachectl.formats.models.server_info import ServerDeployment
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.weights import Checkpoint

WEIGHTS_OPTIONS = ("weights", "draft_weights")  # and fields of a profile
_NAME = re.compile(f"[0-9a-f]{{{FINGERPRINT_DIGITS}}}")


def with_weights(
    profile: Profile,
    options: Mapping[str, Any],
    server: ServerDeployment | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Return a profile with the weights of its options, else with those that a server loads.

    A directory of an option is read as the server, or SGLang with its defaults, loads it. The
    server's own directories are read if they are on this machine; `warn` is called with the reason
    if one gives no name. Raises UsageError or FormatError for an option without a name.
    """
    loading = _Loading({} if server is None else server.settings)
    given = [field for field in WEIGHTS_OPTIONS if options.get(field)]
    names = {field: _of_option(field, options[field], loading) for field in given}
    if server is not None and not given:
        try:
            names = _of_server(profile, server, loading)
        except (FormatError, UsageError) as error:
            warn(f"the weights are unknown: {error}")
    if names.get("draft_weights") == names.get("weights", profile.weights):
        names["draft_weights"] = ""  # like weights
    named = replace(profile, **names)
    if named.draft_weights and not named.weights:
        raise UsageError("--draft-weights needs --weights")
    return named


class _Loading:
    """Names of the weights that a server with these settings loads."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._read: dict[Path, Checkpoint] = {}  # a target's directory can also hold its draft

    def name(self, path: Path, *, draft: bool) -> str:
        from hicachectl.backends.disk.weights import read_checkpoint
        from hicachectl.formats.models.loading import loaded_weights

        if path not in self._read:
            self._read[path] = read_checkpoint(path)
        return loaded_weights(self._read[path], self._settings, draft=draft)


def _of_option(field: str, text: str, loading: _Loading) -> str:
    if Path(text).exists():
        return loading.name(Path(text), draft=field == "draft_weights")
    if not _NAME.fullmatch(text):
        raise UsageError(
            f"--{field.replace('_', '-')}: {text!r:.200} is neither a model directory nor "
            f"{FINGERPRINT_DIGITS} hexadecimal digits"
        )
    return text


def _of_server(profile: Profile, server: ServerDeployment, loading: _Loading) -> dict[str, str]:
    places = {"weights": server.model_path}
    if any(pool.is_draft or pool.packed_draft_layers for pool in profile.pools):
        places["draft_weights"] = server.draft_model_path or server.model_path
    # A relative path is in the server's working directory, or a name on the Hub.
    if not all(Path(place).is_absolute() and Path(place).is_dir() for place in places.values()):
        return {}
    return {
        field: loading.name(Path(place), draft=field == "draft_weights")
        for field, place in places.items()
    }
