"""Figures of the schedule: what a step held, and what short and long requests noticed of it."""

from dataclasses import replace

import pytest

import fixtures_record as fixtures
from memlab import schedule_plots, traffic_plots
from memlab.record import Load, LongPrompts, Steps, Traffic

MIXED = Traffic(64, 48, 20, requests_per_s=2.5, long_prompts=LongPrompts(1200, 4, 4, every_s=3.0, at_once=2))
STEPS = Steps(
    context_requests=[1, *[0] * 9, 2, 1, 0, 0],
    context_tokens=[64, *[0] * 9, 2040, 424, 0, 0],
    generation_requests=[0, *[8] * 13],
    generation_tokens=[0, *[8] * 13],
    elapsed_ms=[30.0, *[7.0] * 9, 900.0, 240.0, 7.0, 7.0],
)


def latency(ttft_ms: float, pause_ms: float):
    base = fixtures.cuda_record().latency
    return replace(
        base,
        itl_ms={"mean": 9.0, "p50": 8.0, "p90": 9.0, "p99": pause_ms},
        ttft_samples_ms=[ttft_ms, 2 * ttft_ms],
        itl_quantiles_ms=[8.0] * 99 + [pause_ms, pause_ms],
        longest_itl_samples_ms=[pause_ms, pause_ms / 2],
    )


def served(pause_ms: float = 900.0, loads: int = 3, steps: Steps | None = None, **resolved):
    """A run of loads of two kinds, whose pauses differ by 1 % from load to load."""
    base = fixtures.cuda_record()
    found = []
    for number in range(loads):
        kinds = {"short": latency(40.0, pause_ms * (1 + 0.01 * number)), "long": latency(400.0, 20.0)}
        both = replace(base.latency, by_kind=kinds)
        found.append(Load(MIXED, 26.0 + 4 * number, 29.0 + 4 * number, [32.0], both, steps=steps))
    flags = replace(base.flags, given={**base.flags.given, **resolved}, resolved={**base.flags.resolved, **resolved})
    return replace(base, traffic=None, latency=None, loads=found, flags=flags)


def test_the_schedule_shows_answers_and_prompts_of_each_step_around_the_first_long_prompt():
    plot = schedule_plots.schedule(served(steps=STEPS))
    rows = {row[0]: row[1:] for row in plot.table.rows}
    assert min(map(int, rows)) == 11 - schedule_plots.BEFORE, "the prompt of 64 tokens at the beginning is not it"
    assert rows["11"] == ("2,040", "2", "8", "2,048", "900 ms")
    assert "The fullest holds 2,048 of at most 2,048 tokens" in plot.alt


def test_a_setting_is_named_by_what_it_does_to_a_step():
    def name(**resolved):
        return schedule_plots.setting_name(served(**resolved))

    assert name() == "2,048 tokens a step"
    assert name(enable_chunked_prefill=False) == "2,048 tokens a step, chunking off"
    assert name(long_prefill_token_threshold=512) == "2,048 tokens a step, at most 512 of one prompt"
    assert name(long_prefill_token_threshold=0, enable_chunked_prefill=True) == "2,048 tokens a step"


def test_gaps_are_those_of_the_short_requests_with_an_interval_over_the_loads():
    (small, large) = schedule_plots.gaps(
        served(pause_ms=100.0, max_num_batched_tokens=256), served(pause_ms=900.0)
    ).table.rows
    assert small[:3] == ("256 tokens a step", "3", "8.0 (8.0 to 8.0) ms")
    assert small[3] == "101 (99 to 103) ms", "mean of 100, 101 and 102, and 95 % by Student's t"
    assert large[4] == "918 ms", "the longest of all"


def test_one_load_has_no_interval():
    row = schedule_plots.gaps(served(loads=1)).table.rows[0]
    assert row[1:4] == ("1", "8.0 ms", "900 ms")


def test_short_and_long_requests_have_their_first_tokens_apart():
    rows = {row[0]: row[1:] for row in schedule_plots.first_tokens(served()).table.rows}
    assert rows["2,048 tokens a step: short requests"] == ("6", "60 ms", "40 ms", "80 ms")
    assert rows["2,048 tokens a step: long requests"][1:] == ("600 ms", "400 ms", "800 ms")


def test_each_short_request_counts_with_its_own_longest_pause():
    rows = schedule_plots.pauses(served(loads=1), served(loads=1, max_num_batched_tokens=256, pause_ms=80.0)).table.rows
    assert [row[3:] for row in rows] == [("450 ms", "900 ms"), ("40 ms", "80 ms")]


@pytest.mark.parametrize("figure", ["schedule", "gaps", "pauses", "first_tokens"])
def test_a_figure_draws_itself_with_its_words(figure):
    runs = [served(steps=STEPS), served(steps=STEPS, enable_chunked_prefill=False)]
    plot = getattr(schedule_plots, figure)(*runs)
    assert "<svg" in plot.svg() and "chunking off" in plot.alt


@pytest.mark.parametrize("figure", ["schedule", "gaps", "pauses", "first_tokens"])
def test_a_run_without_what_a_figure_needs_says_so(figure):
    with pytest.raises(ValueError, match="needs"):
        getattr(schedule_plots, figure)(fixtures.cuda_record())


def test_a_load_of_two_kinds_is_named_by_both():
    assert traffic_plots.load_name(MIXED) == "20 × 64 and 4 × 1,200"
