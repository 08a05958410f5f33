"""Figures of ``max_num_batched_tokens``: one dial with five effects, goodput by setting, and changes above noise.

See ``plots`` for the form. A dot is one measurement. The loads of one server are of different requests, and each of
the other servers got the same ones: a thin line follows a load from server to server, a thick one joins the means.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from memlab import goodput, plots, repeats
from memlab.goodput import Limits, kind
from memlab.ledger import MemoryLedger
from memlab.plots import LINES, Plot, Table
from memlab.record import Latency, RunRecord, Traffic
from memlab.units import show_gib, show_tokens

DIAL = "max_num_batched_tokens"
MARKERS = "osD^v"


@dataclass(frozen=True)
class _Point:
    """One value of the dial and what was measured at it: of each start, a value for each load in the order sent."""

    tokens: int
    starts: list[list[float]]

    @property
    def values(self) -> list[float]:
        return [value for start in self.starts for value in start]

    @property
    def by_load(self) -> list[float]:
        """The mean over the starts of each load that all of them were sent."""
        return [statistics.fmean(same) for same in zip(*self.starts, strict=False)]


@dataclass(frozen=True)
class _Curve:
    label: str
    points: list[_Point]
    predicted: bool = False


@dataclass(frozen=True)
class _Panel:
    """One effect: its axis, its curves, and how a value of it is written; without curves ``missing`` says why."""

    name: str
    axis: str
    curves: list[_Curve]
    show: Callable[[float], str]
    log: bool = False
    missing: str = ""


def _dial_of(record: RunRecord) -> int:
    return record.flags.resolved[DIAL]


def _by_dial(records: Sequence[RunRecord], values: Callable[[RunRecord], list[float]]) -> list[_Point]:
    """What ``values`` finds in each of the records at each value of the dial, those without any left out."""
    found = [
        _Point(at, [start for record in records if _dial_of(record) == at and (start := values(record))])
        for at in sorted({_dial_of(record) for record in records})
    ]
    return [point for point in found if point.values]


def _spread(show: Callable[[float], str], values: list[float]) -> str:
    """The mean, and the least and the most where they differ."""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{show(statistics.fmean(values))} ({low} to {high})"


def _change(base: _Point, point: _Point) -> str:
    """How much larger a point is than another, load by load, with its interval; nothing where the loads are too few."""
    pairs = list(zip(base.by_load, point.by_load, strict=False))
    if point is base or len(pairs) < repeats.ENOUGH or min(itertools.chain(*pairs)) <= 0:
        return ""
    found = repeats.paired_change(*zip(*pairs, strict=True))
    if found.mean < 1:
        return found.show_change()
    mean, low, high = (f"{1 + share:.1f}" for share in (found.mean, found.low, found.high))
    return f"{mean} times ({low} to {high})"


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if abs(value) >= 10 else f"{value:.1f} ms"


def _rate(value: float) -> str:
    return f"{value:,.0f} tokens/s"


# ---- one dial, five effects ----


def dial(*records: RunRecord, replayed: bool = False) -> Plot:
    """Activation, pool, time to first token, inter-token latency and throughput against ``max_num_batched_tokens``.

    What the loads say is shown where one kind of load was sent three times or more at each value of the dial: the
    ``mixed`` one, where there are several. Of an effect that the records do not have, the figure says why.

    Raises:
        ValueError: for fewer than two values of the dial, or records that have none of the effects.
    """
    if len({_dial_of(record) for record in records}) < 2:
        raise ValueError(f"this figure needs runs with two values of {DIAL} or more")
    traffic = _typical(records)
    panels = [*_memory(records), *_loads(records, traffic)]
    found, missing = [panel for panel in panels if panel.curves], _missing(panels)
    if not found:
        raise ValueError(f"this figure needs runs with an effect of {DIAL}: {'; '.join(missing)}")
    ticks = sorted({_dial_of(record) for record in records})
    sent = [f"load: {traffic.in_words()}"] if traffic else []
    return Plot(
        title=f"One dial, {len(found)} of its {len(panels)} effects" if missing else "One dial, five effects",
        alt=" ".join([*(_effect(panel, ticks) for panel in found), *(f"Not shown: {why}." for why in missing)]),
        caption=" · ".join([plots.caption(records, replayed), *sent]),
        table=Table(
            f"By {DIAL}; changes are against {ticks[0]:,}, load by load, with their 95 % intervals",
            ("tokens in a step", *(panel.name for panel in found)),
            tuple((show_tokens(at), *(_cell(panel, at) for panel in found)) for at in ticks),
        ),
        draw=lambda ink: _draw_dial(found, missing, ticks, ink),
    )


def _typical(records: Sequence[RunRecord]) -> Traffic | None:
    """The load to show: repeated often enough at two values of the dial or more; a mixed one before others."""
    at: dict[Traffic, set[int]] = {}
    for tokens in {_dial_of(record) for record in records}:
        found = goodput.repeats_of(record for record in records if _dial_of(record) == tokens)
        for traffic, loads in found.items():
            if len(loads) >= repeats.ENOUGH:
                at.setdefault(traffic, set()).add(tokens)
    several = [traffic for traffic, where in at.items() if len(where) > 1]
    return max(several, key=lambda each: (kind(each) == "mixed", len(at[each])), default=None)


def _memory(records: Sequence[RunRecord]) -> list[_Panel]:
    def panel(name: str, axis: str, missing: str) -> _Panel:
        stated = _by_dial(records, lambda record: _term(record.stated, name))
        expected = [
            replace(point, starts=point.starts[:1])
            for point in _by_dial(records, lambda record: _term(plots.predicted(record), name))
        ]
        curves = [_Curve("predicted", expected, True)] if expected else []
        curves = [] if missing or len(stated) < 2 else [*curves, _Curve("stated", stated)]
        return _Panel(axis, f"{axis},\nGiB", curves, show_gib, missing=missing or "these runs do not state it")

    on_cpu = all(record.engine.backend == "cpu" for record in records)
    given = any(record.stated and record.stated.pool_given for record in records)
    return [
        panel("activation", "activation", "the CPU backend sets none aside" if on_cpu else ""),
        panel("kv_cache", "KV cache", "its size was given in bytes, and no flag moves it" if given else ""),
    ]


def _term(view: MemoryLedger | None, name: str) -> list[float]:
    return [] if view is None or (gib := view.term(name)) is None else [gib]


def _loads(records: Sequence[RunRecord], traffic: Traffic | None) -> list[_Panel]:
    def curve(label: str, value: Callable[[Latency], float]) -> _Curve:
        def values(record):
            return [value(load.latency) for load in goodput.loads_of(record) if load.traffic == traffic]

        return _Curve(label, _by_dial(records, values))

    ttft = [curve("p50", lambda one: one.ttft_ms["p50"]), curve("p99", lambda one: one.ttft_ms["p99"])]
    itl = [curve("p50", lambda one: one.itl_ms["p50"]), curve("p99", lambda one: one.itl_ms["p99"])]
    speed = [curve("", lambda one: one.output_tokens_per_s)]
    missing = "" if traffic else f"no load was sent {repeats.ENOUGH} times to two of the servers"
    return [
        _Panel(name, axis, [] if missing else curves, show, log, missing)
        for name, axis, curves, show, log in (
            ("p99 TTFT", "time to first\ntoken, ms", ttft, _ms, True),
            ("p99 ITL", "inter-token\nlatency, ms", itl, _ms, True),
            ("throughput", "output\ntokens/s", speed, _rate, False),
        )
    ]


def _missing(panels: list[_Panel]) -> list[str]:
    """The effects that are not shown, those with the same reason together."""
    why: dict[str, list[str]] = {}
    for panel in panels:
        if not panel.curves:
            why.setdefault(panel.missing, []).append(panel.name)
    return [f"{', '.join(names)} ({reason})" for reason, names in why.items()]


def _cell(panel: _Panel, at: int) -> str:
    """The last curve of a panel at one value of the dial: what was measured, and the 99th percentile of latencies."""
    points = panel.curves[-1].points
    point = next((point for point in points if point.tokens == at), None)
    if point is None:
        return ""
    change = _change(points[0], point)
    return f"{panel.show(statistics.fmean(point.values))}, {change}" if change else _spread(panel.show, point.values)


def _effect(panel: _Panel, ticks: list[int]) -> str:
    each = [f"{at:,}: {cell}" for at in ticks if (cell := _cell(panel, at))]
    return f"{plots.capitalised(panel.name)} by tokens in a step: {'; '.join(each)}."


def _draw_dial(panels: list[_Panel], missing: list[str], ticks: list[int], ink: str) -> Figure:
    figure, all_axes = _column(ink, [panel.axis for panel in panels])
    for panel, axes in zip(panels, all_axes, strict=True):
        styles = iter(zip(LINES, MARKERS, strict=False))
        for curve in panel.curves:
            if curve.predicted:
                places, values = zip(*((point.tokens, point.values[0]) for point in curve.points), strict=True)
                axes.plot(places, values, color=ink, linestyle=":", linewidth=1.4, label=curve.label)
                continue
            (colour, dash), marker = next(styles)
            _curve(axes, curve, colour, dash, marker)
        if panel.log:
            _in_decades(axes)
        else:
            _from_zero(axes)
        if len(panel.curves) > 1:
            axes.legend(frameon=False, labelcolor=ink, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _tokens_below(all_axes[-1], ticks)
    if missing:
        text = "\n".join(f"not shown: {why}" for why in missing)
        figure.supxlabel(text, color=ink, fontsize=9, x=0.02, ha="left")
    return figure


def _from_zero(axes) -> None:
    axes.set_ylim(0, 1.1 * max(max(line.get_ydata()) for line in axes.lines))


def _in_decades(axes) -> None:
    """A logarithmic y axis, its numbers written out."""
    low, high = axes.get_ylim()
    axes.set_yscale("log")
    few = high > 30 * max(low, min(line.get_ydata().min() for line in axes.lines))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if few else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    if few:
        axes.set_ylim(bottom=10 ** math.floor(math.log10(axes.get_ylim()[0])))


def _curve(axes, curve: _Curve, colour: str, dash: str, marker: str) -> None:
    """Every measurement as a dot, a thin line for each load that went to all servers, a thick one for the means."""
    places = [point.tokens for point in curve.points]
    means = [statistics.fmean(point.values) for point in curve.points]
    axes.plot(places, means, color=colour, linestyle=dash, linewidth=1.8, label=curve.label or None)
    loads = list(zip(*(point.by_load for point in curve.points), strict=False))
    for values in loads if len(loads) > 1 else ():
        axes.plot(places, values, color=colour, linestyle=dash, linewidth=0.7, alpha=0.6)
    for point in curve.points:
        axes.plot([point.tokens] * len(point.values), point.values, marker, color=colour, markersize=3.5, alpha=0.7)


def _column(ink: str, names: list[str], height: float = 1.55):
    """Axes under each other that share their x axis, in powers of two."""
    figure = Figure(figsize=(7.5, 0.5 + height * len(names)), layout="constrained")
    all_axes = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(all_axes, names, strict=True):
        plots.dress(axes, ink)
        axes.set_ylabel(name)
        axes.set_xscale("log", base=2)
        axes.grid(axis="x", color=ink, alpha=0.15, linewidth=0.6)
    figure.align_ylabels(all_axes)
    return figure, all_axes


def _tokens_below(axes, ticks: list[int]) -> None:
    kept = [at for number, at in enumerate(ticks) if not number or at / ticks[number - 1] > 1.2]
    axes.set_xticks(kept, [f"{at:,}" for at in kept])
    axes.minorticks_off()
    axes.set_xlabel(DIAL)


# ---- goodput ----


def good(*records: RunRecord, ttft_ms: float = 1000.0, tpot_ms: float = 50.0, replayed: bool = False) -> Plot:
    """Requests a second that met the limits, by ``max_num_batched_tokens``, for each kind of traffic; beside them all
    that were answered.

    Raises:
        ValueError: where no kind of traffic was sent at two values of the dial.
    """
    limits = Limits(ttft_ms, tpot_ms)
    others = [{name: value for name, value in record.flags.given.items() if name != DIAL} for record in records]
    series: dict[str, list[RunRecord]] = {}
    for record, rest in zip(records, others, strict=True):
        series.setdefault(str(rest), []).append(record)
    labels = _labels(series)
    kinds = list(dict.fromkeys(traffic for record in records for traffic in goodput.repeats_of([record])))
    panels = {traffic: _goodput_curves(series, labels, traffic, limits) for traffic in kinds}
    panels = {
        traffic: curves for traffic, curves in panels.items() if len({p.tokens for c in curves for p in c.points}) > 1
    }
    if not panels:
        raise ValueError(f"this figure needs loads that were repeated at two values of {DIAL} or more")
    ticks = sorted({point.tokens for curves in panels.values() for curve in curves for point in curve.points})
    rows = tuple(_goodput_rows(panels))
    each = [
        f"{plots.capitalised(kind(traffic))}{f', {curve.label}' if curve.label else ''}: "
        + ", ".join(f"{p.tokens:,} {statistics.fmean(p.values):.2f}" for p in curve.points)
        for traffic, curves in panels.items()
        for curve in curves
        if not curve.predicted
    ]
    return Plot(
        title="Goodput by the tokens that a step may hold",
        alt=f"Good requests a second ({limits}) by {DIAL}. " + ". ".join(each) + ".",
        caption=f"{plots.caption(records, replayed)} · good: {limits}",
        table=Table(
            f"Requests a second; good: {limits}", ("traffic", "tokens in a step", "good", "all", "share good"), rows
        ),
        draw=lambda ink: _draw_good(panels, ticks, ink),
    )


def _labels(series: dict[str, list[RunRecord]]) -> list[str]:
    """In what the settings differ beside the dial."""
    if len(series) == 1:
        return [""]
    firsts = [found[0] for found in series.values()]
    same = [replace(each, repeat=1, flags=replace(each.flags, given={**each.flags.given, DIAL: 0})) for each in firsts]
    return plots.labels(*same)


def _goodput_curves(series, labels, traffic: Traffic, limits: Limits) -> list[_Curve]:
    """Of each setting, good requests a second, and all of them (``predicted``: a line without dots)."""

    def sent(record: RunRecord) -> list[Latency]:
        return [load.latency for load in goodput.loads_of(record) if load.traffic == traffic]

    curves = []
    for label, records in zip(labels, series.values(), strict=True):
        met = _by_dial(records, lambda record: [goodput.of(each, limits).requests_per_s for each in sent(record)])
        every = _by_dial(records, lambda record: [each.completed / each.duration_s for each in sent(record)])
        if met:
            curves += [_Curve(label, every, True), _Curve(label, met)]
    return curves


def _goodput_rows(panels):
    for traffic, curves in panels.items():
        for every, met in _pairs(curves):
            for all_, good_ in zip(every.points, met.points, strict=True):
                share = statistics.fmean(good_.values) / statistics.fmean(all_.values)
                name = ", ".join(filter(None, (kind(traffic), met.label)))
                yield (
                    name,
                    f"{good_.tokens:,}",
                    _spread("{:.2f}".format, good_.values),
                    _spread("{:.2f}".format, all_.values),
                    f"{share:.0%}",
                )


def _pairs(curves):
    return zip(curves[::2], curves[1::2], strict=True)


def _draw_good(panels, ticks: list[int], ink: str) -> Figure:
    figure, all_axes = _column(ink, [f"{kind(traffic)},\nrequests/s" for traffic in panels], 1.8)
    for axes, (traffic, curves) in zip(all_axes, panels.items(), strict=True):
        styles = iter(zip(itertools.cycle(LINES), itertools.cycle(MARKERS), strict=False))
        for every, met in _pairs(curves):
            (colour, dash), marker = next(styles)
            places = [point.tokens for point in every.points]
            means = [statistics.fmean(point.values) for point in every.points]
            axes.plot(places, means, color=ink, linestyle=":", linewidth=1.3, label="all that were answered")
            _curve(
                axes,
                replace(met, label=", ".join(filter(None, ("within the limits", met.label)))),
                colour,
                dash,
                marker,
            )
        _from_zero(axes)
        axes.set_title(traffic.in_words(), color=ink, fontsize=9, loc="left")
    handles, names = all_axes[0].get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), frameon=False, labelcolor=ink, loc="outside lower center", ncols=2)
    _tokens_below(all_axes[-1], ticks)
    return figure


# ---- a change against its noise ----

MEASURES = {
    "output tokens/s": lambda load: load.latency.output_tokens_per_s,
    "p50 TTFT": lambda load: load.latency.ttft_ms["p50"],
    "p99 ITL": lambda load: load.latency.itl_ms["p99"],
}


def changes(base: RunRecord, *others: RunRecord, only: str | None = None, replayed: bool = False) -> Plot:
    """What each run changed against ``base``, as a share with its interval: one that holds zero shows nothing.

    The loads of two servers are compared one by one, since those in the same place are of the same requests. Another
    start of the base's own setting shows what two servers differ by when nothing was changed.

    Args:
        base: what the others are compared with.
        others: of other settings, or of the same started again.
        only: the kind of load to show (``goodput.kind``); None for all.
        replayed: whether to say so.

    Raises:
        ValueError: where no load of theirs was repeated three times on each server.
    """
    labels = _against(base, others)
    rows = [
        (f"{label}{'' if only else f', {kind(traffic)}'}", name, repeats.paired_change(before, after))
        for label, other in zip(labels, others, strict=True)
        for traffic, before, after, name in _measured(base, other)
        if only in (None, kind(traffic))
    ]
    if not rows:
        raise ValueError(f"this figure needs two servers that were sent the same load {repeats.ENOUGH} times each")
    sent = [traffic for traffic in goodput.repeats_of([base]) if only in (None, kind(traffic))]
    visible = [f"{label}, {name}: {found.show_change()}" for label, name, found in rows if not found.has_zero]
    header = "setting" if only else "setting and traffic"
    return Plot(
        title=f"Change from {DIAL} {_dial_of(base):,}, and its noise",
        alt=f"Of {len(rows)} changes {len(visible)} stand out of the noise between loads. "
        + "; ".join(visible)
        + ("." if visible else ""),
        caption=" · ".join(
            [plots.caption((base, *others), replayed), *(f"load: {each.in_words()}" for each in sent if only)]
        ),
        table=Table(
            f"Change from {DIAL} {_dial_of(base):,}",
            (header, "measure", "change", "outside the noise", "smallest visible"),
            tuple(
                (label, name, found.show_change(), "no" if found.has_zero else "yes", f"{100 * found.half_width:.1f} %")
                for label, name, found in rows
            ),
        ),
        draw=lambda ink: _draw_changes(rows, _dial_of(base), ink),
    )


def _against(base: RunRecord, others: Sequence[RunRecord]) -> list[str]:
    """What each run has that ``base`` has not."""
    different = [each for each in others if each.flags.given != base.flags.given]
    _, *names = plots.labels(*(replace(each, repeat=1) for each in (base, *different)))
    names = iter(names)
    return [f"{DIAL} {_dial_of(base)} again" if each not in different else next(names) for each in others]


def _measured(base: RunRecord, other: RunRecord):
    """The repeats of both runs for each load that both were sent, and each measure."""
    before, after = goodput.repeats_of([base]), goodput.repeats_of([other])
    for traffic in before:
        count = min(len(before[traffic]), len(after.get(traffic, ())))
        if count >= repeats.ENOUGH:
            pairs = before[traffic][:count], after[traffic][:count]
            for name, value in MEASURES.items():
                yield traffic, *([value(load) for load in loads] for loads in pairs), name


def _draw_changes(rows, base: int, ink: str) -> Figure:
    figure, axes = plots.subplots(ink, 7.5, 1.0 + 0.3 * len(rows))
    for row, (_, name, found) in enumerate(rows):
        (colour, _), marker = LINES[list(MEASURES).index(name)], MARKERS[list(MEASURES).index(name)]
        ends = [[100 * (found.mean - found.low)], [100 * (found.high - found.mean)]]
        axes.errorbar([100 * found.mean], [row], xerr=ends, fmt=marker, color=colour, capsize=3, markersize=5)
    axes.axvline(0, color=ink, linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{label.removeprefix(f'{DIAL} ')}: {name}" for label, name, _ in rows])
    axes.set(xlabel=f"change from {DIAL} {base:,}\nin %, with its 95 % interval", ylim=(len(rows) - 0.4, -0.6))
    return figure
