"""Figures say what their records say, to every reader: with colour or without, on a light or a dark page."""

import html.parser
import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

import fixtures_record as fixtures
from memlab import plots, record
from memlab.ledger import TERMS
from memlab.units import show_gib

EAGER, GRAPHS = fixtures.cuda_record(), fixtures.cuda_record("synthetic-graphs", graphs=True, peak_gib=32.2)
SVG = "{http://www.w3.org/2000/svg}"


class _Balanced(html.parser.HTMLParser):
    """Fails on an element that is not closed where it should be."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(markup: str) -> _Balanced:
    parser = _Balanced()
    parser.feed(markup)
    assert not parser.open
    return parser


# ---- what a figure says ----


def test_the_timeline_names_peak_time_and_phase():
    alt = plots.timeline(EAGER).alt
    assert f"peaks at {show_gib(EAGER.seen.peak_gib)} after 30.0 s, in the phase traffic" in alt
    assert "0.30 GiB above context and budget (32.40 GiB)" in alt


@pytest.mark.parametrize("ids", [("ab8ff5",), ("ab8ff5", "aadb02", "ba81bb"), ("405dad", "3474cd", "604056", "77832b")])
def test_no_curve_and_no_other_name_crosses_the_name_of_the_budget(ids):
    found = [each for each in record.read_all() if each.id.endswith("-r1") and "llama" in each.id]
    runs = [next(each for each in found if f"-{part}-" in each.id) for part in ids]
    figure = plots.timeline(*runs).draw("black")
    figure.canvas.draw()
    axes = figure.axes[0]
    texts = {text.get_text(): text.get_window_extent() for text in axes.texts}
    name = next(box for text, box in texts.items() if "budget" in text)
    assert not any(name.overlaps(box) for text, box in texts.items() if box is not name and text.startswith("peak"))
    curves = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert len(curves) == len(runs)
    for line in curves:
        assert not line.get_path().transformed(axes.transData).intersects_bbox(name, filled=False)


def test_the_timeline_of_a_cpu_run_speaks_of_host_memory_only():
    plot = plots.timeline(fixtures.cpu_record())
    assert "host memory" in plot.alt and "host memory, GiB" in plot.svg()
    assert "device" not in plot.html() and "budget" not in plot.html()


def test_every_rank_has_its_line():
    plot = plots.timeline(fixtures.two_rank_record())
    assert {row[0] for row in plot.table.rows} == {"rank 0", "rank 1"}
    assert "rank 0" in plot.svg() and "rank 1" in plot.svg()


def test_the_phases_are_those_of_the_run_that_came_furthest_whichever_is_named_first():
    early = fixtures.record.Phase("starting", 0.0), fixtures.record.Phase("stopped", 5.0)
    stopped = fixtures.cuda_record("synthetic-stopped", repeat=2, outcome="stopped", phases=list(early))
    plot = plots.timeline(stopped, EAGER)
    assert "repeat 1 (phases marked)" in plot.svg() and "repeat 2 (" not in plot.svg()
    assert "Highest in each phase of repeat 1: starting" in plot.alt
    assert "traffic" in plot.svg() and "phases marked" not in plots.timeline(EAGER).svg()
    assert "phases marked" not in plots.timeline(fixtures.two_rank_record()).svg(), "ranks pass them together"


def test_a_phase_without_a_sample_shows_what_was_held_before():
    record = fixtures.cuda_record(
        phases=[fixtures.record.Phase("starting", 0.0), fixtures.record.Phase("stopped", 50.0)]
    )
    assert plots.timeline(record).table.rows[1][3] == show_gib(0.0)


@pytest.mark.parametrize("make", fixtures.ALL)
def test_a_bar_is_as_long_as_the_terms_that_its_view_knows(make):
    for view in plots.views(make()):
        length = sum(size for _, size in plots.segments(view))
        if view.view == "seen":
            assert length == pytest.approx(view.peak_gib)
        elif view.budget_terms() and view.graphs_subtracted is not False:
            assert length == pytest.approx(view.budget_gib + (view.context_gib or 0), abs=0.03)


def test_graphs_that_nothing_was_put_aside_for_stand_beyond_the_budget():
    pieces = plots.segments(fixtures.old_record().stated)
    assert [name for name, _ in pieces][-2:] == ["kv_cache", "cuda_graphs_actual"]
    assert sum(size for _, size in pieces) > fixtures.old_record().stated.budget_gib


def test_a_run_that_stays_below_its_budget_has_no_unprofiled_piece():
    assert "unprofiled" not in dict(plots.segments(GRAPHS.seen))
    assert ("unprofiled, seen", "0.30 GiB", "−0.20 GiB", "−0.50 GiB") in plots.ledger_table(EAGER, GRAPHS).rows


def test_the_ledger_names_the_largest_term_and_the_largest_difference():
    alt = plots.ledger(EAGER, GRAPHS).alt
    assert "Eager, stated: KV cache is largest with 16.20 GiB" in alt
    assert "From eager to CUDA graphs, KV cache changes most: −0.90 GiB." in alt


def test_every_term_has_a_style_or_is_no_piece():
    drawn = {
        name for record in fixtures.all_records() for view in plots.views(record) for name, _ in plots.segments(view)
    }
    assert drawn - {"peak"} <= set(plots.STYLE) <= set(TERMS)


def test_a_prediction_is_labelled_predicted_and_reconciled():
    ledger = {"view": "predicted", "consumed_gib": 15.0, "kv_cache_gib": 16.4, "budget_gib": 32.0}
    record = fixtures.cuda_record(prediction={"planner": "1", "ledger": ledger})
    assert "Predicted: KV cache" in plots.ledger(record).alt
    table = plots.ledger_table(record)
    assert table.header == ("term", "predicted", "stated", "seen", "difference")
    assert ("KV cache", "16.40 GiB", "16.20 GiB", "", "−0.20 GiB") in table.rows


def test_records_are_told_apart_by_what_differs():
    assert plots.labels(EAGER, GRAPHS) == ["eager", "CUDA graphs"]
    assert plots.labels(EAGER, fixtures.old_record()) == ["vLLM 0.33.0", "vLLM 0.26.0"]
    assert plots.labels(EAGER, EAGER) == ["run 1", "run 2"]
    assert plots.labels(EAGER) == [""]


def test_names_take_fewer_words_where_vllms_take_too_many():
    given = ({"max_num_batched_tokens": 8192}, {"max_num_batched_tokens": 16384, "enable_chunked_prefill": False})
    resolved = {**EAGER.flags.resolved, "enable_chunked_prefill": True}
    served = [replace(EAGER, flags=replace(EAGER.flags, given=one, resolved=resolved)) for one in given]
    assert plots.names(*served) == ["8,192 tokens a step, chunking", "16,384 tokens a step, chunking off"]


def test_runs_that_differ_in_too_much_for_a_name_are_told_apart_by_how_they_failed():
    differing = ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
    flags = [
        replace(EAGER.flags, given={**EAGER.flags.given, **dict.fromkeys(differing, value)})
        for value in (131072, 262144)
    ]
    served = [replace(EAGER, flags=one) for one in flags]
    assert plots.names(*served) == ["run 1", "run 2"]
    phases = ["weights_load", "kv_cache_none"]
    failed = [replace(one, finding={"phase": phase}) for one, phase in zip(served, phases, strict=True)]
    assert plots.names(*failed) == phases
    assert plots.names(failed[0], served[1]) == plots.names(failed[0], failed[0]) == ["run 1", "run 2"]


def test_the_caption_says_where_and_whether_it_is_replayed():
    plot = plots.ledger(EAGER, replayed=True)
    assert plot.caption.startswith(EAGER.where()) and "dummy weights" in plot.caption
    assert "replayed" in plot.caption and "replayed" not in plots.ledger(EAGER).caption


def test_a_record_without_samples_says_so():
    bare = fixtures.cuda_record(ranks=[])
    with pytest.raises(ValueError, match="without sampling"):
        plots.timeline(bare)
    with pytest.raises(ValueError, match="no record here holds a ledger"):
        plots.ledger(bare)


def test_the_table_lines_up_in_a_terminal():
    _, header, rule, first, *_ = str(plots.ledger_table(EAGER, GRAPHS)).splitlines()
    assert len(header) == len(rule) == len(first)
    assert first.split() == ["total,", "stated", "39.50", "GiB", "39.50", "GiB", "none"]


# ---- how it says it ----

PLOTS = {
    f"{function.__name__}-{make().id}": (function, make)
    for function in (plots.timeline, plots.ledger)
    for make in fixtures.ALL
}


@pytest.mark.parametrize("function, make", PLOTS.values(), ids=PLOTS)
def test_the_html_is_whole_and_carries_text_and_data(function, make):
    plot = function(make())
    markup = plot.html()
    parser = parse(markup)
    assert parser.tags[:2] == ["figure", "svg"] and {"title", "desc", "details", "caption", "th"} <= set(parser.tags)
    assert len(parser.ids) == len(set(parser.ids))
    assert "<script" not in markup
    svg = ElementTree.fromstring(plot.svg())
    assert svg.find(f"{SVG}desc").text == plot.alt and svg.get("role") == "img"
    assert svg.get("aria-labelledby").split() == [svg.find(f"{SVG}title").get("id"), svg.find(f"{SVG}desc").get("id")]


def test_two_figures_on_a_page_share_no_id():
    assert not set(parse(plots.ledger(EAGER).html()).ids) & set(parse(plots.ledger(EAGER).html()).ids)


def test_each_reference_in_the_svg_has_its_target():
    svg = plots.ledger(EAGER, GRAPHS).svg("x")
    ids = set(parse(svg).ids)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    assert used and used <= ids


def test_text_takes_the_colour_of_the_page_and_the_background_is_clear():
    svg = plots.timeline(EAGER).svg()
    assert "currentColor" in svg and "<text" in svg
    assert not {"#000000", "#ffffff", plots._INK} & set(svg.split('"')) and "fill: #ffffff" not in svg


def test_a_figure_is_the_same_each_time():
    assert plots.ledger(EAGER).svg("x") == plots.ledger(EAGER).svg("x")


def test_it_saves_as_svg_and_png_only(tmp_path):
    plot = plots.ledger(EAGER)
    assert plot.save(tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert plot.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="not as 'a.jpg'"):
        plot.save(tmp_path / "a.jpg")


# ---- colour ----

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHT = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
PAGES = {"light": "#ffffff", "dark": "#121212"}  # sphinx-book-theme 1.3


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(colour: str, sight: str) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(np.array(SIGHT[sight]) @ linear(colour), 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


COLOURS = {colour for colour, _ in plots.STYLE.values()} | {colour for colour, _ in plots.LINES}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("colour", sorted(COLOURS))
def test_a_colour_stands_out_from_the_page(colour, page):
    assert contrast(colour, PAGES[page]) >= 3


def neighbours() -> set[tuple[str, str]]:
    stacks = [plots.segments(view) for record in fixtures.all_records() for view in plots.views(record)]
    names = [[name for name, _ in stack if name in plots.STYLE] for stack in stacks]
    return {pair for stack in names for pair in itertools.pairwise(stack)}


@pytest.mark.parametrize("sight", SIGHT)
def test_pieces_that_touch_differ_in_colour_and_hatch(sight):
    for one, other in neighbours():
        distance = np.linalg.norm(lab(plots.STYLE[one][0], sight) - lab(plots.STYLE[other][0], sight))
        assert distance > 18, (one, other)
        assert plots.STYLE[one] != plots.STYLE[other]


def test_terms_are_told_apart_without_colour():
    hatches = [hatch for name, (_, hatch) in plots.STYLE.items() if name not in ("context", "weights")]
    assert len(set(hatches)) == len(hatches)
    assert len({dash for _, dash in plots.LINES}) == len(plots.LINES)


def test_a_start_that_was_refused_before_vllm_stated_anything_still_has_its_prediction():
    base = fixtures.cuda_record("synthetic-refused")
    ledger = {"view": "predicted", "total_gib": 39.5, "budget_gib": 32.0, "weights_gib": 15.0, "kv_cache_gib": 16.0}
    seen = replace(base.seen, budget_gib=None, unprofiled_gib=None)
    refused = replace(
        base,
        outcome="failed_to_start",
        prediction={"planner": 1, "ledger": ledger},
        ranks=[replace(base.ranks[0], stated=None, seen=seen)],
    )
    table = plots.ledger_table(refused)
    assert table.header == ("term", "predicted", "seen"), "no difference from a ledger that was never stated"
    assert plots.ledger(refused).alt
    assert plots.timeline(refused).alt


def test_the_peak_of_each_run_is_told_from_its_own_budget():
    half = replace(EAGER.stated, budget_gib=EAGER.stated.budget_gib / 2)
    smaller = replace(EAGER, ranks=[replace(EAGER.ranks[0], stated=half)])
    unknown = replace(EAGER, ranks=[replace(EAGER.ranks[0], stated=None, seen=None)])
    first, second, third = plots.timeline(EAGER, smaller, unknown).alt.split("Highest")[0].split(". The ")
    ends = [show_gib(plots.budget_line(run)[1]) for run in (EAGER, smaller)]
    assert ends[0] in first
    assert ends[1] in second and ends[0] not in second
    assert "budget" not in third
