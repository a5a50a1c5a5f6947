"""Completions, units, alerts and the dashboard in hicachectl/packaging."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from hicachectl.checks.registry import code_named, codes
from hicachectl.cli.metrics import LABELS, metrics
from hicachectl.cli.prose import is_literal, literal_of, prose
from hicachectl.formats.plugin_status import COUNTED, metric_of
from tests.skips import need_tool
from tests.test_readme import check_arguments, manual_blocks

if TYPE_CHECKING:
    from tests.conftest import Invoke

FOLDER = Path(__file__).parents[2] / "hicachectl" / "packaging"
COMPLETIONS = {"bash": "hicachectl", "zsh": "_hicachectl", "fish": "hicachectl.fish"}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
UNITS = sorted((FOLDER / "systemd").iterdir())
RULES = FOLDER / "prometheus" / "hicachectl.rules.yml"
DASHBOARD = json.loads((FOLDER / "grafana" / "hicachectl.json").read_text())
OURS = {f"hicachectl_{command}_{name}" for command, texts in metrics().items() for name in texts}
PLUGIN = {metric_of(kind, name) for kind, names in COUNTED.items() for name in names}
# Metrics of SGLang, as a conformance test finds them in its code.
THEIRS = {
    "sglang:backup_bandwidth",
    "sglang:backuped_tokens_total",
    "sglang:cached_tokens_total",
    "sglang:prefetch_bandwidth",
    "sglang:prefetched_tokens_total",
    "sglang:prompt_tokens_total",
    "sglang:storage_prefetch_hit_tokens_total",
    "sglang:storage_prefetch_unfulfilled_tokens_total",
}


def expressions() -> list[str]:
    """Return the queries of the dashboard."""
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard, without the titles of rows."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def metrics_in(text: str) -> set[str]:
    """Return the names of metrics in a query."""
    found = re.findall(r"\b(?:hicachectl_|sglang:)\w+", text)
    return {name.removesuffix("_bucket") for name in found}


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_completions_are_those_that_the_command_prints(invoke: Invoke, shell: str) -> None:
    """tests/cli/test_completion.py has bash complete with the printed script."""
    script = (FOLDER / "completions" / COMPLETIONS[shell]).read_text()
    assert script == invoke("completion", shell).stdout, "run `make man`"


def test_the_units_of_systemd_are_valid(tmp_path: Path) -> None:
    tool = need_tool("systemd-analyze", "systemd")
    for path in UNITS:
        text = path.read_text()
        for line in re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE):
            assert "%" not in line.replace("%%", "")  # systemd expands a single one
            check_arguments(shlex.split(line.replace("%%", "%"))[1:])
        (tmp_path / path.name).write_text(text.replace("/usr/local/bin/hicachectl", "/bin/true"))
    units = [str(tmp_path / path.name) for path in UNITS]
    done = subprocess.run([tool, "verify", *units], capture_output=True, text=True, check=False)
    assert "hicachectl" not in done.stderr


def test_a_changed_flag_keeps_the_unit_of_the_servers_from_starting(
    invoke: Invoke, tmp_path: Path
) -> None:
    lines = re.findall(r"^ExecStartPre=\S+ (.*)$", "\n".join(manual_blocks()), re.MULTILINE)
    assert len(lines) == 2
    (stamping,) = [text.split()[1:] for text in manual_blocks() if text.endswith(" --stamp\n")]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "store").mkdir()

    def launch(dtype: str, words: list[str], exit_code: int = 0) -> str:
        """Do a command of the page before the servers are launched with a dtype."""
        flags = f"--tp 2 --kv-cache-dtype {dtype} --hicache-mem-layout page_first"
        text = f"python -m sglang.launch_server --model-path m --page-size 8 {flags}"
        (tmp_path / "serve.sh").write_text(text)
        places = {"/etc/hicache": str(tmp_path), "prod:": str(tmp_path / "store")}
        for name, place in places.items():
            words = [word.replace(name, place) for word in words]
        return invoke(*words, exit_code=exit_code).stdout

    make, compare = map(shlex.split, lines)
    launch("fp8_e4m3", make)
    launch("fp8_e4m3", [*stamping, "--allow-empty"])
    for dtype, status in (("fp8_e4m3", 0), ("fp8_e5m2", 4), ("fp8_e4m3", 0)):
        launch(dtype, make)
        assert ("stamp-mismatch" in launch(dtype, compare, status)) == bool(status)


def test_the_unit_for_another_user_is_valid(tmp_path: Path) -> None:
    tool = need_tool("systemd-analyze", "systemd")
    (shown,) = filter(is_literal, prose("hicachectl-security")["UNITS OF SYSTEMD"])
    unit = tmp_path / "hicachectl-verify.service"
    whole = "\n".join(literal_of(shown))
    (line,) = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", whole, re.MULTILINE)
    check_arguments(shlex.split(line.replace("\\\n", "").replace("%%", "%"))[1:])
    shipped = (FOLDER / "systemd" / unit.name).read_text()
    (lock,) = re.findall(r"--lock (\S+)", shipped)
    assert [x for x in shipped.split() if x not in whole.split() and x != lock] == []
    whole = whole.replace("/usr/local/bin/hicachectl", "/bin/true")
    for more, problem in (("", ""), ("ProtectSystem=wrong", "wrong"), ("Usr=sglang", "Usr")):
        unit.write_text(f"{whole}\n{more}\n")
        done = subprocess.run([tool, "verify", unit], capture_output=True, text=True, check=False)
        assert bool(problem) == (unit.name in done.stderr), done.stderr
        assert problem in done.stderr


def test_each_timer_has_its_service() -> None:
    names = {path.name for path in UNITS}
    assert len(names) == 6
    assert {name.removesuffix(".timer") + ".service" for name in names if "timer" in name} < names


def test_alerts_are_about_metrics_and_codes_that_exist() -> None:
    text = RULES.read_text()
    (group,) = yaml.safe_load(text)["groups"]
    used = set().union(*(metrics_in(rule["expr"]) for rule in group["rules"]))
    assert used
    assert used <= OURS | PLUGIN
    errors, mixed = re.findall(r'code=~?"(.*?)"', text)
    assert errors.split("|") == [code.name for code in codes() if code.severity == "error"]
    assert code_named(mixed).severity == "warning"


def test_the_dashboard_shows_metrics_that_exist() -> None:
    used = set().union(*map(metrics_in, expressions()))
    assert used <= OURS | THEIRS | PLUGIN
    assert used >= THEIRS | PLUGIN
    labels = {*LABELS.values(), "store"}
    stated = {name for text in expressions() for name in re.findall(r"(\w+)=~", text)}
    assert stated <= labels


def test_the_panels_of_the_dashboard_lie_side_by_side() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_prometheus_accepts_the_rules_and_the_queries(tmp_path: Path) -> None:
    tool = need_tool("promtool", "prometheus")
    queries = {
        "groups": [
            {
                "name": "dashboard",
                "rules": [
                    {"record": f"query:{number}", "expr": text.replace("$store", ".*")}
                    for number, text in enumerate(expressions())
                ],
            }
        ]
    }
    recorded = tmp_path / "queries.yml"
    recorded.write_text(yaml.safe_dump(queries))
    subprocess.run([tool, "check", "rules", RULES, recorded], check=True, capture_output=True)


@pytest.mark.slow
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    day = 24 * 60
    series = {
        'hicachectl_verify_findings{store="a",code="truncated"}': "3x20",
        'hicachectl_verify_findings{store="b",code="foreign-object"}': "3x20",
        'hicachectl_verify_findings{store="b",code="mixed-sizes"}': "1x20",
        'hicachectl_verify_last_run_timestamp_seconds{store="a"}': "0x20",
        'hicachectl_verify_complete{store="a"}': "1x20",
        'hicachectl_verify_complete{store="b"}': "0x20",
        'hicachectl_verify_objects{store="a"}': "100x12 49x8",
        'hicachectl_verify_objects{store="b"}': "100x12 0x8",
        'hicachectl_verify_objects{store="c"}': "100x12 50x8",
        'hicachectl_prewarm_opened_anyway{store="a"}': "0x20",
        'hicachectl_prewarm_opened_anyway{store="b"}': "1x20",
        'hicachectl_prewarm_succeeded{store="a"}': "1x20",
        'hicachectl_prewarm_succeeded{store="b"}': "0x20",
        'hicachectl_prewarm_succeeded{store="c"}': "0x20",
        'hicachectl_prewarm_last_run_timestamp_seconds{store="b"}': "1x20",
        'hicachectl_prewarm_usable_tokens{store="a"}': "95x20",
        'hicachectl_prewarm_usable_tokens{store="b"}': "50x20",
        'hicachectl_prewarm_usable_tokens{store="c"}': "0x20",
        'hicachectl_prewarm_requested_tokens{store="a"}': "100x20",
        'hicachectl_prewarm_requested_tokens{store="b"}': "100x20",
        'hicachectl_prewarm_requested_tokens{store="c"}': "0x20",
        'hicachectl_prewarm_attempts{store="gate"}': "1x20",
        'hicachectl_prewarm_last_run_timestamp_seconds{store="gate"}': "1x20",
        'hicachectl_prewarm_usable_tokens{store="gate"}': "50x20",
        'hicachectl_prewarm_requested_tokens{store="gate"}': "100x20",
        'hicachectl_rm_lacking_bytes{store="a"}': "0x20",
        'hicachectl_rm_lacking_bytes{store="b"}': "4096x20",
        'hicachectl_rm_succeeded{store="a"}': "1x20",
        'hicachectl_rm_succeeded{store="b"}': "0x20",
        'hicachectl_rm_succeeded{store="c"}': "0x20",
        'hicachectl_rm_last_run_timestamp_seconds{store="b"}': "1x20",
    }
    fired = [
        ("HicacheDamaged", {"store": "a", "code": "truncated"}),
        ("HicacheTwoSettings", {"store": "b", "code": "mixed-sizes"}),
        ("HicacheVerifyNotRun", {"store": "a"}),
        ("HicacheEmpty", {"store": "b"}),
        ("HicacheFellByHalf", {"store": "a"}),
        ("HicacheVerifyIncomplete", {"store": "b"}),
        ("HicachePrewarmFailed", {"store": "c"}),
        ("HicacheGateOpenedCold", {"store": "b"}),
        ("HicachePrewarmNotRun", {"store": "b"}),
        ("HicacheColdAfterPrewarm", {"store": "b"}),
        ("HicacheColdAfterPrewarm", {"store": "c"}),
        ("HicacheNoRoom", {"store": "b"}),
        ("HicacheRoomFailed", {"store": "c"}),
        ("HicacheRoomNotKept", {"store": "b"}),
    ]
    _expect_firing(tmp_path, "6h", f"{4 * day + 360}m", series, fired)


@pytest.mark.slow
def test_alerts_about_servers_fire_when_they_should(tmp_path: Path) -> None:
    """One damaged page, evicted pages and an idle server are no alert."""
    refused = "hicachectl_plugin_refused_pages_total"
    failed = "hicachectl_plugin_failed_operations_total"
    asked, found = "hicachectl_plugin_asked_tokens_total", "hicachectl_plugin_found_tokens_total"
    series = {
        f'{refused}{{instance="a",tp_rank="0",reason="foreign"}}': "0+9x300",
        f'{refused}{{instance="a",tp_rank="1",reason="foreign"}}': "0+9x300",
        f'{refused}{{instance="a",tp_rank="0",reason="damaged"}}': "0x99 1x200",
        f'{refused}{{instance="a",tp_rank="0",reason="gone"}}': "0+9x300",
        f'{failed}{{instance="b",tp_rank="0",reason="unswept"}}': "0+9x300",
        f'{asked}{{instance="a"}}': "0+640x300",
        f'{found}{{instance="a"}}': "0+64x300",
        f'{asked}{{instance="b"}}': "0+640x300",
        f'{found}{{instance="b"}}': "0x300",
        f'{asked}{{instance="idle"}}': "640x300",
        f'{found}{{instance="idle"}}': "0x300",
    }
    fired = [
        ("HicachePluginRefuses", {"instance": "a", "reason": "foreign"}),
        ("HicachePluginRefuses", {"instance": "b", "reason": "unswept"}),
        ("HicachePluginFindsNothing", {"instance": "b"}),
    ]
    _expect_firing(tmp_path, "1m", "280m", series, fired)


def test_each_alert_has_a_test() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    named = re.findall(r'\("(Hicache\w+)", \{', Path(__file__).read_text())
    assert {rule["alert"] for rule in group["rules"]} == set(named)


def _expect_firing(
    tmp_path: Path, interval: str, at: str, series: dict[str, str], fired: list[tuple[str, Any]]
) -> None:
    """Assert which alerts fire: those named in `fired`, with just these labels."""
    tool = need_tool("promtool", "prometheus")
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    names = {name for name, _ in fired}
    queries = [
        {
            "expr": f'ALERTS{{alertname="{name}",alertstate="firing"}}',
            "eval_time": at,
            "exp_samples": [
                {"labels": _alert(name, labels, group["rules"]), "value": 1}
                for fires, labels in fired
                if fires == name
            ],
        }
        for name in sorted(names)
    ]
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": interval,
        "tests": [
            {
                "interval": interval,
                "input_series": [
                    {"series": name, "values": values} for name, values in series.items()
                ],
                "promql_expr_test": queries,
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [tool, "test", "rules", path], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout + done.stderr


def _alert(name: str, labels: dict[str, str], rules: list[dict[str, Any]]) -> str:
    """Return the series of a firing alert."""
    (severity,) = [rule["labels"]["severity"] for rule in rules if rule["alert"] == name]
    named = {"alertname": name, "alertstate": "firing", "severity": severity, **labels}
    text = ",".join(f'{label}="{value}"' for label, value in named.items())
    return f"ALERTS{{{text}}}"
