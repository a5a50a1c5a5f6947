"""Exception classes that every layer may raise; `cli.exit_codes` maps each to an exit code."""


class HicacheError(Exception):
    """Anything we report as one line instead of a traceback.

    The message names the thing at fault and, where there is one, the remedy.
    """


class UsageError(HicacheError):
    """Options or arguments that cannot be used together, or are refused."""


class FormatError(HicacheError):
    """Bytes or text that are not of the form they claim: a key, a profile, a catalog, a config."""


class ProfileError(FormatError):
    """A profile, or what one is built from, that is incomplete, contradictory or unsupported."""


class UnsupportedByBackend(HicacheError):
    """A request that a store cannot hold or do, by its nature."""


class StoreUnavailable(HicacheError):
    """A store that cannot be reached, opened or read at all."""


class UntrustedError(StoreUnavailable):
    """A link, a special file or another user's file where this tool keeps files of its own."""


class DeviceError(HicacheError):
    """A CUDA device that fails while it is worked with."""
