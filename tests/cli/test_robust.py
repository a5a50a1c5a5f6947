"""Hostile input and failing output: one clear line, exit 2, and no large allocation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.disk.durable import whole_file
from tests.skips import needs_root
from tests.speed import slow, some
from tests.stores import put_pages

if TYPE_CHECKING:
    from tests.conftest import Invoke

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
FORMATS = ("table", "json", "jsonl", "csv", "parquet", "arrow")
PLACES = (">/dev/full", ">&-")
TIMEOUT_S = 60


@pytest.fixture
def store(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    directory.mkdir()
    put_pages(directory, range(8), "_m_0_2", "_m_1_2")
    return directory


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command line in which `hicachectl` is the tested one."""
    text = f'hicachectl() {{ "{sys.executable}" -m hicachectl "$@"; }}; set -o pipefail; {command}'
    return subprocess.run(
        ["bash", "-c", text],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **variables},
    )


def one_line(invoke: Invoke, *arguments: object, exit_code: int = 2) -> str:
    """Return the only message on stderr of a failing call."""
    outcome = invoke(*arguments, exit_code=exit_code)
    assert outcome.stdout == ""
    lines = [line for line in outcome.stderr.splitlines() if not line.startswith(("Usage", "Try"))]
    assert len(lines) <= 2, outcome.stderr  # click puts an empty one between
    assert all(len(line) < 1000 for line in lines)
    return lines[-1]


# --- where output goes ---


def test_a_pipe_as_output_is_written_and_stays_one(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    invoke("ls", store, "--format", "jsonl", "-o", pipe)
    reader.join(TIMEOUT_S)
    assert pipe.is_fifo()
    assert read[0].count("\n") == 8


@pytest.mark.slow
def test_a_process_substitution_as_output_is_written(store: Path) -> None:
    found = shell(f"hicachectl ls {store} --format jsonl -o >(cat >&2); sleep 0.2")
    assert found.stderr.count('"page"') == 8, found


def test_a_device_behind_a_link_is_not_replaced(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/full")
    for output_format in FORMATS:
        line = one_line(invoke, "-q", "ls", store, "--format", output_format, "-o", link)
        assert line.startswith(f"hicachectl: {link}: cannot write: No space left on device; check ")
    assert link.is_char_device()


def test_a_link_as_output_is_followed(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = elsewhere / "out"
    link = tmp_path / "link"
    link.symlink_to(target)
    for _ in range(2):  # a link to nothing, then to a file
        invoke("ls", store, "--format", "jsonl", "-o", link)
        assert link.is_symlink()
        assert target.read_text().count("\n") == 8
        target.chmod(0o640)
    assert target.stat().st_mode & 0o777 == 0o640
    assert list(elsewhere.iterdir()) == [target]


def test_a_name_may_be_as_long_as_names_can_be(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    invoke("ls", store, "--format", "jsonl", "-o", path)
    assert path.read_text().count("\n") == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", ["--help", slow("--version"), slow("ls --help"), slow("completion bash")]
)
@pytest.mark.parametrize("place", PLACES)
def test_help_that_cannot_be_written_is_one_line(arguments: str, place: str) -> None:
    found = shell(f"hicachectl {arguments} {place}")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
    assert found.stderr.startswith("hicachectl: Cannot write to stdout: ")
    assert found.stderr.endswith("; check the file or pipe behind it, or give -o\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output_format", "place"),
    some(
        product(FORMATS, PLACES),
        ("table", PLACES[0]),
        ("table", PLACES[1]),
        *zip(FORMATS[1:], PLACES * 3, strict=False),
    ),
)
def test_a_result_that_cannot_be_written_is_one_line(
    store: Path, output_format: str, place: str
) -> None:
    found = shell(f"hicachectl -q ls {store} --format {output_format} {place}")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
    assert found.stderr.startswith("hicachectl: Cannot write to stdout: ")
    assert found.stderr.endswith("; check the file or pipe behind it, or give -o\n")


@pytest.mark.slow
def test_nothing_is_lost_on_a_closed_stdout_that_is_not_needed(store: Path, tmp_path: Path) -> None:
    found = shell(f"hicachectl ls {store} --format jsonl -o {tmp_path / 'out'} >&-")
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "out").read_text().count("\n") == 8


@pytest.mark.slow
def test_a_closed_stderr_takes_the_remarks_and_nothing_else(store: Path) -> None:
    found = shell(f"hicachectl ls {store} --format jsonl 2>&-")
    assert (found.returncode, found.stdout.count("\n")) == (0, 8)
    assert shell("hicachectl ls /no/such/directory 2>&-").returncode == 3
    assert shell("hicachectl ls /no/such/directory 2>&-").stdout == ""
    assert shell("hicachectl --help >/dev/full 2>/dev/full").returncode == 2


@pytest.mark.parametrize(
    "arguments", ["--help", slow("ls {} --format parquet"), slow("ls {} --objects")]
)
def test_a_closed_pipe_is_no_error_whatever_is_written(store: Path, arguments: str) -> None:
    found = shell(f"(sleep 0.1; hicachectl -q {arguments.format(store)}) | true")
    assert (found.returncode, found.stderr) == (0, "")


# --- the helper behind it ---


def test_a_whole_file_has_the_permissions_asked_for(tmp_path: Path) -> None:
    with whole_file(tmp_path / "out", "w", permissions=0o604, durable=True) as stream:
        stream.write("é")
    assert (tmp_path / "out").read_bytes() == "é".encode()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o604


def test_a_file_is_not_touched_by_a_block_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as stream:
        stream.write(b"new" * (1 // stream.tell()))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# --- hostile profiles, configs and options ---


def test_a_byte_order_mark_is_no_part_of_a_file(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    arguments = ["--page-size", 64, "--tp", 2, "--served-model-name", "m"]
    config = tmp_path / "config.json"
    config.write_text((CONFIGS / "qwen3-32b.json").read_text(), encoding="utf-8-sig")
    text = invoke("profile", "--model-config", config, *arguments).stdout
    path = tmp_path / "p.toml"
    path.write_text(text, encoding="utf-8-sig")
    assert invoke("profile", "--profile", path).stdout == text
    path.write_text(f'[stores.prod]\nurl = "{store}"', encoding="utf-8-sig")
    invoke("--config", path, "ls", "prod:")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--tp", "1000000000"),
        ("--pp", "4097"),
        ("--cp", "9" * 4000),
        ("--dcp", "9" * 4000),
        ("--page-size", "9" * 4000),
        ("--tp-lcm-size", "1000000000"),
        ("--pp-partition", ",".join(["9" * 4300] * 20)),
    ],
)
def test_flags_beyond_belief_are_refused_by_name(
    invoke: Invoke, store: Path, option: str, value: str
) -> None:
    arguments = ["--model-config", CONFIGS / "qwen3-32b.json", "--served-model-name", "m"]
    arguments += ["--page-size", 64] if option != "--page-size" else []
    line = one_line(invoke, "verify", store, *arguments, option, value)
    assert option.strip("-").replace("-", "_") in line
    assert "must be at most" in line or "at most 4096 are allowed" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grace", "1000000000000s"], "100 years"),
        (["--grace", "9" * 400 + "d"], "100 years"),
        (["--time-limit", "1e9s"], "not a duration"),
        (["--since", "9" * 400 + "d"], "100 years"),
        (["--since", "9999-01-01"], "1678 and 2262"),
        (["--since", "0001-01-01T00:00:00+14:00"], "--since"),
        (["--buffer-bytes", "9" * 400], "not a size"),
        (["--buffer-bytes", "9223372036854775808"], "8 EiB"),
        (["--buffer-bytes", "9999999PiB"], "8 EiB"),
    ],
)
def test_amounts_beyond_belief_are_bad_usage(
    invoke: Invoke, store: Path, options: list[str], message: str
) -> None:
    assert message in one_line(invoke, "verify", store, *options)


@pytest.mark.slow
@needs_root
def test_a_home_that_cannot_be_looked_into_holds_no_config(store: Path) -> None:
    code = (
        "import os, sys; from hicachectl.__main__ import run; run(['ls', '/']);"
        "os.setgid(65534); os.setuid(65534); sys.exit(run(sys.argv[1:]))"
    )
    # Each run of pytest closes the folder of all runs to other users.
    with TemporaryDirectory() as name:
        folder = Path(name)
        home = folder / "home"
        (home / ".config").mkdir(parents=True)
        home.chmod(0)
        folder.chmod(0o755)
        shutil.copytree(store, folder / "store")
        found = subprocess.run(
            [sys.executable, "-c", code, "ls", str(folder / "store"), "--format", "jsonl"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HOME": str(home)},
        )
    assert found.returncode == 0, found.stderr
