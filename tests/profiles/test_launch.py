"""`profile --launch`: scripts, containers and processes; what is unknown or refused is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import FormatError
from hicachectl.profiles.launch import read_launch
from hicachectl.profiles.shell_words import ScriptReader
from tests.model_records import MODELS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

FLAGS = "--page-size 64 --enable-hierarchical-cache --hicache-storage-backend file"
SCRIPT = r"""#!/bin/bash
set -euo pipefail
# serves the model, as python -m sglang.launch_server does
TP=2
MODEL=${MODEL:-FOLDER}   # of the node
EXTRA="--tp $TP  --kv-cache-dtype fp8_e5m2"
ARGS=(
  --served-model-name "org/my model"  # a name with a space
  --json-model-override-args '{"num_hidden_layers": 4}'
)
ARGS+=(--page-size 32)
export SGLANG_PP_LAYER_PARTITION=1,3
if [ -d /dev/shm ]; then ulimit -n 65536; fi
CUDA_VISIBLE_DEVICES=0,1 exec "python3" -m sglang.launch_server --model-path "$MODEL" \
  $EXTRA --pp-size 2 "${ARGS[@]}" --enable-hicache --hicache-storage-backend file \
  --host "$(hostname -i)" --port ${PORT} --log-level=in\
fo "$@" >server#1.log 2>&1 &
wait
"""
DEPLOYMENT = """
apiVersion: v1
kind: Service
spec: {ports: [{port: 1}]}
---
kind: StatefulSet
spec:
  template:
    spec:
      initContainers:
        - {name: wait, command: [sh, -c, sleep 1]}
      containers:
        - name: engine
          command: [COMMAND]
          args: ARGS
          env:
            - {name: MODEL, value: "FOLDER"}
            - {name: SGLANG_MAMBA_SSM_DTYPE, value: bfloat16}
            - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["LlamaForCausalLM"]["config"]))
    return folder


def profile(invoke: Invoke, launch: object, *options: object) -> dict[str, Any]:
    text = invoke("profile", "--launch", launch, "--format", "json", *options).stdout
    found: dict[str, Any] = json.loads(text)
    return found


def refused(invoke: Invoke, launch: object, *options: object) -> str:
    return invoke("profile", "--launch", launch, *options, exit_code=2).stderr


@pytest.mark.parametrize("prefix", ["@", ""])
def test_a_script_is_read_as_a_shell_would(
    invoke: Invoke, model: Path, tmp_path: Path, prefix: str
) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(SCRIPT.replace("FOLDER", str(model)))
    output = invoke("profile", "--launch", f"{prefix}{script}", "--format", "json")
    found = json.loads(output.stdout)
    assert found["model"] == "org/my model"
    assert (found["tp"], found["pp"], found["pp_partition"]) == (2, 2, [1, 3])
    assert found["page_size"] == 32
    assert (found["pools"][0]["dtype"], found["pools"][0]["layers"]) == ("float8_e5m2", 4)
    assert "the script passes on arguments of its own, which are not read" in output.stderr


def test_words_are_those_of_bash(tmp_path: Path) -> None:
    """The commands of the script, run by bash with programs that print their words."""
    body = SCRIPT.replace("FOLDER", "/m").replace("exec ", "").replace(">server#1.log 2>&1 &", "")
    body = body.replace("$(hostname -i)", "h").replace("set -euo pipefail\n", "PORT=7\n")
    for name in ("python3", "ulimit", "wait"):
        (tmp_path / name).write_text('#!/bin/sh\nprintf "%s\\0" "$@" >>"$OUT"\n')
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "out"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(out)}
    subprocess.run(["bash", "-c", body], check=True, env=env)
    theirs = out.read_text().rstrip("\0").split("\0")
    reader = ScriptReader()
    (ours,) = [one for one in reader.commands(body) if "python3" in one.words]
    assert list(ours.words[1:]) == theirs
    assert not reader.unknown - {"$MODEL"}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("a 'b c'\"d $X\"e", ["a", "b cd 1 2e"]),
        ("a $X \"\" '' $NONE", ["a", "1", "2", "", "", "$NONE"]),
        ('a ${Y:-d} ${X-e} "${Y:=f g}"', ["a", "d", "1", "2", "f g"]),
        ("a b#c #d\n", ["a", "b#c"]),
        ("a \\$X '$X' \"\\$X\\q\"", ["a", "$X", "$X", "$X\\q"]),
        ("a `b c` $(d $(e f)) ${X%1}", ["a", "`b c`", "$(d $(e f))", "${X%1}"]),
        ("a <in b >>out 2>&1 c", ["a", "b", "c"]),
        ('a "${L[@]}" "${L[*]}" ${L[@]}', ["a", "x", "y z", "x y z", "x", "y", "z"]),
        ('E=\na "${E:-d}" ${E-d} "$E"', ["a", "d", ""]),
        ('M=()\na "${M[@]}" ${M[@]} b"${M[@]}" "${M[@]:-d}"', ["a", "b", "d"]),
        ('a ${N:=n} $N "${X:=m}"', ["a", "n", "n", "1 2"]),
        ('C="p ${L[@]}"\na $C', ["a", "p", "x", "y", "z"]),
    ],
)
def test_words_and_variables(script: str, words: list[str]) -> None:
    found = list(ScriptReader().commands(f"X='1 2'\nL=(x 'y z')\n{script}"))
    assert [list(command.words) for command in found] == [words]


@pytest.mark.parametrize("text", ["a 'b", 'a "b', "a `b", "x\ny 'z"])
def test_unclosed_quotes_are_refused_with_their_line(text: str) -> None:
    with pytest.raises(FormatError, match=rf"line {text.count(chr(10)) + 1}: .* is not closed"):
        list(ScriptReader().commands(text))


@pytest.mark.parametrize(
    "script",
    [
        "cat <<EOF >x\nb c\n'\nEOF\na 1",
        "cat <<'EOF'\nb $(\nEOF\na 1",
        'cat <<-"E F" <<\\G | tee x\nb\n\t\tE F\nb "\nG\na 1',
        "cat 3<< EOF\nEOF \n EOF\nEOF\na 1",
        "cat <<EOF\r\nb\r\nEOF\r\na 1",
        "cat <<<EOF\na 1",
        "cat ; ((x = 1 << 2))\na 1",
        "cat $((1 << 2))\na 1",
        "a 1 <<EOF\nb\nEOF",
        "cat '<<EOF' # <<EOF\na 1",
    ],
)  # fmt: skip
def test_here_documents_are_no_commands(script: str) -> None:
    found = [one.words for one in ScriptReader().commands(script)]
    assert ("a", "1") in found
    assert "b" not in {words[0] for words in found}


def test_a_launch_command_in_a_here_document_is_not_read(
    invoke: Invoke, model: Path, tmp_path: Path
) -> None:
    inner = f"cat >inner.sh <<'EOF'\nsglang serve {model} --page-size 8\nEOF\n"
    said = refused(invoke, f"{inner}bash inner.sh")
    assert "here-documents (<<) are not read: give such a script in a file of its own" in said
    found = profile(invoke, f"{inner}sglang serve {model} --page-size 16")
    assert found["page_size"] == 16
    unclosed = refused(invoke, f"true\ncat <<EOF\nsglang serve {model}\n")
    assert "line 3: a here-document (<<) has no last line" in unclosed


def test_variables_of_env_and_docker_count(model: Path) -> None:
    name, flags = "SGLANG_PP_LAYER_PARTITION", f"--model-path {model} --pp-size 2"
    for line in (
        f"{name}=3,1 nohup python -m sglang.launch_server {flags} &",
        f"env {name}=3,1 python -m sglang.launch_server {flags}",
        f"docker run --rm -e {name}=3,1 image python -m sglang.launch_server {flags}",
        f"docker run --env={name}=3,1 image python -m sglang.launch_server {flags}",
        f"export {name}=3,1\nexec python -m sglang.launch_server {flags}",
        f"{name}=3\n{name}+=,1; export {name}; python -m sglang.launch_server {flags}",
    ):
        assert read_launch(line).environment == {name: "3,1"}, line


@pytest.mark.parametrize(
    "line",
    [
        "python -m sglang.launch_server --model-path FOLDER",
        "FOO=1 nohup /usr/bin/python3.11 -u -m sglang.launch_server --model FOLDER",
        "sglang serve FOLDER",
        "sglang serve --model-type llm FOLDER",
        "/opt/venv/bin/sglang serve --model-type=llm --model-path FOLDER",
        "docker run --gpus all -e SGLANG_X=1 lmsysorg/sglang:latest "
        "python3 -m sglang.launch_server --model-path FOLDER",
        "docker exec c bash -c 'cd /x && python3 -m sglang.launch_server --model-path FOLDER'",
        '["python3", "-m", "sglang.launch_server", "--model-path", "FOLDER"]',
        "--model-path FOLDER",
        "[ -d FOLDER ] && exec sglang serve FOLDER",
        "bash -c '[[ -d FOLDER ]] && exec sglang serve FOLDER'",
        "env -u HF_HOME SGLANG_X=1 python3 -m sglang.launch_server --model-path FOLDER",
        "exec env A=B sglang serve FOLDER",
        "setsid nohup sglang serve FOLDER --page-size 16 >log 2>&1 </dev/null &\nwait #",
        "CMD='sglang serve FOLDER'; echo starting; $CMD",
        "(cd /tmp; sglang serve FOLDER --page-size 16) | tee log #",
        "if true; then\n  sglang serve FOLDER --page-size 16\nfi #",
        "srun -N 1 python /sgl/python/sglang/launch_server.py --model-path FOLDER",
    ],
)
def test_launchers(invoke: Invoke, model: Path, line: str) -> None:
    line = line.replace("FOLDER", str(model))
    if line.startswith('["'):
        line = json.dumps([*json.loads(line), "--page-size", "16"])
    elif line.endswith("'"):
        line = f"{line[:-1]} --page-size 16'"
    else:
        line += " --page-size 16"
    assert profile(invoke, line)["page_size"] == 16


@pytest.mark.parametrize(
    ("command", "args"),
    [
        ("python3, -m, sglang.launch_server",
         '[--model-path, $(MODEL), --page-size, "8", --tp, "2"]'),
        ("bash, -c", "[exec sglang serve $MODEL --page-size 8 --tp 2]"),
        ("", '[--model-path, $(MODEL), --page-size=8, --tp=2]'),
    ],
)  # fmt: skip
def test_containers(invoke: Invoke, model: Path, tmp_path: Path, command: str, args: str) -> None:
    file = tmp_path / "engine.yaml"
    text = DEPLOYMENT.replace("COMMAND", command).replace("ARGS", args)
    file.write_text(text.replace("FOLDER", str(model)))
    found = profile(invoke, f"@{file}")
    assert (found["model"], found["page_size"], found["tp"]) == (str(model), 8, 2)
    assert read_launch(f"@{file}").environment["SGLANG_MAMBA_SSM_DTYPE"] == "bfloat16"


def test_compose_files(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "compose.yml"
    file.write_text(
        "services:\n  engine:\n    environment:\n    - SGLANG_PP_LAYER_PARTITION=30,2\n"
        "    command: >\n"
        f"      python3 -m sglang.launch_server --model-path {model}\n      --page-size 8 "
        "--pp-size 2\n"
    )
    assert profile(invoke, file)["pp_partition"] == [30, 2]


def test_a_running_server_is_read_by_its_process(
    invoke: Invoke, model: Path, tmp_path: Path
) -> None:
    """A relative path is in its working directory."""
    (tmp_path / "flags.yaml").write_text("page-size: 128\nhicache-storage-backend: file\n")
    words = ["-m", "sglang.launch_server", "--model-path", "model", "--config", "flags.yaml"]
    sleeper = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", sleeper, *words],
        cwd=tmp_path,
        env={**os.environ, "SGLANG_PP_LAYER_PARTITION": "2,30", "HF_TOKEN": "secret"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        launch = read_launch(f"pid:{server.pid}")
        assert launch.environment.keys() <= {n for n in launch.environment if "SGLANG_" in n}
        assert launch.environment["SGLANG_PP_LAYER_PARTITION"] == "2,30"
        found = profile(invoke, f"pid:{server.pid}")
        server.communicate()
    assert (found["model"], found["page_size"]) == ("model", 128)
    said = f"pid:{server.pid}: no such process on this machine; see ps -ef"
    assert said in refused(invoke, f"pid:{server.pid}")


def test_a_process_that_has_ended_cannot_be_read(invoke: Invoke) -> None:
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        said = refused(invoke, f"pid:{ended.pid}")
    assert said.startswith(f"hicachectl: pid:{ended.pid}: cannot read the process: No such ")
    assert said.endswith("; run as the server's user, or give its command line\n")


def test_options_replace_flags(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "other.json"
    text = (model / "config.json").read_text()
    config.write_text(text.replace('"num_hidden_layers": 32', '"num_hidden_layers": 6'))
    line = f"sglang serve org/private --tp 2 {FLAGS}"
    said = refused(invoke, line)
    assert "'org/private' is not a directory with a config.json on this machine" in said
    assert "give --model-config" in said
    found = profile(invoke, line, "--model-config", config, "--tp", 4)
    assert (found["model"], found["tp"], found["pools"][0]["layers"]) == ("org/private", 4, 6)


def test_models_of_the_hub_cache_are_found(
    invoke: Invoke, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    place = tmp_path / "hub" / "models--org--m"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "snapshots").mkdir()
    (place / "snapshots" / commit).symlink_to(model)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert profile(invoke, f"sglang serve org/m {FLAGS}")["model"] == "org/m"
    (place / "refs" / "main").write_text("../../elsewhere")
    assert "give --model-config" in refused(invoke, f"sglang serve org/m {FLAGS}")


def test_store_options_in_a_file_are_read(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    for name, text in {
        "o.json": '{"extra_backend_tag": "blue", "prefetch_threshold": 64}',
        "o.toml": 'extra_backend_tag = "blue"\nprefetch_threshold = 64',
        "o.yaml": "extra_backend_tag: blue\nprefetch_threshold: 64",
    }.items():
        (tmp_path / name).write_text(text)
        line = (f"sglang serve {model} --page-size 8 --enable-hicache --hicache-storage-backend "
                f"mooncake --hicache-storage-backend-extra-config @{tmp_path / name}")  # fmt: skip
        found = profile(invoke, line)
        assert (found["tag"], found["prefetch_threshold"]) == ("blue", 64)
        found = profile(invoke, line, "--prefetch-threshold", 128)
        assert found["prefetch_threshold"] == 128
    output = invoke("profile", "--launch", line.replace("o.yaml", "none.yaml"))
    assert "its tag, tp_lcm_size and prefetch_threshold are unknown; give --tag" in output.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sglang serve FOLDER --tp_size 2", "no flag --tp_size; did you mean --tp-size?"),
        ("sglang serve FOLDER --tp-sise 2", "no flag --tp-sise; did you mean --tp-size?"),
        ("sglang serve FOLDER --xyzzy", "no flag --xyzzy; leave it out if another release has it"),
        ("sglang serve FOLDER --page 2", "ambiguous option: --page could match --page-size"),
        ("sglang serve FOLDER --tp", "--tp-size/--tensor-parallel-size: expected one argument"),
        ("sglang serve FOLDER --tp two", "--tp-size: expected a number, found 'two'"),
        ("sglang serve FOLDER extra", "'extra' belongs to no flag"),
        ("sglang serve FOLDER --tp $TP", "--tp-size: the command does not set $TP; write"),
        ("sglang serve $(cat model)", "--model-path: the command does not set $(cat model)"),
        ("sglang serve --tp 2", "model_path: missing"),
        ("sglang serve FOLDER --config=x.yaml",
         "--config=FILE: SGLang does not read the file; write --config FILE"),
        ("sglang serve FOLDER --config none.yaml",
         "hicachectl: none.yaml: cannot read: No such file or directory; check the path"),
        ("sglang serve FOLDER --config a --config b", "--config: SGLang takes one file of flags;"),
        ("sglang serve FOLDER", "page_size: missing, and SGLang's default depends on the GPU"),
        ("sglang serve FOLDER --enable-hisparse --page-size 8", "enable_hisparse: not supported"),
        ("python -m vllm.entrypoints.openai.api_server",
         "--launch: has no command that launches an SGLang server; give one, such as python -m"),
        ("sglang serve a; sglang serve b", "has 2 launch commands; give one of them"),
        ("sglang serve 'FOLDER", "--launch: line 1: a quote or a parenthesis is not closed; close"),
        (f"sglang serve FOLDER --tp 2 --host {'h' * 300} --xyzzy", "no flag --xyzzy"),
        ("[1, 2]", "--launch: the list of words: 1 is no text; put it in quotes"),
        ("@none.sh", "none.sh: cannot read: No such file or directory; check the path"),
    ],
)  # fmt: skip
def test_refusals_name_the_flag_and_the_remedy(
    invoke: Invoke, model: Path, line: str, said: str
) -> None:
    assert said in refused(invoke, line.replace("FOLDER", str(model)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--page-size 64", "the server runs without --enable-hierarchical-cache"),
        ("--page-size 64 --enable-hicache", "the server was started without an L3 store"),
        (f"{FLAGS} --attention-backend fa4", "fa4 takes pages of 128 tokens on Blackwell"),
        (f"{FLAGS} --device npu", "--device: the rules of CUDA are applied"),
        (f"{FLAGS} --radix-cache-backend x", "--radix-cache-backend can change pages"),
    ],
)
def test_what_could_matter_is_said(invoke: Invoke, model: Path, flags: str, said: str) -> None:
    assert said in invoke("profile", "--launch", f"sglang serve {model} {flags}").stderr


def test_harmless_values_may_be_unknown(invoke: Invoke, model: Path) -> None:
    line = f"sglang serve {model} --host $POD_IP --api-key `cat key` {FLAGS}"
    assert profile(invoke, line)["page_size"] == 64


def test_other_sources_are_refused(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    line = f"sglang serve {model} {FLAGS}"
    assert "--launch cannot be combined with --server" in (
        refused(invoke, line, "--server", "http://127.0.0.1:1")
    )
    assert "--launch cannot be combined with --profile" in (
        refused(invoke, line, "--profile", tmp_path / "x.toml")
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("A=xx\n" + "A=$A$A\n" * 60 + "echo $A", "variables expand to more than 4194304"),
        ("A=xx\n" + "A+=$A\n" * 60, "variables expand to more than 4194304"),
        ('export A=\'x sglang "$A"\'; echo "$A"', "has no command that launches"),
        ("$(" * 5_000, "has no command that launches"),
        ('"' * 5_001, "is not closed"),
        ("cat <<a\na\n" * 20_000, "has no command that launches"),
        ("cat" + " <<a" * 20_000 + "\n" + "a\n" * 20_000, "has no command that launches"),
        ("cat" + " <<a" * 20_000 + "\nx", "has no last line"),
        ("((<<" * 20_000, "has no command that launches"),
    ],
    ids=["doubled", "appended", "itself", "expansions", "quotes", "documents", "document ends",
         "no end", "shifts"],
)  # fmt: skip
def test_hostile_scripts_are_refused(invoke: Invoke, script: str, said: str) -> None:
    assert said in refused(invoke, script)


def test_hostile_yaml_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    bomb = "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]\n" for n in range(1, 12))
    for text, said in (
        (f"b0: &b0 [x]\n{bomb}", "YAML aliases are not read; write the values out"),
        ("!!python/object/apply:os.system [id]", "not YAML: line 1: could not determine a"),
        ("[" * 2_000, "YAML is nested more than 64 times; give the command alone"),
        ("a: [", "not YAML: line "),
        ("a: \0", "not YAML: unacceptable character"),
        ("a: 2000-13-01", "not YAML: month must be in 1..12"),
        ("x" * (257 << 10), "larger than 262144 bytes, so not a launch script; check the path"),
    ):
        file.write_text(text)
        assert f"hicachectl: {file}: {said}" in refused(invoke, file)


def test_yaml_needs_its_package(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engine.yaml"
    file.touch()
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert refused(invoke, file) == (
        "hicachectl: YAML needs the package pyyaml; run pip install 'hicachectl[yaml]', or give "
        "the flags in the command\n"
    )


def test_a_script_of_bytes_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_bytes(b"\xff")
    assert f"{script}: not UTF-8 text; save the file as UTF-8" in refused(invoke, script)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.yaml", "\udcff", "x.yaml: not UTF-8 text; save the file as UTF-8"),
        ("x.yaml", "a: [", "x.yaml: not YAML: line "),
        ("x.json", "{bad", "x.json: not JSON"),
        ("x.json", "[1]", "x.json: not a JSON object"),
        ("x.toml", f"{'a.' * 20_000}a = 1", "x.toml: a key has 20001 parts"),
        ("x.yaml", "- 1", "x.yaml: expected names and values, found [1]"),
    ],
)
def test_files_of_flags_are_bounded(
    invoke: Invoke, model: Path, tmp_path: Path, name: str, text: str, said: str
) -> None:
    file = tmp_path / name
    file.write_text(text, errors="surrogateescape")
    option = "--hicache-storage-backend-extra-config"
    told = refused(invoke, f"sglang serve {model} {FLAGS} {option} @{file}")
    assert said in told
    assert told.count(name) == 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("assignments.sh", "A=1 " * 60_000, "no command that launches"),
        ("many.sh", "".join(f"sglang serve m{n}\n" for n in range(13_000)), "13000 launch"),
        ("scripts.sh", f"export A={'a' * 100_000}\n" + f"x '{'$A' * 40} sglang y'\n" * 1500,
         "scripts.sh: variables expand to more than 4194304 characters; give the launch command"),
        ("words.yaml", f"args: [{'a,' * 100_000}]", "no command that launches"),
        ("hexadecimal.yaml", f"args: [--tp, 0x{'f' * 5000}]",
         "hexadecimal.yaml: 0xffffffffffffffffff… is not a number that a flag can have; correct"),
        ("sexagesimal.yaml", f"args: [1{':1' * 100_000}]", "is not a number"),
        ("path.sh", f"sglang serve {'ab' * 50_000}", "give --model-config"),
    ],
    ids=lambda text: str(text)[:12],
)  # fmt: skip
def test_large_scripts_take_seconds_at_most(
    invoke: Invoke, tmp_path: Path, name: str, text: str, said: str
) -> None:
    script = tmp_path / name
    script.write_text(text)
    started = time.process_time()
    assert said in refused(invoke, script)
    assert time.process_time() - started < 5  # several took minutes


def test_a_refusal_of_yaml_shows_no_line_of_it(invoke: Invoke, tmp_path: Path) -> None:
    script = tmp_path / "pod.yaml"
    script.write_text('env:\n- name: KEY\n  value: "hunter2" x\n')
    said = refused(invoke, script)
    assert "not YAML: line 3: " in said
    assert "hunter2" not in said
