"""Refused command lines: the message names the option or object, the value, and what to do."""

from __future__ import annotations

import json
import os
import pty
import sys
from typing import TYPE_CHECKING

import pytest

from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.spec import object_specs
from tests.move.migrations import demo_store, profile_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Invoke

# A command line, and what its message says, in this order.
REFUSED = """
migrate STORE NEW --page a --match ab            | --page | 'a' and 'ab' | give only one
migrate STORE STORE                               | STORE | give another destination
migrate STORE NEW --move                          | --yes
migrate STORE NEW --profile PROFILE --to-layout layer_first | layer_first
migrate STORE NEW --to-tp 3                       | --to-tp | give --profile, --model-config
migrate STORE NEW --profile PROFILE --to-profile PROFILE --to-tp 2 | --to-tp | --to-profile
migrate STORE NEW --profile PROFILE --to-tp 3     | mamba | [8, 32, 32] | TP size 3 | `whole`
migrate STORE NEW --profile PROFILE --to-layout x | layout | 'x' | layer_first
migrate STORE NEW --bwlimit fast                  | --bwlimit | 'fast' | 200GiB
migrate STORE NEW --bwlimit 0                     | --bwlimit | '0' | less than 1 byte
migrate STORE NEW --jobs 0                        | --jobs | 0 | 1 or more
migrate STORE NEW --shard 9/8 --run RUN           | --shard 9/8 | part 9 of 8 | the last is 7
migrate STORE NEW --shard 1/8                     | --shard | --run DIR
migrate STORE NEW --shard /8 --run RUN            | --shard /8 | JOB_COMPLETION_INDEX | give I/8
migrate STORE NEW --ray auto --move               | --move | --ray | leave out
prewarm STORE --all                               | --from SRC | --through-server URL
prewarm --trace TEXT --profile PROFILE            | --trace | --dry-run | --from SRC
prewarm --trace TEXT --profile PROFILE --dry-run --format json | --format json | leave out --format
prewarm NEW --all --from STORE --budget 1GiB      | profile | give --profile
prewarm NEW --all --from TABLES --profile PROFILE --budget-pages 1 | --all | timestamps | --pages
prewarm --trace TRACE --dry-run --budget 1GiB     | --budget | block ids | give --budget-pages
prewarm NEW --all --from STORE --pin-ttl 5m       | --pin-ttl | --pin
prewarm NEW --through-server http://127.0.0.1:1 --pages TEXT | --through-server | give --prompts
profile                                           | profile | give --profile, --model-config
profile --print-probe STORE                       | --print-probe | no STORE | -o
profile --model-config TEXT                       | TEXT | not JSON | give a model's config.json
profile --model-config LIST                       | LIST | not a JSON object | give a model's
profile --model-config FUTURE --page-size 64 | FUTURE | 'NewForCausalLM' | run | --print-probe
profile --model-config CONFIG --page-size 64 --pp 9 | pp | 4 layers | 9 stages | give a smaller pp
profile --model-config CONFIG --pp-partition 3,x  | --pp-partition | '3,x' | such as 30,31
profile --model-config CONFIG --tp 0              | --tp | 0 | 1 or more
migrate STORE NEW --model-config CONFIG --page-size 64 --to-pp-partition x | partition | 'x' | 30,31
profile --model-config LONG                       | LONG | File name too long | check it
migrate STORE NEW --to-profile NONE               | NONE | No such file | check the path
profile -o toml                                   | -o toml | use --format toml
profile --server ftp://x                          | --server | 'ftp://x' | http://host:port
quarantine list PACK                              | PACK | give the path of a quarantine
quarantine list LONG                              | LONG | File name too long | check it
quarantine list NONE                              | NONE | verify --repair
quarantine purge NONE --before 1d --yes           | NONE | verify --repair
restore PACK STORE --yes                          | PACK | give the path of a quarantine
restore NONE NONE                                 | --yes
restore NONE STORE --yes                          | NONE | verify --repair
verify STORE --profile PROFILE --repair delete --quarantine Q --yes | --repair delete | --quarantine
verify STORE --yes                                | --yes | --repair
verify STORE --repair quarantine --yes            | --repair | give --profile
verify STORE --profile PROFILE --lock NONE/lock   | --lock | NONE/lock | No such file | give a file
verify STORE --device gpu                         | --device | 'gpu' | cuda:0
verify STORE --checks x                           | --checks | 'x' | names, groups, sizes
verify STORE --checks digests                     | digests | --catalog FILE
verify STORE --checks values                      | values | --profile
verify STORE --sample 5                           | --sample | '5' | write 5%
verify STORE --sample 500%                        | --sample | 500% | at most 100%
verify STORE --sample-slice 3                     | --sample-slice | --sample
verify STORE --time-limit never                   | --time-limit | 'never' | 90s
verify STORE --catalog TEXT                       | TEXT | --update-catalog
verify STORE --catalog LONG                       | LONG | File name too long | check it
verify STORE --catalog TEXT --checks names        | --catalog | digests | add digests
verify STORE --update-catalog                     | --update-catalog | --catalog FILE
verify STORE --fail-on often                      | --fail-on | 'often' | 'error'
verify TABLES --profile PROFILE --stamp           | TABLES | no directory for a stamp | leave
verify SHORT --profile PROFILE                    | SHORT | 0:kv | 128 pages | 9000 | file_size=
verify TABLES --profile PROFILE --repair delete --yes --shard 1/2 --run RUN | TABLES | one process
verify STORE --repair delete --shard 0/2 --run RUN | cannot ask | --yes or --dry-run
verify STORE --repair delete --yes --shard 0/2 --run RUN | --repair needs a given profile
verify STORE --repair-code x                      | --repair-code | 'x' | missing-pool
rm STORE                                          | --model | --temporaries
rm STORE --yes                                    | --model | clear_hicache_storage_backend
rm STORE --model x --all-deployments --yes        | --all-deployments | --pages
rm NONE --model x                                 | --yes or --dry-run
rm STORE --before 1d --token-ids IDS --yes        | --token-ids | no longer an option | age out
rm STORE --free 0 --yes                           | --free
rm STORE --free ten --yes                         | --free
rm STORE --model m --trace TRACE --yes            | --trace needs --free SIZE
rm STORE --model m --keep-plan TEXT --yes         | --keep-plan needs --free SIZE
rm STORE --free 1B --trace TRACE --yes            | --trace needs --profile
rm STORE --free 1B --trace TRACE --keep-plan TEXT --profile PROFILE --yes | --trace | --keep-plan
rm STORE --free 1B --temporaries --yes            | leave out --free
rm STORE --keep-free 5% --temporaries --yes       | leave out --keep-free
rm STORE --free 1B --max-size 1B --yes             | --free cannot be combined with --max-size
rm STORE --max-size 0 --yes                       | --max-size
rm STORE --keep-free 30 --yes                     | --keep-free | 30 bytes | 30%
rm STORE --keep-free 100% --yes                   | --keep-free | 100%
rm STORE --free 1B --trace TRACE --profile PROFILE --yes | TRACE | keys of pages | --keep-plan
rm STORE --pages TEXT --yes                       | TEXT | line 1 | hicachectl ls --format jsonl
rm TABLES --before 1d --yes --profile PROFILE     | --before | no timestamps | leave out --before
-q rm TABLES --free 1B --yes                      | --free | TABLES | timestamps | --keep-plan
rm STORE --free 1B --token-ids IDS --profile PROFILE --yes | --token-ids | --free | --trace
rm STORE --temporaries --model x --yes            | --temporaries | leave out --model
rm STORE --temporaries --tag x --yes              | --temporaries | leave out --tag
rm STORE --temporaries --no-tag --yes             | --temporaries | leave out --no-tag
rm STORE --temporaries --state whole --yes        | --temporaries | leave out --state
rm STORE --temporaries --pages TEXT --yes         | --temporaries | leave out --pages
rm STORE --temporaries --profile PROFILE --yes    | --temporaries | leave out --profile
rm STORE --model x --and-unnamed --yes            | --and-unnamed needs --trace or --keep-plan
rm STORE --free 1B --profile PROFILE --and-unnamed --yes | --and-unnamed needs --trace
show STORE zz                                     | 'zz' | hexadecimal
show STORE ab                                     | STORE | 'ab' | hicachectl ls
explain x                                         | 'x' | hicachectl explain
pack info TEXT                                    | TEXT | not a pack | check the path
pack info mooncake://h                            | mooncake store
pack repair TEXT                                  | TEXT | not a pack | check the path
merge NONE                                        | NONE | No such file | check the path
merge STORE                                       | STORE | run.json | check the path
completion tcsh                                   | 'tcsh' | 'bash', 'zsh', 'fish'
demo STORE                                        | STORE | not empty | name a new directory
ls STORE --sort-by x                              | --sort-by | 'x' | mtime
-q ls TABLES --sort-by mtime                      | --sort-by mtime | sort by another column
-q ls TABLES --sort-by age                        | --sort-by age | no timestamps | another
-q ls TABLES --summary --sort-by last_mtime       | --sort-by last_mtime | no timestamps
ls TABLES --since 1d                              | --since | no timestamps | leave out --since
ls TABLES --before 1d                             | --before | no timestamps | leave out --before
-q ls STORE -o TEXT/x                             | TEXT/x | Not a directory
-q ls STORE -o LONG                               | LONG | name too long
-q ls STORE --format arrow -o NONE/x              | NONE/x | No such file | check its directory
ls STORE --layout page_first                      | --layout | --model-config
ls STORE --layout page_first --profile PROFILE    | --layout
ls STORE --profile TEXT                           | TEXT | TOML
ls STORE --profile BINARY                         | BINARY | UTF-8
ls STORE --profile NONE                           | NONE | No such file
ls STORE --format xml                             | --format | 'xml' is not one of
ls STORE --limit 0                                | --limit | 0 | 1 or more
ls STORE --before 2026-13-01                      | --before | '2026-13-01' | ISO 8601
ls STORE --state odd                              | --state | 'odd' | whole, partial
ls STORE --page xyz                               | 'xyz' | hexadecimal
ls                                                | argument is missing | see hicachectl ls --help
ls STORE NEW                                      | NEW | see hicachectl ls --help
ls STORE --limt 3                                 | --limt | no such option | did you mean --limit?
ls STORE --limit                                  | --limit | requires an argument | ls --help
ls STORE --objects=3                              | --objects | does not take a value; see
completion                                        | SHELL | is missing | bash, zsh, fish
report STORE -o LONG                              | LONG | File name too long | check it
report STORE -o TEXT                              | TEXT | not an HTML page | another file
report STORE -o /proc/self/mem                    | self/mem | cannot write | check its directory
report STORE -o NONE/x --mark =2d                 | --mark | '=2d' | no text before = | TEXT=TIME
report STORE -o STORE/page.html                   | page.html | lies in the store | name a file
report STORE                                      | --output | is missing | see hicachectl report -
--verbos ls STORE                                 | --verbos | did you mean --verbose?
verfy STORE                                       | No such command 'verfy'; did you mean verify
zzz                                               | No such command 'zzz'; see hicachectl -h
pack zzz                                          | No such command 'zzz'; see hicachectl pack -h
quarantine prune                                  | 'prune' | did you mean purge?
ls STORE --objects --summary                      | --objects | --summary | leave out
ls hf3fs:///x                                     | hf3fs:///x | server=http | snapshot=FILE
ls SERVED                                         | SERVED | cannot list keys | snapshot=FILE
migrate STORE TABLES --profile PROFILE            | TABLES | metadata server | give server=http
ls mooncake-ssd:                                  | mooncake-ssd: | name the directory | ssd:///
ls MANY                                           | nixl:///d0,/d1 | 257 directories | at most 256
ls s3://bucket                                    | 's3' | file
ls mooncake://h:1?nope=1                          | 'nope' | known: admin
ls mooncake://h:1?protocol=tcp&protocol=rdma      | 'protocol' | twice
hits STORE                                        | --prompts, --token-ids, --pages and --trace
hits STORE --token-ids IDS                        | page size | --page-size
hits STORE --token-ids IDS --page-size 4 --tokenizer STORE | --tokenizer | needs --prompts
hits STORE --token-ids TEXT --page-size 64        | TEXT | line 1 | not JSON
hits STORE --pages TEXT --token-ids IDS           | one of --prompts, --token-ids, --pages and
hits STORE --pages TEXT --kv-cache-dtype auto     | --kv-cache-dtype needs --model-config
hits STORE --pages NONE                           | NONE | cannot read
hits STORE --prompts TEXT --page-size 4           | --prompts needs a tokenizer; give --tokenizer
hits STORE --token-ids IDS --page-size 4 --speculative-algorithm magic | magic
hits STORE --token-ids IDS --page-size 0          | --page-size | 0 | 1 or more
hits STORE --token-ids IDS --profile PROFILE --model x | --model | leave out --profile
""".strip().splitlines()
UNREACHABLE = """
ls NONE                       | NONE | No such file | its file system is mounted
ls TEXT                       | TEXT | Not a directory | give the directory
ls FIFO                       | FIFO | Not a directory | give the directory
ls hf3fs:///none/x?snapshot=/none | /none | no such directory | check the prefix
ls LONG3FS                    | nnn: no such directory | check the prefix
ls UNSAVED                    | NONE | No such file | --persistence-path
migrate STORE TEXT/x --profile PROFILE | TEXT/x | Not a directory | check the path
migrate STORE NIXL --profile PROFILE | TEXT/x | Not a directory | check the path
rm NONE --model b --yes       | NONE | No such file
demo TEXT/x                   | TEXT/x | Not a directory | name a new directory
ls nixl:///none/at/all        | /none/at/all | No such file | check the path
ls mooncake-ssd:///none       | /none | No such file | check the path
ls PACK                       | a.hcpack | No such file | check the path
pack info STORE               | STORE | not a regular file | give a pack
profile --server http://127.0.0.1:1 | 127.0.0.1:1 | refused | check that this is the URL
rm mooncake://127.0.0.1:1 --before 1d --yes | 127.0.0.1 | refused | --metrics_port
""".strip().splitlines()


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "head_dim": 8,
    "torch_dtype": "bfloat16", "_name_or_path": "m",
}  # fmt: skip
FILE_BYTES = 1 << 20


def snapshot_store(folder: Path) -> str:
    """Make the data files and the saved tables of a 3FS cluster; return the URL without a server.

    Each table has one key; its page was never written.
    """
    tables = {}
    for spec in object_specs(PROFILE, "hf3fs"):
        rank, pool, _ = spec.affix[0].split(":")
        side = "" if pool == "kv" else f".{pool}"
        with (folder / f"hicache.{rank}.bin{side}").open("wb") as file:
            file.truncate(FILE_BYTES)
        pages = FILE_BYTES // spec.nbytes
        tables[f"{rank}:{pool}"] = {
            "num_pages": pages,
            "free_pages": list(range(1, pages)),
            "key_to_index": [["0" * 64 + spec.affix[1], 0]],
        }
    (folder / "snapshot.json").write_text(json.dumps(tables))
    return f"hf3fs://{folder}/hicache?snapshot={folder}/snapshot.json"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that puts the paths of a store and of files into a text."""
    tmp_path = tmp_path_factory.mktemp("refused")
    (tmp_path / "text").write_text("x")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "ids").write_text("[1, 2, 3]\n")
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "config").write_text(json.dumps(CONFIG))
    future = {**CONFIG, "architectures": ["NewForCausalLM"]}
    (tmp_path / "future").write_text(json.dumps(future))
    (tmp_path / "trace").write_text('{"timestamp": 0, "hash_ids": [1]}\n')
    os.mkfifo(tmp_path / "fifo")
    tables = snapshot_store(tmp_path)
    places = {
        "STORE": demo_store(tmp_path / "store"),
        "PROFILE": profile_file(tmp_path / "profile.toml"),
        "PACK": f"pack://{tmp_path}/a.hcpack",
        "TEXT": tmp_path / "text",
        "BINARY": tmp_path / "binary",
        "IDS": tmp_path / "ids",
        "LIST": tmp_path / "list",
        "CONFIG": tmp_path / "config",
        "FUTURE": tmp_path / "future",
        "TRACE": tmp_path / "trace",
        "FIFO": tmp_path / "fifo",
        "TABLES": tables,
        "SHORT": f"{tables}&file_size=9000",
        "SERVED": f"hf3fs://{tmp_path}/hicache?server=http://127.0.0.1:1",
        "UNSAVED": f"hf3fs://{tmp_path}/hicache?snapshot={tmp_path}/none",
        "NIXL": f"nixl://{tmp_path}/text/x",
        "MANY": f"nixl://{','.join(f'/d{number}' for number in range(257))}",
        "NONE": tmp_path / "none",
        "LONG": tmp_path / ("n" * 300),
        "LONG3FS": f"hf3fs://{tmp_path}/{'n' * 300}/x?snapshot=/none",
        "NEW": tmp_path / "new",
        "RUN": tmp_path / "run",
        "Q": tmp_path / "q",
    }

    def fill(text: str) -> str:
        head, slash, rest = text.partition("/")
        return f"{places.get(head, head)}{slash}{rest}"

    return fill


def refuse(invoke: Invoke, fill: Callable[[str], str], case: str, exit_code: int) -> None:
    words, *said = (text.strip() for text in case.split("|"))
    outcome = invoke(*map(fill, words.split()), exit_code=exit_code)
    assert outcome.stdout == ""
    (message,) = outcome.stderr.splitlines()
    assert message.startswith("hicachectl: ")
    at = 0
    for text in map(fill, said):
        found = message.find(text, at)
        assert found >= 0, f"{text!r} is not in {message[at:]!r}"
        at = found + len(text)
    assert not any(map(os.path.lexists, (fill("NEW"), fill("RUN"))))


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_option_the_value_and_the_remedy(
    invoke: Invoke, filled: Callable[[str], str], case: str
) -> None:
    refuse(invoke, filled, case, 2)


@pytest.mark.parametrize("case", UNREACHABLE)
def test_a_store_that_cannot_be_reached_is_named_with_the_remedy(
    invoke: Invoke, filled: Callable[[str], str], case: str
) -> None:
    refuse(invoke, filled, case, 3)


def test_a_binary_format_is_not_written_to_a_terminal(
    invoke: Invoke, filled: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, terminal = pty.openpty()
    with os.fdopen(reader), os.fdopen(terminal, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        outcome = invoke("-q", "ls", filled("STORE"), "--format", "arrow", exit_code=2)
    assert outcome.stderr == (
        "hicachectl: --format arrow is binary, and stdout is a terminal; add -o FILE or a "
        "redirection\n"
    )
