"""The panel that recommends a setting for two limits, over the recorded runs of lab 5: what each control does, what it
makes of bad input, and that nothing of an error is hidden."""

import functools
import html
import json
from dataclasses import replace

import pytest
from traitlets import TraitError

import fixtures_record as fixtures
from memlab import recommend, record
from memlab.errors import MemlabError
from memlab.goodput import kind, repeats_of
from memlab.widgets import GoalPanel

DIAL = "max_num_batched_tokens"
AMPLE = 3_600_000.0


@functools.cache
def first_starts() -> dict[int, record.RunRecord]:
    runs = (run for run in record.read_all() if run.lab == "05-batched-tokens" and run.machine.name == "cpu")
    return {run.flags.resolved[DIAL]: run for run in runs if run.repeat == 1}


def recorded(*steps: int) -> list[record.RunRecord]:
    return [first_starts()[tokens] for tokens in steps]


def make(ttft: float = AMPLE, itl: float = AMPLE, runs: list | None = None) -> GoalPanel:
    runs = recorded(256, 1024, 4096) if runs is None else runs
    mixed = next(traffic for traffic in repeats_of(recorded(256)) if kind(traffic) == "mixed")
    return GoalPanel(runs, mixed, ttft_p99_ms=ttft, itl_p99_ms=itl)


def meeting(panel: GoalPanel) -> set[int]:
    good = (each for each in panel.advice.candidates if each.standing == recommend.MEETS)
    return {each.run.flags.resolved[DIAL] for each in good}


def test_limits_that_all_meet_are_met_by_all_and_the_tie_is_said():
    panel = make()
    assert meeting(panel) == {256, 1024, 4096}
    assert "Recommended" in panel.said.value and "Tied with it" in panel.said.value


def test_the_inter_token_limit_keeps_the_long_steps_out():
    panel = make()
    panel.itl.value = 800
    assert panel.goal.itl_p99_ms == 800 and meeting(panel) == {256}
    assert f"Recommended: {DIAL} 256" in panel.said.value
    assert panel.shown.value.count(recommend.MISSES) == 2


def test_the_limit_of_the_first_token_below_the_queue_leaves_nothing_and_names_the_nearest():
    panel = make()
    panel.ttft.value = 1000
    assert panel.goal.ttft_p99_ms == 1000 and panel.advice.pick is None
    assert "No setting meets the goal" in panel.said.value and "The nearest is" in panel.said.value
    assert "the pick" not in panel.shown.value.split("</thead>")[1]


def test_a_limit_given_back_brings_the_same_recommendation_back():
    panel = make()
    before = panel.said.value, panel.shown.value
    panel.itl.value = 800
    assert (panel.said.value, panel.shown.value) != before
    panel.itl.value = AMPLE
    assert (panel.said.value, panel.shown.value) == before


@pytest.mark.parametrize(("typed", "taken"), [(0, 1), (-250, 1), (1e12, AMPLE)])
def test_a_limit_that_no_server_could_have_becomes_the_nearest_that_one_could(typed, taken):
    panel = make()
    panel.itl.value = typed
    assert panel.itl.value == panel.goal.itl_p99_ms == taken


@pytest.mark.parametrize("typed", ["soon", None, [800]])
def test_what_is_no_number_is_refused_and_leaves_the_goal(typed):
    panel = make(itl=800)
    said = panel.said.value
    with pytest.raises(TraitError):
        panel.itl.value = typed
    assert panel.goal.itl_p99_ms == 800 and panel.said.value == said


@pytest.mark.parametrize("control", ["ttft", "itl"])
def test_an_error_of_ours_is_shown_raised_and_over_with_the_next_change(monkeypatch, control):
    panel = make()

    def fail(*_):
        raise ZeroDivisionError("<b>division</b> by zero")

    with monkeypatch.context() as broken:
        broken.setattr(recommend, "recommend", fail)
        with pytest.raises(ZeroDivisionError):
            getattr(panel, control).value = 2000
    assert "This should not happen" in panel.said.value and 'role="alert"' in panel.said.value
    assert html.escape("<b>division</b> by zero") in panel.said.value and "<b>division" not in panel.said.value
    assert panel.shown.value == "", "the table was of other limits"
    getattr(panel, control).value = AMPLE
    assert "Recommended" in panel.said.value and panel.shown.value


def test_without_runs_there_is_a_word_of_what_to_do():
    with pytest.raises(MemlabError, match="run the sweep first"):
        make(runs=[])


def test_a_load_that_the_runs_never_had_recommends_nothing():
    runs = [replace(run, loads=run.loads[:2]) for run in recorded(256, 1024)]
    panel = make(runs=runs)
    assert panel.advice.pick is None and "Nothing to recommend" in panel.said.value


def test_each_control_says_what_it_is_and_changes_are_read_out():
    panel = make()
    for field, name in ((panel.ttft, "TTFT"), (panel.itl, "ITL")):
        assert name in field.description and "ms" in field.description
        assert "99th percentile" in field.tooltip and "milliseconds" in field.tooltip
    assert "memlab-live" in panel.said._dom_classes


def test_nothing_of_a_record_reaches_the_page_unescaped(monkeypatch):
    (run,) = recorded(256)
    panel = make(runs=[replace(run, model=replace(run.model, name=fixtures.HOSTILE))])
    shown = panel.said.value + panel.shown.value
    assert html.escape(fixtures.HOSTILE) in shown and fixtures.HOSTILE not in shown
    monkeypatch.setenv("MEMLAB_BOOK", "1")
    assert fixtures.HOSTILE not in panel._repr_mimebundle_()["text/html"]


def test_in_the_book_the_recommendation_needs_no_kernel(monkeypatch):
    monkeypatch.setenv("MEMLAB_BOOK", "1")
    panel = make(itl=800)
    bundle = panel._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"} and not hasattr(panel, "itl")
    assert f"Recommended: {DIAL} 256" in bundle["text/html"] and "<table>" in bundle["text/html"]
    assert "widget" not in json.dumps(bundle)
