"""Words shared by command options and operations; imports nothing."""

# States of page groups.
STATES = ("whole", "partial", "orphan", "unknown")
LOCK = "lock"  # `stopped_by` of a run that another process's lock prevented
DEFAULT_GRACE_SECONDS = 60.0  # younger objects may belong to a running write
DEADLINE = "deadline"  # `stopped_by` of a run that its time limit ended
FULL = "destination full"  # `stopped_by` of a copy for which the destination lacked room
BUDGET = "budget"  # `stopped_by` of a prewarm that copied all that its budget allows
NEVER = "never"  # `--fail-on`: no finding fails the run

# Columns that `ls --sort-by` takes, by what is listed; nested ones are left out.
_SIZE_COLUMNS = ("tp_size", "pp_size", "cp_size", "dcp_size")
SORT_COLUMNS = {
    "pages": ("page", "group", "model", "tag", *_SIZE_COLUMNS, "state", "nbytes", "mtime"),
    "objects": (
        "key", "page", "model", "tag", "pool", "part",
        *(f"{axis}_{end}" for axis in ("tp", "pp", "cp", "dcp") for end in ("rank", "size")),
        "layers", "heads", "nbytes", "mtime", "offset",
    ),
    "summary": (
        "model", "tag", *_SIZE_COLUMNS, "layout", "pool", "object_nbytes", "pages", "objects",
        "nbytes", "first_mtime", "last_mtime",
    ),
}  # fmt: skip
