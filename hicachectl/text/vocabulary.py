"""Words shared by command options and operations; imports nothing."""

STATES = ("whole", "partial", "orphan", "unknown")  # of page groups
LOCK = "lock"  # `stopped_by` of a run that did nothing because another process held the lock
