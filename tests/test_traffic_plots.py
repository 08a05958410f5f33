"""Figures of traffic: what a load took, what is slack and what is not, what a full pool looks like."""

import math
from dataclasses import replace

import pytest

import fixtures_record as fixtures
from memlab import record, traffic_plots
from memlab.record import Allocator, Load, Series, Trace, Traffic

LENGTHS = (500, 8000)


def served(peaks=(27.9, 28.4), waits=((10.0, 12.0, 11.0), (200.0, 220.0, 210.0)), **changes):
    """A run of one load for each of ``LENGTHS``, one request at a time."""
    base = fixtures.cuda_record(**changes)
    loads = []
    for number, (tokens, peak, ttft) in enumerate(zip(LENGTHS, peaks, waits, strict=True)):
        latency = replace(base.latency, ttft_samples_ms=list(ttft), itl_quantiles_ms=[8.7] * 101)
        start = 26.0 + 4 * number
        loads.append(Load(Traffic(tokens, 16, 3, 1), start, start + 3, [peak], latency, 0))
    return replace(base, traffic=None, latency=None, loads=loads)


def read(load: Load, allocated: float, step: float, slack: float) -> Load:
    peak = allocated + step
    return replace(load, allocator=[Allocator(allocated, peak + slack, peak, peak + slack, slack)])


def test_a_load_is_shown_by_what_it_took_beyond_the_state_when_ready():
    found = served(peak_gib=28.4)
    ready = traffic_plots.when_ready_gib(found)
    assert ready == pytest.approx(27.8), "the last sample before the first load"
    rows = {row[0]: row for row in traffic_plots.by_load(found).table.rows}
    assert rows["500"][1:3] == ("27.90 GiB", "+0.10 GiB")
    assert rows["8,000"][1:] == ("28.40 GiB", "+0.60 GiB", "210 ms", "200 ms to 220 ms")


def test_repeats_of_a_setting_are_one_line_with_the_span_of_their_values():
    first, again = served(peak_gib=28.4), served(peaks=(27.9, 28.6), peak_gib=28.4, id="synthetic-again", repeat=2)
    other = served(peak_gib=28.4, id="synthetic-other")
    other = replace(other, flags=replace(other.flags, given={**other.flags.given, "max_num_batched_tokens": 512}))
    rows = traffic_plots.by_load(first, again, other).table.rows
    assert len(rows) == 2 * len(LENGTHS)
    assert {row[0].count("512") for row in rows} == {0, 1}
    long = next(row for row in rows if row[0].endswith("8,000") and "512" not in row[0])
    assert " to " in long[1], "the two starts differ, and the table shows it"


def test_a_load_that_a_server_could_not_take_is_a_gap_in_its_line():
    both = served(peak_gib=28.4)
    third = replace(both.loads[1], traffic=Traffic(16000, 16, 3, 1), start_s=40.0, end_s=43.0)
    both = replace(both, loads=[*both.loads, third])
    fewer = replace(both, id="synthetic-fewer", loads=[both.loads[0], third])
    fewer = replace(fewer, flags=replace(fewer.flags, given={**fewer.flags.given, "max_num_batched_tokens": 512}))
    upper = traffic_plots.by_load(both, fewer).draw("black").axes[0]
    lines = [line for line in upper.lines if len(line.get_xdata()) == 3]
    assert [[math.isnan(y) for y in line.get_ydata()] for line in lines] == [[False] * 3, [False, True, False]]


def test_the_allocators_parts_add_up_to_what_the_driver_saw():
    found = served(peak_gib=28.4)
    found = replace(found, loads=[read(load, 26.0, 0.8, 0.5) for load in found.loads])
    (_, _, step, slack, outside, seen), *_ = traffic_plots.allocator(found).table.rows
    assert (step, slack, seen) == ("0.80 GiB", "0.50 GiB", "27.90 GiB")
    assert outside == "0.60 GiB", "27.9 less the 27.3 that PyTorch reserved"


def test_decode_is_compared_with_prefill_of_one_request_at_a_time_only():
    found = served(peak_gib=28.4)
    together = replace(found.loads[1], traffic=Traffic(8000, 16, 16), start_s=40.0, end_s=44.0)
    found = replace(found, loads=[*found.loads, together])
    rows = {row[0]: row[1:] for row in traffic_plots.speeds(found).table.rows}
    assert set(rows) == {"500", "8,000"}
    assert rows["8,000"] == ("36,364 tokens/s to 40,000 tokens/s", "110 tokens/s"), "9.1 ms each on average"


def test_a_pool_that_is_full_counts_its_preemptions_and_its_flat_memory():
    series = Series([26.0, 30.0, 36.0], [0.0, 1.0, 1.0], [0, 12, 9], [0, 28, 31], [0, 0, 7])
    facts = dict(traffic_plots.pool(replace(served(peak_gib=28.4), series=series)).table.rows)
    assert facts["KV cache used, at most"] == "100.0%"
    assert facts["preemptions"] == "7"
    assert facts["device memory, least to most"] == "28.40 GiB"


def test_a_history_shows_how_far_one_step_rises():
    found = served(peak_gib=28.4)
    trace = Trace([0.0, 1.0, 2.0], [26.0, 26.8, 26.0])
    found = replace(found, loads=[replace(found.loads[0], trace=trace), found.loads[1]])
    assert traffic_plots.trace(found).table.rows == (("500", "26.00 GiB", "26.80 GiB", "0.80 GiB", "2.0 ms"),)


def test_what_the_prefix_cache_gave_stands_beside_the_waits():
    found = served(peak_gib=28.4)
    hits = [replace(load, prefix_cache_queries=1000, prefix_cache_hits=800) for load in found.loads]
    assert traffic_plots.waits(replace(found, loads=hits)).table.rows[0][-1] == "80% of the tokens"
    assert traffic_plots.waits(found).table.rows[0][-1] == "not looked up"


def test_the_tokens_of_a_pool_follow_from_the_bytes_of_a_token():
    rows = traffic_plots.pool_table(fixtures.cuda_record()).rows
    assert rows[0][3] == "132,710 tokens", "16.2 GiB over 128 KiB"


def test_a_pool_that_was_given_is_not_rounded_as_the_log_rounds_it():
    base = fixtures.cpu_record()
    flags = replace(base.flags, resolved={**base.flags.resolved, "kv_cache_memory_bytes": 16 << 20})
    small = replace(base.ranks[0], stated=replace(base.stated, kv_cache_gib=0.02))
    rows = traffic_plots.pool_table(replace(base, flags=flags, ranks=[small])).rows
    assert rows[0][1:4:2] == ("16 MiB", "8,192 tokens")


@pytest.mark.parametrize("figure", ["by_load", "speeds", "allocator", "trace", "pool", "waits", "throughput"])
def test_a_run_without_what_a_figure_needs_says_so(figure):
    with pytest.raises(ValueError, match="needs"):
        getattr(traffic_plots, figure)(fixtures.cuda_record())


def test_two_loads_of_a_recorded_run_never_go_by_one_name():
    for run in record.read_all():
        sent = {load.traffic for load in run.loads}
        assert len({traffic_plots.load_name(traffic) for traffic in sent}) == len(sent), run.id
