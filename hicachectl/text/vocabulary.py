"""Words that commands offer as choices and operations use; imports nothing."""

STATES = ("whole", "partial", "orphan", "unknown")  # of page groups
CHECKS = ("names", "groups", "sizes", "values", "digests")
SEVERITIES = ("info", "warning", "error")
LOCK = "lock"  # `stopped_by` of a run that did nothing because another process held the lock

# Codes of findings. These are about one page group, so `verify --repair` can take it away.
PAGE_CODES = (
    "missing-pool",
    "missing-part",
    "missing-rank",
    "orphan-sidecar",
    "truncated",
    "oversized",
    "unreadable",
    "nan",
    "inf",
    "bad-scale",
    "all-zero",
    "layout-mismatch",
    "digest-mismatch",
    "re-recorded",
    "replica-mismatch",
    "no-replica",
    "unwritten-page",
    "page-index-shared",
    "page-index-out-of-range",
    "page-index-free",
)
# These are not, so no repair acts on them. Each says what to do instead.
STORE_CODES = {
    "stamp-mismatch": "the store holds pages of another deployment: remove them with "
    "hicachectl rm STORE --model, then stamp the store anew with --stamp",
    "ambiguous-key": "give the profile that wrote the keys, or remove them with "
    "hicachectl rm STORE --state unknown",
    "mixed-sizes": "give --profile, which says which of the sizes is wrong",
    "disk-only": "servers can read the objects, but slowly: hicachectl prewarm --through-server "
    "brings them into memory",
    "foreign-object": "SGLang did not write the object and never reads it: remove it by hand",
    "stale-temporary": "remove them with hicachectl rm STORE --temporaries",
    "snapshot-stale": "wait until the metadata server has saved its tables, and verify again",
    "page-leaked": "--repair with --writers-stopped releases leaked pages",
    "page-count-mismatch": "every rank needs the same file_size: correct SGLang's 3FS config",
}
CODES = (*PAGE_CODES, *STORE_CODES)
