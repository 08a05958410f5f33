"""Load of two kinds, and what the scheduler's steps held: the trace that is sent, and what comes back of it."""

import statistics
from dataclasses import replace

import pytest

import fixtures_record as fixtures
from memlab import lab, record, sweep, traffic, vllm_log
from memlab.errors import MemlabError, RecordError
from memlab.flags import ServeFlags
from memlab.record import Load, LongPrompts, Steps, Traffic

MIXED = Traffic(64, 3, requests=20, requests_per_s=4.0, long_prompts=LongPrompts(6000, 2, 4, every_s=2.0, at_once=2))


def result_of(sent: Traffic, first_s: float, gap_s: float, failed: int | None = None) -> dict:
    """What ``vllm bench serve --save-detailed`` gives for a load whose long prompts wait ten times as long."""
    kinds = traffic.kinds_of(sent)
    slower = [10 if kind == "long" else 1 for kind in kinds]
    lens = [0 if number == failed else written for number, (_, _, written) in enumerate(traffic.arrivals(sent))]
    return {
        "ttfts": [first_s * times for times in slower],
        "itls": [[gap_s * times] * max(0, written - 1) for times, written in zip(slower, lens, strict=True)],
        "input_lens": [read for _, read, _ in traffic.arrivals(sent)],
        "output_lens": lens,
        "completed": len(kinds),
        "duration": 10.0,
        "output_throughput": 1.0,
        "total_token_throughput": 1.0,
        "total_input_tokens": 1,
        "total_output_tokens": 1,
    }


def test_long_prompts_come_in_twos_at_fixed_times_among_short_ones():
    sent = traffic.arrivals(MIXED)
    assert [at for at, read, _ in sent if read == 6000] == [2.0, 2.0, 4.0, 4.0]
    assert [at for at, *_ in sent] == sorted(at for at, *_ in sent)
    assert len(sent) == 24
    gaps = [at for at, read, _ in traffic.arrivals(replace(MIXED, requests=4000)) if read == 64]
    assert gaps[-1] / 4000 == pytest.approx(1 / 4.0, rel=0.1), "four a second on average"


def test_each_load_of_a_run_has_arrivals_of_its_own_and_a_repeat_the_same():
    assert traffic.arrivals(MIXED, 1) == traffic.arrivals(MIXED, 1) != traffic.arrivals(MIXED, 2)


def test_without_a_rate_the_short_ones_are_there_from_the_beginning():
    sent = traffic.arrivals(replace(MIXED, requests_per_s=None))
    assert {at for at, read, _ in sent if read == 64} == {0.0}


def test_each_kind_has_its_own_latency():
    found = traffic.latency(result_of(MIXED, first_s=0.1, gap_s=0.02), traffic.kinds_of(MIXED))
    short, long = found.by_kind["short"], found.by_kind["long"]
    assert (short.completed, long.completed) == (20, 4)
    assert (short.ttft_ms["p50"], long.ttft_ms["p50"]) == (100.0, 1000.0)
    assert (short.itl_ms["p99"], long.itl_ms["p99"]) == (20.0, 200.0)
    assert long.input_tokens == 4 * 6000
    assert len(found.ttft_samples_ms) == short.completed + long.completed
    assert set(long.longest_itl_samples_ms) == {200.0}


def test_a_request_without_an_answer_is_a_failure_of_its_kind_and_no_short_wait():
    number = traffic.kinds_of(MIXED).index("long")
    found = traffic.latency(result_of(MIXED, 0.1, 0.02, failed=number), traffic.kinds_of(MIXED))
    assert (found.by_kind["long"].completed, found.by_kind["long"].failed) == (3, 1)
    assert min(found.by_kind["long"].ttft_samples_ms) == 1000.0


def test_percentiles_are_those_of_vllm():
    """numpy's linear interpolation (vllm/benchmarks/serve.py)."""
    times = [float(number) for number in range(1, 102)]
    found = traffic.latency({**result_of(MIXED, 0.1, 0.02)}, traffic.kinds_of(MIXED)).by_kind["short"]
    assert statistics.quantiles(times, n=100, method="inclusive")[98] == pytest.approx(100.0)
    assert found.ttft_ms["p99"] == 100.0


def test_a_load_of_two_kinds_has_fixed_lengths():
    with pytest.raises(ValueError, match="two fixed lengths"):
        replace(MIXED, range_ratio=0.5)


def test_a_grid_can_ask_for_a_load_of_two_kinds():
    entry = {"model": "tiny-llama", "traffic": [{"input_tokens": 64, "output_tokens": 3, "requests": 20,
             "requests_per_s": 4.0, "long_prompts": {"input_tokens": 6000, "output_tokens": 2, "requests": 4,
             "every_s": 2.0, "at_once": 2}}]}  # fmt: skip
    assert sweep.from_dict(entry).traffic == [MIXED]


def test_a_recorded_run_keeps_its_id_though_a_load_can_be_of_two_kinds():
    several = [found for found in record.read_all() if found.loads]
    assert several
    for found in several:
        asked = (found.model.name, found.served_flags, found.sent, found.card, found.repeat, found.neighbour)
        assert record.make_id(found.machine, found.engine, *asked) == found.id


# ---- the steps ----

LINE = (
    "(APIServer pid=7) INFO 12-02 20:47:31 [loggers.py:196] Engine 000: Iteration({0}): {1} context requests, "
    "{2} context tokens, {3} generation requests, {4} generation tokens, iteration elapsed time: {5:.2f} ms, "
    "CPU KV cache usage: 0.3%"
)


def events(*steps):
    parser = vllm_log.LogParser()
    found = [event for number, step in enumerate(steps) for event in parser.feed(LINE.format(number, *step) + "\n")]
    return found + parser.close()


def test_the_steps_are_read_from_vllms_own_line():
    steps = lab.scheduled(events((1, 64, 0, 0, 12.5), (2, 2040, 8, 8, 3435.64), (0, 0, 9, 9, 7.0)))
    assert steps == Steps([1, 2, 0], [64, 2040, 0], [0, 8, 9], [0, 8, 9], [12.5, 3435.64, 7.0])
    assert (steps.tokens, steps.most_tokens, steps.most_context_tokens) == ([64, 2048, 9], 2048, 2040)


def test_an_empty_step_of_a_data_parallel_engine_counts_for_none():
    assert lab.scheduled(events((0, 0, 0, 0, 1.0))) is None


def test_a_long_series_of_steps_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(lab, "MOST_STEPS", 2)
    steps = lab.scheduled(events(*[(0, 0, 4, 4, 5.0)] * 5))
    assert (len(steps.tokens), steps.left_out) == (2, 3)


def with_steps(**changes) -> record.RunRecord:
    steps = replace(Steps([1, 0], [64, 0], [0, 1], [0, 1], [12.5, 7.0]), **changes)
    load = Load(MIXED, 26.0, 30.0, [1.0], fixtures.cuda_record().latency, steps=steps)
    return replace(fixtures.cuda_record(), traffic=None, latency=None, loads=[load])


def test_steps_and_both_kinds_survive_the_file(tmp_path):
    made = with_steps()
    kinds = traffic.latency(result_of(MIXED, 0.1, 0.02), traffic.kinds_of(MIXED))
    made = replace(made, loads=[replace(made.loads[0], latency=kinds)])
    assert record.read(record.write(made, tmp_path)) == made


def test_steps_whose_lists_differ_in_length_are_refused():
    with pytest.raises(RecordError, match="load 0: the lists of its steps"):
        record.validate(with_steps(elapsed_ms=[12.5]))


def test_the_steps_are_asked_for_on_the_cpu_too_and_the_allocator_is_not(monkeypatch):
    monkeypatch.setattr(lab, "backend", lambda: "cpu")
    with pytest.raises(MemlabError, match="leave allocator and snapshot out"):
        lab.run("tiny-llama", ServeFlags(), [MIXED], mode="live", instruments=("steps", "allocator"))


# ---- where a lab replays ----


def test_a_lab_without_runs_on_the_default_machine_replays_those_that_it_has(monkeypatch):
    monkeypatch.setenv("MEMLAB_MODE", "replay")
    cuda, cpu = fixtures.cuda_record(), replace(fixtures.cpu_record(), lab="04-chunked-prefill")
    cuda = replace(cuda, machine=replace(cuda.machine, name=lab.DEFAULT_MACHINE))
    monkeypatch.setattr(record, "read_all", lambda: [cpu, cuda])
    assert lab.here().machine == cuda.machine
    shown = lab.here(of="04-chunked-prefill")
    assert (shown.machine, shown.backend, shown.replayed) == (cpu.machine, "cpu", True)
    both = replace(cuda, lab="04-chunked-prefill")
    monkeypatch.setattr(record, "read_all", lambda: [cpu, both])
    assert lab.here(of="04-chunked-prefill").machine == cuda.machine
