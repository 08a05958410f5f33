"""A recommendation: only what meets the goal, ties called ties, and judged again on another server."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fixtures_record as fixtures
from memlab import recommend, record, token_plots
from memlab.errors import MemlabError
from memlab.recommend import Goal
from memlab.record import Flags, Load, Traffic

MIXED = Traffic(4000, 100, 4, 16, range_ratio=0.9)
GOAL = Goal(ttft_p99_ms=1000, itl_p99_ms=50)


def served(tokens: int, speeds, ttft=500.0, itl=30.0, traffic=MIXED, **changes):
    """One server with a load for each of ``speeds``, in output tokens a second."""
    base = fixtures.cuda_record(f"synthetic-{tokens}")
    given_ = {**base.flags.given, "max_num_batched_tokens": tokens}
    loads = []
    for number, speed in enumerate(speeds):
        latency = replace(
            base.latency,
            ttft_ms={**base.latency.ttft_ms, "p99": ttft},
            itl_ms={**base.latency.itl_ms, "p99": itl},
            output_tokens_per_s=float(speed),
            completed=4,
            ttft_samples_ms=[100.0, 200.0, 300.0, 1400.0],
            tpot_samples_ms=[10.0] * 4,
            output_samples_tokens=[64] * 4,
        )
        loads.append(Load(traffic, 26.0 + 4 * number, 29.0 + 4 * number, [28.0], latency))
    flags = Flags(given_, {**base.flags.resolved, **given_})
    return replace(base, flags=flags, traffic=None, latency=None, loads=loads, **changes)


def test_the_fastest_that_meets_the_goal_is_recommended_with_its_lead():
    slow, fast, over = (
        served(512, [800, 805, 795]),
        served(2048, [900, 905, 895]),
        served(8192, [999, 990, 995], itl=80),
    )
    advice = recommend.recommend([slow, fast, over], GOAL)
    assert advice.pick.run is fast and advice.next_best.run is slow and advice.ties == ()
    assert advice.pick.above(advice.next_best).mean == pytest.approx(900 / 800 - 1, rel=0.01)
    assert {row[0].split()[-1]: row[1] for row in advice.table().rows}["8192"] == recommend.MISSES


def test_what_the_repeats_cannot_tell_apart_is_called_a_tie():
    advice = recommend.recommend([served(512, [900, 950, 850]), served(2048, [960, 860, 910])], GOAL)
    assert [tie.run.flags.given["max_num_batched_tokens"] for tie in advice.ties] == [512]
    assert advice.next_best is None
    assert "Tied with it: max_num_batched_tokens 512" in str(advice)


def test_a_lead_that_two_starts_of_one_setting_could_have_is_a_tie():
    advice = recommend.recommend([served(512, [900, 905, 895]), served(2048, [918, 923, 913])], GOAL)
    assert advice.next_best is None and len(advice.ties) == 1


@given(st.lists(st.tuples(st.floats(500, 1500), st.floats(200, 2000), st.floats(5, 100)), min_size=1, max_size=5))
def test_no_setting_that_misses_the_goal_is_ever_recommended(measured):
    runs = [
        served(256 << number, [speed, 1.01 * speed, 0.99 * speed], ttft, itl)
        for number, (speed, ttft, itl) in enumerate(measured)
    ]
    advice = recommend.recommend(runs, GOAL)
    meet = [speed for speed, ttft, itl in measured if ttft <= 1000 and itl <= 50]
    assert (advice.pick is None) == (not meet)
    if meet:
        assert advice.pick.throughput == pytest.approx(max(meet))


def test_one_load_that_misses_the_goal_is_enough_to_pass_a_setting_over():
    run = served(2048, [900, 905, 895])
    late = replace(run.loads[2].latency, ttft_ms={**run.loads[2].latency.ttft_ms, "p99": 1001.0})
    run = replace(run, loads=[*run.loads[:2], replace(run.loads[2], latency=late)])
    advice = recommend.recommend([run], GOAL)
    assert advice.pick is None and advice.candidates[0].standing == recommend.SOMETIMES
    assert "1.00 times a limit" in str(advice)


def test_two_loads_are_too_few_and_a_server_that_died_is_no_candidate():
    few, dead = served(512, [900, 905]), served(2048, [900, 905, 895], outcome="out_of_memory")
    advice = recommend.recommend([few, dead], GOAL)
    assert advice.pick is None
    assert [each.standing for each in advice.candidates] == [recommend.TOO_FEW, recommend.FAILED]


def test_two_kinds_of_traffic_need_a_choice():
    run = served(512, [900, 905, 895])
    run = replace(run, loads=[*run.loads, *served(512, [1, 2, 3], traffic=Traffic(300, 50, 4)).loads])
    with pytest.raises(MemlabError, match="say which traffic"):
        recommend.recommend([run], GOAL)
    assert recommend.recommend([run], GOAL, MIXED).pick is not None


def test_another_server_confirms_or_does_not():
    advice = recommend.recommend([served(512, [800, 805, 795]), served(2048, [900, 905, 895])], GOAL)
    assert recommend.judge(advice, served(2048, [898, 904, 893])).confirmed
    assert recommend.judge(advice, served(2048, [880, 885, 875])).confirmed, "as two starts of one setting differ"
    slower = recommend.judge(advice, served(2048, [700, 705, 695]))
    assert not slower.confirmed and "slower this time" in str(slower)
    assert "misses it this time" in str(recommend.judge(advice, served(2048, [900, 905, 895], itl=60)))
    assert not recommend.judge(advice, served(2048, [900, 905, 895], outcome="died")).confirmed


# ---- the figures ----


def test_the_dial_shows_memory_alone_where_no_load_was_repeated_often_enough():
    plot = token_plots.dial(served(512, [900, 905]), served(2048, [910, 915]))
    assert plot.table.header == ("tokens in a step", "activation", "KV cache")
    assert "Not shown: p99 TTFT, p99 ITL, throughput (no load was sent 3 times to two of the servers)." in plot.alt


def test_the_dial_shows_five_effects_of_repeated_loads():
    plot = token_plots.dial(served(512, [900, 905, 895]), served(2048, [910, 915, 905]))
    assert plot.table.header[1:] == ("activation", "KV cache", "p99 TTFT", "p99 ITL", "throughput")
    assert plot.table.rows[0][0] == "512 tokens"
    assert plot.title == "One dial, five effects" and "Not shown" not in plot.alt
    assert plot.svg() and plot.caption.endswith("16 at a time")


def test_loads_that_differ_among_themselves_do_not_hide_what_the_dial_does_to_each():
    shorter, longer = served(512, [200, 300, 400]), served(2048, [220, 330, 440])
    assert token_plots.dial(shorter, longer).table.rows[1][-1] == "330 tokens/s, +10.0 % (+10.0 to +10.0 %)"
    longest = served(8192, [800, 1200, 1600])
    assert token_plots.dial(shorter, longest).table.rows[1][-1] == "1,200 tokens/s, 4.0 times (4.0 to 4.0)"


def test_starts_of_one_setting_count_as_one_in_a_change():
    again = served(2048, [210, 310, 430], repeat=2)
    plot = token_plots.dial(served(512, [200, 300, 400]), served(2048, [230, 350, 450]), again)
    first = token_plots.dial(served(512, [200, 300, 400]), served(2048, [220, 330, 440]))
    assert plot.table.rows[1][-1] == first.table.rows[1][-1]


def test_of_recorded_cpu_runs_the_dial_shows_what_there_is_and_says_what_the_backend_lacks():
    runs = [run for run in record.read_all() if run.machine.name == "cpu" and run.lab == "05-batched-tokens"]
    plot = token_plots.dial(*runs)
    assert plot.table.header[1:] == ("p99 TTFT", "p99 ITL", "throughput")
    assert plot.title == "One dial, 3 of its 5 effects"
    for missing in ("activation (the CPU backend sets none aside)", "KV cache (its size was given in bytes"):
        assert missing in plot.alt and missing in plot.svg()


def test_goodput_by_setting_counts_what_met_the_limits():
    runs = [served(512, [900, 905, 895]), served(2048, [910, 915, 905])]
    plot = token_plots.good(*runs, ttft_ms=1000, tpot_ms=50)
    assert [row[-1] for row in plot.table.rows] == ["75%", "75%"], "one of four took 1400 ms"
    assert [row[-1] for row in token_plots.good(*runs, ttft_ms=1400).table.rows] == ["100%", "100%"]
    assert plot.svg()


def test_a_change_within_its_noise_is_not_called_visible():
    base, little, much = served(2048, [900, 930, 870]), served(2150, [880, 910, 940]), served(4096, [1200, 1230, 1170])
    plot = token_plots.changes(base, little, much)
    speed = [row for row in plot.table.rows if row[1] == "output tokens/s"]
    assert [row[3] for row in speed] == ["no", "yes"]
    assert plot.svg()


def test_the_same_setting_started_again_is_set_beside_the_changes():
    base = served(2048, [900, 930, 870])
    again, other = served(2048, [927, 957, 897], repeat=2), served(2150, [900, 930, 870])
    plot = token_plots.changes(base, again, other, only="mixed")
    speed = [row for row in plot.table.rows if row[1] == "output tokens/s"]
    assert [row[0] for row in speed] == ["max_num_batched_tokens 2048 again", "max_num_batched_tokens 2150"]
    assert [row[3] for row in speed] == ["yes", "no"], "two servers differ by more than two loads of one"
    with pytest.raises(ValueError, match="this figure needs"):
        token_plots.changes(base, again, only="chat")


@pytest.mark.parametrize("figure", ["dial", "good", "changes"])
def test_one_run_alone_gives_no_figure(figure):
    with pytest.raises(ValueError, match="this figure needs"):
        getattr(token_plots, figure)(served(2048, [900, 905, 895]))
