"""Real vLLM on the CPU backend: the lab from top to bottom, failures as results, and nothing left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import nbformat
import pytest
import zmq.asyncio
from jupyter_client.session import Session

from live_vllm import kernel, vllm_processes, wait_until
from memlab import cli, lab, models, notebook, rank_plots, record, server, warm
from memlab.errors import NotebookError, ServerError
from memlab.flags import ServeFlags
from memlab.record import Traffic
from memlab.server import Server
from memlab.units import GIB
from memlab.warm import LoadGenerator, Warm

ROOT = Path(__file__).resolve().parent.parent
LABS = ROOT / "labs"
TINY = ServeFlags(kv_cache_memory_bytes=GIB, max_model_len=8192, enforce_eager=True)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def _no_vllm_before_or_after():
    assert vllm_processes() == []
    yield
    wait_until(lambda: vllm_processes() == [], 30, f"vLLM processes are left: {vllm_processes()}")


@pytest.mark.live
def test_lab_01_measures_real_vllm_and_the_flag_it_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEMLAB_RUNS", str(tmp_path))
    output = tmp_path / "out.ipynb"
    seconds = notebook.execute(notebook.find("01"), output, {"mode": "live"})
    with capsys.disabled():
        print(f"\nlab 01, live on the CPU backend: {seconds / 60:.1f} min")
    paths = sorted(tmp_path.rglob("run-*/*.json"), key=lambda path: path.stat().st_mtime)
    first, second, third = [record.read(path) for path in paths if path.name != "bench.json"]
    assert third.flags.resolved["max_num_batched_tokens"] == 512, "the exercise's setting"
    assert (first.outcome, second.outcome) == ("ok", "ok")
    assert first.engine.backend == "cpu"
    assert first.machine.gpu is None
    assert first.latency.completed == first.traffic.requests
    assert first.kv.tokens == GIB // record.shapes.LAB_MODELS["tiny-llama"].kv_bytes_per_token()
    assert second.kv.blocks == 2 * first.kv.blocks
    assert second.stated.kv_cache_gib == pytest.approx(2 * first.stated.kv_cache_gib)
    grown = second.seen.peak_gib - first.seen.peak_gib
    assert grown == pytest.approx(1.0, abs=0.2), "the pool doubled, and host memory shows it"
    names = [phase.name for phase in first.phases]
    assert names[0] == "starting"
    assert names.index("loading_weights") < names.index("ready") < names.index("traffic") < names.index("stopped")
    for found in (first, second):
        assert record.privacy_problems(record.dumps(found)) == []
        assert found.memory_back.after_gib == 0
    text = json.dumps(nbformat.read(output, as_version=4))
    assert "host memory" in text
    assert "device memory" not in text


@pytest.mark.live
def test_a_start_that_vllm_refuses_is_a_record_with_vllms_reason():
    refused = TINY.with_(kv_cache_memory_bytes=8 << 20)
    found = lab.run("tiny-llama", refused, mode="live", lab="test", on_phase=None)
    assert found.outcome == "failed_to_start"
    assert "max seq len (8192)" in found.error
    assert found.finding["phase"] == "max_model_len_exceeds_kv"
    fixes = {fix["flag"]: fix for fix in found.finding["failures"][0]["fixes"]}
    assert fixes["--max-model-len"]["to"] < 8192
    assert found.seen.peak_gib > 0
    assert found.log
    assert record.read(next(lab.runs_folder().rglob(f"{found.id}.json"))) == found


@pytest.mark.live
def test_a_port_in_use_is_said_before_anything_starts(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} is in use"):
            Server("model", TINY, tmp_path, port=port).start()


PARENT = """
from pathlib import Path
from memlab import models, shapes
from memlab.flags import ServeFlags
from memlab.server import Server
import time
folder = Path({folder!r})
model = models.write("tiny-llama", shapes.LAB_MODELS["tiny-llama"], folder)
flags = ServeFlags(kv_cache_memory_bytes=1 << 30, max_model_len=8192, enforce_eager=True, load_format="dummy")
with Server(str(model), flags, folder) as server:
    assert server.wait_until_ready()
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.live
def test_a_killed_parent_takes_a_serving_vllm_with_it(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(folder=str(tmp_path))],
        env={**os.environ, "PYTHONPATH": str(LABS)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout.readline().strip() == "ready"
    assert len(vllm_processes()) >= 2, "an API server and an engine were expected"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: vllm_processes() == [], 30, f"left: {vllm_processes()}")


@pytest.mark.live
def test_a_kernels_interrupt_keeps_the_record_and_its_restart_leaves_nothing(tmp_path):
    """The reader presses stop in the middle of a start, runs the cell again, and restarts the kernel."""
    runs = tmp_path / "runs"
    code = textwrap.dedent("""
        from memlab import lab
        from memlab.flags import ServeFlags
        flags = ServeFlags(kv_cache_memory_bytes=1 << 30, max_model_len=8192, enforce_eager=True)
        lab.run("tiny-llama", flags, mode="live", lab="test")
    """)
    with kernel(runs) as (manager, client):
        client.execute(code)
        wait_until(lambda: len(vllm_processes()) >= 1, 60, "no vLLM was started")
        time.sleep(3)
        manager.interrupt_kernel()
        wait_until(lambda: vllm_processes() == [], 40, "the interrupt left vLLM")
        wait_until(lambda: list(runs.glob("run-*/*-r1.json")), 20, "the interrupt lost the record")
        kept = record.read(next(runs.glob("run-*/*-r1.json")))
        assert kept.outcome == "stopped"
        assert kept.ranks[0].timeline.used_gib, "what was measured until then is there"

        reply = client.get_shell_msg(timeout=60)["content"]
        assert reply["ename"] == "KeyboardInterrupt", "the cell ends as an interrupted cell does"
        client.execute(code)
        wait_until(lambda: len(vllm_processes()) >= 1, 60, "no vLLM was started")
        manager.restart_kernel(now=True)
        wait_until(lambda: vllm_processes() == [], 40, "the restart left vLLM")


# ---- several loads, one server ----


@pytest.mark.live
def test_several_loads_share_one_server_and_no_prompt():
    loads = [
        Traffic(256, 16, requests=4),
        Traffic(256, 16, requests=4),
        Traffic(1024, 16, requests=6, shared_prefix_tokens=512, requests_per_s=20.0),
        Traffic(400, 2, requests=3, concurrency=2, prompt_logprobs=1),
    ]
    found = lab.run("tiny-llama", TINY, loads, mode="live")
    assert found.outcome == "ok" and found.sent == loads
    assert [phase.name for phase in found.phases].count("ready") == 1
    ends = [0.0, *(load.end_s for load in found.loads)]
    assert all(load.latency.completed == load.traffic.requests for load in found.loads)
    assert all(before <= load.start_s < load.end_s for before, load in zip(ends, found.loads, strict=False))
    assert all(0 < load.peak_gib[0] <= found.seen.peak_gib for load in found.loads)
    assert found.loads[2].latency.input_tokens == 6 * 1024
    looked_up = [load.prefix_cache_queries for load in found.loads]
    assert looked_up[:3] == [load.latency.input_tokens for load in found.loads[:3]]
    assert looked_up[3] == 0, "log-probabilities of a prompt need it computed: vLLM does not look it up"
    hits = [load.prefix_cache_hits for load in found.loads]
    assert hits[:2] == [0, 0], "no block of a prompt was sent before"
    assert hits[2] % 128 == 0 and hits[2] <= 5 * 512


# ---- a process that imported vLLM beforehand ----


@pytest.mark.live
def test_two_ranks_of_one_server_each_state_their_half_and_a_grid_of_them_resumes(monkeypatch, tmp_path, capsys):
    """A setting as the grids of several GPUs have it, in the small."""
    monkeypatch.setenv("MEMLAB_RUNS", str(tmp_path))
    (first_of_grid, *_) = json.loads((LABS / "grids" / "two-cards.json").read_text())
    flags = {**TINY.set(), "tensor_parallel_size": 2, "extra": ["--disable-custom-all-reduce"]}
    load = {"input_tokens": 50, "output_tokens": 8, "requests": 2}
    setting = {**first_of_grid, "model": "tiny-llama", "card": None, "flags": flags, "traffic": [load, load]}
    (tmp_path / "grid.json").write_text(json.dumps([setting]))
    for there in (0, 1):
        assert cli.main(["sweep", str(tmp_path / "grid.json"), "--seconds", "530"]) == 0
        assert ("1 to go on the CPU backend" in capsys.readouterr().out) == (there == 0)
    (path,) = tmp_path.rglob("run-*/*-r1.json")
    found = record.read(path)
    assert found.outcome == "ok" and [load.latency.completed for load in found.loads] == [2, 2]
    assert found.variables == setting["variables"] and found.engine.environment["NCCL_NVLS_ENABLE"] == "0"
    first, second = (rank.stated for rank in found.ranks)
    assert first.kv_cache_gib == second.kv_cache_gib == 1.0, "the pool is given for each rank"
    each = record.shapes.LAB_MODELS["tiny-llama"].kv_bytes_per_token() / 2
    assert found.kv.tokens == GIB // each == found.prediction["kv_tokens"], (
        "a rank holds half of the heads of each token"
    )
    assert "KV cache, stated: 1.00 GiB on each." in rank_plots.ranks(found).alt


@pytest.mark.live
def test_a_warm_process_becomes_the_server():
    made = Warm(lab.LOCAL_ENV)
    started_in = made.child.pid
    found = lab.run("tiny-llama", TINY.with_(max_num_seqs=7), mode="live", warm=made)
    assert found.outcome == "ok"
    assert found.flags.resolved["max_num_seqs"] == 7
    assert not made.waiting and made.child.pid == started_in
    assert "CPU KV cache size" in "".join(found.log), "the log of the run is not that of the process that was waiting"
    assert vllm_processes() == []
    made.stop()


@pytest.mark.live
def test_one_load_generator_serves_the_loads_of_every_run_and_ends_when_idle(monkeypatch):
    warm.end_idle_load_generators()
    made = []
    monkeypatch.setattr(warm, "LoadGenerator", lambda: made.append(LoadGenerator()) or made[-1])
    loads = [Traffic(64, 8, requests=4), Traffic(64, 8, requests=6)]
    first = lab.run("tiny-llama", TINY, loads, mode="live")
    second = lab.run("tiny-llama", TINY, Traffic(64, 4, requests=5), mode="live")
    assert [load.latency.completed for load in first.loads] == [4, 6]
    assert second.latency.completed == 5
    (one,) = made
    assert one.ready and vllm_processes() == [], "what waits is no server, and none of its loads is left"
    assert "Benchmark" not in (one.folder / "output.log").read_text(), "each load's output is in its own run's log"
    monkeypatch.setattr(warm, "IDLE_S", 0.1)
    with warm.load_generator() as again:
        assert again is one
    wait_until(lambda: one.child.poll() is not None, 10, "an idle load generator is kept for ever")


@pytest.mark.live
def test_a_load_that_fails_says_so_and_one_that_is_left_ends(tmp_path):
    with warm.load_generator() as generator:
        generator.begin(["bench", "serve", "--no-such-flag"], tmp_path / "bench.log", print)
        wait_until(lambda: generator.wait(0.1) == 2, 60, "the load's exit code")
    assert "--no-such-flag" in (tmp_path / "bench.log").read_text()
    model, nobody = models.locate("tiny-llama", tmp_path)[0], f"http://{server.HOST}:{server.free_port()}"
    endless = ["bench", "serve", "--base-url", nobody, "--ready-check-timeout-sec", "600", "--model", str(model)]
    with warm.load_generator() as same:
        assert same is generator, "a load that failed takes no generator with it"
        same.begin(endless, tmp_path / "endless.log", print)
        wait_until(lambda: len(vllm_processes()) == 1, 30, "the load has begun")
    assert vllm_processes() == [] and same.child.poll() is not None


@pytest.mark.live
def test_a_warm_process_that_is_not_needed_ends(tmp_path):
    warm = Warm()
    assert warm.waiting
    warm.stop()
    assert vllm_processes() == [] and not warm.waiting


# ---- errors that a front end hides ----


def execute_cells(tmp_path, *cells: str) -> Path:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    source = tmp_path / "99-test.ipynb"
    nbformat.write(made, source)
    notebook.execute(source, tmp_path / "out" / "99-test.ipynb")
    return source


@pytest.mark.parametrize(
    "cell",
    [
        "import ipywidgets as w\nout = w.Output()\nwith out:\n    1 / 0\nout",
        "import ipywidgets as w\nw.interact(lambda x: 1 / 0, x=3);",
        "import ipywidgets as w\nb = w.Button()\nout = w.Output()\n@out.capture()\ndef f(_): 1 / 0\n"
        "b.on_click(f); b.click(); out",
        "1 / 0",
    ],
    ids=["Output", "interact", "captured callback", "cell"],
)
def test_an_error_in_a_widget_fails_the_run(tmp_path, cell):
    with pytest.raises(NotebookError, match="division"):
        execute_cells(tmp_path, cell)
    assert (tmp_path / "out" / "99-test.ipynb").exists(), "the notebook up to the error is lost"


def test_a_reply_whose_wake_up_was_taken_is_found_all_the_same(monkeypatch):
    """Another view of the socket, through which nbclient answers an Output widget, takes it as it reads its events."""
    monkeypatch.setattr(notebook, "LOOK_AGAIN_S", 0.2)
    session = Session(key=b"a")

    async def replies() -> str:
        context = zmq.asyncio.Context()
        plain = zmq.Context.shadow(context.underlying)
        with context.socket(zmq.DEALER) as ours, plain.socket(zmq.DEALER) as kernel:
            port = ours.bind_to_random_port("tcp://127.0.0.1")
            kernel.connect(f"tcp://127.0.0.1:{port}")
            waits = asyncio.ensure_future(notebook._ShellChannel(ours, session).get_msg(timeout=60))
            await asyncio.sleep(0.5)
            session.send(kernel, "execute_reply")
            time.sleep(0.2)  # it arrives while the loop cannot look
            zmq.Socket.shadow(ours.underlying).getsockopt(zmq.EVENTS)
            return (await asyncio.wait_for(waits, 30))["msg_type"]

    assert asyncio.run(replies()) == "execute_reply"


def test_widgets_that_work_do_not_fail_the_run(tmp_path):
    execute_cells(tmp_path, "import ipywidgets as w\nout = w.Output()\nwith out:\n    print('fine')\nout")


def test_an_unknown_lab_is_answered_with_the_labs_there_are():
    with pytest.raises(NotebookError, match="01-ledger"):
        notebook.find("77")


# ---- replay ----


def replay_without_vllm(tmp_path) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT / "tests" / "data" / "without_vllm"), str(LABS)])
    command = [sys.executable, "-m", "memlab.cli", "run", "01"]
    env = {**os.environ, "PYTHONPATH": path, "MEMLAB_RUNS": str(tmp_path)}
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.skipif(not list(record.RECORDS.rglob("h200/**/*.json")), reason="no record to replay")
def test_lab_01_replays_where_vllm_is_not_installed(tmp_path):
    done = replay_without_vllm(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Replayed: runs recorded on NVIDIA H200" in done.stdout
    executed = nbformat.read(next(tmp_path.rglob("01-ledger.ipynb")), as_version=4)
    assert "H200" in json.dumps(executed), "a replay that does not name its hardware"


def test_the_hidden_vllm_is_really_hidden(tmp_path):
    path = os.pathsep.join([str(ROOT / "tests" / "data" / "without_vllm"), str(LABS)])
    code = (
        "from memlab import lab; print(lab.backend())\ntry:\n    import torch\nexcept ImportError:\n    print('none')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["None", "none"], done.stderr


def test_a_recorded_run_that_a_lab_asks_for_is_never_started(monkeypatch):
    monkeypatch.setenv("MEMLAB_MODE", "live")
    flags = ServeFlags(gpu_memory_utilization=0.25, max_model_len=32768, enforce_eager=True)
    found = lab.recorded("mistral-7b-v0.1", flags, lab="03-paged-kv-cache")
    assert (found.model.name, found.machine.name) == ("mistral-7b-v0.1", "h200")


def test_a_miss_in_replay_says_what_is_there(monkeypatch):
    monkeypatch.setenv("MEMLAB_MODE", "replay")
    if not record.read_all():
        pytest.skip("no record yet")
    with pytest.raises(Exception, match="The nearest is"):
        lab.run("llama-3.1-8b", ServeFlags(max_num_seqs=3), Traffic(1, 1, 1), lab="01-ledger")
