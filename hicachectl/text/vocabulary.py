"""Words shared by command options and operations; imports nothing."""

# States of page groups.
STATES = ("whole", "partial", "orphan", "unknown")
LOCK = "lock"  # `stopped_by` of a run that another process's lock prevented
DEFAULT_GRACE_SECONDS = 60.0  # younger objects may belong to a running write
SAMPLE_PAGES = 256  # pages that are read of a store whose other pages are believed
DEADLINE = "deadline"  # `stopped_by` of a run that its time limit ended
FULL = "destination full"  # `stopped_by` of a copy for which the destination lacked room
BUDGET = "budget"  # `stopped_by` of a prewarm that copied all that its budget allows
# Groups of requests, for `--by`.
GROUPINGS = ("model", "salt", "adapter", "session-age", "server")
# When SGLang writes pages to the host and the store (--hicache-write-policy).
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
NEVER = "never"  # `--fail-on`: no finding fails the run
