"""Figures of ``max_num_batched_tokens``: one dial with five effects, goodput by setting, and changes above noise.

See ``plots`` for the form. Dots are repeats; a line joins their means, with an interval where there are enough.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from memlab import goodput, plots, repeats
from memlab.goodput import Limits, kind
from memlab.plots import LINES, Plot, Table
from memlab.record import Load, RunRecord, Traffic
from memlab.units import show_gib, show_tokens

DIAL = "max_num_batched_tokens"
MARKERS = "osD^v"


@dataclass(frozen=True)
class _Point:
    """One value of the dial and what was measured at it, a value for each repeat."""

    tokens: int
    values: list[float]


@dataclass(frozen=True)
class _Curve:
    label: str
    points: list[_Point]
    predicted: bool = False


@dataclass(frozen=True)
class _Panel:
    """One effect: its axis, its curves, and how a value of it is written."""

    name: str
    axis: str
    curves: list[_Curve]
    show: object
    log: bool = False


def _dial_of(record: RunRecord) -> int:
    return record.flags.resolved[DIAL]


def _by_dial(records: Sequence[RunRecord], values) -> list[_Point]:
    """``values(records)`` of the records at each value of the dial, those without any left out."""
    found = [
        _Point(at, values([record for record in records if _dial_of(record) == at]))
        for at in sorted({_dial_of(record) for record in records})
    ]
    return [point for point in found if point.values]


def _shown(show, values: list[float]) -> str:
    """The mean and its interval, or what there is."""
    if len(values) >= repeats.ENOUGH and len(set(values)) > 1:
        found = repeats.interval(values)
        return f"{show(found.mean)} ({show(found.low)} to {show(found.high)})"
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if abs(value) >= 10 else f"{value:.1f} ms"


def _rate(value: float) -> str:
    return f"{value:,.0f} tokens/s"


# ---- one dial, five effects ----


def dial(*records: RunRecord, replayed: bool = False) -> Plot:
    """Activation, pool, time to first token, inter-token latency and throughput against ``max_num_batched_tokens``.

    What the loads say is shown where one kind of load was sent three times or more at each value of the dial: the
    ``mixed`` one, where there are several.

    Raises:
        ValueError: for fewer than two values of the dial.
    """
    if len({_dial_of(record) for record in records}) < 2:
        raise ValueError(f"this figure needs runs with two values of {DIAL} or more")
    traffic = _typical(records)
    panels = [panel for panel in (*_memory(records), *(_loads(records, traffic) if traffic else ())) if panel.curves]
    ticks = sorted({_dial_of(record) for record in records})
    rows = tuple((show_tokens(at), *(_cell(panel, at) for panel in panels)) for at in ticks)
    sent = f" Load: {traffic.in_words()}." if traffic else ""
    return Plot(
        title=f"One dial, {len(panels)} effects",
        alt=" ".join(_effect(panel, ticks) for panel in panels) + sent,
        caption=plots.caption(records, replayed) + (f" · load: {traffic.in_words()}" if traffic else ""),
        table=Table(f"By {DIAL}", ("tokens in a step", *(panel.name for panel in panels)), rows),
        draw=lambda ink: _draw_dial(panels, ticks, ink),
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
    def stated(name: str):
        return lambda found: [gib for each in found if each.stated and (gib := each.stated.term(name)) is not None]

    def expected(name: str):
        views = lambda found: [view for each in found if (view := plots.predicted(each))]  # noqa: E731
        return lambda found: [gib for view in views(found)[:1] if (gib := view.term(name)) is not None]

    panels = []
    for name, label in (("activation", "activation"), ("kv_cache", "KV cache")):
        points, rule = _by_dial(records, stated(name)), _by_dial(records, expected(name))
        given = any(each.stated and each.stated.pool_given for each in records)
        if len(points) < 2 or (given and name == "kv_cache"):
            continue
        curves = [_Curve("predicted", rule, True)] if rule else []
        panels.append(_Panel(label, f"{label},\nGiB", [*curves, _Curve("stated", points)], show_gib))
    return panels


def _loads(records: Sequence[RunRecord], traffic: Traffic) -> list[_Panel]:
    def of(value):
        def values(found):
            return [value(load) for each in found for load in goodput.loads_of(each) if load.traffic == traffic]

        return _by_dial(records, values)

    def quantile(name: str, which: str):
        return of(lambda load: getattr(load.latency, f"{name}_ms")[which])

    return [
        _Panel(
            "p99 TTFT",
            "time to first\ntoken, ms",
            [_Curve("p50", quantile("ttft", "p50")), _Curve("p99", quantile("ttft", "p99"))],
            _ms,
            True,
        ),
        _Panel(
            "p99 ITL",
            "inter-token\nlatency, ms",
            [_Curve("p50", quantile("itl", "p50")), _Curve("p99", quantile("itl", "p99"))],
            _ms,
            True,
        ),
        _Panel("output", "output\ntokens/s", [_Curve("", of(lambda load: load.latency.output_tokens_per_s))], _rate),
    ]


def _cell(panel: _Panel, at: int) -> str:
    """The last curve of a panel at one value of the dial: what was measured, and the 99th percentile of latencies."""
    return next((_shown(panel.show, point.values) for point in panel.curves[-1].points if point.tokens == at), "")


def _effect(panel: _Panel, ticks: list[int]) -> str:
    each = [f"{at:,} {cell}" for at in ticks if (cell := _cell(panel, at))]
    return f"{plots.capitalised(panel.name)} by tokens in a step: {', '.join(each)}."


def _draw_dial(panels: list[_Panel], ticks: list[int], ink: str) -> Figure:
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
            axes.margins(y=0.1)
            axes.set_ylim(bottom=0)
        if len(panel.curves) > 1:
            axes.legend(frameon=False, labelcolor=ink, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _tokens_below(all_axes[-1], ticks)
    return figure


def _in_decades(axes) -> None:
    """A logarithmic y axis, its numbers written out."""
    low, high = axes.get_ylim()
    axes.set_yscale("log")
    few = high > 30 * max(low, min(line.get_ydata().min() for line in axes.lines))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if few else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _curve(axes, curve: _Curve, colour: str, dash: str, marker: str) -> None:
    """Repeats as dots, the means joined, their intervals as bars."""
    places = [point.tokens for point in curve.points]
    means = [statistics.fmean(point.values) for point in curve.points]
    axes.plot(places, means, color=colour, linestyle=dash, linewidth=1.6, label=curve.label or None)
    for point, mean in zip(curve.points, means, strict=True):
        axes.plot([point.tokens] * len(point.values), point.values, marker, color=colour, markersize=3.5, alpha=0.7)
        if len(point.values) >= repeats.ENOUGH:
            found = repeats.interval(point.values)
            low = max(found.low, min(point.values) / 10)
            axes.errorbar(
                [point.tokens], [mean], [[mean - low], [found.high - mean]], color=colour, capsize=3, linewidth=1
            )


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

    def loads(found) -> list[Load]:
        return [load for record in found for load in goodput.loads_of(record) if load.traffic == traffic]

    curves = []
    for label, records in zip(labels, series.values(), strict=True):
        met = _by_dial(
            records, lambda found: [goodput.of(load.latency, limits).requests_per_s for load in loads(found)]
        )
        every = _by_dial(
            records, lambda found: [load.latency.completed / load.latency.duration_s for load in loads(found)]
        )
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
                    _shown("{:.2f}".format, good_.values),
                    _shown("{:.2f}".format, all_.values),
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
        axes.set_ylim(bottom=0)
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
        draw=lambda ink: _draw_changes(rows, ink),
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


def _draw_changes(rows, ink: str) -> Figure:
    figure, axes = plots.subplots(ink, 7.5, 1.0 + 0.3 * len(rows))
    for row, (_, name, found) in enumerate(rows):
        (colour, _), marker = LINES[list(MEASURES).index(name)], MARKERS[list(MEASURES).index(name)]
        ends = [[100 * (found.mean - found.low)], [100 * (found.high - found.mean)]]
        axes.errorbar([100 * found.mean], [row], xerr=ends, fmt=marker, color=colour, capsize=3, markersize=5)
    axes.axvline(0, color=ink, linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{label}: {name}" for label, name, _ in rows])
    axes.set(xlabel="change in %, with its 95 % interval", ylim=(len(rows) - 0.4, -0.6))
    return figure
