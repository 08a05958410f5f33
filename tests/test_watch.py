"""A watch of somebody's server: what it reads, what it never does, what it calls weak, and the record that it keeps."""

import contextlib
import http.server
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from live_vllm import wait_until
from memlab import attach, gpu, lab, metrics, models, record, screen, shapes, watch
from memlab.errors import MemlabError
from memlab.flags import ServeFlags
from memlab.ledger import MemoryLedger
from memlab.screen import Sight, weak_spot
from memlab.server import Server
from memlab.units import GIB

DATA = Path(__file__).parent / "data"
LABS = Path(__file__).parent.parent / "labs"
PAGES = {path.name: path.read_text() for path in (DATA / "metrics").glob("*.txt")}
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
CPU, OLD, TWO = "vllm-0.32.0-cpu.txt", "composed-0.26.0.txt", "composed-0.33.0-dp2.txt"
OOM = "\n".join(
    (
        "(EngineCore pid=12) ERROR 12-01 10:05:00 [core.py:1512] EngineCore encountered a fatal error.",
        "(EngineCore pid=12) ERROR 12-01 10:05:00 [core.py:1512] torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 1.20 GiB. GPU 0 has a total capacity of 39.50 GiB of which 312.00 MiB is free.",
    )
)


class FakeServer:
    """A server of given pages on the loopback interface. ``asked`` has every request; a page may be a generator."""

    def __init__(self, metrics: str | bytes, version: str = "0.32.0", model: str = "tiny-llama", **pages):
        served = {"id": model, "root": model, "max_model_len": 8192, "parent": None}
        self.pages = {
            "/health": (200, ""),
            "/version": (200, json.dumps({"version": version})),
            "/v1/models": (200, json.dumps({"data": [served]})),
            "/metrics": (200, metrics),
            **pages,
        }
        self.asked: list[tuple[str, str, dict]] = []
        self.sent = 0

    def __enter__(self):
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(("GET", self.path, dict(self.headers)))
                status, body = outer.pages.get(self.path, (404, ""))
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", body)
                self.end_headers()
                parts = body() if callable(body) else [body.encode() if isinstance(body, str) else body]
                with contextlib.suppress(OSError):
                    for part in parts:
                        self.wfile.write(part)
                        outer.sent += len(part)

            def __getattr__(self, name):
                if name.startswith("do_"):
                    outer.asked.append((name[3:], self.path, {}))
                raise AttributeError(name)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def health_asked(self) -> int:
        return sum(path == "/health" for _, path, _ in self.asked)

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def watched(
    url: str, seconds: float | None = 0.3, as_json: bool = False, **options
) -> tuple[int, str, record.RunRecord]:
    """A watch with its exit code, its output and the record it wrote."""
    out = io.StringIO()
    code = watch.run(url, options.get("pid"), options.get("log"), seconds, as_json, out)
    (path,) = (lab.runs_folder() / "watch").glob("*.json")
    return code, out.getvalue(), record.read(path)


# ---- the pages ----


@pytest.mark.parametrize(
    ("page", "usage", "running", "waiting", "preemptions", "blocks", "engines"),
    [(OLD, 0.9987, 25, 12, 7, 6352, 1), (CPU, 0.0527, 48, 0, 0, 4096, 1), (TWO, 0.75, 7, 3, 0, 30000, 2)],
)
def test_the_metrics_of_each_version_are_read(page, usage, running, waiting, preemptions, blocks, engines):
    found = metrics.read(PAGES[page])
    assert found.kv_cache_usage == pytest.approx(usage, abs=1e-4), "the fullest engine counts, not the sum"
    assert (found.running, found.waiting, found.preemptions) == (running, waiting, preemptions)
    assert (found.kv.blocks, found.engines) == (blocks, engines)
    assert found.kv.tokens == found.kv.blocks * found.kv.block_size
    assert found.config["enable_prefix_caching"] == "True"
    assert found.prompt_tokens > 0


@given(st.text(max_size=300))
def test_no_page_breaks_the_reader(text):
    for page in (text, "vllm:kv_cache_usage_perc" + text, "vllm:cache_config_info{" + text + "} 1.0\n" + PAGES[CPU]):
        found = metrics.read(page)
        assert found is None or found.kv_cache_usage is None or found.kv_cache_usage >= 0


def test_a_figure_that_json_cannot_hold_is_not_seen():
    page = PAGES[CPU].replace('concurrency="64.0"', 'concurrency="nan"')
    page = page.replace(
        'vllm:num_requests_running{engine="0",model_name="tiny-llama"} 48.0', "vllm:num_requests_running NaN"
    )
    found = metrics.read(page)
    assert found.running is None
    assert found.kv.max_concurrency is None
    assert found.kv.tokens == 524288


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://gate.example/llm/v1/models", "https://gate.example/llm"),
        ("http://[::1]:8000/metrics", "http://[::1]:8000"),
    ],
)
def test_an_address_may_name_any_page_of_the_server(given, read):
    assert attach.base_url(given) == read


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x", "http://", "http://me:pw@host", "http://h:99999", ""])
def test_what_is_no_address_of_a_server_is_refused(url):
    with pytest.raises(MemlabError, match="--url"):
        attach.base_url(url)


# ---- a watch from afar ----


def test_a_watch_without_a_process_keeps_what_the_metrics_say_and_nothing_else():
    with FakeServer(PAGES[OLD], "0.26.0", "models/llama-3.1-8b") as server:
        code, out, found = watched(server.url)
        assert {method for method, _, _ in server.asked} == {"GET"}
        assert {path for _, path, _ in server.asked} <= {"/health", "/version", "/v1/models", "/metrics"}
    assert (code, found.outcome, found.lab) == (0, "ok", "watch")
    assert found.engine.vllm == "0.26.0"
    assert found.kv.tokens == 101632
    assert found.series.kv_cache_usage[0] == pytest.approx(0.9987)
    assert found.flags.resolved["gpu_memory_utilization"] == 0.9
    data = record.to_dict(found)
    assert "torch" not in data["engine"]
    assert "backend" not in data["engine"]
    assert "gpu_count" not in data["machine"], "unknown, and not none"
    assert data["ranks"] == []
    assert found.finding["weak_spot"] == "kv_cache"
    assert "12 requests wait" in out
    assert record.privacy_problems(record.dumps(found)) == []


def test_what_is_not_seen_is_said_with_what_would_show_it():
    with FakeServer(PAGES[CPU]) as server:
        _, out, _ = watched(server.url, as_json=True)
    first = json.loads(out.splitlines()[0])
    notes = " ".join(first["notes"])
    assert "--pid" in notes
    assert "--log" in notes
    assert "no vLLM" in notes, "the port belongs to this test"
    assert "memory" not in first
    last = json.loads(out.splitlines()[-1])
    assert last["record"]["id"] == Path(last["path"]).stem


def test_the_key_reaches_the_server_and_nothing_else(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame-open-0123456789")
    with FakeServer(PAGES[CPU]) as server:
        _, out, found = watched(server.url, as_json=True)
        assert all(headers["Authorization"] == "Bearer sesame-open-0123456789" for _, _, headers in server.asked)
    assert "sesame" not in out
    assert "sesame" not in record.dumps(found)


def test_a_key_is_not_carried_to_where_a_server_points(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    with FakeServer(PAGES[CPU]) as other, FakeServer("") as server:
        server.pages["/metrics"] = (302, f"{other.url}/metrics")
        with pytest.raises(MemlabError, match="HTTP 302"):
            watched(server.url)
        assert other.asked == []


def test_nothing_of_a_server_reaches_the_terminal_as_a_command():
    evil = "\x1b]0;owned\x07\x1b[2J\u202eevil\r\n"
    page = PAGES[CPU].replace("tiny-llama", "\x1b[2J\x9b31mevil")
    with FakeServer(page, version="\x1b[31m9", model=evil) as server:
        _, out, found = watched(server.url)
        with watch.Watch(server.url) as open_watch:
            lines = screen.frame(open_watch.view(), (80, 24))
    assert all(c.isprintable() for line in [*lines, *out.splitlines()] for c in line)
    assert all(c.isprintable() for c in found.model.name)
    assert found.engine.vllm == "unknown"


def test_a_page_without_end_is_left():
    def endless():
        for _ in range(100):
            yield b"vllm:num_requests_running 1.0\n" * 35_000

    with FakeServer("") as server:
        server.pages["/metrics"] = (200, endless)
        with pytest.raises(MemlabError, match="larger than"):
            watched(server.url)
        assert server.sent < 32 << 20


@pytest.mark.parametrize(
    ("page", "word"),
    [((200, "<html>nginx</html>"), "no vllm:|has no vllm"), ((404, ""), "HTTP 404"), ((200, ""), "vllm")],
)
def test_an_answer_that_is_not_vllms_says_so(page, word):
    with FakeServer("") as server:
        server.pages["/metrics"] = page
        with pytest.raises(MemlabError, match=word) as caught:
            watched(server.url)
    assert "--disable-log-stats" in str(caught.value)


def test_where_nothing_answers_the_error_says_what_to_do():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(MemlabError, match="is the server up.*--url"):
        watched(f"http://127.0.0.1:{port}")


def test_a_server_that_goes_away_ends_the_watch_with_a_record(monkeypatch):
    monkeypatch.setattr(attach, "PERIOD_S", 0.05)
    with FakeServer(PAGES[CPU]) as server:
        stop = threading.Timer(0.5, lambda: server.__exit__())
        stop.start()
        code, _, found = watched(server.url, seconds=30)
    assert (code, found.outcome) == (0, "stopped")
    assert "--log" in found.error
    assert len(found.series.running) >= 2


def test_a_dead_engine_behind_a_living_port_is_not_an_orderly_end(monkeypatch):
    monkeypatch.setattr(attach, "PERIOD_S", 0.05)
    with FakeServer(PAGES[CPU]) as server:

        def die():
            before = server.health_asked()
            server.pages["/health"] = (503, "")
            wait_until(lambda: server.health_asked() > before + 1, 20, "nobody asks for its health")
            server.__exit__()

        threading.Timer(0.3, die).start()
        code, _, found = watched(server.url, seconds=30)
    assert (code, found.outcome) == (1, "died")


def _all_signals_heard() -> None:
    """As in a terminal: tests that are started in the background hand on that SIGINT or SIGHUP is ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@linux
@pytest.mark.parametrize("ending", ["SIGTERM", "SIGHUP", "SIGINT", None])
def test_however_the_watch_is_ended_its_record_is_there(tmp_path, ending):
    env = {**os.environ, "PYTHONPATH": str(LABS), "MEMLAB_RUNS": str(tmp_path)}
    with FakeServer(PAGES[CPU]) as server:
        words = [sys.executable, "-m", "memlab.cli", "watch", "--url", server.url, "--json"]
        child = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=_all_signals_heard
        )
        child.stdout.readline()
        if ending is None:
            child.stdout.close()  # as ``| head -1`` does
        else:
            child.send_signal(getattr(signal, ending))
        said = child.stderr.read()
        assert child.wait(30) == 0, said
    (path,) = (tmp_path / "watch").glob("*.json")
    assert record.read(path).outcome == "ok"
    assert said == ""
    child.stderr.close()
    child.stdout.close()


def test_a_long_watch_keeps_the_fullest_moment():
    poller = attach.Poller(None, 0.0)
    for second in range(5000):
        poller.keep(float(second), metrics.Metrics(kv_cache_usage=0.99 if second == 3333 else 0.1))
    assert len(poller.rows) < 2 * attach.ROWS
    assert max(row.kv_cache_usage for _, row in poller.rows) == 0.99
    times = [at for at, _ in poller.rows]
    assert times == sorted(times)
    assert times[-1] > 4900


def test_a_counter_that_starts_anew_has_no_rate():
    poller = attach.Poller(None, 0.0)
    for second, value in enumerate((100.0, 200.0, 300.0)):
        poller.keep(float(second), metrics.Metrics(prompt_tokens=value))
    assert poller.change("prompt_tokens", 10) == (200.0, 2.0)
    poller.keep(3.0, metrics.Metrics(prompt_tokens=5.0))
    assert poller.change("prompt_tokens", 10) is None


# ---- a process on this machine ----

SCRIPT = """
import http.server, json, sys
page = open(sys.argv[-1]).read().encode()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        served = {"data": [{"id": "mine", "root": "mine", "max_model_len": 8192}]}
        body = {"/health": b"", "/version": b'{"version": "0.33.0"}', "/metrics": page,
                "/v1/models": json.dumps(served).encode()}[self.path]
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(open(sys.argv[-2]).read(), flush=True)
print("port", server.server_address[1], file=sys.stderr, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def process_named_vllm(tmp_path, *arguments: str, log: str = "", **variables):
    """A process with the command line of ``vllm serve``, its output in a file; yields (process, url, log file)."""
    script, said, output = tmp_path / "vllm", tmp_path / "said", tmp_path / "server.log"
    script.write_text(SCRIPT)
    said.write_text(log)
    words = [sys.executable, str(script), "serve", *arguments, "--", str(said), str(DATA / "metrics" / OLD)]
    with output.open("w") as file:
        env = {**os.environ, **variables}
        child = subprocess.Popen(words, stdout=file, stderr=subprocess.PIPE, text=True, env=env)
    try:
        yield child, f"http://127.0.0.1:{child.stderr.readline().split()[1]}", output
    finally:
        child.kill()
        child.wait()
        child.stderr.close()


LOG = (DATA / "vllm_logs" / "h200-0.33.0-eager.log").read_text()


@linux
def test_the_process_that_listens_is_found_with_its_flags_and_its_log(tmp_path):
    arguments = ("me/model", "--max-model-len", "4k", "-tp", "2", "--max_num_seqs=64")
    with process_named_vllm(tmp_path, *arguments, log=LOG) as (child, url, _):
        assert attach.find_pid(url) == (child.pid, "")
        _, _, found = watched(url, 1.0)
    assert found.flags.given["max_model_len"] == 4000
    assert found.flags.given["tensor_parallel_size"] == 2
    assert found.flags.given["max_num_seqs"] == 64
    assert found.model.name == "me/model"
    assert found.engine.runner == "V2"
    assert found.ranks[0].stated.kv_cache_gib > 0
    assert found.ranks[0].seen is None, "no GPU of this machine is its own"
    assert any("KV cache" in line for line in found.log)


@linux
def test_neither_keys_nor_places_of_a_process_are_recorded(tmp_path):
    secret = "correct-horse-battery"
    arguments = (
        *("/data/secret-project/model", "--api-key", secret, f"--hf-token={secret}", "--ssl-keyfile", "/etc/key.pem"),
        *(
            "--served-model-name",
            "alice",
            "--host",
            "10.1.2.3",
            "--kv-offloading-size",
            "4",
            "--allowed-origins",
            secret,
        ),
    )
    variables = {
        "VLLM_API_KEY": secret,
        "HF_TOKEN": secret,
        "VLLM_HOST_IP": "10.1.2.3",
        "VLLM_CACHE_ROOT": "/home/alice/.cache",
        "NCCL_P2P_DISABLE": "1",
        "AWS_SECRET_ACCESS_KEY": secret,
    }
    with process_named_vllm(tmp_path, *arguments, **variables) as (_, url, _):
        _, out, found = watched(url, 1.0, as_json=True)
    text = record.dumps(found)
    for private in (secret, "alice", "10.1.2.3", "secret-project", "key.pem"):
        assert private not in text
    assert secret not in out
    assert "--kv-offloading-size" in found.flags.given["extra"]
    assert "4" in found.flags.given["extra"]
    assert found.engine.environment == {"NCCL_P2P_DISABLE": "1"}


@linux
def test_a_process_that_runs_out_of_memory_is_a_record_with_the_logs_reason(tmp_path):
    with process_named_vllm(tmp_path, "m", log=LOG) as (child, url, log):

        def die():
            with log.open("a") as file:
                file.write(OOM + "\n")
            child.kill()
            child.wait()

        threading.Timer(1.0, die).start()
        code, out, found = watched(url, seconds=60)
    assert (code, found.outcome) == (1, "out_of_memory")
    assert "Tried to allocate 1.20 GiB" in found.error
    assert "out of memory" in out


@linux
def test_an_earlier_start_in_the_same_file_is_not_this_ones(tmp_path):
    with process_named_vllm(tmp_path, "m", log=LOG + OOM + "\n" + LOG) as (child, url, _):
        threading.Timer(1.0, child.kill).start()
        _, _, found = watched(url, seconds=60)
    assert found.outcome == "stopped"


@linux
def test_a_log_whose_terms_do_not_add_up_costs_its_ledger_and_not_the_record(tmp_path):
    broken = LOG.replace("17.54 GiB", "87.54 GiB").replace("max_seq_len=32768", "max_seq_len=many")
    assert broken != LOG
    with process_named_vllm(tmp_path, "m", log=broken) as (_, url, _):
        _, _, found = watched(url, 1.0)
    assert found.outcome == "ok"
    assert found.ranks == []
    assert any("87.54 GiB" in line for line in found.log), "the lines themselves are kept"


@linux
def test_a_pid_that_is_not_there_or_serves_elsewhere_is_said(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with process_named_vllm(tmp_path, "m") as (child, url, _):
        with pytest.raises(MemlabError, match=f"no process {gone.pid}"):
            watched(url, pid=gone.pid)
        with pytest.raises(MemlabError, match=f"that is process {child.pid}"):
            watched(url, pid=os.getpid())


def test_a_log_that_cannot_be_read_is_said_before_the_watch(tmp_path):
    with FakeServer(PAGES[CPU]) as server, pytest.raises(MemlabError, match="--log"):
        watched(server.url, log=tmp_path)


def test_a_log_is_followed_when_it_is_cut(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(LOG)
    reader = attach.LogReader(path, lambda: 0.0)
    reader.read()
    before = len(reader.events)
    path.write_text("")
    reader.read()
    with path.open("a") as file:
        file.write(OOM + "\n")
    reader.finish()
    assert before > 5
    assert any(event.kind == "oom" for event in reader.events)


def test_a_command_line_is_read_however_vllm_was_started():
    module = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model=m", "--seed", "3"]
    for words in (["vllm", "serve", "m", "--seed", "3"], module, [*module[:3], "--model", "m", "--seed=3"]):
        model, found = attach.read_command(words)
        assert (model, found.seed) == ("m", 3)
    assert found.extra == ("--model", "m"), "a record says how the model was named"
    assert attach.read_command(["nginx", "-g", "daemon off"]) is None


# ---- a GPU: the driver is made up, the rules are not ----


@linux
def test_the_ledger_by_the_driver_adds_up_and_names_what_others_take(tmp_path, monkeypatch):
    total, used, own = 140.4, [37.0], [36.0]
    device = gpu.Device(0, "GPU-x", "NVIDIA H200", total, 0.6, (9, 0), "580.1", "13.0", False)
    with process_named_vllm(tmp_path, "models/llama-3.1-8b", "--max-model-len", "8192", log=LOG) as (child, url, _):
        monkeypatch.setattr(gpu, "devices", lambda: [device])
        monkeypatch.setattr(gpu, "processes", lambda _: [gpu.Process(child.pid, own[0]), gpu.Process(1, 0.5)])
        monkeypatch.setattr(gpu, "used_gib", lambda _: used[0])
        monkeypatch.setattr(gpu, "link", lambda _: "none")
        monkeypatch.setattr(
            gpu,
            "watch_devices",
            lambda uuids, rate_hz, **options: gpu.Sampler(lambda: list(used), "device", 50, **options),
        )
        with watch.Watch(url) as open_watch:
            time.sleep(0.5)
            quiet = open_watch.view()
            used[0] = 140.2
            time.sleep(0.3)
            open_watch.look()
            crowded = open_watch.view()
            made = open_watch.record()
    assert quiet.weak.term in ("none", "kv_cache")
    seen = made.ranks[0].seen
    assert seen.baseline_gib == pytest.approx(1.0)
    assert seen.headroom_gib == pytest.approx(0.2, abs=1e-3)
    assert all(identity.holds for identity in seen.identities())
    assert crowded.weak.term == "headroom"
    assert "Other processes took 103.20 GiB" in crowded.weak.sentence
    assert made.machine.gpu == "NVIDIA H200"
    assert made.ranks[0].foreign_gib == 0.5
    assert record.from_dict(json.loads(record.dumps(made))) == made


# ---- the weak spot ----

CALM = Sight(
    backend="cuda",
    card="GPU 0",
    headroom_gib=9.0,
    unprofiled_gib=0.3,
    foreign_growth_gib=0.0,
    host_free_gib=60.0,
    kv_usage=0.4,
    pool_tokens=100_000,
    running=10,
    waiting=0,
    preempted=0,
    max_num_seqs=256,
    max_model_len=32768,
    block_size=16,
    prefix_caching=True,
)


@pytest.mark.parametrize(
    ("change", "term", "words"),
    [
        ({}, "none", "9.00 GiB were free"),
        ({"headroom_gib": 0.42}, "headroom", "lower --gpu-memory-utilization"),
        ({"headroom_gib": 0.8, "unprofiled_gib": 0.9}, "headroom", "0.90 GiB beyond its budget"),
        ({"headroom_gib": 0.8, "unprofiled_gib": 0.7}, "none", "0.80 GiB"),
        ({"headroom_gib": 0.1, "foreign_growth_gib": 3.0}, "headroom", "other processes took 3.00 GiB"),
        ({"foreign_growth_gib": 3.0}, "none", "9.00 GiB were free"),
        ({"foreign_growth_gib": 8.8}, "foreign", "took 8.80 GiB"),
        ({"foreign_growth_gib": 0.1}, "none", ""),
        ({"host_free_gib": 0.5, "headroom_gib": 0.1}, "host_memory", "kernel kills"),
        ({"kv_usage": 0.97, "waiting": 5}, "kv_cache", "memory does not run out"),
        ({"kv_usage": 0.97}, "none", ""),
        ({"preempted": 4}, "kv_cache", "4 preemptions in the last minute"),
        (
            {"running": 256, "waiting": 9},
            "max_num_seqs",
            "40% of the pool is used. Raise it where the card",
        ),
        ({"running": 256, "waiting": 9, "backend": "cpu"}, "max_num_seqs", "where the host has memory free"),
        ({"running": 256, "waiting": 9, "engines": 2}, "none", ""),
        ({"pool_tokens": 10_000_000}, "unreachable", "can only keep prefixes"),
        ({"pool_tokens": 10_000_000, "prefix_caching": False}, "unreachable", "is never used"),
        ({"pool_tokens": 256 * 32768}, "none", ""),
        ({"headroom_gib": None}, "none", "host memory are free"),
        ({"headroom_gib": None, "host_free_gib": None}, "none", "memory itself is not seen"),
        ({"kv_usage": None}, "unknown", "no metrics yet"),
    ],
)
def test_the_weak_spot_is_what_gives_first(change, term, words):
    found = weak_spot(replace(CALM, **change))
    assert found.term == term, found.sentence
    assert words.lower() in found.sentence.lower()


def test_more_headroom_never_makes_a_server_weaker():
    def weak(headroom: float) -> bool:
        return weak_spot(replace(CALM, headroom_gib=headroom)).term == "headroom"

    answers = [weak(headroom / 20) for headroom in range(40)]
    assert answers == sorted(answers, reverse=True)
    assert True in answers
    assert False in answers


amounts = st.one_of(st.none(), st.floats(0, 1e4))
counts = st.one_of(st.none(), st.integers(1, 1 << 40))


@given(
    st.builds(
        Sight,
        headroom_gib=amounts,
        unprofiled_gib=amounts,
        foreign_growth_gib=amounts,
        host_free_gib=amounts,
        kv_usage=amounts,
        pool_tokens=counts,
        running=amounts,
        waiting=amounts,
        preempted=amounts,
        max_num_seqs=counts,
        max_model_len=counts,
        block_size=counts,
    ),
    st.integers(20, 200),
    st.integers(5, 60),
)
def test_whatever_is_seen_fits_the_terminal(sight, width, height):
    ledgers = {"seen": MemoryLedger("seen", peak_gib=sight.headroom_gib or 1.0)}
    gauge = screen.Gauge("GPU 0", 1.0, 2.0, True, 3.0, 4.0)
    view = screen.View(
        "http://x", 1.0, weak_spot(sight), ("vLLM 0.33.0", "模型" * 60), ledgers=ledgers, memory=(gauge,) * 8
    )
    view = replace(view, kv_usage=sight.kv_usage, running=sight.running, max_num_seqs=sight.max_num_seqs)
    lines = screen.frame(view, (width, height))
    assert len(lines) < height
    assert all(screen._columns(line) <= width for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_loses_no_number(width):
    view = screen.View(
        "http://127.0.0.1:8000",
        60.0,
        weak_spot(CALM),
        kv_usage=0.42,
        pool_tokens=154_384,
        running=12,
        waiting=3,
        preemptions=7,
        max_num_seqs=256,
        prompt_per_s=12_345,
        generation_per_s=678,
        prefix_hits=0.95,
        memory=(screen.Gauge("GPU 0", 34.93, 35.84, True, 139.80, 103.96),),
        ledgers={view: MemoryLedger(view, weights_gib=15.0, kv_cache_gib=18.85) for view in ("stated", "seen")},
    )
    shown = " ".join(" ".join(screen.frame(view, (width, 40))).split())
    for number in ("154,384 tokens", "12 running of 256", "3 waiting", "7 preemptions so far", "12,345/s", "678/s",
                   "95% of prompt tokens from the prefix cache", "34.93 GiB of 139.80 GiB", "peak 35.84 GiB",
                   "free 103.96 GiB", "weights 15.00 GiB 15.00 GiB", "kv cache 18.85 GiB 18.85 GiB"):  # fmt: skip
        assert number in shown


# ---- real vLLM ----


@pytest.mark.live
@pytest.mark.timeout(600)
def test_a_real_server_is_watched_in_its_own_words(tmp_path):
    served = models.write("tiny-llama", shapes.LAB_MODELS["tiny-llama"], tmp_path)
    flags = ServeFlags(kv_cache_memory_bytes=GIB, max_model_len=8192, enforce_eager=True, load_format="dummy")
    with Server(str(served), flags, tmp_path) as server:
        assert server.wait_until_ready()
        words = ["watch", "--url", server.url, "--log", str(tmp_path / "vllm.log"), "--seconds", "5", "--json"]
        env = {**os.environ, "PYTHONPATH": str(LABS), "MEMLAB_RUNS": str(tmp_path / "runs")}
        done = subprocess.run([sys.executable, "-m", "memlab.cli", *words], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        assert server.healthy(), "the server goes on"
        pids = server.pids()
    *views, last = map(json.loads, done.stdout.splitlines())
    found = record.from_dict(last["record"])
    assert found == record.read(Path(last["path"]))
    assert len(views) >= 4
    assert views[-1]["pid"] in pids
    assert views[-1]["weak"]["term"] == "none"
    assert found.engine.backend == "cpu"
    assert found.engine.torch
    assert found.flags.given["max_model_len"] == 8192
    assert found.kv.tokens == GIB // shapes.LAB_MODELS["tiny-llama"].kv_bytes_per_token()
    assert found.stated.kv_cache_gib == 1.0
    assert found.seen.peak_gib > 0.5, "the process group's host memory"
    assert found.model.parameters == shapes.LAB_MODELS["tiny-llama"].parameters()
    assert record.privacy_problems(record.dumps(found)) == []
