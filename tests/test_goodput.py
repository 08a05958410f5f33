"""Repeats and goodput: intervals that cover what they should, and requests counted as vLLM counts them."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fixtures_record as fixtures
from memlab import goodput, repeats, traffic
from memlab.goodput import Limits
from memlab.record import Load, LongPrompts, Traffic

some = st.lists(st.floats(50, 200), min_size=2, max_size=8)


@given(some)
def test_an_interval_holds_its_mean(values):
    found = repeats.interval(values)
    assert found.low <= found.mean <= found.high


@given(some, some)
def test_a_change_and_the_way_back_end_where_they_began(before, after):
    there, back = repeats.change(before, after), repeats.change(after, before)
    assert (1 + there.mean) * (1 + back.mean) == pytest.approx(1)
    assert (1 + there.low) * (1 + back.high) == pytest.approx(1, rel=1e-4)
    assert there.has_zero == back.has_zero


@given(some, st.floats(0.01, 100))
def test_a_change_does_not_depend_on_the_unit(values, factor):
    first, second = values, [1.5 * value for value in reversed(values)]
    scaled = repeats.change([factor * value for value in first], [factor * value for value in second])
    assert scaled.mean == pytest.approx(repeats.change(first, second).mean)


@pytest.mark.parametrize("count", [3, 6])
def test_nineteen_of_twenty_intervals_of_a_normal_measurement_hold_the_truth(count):
    chance = random.Random(5)
    found = [repeats.interval([chance.gauss(100, 3) for _ in range(count)]) for _ in range(4000)]
    assert sum(each.low <= 100 <= each.high for each in found) / len(found) == pytest.approx(0.95, abs=0.012)


def test_two_settings_without_a_difference_are_seldom_told_apart():
    chance = random.Random(7)
    pairs = [[[chance.gauss(100, 3) for _ in range(3)] for _ in range(2)] for _ in range(4000)]
    told_apart = sum(not repeats.change(*pair).has_zero for pair in pairs) / len(pairs)
    assert told_apart < 0.06


def test_five_percent_show_above_one_percent_of_noise_and_not_above_five():
    assert not repeats.change([100, 101, 99], [105, 106, 104]).has_zero
    assert repeats.change([100, 105, 95], [105, 110, 100]).has_zero
    assert repeats.smallest_visible([100, 101, 99], [105, 106, 104]) < 0.05


def test_repeats_without_scatter_have_no_width():
    assert repeats.interval([0.81, 0.81, 0.81]).half_width == 0
    assert repeats.change([2.0, 2.0], [3.0, 3.0]).show_change() == "+50.0 % (+50.0 to +50.0 %)"


@given(some, st.floats(0.5, 2), st.lists(st.floats(0.1, 10), min_size=2, max_size=8))
def test_what_differs_from_pair_to_pair_is_no_noise_of_a_change(values, factor, loads):
    before = [value * load for value, load in zip(values, loads, strict=False)]
    found = repeats.paired_change(before, [factor * value for value in before])
    assert found.mean == pytest.approx(factor - 1, abs=1e-9)
    assert found.half_width == pytest.approx(0, abs=1e-6)


def test_pairs_show_a_change_that_loads_of_different_lengths_would_hide():
    before, after = [39.0, 29.5, 32.3], [41.0, 31.0, 33.9]
    assert repeats.change(before, after).has_zero
    assert not repeats.paired_change(before, after).has_zero
    with pytest.raises(ValueError, match="no pairs"):
        repeats.paired_change(before, after[:2])


def test_one_value_gives_no_interval():
    with pytest.raises(ValueError, match="repeat the load"):
        repeats.interval([1.0])
    with pytest.raises(ValueError, match="repeat the load"):
        repeats.change([1.0, 2.0], [1.0])


# ---- goodput ----


def latency(requests: list[tuple[float, float, int]], seconds: float = 2.0, failed: int = 0):
    """Of requests given as (TTFT ms, TPOT ms, output tokens)."""
    base = fixtures.cuda_record().latency
    ttft, tpot, tokens = map(list, zip(*requests, strict=True)) if requests else ([], [], [])
    return replace(
        base,
        completed=len(requests),
        failed=failed,
        duration_s=seconds,
        ttft_samples_ms=ttft,
        tpot_samples_ms=tpot,
        output_samples_tokens=tokens,
    )


def test_a_request_is_good_if_it_meets_both_limits():
    sent = latency([(100, 10, 50), (100, 60, 50), (2000, 10, 50), (1000, 50, 30)], seconds=2.0, failed=1)
    found = goodput.of(sent, Limits(ttft_ms=1000, tpot_ms=50))
    assert (found.good, found.sent) == (2, 5)
    assert (found.requests_per_s, found.output_tokens_per_s) == (1.0, 40.0)


@given(
    st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 200), st.integers(1, 500)), max_size=30),
    st.floats(1, 5000),
    st.floats(1, 200),
    st.floats(1, 3),
)
def test_looser_limits_never_lose_a_request(requests, ttft, tpot, looser):
    tight = goodput.of(latency(requests), Limits(ttft, tpot))
    loose = goodput.of(latency(requests), Limits(ttft * looser, tpot * looser))
    assert tight.good <= loose.good <= len(requests)
    assert tight.output_tokens_per_s <= loose.output_tokens_per_s


def test_a_record_without_every_sample_has_no_goodput():
    with pytest.raises(ValueError, match="record the load again"):
        goodput.of(replace(latency([(1, 1, 1)]), completed=501), Limits())


def test_goodput_counts_as_vllms_own_load_generator_does():
    serve = pytest.importorskip("vllm.benchmarks.serve")
    function = pytest.importorskip("vllm.benchmarks.lib.endpoint_request_func")
    chance, outputs = random.Random(3), []
    for number in range(40):
        tokens = chance.choice([1, 2, 5, 30])
        itl = [chance.uniform(0.005, 0.09) for _ in range(tokens - 1)]
        made = function.RequestFuncOutput(success=number % 9 != 0, prompt_len=20, output_tokens=tokens)
        made.ttft, made.itl = chance.uniform(0.05, 2), itl
        made.latency = made.ttft + sum(itl)
        made.start_time = 0.0
        outputs.append(made)
    limits = Limits(ttft_ms=1200, tpot_ms=48)
    asked = {"ttft": limits.ttft_ms, "tpot": limits.tpot_ms}
    theirs, lengths = serve.calculate_metrics([], outputs, 4.0, None, [50.0], asked)
    result = {
        "duration": 4.0,
        "completed": theirs.completed,
        "failed": theirs.failed,
        "output_throughput": theirs.output_throughput,
        "total_token_throughput": theirs.total_token_throughput,
        "total_input_tokens": theirs.total_input,
        "total_output_tokens": theirs.total_output,
        "output_lens": lengths,
        "ttfts": [output.ttft for output in outputs],
        "itls": [output.itl for output in outputs],
    }
    ours = goodput.of(traffic.latency(result), limits)
    assert 0 < ours.good < theirs.completed
    assert ours.requests_per_s == pytest.approx(theirs.request_goodput)
    assert ours.sent == len(outputs)


# ---- loads that belong together ----


def test_loads_sent_once_are_no_repeats():
    base = fixtures.cuda_record()
    warm, chat = Traffic(64, 4, 2), Traffic(300, 100, 10, requests_per_s=5.0)
    loads = [Load(each, 0.0, 1.0, [28.0], base.latency) for each in (warm, chat, chat, chat)]
    found = goodput.repeats_of([replace(base, traffic=None, latency=None, loads=loads)])
    assert {traffic: len(each) for traffic, each in found.items()} == {chat: 3}


def test_each_kind_of_traffic_goes_by_how_it_comes():
    assert goodput.kind(Traffic(300, 100, 10, requests_per_s=5.0)) == "chat"
    assert goodput.kind(Traffic(300, 100, 10)) == "batch"
    assert goodput.kind(Traffic(4000, 100, 10, 16, range_ratio=0.9)) == "mixed"
    documents = LongPrompts(8000, 8, 2, every_s=2.0, at_once=1)
    assert goodput.kind(Traffic(300, 100, 10, requests_per_s=5.0, long_prompts=documents)) == "mixed"
    assert Traffic(4000, 100, 10, 16, range_ratio=0.9).in_words() == (
        "10 requests of 4,000 + 100 tokens ± 90%, 16 at a time"
    )
