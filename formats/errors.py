"""Exception classes of all packages; `cli.exit_codes` maps each to an exit code."""


class HicacheError(Exception):
    """An error reported in one line, without a traceback.

    The message names the option, file or object at fault and, if possible, the next step.
    """


class UsageError(HicacheError):
    """A refused option or argument, or a refused combination of them."""


class FormatError(HicacheError):
    """Malformed bytes or text, such as a wrong key, profile, catalog or config."""


class UnfinishedPackError(FormatError):
    """A pack without a trailer, because it is being written or was cut off."""


class ProfileError(FormatError):
    """A profile, or a source of a profile, that is incomplete, contradictory or unsupported."""


class ContradictionError(ProfileError):
    """A profile that contradicts a store.

    store: URL of the store.
    has_own_pages: whether the store has pages of the profile's deployment.
    """

    store = ""
    has_own_pages = False


class UnsupportedByBackend(HicacheError):
    """A request that this kind of store can never serve."""


class CollidingKeys(UnsupportedByBackend):
    """A deployment whose ranks overwrite each other's objects, because keys name no rank."""


class StoreUnavailable(HicacheError):
    """A store that cannot be reached, opened or read."""


class EmptyStore(StoreUnavailable):
    """A store without pages, where a command needs pages. Most likely it is not mounted."""


class DeniedError(StoreUnavailable):
    """Objects that this user may not read, and about which a command therefore knows nothing."""


class UntrustedError(StoreUnavailable):
    """A link, special file or other user's file where only this tool's files belong."""


class DeviceError(HicacheError):
    """A CUDA device that fails during use."""
