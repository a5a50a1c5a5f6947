"""Words that commands offer as choices and operations use; imports nothing."""

STATES = ("whole", "partial", "orphan", "unknown")  # of page groups
CHECKS = ("names", "groups", "sizes", "values", "digests")
SEVERITIES = ("info", "warning", "error")
