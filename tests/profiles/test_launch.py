"""`profile --launch`: scripts, containers and processes; what is unknown or refused is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.profiles.launch import Launch, read_launches
from hicachectl.profiles.shell_words import ScriptReader
from tests.model_records import MODELS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

FLAGS = "--page-size 64 --enable-hierarchical-cache --hicache-storage-backend file"
SCRIPT = r"""#!/bin/bash
set -euo pipefail
export PATH="/opt/venv/bin:$PATH"
# serves the model, as python -m sglang.launch_server does; TP=8 on other nodes
TP=2
MODEL=FOLDER   # of the node
EXTRA="--tp $TP  --kv-cache-dtype fp8_e5m2"
ARGS=(
  --served-model-name "org/my model"  # a name with a space
  --json-model-override-args '{"num_hidden_layers": 4}'
)
export SGLANG_PP_LAYER_PARTITION=1,3
if [ -d /dev/shm ]; then ulimit -n 65536; fi
echo "starting with TP=$TP" && mkdir -p /tmp/$TP
for node in a b; do : "$node"; done
CUDA_VISIBLE_DEVICES=0,1 exec "python3" -m sglang.launch_server --model-path "$MODEL" \
  $EXTRA --pp-size 2 "${ARGS[@]}" --enable-hicache --hicache-storage-backend file \
  --host "$(hostname -i)" --port ${PORT} --log-level=in\
fo --page-size 32 >server#1.log 2>&1 &
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
def test_a_script_is_read(invoke: Invoke, model: Path, tmp_path: Path, prefix: str) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(SCRIPT.replace("FOLDER", str(model)))
    found = profile(invoke, f"{prefix}{script}")
    assert found["model"] == "org/my model"
    assert (found["tp"], found["pp"], found["pp_partition"]) == (2, 2, [1, 3])
    assert found["page_size"] == 32
    assert (found["pools"][0]["dtype"], found["pools"][0]["layers"]) == ("float8_e5m2", 4)


PARTITION = "SGLANG_PP_LAYER_PARTITION"


def run_by_bash(folder: Path, script: str) -> list[tuple[tuple[str, ...], str | None]]:
    """Return the words and the layer partition of each server that bash starts in a script."""
    if not (folder / "python3").exists():
        for name in ("python3", "sglang"):
            text = f"printf '%s\\0' \"${{{PARTITION}-none}}\" \"$@\"; printf '\\1\\0'"
            (folder / name).write_text(f'#!/bin/sh\n({text}) >>"$OUT"\n')
            (folder / name).chmod(0o755)
        (folder / "file").write_text("8\n")
        (folder / "env.sh").write_text("TP=8\nMORE='--tp 8'\n")
    out = folder / "out"
    out.unlink(missing_ok=True)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(out), "PORT": "7", "HOME": "/home/u"}
    subprocess.run(
        ["bash", "-c", script], env=env, cwd=folder, check=False, capture_output=True, timeout=20
    )
    text = out.read_bytes().decode() if out.exists() else ""
    started = [one.split("\0") for one in text.split("\1\0")[:-1]]
    return [
        (
            ("--model-path", *words[1:-1]) if words[0] == "serve" else tuple(words[2:-1]),
            None if partition == "none" else partition,
        )
        for partition, *words in started
    ]


def stated(script: str) -> list[Launch] | None:
    """Return the launches that a script is read as; None if one has an unknown part."""
    try:
        launches = read_launches(script)
    except (FormatError, UsageError):
        return None
    for one in launches:
        if any(part in word for part in one.unknown for word in one.arguments):
            return None
    return launches


def assert_right(folder: Path, script: str) -> None:
    """Assert that each server which bash starts is one that the reader states."""
    launches = stated(script)
    if launches is None:
        return
    for words, partition in run_by_bash(folder, script):
        found = [one for one in launches if one.arguments == words]
        assert found, (script, words, launches)
        for one in found:
            value = one.environment.get(PARTITION)
            assert value in one.unknown or value == partition, script


def test_words_are_those_of_bash(tmp_path: Path) -> None:
    """The launch command of the script, run by bash with a program that prints its words."""
    body = SCRIPT.replace("FOLDER", "/m").replace(">server#1.log 2>&1 &", "")
    body = body.replace("ulimit -n 65536", ":")  # which root alone may raise
    (ours,) = read_launches(body)
    assert ours.unknown.keys() == {"$(hostname -i)", "${PORT}"}
    known = body.replace("$(hostname -i)", "h").replace("${PORT}", "7")
    (ours,) = read_launches(known)
    assert run_by_bash(tmp_path, known) == [(ours.arguments, "1,3")]


# Statements that set or use the variables of a launch command. Most change one.
STATEMENTS = (
    "TP=4", "TP=2 # of a node", "export TP=4", "readonly TP=4", "declare -x TP='4'", "TP=\"$N\"",
    "N=4", "N=$TP", "MORE='--pp-size 2'", "MORE=\"--pp-size $TP\"", "ARGS=(--x 'a b')",
    "ARGS=(--tp \"$TP\" --y)", "ARGS=()", "ARGS+=(--z)", "TP+=1", "ARGS[0]=q",
    "if true; then TP=8; fi", "if false\nthen\nTP=8\nelse\nTP=16\nfi", "true && TP=8",
    "false || TP=8", "TP=3 true", "(TP=8)", "{ TP=8; }", "f() { TP=8; }; f",
    "function g {\nTP=8\n}; g",
    "TP=8 | cat", "TP=8 &", "for TP in 1 2; do :; done", "while read -r TP; do break; done <file",
    "read TP <file", "read -r N <file", "unset TP", "printf -v TP 8", "printf -v \"$V\" 8", "V=TP",
    "declare \"$V=8\"", "export $(cat env.sh | head -1)", "eval TP=8", "eval 'MORE=\"--tp 8\"'",
    ". ./env.sh", "source ./env.sh", "((TP=8))", "((TP++)) || true", "let TP=8", "echo $((TP*=2))",
    "echo ${TP:=8} ${N:=9}", "declare -n ref=TP; ref=8", "declare -i TP=4+4",
    "mapfile -t ARGS <file",
    "case 1 in\n1) TP=8 ;;\nesac", "echo \"TP=$TP\"", "[ \"$TP\" = 4 ] && echo TP", "# TP=8",
    "cat <<EOF\nTP=8\nEOF", "x=$(TP=8; echo $TP)", "x=`TP=8`", "set -- --tp 8", "shift",
    "command read TP <file", "test -n \"$TP\" || exit 1", "trap 'TP=8' DEBUG", "TP={1,2}", "N=*",
    "wait; TP=5", "exec 3<file; read -u 3 TP", "getopts T: TP", "local_() { local TP=8; }; local_",
    "select TP in a; do break; done <file", "h() { read $1 <file; }; h TP",
    "until TP=8; do :; done",
    "false &&\nTP=8", "X='TP'; read $X <file", "read -aTP <file", "printf -vTP 8", "IFS=4",
    "while IFS=4 read -r x; do :; done <file", "V=$(echo ')'; TP=8)", "alias python3=:",
    "f() { \"$@\"; }; f eval TP=8", "ev\\al TP=8", "[[ TP=8 -eq 8 ]]", "((--TP))",
    "X='TP=8'; ((X))", "tp=4; let --TP", "cat <<EOF\n$((TP=8))\nEOF", "cat <<<${TP:=8}",
    "export SGLANG_PP_LAYER_PARTITION=3,1", "SGLANG_PP_LAYER_PARTITION=2,2",
    "if true; then export SGLANG_PP_LAYER_PARTITION=1,3; fi", "unset SGLANG_PP_LAYER_PARTITION",
    "TP='4 5'", "TP='*'", "N=' 4'", "ARGS=('*' \"a\tb\")", "TP=~/x", "TP={4,5}", "TP=\"a'b\"",
    "echo 'don\\'t'", "x=$(case a in a) echo;; esac)", "fi", "{ N=5", "SECONDS=4", "COLUMNS=4",
    "export TP", "[[ -n $TP ]] && N=6", "! TP=8", "time TP=8", "TP=$'4\\n'", "MORE=", "TP=",
)  # fmt: skip
COMMANDS = (
    "python3 -m sglang.launch_server --tp $TP",
    "python3 -m sglang.launch_server --tp=\"$TP\" ${ARGS[@]} end",
    "exec python3 -m sglang.launch_server $MORE \"${ARGS[@]}\" --n \"${N:-5}\"",
    "run() { python3 -m sglang.launch_server --tp $TP $MORE; }\nrun",
    "if true; then python3 -m sglang.launch_server --tp \"${TP}\" \"x$N\"; fi",
    "CMD=\"python3 -m sglang.launch_server --tp $TP\"\n$CMD",
    "CMD=(python3 -m sglang.launch_server --tp $TP); \"${CMD[@]}\"",
    "python3 -m sglang.launch_server \\\n --tp $TP 'a'\\''b' \"$TP\\$N\" <file 2>&1 | cat",
    "SGLANG_PP_LAYER_PARTITION=4,0 python3 -m sglang.launch_server --tp $N x$TP",
    "bash -c \"python3 -m sglang.launch_server --tp $TP\"",
    "bash -c 'TP=5; python3 -m sglang.launch_server --tp $TP --n \"$N\"'",
    "bash -c \"TP=5; python3 -m sglang.launch_server --tp $TP \\$TP\"",
    "CMD='python3 -m sglang.launch_server --n \"a b\"'; eval \"$CMD --tp $TP\"",
    "eval python3 -m sglang.launch_server --n 'a b' --tp $TP",
    "for TP in 2 3; do python3 -m sglang.launch_server --tp $TP; done",
    "f() { local cmd='python3 -m sglang.launch_server --tp 2'; cmd+=' --n 3'; $cmd; }; f",
    "sglang serve m --tp $TP {a,b} [x] ~/y $'z' $\"w\" a\\\nb # --n 3\n",
    "sglang serve m --tp \"$TP\" > >(cat) --n 5",
    "sglang serve m --tp 2 '--n' \"a\\\"b\\\\c\\d\" 3>file",
    "sglang serve m --tp 2 --n $[1+1] $((1 + 1)) a#b c\xa0d e\u3000f g\rh",
    "cat <<'EOF' >out.sh\nsglang serve m --tp 9\nEOF\nsglang serve m --tp $TP",
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.sampled_from(STATEMENTS), max_size=5), st.sampled_from(COMMANDS))
def test_no_wrong_word_is_read(tmp_path: Path, statements: list[str], command: str) -> None:
    """What is stated is what bash runs, whatever the statements do."""
    assert_right(tmp_path, "\n".join([*statements, command]))


@pytest.mark.parametrize("statement", STATEMENTS)
def test_each_statement_is_judged_as_bash_runs_it(tmp_path: Path, statement: str) -> None:
    """A statement before and after the only assignment of a variable."""
    for script in (
        f"TP=4\nN=3\n{statement}\n{COMMANDS[4]}",
        f"{statement}\nTP=4\n{COMMANDS[0]}",
        f"TP=4\n{COMMANDS[3].replace('$MORE', '')}\n{statement}\nrun",
        f"TP=4\n{statement}; {COMMANDS[0]}",
        f"{statement}\n{COMMANDS[0]}",
        f"{statement}\n{COMMANDS[18]}",
    ):
        assert_right(tmp_path, script)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_read_as_bash_runs_it(tmp_path: Path, command: str) -> None:
    for script in (command, f"TP=4\nN=3\nMORE='--a  b'\nARGS=(c 'd e')\n{command}"):
        assert_right(tmp_path, script)


@pytest.mark.parametrize(
    "statement",
    [
        "echo TP=8", "echo 'TP=8' >&2", "printf 'TP=%s' 8", "[ -n \"$TP\" ]", "mkdir -p /tmp/$TP",
        "# TP=8", "echo \"TP: ${TP}, read by source\"", "x=${TP:-8} y=${TP%x}", "wait $PID",
        "cat <<EOF\na 'text\nEOF", "unset N", "read -p 'n: ' N", "export PATH=$HOME/bin:$PATH",
        "if [ $TP = 4 ]; then N=1; else N=2; fi", "f() { N=$TP; }", "for n in 1 2; do :; done",
        "case $TP in 4) N=2 ;; esac", "trap 'kill $PID' EXIT", "set -euo pipefail",
        "pkill -f sglang.launch_server", "exec >log 2>&1", "while ((x << 2 > 8)); do :; done",
        "echo \"running: sglang serve $MODEL\"", "cd /sgl && (make; true)", "N=$(nproc)",
        "docker run --mount type=bind,source=/m,target=/m image ls", "X=\"--tp-size $(x \"y\")\"",
    ],
)  # fmt: skip
def test_other_statements_are_no_reason_to_refuse(statement: str) -> None:
    launches = stated(f"TP=4\n{statement}\npython3 -m sglang.launch_server --tp $TP")
    assert launches is not None
    assert [one.arguments for one in launches] == [("--tp", "4")]


@pytest.mark.parametrize(
    "script",
    [
        "tp=4\nCOMMAND --tp $tp", "export TP=4; COMMAND --tp ${TP}",
        "readonly TP=4\nCOMMAND --tp $TP",
        "TP=4 # of the node\nCOMMAND --tp \"$TP\"", "N=4\nTP=$N\nA=(--tp $TP)\nCOMMAND ${A[*]}",
        "E=\"--tp 4\"\nexec COMMAND $E", "TP=4\nif x; then\n  COMMAND --tp $TP\nfi",
        "TP=4\nf() {\n COMMAND --tp $TP\n}\nf", "TP=4\nfor i in 1; do COMMAND --tp $TP; done",
        "if x; then y; fi; TP='4'\nCOMMAND --tp $TP", "C='COMMAND --tp'\n$C 4 &\nwait $!",
        "E=\"--tp 4 $X\"\nTP=4\nCOMMAND --tp $TP", "bash -c 'TP=4; COMMAND --tp $TP'",
        "env=prod\nCOMMAND \\\n  --tp \\\n  4 | tee log", "COMMAND --tp \"$(:)\"4 --tp 4 # x",
    ],
)  # fmt: skip
def test_plain_texts_are_read(script: str) -> None:
    launches = read_launches(script.replace("COMMAND", "python3 -m sglang.launch_server"))
    assert [one.arguments[-2:] for one in launches] == [("--tp", "4")]


@pytest.mark.parametrize(
    "statement",
    [
        "source x",
        ". x",
        "eval x",
        'eval "$(conda shell.bash hook)"',
        "alias a=b",
        "export $(x)",
        "IFS=,",
        "trap 'source x' ERR",
        "command . x",
        'declare "$X=8"',
        "read $X <file",
    ],
)
def test_text_from_elsewhere_can_change_any_variable(statement: str) -> None:
    for script in (f"{statement}\nTP=4\nCOMMAND", f"TP=4\n{statement}; COMMAND"):
        text = script.replace("COMMAND", "python3 -m sglang.launch_server --page-size 8 --tp $TP")
        (launch,) = read_launches(text)
        assert launch.arguments == ("--page-size", "8", "--tp", "$TP")
        assert "$TP" in launch.unknown


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("a 'b c'\"d $X\"e", ["a", "b cd 1 2e"]),
        ("a $X \"\" '' $NONE", ["a", "1", "2", "", "", "$NONE"]),
        ('a ${Y:-d} "${X:-f g}" ~/x b[1] {c,d}',
         ["a", "${Y:-d}", "${X:-f g}", "~/x", "b[1]", "{c,d}"]),
        ("a b#c #d\n", ["a", "b#c"]),
        ("a \\$X '$X' \"\\$X\\q\"", ["a", "$X", "$X", "$X\\q"]),
        ("a `b c` $(d $(e f)) ${X%1}", ["a", "`b c`", "$(d $(e f))", "${X%1}"]),
        ("a $(((1 + 2) * 3)) \"$(b ')' \"c)\")\" d",
         ["a", "$(((1 + 2) * 3))", "$(b ')' \"c)\")", "d"]),
        ("a <in b >>out 2>&1 c", ["a", "b", "c"]),
        ('a "${L[@]}" "${L[*]}" ${L[@]}', ["a", "x", "y z", "x y z", "x", "y", "z"]),
        ("G='*'\na $G \"$G\"", ["a", "$G", "*"]),
        ('E=\na "${E:-d}" "$E" $E', ["a", "${E:-d}", ""]),
        ('M=()\na "${M[@]}" ${M[@]} b"${M[@]}"', ["a", "b${M[@]}"]),
        ('C="p ${L[@]}"\na $C', ["a", "p", "x", "y", "z"]),
        ("a $'b c' $\"d\"", ["a", "$'b c'", "$d"]),
        ("a b\u00a0c\u3000d\re \\\n f\n", ["a", "b\u00a0c\u3000d\re", "f"]),
        ("+ a --x 'b c'", ["+", "a", "--x", "b c"]),
    ],
)  # fmt: skip
def test_words_and_variables(script: str, words: list[str]) -> None:
    found = list(ScriptReader().commands(f"X='1 2'\nL=(x 'y z')\n{script}"))
    assert [list(command.words) for command in found] == [words]


@pytest.mark.parametrize(
    "text", ["a 'b", 'a "b', "a `b", "x\ny 'z", "a $(b", "x\ny=(a\nb\n", "a ${b"]
)
def test_unclosed_quotes_are_refused_with_their_line(text: str) -> None:
    line = 2 if text.startswith("x") else 1
    with pytest.raises(FormatError, match=rf"line {line}: .* is not closed"):
        list(ScriptReader().commands(text))


@pytest.mark.parametrize(
    "script",
    [
        "cat <<EOF >x\nb c\n'\nEOF\na 1",
        "cat <<'EOF'\nb $(\nEOF\na 1",
        'cat <<-"E F" <<\\G | tee x\nb\n\t\tE F\nb "\nG\na 1',
        "cat 3<< EOF\nEOF \n EOF\nEOF\na 1",
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
    assert "b" not in {words[0] for words in found if words}


def test_a_launch_command_in_a_here_document_is_not_read(
    invoke: Invoke, model: Path, tmp_path: Path
) -> None:
    inner = f"cat >inner.sh <<'EOF'\nsglang serve {model} --page-size 8\nEOF\n"
    said = refused(invoke, f"{inner}bash inner.sh")
    assert "here-documents (<<) and variables that the text can change are not read" in said
    found = profile(invoke, f"{inner}sglang serve {model} --page-size 16")
    assert found["page_size"] == 16
    unclosed = refused(invoke, f"true\ncat <<EOF\nsglang serve {model}\n")
    assert "line 2: a here-document (<<) has no last line" in unclosed


def test_variables_of_env_and_docker_count(model: Path) -> None:
    name, flags = "SGLANG_PP_LAYER_PARTITION", f"--model-path {model} --pp-size 2"
    for line in (
        f"{name}=3,1 nohup python -m sglang.launch_server {flags} &",
        f"env {name}=3,1 python -m sglang.launch_server {flags}",
        f"docker run --rm -e {name}=3,1 image python -m sglang.launch_server {flags}",
        f"docker run --env={name}=3,1 image python -m sglang.launch_server {flags}",
        f"export {name}=3,1\nexec python -m sglang.launch_server {flags}",
    ):
        (launch,) = read_launches(line)
        assert launch.environment == {name: "3,1"}, line


@pytest.mark.parametrize("script", [
    "if x; then export NAME=3,1; fi", "export NAME=$(x)", "NAME=3,1", "export NAME=1; NAME=3,1",
    "export NAME=3,1\nsource x", "export NAME=3,1\ndocker run image \\",
])  # fmt: skip
def test_an_unknown_variable_of_sglang_is_refused(invoke: Invoke, model: Path, script: str) -> None:
    name = "SGLANG_PP_LAYER_PARTITION"
    line = f"{script.replace('NAME', name)}\nsglang serve {model} {FLAGS} --pp-size 2"
    assert f"launch command: {name}: " in refused(invoke, line)


def test_what_can_hold_any_flag_is_refused(invoke: Invoke, model: Path) -> None:
    for text, part in {
        "$EXTRA": "$EXTRA",
        "--log-level info ${EXTRA}": "${EXTRA}",
        "--port $P `x`": "`x`",
        "--enable-metrics $EXTRA": "$EXTRA",
        '--port "${A[@]}"': "${A[@]}",
        "--lora-paths a=b $EXTRA": "$EXTRA",
        "--config $FILE": "$FILE",
        "${EXTRA:+--tp 8}": "${EXTRA:+--tp 8}",
    }.items():
        said = refused(invoke, f"sglang serve {model} {FLAGS} {text}")
        assert f"launch command: {part} can hold any flag (" in said
        assert "give pid:N of the running server, the command as bash -x prints it, or" in said


def test_an_option_replaces_an_unknown_flag(invoke: Invoke, model: Path) -> None:
    line = f"sglang serve {model} {FLAGS} --tp $TP --kv-cache-dtype $DTYPE"
    assert "write its value in its place, give --tp, or give pid:N" in refused(invoke, line)
    assert "give --kv-cache-dtype, or" in refused(invoke, line, "--tp", 2)
    assert profile(invoke, line, "--tp", 2, "--kv-cache-dtype", "fp8_e5m2")["tp"] == 2


def test_arguments_of_a_script_can_hold_any_flag(invoke: Invoke, model: Path) -> None:
    line = f'sglang serve {model} {FLAGS} "$@"'
    for script in (line, f"run() {{ {line}; }}\nrun --tp 8", f"set -- --tp 8\n{line}"):
        assert "$@ can hold any flag" in refused(invoke, script)
    assert "$@ can hold any flag" in refused(invoke, f"bash -c '{line}' - --tp 8")


def test_commands_of_equal_profiles_are_one(invoke: Invoke, model: Path) -> None:
    line = f"sglang serve {model} {FLAGS} --nnodes 2 --node-rank"
    assert profile(invoke, f"{line} 0 --host 0.0.0.0\n{line} $RANK --port $P")["page_size"] == 64
    said = refused(invoke, f"{line} 0\n{line} 1 --tp 2")
    assert "--launch: has 2 launch commands of different servers; give one of them" in said


LOG = (
    "[2026-01-14 05:25:33] server_args=ServerArgs(model_path='FOLDER', served_model_name='org/m', "
    "tp_size=2, page_size=64, pp_size=1, enable_hierarchical_cache=True, hicache_ratio=2.0, "
    "hicache_storage_backend='file', hicache_mem_layout='page_first', device=<Device: 1>, x=f(1))\n"
)


def test_a_servers_log_is_read(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    """Both forms of SGLang's line: ServerArgs(…) of older releases, and a dict."""
    whole = LOG.replace("FOLDER", str(model)).replace("device=<Device: 1>, ", "")
    fields = {"model_path": str(model), "served_model_name": "org/m", "tp_size": 2, "page_size": 64,
              "hicache_storage_backend": "file", "hicache_mem_layout": "page_first"}  # fmt: skip
    file = tmp_path / "server.log"
    for text in (whole, f"INFO: starting\n{whole}more 'text\n", f"server_args={fields}\n"):
        file.write_text(text)
        found = profile(invoke, f"@{file}")
        assert (found["model"], found["tp"], found["layout"]) == ("org/m", 2, "page_first")
        said = invoke("profile", "--launch", text).stderr
        assert "a log does not name SGLang's release; 0.5.23 is taken; give --sglang" in said
    assert profile(invoke, file, "--sglang", "0.5.20")["sglang"] == "0.5.20"
    for text in (LOG, whole[:90], "server_args={1: 'a", "server_args=ServerArgs(" + "(" * 5_000):
        assert "the text after server_args= is not whole; give the whole line" in (
            refused(invoke, text)
        )
    said = refused(invoke, whole.replace("page_size=64", "page_size=f(64)"))
    assert "launch command: --page-size: f(64) is unknown (the log does not show its value)" in said


def test_a_traced_command_is_read(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    """The line of bash -x says what ran, whatever the script."""
    script = f"if true; then TP=2; fi\nsglang serve {model} {FLAGS} --tp $((TP * 2))\n"
    (tmp_path / "sglang").write_text("#!/bin/sh\n")
    (tmp_path / "sglang").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    run = subprocess.run(
        ["bash", "-xc", script], check=True, env=env, capture_output=True, text=True
    )
    assert profile(invoke, run.stderr)["tp"] == 4


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
    (launch,) = read_launches(f"@{file}")
    assert launch.environment["SGLANG_MAMBA_SSM_DTYPE"] == "bfloat16"


def test_compose_files(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "compose.yml"
    file.write_text(
        "services:\n  engine:\n    environment:\n    - SGLANG_PP_LAYER_PARTITION=30,2\n"
        "    command: >\n"
        f"      python3 -m sglang.launch_server --model-path {model}\n      --page-size 8 "
        "--pp-size 2\n"
    )
    assert profile(invoke, file)["pp_partition"] == [30, 2]


def test_variables_in_words_of_compose_are_those_of_its_own_shell(
    invoke: Invoke, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "compose.yml"
    for command in ('"--model-path FOLDER --tp $TP"', '[sh, -c, "sglang serve FOLDER --tp $TP"]'):
        file.write_text(
            "services: {engine: {environment: {TP: 2}, command: COMMAND}}".replace(
                "COMMAND", command.replace("FOLDER", f"{model} {FLAGS}")
            )
        )
        assert "--tp-size: $TP is unknown" in refused(invoke, file)


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
        (launch,) = read_launches(f"pid:{server.pid}")
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
        ("sglang serve FOLDER --tp $TP",
         "--tp-size: $TP is unknown (the text does not set it); write"),
        ("sglang serve $(cat model)",
         "--model-path: $(cat model) is unknown (only running the command"),
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
        ("sglang serve 'FOLDER", "--launch: line 1: a quote or a parenthesis is not closed; close"),
        (f"sglang serve FOLDER --tp 2 --host {'h' * 300} --xyzzy", "no flag --xyzzy"),
        ("sglang serve FOLDER \\\r\n --tp 2\r\n", "has line ends of Windows (CRLF), which bash"),
        ("sglang serve ~/m", "--model-path: ~/m is unknown (only running the command shows"),
        ("sglang serve FOLDER --host *", "* can hold any flag (bash can replace it by several"),
        ("C='sglang serve FOLDER'\nC+=' --tp 2'\n$C",
         "${C[@]} can hold any flag (line 2 can change it)"),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("A0=xx\n" + "".join(f"A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 60)),
         "variables expand to more than 1048576"),
        ('export A=\'x sglang "$A"\'; echo "$A"', "has no command that launches"),
        ("$(" * 5_000, "expansions are nested too deep"),
        ('"' * 5_001, "is not closed"),
        ("cat <<a\na\n" * 20_000, "has no command that launches"),
        ("cat" + " <<a" * 20_000 + "\n" + "a\n" * 20_000, "has no command that launches"),
        ("cat" + " <<a" * 20_000 + "\nx", "has no last line"),
        ("((<<" * 20_000, "expansions are nested too deep"),
        ("((<<" * 20, "is not closed"),
    ],
    ids=["doubled", "itself", "expansions", "quotes", "documents", "document ends",
         "no end", "shifts", "few shifts"],
)  # fmt: skip
def test_hostile_scripts_are_refused(invoke: Invoke, script: str, said: str) -> None:
    assert said in refused(invoke, script)


def test_hostile_yaml_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    bomb = "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]\n" for n in range(1, 12))
    for text, said in (
        (f"b0: &b0 [x]\n{bomb}", "YAML aliases repeat too much text; write the values out"),
        ("a: &a [*a]", "a YAML alias contains itself; write the values out"),
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
        f"hicachectl: YAML needs the package pyyaml; run {sys.executable} -m pip install pyyaml, "
        "or give the flags in the command\n"
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("assignments.sh", "A=1 " * 60_000, "no command that launches"),
        ("many.sh", "".join(f"sglang serve m{n}\n" for n in range(13_000)), "has 13000 launch"),
        ("scripts.sh", f"export A={'a' * 100_000}\n" + f"x '{'$A' * 40} sglang y'\n" * 1500,
         "scripts.sh: has no command that launches"),
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
