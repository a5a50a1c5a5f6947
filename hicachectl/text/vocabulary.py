"""Words shared by command options and operations; imports nothing."""

STATES = ("whole", "partial", "orphan", "unknown")  # of page groups
LOCK = "lock"  # `stopped_by` of a run that another process's lock prevented
NEVER = "never"  # `--fail-on`: no finding fails the run
