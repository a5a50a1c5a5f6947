"""Sections of the commands' pages; they are too long for `--help`."""

from __future__ import annotations

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
                                    # groups: lengths that TP divides separately; whole = [1, 2]:
                                    # every rank has a copy of these groups, as B and C of Mamba2
                                    # with one group; least = 128: the length of a head, which
                                    # ranks share if they are more than the heads (without groups)
"""
# Sections of a command's page that follow its examples, as texts like click's help.
_REQUEST_FILES = """
    A line of --prompts is JSON: a text, a list of messages, or an object with text, prompt or
    messages. A line of --token-ids is a list of token ids, or an object with token_ids or
    input_ids. The objects can also have extra_key and cache_salt, objects with messages also tools,
    tool_choice and chat_template_kwargs. Members that change the pages of a request in another way,
    such as image_data or reasoning_effort, are refused. Others are ignored, so that a line can be a
    whole request. Servers from SGLang 0.5.20 on keep the pages of each extra_key and cache_salt
    apart; for an earlier release in the profile, they are ignored.

    A server keeps the pages of each LoRA adapter apart, by extra_key followed by lora_id. Give both
    as extra_key. A line with lora_path or lora_id is refused, unless they are null.

    Chats, with their tools, go through the chat template of the model's tokenizer, as in SGLang. A
    server with --chat-template makes other token ids; give such chats with --token-ids. Images and
    other parts that are not text are refused. So is a file without requests.
"""
_GROUPS = """
    One page can have objects of several deployments. The objects of one page and deployment are a
    group. The member group of a row of ls --format jsonl names the group by the values that its
    keys show, such as "Qwen-Qwen3-32B tp4". The name is ? if the keys can be read in several ways.

    The option --pages takes such rows, and then applies to these groups only. A page hash alone
    stands for all groups of its page. rm refuses a hash that several deployments have, unless
    --all-deployments is given.

    Groups with the name ? are never removed or moved by a filter or because of a profile. Only rm
    --state unknown and rm --pages remove them.

    ls with filters lists the groups among which the other commands choose with the same filters: rm
    takes all but those in flight and those with the name ?, migrate those that its document does
    not count as skipped or left_out, and verify --repair those with errors. A filter chooses whole
    groups.
"""
_UNFINISHED = """
    If a run is killed, run the same command again. The kv objects of some pages leave, durably,
    before their other objects do. So what is left of a page is in the state orphan: no server finds
    it, and rm --state orphan removes it.
"""
_PARTS = """
    With --shard I/N, many processes on any number of hosts work on one store. All share the
    directory of --run, and all get the same options. Part 0 lists the store and writes the listing
    to the directory, divided by page hash. So all objects of a page are in one part. Objects
    without a page, stamps and the tables of 3FS are in part 0. Options such as --since 2h mean the
    same time for all parts: that of part 0. Start part 0 first, or with the others: these wait for
    its listing, say so each minute, and end with 3 after --wait.

    A part has one result. It exits once its result is in the directory, and run again it says when
    it was done and exits in the same way. A part that was killed has none, and is run again. It
    then does its work again, and counts what it did itself. Two attempts at a part may overlap: the
    first result counts. A part that --time-limit cut is not complete; another run does the rest.

    A directory is one run. A finished run is refused by each part (exit status 2), so give another
    directory each time, such as /shared/$(date +%F). hicachectl merge joins a whole run once, or
    with --again. Its document has the time of the listing (listed), as do the metrics.

    Limits such as --bwlimit and --time-limit are for the whole run: each part takes an equal share.
    Each part has its own threads (--jobs). The directory must be on a file system with hard links
    that all hosts see, such as NFS.
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
BACKGROUND: dict[str, dict[str, str]] = {
    "merge": {"PARTS": _PARTS},
    "ls": {"GROUPS": _GROUPS},
    "rm": {
        "FREE SPACE": """
            --free counts the bytes of objects. Copies of an object on several Mooncake segments
            free as much each. A file with further hard links frees its space with the last link.
            3FS hands freed pages out again; its files keep their size. Groups with an object of
            unknown size stay. Pages of an interrupted run, which are removed first, do not count.
            Pages that servers rewrite meanwhile stay and do not count either; the run says how many
            bytes that leaves to free.

            Without --trace or --keep-plan, the pages whose last use is oldest are removed first.
            The last use is the later of write and read, as far as the file system notes reads:
            HiCacheFile does not mark them, the SGLang plug-in of hicachectl does. The prefix that a
            page hangs on is unknown then. Servers use the pages of a request within seconds, so at
            most the requests at the limit keep a tail without its prefix. A prefix that many
            requests share is old on a file system that notes no reads, so prefer --trace there.
            Mooncake and 3FS keep no times, and need --trace or --keep-plan.

            With --trace, the value of a page is that of hicachectl-prewarm(1): the chance that a
            request uses the page again. A page is worth at least as much as the pages after it, so
            tails are removed before their prefixes. Pages that no request of the trace uses are
            removed before all others, the longest unused first. The requests name the profile's
            deployment only: pages of other deployments stay, and are listed with their bytes.
            --and-unnamed removes these first. A trace should cover the requests of at least a day.

            With --keep-plan, the pages outside the plan are removed first, then the plan's, from
            its last page to its first. A plan or trace none of whose pages are in the store is
            refused: it is of another page size or tokenizer.

            The member free of the JSON document has what is lost and kept: the pages that the trace
            or plan names and those of them that are removed, and, with a trace, how many tokens
            servers can restore before and after.

            --free without another filter never removes every page of a store.
        """,
        "PAGES THAT SERVERS WRITE": """
            Servers write the objects of a page one by one, the sidecars first. Every choice, --free
            included, leaves pages that are not whole and younger than --grace. The run says how
            many; the exit status stays 0. Mooncake and 3FS keep no times: there the pages that are
            not whole are looked at again after the grace, if any are chosen.

            Each page is looked at once more right before it leaves. If a server has written one of
            its objects since the listing, the page stays: its state or its age may be another now.
            The member kept counts these pages.

            --state partial needs --profile, because only a profile states which objects a page has.
            Without one, a stray object makes whole pages look partial. Pages of other deployments
            than the profile's are never partial for it. --state orphan needs no profile: no server
            reads objects without their kv object.
        """,
        "GROUPS": _GROUPS,
        "INTERRUPTED RUNS": _UNFINISHED,
    },
    "report": {
        "THE PAGE": """
            Findings are grouped by code. Each has its meaning, its risk, the command that mends it,
            and what that costs; hicachectl-findings(7) has the same texts.

            Bytes by deployment, pool and object size: a bar with more than one colour has objects
            of several sizes under the same keys, so servers with another dtype, page size or TP
            size wrote to the store.

            Writes over time count the objects that are in the store now, by their last write, in
            UTC. Objects that were evicted since are missing. Few times that are far from all others
            are left out and counted. Stores that keep no times have no such chart.

            Completeness is the share of the pages that have the objects of a pool and rank. Pages
            younger than --grace are left out.

            Requests are drawn as a prefix tree: from left to right the pages of a prefix, from top
            to bottom the requests that share it. A page can be restored if at least one request can
            use it. kv only means that servers find the page, but lack another object of it or of a
            page before it. The numbers are the objects that stop the most requests.

            The page in full has the strips of hicachectl-show(1): for each tensor and layer the
            mean magnitude of the values. It needs a profile that describes the values.

            The file states which checks ran and which did not. What no check judged may be damaged.
            Names from the store are shown with control and bidirectional characters escaped. The
            file is readable by the users who can list the store.
        """,
        "REQUEST FILES": _REQUEST_FILES,
    },
    "restore": {
        "INTERRUPTED RUNS": """
            To complete an interrupted restore, run the same command again. If a removal by verify
            --repair was interrupted, restore makes its pages whole again: objects still in STORE
            stay there, and the others return from the quarantine.
        """,
        "QUARANTINE RUNS": """
            Each repair with --repair quarantine fills one run, QUARANTINE/RUN. A run is itself a
            store: give its path to ls, show, verify or migrate. It has the names and folders of a
            file store; of a NIXL store, those of one directory; of any other store, all objects
            are in RUN/run.hcpack. RUN/.hicachectl has run.json, with the URL of the store and the
            time, findings.jsonl, with the reasons, and the markers of objects with trailers. The
            folder has the owner, group and mode of the store's directory.

            Objects are renamed into the run where the file system allows it. Elsewhere all of them
            are copied, and the copies are durable, before the first one leaves the store. An object
            that cannot be read, or has no room, stays in the store with its page.

            The newest run is restored first. Runs of an earlier form, with numbered files and their
            records, are named and left alone; the hicachectl that made them restores them.
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
            a digest, an identity that stands for weights, dtype, layout and page size, and the
            rank. Plug-in servers read only objects of their identity and rank. Trailers of older
            releases name no rank, and servers read them, too.

            With --trailers auto, objects that keep key and bytes between file stores keep their
            trailers. Other objects get new trailers if the profile names the weights and one of
            these is true: SRC has trailers, DST has trailers, SRC is a pack. The weights are those
            of the profile, of --weights, or of the markers of SRC if these name the weights of one
            model only. Transforms change the identity, not the weights. write always writes
            trailers, also in place of those that name no rank, and refuses to run if the weights
            are unknown. The rank is that of the key in DST. drop writes none. A pack, Mooncake and
            3FS keep no trailers.

            Pages with objects of another identity than the profile's, or another rank than the
            key's, are not copied. Objects without a trailer are not copied either if they would get
            a trailer but lie beside objects that have one; --trailers write or drop copies them. An
            object of another identity in DST is a conflict; with --trailers write, so is an object
            without a trailer.
        """,
        "INTERRUPTED RUNS": """
            The same command completes an interrupted run: it compares SRC and DST, and copies what
            is missing. It first removes the unfinished files that the interrupted run left, which
            it knows by a mark; see XDG_STATE_HOME in hicachectl(1).

            A page leaves SRC only after it was verified in DST. If a kill interrupts the removal,
            SRC keeps a rest of the page. The next --move removes such a rest if DST has the page
            whole and equal to the rest, as far as both can be compared. left_in_source counts the
            other pages that are not whole in SRC: hicachectl ls SRC --state orphan,partial lists
            them, hicachectl rm removes them with the same options.
        """,
        "ONE PLACE UNDER TWO NAMES": """
            Two mounts of one directory have different device numbers, and a cluster can have
            several addresses. A page removed from SRC would then be gone from DST, too. --move
            therefore makes a file in SRC, and --if-exists overwrite one in DST; if the other store
            has the file, too, nothing is removed, and the exit status is 3.

            Between stores of any kind, the first page that --move removes stays in memory until
            DST, read again, still has it. If DST has lost the page, it goes back into SRC, and up
            to two more pages are tried, because DST may evict pages. If DST has lost all of them,
            the run ends with exit status 3. Each part of a divided run does both.
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
        "LAUNCH COMMANDS": """
            --launch takes the command of a server in one of these forms.

            A command or a script of a POSIX shell or bash: as a text, or in a file (@FILE, or the
            path alone). Quotes, comments, continued lines, variables and arrays that the script
            sets, defaults such as ${NAME:-4} and scripts in bash -c are read. Values
            that only an execution shows, such as $(hostname), are accepted in flags that do not
            matter to the profile. In other flags they are refused, and the message names the flag.

            A JSON list of words, or YAML of Kubernetes or Compose in a .yaml file: command, args
            and env of the one container that launches a server. YAML needs the Python package
            pyyaml.

            A running server on this machine, as pid:N, from its command line, its working
            directory, and the variables of its environment whose names begin with SGLANG_. It needs
            the rights of the server's user. N is the process of the launch command itself, not of a
            scheduler.

            Abbreviations, other spellings and --config FILE are read as SGLang reads them, and the
            file of --hicache-storage-backend-extra-config too. Page size, layout and sizes
            include the changes that SGLang itself makes. Where a change depends on the GPU or on
            the checkpoint, the message names the flag to give. A flag that SGLang lacks, and one
            with which a server has no HiCache, are refused.

            Flags given beside --launch replace those of the command. The model's config.json is
            read from --model-path, if that exists on this machine, or from this user's Hugging Face
            cache; else give --model-config, and for a draft --draft-model-config.
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
        "OTHER DEPLOYMENTS": """
            Keys name the model and, in files, the TP and PP sizes. So servers never find pages of
            another deployment, and a change of --tp-size loses all hits. Where STORE has requested
            pages of another deployment, the row says "exists at tp 4", and a remark on stderr says
            how many pages. In JSON, deployment is the measured one, elsewhere has the number of
            pages by deployment, and exists_at in stopped_by is the deployment that has the page.
            hicachectl migrate converts pages.

            If only a few pages are asked for, and STORE has one of them, STORE is not listed: then
            pages of other deployments are not found.
        """,
        "WRONG PAGE SIZES": """
            The page size and the hash unit decide the names of pages. If STORE has pages, but none
            of the requested ones, other page sizes (1 to 1024) and the other hash unit (tokens or
            token pairs, for EAGLE) are tried on the first requests. A remark on stderr says which
            of them finds pages.
        """,
        "TOKENS THAT ARE NOT RESTORED": """
            Servers always compute the last token of a request. If fewer tokens of a request are
            usable than their prefetch threshold, and at least a page, they fetch nothing, however
            long the request is. The threshold is 256 tokens, unless the profile or
            --prefetch-threshold states the prefetch_threshold of
            --hicache-storage-backend-extra-config. usable_tokens are what STORE has; served_tokens
            are what servers fetch that have none of it in their own memory. --min-usable and the
            last line count served tokens.

            Their share refers to the whole pages of each request, without its last
            token. A request without such a page counts with all its tokens, none of them served.
            Without any requested token, --min-usable fails.
        """,
        "TRAILERS": """
            In a file store that the SGLang plug-in of hicachectl wrote, objects of another identity
            (weights, dtype, layout, page size) or another rank do not count, nor do objects without
            a trailer, as for plug-in servers. This needs a profile that names the weights, or
            markers that name the weights of one model only.
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

            With --shard, part 0 copies the catalog into the directory of --run, and each part reads
            its own share. hicachectl merge --catalog FILE writes the new catalog.

            A catalog that would have fewer than half as many entries as before is not written, and
            the exit status is 4: the store may be mounted in part, or another one in its place.
            --allow-shrink writes it.
        """,
        "EMPTY STORES": """
            A store without any page may not be mounted, or its master may have lost its memory. So
            verify then ends with exit status 3. The catalog and the stamp stay. The metrics file
            has 0 objects, complete 0, and the time of the last success as before. The same holds
            for report, and for the sources of migrate and prewarm. --allow-empty accepts the store.

            migrate --move accepts it without the option, since an earlier run may have moved all
            pages. A filter that matches no page is no error.
        """,
        "TRAILERS": """
            Objects that the SGLang plug-in of hicachectl writes to a file store end with a trailer:
            a digest, an identity that stands for weights, dtype, layout and page size, and the
            rank. The check digests compares each object with its trailer, without a catalog. A
            difference is a digest-mismatch, or identity-mismatch if the object has another identity
            than the servers of the profile, or another rank than its key: servers refuse it, but
            servers without the plug-in read it. The detail says what differs.

            Identities need a profile that names the weights. A profile without weights takes the
            weights from the markers in .hicachectl/plugin, if the markers of only one model agree
            with the profile. Objects without a trailer are no findings, but skipped_checks names
            them as undigested-objects. Trailers of older releases name no rank: skipped_checks then
            has ranks, and unranked their number.
        """,
        "STAMPS": """
            --stamp records the profile and --weights-version in .hicachectl/stamps of the store, or
            in the side_directory that the URL of a NIXL store names; see hicachectl(1). Stores
            without such a place refuse the option. A later run with another profile or weights
            version has the finding stamp-mismatch. The fields weights and draft_weights are
            compared if both the stamp and the profile have them; see hicachectl-profile(1).
        """,
        "REPAIR": """
            --repair removes all objects of a page group with an error. Groups that have only
            warnings stay, unless --repair-code names the code. Groups whose keys can be read in
            several ways always stay, and so do those that the profile does not describe.

            To a wrong profile, healthy pages look damaged. So the newest pages that were judged
            must agree with the profile: the newest tenth, at least 8, and all pages where the store
            keeps no times. If at least half of these, and at least a tenth of all, have the same
            finding, nothing is repaired, and the exit status is 2. This applies to truncated and
            oversized (if the sizes are equal), missing-pool, missing-part, nan, inf, bad-scale,
            layout-mismatch and identity-mismatch. Compare the profile with the servers: hicachectl
            profile --server. If the profile is right, all that was written since the time that the
            message names is wrong: --despite-profile repairs it. Old pages that are wrong after a
            change of the servers' settings are repaired, whatever their number.

            Several repairs may run at once: the one that takes the kv object of a page takes the
            page, and the others leave it.

            With --shard, each part has a run of its own in the quarantine. A part that was killed
            and is run again checks its pages again, repairs the rest, and counts only that. Parts
            cannot ask, so they need --yes or --dry-run. Each part judges its own pages: hicachectl
            merge names the parts that repaired nothing, and ends with 2.
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
            counts, when the size changed, and the likely reason: servers with two settings wrote
            to the store.
            Rarer sizes are reported object by object. Only a profile shows which size the servers
            use now.

            With a profile, objects of another size are errors. If such a size is as common as
            above, and not all of its pages are older than nine tenths of the pages with the right
            size, servers with another setting may be running. The mixed-sizes warning then stands
            beside the errors, and --repair leaves these pages without --despite-profile. Where the
            store keeps no times, this holds for every common size.
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
            A line of a trace is that of a request file, with a time: {"timestamp": 27482,
            "token_ids": [...]}. The timestamp is a number in any unit, or ISO 8601. The members
            input_length and output_length (in tokens) improve the plan. Requests for LoRA adapters
            are refused: a trace without them would call their pages unused. Lines of --token-ids
            and --prompts can have these members, too.

            To record a trace, start SGLang with --log-requests --log-requests-level 3
            --log-requests-format json (level 2 truncates long prompts), and extract the requests
            from its log:

            \b
            jq -cR 'fromjson? | select(.event == "request.finished" and .obj.input_ids) |
              {timestamp, token_ids: .obj.input_ids, extra_key: .obj.extra_key,
               cache_salt: .obj.cache_salt, lora_path: .obj.lora_path,
               lora_id: .obj.lora_id,
               output_length: .out.meta_info.completion_tokens}' server.log > trace.jsonl
        """,
        "PINS": """
            Mooncake drops a soft pin when its time is over. It also drops soft pins when nothing
            else can be evicted, unless the master runs with
            --allow_evict_soft_pinned_objects=false.
        """,
        "LIVE SERVERS": """
            With --through-server, the servers pull the prefixes that DST has, after the copy.
            prewarm sends each prefix as a request for one token, once to each DP rank, the most
            valuable first. The API key is the value of HICACHECTL_API_KEY.
        """,
        "PARTS": """
            With --shard I/N, many processes on any number of hosts warm one store. All share the
            directory of --run, a new one for each run, and all get the same options. Part 0 reads
            the requests, compares both stores, and writes the plan to the directory. The other
            processes do not read the request file; they wait for the plan, at most --wait.

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
            DST is full. A part that was killed is run again, and copies only what DST still lacks;
            after status 4, so does another run. hicachectl merge gives the document and the exit
            status of the whole run. A pack cannot be the destination. Servers of --through-server
            load prefixes that are whole in DST, so run that option afterwards.
        """,
        "USABLE TOKENS": """
            usable_tokens and --min-usable refer to one deployment, which the result
            names. With --through-server, it is the deployment of those servers. Otherwise it is the
            deployment for which the pages are written: --to-profile, the other --to options, or
            else the profile of SRC.

            Servers fetch nothing of a request with fewer usable tokens than their prefetch
            threshold. served_tokens leaves these out, by the threshold of --prefetch-threshold,
            else of that deployment. With --all, and with --pages that are no chains, the prefixes
            are unknown, so only usable tokens are counted.

            --min-usable counts served tokens. Below it, the exit status is 4, and a line on stderr
            names the deployment and the share. If no token was requested, --min-usable fails, with
            --dry-run too. Otherwise --dry-run does not judge the share, which it counts before the
            copy.

            A server cannot use pages that were written for another topology, because it never asks
            for their keys. If SRC has requested pages of another deployment, a remark on stderr
            says so, and likewise if requests seem to be hashed with another page size than the
            pages of SRC. If the stamp of DST names another deployment, a remark on stderr says
            so.
        """,
    },
}
