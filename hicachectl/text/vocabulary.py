"""Words that command options and operations share. This module imports nothing."""

# States of page groups.
STATES = ("whole", "partial", "orphan", "unknown")
LOCK = "lock"  # `stopped_by` of a run that another process's lock prevented
DEFAULT_GRACE_SECONDS = 60.0  # younger objects may belong to a running write
SAMPLE_PAGES = 256  # pages read from a store as a sample for all others
DEADLINE = "deadline"  # `stopped_by` of a run that reached its time limit
FULL = "destination full"  # `stopped_by` of a copy for which the destination lacked room
BUDGET = "budget"  # `stopped_by` of a prewarm that used up its budget
# Groups of requests, for `--by`.
GROUPINGS = ("model", "salt", "adapter", "session-age", "server")
# When SGLang writes pages to the host and the store (--hicache-write-policy).
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
NEVER = "never"  # `--fail-on`: no finding fails the run
