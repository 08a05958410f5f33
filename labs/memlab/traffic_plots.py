"""Figures of what traffic does: memory and latency by load, the pool as it fills, the allocator's own view.

See ``plots`` for the form. Records of one setting are repeats of it: a figure shows each of their values, and joins
their medians.
"""

import itertools
import math
import statistics
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from memlab import plots, shapes
from memlab.errors import ShapeError
from memlab.plots import LINES, Plot, Table, capitalised
from memlab.record import Load, RunRecord, Traffic
from memlab.units import GIB, show_gib, show_tokens

MARKERS = "osD^v"


@dataclass(frozen=True)
class _Group:
    """The repeats of one setting."""

    label: str
    records: list[RunRecord]


def _groups(records) -> list[_Group]:
    """Records by setting, in the order of their first; the label says in what the settings differ."""
    alike: dict[str, list[RunRecord]] = {}
    for record in records:
        key = str((record.model.name, record.card, record.flags.given, record.engine.vllm, record.machine.name))
        alike.setdefault(key, []).append(record)
    firsts = [replace(found[0], repeat=1) for found in alike.values()]
    labels = plots.labels(*firsts) if len(firsts) > 1 else [""]
    return [_Group(label, found) for label, found in zip(labels, alike.values(), strict=True)]


def load_name(load: Traffic) -> str:
    """A load in a word or two, as an axis has it."""
    tokens = f"{load.input_tokens:,}" + (f" ± {load.range_ratio:.0%}" if load.range_ratio else "")
    if load.long_prompts:
        long = load.long_prompts
        return f"{load.requests} × {tokens} and {long.requests} × {long.input_tokens:,}"
    return tokens if load.concurrency == 1 else f"{load.concurrency or load.requests} × {tokens}"


def _need_loads(records) -> None:
    if not records or not all(record.loads for record in records):
        raise ValueError("this figure needs runs with several loads")


def when_ready_gib(record: RunRecord, rank: int = 0) -> float:
    """What a rank held just before the first load."""
    line = record.ranks[rank].timeline
    before = [gib for time, gib in zip(line.time_s, line.used_gib, strict=True) if time <= record.loads[0].start_s]
    return before[-1] if before else line.used_gib[0]


def _spread(values: list[float], show) -> str:
    """One value, or the least and the most."""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _legend(figure: Figure, ink: str, longest: int = 20) -> None:
    """Under the axes, in as many columns as labels of so many characters leave room for."""
    figure.legend(frameon=False, labelcolor=ink, loc="outside lower center", ncols=max(1, 80 // (longest + 8)))


def _axes(ink: str, width: float, heights: tuple[float, ...]):
    """A column of axes that share their x axis."""
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axes in all_axes:
        plots.dress(axes, ink)
    return figure, all_axes


# ---- memory and latency by load ----


def by_load(*records: RunRecord, replayed: bool = False) -> Plot:
    """The most memory that each load took, and its time to the first token.

    A run on a card that another plays has the other's times, so they are left out.

    Raises:
        ValueError: for a run without several loads.
    """
    _need_loads(records)
    groups = _groups(records)
    names = list(dict.fromkeys(load_name(load.traffic) for record in records for load in record.loads))
    memory = plots.memory_name(records)
    peaks, more, waits = {}, {}, {}
    for group in groups:
        for record in group.records:
            ready = when_ready_gib(record)
            for load in record.loads:
                key = group.label, load_name(load.traffic)
                peaks.setdefault(key, []).append(load.peak_gib[0])
                more.setdefault(key, []).append(load.peak_gib[0] - ready)
                if load.latency and not record.card:
                    waits.setdefault(key, []).extend(load.latency.ttft_samples_ms)
    times = ("TTFT, median", "TTFT, least to most") if any(waits.values()) else ()
    rows = tuple(
        (
            ", ".join(filter(None, key)),
            _spread(peaks[key], show_gib),
            _spread(more[key], lambda gib: plots.difference(0.0, gib)),
            *((_ms(statistics.median(waits[key])), _spread(waits[key], _ms)) if waits.get(key) else ("",) * len(times)),
        )
        for key in ((group.label, name) for group in groups for name in names)
        if key in peaks
    )
    return Plot(
        title=f"{capitalised(memory)}{' and time to first token' if times else ''} by load",
        alt=" ".join(_by_load_alt(group, names, peaks, waits, memory) for group in groups),
        caption=plots.caption(records, replayed),
        table=Table("Each load, in the order sent", ("load", f"most {memory}", "beyond ready", *times), rows),
        draw=lambda ink: _draw_by_load(groups, names, peaks, waits, memory, ink),
    )


def _by_load_alt(group: _Group, names, peaks, waits, memory: str) -> str:
    keys = [(group.label, name) for name in names if (group.label, name) in peaks]
    each = [f"{name} tokens {show_gib(statistics.median(peaks[label, name]))}" for label, name in keys]
    timed = [key for key in keys if waits.get(key)]
    ttft = [f"{name} {_ms(statistics.median(waits[label, name]))}" for label, name in timed]
    who = f"With {group.label}, the" if group.label else "The"
    said = f"{who} most {memory}: {', '.join(each)}."
    return f"{said} Median time to first token: {', '.join(ttft)}." if ttft else said


def _draw_by_load(groups, names, peaks, waits, memory: str, ink: str) -> Figure:
    timed = any(waits.values())
    figure, all_axes = _axes(ink, 7.5, (2.6, 2.4) if timed else (2.8,))
    upper, lowest = all_axes[0], all_axes[-1]
    for number, (group, (colour, dash)) in enumerate(zip(groups, itertools.cycle(LINES), strict=False)):
        shift = (number - (len(groups) - 1) / 2) * 0.12
        for axes, values in zip(all_axes, (peaks, waits), strict=False):
            found = [values.get((group.label, name)) or [] for name in names]
            places = [i + shift for i in range(len(names))]
            # A load that this server could not take leaves a gap: a line across it would read as a value.
            medians = [statistics.median(each) if each else math.nan for each in found]
            label = group.label if axes is upper else None
            axes.plot(places, medians, color=colour, linestyle=dash, linewidth=1.6, label=label or None)
            for place, each in zip(places, found, strict=True):
                marker = MARKERS[number % len(MARKERS)]
                axes.plot([place] * len(each), each, marker, color=colour, markersize=4, alpha=0.8)
    upper.set(ylabel=f"most {memory},\nGiB")
    upper.set_ylim(0, max(max(each) for each in peaks.values()) * 1.15)
    if timed:
        lowest.set(ylabel="time to first\ntoken, ms", yscale="log")
    lowest.set(xlabel="tokens in the prompt, in the order sent")
    lowest.set_xticks(range(len(names)), names)
    if len(groups) > 1:
        _legend(figure, ink, max(len(group.label) for group in groups))
    return figure


# ---- one step against many: tokens a second ----


def speeds(*records: RunRecord, replayed: bool = False) -> Plot:
    """Tokens a second of one request at a time: while its prompt is read, and while its answer is written.

    Prefill counts the prompt's tokens over the time to first token, decode one token over the mean inter-token
    latency: tokens that reach the client in one piece have no time between them, which a median would take for speed.
    Loads of several requests at once are left out.

    Raises:
        ValueError: where no load sent one request at a time.
    """
    _need_loads(records)
    prefill, decode = {}, {}
    for record in records:
        for load in record.loads:
            if load.traffic.concurrency == 1 and load.latency and load.latency.itl_quantiles_ms:
                name = load_name(load.traffic)
                tokens = load.traffic.input_tokens
                prefill.setdefault(name, []).extend(tokens * 1000 / ms for ms in load.latency.ttft_samples_ms)
                decode.setdefault(name, []).append(1000 / load.latency.itl_ms["mean"])
    if not prefill:
        raise ValueError("no load here sent one request at a time")
    names = list(prefill)

    def rate(value: float) -> str:
        return f"{value:,.0f} tokens/s"

    rows = tuple((name, _spread(prefill[name], rate), _spread(decode[name], rate)) for name in names)
    middle = {name: (statistics.median(prefill[name]), statistics.median(decode[name])) for name in names}
    each = [f"{name} tokens: {rate(fast)} in prefill, {rate(slow)} in decode" for name, (fast, slow) in middle.items()]
    return Plot(
        title="Tokens a second of one request, in prefill and in decode",
        alt="; ".join(each) + ".",
        caption=plots.caption(records, replayed),
        table=Table("One request at a time, by the length of its prompt", ("prompt", "prefill", "decode"), rows),
        draw=lambda ink: _draw_speeds(names, prefill, decode, ink),
    )


def _draw_speeds(names, prefill, decode, ink: str) -> Figure:
    figure, axes = plots.subplots(ink, 7.5, 3.4)
    for values, label, (colour, dash), marker in zip(
        (prefill, decode), ("prefill", "decode"), LINES, MARKERS, strict=False
    ):
        axes.plot(
            range(len(names)),
            [statistics.median(values[name]) for name in names],
            color=colour,
            linestyle=dash,
            label=label,
        )
        for place, name in enumerate(names):
            axes.plot([place] * len(values[name]), values[name], marker, color=colour, markersize=4, alpha=0.8)
    axes.set(xlabel="tokens in the prompt", ylabel="tokens a second", yscale="log")
    axes.set_xticks(range(len(names)), names)
    _legend(figure, ink)
    return figure


# ---- activation against the budget of a step ----


def activation(*records: RunRecord, replayed: bool = False) -> Plot:
    """The stated activation against ``max_num_batched_tokens``, beside what was predicted for each.

    Raises:
        ValueError: where a run states no activation.
    """
    if not records or any(record.stated is None or record.stated.activation_gib is None for record in records):
        raise ValueError("this figure needs runs whose vLLM stated its activation")
    points = [
        (record.flags.resolved["max_num_batched_tokens"], record.stated.activation_gib, plots.predicted(record))
        for record in records
    ]
    tokens = sorted({at for at, _, _ in points})
    stated = {at: [gib for each, gib, _ in points if each == at] for at in tokens}
    expected = {
        at: next((view.activation_gib for each, _, view in points if each == at and view), None) for at in tokens
    }
    rows = tuple(
        (
            show_tokens(at),
            _spread(stated[at], show_gib),
            "" if expected[at] is None else show_gib(expected[at]),
        )
        for at in tokens
    )
    each = [f"{show_tokens(at)} {_spread(stated[at], show_gib)}" for at in tokens]
    return Plot(
        title="Activation against the tokens that a step may hold",
        alt=f"Activation stated by vLLM, by max_num_batched_tokens: {', '.join(each)}.",
        caption=plots.caption(records, replayed),
        table=Table("Activation by max_num_batched_tokens", ("tokens in a step", "stated", "predicted"), rows),
        draw=lambda ink: _draw_activation(tokens, stated, expected, ink),
    )


def _draw_activation(tokens, stated, expected, ink: str) -> Figure:
    figure, axes = plots.subplots(ink, 7.5, 3.4)
    known = [at for at in tokens if expected[at] is not None]
    colour, dash = LINES[0][0], LINES[1][1]
    axes.plot(known, [expected[at] for at in known], linestyle=dash, color=ink, linewidth=1.2, label="predicted")
    places = [at for at in tokens for _ in stated[at]]
    axes.plot(places, [gib for at in tokens for gib in stated[at]], "o", color=colour, label="stated")
    for at in tokens:
        axes.annotate(
            show_gib(max(stated[at])),
            (at, max(stated[at])),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            color=ink,
        )
    axes.set(xlabel="max_num_batched_tokens", ylabel="activation, GiB")
    axes.set_xlim(0, max(tokens) * 1.08)
    axes.set_ylim(0, max(max(each) for each in stated.values()) * 1.2)
    axes.set_xticks(tokens, [f"{at:,}" for at in tokens])
    _legend(figure, ink)
    return figure


# ---- the allocator's view ----


def allocator(*records: RunRecord, replayed: bool = False) -> Plot:
    """Allocated, reserved, seen: the most of each load above what stayed allocated, read in the worker.

    Raises:
        ValueError: where no load read the allocator.
    """
    _need_loads(records)
    if not all(load.allocator for record in records for load in record.loads):
        raise ValueError("this figure needs runs with the instrument allocator")
    bars = [
        (_bar_label(group, load), _layers(load), load)
        for group in _groups(records)
        for record in group.records
        for load in record.loads
    ]
    header = ("load", "stays allocated", "in use by the step", "slack", "outside PyTorch", "seen")
    rows = tuple(
        (label, show_gib(load.allocator[0].allocated_gib), *map(show_gib, layers), show_gib(load.peak_gib[0]))
        for label, layers, load in bars
    )
    each = [
        f"{label}: step {show_gib(a)}, slack {show_gib(b)}, outside PyTorch {show_gib(c)}"
        for label, (a, b, c), _ in bars
    ]
    return Plot(
        title="Allocated, reserved, seen",
        alt="Above what stays allocated, at most. " + "; ".join(each) + ".",
        caption=plots.caption(records, replayed),
        table=Table("PyTorch's allocator at each load's worst moment, and the driver's view", header, rows),
        draw=lambda ink: _draw_allocator(bars, ink),
    )


def _bar_label(group: _Group, load: Load) -> str:
    return ", ".join(filter(None, (group.label, load_name(load.traffic))))


def _layers(load: Load) -> tuple[float, float, float]:
    """Above what stays allocated: what steps used, what was reserved beyond it, what lies outside PyTorch; GiB."""
    read = load.allocator[0]
    return (
        read.peak_allocated_gib - read.allocated_gib,
        read.peak_reserved_gib - read.peak_allocated_gib,
        load.peak_gib[0] - read.peak_reserved_gib,
    )


_LAYERS = (
    ("in use by the step (allocated)", *plots.STYLE["activation"]),
    ("slack (reserved, not allocated)", *plots.STYLE["unprofiled"]),
    ("outside PyTorch (seen, not reserved)", *plots.STYLE["context"]),
)


def _draw_allocator(bars, ink: str) -> Figure:
    figure, axes = plots.subplots(ink, 7.5, 1.4 + 0.42 * len(bars))
    for row, (_, layers, _) in enumerate(bars):
        left = 0.0
        for size, (name, colour, hatch) in zip(layers, _LAYERS, strict=True):
            axes.barh(
                row,
                size,
                0.62,
                left,
                color=colour,
                hatch=hatch,
                edgecolor=ink,
                linewidth=0.7,
                label=None if row else name,
            )
            left += size
        axes.annotate(show_gib(left), (left, row), xytext=(4, 0), textcoords="offset points", va="center", color=ink)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.set(xlabel="GiB above what stays allocated", ylim=(len(bars) - 0.4, -0.6))
    axes.set_xlim(0, max(sum(layers) for _, layers, _ in bars) * 1.15)
    _legend(figure, ink, 60)
    return figure


def trace(record: RunRecord, *more: RunRecord, replayed: bool = False) -> Plot:
    """What PyTorch held at each allocation while a load ran: the layers of each step, one after the other.

    Raises:
        ValueError: where no load has the history.
    """
    found = [(_group, load) for _group in _groups((record, *more)) for run in _group.records for load in run.loads]
    found = [(_bar_label(group, load), load.trace) for group, load in found if load.trace]
    if not found:
        raise ValueError("this figure needs a run with the instrument snapshot")
    ends = [(label, min(line.allocated_gib), max(line.allocated_gib), line.time_ms[-1]) for label, line in found]
    rows = tuple(
        (label, show_gib(low), show_gib(high), show_gib(high - low), _ms(end)) for label, low, high, end in ends
    )
    each = [
        f"{label} tokens: between {show_gib(low)} and {show_gib(high)} within {_ms(end)}"
        for label, low, high, end in ends
    ]
    return Plot(
        title="What the allocator holds from one allocation to the next",
        alt="; ".join(each) + ".",
        caption=plots.caption((record, *more), replayed),
        table=Table("Allocated by PyTorch during a load", ("load", "least", "most", "difference", "within"), rows),
        draw=lambda ink: _draw_trace(found, ink),
    )


def _draw_trace(found, ink: str) -> Figure:
    figure = Figure(figsize=(7.5, 0.6 + 2.1 * len(found)), layout="constrained")
    low = min(min(line.allocated_gib) for _, line in found)
    for axes, (label, line) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        plots.dress(axes, ink)
        colour, _ = LINES[0]
        times, more = _without_pauses(line.time_ms), [gib - low for gib in line.allocated_gib]
        axes.plot(times, more, color=colour, linewidth=0.9, drawstyle="steps-post")
        axes.set(ylabel="GiB beyond\nthe least", xlim=(0, times[-1]))
        axes.set_ylim(bottom=0)
        axes.set_title(f"{label} tokens", color=ink, fontsize=10, loc="left")
    axes.set(xlabel="milliseconds, without the pauses in which nothing was allocated")
    return figure


def _without_pauses(time_ms: list[float], longest: float = 1.5) -> list[float]:
    """The times with every gap cut to ``longest`` milliseconds: the CPU asks for a step's memory ahead of the GPU, then
    waits for it."""
    gaps = [min(longest, later - time) for time, later in itertools.pairwise(time_ms)]
    return list(itertools.accumulate([0.0, *gaps]))


# ---- the pool as it fills ----


def pool(record: RunRecord, replayed: bool = False) -> Plot:
    """The KV cache in use, requests that run and wait, preemptions, and memory, over the time of the traffic.

    Raises:
        ValueError: for a run whose metrics were not read.
    """
    series = record.series
    if series is None or not series.time_s:
        raise ValueError("this figure needs a run whose metrics were read under traffic")
    line = record.ranks[0].timeline
    start, end = series.time_s[0], series.time_s[-1]
    inside = [(time, gib) for time, gib in zip(line.time_s, line.used_gib, strict=True) if start <= time <= end]
    memory = plots.memory_name([record])
    low, high = min(gib for _, gib in inside), max(gib for _, gib in inside)
    preempted = int(max(series.preemptions))
    facts = (
        ("KV cache used, at most", f"{max(series.kv_cache_usage):.1%}"),
        ("requests running, at most", f"{max(series.running):.0f}"),
        ("requests waiting, at most", f"{max(series.waiting):.0f}"),
        ("preemptions", str(preempted)),
        (f"{memory}, least to most", _spread([low, high], show_gib)),
    )
    return Plot(
        title="The pool as it fills",
        alt=", ".join(f"{name}: {value}" for name, value in facts) + ".",
        caption=plots.caption([record], replayed),
        table=Table("While traffic came", ("", "value"), facts),
        draw=lambda ink: _draw_pool(series, inside, memory, ink),
    )


def _draw_pool(series, inside, memory: str, ink: str) -> Figure:
    figure, (usage, requests, held) = _axes(ink, 7.5, (1.7, 1.9, 1.5))
    start = series.time_s[0]
    times = [time - start for time in series.time_s]
    (blue, solid), (orange, dashed), (green, dotted), (purple, points) = LINES
    usage.plot(times, [100 * share for share in series.kv_cache_usage], color=plots.STYLE["kv_cache"][0], linewidth=1.6)
    usage.set(ylabel="KV cache\nused, %", ylim=(0, 105))
    requests.plot(times, series.running, color=blue, linestyle=solid, label="running")
    requests.plot(times, series.waiting, color=orange, linestyle=dashed, label="waiting")
    first = series.preemptions[0]
    counted = [count - first for count in series.preemptions]
    requests.plot(times, counted, color=purple, linestyle=points, linewidth=2, label="preemptions so far")
    requests.set(ylabel="requests")
    requests.set_ylim(bottom=0)
    held.plot(
        [time - start for time, _ in inside], [gib for _, gib in inside], color=green, linestyle=dotted, linewidth=1.6
    )
    held.set(ylabel=f"{memory},\nGiB", xlabel="seconds of traffic", xlim=(0, times[-1] or 1))
    held.set_ylim(0, max(gib for _, gib in inside) * 1.25)
    _legend(figure, ink)
    return figure


# ---- one number a request, or a load ----


def waits(*records: RunRecord, replayed: bool = False) -> Plot:
    """Each request's time to first token, by setting; how much of the prompts lay in the prefix cache beside it.

    Raises:
        ValueError: for a run without several loads.
    """
    _need_loads(records)
    groups = _groups(records)
    samples = [
        [ms for record in group.records for load in record.loads if load.latency for ms in load.latency.ttft_samples_ms]
        for group in groups
    ]
    shares = [_hit_share(group) for group in groups]
    labels = [group.label or "all requests" for group in groups]
    rows = tuple(
        (label, str(len(each)), _ms(statistics.median(each)), _ms(min(each)), _ms(max(each)), share)
        for label, each, share in zip(labels, samples, shares, strict=True)
    )
    each = [
        f"{label}: median {_ms(statistics.median(found))}, prefix cache {share}"
        for label, found, share in zip(labels, samples, shares, strict=True)
    ]
    return Plot(
        title="Time to first token, request by request",
        alt="; ".join(each) + ".",
        caption=plots.caption(records, replayed),
        table=Table(
            "Time to first token", ("setting", "requests", "median", "least", "most", "from the prefix cache"), rows
        ),
        draw=lambda ink: _draw_strip(labels, samples, "time to first token, ms", ink),
    )


def _hit_share(group: _Group) -> str:
    loads = [load for record in group.records for load in record.loads]
    asked = sum(load.prefix_cache_queries or 0 for load in loads)
    return (
        f"{sum(load.prefix_cache_hits or 0 for load in loads) / asked:.0%} of the tokens" if asked else "not looked up"
    )


def throughput(*records: RunRecord, replayed: bool = False) -> Plot:
    """Output tokens a second of each load, by setting, with the preemptions beside it.

    Raises:
        ValueError: for a run without several loads.
    """
    _need_loads(records)
    groups = _groups(records)
    loads = [[load for record in group.records for load in record.loads if load.latency] for group in groups]
    samples = [[load.latency.output_tokens_per_s for load in found] for found in loads]
    preempted = [_spread([load.preemptions or 0 for load in found], str) for found in loads]
    labels = [group.label or "all loads" for group in groups]
    rows = tuple(
        (label, str(len(found)), f"{statistics.median(found):,.0f}", f"{min(found):,.0f}", f"{max(found):,.0f}", count)
        for label, found, count in zip(labels, samples, preempted, strict=True)
    )
    each = [
        f"{label}: median {statistics.median(found):,.0f} tokens a second"
        for label, found in zip(labels, samples, strict=True)
    ]
    return Plot(
        title="Output tokens a second, load by load",
        alt="; ".join(each) + ".",
        caption=plots.caption(records, replayed),
        table=Table(
            "Output tokens a second", ("setting", "loads", "median", "least", "most", "preemptions in a load"), rows
        ),
        draw=lambda ink: _draw_strip(labels, samples, "output tokens a second", ink),
    )


def _draw_strip(labels, samples, unit: str, ink: str) -> Figure:
    figure, axes = plots.subplots(ink, 7.5, 1.1 + 0.55 * len(labels))
    for row, (values, (colour, _)) in enumerate(zip(samples, itertools.cycle(LINES), strict=False)):
        middle = statistics.median(values)
        axes.plot(values, [row] * len(values), MARKERS[row % len(MARKERS)], color=colour, markersize=5, alpha=0.6)
        axes.plot([middle, middle], [row - 0.3, row + 0.3], color=ink, linewidth=2)
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel=unit + " (bar: median)", ylim=(len(labels) - 0.4, -0.6))
    axes.set_xlim(left=0)
    return figure


# ---- what a pool holds ----


def pool_table(*records: RunRecord) -> Table:
    """Each pool in GiB, in tokens as vLLM states it and by the bytes of a token, and what its concurrency means."""
    rows = []
    for record, label in zip(records, plots.labels(*records), strict=True):
        kv, size = record.kv, _pool_gib(record)
        longest = record.flags.resolved.get("max_model_len")
        by_bytes = _tokens_by_bytes(record, size)
        rows.append(
            (
                label or record.model.name,
                "" if size is None else show_gib(size),
                "" if not kv or kv.tokens is None else show_tokens(kv.tokens),
                "" if by_bytes is None else show_tokens(by_bytes),
                "" if not kv or kv.max_concurrency is None else f"{kv.max_concurrency:.2f} × {show_tokens(longest)}",
            )
        )
    header = ("run", "pool", "tokens as stated", "tokens by their bytes", "requests of full length")
    return Table("What the pool holds", header, tuple(rows))


def _pool_gib(record: RunRecord) -> float | None:
    """The pool as it was given, to the byte; else as stated, which the log rounds."""
    if record.stated is None or not record.stated.pool_given:
        return record.stated.kv_cache_gib if record.stated else None
    given = record.flags.resolved.get("kv_cache_memory_bytes")
    return record.stated.kv_cache_gib if given is None else given / GIB


def _tokens_by_bytes(record: RunRecord, pool_gib: float | None) -> int | None:
    """The pool over the bytes that one token takes in every layer."""
    if pool_gib is None:
        return None
    try:
        shape = shapes.from_config(record.model.shape)
    except ShapeError:
        return None
    given = record.flags.resolved.get("kv_cache_dtype") or "auto"
    ranks = record.flags.resolved.get("tensor_parallel_size") or 1
    return int(pool_gib * GIB / shape.kv_bytes_per_token(given, tensor_parallel_size=ranks))
