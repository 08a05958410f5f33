"""vLLM's log lines, by version and by what stands before them: their events, the ledger they state, their phases."""

import json
import re
import tracemalloc
from pathlib import Path

import pytest

from memlab import record, vllm_log
from memlab.vllm_log import LogParser, parse, stated_kv, stated_ledger

DATA = Path(__file__).parent / "data" / "vllm_logs"
INDEX = json.loads((DATA / "index.json").read_text())
GRAPHS = "h200-0.33.0-graphs.log"
EAGER = "h200-0.33.0-eager.log"
PLAYED = "h200-0.33.0-rtx-3090-served.log"


def events_of(name: str) -> list[vllm_log.Event]:
    return list(vllm_log.parse_file(DATA / name))


def only(lines, kind: str) -> vllm_log.Event:
    lines = lines.split("\n") if isinstance(lines, str) else lines
    found = [event for event in parse(lines) if event.kind == kind]
    assert len(found) == 1, f"{len(found)} events of kind {kind}"
    return found[0]


def plain(events) -> list[tuple]:
    return [(event.kind, dict(event.values), event.rank) for event in events]


# --- real logs ---


@pytest.mark.parametrize("case", INDEX, ids=lambda case: case["file"])
def test_a_log_gives_the_events_and_numbers_that_its_report_states(case):
    events = events_of(case["file"])
    assert [event.kind for event in events] == case["kinds"]
    for name, number in case["numbers"].items():
        seen = [event.values[name] for event in events if name in event.values]
        assert any(value == pytest.approx(number, abs=1e-6) for value in seen), f"{name}: {number} is not in {seen}"


@pytest.mark.parametrize("case", [case for case in INDEX if "record" in case], ids=lambda case: case["record"])
def test_the_log_and_the_record_of_a_run_say_the_same(case):
    events = events_of(case["file"])
    (path,) = record.RECORDS.rglob(f"{case['record']}.json")
    found = record.read(path)
    assert stated_ledger(events) == found.stated
    assert vllm_log.memory_lines(events) == found.log
    assert vllm_log.engine(events).get("sampler") in (found.engine.sampler, None)
    if found.kv:
        told = stated_kv(events)
        assert told.tokens == found.kv.tokens
        assert told.max_concurrency == pytest.approx(found.kv.max_concurrency, abs=5e-3), "the log rounds it"


def test_every_case_says_where_it_is_from():
    assert all(case.get("url", "").startswith("https://github.com/") or case.get("source") for case in INDEX)
    assert {case["file"] for case in INDEX} == {path.name for path in DATA.glob("*.log")}


def test_every_anchor_passes_the_filter_in_front_of_the_table():
    assert [row.anchor for row in vllm_log.ROWS if not vllm_log.interesting(row.anchor)] == []


# --- ledgers ---

SUMS = [
    ("vllm-10517-3090-29k-no-chunk.log", None),
    ("vllm-11230-a6000-72b-gptq-0.6.4.log", None),
    ("vllm-10511-llama3-8b-h100.log", None),
    ("vllm-11251-v100-graph-outside-budget.log", None),
    ("vllm-12126-llama32-11b-vision-profile.log", None),
    ("vllm-13074-r1-h20-util1.0.log", None),
    ("vllm-13882-rtx4060-negative-kv.log", None),
    ("vllm-15815-l40s-tp2-ok.log", None),
    ("vllm-14452-2x5090-pp2-ok.log", "pid12897"),
    ("vllm-18446-v0-ok-numbers.log", "pid237"),
    ("vllm-48601-mrv2-h100-tp4-summary.log", "TP2"),
    (GRAPHS, None),
    (EAGER, None),
    (PLAYED, None),
]


@pytest.mark.parametrize(("name", "rank"), SUMS, ids=[name for name, _ in SUMS])
def test_the_stated_terms_fill_the_budget(name, rank):
    ledger = stated_ledger(events_of(name), rank)
    identities = ledger.identities()
    assert [identity.name for identity in identities] == ["the terms fill the budget"]
    assert identities[0].holds, identities


def test_033_prints_the_graph_estimate_inside_the_activation():
    ledger = stated_ledger(events_of(GRAPHS))
    assert ledger.graphs_subtracted is True
    assert (ledger.total_gib, ledger.budget_gib, ledger.kv_cache_gib) == (139.8, 34.95, 16.63)
    assert ledger.activation_gib == pytest.approx(2.71 - 0.92)
    assert (ledger.cuda_graphs_estimated_gib, ledger.cuda_graphs_actual_gib) == (0.92, 0.45)
    assert (ledger.consumed_gib, ledger.non_torch_gib, ledger.context_gib) == (15.62, None, None)


def test_033_eager_prints_the_activation_alone():
    ledger = stated_ledger(events_of(EAGER))
    assert ledger.graphs_subtracted is False
    assert (ledger.activation_gib, ledger.cuda_graphs_estimated_gib, ledger.kv_cache_gib) == (1.79, None, 17.54)
    assert ledger.activation_gib == pytest.approx(stated_ledger(events_of(GRAPHS)).activation_gib), "graphs move it not"


def test_the_first_capture_of_033_is_the_trial_not_the_graphs():
    events = events_of(GRAPHS)
    trial, real = (event for event in events if event.kind in ("graphs_trial_captured", "graphs_captured"))
    assert (trial.values["cuda_graphs_actual_gib"], real.values["cuda_graphs_actual_gib"]) == (0.61, 0.45)
    assert stated_ledger(events).cuda_graphs_actual_gib == 0.45


def test_a_build_that_prints_the_activation_without_the_estimate_is_told_by_the_sum():
    text = (DATA / GRAPHS).read_text().replace("2.71 GiB for peak", "1.79 GiB for peak")
    assert stated_ledger(parse(text.split("\n"))).activation_gib == pytest.approx(1.79)


def test_an_estimate_that_was_switched_off_is_not_taken_off():
    text = (DATA / GRAPHS).read_text().replace("profiling is enabled (default", "profiling is disabled (default")
    text = text.replace("2.71 GiB for peak", "1.79 GiB for peak").replace("16.63", "17.55")
    ledger = stated_ledger(parse(text.split("\n")))
    assert (ledger.graphs_subtracted, ledger.activation_gib, ledger.kv_cache_gib) == (False, 1.79, 17.55)
    assert all(identity.holds for identity in ledger.identities())


def test_026_states_weights_and_non_torch_apart():
    ledger = stated_ledger(events_of("vllm-48601-mrv2-h100-tp4-summary.log"), "TP2")
    assert (ledger.weights_gib, ledger.activation_gib, ledger.non_torch_gib) == (7.39, 1.54, 0.6)
    assert (ledger.consumed_gib, ledger.graphs_subtracted, ledger.cuda_graphs_actual_gib) == (None, False, 2.04)


def test_the_gb_of_v0_are_gib():
    ledger = stated_ledger(events_of("vllm-10517-3090-29k-no-chunk.log"))
    assert ledger.weights_gib == 14.9888
    assert ledger.activation_gib == pytest.approx(17.98 - 14.9888)


def test_a_pool_given_in_bytes_owes_nothing_to_the_budget():
    events = list(
        parse(
            [
                "INFO 12-01 10:00:00 [model_runner.py:428] Model loading took 14.99 GiB memory and 1.5 seconds",
                "INFO 12-01 10:00:00 [gpu_worker.py:677] Initial free memory 139.29 GiB, reserved 10.0 GiB memory "
                "for KV Cache as specified by kv_cache_memory_bytes config and skipped memory profiling.",
            ]
        )
    )
    ledger = stated_ledger(events)
    assert (ledger.pool_given, ledger.kv_cache_gib, ledger.weights_gib) == (True, 10.0, 14.99)
    assert (ledger.budget_gib, ledger.activation_gib, ledger.identities()) == (None, None, [])
    assert vllm_log.free_at_start_gib(events) == 139.29


def test_the_cpu_backend_states_its_pool_and_nothing_it_does_not_have():
    events = events_of("cpu-0.32.0-tiny-llama.log")
    assert stated_ledger(events).known() == {"kv_cache": 1.0}
    assert stated_ledger(events).pool_given is True
    kv = stated_kv(events)
    assert (kv.tokens, kv.max_concurrency, kv.max_model_len, kv.blocks) == (524288, 64.0, 8192, None)


def test_a_pool_sized_by_the_cpu_backend_has_its_budget():
    line = (
        "INFO 12-01 10:00:00 [cpu_worker.py:260] Auto set (10.5/16.0) GiB for KV cache on node 0, with 14.72 GiB "
        "requested memory for the worker. 4.22 GiB memory was consumed by non-kv usages."
    )
    ledger = stated_ledger(parse([line]))
    assert ledger.known() == {"budget": 14.72, "consumed": 4.22, "kv_cache": 10.5}


def test_a_second_start_in_one_log_replaces_the_first():
    events = list(parse((DATA / GRAPHS).read_text().split("\n") + (DATA / EAGER).read_text().split("\n")))
    assert stated_ledger(events) == stated_ledger(events_of(EAGER))
    assert stated_kv(events).tokens == 143712


def test_blocks_given_by_hand_resize_the_pool():
    lines = ["Available KV cache memory: 20.0 GiB", "Overriding num_gpu_blocks=10000 with num_gpu_blocks_override=500"]
    ledger = stated_ledger(parse(lines))
    assert (ledger.kv_cache_gib, ledger.pool_given) == (1.0, True)


def test_the_small_pool_of_a_trial_capture_is_not_the_pool():
    assert stated_kv(events_of("vllm-36634-num-gpu-blocks-0-override16.log")).blocks is None


def test_a_log_that_states_no_memory_has_no_ledger():
    assert stated_ledger(parse(["INFO: Application startup complete."])) is None
    assert stated_ledger(events_of(GRAPHS), "TP7") is None


# --- ranks ---

TWO_RANKS = [
    "(Worker_TP1 pid=22) INFO 12-01 10:00:00 [model_runner.py:428] Model loading took 7.51 GiB memory and 1.5 seconds",
    "(Worker_TP0 pid=21) INFO 12-01 10:00:00 [model_runner.py:428] Model loading took 7.5 GiB memory and 1.5 seconds",
    "(Worker_TP0 pid=21) INFO 12-01 10:00:09 [gpu_worker.py:771] Available KV cache memory: 6.87 GiB",
    "(EngineCore pid=20) INFO 12-01 10:00:09 [kv_cache_utils.py:1147] GPU KV cache size: 90,000 tokens, "
    "Maximum concurrency for 8,192 tokens per request: 10.99x",
]


def test_each_rank_has_its_own_ledger_and_the_engine_speaks_for_all():
    events = list(parse(TWO_RANKS))
    assert vllm_log.ranks(events) == ["TP0", "TP1"]
    assert [stated_ledger(events, rank).weights_gib for rank in ("TP0", "TP1")] == [7.5, 7.51]
    assert stated_ledger(events, "TP1").kv_cache_gib is None, "0.33 prints the pool for the first rank only"
    assert stated_kv(events).tokens == 90_000


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("(Worker_TP1 pid=448) ", "TP1"),
        ("(Worker_DP1_PP0_TP3_EP7 pid=448) ", "DP1_PP0_TP3_EP7"),
        ("(Worker pid=448) ", None),
        ("(EngineCore pid=12) ", None),
        ("(EngineCore_DP1 pid=12) ", "DP1"),
        ("(EngineCore_0 pid=5839) ", "DP0"),
        ("(APIServer pid=1) ", None),
        ("(VllmWorker rank=3 pid=15164) ", "rank3"),
        ("(VllmWorker TP0 pid=15164) ", "TP0"),
        ("(VllmWorkerProcess pid=237) ", "pid237"),
        ("(RayWorkerWrapper pid=3151, ip=10.1.2.3) ", "pid3151"),
        ("[rank0]: ", "rank0"),
        ("(EngineCore pid=12) (Worker_TP0 pid=13) ", "TP0"),
        ("", None),
    ],
)
def test_the_process_prefix_tells_the_rank(prefix, rank):
    event = only(f"{prefix}INFO 08-14 14:07:22 [gpu_worker.py:563] Available KV cache memory: 6.87 GiB", "kv_available")
    assert event.rank == rank
    assert event.text == "Available KV cache memory: 6.87 GiB"


def test_ranks_count_as_numbers():
    lines = [f"(Worker_TP{n} pid=1) [gpu_worker.py:1] Available KV cache memory: 1.0 GiB" for n in (10, 2, 1)]
    assert vllm_log.ranks(parse(lines)) == ["TP1", "TP2", "TP10"]


# --- prefixes ---

CONTAINERS = {
    "docker compose": "vllm-1  | {}",
    "compose, a project's name": "stack_vllm.gpu-1 | {}",
    "kubectl --prefix": "[pod/vllm-7d9c/vllm] {}",
    "RFC 3339": "2026-08-14T14:07:22.123456789Z {}",
    "CRI": "2026-08-14T14:07:22.123456789Z stdout F {}",
    "ISO with an offset": "2026-08-14 14:07:22,123+02:00 {}",
    "journald": "Dec 01 12:00:00 gpu-box-7 vllm[123]: {}",
    "systemd, a service": "Dec  1 12:00:00 gpu-box-7 docker-compose[9]: vllm-1  | {}",
    "cloud, a timestamp and compose": "2026-08-14T14:07:22Z vllm-1  | {}",
    "carriage return": "{}\r",
    "colour": "\x1b[32m{}\x1b[0m",
    "Ray, repeated": "{} [repeated 3x across cluster]",
    "Ray, an explained repeat": "{} [repeated 3x across cluster] (Ray deduplicates logs by default. Set RAY_...)",
}


def json_log(line: str, key: str = "message") -> str:
    return json.dumps({"severity": "INFO", key: line, "resource": {"type": "k8s_container"}})


def plain_log() -> list[str]:
    text = (DATA / GRAPHS).read_text().replace("\r", "\n")
    return [line for line in text.split("\n") if line]


@pytest.mark.parametrize("wrap", CONTAINERS.values(), ids=CONTAINERS)
def test_a_prefix_changes_nothing(wrap):
    lines = plain_log()
    assert plain(parse(wrap.format(line) for line in lines)) == plain(parse(lines))
    assert stated_ledger(parse(wrap.format(line) for line in lines)) == stated_ledger(events_of(GRAPHS))


@pytest.mark.parametrize("key", ["message", "msg", "log", "textPayload", "jsonPayload"])
def test_a_json_logger_changes_nothing(key):
    lines = plain_log()
    wrapped = [json_log(line if key != "jsonPayload" else {"message": line}, key) for line in lines]
    assert plain(parse(wrapped)) == plain(parse(lines))


def test_vllms_colours_are_no_part_of_the_message():
    line = (
        "\x1b[0;36m(Worker_TP1 pid=448)\x1b[0;0m \x1b[32mINFO\x1b[0m \x1b[90m08-14 14:07:22\x1b[0m "
        "\x1b[90m[gpu_worker.py:563]\x1b[0m Available KV cache memory: 6.87 GiB"
    )
    event = only(line, "kv_available")
    assert (event.rank, event.text) == ("TP1", "Available KV cache memory: 6.87 GiB")


def test_the_process_of_vllms_own_json_formatter_tells_the_rank():
    record = {"levelname": "INFO", "processName": "Worker_TP1", "message": "Available KV cache memory: 6.87 GiB"}
    assert only(json.dumps(record), "kv_available").rank == "TP1"


def test_lines_are_counted_from_one_with_the_quiet_ones():
    lines = ["nothing of note"] * 41 + ["Available KV cache memory: 6.87 GiB"]
    assert only(lines, "kv_available").line_number == 42


def test_a_file_is_read_in_blocks_that_cut_its_lines_anywhere(tmp_path):
    path = tmp_path / "vllm.log"
    path.write_bytes((DATA / GRAPHS).read_bytes())
    whole = list(vllm_log.parse_file(path))
    assert whole == list(parse(path.read_bytes().decode().split("\n")))
    for block in (7, 100, 1000):
        assert list(vllm_log.parse_file(path, block)) == whole


# --- messages that break over lines ---


@pytest.mark.parametrize("width", [60, 72, 80, 96, 120, 200])
def test_a_wrapped_message_tells_the_same(width):
    """A terminal wraps at its width, in the middle of words and numbers."""
    wanted = ("memory_summary", "kv_size", "kv_available", "graphs_compared", "model_loaded", "graphs_subtracted")
    for line in plain_log():
        whole = [event for event in parse([line]) if event.kind in wanted]
        pieces = [line[at : at + width] for at in range(0, len(line), width)]
        found = [event for event in parse(pieces) if event.kind in wanted]
        assert plain(found) == plain(whole), pieces


def test_text_wrapped_between_words_tells_the_same():
    text = (DATA / "vllm-27466-runtime-oom-h100.log").read_text().split("\n")[0]
    words, lines = text.split(" "), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 70:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    assert plain(parse(lines)) == plain(parse([text]))


def test_an_unfinished_message_ends_where_the_next_begins():
    lines = [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 GiB",
        "(EngineCore pid=104) ERROR 05-05 12:36:59 [core.py:1138] EngineCore failed to start.",
    ]
    parser = LogParser()
    assert parser.feed(lines[0]) == []
    assert [event.kind for event in parser.feed(lines[1])] == ["oom", "engine_start_failed"]
    assert parser.close() == []


def test_an_unfinished_message_is_given_at_the_end():
    parser = LogParser()
    parser.feed("CUDA out of memory. Tried to allocate 3.82 GiB.")
    assert parser.close()[0].values == {"tried_gib": 3.82}
    assert parser.close() == []


def test_a_traceback_with_the_same_prefix_does_not_swallow_the_next_failure():
    head = "(EngineCore pid=1) ERROR 10-31 15:07:50 [core.py:708] "
    lines = [
        head + "ValueError: To serve at least one request with the model's max seq len (131072), (4.54 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (1.71 GiB). Based on",
        head + "EngineCore failed to start.",
    ]
    assert [event.kind for event in parse(lines)] == ["kv_too_small", "engine_start_failed"]


# --- phases ---


def phases(events) -> list[str]:
    found = [phase for event in events if (phase := vllm_log.phase_of(event))]
    return [phase for phase, before in zip(found, [None, *found], strict=False) if phase != before]


def test_the_phases_of_a_start_of_033_come_in_order():
    assert phases(events_of(GRAPHS)) == [
        "starting",
        "loading_weights",
        "profiling",
        "compiling",
        "profiling",
        "sizing_kv_cache",
        "warming_up",
        "capturing_graphs",
        "warming_up",
        "ready",
        "stopping",
    ]


@pytest.mark.parametrize(
    ("name", "kind", "phase"),
    [
        ("h200-0.33.0-rtx-3090-no-free-memory.log", "free_memory_low", "starting"),
        ("h200-0.33.0-rtx-3090-pool-too-small.log", "kv_too_small", "sizing_kv_cache"),
        ("h200-0.33.0-rtx-3090-oom.log", "oom", "warming_up"),
    ],
)
def test_a_start_that_fails_ends_in_the_phase_that_took_the_memory(name, kind, phase):
    events = events_of(name)
    assert kind in {event.kind for event in events if vllm_log.is_error(event)}
    assert phases(events)[-1] == phase


def test_a_start_on_the_cpu_captures_nothing():
    found = phases(events_of("cpu-0.32.0-tiny-llama.log"))
    assert found == ["starting", "loading_weights", "sizing_kv_cache", "warming_up", "ready", "serving", "stopping"]


def test_every_phase_is_a_known_one():
    assert {vllm_log.phase_of(event) for case in INDEX for event in events_of(case["file"])} <= {None, *vllm_log.PHASES}


def test_progress_bars_mark_a_phase_once():
    bar = "\r".join(f"Loading safetensors checkpoint shards: {p:3d}% Completed | x/4 [00:00<00:00]" for p in range(101))
    assert [event.values["progress_percent"] for event in parse([bar])] == [pytest.approx(0, abs=100), 100.0]


# --- failures ---

FAILURES = [
    ("kv_none", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", {}),
    ("autofit_failed", "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even", {}),
    (
        "bad_settings",
        "max_num_batched_tokens (4096) is smaller than max_model_len (8192). This effectively limits",
        {"max_num_batched_tokens": 4096, "max_model_len": 8192},
    ),
    ("bad_settings", "vllm: error: unrecognized arguments: --swap-space 16GiB", {"arguments": "--swap-space 16GiB"}),
    (
        "bad_settings",
        "Total number of attention heads (40) must be divisible by tensor parallel size (3).",
        {"tensor_parallel_size": 3},
    ),
    (
        "workspace_locked",
        "Workspace is locked but allocation from 'a.py:1:f' requires 512.00 MB, current size is 256.00 MB.",
        {},
    ),
    ("cuda_oom", "torch.AcceleratorError: CUDA error: out of memory", {}),
    ("cuda_oom", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", {}),
    ("host_oom", "MemoryError", {}),
    ("host_oom", "[12.3] Out of memory: Killed process 4242 (python3) total-vm:1kB", {}),
    ("host_oom", "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to", {}),
    ("killed", "ERROR [multiproc_executor.py:381] Worker proc W died unexpectedly (exit code: -9)", {"exit_code": -9}),
    ("engine_dead", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace", {}),
    ("engine_init_failed", "RuntimeError: Engine core initialization failed. See root cause above.", {}),
    (
        "cpu_memory_low",
        "ValueError: Available memory on node 0 (3.0/16.0 GiB) on startup is less than desired CPU memory utilization",
        {"free_gib": 3.0, "step": "startup"},
    ),
    (
        "cpu_pool_low",
        "ValueError: Available memory on node 0 (19.49/22.21 GiB) on kv cache allocation is less than requested memory "
        "for kv (1024.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE",
        {"free_gib": 19.49, "requested_gib": 1024.0},
    ),
    (
        "cpu_budget_full",
        "ValueError: The worker already uses 9.0 GiB (model weights and runtime), more than the 8.0 GiB of CPU memory",
        {"consumed_gib": 9.0, "budget_gib": 8.0},
    ),
    (
        "free_memory_low",
        "ValueError: Free memory on device cuda:1 (31.44/47.38 GiB) on startup is less than desired GPU memory "
        "utilization (0.95, 45.01 GiB). Decrease GPU memory utilization",
        {"free_gib": 31.44, "total_gib": 47.38, "budget_gib": 45.01},
    ),
]


@pytest.mark.parametrize(("kind", "text", "values"), FAILURES, ids=[text[:40] for _, text, _ in FAILURES])
def test_a_failure_is_known(kind, text, values):
    event = only(text, kind)
    assert vllm_log.is_error(event)
    assert values.items() <= event.values.items()


def test_memory_ran_out_or_the_start_was_refused():
    ran_out = ["CUDA out of memory. Tried to allocate 1.00 GiB.", "Worker proc W died unexpectedly (exit code: -9)"]
    refused = ["No available memory for the cache blocks.", "max_num_seqs (9) exceeds available Mamba cache blocks (1)"]
    assert [vllm_log.is_out_of_memory(event) for line in ran_out for event in parse([line])] == [True, True]
    assert [vllm_log.is_out_of_memory(event) for line in refused for event in parse([line])] == [False, False]


@pytest.mark.parametrize(
    "line",
    [
        "[Autotuner]: OOM detected, falling back to default tactic",
        "(Worker_TP0 pid=3) INFO [kv_cache_utils.py:826] Overriding num_gpu_blocks=0 with num_gpu_blocks_override=16",
        "resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown",
    ],
)
def test_what_only_looks_like_a_failure_is_none(line):
    events = list(parse([line]))
    assert len(events) == 1 and not vllm_log.is_error(events[0])


def test_all_memory_of_torchs_message_is_in_gib():
    event = next(event for event in events_of("vllm-27466-runtime-oom-h100.log") if event.kind == "oom")
    assert event.values["tried_gib"] == 960 / 1024
    assert event.values["private_pools_gib"] == pytest.approx(159.88 / 1024)
    assert event.values["processes_gib"] == (78.43,)


def test_decimal_and_binary_units_are_told_apart():
    line = (
        "[PrefetchOffloader] Initialized 9 modules. Total GPU memory saved: 10.7374 GB, Static buffer pool: 1.0737 GB"
    )
    values = only(line, "offload").values
    assert (values["offloaded_gib"], values["buffer_gib"]) == (pytest.approx(10, abs=1e-3), pytest.approx(1, abs=1e-3))


# --- the engine ---


def test_the_engine_is_what_the_log_says():
    found = vllm_log.engine(events_of(GRAPHS))
    assert (found["vllm_version"], found["engine"], found["runner"]) == ("0.33.0", "V1", "V2")
    assert (found["attention"], found["sampler"]) == ("FLASH_ATTN", "FlashInfer")
    assert (found["dtype"], found["max_model_len"], found["enforce_eager"]) == ("bfloat16", 32768, False)
    assert "quantization" not in found, "None is not a value"


@pytest.mark.parametrize(
    ("line", "attention"),
    [
        ("INFO 05-09 22:20:21 [cuda.py:221] Using Flash Attention backend on V1 engine.", "Flash Attention"),
        ("INFO 12-16 02:38:24 selector.py:135] Using FlashAttention-2 backend.", "FlashAttention-2"),
        ("INFO 12-01 10:00:00 [cuda.py:448] Using AttentionBackendEnum.FLASHINFER backend.", "FLASHINFER"),
        ("INFO 01-27 00:31:44 [mxfp4.py:165] Using Triton backend.", None),
    ],
)
def test_an_attention_backend_is_not_any_backend(line, attention):
    assert vllm_log.engine(parse([line])).get("attention") == attention


def test_flags_are_read_and_keys_are_not():
    flags = vllm_log.arguments(events_of(GRAPHS))
    assert (flags["gpu_memory_utilization"], flags["max_model_len"]) == (0.25, 32768)
    assert "max_num_batched_tokens" not in flags, "it was left to vLLM"
    line = "non-default args: {'api_key': 'sk-abc', 'hf_token': 'hf_x', 'enforce_eager': True, 'plan': <Plan.A: 1>}"
    assert vllm_log.arguments(parse([line])) == {"enforce_eager": True}


def test_arguments_are_not_run(tmp_path):
    target = tmp_path / "ran"
    line = f"non-default args: {{'a': __import__('pathlib').Path('{target}').touch(), 'port': 8000}}"
    assert vllm_log.arguments(parse([line])) == {"port": 8000}
    assert not target.exists()


def test_the_stats_line_of_033_is_read_whole():
    line = (
        "(APIServer pid=11) INFO 12-01 10:01:10 [loggers.py:335] Engine 000: Avg prompt throughput: 6400.0 tokens/s, "
        "Avg generation throughput: 12.8 tokens/s, Running: 7 reqs, Waiting: 1 reqs, Deferred: 1 reqs, Preemptions: 2, "
        "GPU KV cache usage: 45.2%, Prefix cache hit rate: 0.5%, External prefix cache hit rate: 12.5%"
    )
    event = only(line, "stats")
    assert event.values == {
        "prompt_per_s": 6400.0,
        "generation_per_s": 12.8,
        "running_reqs": 7,
        "waiting_reqs": 1,
        "preemptions": 2,
        "kv_usage_percent": 45.2,
        "prefix_hit_percent": 0.5,
    }


def test_a_step_says_its_tokens():
    line = (
        "INFO [loggers.py:196] Engine 000: Iteration(5): 1 context requests, 2048 context tokens, "
        "7 generation requests, 7 generation tokens, iteration elapsed time: 91.20 ms, GPU KV cache usage: 12.3%"
    )
    values = only(line, "iteration").values
    assert (values["context_tokens"], values["generation_tokens"], values["elapsed_ms"]) == (2048, 7, 91.2)


# --- junk ---


@pytest.mark.parametrize(
    "line",
    [
        "Available KV cache memory: nan GiB",
        "Available KV cache memory: inf GiB",
        "Available KV cache memory: GiB",
        "GPU KV cache size: tokens",
        "Model loading took None GiB memory and None seconds",
        "GPU KV cache size: " + "9" * 5000 + " tokens",
        "non-default args: " + "[" * 5000,
        "non-default args: {" + "'a': [" * 3000 + "}",
        "{" * 3000 + "}",
        '{"message": {"message": {"message": {"message": 1}}}}',
        '{"message": null}',
        "(" * 5000 + "pid=1) memory",
        "Memory profiling results: non_torch_memory" + " " * 30_000 + "[repeated 3x",
        "\x00\x01memory\xff\ufffd Available KV cache",
    ],
    ids=range(14),
)
def test_a_value_that_is_no_number_is_absent(line):
    assert not [value for event in parse([line]) for value in event.values.values()]


def test_a_message_is_kept_as_text():
    text = "<script>alert(1)</script> CUDA out of memory. Tried to allocate 1.00 GiB. <img src=x onerror=alert(1)>"
    assert only(text, "oom").text == text


def test_a_message_is_kept_short():
    assert len(only("Available KV cache memory: 1.0 GiB " + "x" * 30_000, "kv_available").text) == 1000


@pytest.mark.parametrize(
    "piece", ["x", "memory ", "( ", "a.", "/a", "CUDA out of memory. Tried to allocate ", "\r", "{}"]
)
def test_a_line_of_ten_megabytes_is_no_trouble(piece):
    line = piece * (10_000_000 // len(piece))
    assert len(list(parse([line, line]))) < 100


def test_bytes_that_are_no_text_are_read_over(tmp_path):
    path = tmp_path / "vllm.log"
    path.write_bytes(bytes(range(256)) * 200 + b"\nAvailable KV cache memory: 6.87 GiB\n\xff\xfe\n")
    assert [event.kind for event in vllm_log.parse_file(path)] == ["kv_available"]


def test_a_file_without_an_end_of_line_is_read_in_bounds(tmp_path):
    path = tmp_path / "vllm.log"
    path.write_text("x" * 20_000_000)
    tracemalloc.start()
    assert list(vllm_log.parse_file(path, 1 << 16)) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000


def test_the_parser_keeps_nothing_of_a_long_log():
    quiet = [
        '(APIServer pid=1) INFO:     127.0.0.1:40512 - "POST /v1/completions HTTP/1.1" 200 OK\n',
        "(EngineCore pid=9) INFO 12-01 10:00:00 [core.py:99] a line of no interest to anyone\n",
    ]
    near = "some text without a prefix: the memory of it is long\n"
    parser = LogParser()
    for line in [*quiet, near] * 100:
        parser.feed(line)
    tracemalloc.start()
    for number in range(200_000):
        parser.feed(near if number % 100 == 0 else quiet[number % 2])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 20_000
    assert not parser.waiting


def test_an_endless_message_is_given_up():
    parser = LogParser()
    parser.feed("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has")
    events = [event for _ in range(100) for event in parser.feed("and more of the same, without an end")]
    assert [event.kind for event in events] == ["oom"]
    assert not parser.waiting


# --- privacy ---


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("loading /home/ada/models/llama from disk", "ada"),
        ('File "/usr/local/lib/python3.12/dist-packages/vllm/v1/x.py"', "python3.12"),
        ("model='/data/team x/llama 3'", "team"),
        (r"C:\Users\ada\vllm.log", "ada"),
        ("~/models/llama", "models"),
        ("file:///tmp/vllm_dist_5e86 used", "vllm_dist"),
        ("(RayWorkerWrapper pid=3151, ip=10.20.30.40) started", "10.20"),
        ("master_addr=gpu-node-17, x", "gpu-node"),
        ("Dec 01 12:00:00 gpu-box-7 vllm[123]: Available", "gpu-box"),
        ("ada@gpu-box:~$ vllm serve", "ada"),
        ("http://ada:pw@proxy.corp.example:3128/x", "corp"),
        ("Authorization: Bearer abcdef123456", "abcdef"),
        ("HF_TOKEN=hf_abcdefghijklmnop", "abcdefghij"),
        ("token: s3cr3tvalue", "s3cr3t"),
        ("api_key='my key'", "my key"),
        ("2001:0db8:85a3:0000:0000:8a2e:0370:7334", "8a2e"),
    ],
)
def test_scrub_takes_out_what_tells_of_a_person_or_a_machine(text, secret):
    assert secret not in vllm_log.scrub(text)


@pytest.mark.parametrize(
    "text",
    [
        "Available KV cache memory: 6.87 GiB",
        "Free memory on device (139.29/139.8 GiB) on startup.",
        "Avg prompt throughput: 6400.0 tokens/s",
        "Starting vLLM server on http://127.0.0.1:8000",
        "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
        "max_tokens=16, num_tokens: 5, 14:07:22",
        "model='meta-llama/Llama-3.1-8B-Instruct'",
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].",
    ],
)
def test_scrub_leaves_what_a_reader_needs(text):
    assert vllm_log.scrub(text) == text


def test_memory_lines_are_the_lines_that_state_memory():
    lines = vllm_log.memory_lines(events_of(GRAPHS))
    assert lines[-1].endswith("Current kv cache memory in use is 16.63 GiB.")
    assert "Available KV cache memory: 16.63 GiB" in lines
    assert not any("throughput" in line or "non-default args" in line for line in lines)


def test_memory_lines_are_bounded_keep_both_ends_and_name_the_rank():
    lines = [f"(Worker_TP{n} pid=1) [gpu_worker.py:1] Available KV cache memory: {n}.5 GiB" for n in range(500)]
    found = vllm_log.memory_lines(parse(lines))
    assert len(found) == 40
    assert found[0] == "TP0: Available KV cache memory: 0.5 GiB"
    assert found[-1] == "TP499: Available KV cache memory: 499.5 GiB"


def test_no_case_of_the_tests_tells_of_a_person():
    text = "".join(path.read_text() for path in DATA.glob("*.log"))
    assert not re.search(r"/(?:home|Users|root)/(?!\.)\w", text)


def test_a_rank_s_number_counts_the_stages_first():
    names = ["PP0_TP0", "PP0_TP1", "PP1_TP0", "PP1_TP1"]
    assert [vllm_log.rank_number(name, 2) for name in names] == [0, 1, 2, 3]
    assert vllm_log.rank_number("TP3_EP3", 4) == 3
    assert vllm_log.rank_number("rank7", 8) == 7
    assert vllm_log.rank_number(None, 1) == 0
    assert vllm_log.rank_number("pid448", 2) is None, "no guess where the name does not tell"


# --- behind what nobody knows ---

UNKNOWN = {
    "stern": "vllm-0 vllm ",
    "srun": "0: ",
    "mpirun": "[1,0]<stderr>:",
    "torchrun": "[default0]:",
    "ts": "Aug 14 14:07:22 ",
    "supervisor": "[stderr] ",
    "table": "2026-08-14 14:07:22 UTC | INFO | ",
    "skypilot": "(head, rank=0, pid=2345) ",
    "quoted": "> ",
    "gke": "INFO 2025-11-19T20:16:36.096625454Z [resource.labels.containerName: vllm] ",
    "lemonade": "2026-05-08 11:50:14.753 [Info] (Process) ",
}


@pytest.mark.parametrize("prefix", UNKNOWN.values(), ids=UNKNOWN)
def test_a_rank_and_a_warning_are_known_behind_the_prefix_of_any_logger(prefix):
    stated = "(Worker_TP1 pid=3) INFO 08-14 14:07:22 [gpu_worker.py:563] Available KV cache memory: 6.87 GiB"
    event = only(prefix + stated, "kv_available")
    assert (event.rank, event.text) == ("TP1", "Available KV cache memory: 6.87 GiB")
    warned = "(EngineCore pid=9) WARNING 12-01 10:00:00 [mamba_mixer2.py:1] CUDA error: out of memory"
    assert [event.kind for event in parse([prefix + warned])] == ["caught"]


def test_an_error_behind_a_progress_bar_that_lost_its_end_is_read_and_so_is_the_bar():
    line = (
        "Capturing CUDA graphs (PIECEWISE):  41%|####      | 21/51 [00:02<00:03,  8.1it/s](EngineCore pid=7) ERROR "
        "11-20 08:01:02 [core.py:1584] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB."
    )
    assert [event.kind for event in parse([line])] == ["graphs_progress", "oom"]
