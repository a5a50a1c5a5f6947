"""Build man/*.1 from the click commands, and hicachectl-models.7 from the table of architectures.

`python -m hicachectl.cli.manpages DIRECTORY`.

The texts below are too long for `--help`.
"""

from __future__ import annotations

import re
import sys
import textwrap
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hicachectl.cli.group import COMMANDS, cli
from hicachectl.formats.kinds import kinds
from hicachectl.formats.models.architectures import ARCHITECTURES, UNVERIFIED, Refusal
from hicachectl.formats.models.drafts import OWN_DRAFTS
from hicachectl.formats.models.families.base import Family
from hicachectl.formats.profile import NEWEST_SGLANG

if TYPE_CHECKING:
    from collections.abc import Iterator, Set

RELEASE_DATE = "November 20, 2026"  # of the version in hicachectl/__init__.py

# A line before its escapes; a break within --to-profile would show as a space.
_WRAPPER = textwrap.TextWrapper(70, break_on_hyphens=False, break_long_words=False)

_EXIT_STATUS = (
    (
        "0",
        "Done and clean. Objects that vanish during the run are normal in a cache and not an "
        "error. The status is also 0 if another process holds the lock, or if a deadline "
        "ended the run.",
    ),
    ("1", "A bug of hicachectl; please report the traceback."),
    ("2", "Bad usage or input: an option, a profile, a config or a URL."),
    ("3", "The store, server or device cannot be reached, refuses or fails."),
    (
        "4",
        "Finished, but with findings at or above --fail-on, with failed objects or conflicts, or "
        "below --min-usable.",
    ),
    ("130", "Interrupted (SIGINT)."),
    ("143", "Terminated (SIGTERM)."),
)
_STORES = (
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
    ("pack:///path/archive.hcpack", "A pack: the objects of a store in one file; see hcpack(5)."),
    ("NAME:", "A store of the config file."),
)
_MODELS = (
    f"SGLang {NEWEST_SGLANG} registers {len(ARCHITECTURES)} architectures, the names in the field "
    "architectures of config.json. For the targets below, profile and --model-config derive the "
    "pools from config.json. Each was compared with the pools that SGLang itself allocates, at TP "
    "1, 2 and 4, and at PP 1 and 2 where the model has stages.",
    "A field that a config lacks, and that SGLang's own config class would fill with a number, is "
    "asked for by name. For the other architectures, write a profile file; see "
    "hicachectl-profile(1).",
)
_UNVERIFIED_MODELS = (
    "For these, the compared config.json was written by hand, with the fields that SGLang reads. "
    "Field names of a published config may differ; compare the size of one page with the profile "
    "(ls --objects) before a repair.",
)
_DRAFT_FORMS = (
    (
        "MTP layers",
        "With EAGLE, a page object of the target ends with the layers of the draft. Without "
        "--draft-model-config, they are those of the target's own config. If the draft's config "
        "counts num_nextn_predict_layers as 0, the draft has pools like those below.",
    ),
    (
        "Models",
        "The pool draft has all layers; index keys are in draft_indexer. Of a draft with sliding "
        "windows, there is only draft_swa, with the window layers. If the config counts "
        "num_nextn_predict_layers, EAGLE appends the draft like an MTP layer.",
    ),
    ("Readers of the target's KV", "These drafts have no KV, so no objects."),
)
_OUTPUT = (
    "The result goes to stdout, or to the file of -o. Progress, remarks and errors go to stderr. "
    "A json result is one document; jsonl has one row per line.",
    "In table and csv, characters that a terminal would interpret or hide are written as \\xNN or "
    "\\uNNNN. In csv, a ' precedes text that begins like a formula.",
)
_HF3FS = (
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
_HF3FS_PARAMETERS = (
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
_NIXL = (
    "A URL names the directories of SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR, all of them and "
    "in the same order, since both decide where the file of a key lies. Files elsewhere are "
    "ignored, and verify reports misplaced-object, because no server finds them. If most files are "
    "elsewhere, the order or number of directories in the URL is wrong.",
    "A server's clear removes every file below the directories. So nothing of hicachectl lies "
    "there: no stamp (--stamp is refused), and no default quarantine. --repair quarantine "
    "needs --quarantine DIR, a directory outside the store.",
    "Of each model, the server of TP rank 0 removes the oldest page groups when a disk is as "
    "full as its l3_cleaner_high_watermark. Writes keep modification times and stop below "
    "this watermark on each disk; objects that would reach it fail as if the disk were full.",
    "Keys do not name PP, CP and DCP ranks, so ranks that share the directories overwrite each "
    "other's objects. With such a profile, verify reports colliding-keys, and ls, show and verify "
    "compare pages with each other, as without a profile; other commands refuse it. A profile "
    "without KV (DeepSeek-V4) is refused, too.",
    "With direct I/O, SGLang fails to write an object whose size is no multiple of a disk block. "
    "Such a pool is refused by name; use_direct_io false, with direct_io=off, stores it.",
    "Servers write in place. While an object is written, its file has its final name and is short.",
)
_NIXL_PARAMETERS = (
    (
        "direct_io=off",
        "For servers with use_direct_io false (SGLANG_HICACHE_NIXL_USE_DIRECT_IO=0). They write K "
        "and V, or the states of a page, apart even if their sizes are no multiple of 4 KiB. "
        "Default: on.",
    ),
    (
        "high_watermark=PERCENT",
        "The servers' l3_cleaner_high_watermark; default: 80. Give 100 if they have no cleaner.",
    ),
)
_MOONCAKE = (
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
_MOONCAKE_PARAMETERS = (
    ("admin=HOST:PORT", "The master's HTTP service; default: port 9003 of the master's host."),
    ("protocol=NAME", "Transfer protocol: tcp, rdma (the default), ..."),
    ("device=NAME", "Network devices for rdma."),
    ("metadata=URL", "Metadata service of the transfer engine; default: P2PHANDSHAKE."),
    ("tenant=NAME", "Only default can be listed."),
)
_MOONCAKE_SSD = (
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
    "file, one without its data file, records of an offset file that a restart would drop, and "
    "objects behind the end of a file. A file that changed within --grace may still be written, "
    "and is a remark. An object that is cut off is truncated or unreadable, and an object with "
    "another key in its place is unreadable.",
    "Records of offset files have a CRC-32C, which each read checks: verify reads them also "
    "without a profile (check digests). Buckets have no checksum: without a profile or a catalog "
    "verify does not read them, and says so. Objects that had not been offloaded are not in the "
    "files: a client writes a bucket once it has 500 objects or 256 MB.",
)
_ENVIRONMENT = (
    ("HICACHECTL_CONFIG", "The config file, if --config is not given."),
    ("HICACHECTL_API_KEY", "Bearer key for --server and --through-server."),
    (
        "XDG_STATE_HOME",
        "migrate keeps its journals in hicachectl/migrations of this directory; default: "
        "~/.local/state. If the home is not writable, journals are in hicachectl-UID below TMPDIR, "
        "a directory that only the user can access.",
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
_TRUST = (
    "The paths of STORE, --quarantine DIR and the parent of --lock FILE may contain symbolic "
    "links. Below them, no link is followed: .hicachectl in a store, its stamps and quarantine, "
    "and the lock file must be regular files and directories. Their owner must be the user who "
    "runs hicachectl, root, the owner of the store, or a user to whom the file system gives new "
    "files. A group-writable store trusts the members of its group. Objects in a quarantine "
    "keep the owner that they had in the store; any owner is accepted.",
    "A command that only reads skips files and directories that break these rules, and names them "
    "in a remark. A command that writes ends with status 3 before any change.",
    "Objects without a record in a quarantine are left alone; a remark names them.",
    "New files are never more readable than their sources. A copied file gets the permissions of "
    "its source, except those that the source's directory or the umask denies. A pack, a 3FS data "
    "file and an object made from several objects are readable only by users who may read every "
    "source object read so far. A pack is readable only by its owner until it is complete. "
    "Directories, stamps, catalogs and quarantine records are as readable as the store's "
    "directory. If a new file has another group than its source, that group gets no more "
    "permissions than others. "
    "New objects written by root belong to the owner of their directory, if that user may read the "
    "sources. The command restore also restores owner and permissions. Existing 3FS data files "
    "keep their permissions.",
)
_LOCKS = (
    "--lock FILE takes the lock of flock(2), as flock(1) does. If another process holds the lock, "
    "the command does nothing and exits with 0; its result says complete: false and stopped_by: "
    "lock. On NFS the lock holds on all hosts if the server supports locks (not with the mount "
    "options nolock and local_lock=flock).",
    "Earlier versions of hicachectl took POSIX locks (fcntl), which flock does not see on a local "
    "file system. Do not run both versions at once.",
)
_CONFIG_EXAMPLE = ("[stores.prod]", 'url = "file:///mnt/hicache"')
PROFILE_EXAMPLE = """\
model = "Qwen/Qwen3-Next-80B-A3B"   # served model name as given to SGLang
sglang = "0.5.23"                   # decides the key grammar
page_size = 64
layout = "page_first_direct"        # layer_first, page_first, page_head
tp = 2                              # attention TP size, as in the keys
pp = 1                              # with pp_partition = [24, 24]
cp = 1                              # cp_layer_split = true: layers divided
speculative_algorithm = ""          # hash_unit = "bigram" for EAGLE

[[pools]]
name = "kv"                         # the first pool must be kv
kind = "mha"                        # needs dtype, layers, kv_heads, head_dim
dtype = "bfloat16"
layers = [3, 7, 11]                 # model layer numbers, or a count
kv_heads = 2                        # of the whole model, before sharding
head_dim = 256

[[pools]]
name = "mamba"
kind = "mamba"                      # needs temporal, conv or both
layers = [0, 1, 2, 4, 5, 6]
temporal = { shape = [32, 128, 128], dtype = "float32" }
conv = [{ shape = [8192, 3], dtype = "bfloat16", groups = [2048, 2048, 4096] }]
"""
_STATES = (
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
# Sections of a command's page that follow its examples, as texts like click's help.
_REQUEST_FILES = """
    A line of --prompts is JSON: a text, a list of messages, or an object with text, prompt or
    messages. A line of --token-ids is a list of token ids, or an object with token_ids or
    input_ids. The objects can also have extra_key and cache_salt, objects with messages also tools,
    tool_choice and chat_template_kwargs.

    Chats, with their tools, go through the chat template of the model's tokenizer, as in SGLang. A
    server with --chat-template makes other token ids; give such chats with --token-ids. Images and
    other parts that are not text are refused.
"""
_GROUPS = """
    One page can have objects of several deployments. The objects of one page and deployment are a
    group. The member group of a row of ls --format jsonl names the group by the values that its
    keys show, such as "Qwen-Qwen3-32B tp4". The name is ? if the keys can be read in several ways.

    The options --pages of rm, restore and prewarm, and --pages-from of migrate, take such rows, and
    then apply to these groups only. A page hash alone stands for all groups of its page. rm refuses
    a hash that several deployments have, unless --all-deployments is given.

    Groups with the name ? are never removed or moved by a filter or because of a profile. Only rm
    --state unknown and rm --pages remove them.
"""
_UNFINISHED = """
    In directories of SGLang's file backend, and with --quarantine, each removal is recorded before
    it begins. If a run is killed, the next run of rm or verify --repair on the same store and
    quarantine first completes the removals that the killed run began. That run asks first, unless
    --yes is given. In other stores, run the killed command again. The kv objects are removed first,
    so objects left over are in the state orphan, and rm --state orphan removes them.
"""
_PARTS = """
    With --shard I/N, many processes on any number of hosts work on one store. All share the
    directory of --run, and all get the same options. The first process lists the store and writes
    the listing to the directory, divided by page hash. So all objects of a page are in one part.
    Objects without a page, stamps and the tables of 3FS are in part 0. Options such as --since 2h
    mean the same time for all parts: that of the first process.

    A part exits with 0 once its result is in the directory. A part that was killed is run again. If
    two processes do the same part, one of them waits, and takes over if the other stops for a
    minute. Limits such as --bwlimit and --time-limit are for the whole run: each part takes an
    equal share. A part that --time-limit cut is not complete; run again, it starts over, except
    with --repair, which keeps its plan. Each part has its own threads (--jobs). The directory must
    be on a file system with hard links that all hosts see, such as NFS.
"""
_CLUSTER = """
    With --ray, this host lists the store, divides the listing, and sends each part to a node of a
    Ray cluster. It writes the result of the whole run, with metrics and catalog, as a run in one
    process does. All nodes need the same releases of hicachectl, Python and Ray, and access to the
    store. They share no other directory; files that options name are read on this host only.

    Before the listing, each node opens the stores. Nodes that cannot are named and left out. A
    directory that is an unused mount point on one node looks like an empty store: mount it, or name
    a directory below the mount point.

    Each node does one part at a time; --workers N does N at once, on all nodes together. Limits
    such as --bwlimit are divided by this number. Reads from Mooncake grant leases, so parts on one
    node share the usual number of threads, unless --jobs is given. A part whose process or node is
    lost is done again, on another node if possible, at most three times. If it is lost each time,
    the result names it in missing_parts, and the exit status is 4.

    After an interruption, the same command with the same --run DIR continues the run. Without
    --run, the next run starts over. Run the command on a node of the cluster: auto finds the
    cluster of this host, HOST:PORT is its head node, and local starts one on this host alone. Ray
    clients (ray://) cannot be used.
"""
_BACKGROUND: dict[str, dict[str, str]] = {
    "merge": {"PARTS": _PARTS},
    "ls": {"GROUPS": _GROUPS},
    "rm": {"GROUPS": _GROUPS, "INTERRUPTED RUNS": _UNFINISHED},
    "restore": {
        "INTERRUPTED RUNS": """
            To complete an interrupted restore, run the same command again. If a removal by verify
            --repair was interrupted, restore makes its pages whole again: objects still in STORE
            stay there, and the others return from the quarantine.
        """,
    },
    "migrate": {
        "WRITTEN PAGES": """
            Without --to options, DST gets the objects that the same deployment would write there.
            With --to options, DST gets the objects that another deployment would write. Changes
            after which no server could read the pages are refused before anything is written:
            another page size, other pools, another number of context parallel ranks.

            Groups whose keys can be read in several ways are not copied.
        """,
        "TRAILERS": """
            Objects that the SGLang plug-in of hicachectl writes to a file store end with a trailer:
            a digest, and an identity that stands for weights, dtype, layout and page size. Plug-in
            servers read only objects of their identity.

            With --trailers auto, objects that keep key and bytes between file stores keep their
            trailers. Other objects get new ones if the profile names the weights, and SRC has
            trailers, or DST has, or SRC is a pack. The weights are those of the profile, of
            --weights, or of the markers of SRC, if these name only one model's. Transforms change
            the identity, not the weights. write always writes trailers and refuses to run if the
            weights are unknown. drop writes none. A pack, Mooncake and 3FS keep no trailers.

            Pages with objects of another identity than the profile's are not copied. Without
            --trailers write or drop, neither are objects without a trailer, if they would get one
            but lie beside objects that have one. An object of another identity in DST is a
            conflict, and with --trailers write also one without a trailer.
        """,
        "INTERRUPTED RUNS": """
            A run keeps a journal of completed batches; see XDG_STATE_HOME in hicachectl(1). Without
            --resume, the same command skips the pages that DST has whole. With --resume, it also
            uses the journal: --verify compares the pages that may not have been read back, --move
            removes the rest of the pages that were compared, and --if-exists overwrite does not
            write copied pages again.

            A page leaves SRC only after it was verified in DST.
        """,
    },
    "pack": {
        "PACKS AS STORES": """
            A pack records the profile with which it was written. Commands on such a pack need no
            --profile. verify compares each object with the digest in the pack, with or without a
            profile. KV in bfloat16 takes about 70% of its size.

            A pack whose writer was killed is not valid until pack repair, or the next writer, has
            recovered it. All objects up to the last whole one are saved.
        """,
    },
    "profile": {
        "LIVE SERVERS": """
            A server does not report the sizes of its model. So --server also needs the model's
            config.json: in the server's model path, if that is an absolute path that exists on this
            machine, or given with --model-config.
        """,
        "WEIGHTS": """
            The fields weights and draft_weights name the weights that the servers load, in 32
            hexadecimal digits. They are computed from the config and, of each safetensors file, the
            name, the size, the header and 4 KiB of each tensor and of each 64 MiB. They are equal
            on all hosts; paths and times do not count. Reading a model of 1 TB takes seconds.
            Training, merging or another quantisation changes the digits, but a change to a few rows
            of one tensor can go unnoticed.

            --weights DIR reads the weights as SGLang with its default settings loads them. With
            --server, the server's quantization, load format, revision, overrides and loader options
            count too, and without --weights its own model path is read if it is on this machine.
            Weights that are not safetensors files of the model path (GGUF, dummy, remote) have no
            such digits. For them, write a text of your own as weights in the profile file.

            draft_weights names those of a separate draft model. Without it, a draft is part of the
            model. --weights and --draft-weights also apply to a profile given with --profile.
        """,
    },
    "hits": {
        "REQUEST FILES": _REQUEST_FILES,
        "TOKENS THAT ARE NOT RESTORED": """
            Servers always compute the last token of a request. They skip prefixes below their
            prefetch threshold (256 tokens by default).
        """,
        "TRAILERS": """
            In a file store that the SGLang plug-in of hicachectl wrote, objects of another identity
            (weights, dtype, layout, page size) do not count, nor do objects without a trailer, as
            for plug-in servers. This needs a profile that names the weights, or markers that name
            only one model's.
        """,
    },
    "verify": {
        "VALUE CHECKS": """
            The check values needs a profile, but not the model's weights. Its findings:

            \b
            nan, inf          NaN or infinities, also as fp8 codes
            bad-scale         a scale that is not finite, or too small for a server to write
            all-zero          an object, a layer or a token's row with only zero bytes
            layout-mismatch   rows in the order of another memory layout
            replica-mismatch  KV heads that should be equal on several TP ranks, but differ
        """,
        "CATALOGS": """
            --update-catalog records the digest and the identity fields (such as inode and mtime) of
            each object read. A later run with --catalog compares the objects. If an identity field
            changed, a server has rewritten the object: the finding is re-recorded (info), and
            --update-catalog records the new digest. If no field changed but the bytes did, the
            finding is digest-mismatch.

            A pack has digests of its own. verify compares each of its objects, with or without a
            profile or a catalog.

            With --shard, the first process copies the catalog into the directory of --run, and each
            part reads its own share. hicachectl merge --catalog FILE writes the new catalog.
        """,
        "TRAILERS": """
            Objects that the SGLang plug-in of hicachectl writes to a file store end with a trailer:
            a digest, and an identity that stands for weights, dtype, layout and page size. The
            check digests compares each object with its trailer, without a catalog. A difference is
            a digest-mismatch, or identity-mismatch if the object has another identity than the
            servers of the profile: they refuse it, but servers without the plug-in read it. The
            detail says what differs.

            Identities need a profile that names the weights. A profile without weights takes those
            that the markers in .hicachectl/plugin state, if only one model's agree with it. Objects
            without a trailer are no findings, but counted in skipped_checks as undigested-objects.
        """,
        "STAMPS": """
            --stamp records the profile and --weights-version in .hicachectl/stamps of the store. A
            later run with another profile or weights version has the finding stamp-mismatch. The
            fields weights and draft_weights are compared if both the stamp and the profile have
            them; see hicachectl-profile(1).
        """,
        "REPAIR": """
            --repair removes all objects of a page group with an error. Groups that have only
            warnings stay, unless --repair-code names the code. Groups whose keys can be read in
            several ways always stay.

            With --shard, each part keeps the list of its page groups before it removes the first,
            and has a folder of its own in the quarantine. A part that is killed and run again only
            completes its removal. Parts cannot ask, so they need --yes or --dry-run.
        """,
        "INTERRUPTED REPAIRS": _UNFINISHED,
        "PARTS": _PARTS,
        "CLUSTERS": _CLUSTER,
        "UNCHECKED DTYPES": """
            Values do not show whether another dtype of the same width was written (e4m3 or e5m2,
            bfloat16 or float16). The result lists this in skipped_checks as dtypes.
        """,
        "MIXED SIZES": """
            Without a profile, the objects of one kind are compared with each other. If at least 3
            pages, and at least 5% of the pages, have another size than the rest, all these sizes
            count as correct. One mixed-sizes warning for each kind of object then states their
            counts, dates and the likely reason: servers with two settings wrote to the store.
            Rarer sizes are reported object by object. Only a profile shows which size the servers
            use now. --repair never repairs a mix.
        """,
        "MOONCAKE": """
            Reading an object grants a lease. For some seconds the object is not evicted and cannot
            be removed, and it is evicted later than others. The checks names, groups and sizes
            read no object. Use --bwlimit and --sample to reduce the load of the other checks.
        """,
        "GPU": """
            With --device cuda, objects are loaded into GPU memory layer by layer, as a server loads
            them. They are checked there, gathered back into the order of the store and digested.
            Objects that the profile does not describe are digested without being unpacked. The
            findings are the same as on the CPU.

            If a GPU is missing or fails, the run ends; with --device auto, the CPU continues.
        """,
    },
    "prewarm": {
        "REQUEST FILES": _REQUEST_FILES,
        "ORDER OF PAGES": """
            A prefix must be restorable from SRC by the rules of every pool. Of trailing pools
            (Mamba states, sliding windows) only the pages at the end of a prefix are copied. Pages
            that DST already has are left out.

            Pages are ranked by the computation that they save. The rank depends on how often and
            how recently requests used a page, as measured on the trace itself. No page precedes
            its prefix.

            With --all, prefixes are unknown. Newer minutes are copied first, and the pages of one
            minute in the order in which they were written.

            The rows of --dry-run are the plan. A trace with hash_ids alone gives a plan that cannot
            be executed.
        """,
        "END OF A RUN": """
            At the end, prewarm marks the pages as recently used, the least valuable first, so DST
            evicts the best pages last. After a deadline, or a signal during copying, this takes at
            most 10 s and covers only the best pages.

            After SIGTERM or Ctrl-C, copies in progress are finished, and the result is still
            written. If DST evicts pages during the run, the run ends and reports how much DST
            holds.
        """,
        "TRACES": """
            A line of a trace is {"timestamp": 27482, "token_ids": [...]}, with extra_key and
            cache_salt if the request had them. The members input_length and output_length (in
            tokens) improve the plan.

            To record a trace, start SGLang with --log-requests --log-requests-level 3
            --log-requests-format json (level 2 truncates long prompts), and extract the requests
            from its log:

            \b
            jq -cR 'fromjson? | select(.event == "request.finished" and .obj.input_ids) |
              {timestamp, token_ids: .obj.input_ids, extra_key: .obj.extra_key,
               cache_salt: .obj.cache_salt,
               output_length: .out.meta_info.completion_tokens}' server.log > trace.jsonl
        """,
        "PINS": """
            Mooncake drops a soft pin when its time is over. It also drops soft pins when nothing
            else can be evicted, unless the master runs with
            --allow_evict_soft_pinned_objects=false.
        """,
        "LIVE SERVERS": """
            With --through-server, the servers pull the prefixes that DST has, after the copy.
            prewarm sends each prefix as a request for one token, once to each DP rank. From a
            trace, each prefix is requested once, the most valuable first. The API key is the value
            of HICACHECTL_API_KEY.
        """,
        "PARTS": """
            With --shard I/N, many processes on any number of hosts warm one store. All share the
            directory of --run, and all get the same options. The first process reads the requests,
            compares both stores, and writes the plan to the directory. The other processes do not
            read the request file.

            The plan is divided into N slices of equal bytes, in its order of value: part 0 has the
            most valuable pages. Start low parts first, as Kubernetes and Slurm do. A part does not
            wait for the prefixes of its pages, which other parts copy. The part that ends last
            marks all pages as recently used and counts the usable tokens.

            --budget, --budget-pages and --min-usable are for the whole run. Each part takes an
            equal share of --bwlimit. --deadline counts from the start of the plan, also for parts
            that start later. With a deadline, make N at least 16 times the number of processes that
            run at once. The slices that a deadline interrupts are then few, and the least valuable
            of those copied.

            A part exits with 0 once its result is in the directory, and with 4 if pages failed or
            DST is full. A part that was killed, or exits with 4, is run again, and copies only what
            DST still lacks. hicachectl merge gives the document and the exit status of the whole
            run. A pack cannot be the destination. Servers of --through-server load prefixes that
            are whole in DST, so run that option afterwards.
        """,
        "USABLE TOKENS": """
            usable_tokens and --min-usable refer to one deployment, which the result
            names. With --through-server, it is the deployment of those servers. Otherwise it is the
            deployment for which the pages are written: --to-profile, the other --to options, or
            else the profile of SRC.

            A server cannot use pages that were written for another topology, because it never asks
            for their keys. If the stamp of DST names another deployment, a remark on stderr says
            so.
        """,
    },
}


def build(directory: Path) -> None:
    """Write hicachectl.1, one page per command, and hicachectl-models.7."""
    (directory / "hicachectl.1").write_text(main_page(), encoding="utf-8")
    (directory / "hicachectl-models.7").write_text(models_page(), encoding="utf-8")
    for name in COMMANDS:
        (directory / f"hicachectl-{name}.1").write_text(command_page(name), encoding="utf-8")


def main_page() -> str:
    """Return the page of the whole program."""
    ctx = _group_context()
    lines = [
        *_head("hicachectl", "inspect, verify, migrate and prewarm SGLang HiCache L3 stores"),
        ".Nm",
        ".Op Fl vqh",
        ".Op Fl -config Ar FILE",
        ".Ar COMMAND ...",
        *_description(cli.help or ""),
        ".Sh OPTIONS",
        *_options(cli, ctx),
        ".Sh COMMANDS",
        ".Bl -tag -width Ds",
    ]
    for name, entry in COMMANDS.items():
        lines += [f".It Xr hicachectl-{name} 1", _text(entry.summary)]
    lines += [".El", ".Sh STORES", *_list(_STORES)]
    lines += [".Sh OUTPUT", *_paragraphs(_OUTPUT)]
    lines += [".Sh MOONCAKE", *_paragraphs(_MOONCAKE)]
    lines += [".Pp", "Parameters of the URL:", *_list(_MOONCAKE_PARAMETERS)]
    lines += [".Sh MOONCAKE SSD", *_paragraphs(_MOONCAKE_SSD)]
    lines += [".Sh 3FS", *_paragraphs(_HF3FS)]
    lines += [".Pp", "Parameters of the URL:", *_list(_HF3FS_PARAMETERS)]
    lines += [".Sh NIXL", *_paragraphs(_NIXL)]
    lines += [".Pp", "Parameters of the URL:", *_list(_NIXL_PARAMETERS)]
    lines += [".Sh TRUST", *_paragraphs(_TRUST), ".Sh LOCKS", *_paragraphs(_LOCKS)]
    lines += [".Sh PAGE STATES", *_list(_STATES)]
    lines += [".Sh ENVIRONMENT", *_list(_ENVIRONMENT)]
    lines += [
        ".Sh FILES",
        ".Bl -tag -width Ds",
        ".It Pa ~/.config/hicachectl/config.toml",
        "Named stores:",
        ".El",
        ".Bd -literal -offset indent",
        *map(_literal, _CONFIG_EXAMPLE),
        ".Ed",
    ]
    lines += [".Sh EXIT STATUS", *_list(_EXIT_STATUS)]
    lines += [".Sh SEE ALSO", *_see_also("hicachectl")]
    return "\n".join(lines) + "\n"


def command_page(name: str) -> str:
    """Return the page of one command."""
    command = cli.get_command(_group_context(), name)
    assert command is not None  # COMMANDS names only commands that exist
    ctx = click.Context(command, info_name=name, parent=_group_context())
    arguments = [p.make_metavar(ctx) for p in command.params if isinstance(p, click.Argument)]
    if isinstance(command, click.Group):
        arguments.append("COMMAND ...")
    summary = COMMANDS[name].summary.rstrip(".")
    lines = [
        *_head(f"hicachectl-{name}", summary[0].lower() + summary[1:]),
        f".Nm hicachectl {name}",
        ".Op Ar OPTIONS",
        *(f".Ar {argument}" for argument in arguments),
        *_description(_without_pointer(command.help or "", name)),
        ".Sh OPTIONS",
        *_options(command, ctx),
        *_subcommands(command, ctx),
        ".Sh EXIT STATUS",
        "As for",
        ".Xr hicachectl 1 .",
        *_examples(command.epilog or ""),
        *_background(name),
        *(_profile_file() if name == "profile" else ()),
        ".Sh SEE ALSO",
        *_see_also(f"hicachectl-{name}"),
    ]
    return "\n".join(lines) + "\n"


def models_page() -> str:
    """Return the page with the answer to every architecture that SGLang registers."""
    served = [name for name, x in ARCHITECTURES.items() if isinstance(x, Family)]
    drafts = {name for name in served if getattr(ARCHITECTURES[name], "draft_only", False)}
    refused: dict[str, list[str]] = {}
    for name, answer in ARCHITECTURES.items():
        if isinstance(answer, Refusal):
            refused.setdefault(answer.reason, []).append(name)
    lines = [
        *_head("hicachectl-models", "model architectures that have a profile", section=7)[:-1],
        ".Sh DESCRIPTION",
        *_paragraphs(_MODELS),
        ".Sh TARGETS",
        *_names(set(served) - drafts - UNVERIFIED),
        ".Sh UNVERIFIED TARGETS",
        *_paragraphs(_UNVERIFIED_MODELS),
        *_names(UNVERIFIED),
        ".Sh DRAFTS",
        *_sentences("Configs of these architectures are for --draft-model-config."),
        *_drafts(drafts),
        ".Sh REFUSALS",
        *_sentences("The message names the architecture, followed by the reason."),
    ]
    for reason, names in refused.items():
        lines += [f".Ss {_text(reason)}", *_names(set(names))]
    lines += [".Sh SEE ALSO", ".Xr hicachectl-profile 1"]
    return "\n".join(lines) + "\n"


def _drafts(names: Set[str]) -> Iterator[str]:
    """Yield the drafts by the form of their KV."""
    families = {name: x for name in names if isinstance(x := ARCHITECTURES[name], Family)}
    frozen = {name for name, family in families.items() if family.frozen_kv}
    mtp = {x.architecture for x in OWN_DRAFTS.values() if x.nextn != 0} & set(families)
    for words, group in zip(_DRAFT_FORMS, (mtp, set(families) - mtp - frozen, frozen), strict=True):
        title, text = words
        yield f".Ss {_text(title)}"
        yield from _sentences(text)
        yield from _names(group)


def _names(names: Set[str]) -> Iterator[str]:
    yield ".Bl -item -compact -offset indent"
    for name in sorted(names):
        yield from (".It", _text(name))
    yield ".El"


def _group_context() -> click.Context:
    # With the group's settings: click keeps the first help option that it makes.
    return click.Context(cli, info_name="hicachectl", **cli.context_settings)


def _head(name: str, summary: str, section: int = 1) -> list[str]:
    return [
        f".Dd {RELEASE_DATE}",
        f".Dt {name.upper()} {section}",
        ".Os",
        ".Sh NAME",
        f".Nm {name}",
        f".Nd {_text(summary)}",
        ".Sh SYNOPSIS",
    ]


def _without_pointer(text: str, name: str) -> str:
    """Return a help text without the paragraph about the man page itself."""
    paragraphs = cleandoc(text).split("\n\n")
    own = f"hicachectl-{name}(1) "
    return "\n\n".join(paragraph for paragraph in paragraphs if not paragraph.startswith(own))


def _description(text: str) -> list[str]:
    """Return a help text as paragraphs; blocks that click must not rewrap stay as they are."""
    lines = [".Sh DESCRIPTION"]
    for number, paragraph in enumerate(cleandoc(text).split("\n\n")):
        if paragraph.startswith("\b"):
            body = paragraph.removeprefix("\b").strip("\n").splitlines()
            lines += [".Bd -literal -offset indent", *map(_literal, body), ".Ed"]
        else:
            lines += [*([".Pp"] if number else []), *_sentences(paragraph)]
    return lines


def _subcommands(command: click.Command, ctx: click.Context) -> Iterator[str]:
    if not isinstance(command, click.Group):
        return
    yield ".Sh COMMANDS"
    for name, part in command.commands.items():
        inner = click.Context(part, info_name=name, parent=ctx)
        arguments = [p.make_metavar(inner) for p in part.params if isinstance(p, click.Argument)]
        yield f".Ss {' '.join([name, *arguments])}"
        yield from _description(part.help or "")[1:]
        yield from _options(part, inner)


def _options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    yield ".Bl -tag -width Ds"
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None or isinstance(parameter, click.Argument):
            continue  # the synopsis and the description have the arguments
        names, text = record
        yield f".It {_flags(names)}"
        yield from _sentences(text)
    yield ".El"


def _flags(names: str) -> str:
    """Return `-o, --output FILE` as mdoc flags."""
    *flags, last = names.split(", ")
    last, _, value = last.partition(" ")
    parts = [f"Fl {_escaped(flag[1:])} ," for flag in flags] + [f"Fl {_escaped(last[1:])}"]
    return " ".join([*parts, f"Ar {_escaped(value)}"] if value else parts)


def _examples(epilog: str) -> list[str]:
    lines = [line for line in epilog.replace("\b", "").splitlines() if line != "Examples:"]
    shown = textwrap.dedent("\n".join(lines)).strip("\n").splitlines()
    if not shown:
        return []
    return [".Sh EXAMPLES", ".Bd -literal -offset indent", *map(_literal, shown), ".Ed"]


def _background(name: str) -> Iterator[str]:
    for title, text in _BACKGROUND.get(name, {}).items():
        yield f".Sh {title}"
        yield from _description(text.strip("\n"))[1:]


def _profile_file() -> list[str]:
    return [
        ".Sh PROFILE FILE",
        *_sentences(
            "A profile is TOML, or JSON with the same keys. It describes the whole model before "
            "sharding. Leave out fields that do not apply."
        ),
        ".Bd -literal -offset indent",
        *map(_literal, PROFILE_EXAMPLE.splitlines()),
        ".Ed",
        ".Pp",
        *_sentences(
            "Further fields of the deployment: dcp (decode context parallel size), linear_tp (TP "
            "size of the Mamba states; default: tp), tag (Mooncake's extra_backend_tag), "
            "tp_lcm_size (Mooncake with split heads), hash_unit (token or bigram), weights and "
            "draft_weights (see WEIGHTS)."
        ),
        ".Pp",
        "Fields of each kind of pool:",
        *_list(tuple((kind.name, kind.summary) for kind in kinds())),
        ".Pp",
        *_sentences(
            "Each pool also takes packed_draft_layers, hit_policy (all_pages or trailing_pages), "
            "trailing_pages and replicated. A profile with inferred = true states only the facts "
            "seen in a store; commands that must interpret bytes refuse it."
        ),
    ]


def _see_also(page: str) -> list[str]:
    pages = [f"{name} 1" for name in sorted({"hicachectl", *map("hicachectl-{}".format, COMMANDS)})]
    pages = [other for other in pages if other != f"{page} 1"]
    if page in ("hicachectl", "hicachectl-pack"):
        pages.append("hcpack 5")
    if page in ("hicachectl", "hicachectl-profile"):
        pages.append("hicachectl-models 7")
    if page.removeprefix("hicachectl-") in ("hicachectl", "merge", "migrate", "prewarm", "verify"):
        pages.append("hicachectl-scaling 7")
    if page in ("hicachectl", "hicachectl-prewarm", "hicachectl-verify"):
        pages.append("hicachectl-scheduling 7")
    return [f".Xr {other} {',' if other != pages[-1] else ''}".rstrip() for other in pages]


def _list(entries: tuple[tuple[str, str], ...]) -> Iterator[str]:
    yield ".Bl -tag -width Ds"
    for term, text in entries:
        yield f".It {_text(term)}"
        yield from _sentences(text)
    yield ".El"


def _paragraphs(texts: tuple[str, ...]) -> Iterator[str]:
    for number, text in enumerate(texts):
        yield from [*([".Pp"] if number else []), *_sentences(text)]


def _sentences(text: str) -> list[str]:
    """Return one sentence per line, as mdoc requires."""
    flat = " ".join(text.split())
    sentences = re.split(r"(?<=[.;:])\s+(?=[A-Z])|(?<=\.)\s+(?=[a-z-])", flat)
    return [_text(line) for text in sentences for line in _WRAPPER.wrap(text)]


def _text(line: str) -> str:
    escaped = _escaped(line)
    return rf"\&{escaped}" if escaped[:1] in (".", "'") else escaped


def _literal(line: str) -> str:
    return _text(line.rstrip())


def _escaped(text: str) -> str:
    replacements = (("\\", "\\e"), ("-", "\\-"), ("…", "..."), ('"', "\\(dq"))
    for plain, escape in replacements:
        text = text.replace(plain, escape)
    return text


if __name__ == "__main__":
    build(Path(sys.argv[1]))
