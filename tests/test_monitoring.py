"""Monitoring: the names exist, the alerts fire when they should, and a real Prometheus sees a real pool fill."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from live_vllm import vllm_processes, wait_until
from memlab import record, traffic
from memlab.process import Child
from memlab.server import free_port
from monitoring import fill_pool

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "labs" / "monitoring"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
NAMES = yaml.safe_load((ROOT / "book" / "metrics.yml").read_text(encoding="utf-8"))
PAGES = {
    "0.26": "composed-0.26.0.txt",
    "0.32": "vllm-0.32.0-cpu.txt",
    "0.33": "composed-0.33.0-dp2.txt",
}
EVERY_RULE = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in EVERY_RULE if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in EVERY_RULE if "record" in rule}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]

with_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None and not os.environ.get("CI"),
    reason="Prometheus is not installed (Debian and Ubuntu: sudo apt-get install prometheus)",
)


def page(version: str) -> str:
    return (ROOT / "tests" / "data" / "metrics" / PAGES[version]).read_text(encoding="utf-8")


def promtool(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True)


def used(queries) -> set[str]:
    """The names of vLLM's metrics in some PromQL."""
    return {name for query in queries for name in re.findall(r"(?<![\w:])vllm:\w+", query)}


def sample_names(text: str) -> set[str]:
    """The names on a page; those kept in tests/data/ are without the buckets that each histogram has."""
    families = list(text_string_to_metric_families(text))
    buckets = {f"{family.name}_bucket" for family in families if family.type == "histogram"}
    return buckets | {sample.name for family in families for sample in family.samples}


def types(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


# ---- names ----


@pytest.mark.parametrize("version", PAGES)
def test_every_metric_that_is_watched_is_on_the_page_of_each_version(version):
    watched = used([*RECORDED.values(), *(alert["expr"] for alert in ALERTS.values()), *QUERIES])
    assert "vllm:kv_cache_usage_perc" in watched
    assert watched <= sample_names(page(version))


def test_a_recorded_series_that_is_asked_for_is_recorded():
    asked = {name for alert in ALERTS.values() for name in re.findall(r"engine:\w+:\w+", alert["expr"])}
    assert asked and asked <= set(RECORDED)


@pytest.mark.parametrize("version", PAGES)
def test_the_table_of_names_is_that_of_the_page(version):
    found = types(page(version))
    for metric in NAMES["metrics"]:
        if "needs" in metric:
            continue
        assert (metric["name"] in found) == (version in metric["in"]), metric["name"]
        assert found.get(metric["name"], metric["type"]) == metric["type"], metric["name"]
    assert not {metric["name"] for metric in NAMES["gone"]} & set(found)


def test_the_table_tells_of_every_metric_that_is_watched():
    told = {metric["name"] for metric in NAMES["metrics"]}
    watched = used([*(rule["expr"] for rule in EVERY_RULE), *QUERIES])
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in watched} <= told


# ---- rules ----


@with_prometheus
def test_prometheus_accepts_the_configuration_and_each_alert_fires_when_it_should():
    checked = promtool("check", "config", str(FOLDER / "prometheus.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", str(FOLDER / "rules-test.yml"))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_is_tried_both_ways():
    tests = yaml.safe_load((FOLDER / "rules-test.yml").read_text(encoding="utf-8"))["tests"]
    assert set(ALERTS) <= set(re.findall(r"Vllm\w+", json.dumps(tests)))
    for name in ALERTS:
        fires = [test for test in tests if re.search(rf'{name}\W.*"value": 1\b', json.dumps(test))]
        assert fires or any(
            case["alertname"] == name and case["exp_alerts"]
            for test in tests
            for case in test.get("alert_rule_test", [])
        ), f"{name} never fires in a test"


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_whether_it_is_out_of_memory_and_leads_to_its_section(name):
    told = ALERTS[name]["annotations"]
    assert "out-of-memory" in told["description"]
    assert "instance" in told["summary"], "which server is it?"
    assert told["runbook_url"].endswith(f"/book/reference/monitoring.html#{name.lower()}")


def duration_ms(text: str) -> int:
    return int(text[:-1]) * {"s": 1000, "m": 60_000}[text[-1]]


def faster(node, factor: int):
    """The same rules or configuration with every window and every wait shorter by a factor."""
    if isinstance(node, dict):
        waits = ("for", "scrape_interval", "evaluation_interval")
        return {
            key: f"{duration_ms(value) // factor}ms" if key in waits else faster(value, factor)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [faster(each, factor) for each in node]
    if isinstance(node, str):
        return re.sub(r"\[(\d+[sm])\]", lambda window: f"[{duration_ms(window[1]) // factor}ms]", node)
    return node


def pool_says(run) -> bool | None:
    """Whether requests were preempted, or never waited for a pool nearly full; None for what lies between."""
    if run.series.preemptions[-1] > 0:
        return True
    pairs = zip(run.series.kv_cache_usage, run.series.waiting, strict=True)
    return None if any(usage > 0.9 and waiting for usage, waiting in pairs) else False


RUNS = [run for run in record.read_all() if run.series and pool_says(run) is not None]


@with_prometheus
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_of_the_recorded_runs_those_that_preempted_had_fired_the_alert_and_those_with_room_had_not(run, tmp_path):
    """A load of seconds stands for one of minutes: the rules run sixty times as fast."""
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(faster(RULES, 60)))
    series, step = run.series, 0.25
    start, end = series.time_s[0], series.time_s[-1]
    moments = [start + step * n for n in range(int((end - start) / step) + 1)]
    at = [max(i for i, time in enumerate(series.time_s) if time <= moment) for moment in moments]
    labels = '{job="vllm", instance="a", model_name="m", engine="0"}'

    def values(column):
        return " ".join(str(column[i]) for i in at) + " 0x120"

    fired = 'count(max_over_time(ALERTS{alertname="VllmKvCachePoolFull", alertstate="firing"}[1h]))'
    test = {
        "interval": "250ms",
        "input_series": [
            {"series": f"vllm:kv_cache_usage_perc{labels}", "values": values(series.kv_cache_usage)},
            {"series": f"vllm:num_requests_waiting{labels}", "values": values(series.waiting)},
        ],
        "promql_expr_test": [
            {
                "expr": fired,
                "eval_time": f"{int(end - start) + 10}s",
                "exp_samples": [{"labels": "{}", "value": 1}] if pool_says(run) else [],
            }
        ],
    }
    told = {"rule_files": ["rules.yml"], "evaluation_interval": "250ms", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(told))
    tested = promtool("test", "rules", str(tmp_path / "test.yml"))
    assert tested.returncode == 0, tested.stdout + tested.stderr


# ---- the dashboard ----


def kept(given, parsed, path: str = "") -> list[str]:
    """The paths in a document that a parser dropped or changed."""
    if isinstance(given, dict) and isinstance(parsed, dict):
        return [
            bad
            for key in given
            for bad in (kept(given[key], parsed[key], f"{path}.{key}") if key in parsed else [f"{path}.{key}"])
        ]
    if isinstance(given, list) and isinstance(parsed, list) and len(given) == len(parsed):
        return [bad for n, pair in enumerate(zip(given, parsed, strict=True)) for bad in kept(*pair, f"{path}.{n}")]
    return [] if given == parsed else [path]


def test_grafanas_own_schema_knows_every_field_of_the_dashboard():
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    parsed = json.loads(json.dumps(Dashboard.from_json(DASHBOARD), cls=JSONEncoder))
    assert kept(DASHBOARD, parsed) == []


def test_the_dashboard_works_with_any_prometheus_and_no_plugin():
    assert {panel["type"] for panel in DASHBOARD["panels"]} <= {"row", "timeseries", "table"}
    for panel in PANELS:
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert DASHBOARD["templating"]["list"][0]["type"] == "datasource"


def test_the_panels_say_what_they_show_and_stand_in_the_order_in_which_one_looks():
    assert all(panel["title"] and len(panel["description"]) > 40 for panel in PANELS)
    assert all(panel["fieldConfig"]["defaults"].get("unit") for panel in PANELS if panel["type"] == "timeseries")
    places = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in DASHBOARD["panels"]]
    assert places == sorted(places) and len(set(places)) == len(places)
    looked_at = (
        "kv_cache_usage", "num_requests_waiting", "num_preemptions", "time_to_first_token", "generation_tokens", "DCGM",
    )  # fmt: skip
    first = [next(n for n, query in enumerate(QUERIES) if name in query) for name in looked_at]
    assert first == sorted(first)


# ---- live ----


@pytest.mark.live
def test_the_flags_of_the_alerts_are_vllms_and_there_is_none_for_a_port_of_metrics():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    told = json.dumps(RULES) + json.dumps(DASHBOARD) + json.dumps(NAMES["metrics"])
    named = set(re.findall(r"--[a-z][\w-]*", told))
    assert "--gpu-memory-utilization" in named
    assert named <= set(parser._option_string_actions)
    assert not [option for option in parser._option_string_actions if "metrics-port" in option]
    with pytest.raises(SystemExit):
        parser.parse_args(["--metrics-port", "5000"])


@pytest.mark.live
def test_a_metric_that_needs_a_flag_is_one_that_vllm_defines():
    import inspect

    from vllm.v1.metrics import loggers

    source = inspect.getsource(loggers)
    for metric in NAMES["metrics"]:
        if "needs" in metric:
            assert f'"{metric["name"]}"' in source


class Prometheus:
    """A real one on the loopback interface, with the rules of the labs run faster."""

    def __init__(self, folder: Path, port: int, factor: int):
        config = faster(yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8")), factor)
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "rules.yml").write_text(yaml.safe_dump(faster(RULES, factor)))
        self.url = f"127.0.0.1:{free_port()}"
        command = [
            "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={self.url}", "--log.level=warn",
        ]  # fmt: skip
        self.child = Child(command, folder / "prometheus.log")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.child.stop()

    def get(self, path: str, **parameters: str):
        try:
            with urllib.request.urlopen(
                f"http://{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            ) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def query(self, expression: str) -> float | None:
        """The first value; None where there is none."""
        found = self.get("query", query=expression)
        return float(found["result"][0]["value"][1]) if found and found["result"] else None

    def state(self, name: str) -> str:
        """inactive, pending or firing."""
        groups = self.get("rules", type="alert")["groups"]
        return next(rule["state"] for group in groups for rule in group["rules"] if rule["name"] == name)


class Enough(Exception):
    pass


@with_prometheus
@pytest.mark.live
def test_a_real_prometheus_sees_a_real_pool_fill_and_the_alert_fires_and_ends(tmp_path):
    stop = threading.Event()

    def tick(*_):
        if stop.is_set():
            raise Enough

    def load(server):
        with contextlib.suppress(Enough):
            traffic.send(server, fill_pool.LOAD, server.model, tmp_path, tick=tick)

    name, seen = "VllmKvCachePoolFull", []
    with (
        fill_pool.small_server(tmp_path) as server,
        Prometheus(tmp_path, server.port, 5) as found,
    ):
        wait_until(lambda: found.query("up") == 1, 60, "Prometheus did not scrape the server")
        listening = [c for c in psutil.Process(found.child.pid).net_connections() if c.status == psutil.CONN_LISTEN]
        assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
        wait_until(lambda: found.query("engine:vllm_kv_cache_usage:max1m") == 0, 30, "the idle pool was not recorded")
        assert {alert: found.state(alert) for alert in ALERTS} == dict.fromkeys(ALERTS, "inactive")

        sender = threading.Thread(target=load, args=[server])
        sender.start()
        try:

            def fires():
                state = found.state(name)
                if state not in seen[-1:]:
                    seen.append(state)
                return state == "firing"

            wait_until(fires, 400, f"the alert did not fire: {seen}")
            assert seen[-2:] == ["pending", "firing"], (
                "it waits before it fires, however often the pool drains meanwhile"
            )
            assert server.healthy(), "a full pool is no end of the server"
            assert used([*RECORDED.values(), *QUERIES]) <= sample_names(server.get("/metrics"))
            wait_until(lambda: found.query("vllm:request_success_total > 0") is not None, 60, "no request ended")
            wait_until(lambda: not unanswered(found), 30, f"without an answer: {unanswered(found)}")
            (alert,) = [a for a in found.get("alerts")["alerts"] if a["labels"]["alertname"] == name]
            assert re.search(r"KV cache of 127\.0\.0\.1:\d+ is \d+(\.\d+)?% full", alert["annotations"]["summary"])
        finally:
            stop.set()
            sender.join()
        wait_until(lambda: found.state(name) == "inactive", 60, "the load is gone, and the alert is not")
        assert server.healthy()
    wait_until(lambda: not {server.child.pid} & set(vllm_processes()), 30, "vLLM is left")


def unanswered(found: Prometheus) -> list[str]:
    """What is recorded, or asked for by a panel, and brings nothing; the device's metrics are not there on a CPU."""
    asked = [
        query.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model", ".*") for query in QUERIES
    ]
    return [query for query in (*RECORDED, *asked) if "DCGM" not in query and found.query(query) is None]
