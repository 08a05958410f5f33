"""Figures of the schedule: what each step held, and what that did to short and to long requests.

See ``plots`` for the form. Records of one setting are repeats of it; their loads of two kinds are shown each.
"""

import itertools
import statistics
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from memlab import plots, repeats
from memlab.plots import LINES, Plot, Table
from memlab.record import Latency, RunRecord, Steps

MARKERS = "osD^v"
BEFORE, SHOWN = 4, 36  # steps of a window: before its first long prompt, and in all
PROMPTS, ANSWERS = plots.STYLE["activation"], plots.STYLE["kv_cache"]


def setting_name(record: RunRecord) -> str:
    """How a run's scheduler fills a step, in a few words."""
    resolved = record.flags.resolved
    off = resolved.get("enable_chunked_prefill") is False
    told = ("max_num_batched_tokens", *(["enable_chunked_prefill"] if off else []), "long_prefill_token_threshold")
    return ", ".join(filter(None, (plots.short_fact(name, resolved.get(name)) for name in told)))


@dataclass(frozen=True)
class _Setting:
    """The repeats of one setting: ``loads`` of all of them."""

    label: str
    loads: list[Latency]

    def kind(self, name: str) -> list[Latency]:
        return [load.by_kind[name] for load in self.loads]

    def samples(self, kind: str, name: str) -> list[float]:
        return [value for load in self.kind(kind) for value in getattr(load, name)]


def _settings(records) -> list[_Setting]:
    """Records by setting, in the order of their first.

    Raises:
        ValueError: where a load is not of two kinds.
    """
    alike: dict[str, list[RunRecord]] = {}
    for record in records:
        key = str((record.model.name, record.card, record.flags.given, record.engine.vllm, record.machine.name))
        alike.setdefault(key, []).append(record)
    found = [[load.latency for record in same for load in record.loads if load.latency] for same in alike.values()]
    if not found or not all(each and all(load.by_kind for load in each) for each in found):
        raise ValueError("this figure needs runs whose loads have long_prompts among short ones")
    firsts = [replace(same[0], repeat=1) for same in alike.values()]
    labels = [setting_name(first) for first in firsts]
    if len(set(labels)) < len(labels):
        labels = plots.labels(*firsts)
    return [_Setting(label, loads) for label, loads in zip(labels, found, strict=True)]


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _over_loads(values: list[float]) -> str:
    """One value a load: their mean and its interval, or what there is."""
    if len(values) < 2:
        return _ms(values[0])
    return repeats.interval(values).show("ms", digits=0 if min(values) >= 10 else 1)


# ---- step by step ----


def schedule(*records: RunRecord, replayed: bool = False) -> Plot:
    """Tokens of prompts and of answers in each step, against the most that a step may hold, where long prompts come.

    Raises:
        ValueError: for a run that did not record its steps.
    """
    found = [(record, next((load.steps for load in record.loads if load.steps), None)) for record in records]
    if not found or any(steps is None for _, steps in found):
        raise ValueError("this figure needs runs with the instrument steps")
    windows = [(setting_name(record), record.flags.resolved, *_window(steps)) for record, steps in found]
    header = ("step", "of prompts", "of how many", "of answers", "together", "stated time")
    rows = tuple(
        (
            f"{label}: step {number + 1}" if len(windows) > 1 else str(number + 1),
            f"{steps.context_tokens[number]:,}",
            str(steps.context_requests[number]),
            f"{steps.generation_tokens[number]:,}",
            f"{steps.tokens[number]:,}",
            _ms(steps.elapsed_ms[number]),
        )
        for label, _, steps, first, end in windows
        for number in range(first, end)
    )
    return Plot(
        title="What each step holds",
        alt=" ".join(_schedule_alt(label, resolved, steps) for label, resolved, steps, _, _ in windows),
        caption=plots.caption(records, replayed),
        table=Table("Tokens in each step", header, rows),
        draw=lambda ink: _draw_schedule(windows, ink),
    )


def _window(steps: Steps) -> tuple[Steps, int, int]:
    """The steps, and which of them to show: those around the first that is nearly as full as the fullest."""
    full = next(i for i, tokens in enumerate(steps.context_tokens) if tokens > 0.6 * steps.most_context_tokens)
    first = max(0, full - BEFORE)
    return steps, first, min(len(steps.tokens), first + SHOWN)


def _schedule_alt(label: str, resolved: dict, steps: Steps) -> str:
    with_prompts = sum(1 for tokens in steps.context_tokens if tokens)
    most = f"{steps.most_tokens:,} of at most {resolved['max_num_batched_tokens']:,}"
    return (
        f"{label}: {len(steps.tokens):,} steps, {with_prompts:,} of them with tokens of prompts. The fullest holds "
        f"{most} tokens; the most of prompts is {steps.most_context_tokens:,}."
    )


def _draw_schedule(windows, ink: str) -> Figure:
    figure = Figure(figsize=(7.5, 0.5 + 2.9 * len(windows)), layout="constrained")
    parts = figure.subfigures(len(windows), 1, squeeze=False)[:, 0]
    for part, (label, resolved, steps, first, end) in zip(parts, windows, strict=True):
        upper, lower = part.subplots(2, 1, sharex=True, height_ratios=(2.2, 1.0))
        for axes in (upper, lower):
            plots.dress(axes, ink)
        places, limit = range(first + 1, end + 1), resolved["max_num_batched_tokens"]
        answers, prompts = steps.generation_tokens[first:end], steps.context_tokens[first:end]
        style = {"width": 0.85, "edgecolor": ink, "linewidth": 0.5}
        upper.bar(places, answers, color=ANSWERS[0], hatch=ANSWERS[1], label="of answers", **style)
        upper.bar(places, prompts, bottom=answers, color=PROMPTS[0], hatch=PROMPTS[1], label="of prompts", **style)
        upper.axhline(limit, color=ink, linestyle="--", linewidth=1.2, label="max_num_batched_tokens")
        upper.set(ylabel="tokens in\nthe step", ylim=(0, limit * 1.12))
        upper.set_title(label, color=ink, fontsize=10, loc="left")
        lower.bar(places, answers, color=ANSWERS[0], hatch=ANSWERS[1], **style)
        lower.set(ylabel="of answers\nalone", xlabel="step", xlim=(first + 0.3, end + 0.7))
        lower.set_ylim(0, max(*answers, 1) * 1.15)
    handles, names = upper.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, labelcolor=ink, loc="outside lower center", ncols=3)
    return figure


# ---- between two tokens ----


def gaps(*records: RunRecord, replayed: bool = False) -> Plot:
    """How long the short requests wait between two tokens of their answers: every percentile, a line a load.

    Raises:
        ValueError: for a run whose loads are not of two kinds.
    """
    settings = _settings(records)
    rows = tuple(
        (
            each.label,
            str(len(each.loads)),
            _over_loads([load.itl_ms["p50"] for load in each.kind("short")]),
            _over_loads([load.itl_ms["p99"] for load in each.kind("short")]),
            _ms(max(each.samples("short", "longest_itl_samples_ms"))),
        )
        for each in settings
    )
    header = ("setting", "loads", "median", "99th percentile", "longest")
    said = [f"{row[0]}: median {row[2]}, 99th percentile {row[3]}, longest {row[4]}" for row in rows]
    return Plot(
        title="Time between two tokens of short requests",
        alt="; ".join(said) + ".",
        caption=plots.caption(records, replayed),
        table=Table("Between two tokens of short requests: mean of loads (95 % interval)", header, rows),
        draw=lambda ink: _draw_gaps(settings, ink),
    )


def _draw_gaps(settings, ink: str) -> Figure:
    figure, axes = plots.subplots(ink, 7.5, 3.6)
    for each, (colour, dash) in zip(settings, itertools.cycle(LINES), strict=False):
        for number, load in enumerate(each.kind("short")):
            times = [max(ms, 1.0) for ms in load.itl_quantiles_ms]  # less is two tokens in one piece of the stream
            label = None if number else each.label
            axes.plot(times, range(len(times)), color=colour, linestyle=dash, linewidth=1.4, alpha=0.85, label=label)
    axes.set(xscale="log", xlabel="milliseconds between two tokens", ylabel="per cent that are shorter", ylim=(0, 101))
    figure.legend(frameon=False, labelcolor=ink, loc="outside lower center", ncols=2 if len(settings) > 1 else 1)
    return figure


def pauses(*records: RunRecord, replayed: bool = False) -> Plot:
    """The longest wait between two tokens that each short request met.

    Raises:
        ValueError: for a run whose loads are not of two kinds.
    """
    settings = _settings(records)
    return _strips(
        settings,
        [("short requests", [each.samples("short", "longest_itl_samples_ms") for each in settings])],
        "longest time between two tokens, ms",
        "The longest pause of each short request",
        plots.caption(records, replayed),
    )


# ---- until the first token ----


def first_tokens(*records: RunRecord, replayed: bool = False) -> Plot:
    """Time to first token of each request, the short ones and the long ones apart.

    Raises:
        ValueError: for a run whose loads are not of two kinds.
    """
    settings = _settings(records)
    return _strips(
        settings,
        [
            (f"{kind} requests", [each.samples(kind, "ttft_samples_ms") for each in settings])
            for kind in ("short", "long")
        ],
        "time to first token, ms",
        "Time to first token of short and of long requests",
        plots.caption(records, replayed),
        scale="log",
    )


def _strips(settings, groups, unit: str, title: str, caption: str, scale: str = "linear") -> Plot:
    """A strip of points for each setting, a row of axes for each kind of request."""
    rows = tuple(
        (
            f"{each.label}: {name}" if len(groups) > 1 else each.label,
            str(len(values)),
            _ms(statistics.median(values)),
            _ms(min(values)),
            _ms(max(values)),
        )
        for name, samples in groups
        for each, values in zip(settings, samples, strict=True)
    )
    said = [f"{row[0]}: median {row[2]}, {row[3]} to {row[4]}" for row in rows]
    return Plot(
        title=title,
        alt="; ".join(said) + ".",
        caption=caption,
        table=Table(title, ("setting", "requests", "median", "least", "most"), rows),
        draw=lambda ink: _draw_strips(settings, groups, unit, scale, ink),
    )


def _draw_strips(settings, groups, unit: str, scale: str, ink: str) -> Figure:
    figure = Figure(figsize=(7.5, 0.7 + len(groups) * (0.6 + 0.46 * len(settings))), layout="constrained")
    columns = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, samples) in zip(columns, groups, strict=True):
        plots.dress(axes, ink)
        for row, (values, (colour, _)) in enumerate(zip(samples, itertools.cycle(LINES), strict=False)):
            axes.plot(values, [row] * len(values), MARKERS[row % len(MARKERS)], color=colour, markersize=5, alpha=0.55)
            axes.plot([statistics.median(values)] * 2, [row - 0.32, row + 0.32], color=ink, linewidth=2)
        axes.set_yticks(range(len(settings)), [each.label.replace(", ", ",\n") for each in settings])
        axes.set(xscale=scale, ylim=(len(settings) - 0.4, -0.6))
        axes.set_title(name, color=ink, fontsize=10, loc="left")
    axes.set_xlabel(unit + " (bar: median)")
    return figure
