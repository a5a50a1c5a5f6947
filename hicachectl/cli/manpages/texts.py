"""Texts of hicachectl(1) and of the pages of section 7."""

from __future__ import annotations

from hicachectl.formats.models.architectures import ARCHITECTURES
from hicachectl.formats.profile import NEWEST_SGLANG

EXIT_STATUS = (
    (
        "0",
        "Done and clean. Objects that vanish during the run are normal in a cache and not an "
        "error. The status is also 0 if another process holds the lock, or if a deadline "
        "ended the run.",
    ),
    ("1", "A bug of hicachectl; please report the traceback."),
    ("2", "Bad usage or input: an option, a profile, a config or a URL."),
    (
        "3",
        "The store, server or device cannot be reached, refuses or fails; or a store that is a "
        "source has no page, and may not be mounted. --allow-empty accepts such a store.",
    ),
    (
        "4",
        "Finished, but with findings at or above --fail-on, with failed objects or conflicts, "
        "below --min-usable, or with a catalog not written because it would shrink.",
    ),
    ("130", "Interrupted (SIGINT)."),
    ("143", "Terminated (SIGTERM)."),
)
STORES = (
    ("/dir, file:///dir", "The directory of SGLang's file backend (HiCacheFile)."),
    ("file:", "The directory that SGLang uses by default; see ENVIRONMENT."),
    (
        "mooncake://HOST:50051?admin=HOST:9003&protocol=tcp",
        "A Mooncake cluster, named by its master; see MOONCAKE.",
    ),
    ("mooncake:", "The cluster of SGLang's configuration; see ENVIRONMENT."),
    (
        "mooncake-ssd:///dir?tenant=NAME",
        "The files that Mooncake clients with SSD offload left behind; see MOONCAKE SSD.",
    ),
    (
        "hf3fs:///path/prefix?server=http://HOST:18000&snapshot=FILE",
        "A 3FS store, named by the prefix of its page files; see 3FS.",
    ),
    ("hf3fs:", "The 3FS store of SGLang's configuration; see ENVIRONMENT."),
    (
        "nixl:///dir[,/dir...]",
        "The directories of SGLang's NIXL backend (HiCacheNixl) on files; see NIXL.",
    ),
    (
        "/path/archive.hcpack, pack:///path/archive",
        "A pack: the objects of a store in one file; see hcpack(5). A path that ends in .hcpack "
        "names a pack, and with a slash behind it a directory.",
    ),
    ("NAME:", "A store of the config file."),
)
MODELS = (
    f"SGLang {NEWEST_SGLANG} registers {len(ARCHITECTURES)} architectures, the names in the field "
    "architectures of config.json. For the targets below, profile and --model-config derive the "
    "pools from config.json. Each was compared with the pools that SGLang itself allocates, at TP "
    "1, 2 and 4, and at PP 1 and 2. A model that SGLang does not divide into stages is refused "
    "with PP above 1.",
    "If config.json lacks a field for which SGLang's own config class has a number, the message "
    "names the field to give. For the other architectures, write a profile file; see "
    "hicachectl-profile(1).",
)
UNVERIFIED_MODELS = (
    "For these, the compared config.json was written by hand, with the fields that SGLang reads. "
    "Field names of a published config may differ; compare the size of one page with the profile "
    "(ls --objects) before a repair.",
)
DRAFT_FORMS = (
    (
        "MTP layers",
        "With EAGLE, a page object of the target ends with the layers of the draft; with DSPARK, "
        "the window objects of DeepSeek-V4 end with all stages of its draft. The states of "
        "Inkling's draft follow the target's; its layers with a window are in draft_swa, for every "
        "page. Without --draft-model-config, they are those of the target's own config. If the "
        "draft's config counts num_nextn_predict_layers as 0, the draft has pools like those "
        "below.",
    ),
    (
        "Models",
        "The pool draft has all layers; index keys are in draft_indexer. Of a draft with sliding "
        "windows, there is only draft_swa, with the window layers, if any. If the config counts "
        "num_nextn_predict_layers, EAGLE appends the draft like an MTP layer.",
    ),
    ("Readers of the target's KV", "These drafts have no KV, so no objects."),
)
OUTPUT = (
    "The result goes to stdout, or to the file of -o. Progress, remarks and errors go to stderr. "
    "A json result is one document; jsonl has one row per line.",
    "With -q, there are no progress and no remarks. A run of verify, migrate, prewarm, rm, "
    "restore, quarantine purge or merge that ends with 0 prints no table. A line on stderr still "
    "says what was not done: parts missing, pages in flight or not copied, a catalog not written, "
    "a lock or a deadline that ended the run. Results in other formats, in files and of dry runs "
    "are written as without -q.",
    "In table and csv, characters that a terminal would interpret or hide are written as \\xNN or "
    "\\uNNNN. In csv, a ' precedes text that begins like a formula.",
    "On a terminal, a table fits its width (or COLUMNS): long keys are shortened in the middle, "
    "and then the least useful columns are left out. Elsewhere a table is whole.",
)
HF3FS = (
    "Pages are stored in preallocated files, prefix.RANK.bin. A metadata server maps keys to pages "
    "but cannot list them. So the listing comes from the snapshot that the server saves "
    "(--persistence-path), and is as old as the snapshot. With server=, keys removed since then "
    "are left out. Only a profile states the size of a page.",
    "Reading sends no query that the server counts as use, with one exception: if a page looks "
    "damaged, hicachectl asks whether the page was reused, and reports that it asked.",
    "Each pool has its own tables, and the server evicts the pages of each table independently. So "
    "objects without their kv (orphan-sidecar) are normal and only noted (info).",
    "The check groups also compares the tables with each other and with the files. It finds pages "
    "that two keys hold (page-index-shared), pages that a key holds and that are free "
    "(page-index-free), pages outside the table (page-index-out-of-range), pages beyond the end of "
    "their file (truncated), pages that are neither held nor free (page-leaked), files with "
    "another number of pages than their table (page-count-mismatch), and snapshots older than "
    "their files (snapshot-stale). Reading finds pages that were never written (unwritten-page). "
    "While a server is live, a leaked page is reported only if three snapshots show it. For the "
    "third snapshot, verify waits at most two minutes.",
    "The server reuses freed pages at once. A deletion can therefore corrupt a page that a live "
    "server is reading: repair at a time of few reads. All keys that share a page are deleted in "
    "one call. Without server=, a repair writes a new snapshot FILE.repaired beside the old one; "
    "start the metadata server from that file. With --writers-stopped, leaked pages are released. "
    "Give this option only if no engine writes: otherwise the server hands out a page twice. A 3FS "
    "store has no default quarantine: --repair quarantine needs --quarantine DIR.",
    "If 3FS's hf3fs_fuse package is installed and the prefix is on a 3FS mount, pages are read "
    "through that package (USRBIO); otherwise they are read as files. USRBIO has not been tested "
    "on a real 3FS.",
)
HF3FS_PARAMETERS = (
    ("server=URL", "URL of the metadata server."),
    ("snapshot=FILE", "Persistence file of the metadata server."),
    ("config=FILE", "SGLang's JSON config, for the prefix, file_size and server."),
    (
        "file_size=SIZE",
        "Bytes of each file, as given to SGLang; default: the size of the largest file. If given, "
        "verify distinguishes a truncated file from a profile with wrong page sizes.",
    ),
    ("ranks=N", "Read only ranks below N."),
)
NIXL = (
    "A URL names the directories of SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR, all of them and "
    "in the same order, since both decide where the file of a key lies. Files elsewhere are "
    "ignored, and verify reports misplaced-object, because no server finds them. A URL with only "
    "some of the directories, or with another order, is refused by every command if 64 files of a "
    "directory show it. For a lost disk, name an empty directory. If servers now use other "
    "directories than before, or another order, give directories=N. Pages of before are then "
    "incomplete until they are written again. To keep them, migrate from the "
    "store with the earlier directories to the store with the present ones.",
    "A server's clear removes every file below the directories. So nothing of hicachectl lies "
    "there. With side_directory=DIR in the URL, stamps lie in DIR/stamps and the default "
    "quarantine is DIR/quarantine. Without it, --stamp is refused, and --repair quarantine needs "
    "--quarantine DIR. Both directories must be outside the store. Give each store a side "
    "directory of its own, and the URL in the config file, so that every command finds the stamp.",
    "Of each model, the server of TP rank 0 removes the oldest page groups when a disk is as "
    "full as its l3_cleaner_high_watermark. Writes keep modification times and stop below "
    "this watermark on each disk; objects that would reach it fail as if the disk were full.",
    "Keys do not name PP, CP and DCP ranks, so ranks that share the directories overwrite each "
    "other's objects. With such a profile, verify reports colliding-keys, and ls, show and verify "
    "compare pages with each other, as without a profile; other commands refuse it.",
    "A page of a model without KV (DeepSeek-V4) has a small object for its anchor: 4096 bytes with "
    "direct I/O, else one byte.",
    "With direct I/O, SGLang fails to write an object whose size is no multiple of a disk block. "
    "Such a pool is refused by name; use_direct_io false, with direct_io=off, stores it.",
    "Servers write in place. While an object is written, its file has its final name and is short.",
)
NIXL_PARAMETERS = (
    (
        "direct_io=off",
        "For servers with use_direct_io false (SGLANG_HICACHE_NIXL_USE_DIRECT_IO=0). They write K "
        "and V, or the states of a page, apart even if their sizes are no multiple of 4 KiB. "
        "Default: on.",
    ),
    (
        "directories=N",
        "The number of directories in the URL, to state that servers use no others, also where the "
        "files show that they once did.",
    ),
    (
        "high_watermark=PERCENT",
        "The servers' l3_cleaner_high_watermark; default: 80. Give 100 if they have no cleaner.",
    ),
    (
        "side_directory=DIR",
        "An absolute path outside the directories, for stamps and the default quarantine. It is "
        "created when the first of them is written.",
    ),
)
MOONCAKE = (
    "hicachectl contributes no memory to the cluster. Listing, and the checks names, groups and "
    "sizes, use the master's HTTP service, which extends no lease and does not change the order "
    "of eviction. Reading an object grants a lease: for some seconds the object is not evicted "
    "and cannot be removed, and it is evicted later than others. Removals wait for leases to end "
    "(--lease-wait) and are never forced. A cluster has no default quarantine: --repair quarantine "
    "needs --quarantine DIR.",
    "Only objects of the tenant default that have a readable replica are listed. The size of an "
    "object whose key has a comma (a side pool of split heads) can only be queried with "
    "--allow-leases. The store keeps no timestamps, so pages that are not whole are checked again "
    "after --grace.",
    "An object of an MLA model holds the whole latent row, but SGLang ends its key in _k. So ls "
    "--objects and findings show the part k, and no part v is expected. On other stores the part "
    "of such an object is null.",
)
MOONCAKE_PARAMETERS = (
    ("admin=HOST:PORT", "The master's HTTP service; default: port 9003 of the master's host."),
    ("protocol=NAME", "Transfer protocol: tcp, rdma (the default), ..."),
    ("device=NAME", "Network devices for rdma."),
    ("metadata=URL", "Metadata service of the transfer engine; default: P2PHANDSHAKE."),
    ("tenant=NAME", "Only default can be listed."),
)
MOONCAKE_SSD = (
    "A Mooncake client with SSD offload writes objects to files, and leaves the files behind when "
    "it ends. Copy the directory before you restart the client: a restart deletes leftovers of "
    "crashes, writes to the same files, and deletes all objects of an offset file that it cannot "
    "recover. hicachectl only reads the files. To write, name the mooncake:// store of the master.",
    "DIR is the directory of one client (MOONCAKE_OFFLOAD_FILE_STORAGE_PATH), or the parent of the "
    "rank_* directories of SGLang's ranks, which are one store. If several files have one key, "
    "the newest whole object counts. Two forms are read: buckets (ID.bucket with ID.meta, the "
    "default) and offset files of version 3 (kv_cache.data with kv_cache.meta, if "
    "MOONCAKE_OFFSET_PERSIST_MODE was relaxed or strict). Other forms, such as file_per_key, are "
    "refused. tenant= lists the objects of another tenant than default.",
    "Mooncake never updates the .meta file of a bucket, so objects that were removed from the "
    "cluster may still be listed. A remark states this. For each file, verify reports as "
    "lost-objects: a bucket without a .meta file (a crash interrupted the write), a damaged .meta "
    "file, one without its data file, a kv_cache.data without kv_cache.meta, records of an offset "
    "file that a restart would drop (in relaxed mode, those since the last checkpoint), and "
    "objects behind the end of a file. A file that changed within --grace may still be written, "
    "and is a remark. An object that is cut off is truncated or unreadable, and an object with "
    "another key in its place is unreadable.",
    "Records of offset files have a CRC-32C, which each read checks: verify reads them also "
    "without a profile (check digests). Buckets have no checksum: without a profile or a catalog "
    "verify does not read them, and says so. Objects that had not been offloaded are not in the "
    "files: a client writes a bucket once it has 500 objects or 256 MB.",
)
VALUES = (
    "An empty value of an option or argument is refused, and so is an empty member of a list: a "
    "script whose variable is not set must not choose every page. --no-tag and --to-no-tag mean "
    "pages without a tag. An option of one value that is given with two different values is "
    "refused, too.",
)
OPTION_VARIABLES = (
    "Each setting has a variable, which all commands with the option read: HICACHECTL_PROFILE "
    "stands for --profile, HICACHECTL_BUFFER_BYTES for --buffer-bytes. Options that say what a "
    "command does, chooses, writes or removes have no variable: give them on the command line.",
    "The command line beats the environment, which beats the config file. So --profile replaces "
    "the variables of other options that build a profile, and these options replace "
    "HICACHECTL_PROFILE. If all come from variables, HICACHECTL_PROFILE counts.",
    "HICACHECTL_LOCK holds for commands that write to the store, as the lock of the config file "
    "does. An empty variable counts as not set. A flag takes 1 or 0. A variable that begins with "
    "HICACHECTL_ and is not read by any command gets a remark.",
)
ENVIRONMENT = (
    ("HICACHECTL_API_KEY", "Bearer key for --server and --through-server."),
    (
        "XDG_STATE_HOME",
        "migrate keeps marks in hicachectl/marks of this directory; default: ~/.local/state. By "
        "its mark, a run finds the unfinished files of a killed run of the same command. If the "
        "directory is not writable, hicachectl rm --temporaries removes such files.",
    ),
    ("NO_COLOR", "If set and not empty, output has no colours."),
    ("SGLANG_HICACHE_HF3FS_CONFIG_PATH", "SGLang's JSON config of 3FS; used for hf3fs: only."),
    (
        "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH",
        "SGLang's JSON config of Mooncake; gives the parameters that a mooncake: URL leaves out.",
    ),
    (
        "MOONCAKE_MASTER, MOONCAKE_PROTOCOL, MOONCAKE_DEVICE, MOONCAKE_TE_META_DATA_SERVER, "
        "MOONCAKE_MASTER_METRICS_PORT, MOONCAKE_LOCAL_HOSTNAME, MOONCAKE_TENANT_ID",
        "SGLang's variables for the same parameters; used if "
        "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH is not set.",
    ),
    (
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
        "The directory of the store file:, as for SGLang; default: /tmp/hicache.",
    ),
)
TRUST = (
    "The paths of STORE, --quarantine DIR and the parent of --lock FILE may contain symbolic "
    "links. Below them, no link is followed: .hicachectl in a store, its stamps and quarantine, "
    "and the lock file must be regular files and directories. Their owner must be the user who "
    "runs hicachectl, root, the owner of the store, or a user to whom the file system gives new "
    "files. A group-writable store trusts the members of its group. A run of a quarantine belongs "
    "to the owner of the store's directory; its objects keep the owner that they had in the "
    "store.",
    "A command that only reads skips files and directories that break these rules, and names them "
    "in a remark. A command that writes ends with status 3 before any change.",
    "The directory of --run decides what is removed and written, so it and its files must "
    "belong to the user who runs hicachectl, root, the owner of the store, or "
    "a member of its group if that may write. Of two stores, both count. merge asks the stores of "
    "the run that are directories on its machine. No link is followed below the directory.",
    "Files that the command line, the environment or the config file names (--pages, --plan, "
    "--keep-plan, --catalog, --profile, traces, QUARANTINE, XDG_STATE_HOME with its marks) are "
    "trusted because they were named, whoever owns them. Name none in a directory that strangers "
    "may write, such as /tmp.",
    "New files are never more readable than their sources. A copied file gets the permissions of "
    "its source, except those that the source's directory or the umask denies. A pack, a 3FS data "
    "file and an object made from several objects are readable only by users who may read every "
    "source object read so far. A pack is readable only by its owner until it is complete. "
    "Directories, stamps, catalogs and quarantine runs are as readable as the store's "
    "directory. If a new file has another group than its source, that group gets no more "
    "permissions than others. "
    "New objects written by root belong to the owner of their directory, if that user may read the "
    "sources. The command restore also restores owner and permissions. Existing 3FS data files "
    "keep their permissions.",
)
LOCKS = (
    "--lock FILE takes the lock of flock(2), as flock(1) does. If another process holds the lock, "
    "the command does nothing and exits with 0; its result says complete: false and stopped_by: "
    "lock. On NFS the lock holds on all hosts if the server supports locks (not with the mount "
    "options nolock and local_lock=flock).",
    "Earlier versions of hicachectl took POSIX locks (fcntl), which flock does not see on a local "
    "file system. Do not run both versions at once.",
)
CLOCKS = (
    "The times of files come from their file system, and this host's clock may differ from it. So "
    "commands that remove pages or files (verify --repair, rm, migrate --move, quarantine purge) "
    "ask the file system of the store for its time, by touching the store's directory. They judge "
    "--grace, ages such as --before 7d, and temporary files by it. Stores without files have this "
    "host's clock.",
    "Commands that only look, and dry runs, write nothing and go by this host's clock. If files "
    "are dated more than a minute ahead of it, a remark says so. Such times are taken for wrong "
    "ones: these pages count as settled, for every command.",
)
CONFIG = (
    "A store has a url, and optionally what it is always used with. Relative paths start at the "
    "directory of the config file. Each holds unless the command line or the environment says "
    "otherwise:",
)
CONFIG_MEMBERS = (
    ("url", "The store, in one of the forms above, or the NAME: of another store."),
    (
        "profile",
        "As --profile, for all commands with that option. migrate and prewarm take the profile of "
        "SRC; prewarm without --from that of DST. If the store contradicts it, ls, show and rm say "
        "so and go on, since all pages may be those of earlier servers. Other commands refuse it, "
        "and so does rm with --state or --trace, for which the profile decides.",
    ),
    ("catalog", "As --catalog of verify, if digests are checked."),
    (
        "lock",
        "As --lock, for commands that write to the store: of migrate and prewarm, to DST. Not for "
        "dry runs, verify without --repair, --stamp and --update-catalog, and parts of a run.",
    ),
)
CONFIG_EXAMPLE = (
    "[stores.prod]",
    'url = "file:///mnt/hicache"',
    'profile = "prod.toml"',
    'catalog = "prod.parquet"',
    'lock = "/run/hicachectl-prod.lock"',
)
STATES = (
    (
        "whole",
        "All objects of the page are present. Mamba and SWA states exist on some pages only; a "
        "page is whole with all of them or with none.",
    ),
    ("partial", "At least one object is missing."),
    (
        "orphan",
        "The page has sidecars, but not the kv object by which servers find a page.",
    ),
    ("unknown", "The keys can be read in several ways, so the expected objects are unknown."),
)
FINDINGS = (
    "verify and show report findings. Each has a code, a severity and a remedy. An error means "
    "that a server could read wrong data; a warning costs hits or space; an info needs no action. "
    "Some codes have another severity in some stores or pools.",
    "Effect is what a server of SGLang does with such an object. Cost is what the remedy costs. In "
    "the commands, STORE is the store, and FILE a profile of the servers; see "
    "hicachectl-profile(1). Commands that remove something ask first; --dry-run only shows what "
    "they would do.",
    "A repair does not reach the memory of servers: a server that has read a damaged page may "
    "still hold that page. After the repair, send POST /flush_cache to each such server while no "
    "request runs.",
)
DOCUMENT_MEMBERS = (
    "With --format json, a command prints one document: an object with the members below, and with "
    "schema (integer, 1) and version (text, the release of hicachectl). The formats jsonl, csv, "
    "parquet and arrow have only the rows of the document, with the same members; csv has nested "
    "ones as JSON.",
    "Names do not change within a schema, and members are only added: a program should ignore "
    "those that it does not know.",
    "A member of a member is written with a dot, an entry of a list with [], and a name that "
    "varies as NAME. Sizes are bytes, and times are seconds since 1970 in UTC. A pool, a name or a "
    "member of a nested object may be absent where it does not apply; members of rows are always "
    "present, and null if nothing is known.",
    "merge prints the document of the command of the run.",
)
PROFILE_DOCUMENT = (
    "The members of a profile file, which hicachectl-profile(1) describes, without schema and "
    "version."
)
PLAN_ROWS = (
    "prewarm --trace FILE --dry-run without stores prints lines of JSON, the most valuable page "
    "first. page and parent are block numbers if the trace has no token ids."
)
METRICS_FILES = (
    "--metrics-file FILE writes gauges for the textfile collector of the Prometheus node exporter. "
    "Each has the label store: the URL of the store, for prewarm of DST. A gauge whose value is "
    "not known is left out. hicachectl merge --metrics-file writes those of the whole run.",
)
