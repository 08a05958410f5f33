"""Each lab beyond the first, from top to bottom on real vLLM on the CPU backend: what it claims, it shows there too."""

import json
from pathlib import Path

import nbformat
import pytest

from live_vllm import vllm_processes, wait_until
from memlab import clinic, notebook, record

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


@pytest.fixture
def run_lab(tmp_path, monkeypatch, capsys):
    """Runs a lab live; gives its records in their order, and the executed notebook's text."""
    monkeypatch.setenv("MEMLAB_RUNS", str(tmp_path))
    assert vllm_processes() == []

    def run(number: str, **parameters) -> tuple[list[record.RunRecord], str]:
        output = tmp_path / "out.ipynb"
        seconds = notebook.execute(notebook.find(number), output, {"mode": "live", **parameters})
        with capsys.disabled():
            print(f"\nlab {number}, live on the CPU backend: {seconds / 60:.1f} min")
        paths = (path for path in Path(tmp_path).rglob("run-*/*.json") if path.name != "bench.json")
        found = [record.read(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]
        assert all(one.engine.backend == "cpu" and one.machine.gpu is None for one in found)
        assert all(record.privacy_problems(record.dumps(one)) == [] for one in found)
        text = json.dumps(nbformat.read(output, as_version=4))
        assert "device memory" not in text, "the CPU backend has none"
        return found, text

    yield run
    wait_until(lambda: vllm_processes() == [], 30, "vLLM processes are left")


def test_lab_02_a_longer_prompt_takes_more_steps_and_no_more_memory(run_lab):
    found, _ = run_lab("02")
    small, large, whole, between = found
    assert [run.flags.resolved["max_num_batched_tokens"] for run in found] == [256, 1024, 4096, 512]
    assert all(run.outcome == "ok" for run in found)
    assert all(load.latency.failed == 0 for run in found for load in run.loads)
    assert not whole.flags.resolved["enable_chunked_prefill"] and small.flags.resolved["enable_chunked_prefill"]
    shortest, longest = small.loads[0], small.loads[-2]
    assert longest.traffic.input_tokens > 40 * shortest.traffic.input_tokens
    assert longest.latency.ttft_ms["p50"] > 3 * shortest.latency.ttft_ms["p50"]
    for run in (small, between):
        peaks = [load.peak_gib[0] for load in run.loads]
        assert max(peaks) - min(peaks) < 0.15, "host memory of a load, GiB"


def test_lab_03_a_full_pool_preempts_and_a_shared_beginning_is_computed_once(run_lab):
    (full, twice, blocks, shared, each), _ = run_lab("03")
    assert all(run.outcome == "ok" for run in (full, twice, blocks, shared, each))
    assert full.loads[0].preemptions > 0 and max(full.series.kv_cache_usage) > 0.9
    assert sum(load.preemptions for load in twice.loads) < sum(load.preemptions for load in full.loads)
    assert twice.kv.tokens == 2 * full.kv.tokens
    assert blocks.kv.block_size == 32 and blocks.kv.tokens == full.kv.tokens
    load = shared.loads[0]
    beginning = load.traffic.shared_prefix_tokens * (load.traffic.requests - 1)
    assert 0.5 * beginning < load.prefix_cache_hits <= beginning
    assert all(load.prefix_cache_hits in (0, None) for load in each.loads)
    assert abs(shared.seen.peak_gib - each.seen.peak_gib) < 0.3, "the cache saves time, not memory"


def test_lab_04_a_step_is_filled_with_what_answers_leave_and_a_threshold_limits_one_prompt_not_the_step(run_lab):
    found, _ = run_lab("04", repeats=1)
    logged, small, large, whole, limited, shared = found
    assert all(run.outcome == "ok" for run in found)
    assert all(load.latency.failed == 0 for run in found for load in run.loads)
    steps = logged.loads[0].steps
    assert steps.most_tokens == 256, "answers and prompts fill the step to the token"
    mixed = logged.loads[0].traffic
    long = mixed.long_prompts
    assert steps.left_out == 0, "every step of the load is in the record, so the tokens of every prompt are"
    assert sum(steps.context_tokens) == mixed.requests * mixed.input_tokens + long.requests * long.input_tokens
    assert max(steps.generation_tokens) > 1 and not whole.flags.resolved["enable_chunked_prefill"]
    assert small.loads[0].steps is None, "latency comes from runs that wrote no line a step"
    assert all(set(run.loads[0].latency.by_kind) == {"short", "long"} for run in (small, large, whole, limited))
    assert limited.flags.resolved["long_prefill_token_threshold"] == 256
    held = shared.loads[0].steps
    rows = zip(held.context_tokens, held.context_requests, held.generation_requests, strict=True)
    assert all(tokens <= 256 * prompts for tokens, prompts, answers in rows if prompts + answers > 1)
    assert 256 < held.most_context_tokens <= 2048, "one prompt is limited, the step is not"


def test_lab_05_a_sweep_leaves_out_what_cannot_start_and_its_recommendation_is_run_on_another_server(run_lab):
    limits = {"ttft_p99_ms": 600_000, "itl_p99_ms": 600_000}
    found, text = run_lab("05", steps=[512, 1024], kinds=["mixed"], **limits)
    short, long, again = found
    assert all(run.outcome == "ok" for run in found), "what could not start was never tried"
    assert all(load.latency.failed == 0 for run in found for load in run.loads)
    assert "must be at least max_num_seqs (32)" in text and "GiB short" in text
    assert [run.flags.given["max_num_batched_tokens"] for run in (short, long)] == [512, 1024]
    assert again.repeat == 2 and again.flags.given in (short.flags.given, long.flags.given)
    assert text.count("begins: ") == 2, "the exercise asks for a setting that was run already"
    assert "onfirmed" in text
    sent = [[load.latency.input_tokens for load in run.loads] for run in found]
    assert sent[0] == sent[1] == sent[2], "loads in the same place are of the same requests"
    assert len(set(sent[0])) == len(sent[0]) == 3


def test_lab_07_each_patient_has_what_it_has_and_is_cured(run_lab):
    found, text = run_lab("07")
    by_phase = {clinic.diagnosis(run) for run in found}
    assert by_phase == {"max_model_len_exceeds_kv", "host_ram_oom", "preemption_not_oom", "ok"}
    failed = [run for run in found if run.outcome != "ok"]
    assert all(run.finding["phase"] == clinic.diagnosis(run) for run in failed)
    assert "needs none" not in text and "not yet" in text, "the first sheet stands before the treatments"
    for patient in clinic.PATIENTS.values():
        if patient.on_cpu:
            treated = clinic.recorded(patient.treated(**patient.cures[0]), found)
            assert treated and patient.well(treated[0]), f"{patient.name} is not cured"
