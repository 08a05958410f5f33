"""Figures of run records: each is a function of records, and comes with alt text, a data table and a caption.

    >>> plots.timeline(record).save("timeline.svg")
    >>> plots.ledger(eager, graphs)            # in a notebook: the figure, and its numbers in a table under it
    >>> print(plots.ledger_table(eager, graphs))

Colours are mid-tones that reach 3:1 on a light and on a dark page and stay apart in the three kinds of colour
blindness; a hatch or a dash says the same as the colour. Text takes the colour of the page around it.
"""

import hashlib
import html
import io
import itertools
import re
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from memlab.ledger import TERMS, MemoryLedger
from memlab.record import Phase, RunRecord, Timeline
from memlab.tables import Table, capitalised
from memlab.units import GIB, show_gib

# Term to colour and hatch. `budget` is the planned part of what was seen; `headroom` is drawn as an outline.
STYLE = {
    "context": ("#8c8c8c", ""),
    "weights": ("#0b6fd0", ""),
    "non_torch": ("#9a8550", "xx"),
    "consumed": ("#0b6fd0", "/"),
    "activation": ("#e8440a", "\\\\"),
    "cuda_graphs_estimated": ("#a044cc", "oo"),
    "cuda_graphs_actual": ("#a044cc", "OO"),
    "kv_cache": ("#008f7a", ".."),
    "budget": ("#4f7f9c", "--"),
    "unprofiled": ("#a87b00", "++"),
}
LINES = (("#0b6fd0", "-"), ("#e8440a", "--"), ("#008f7a", "-."), ("#a044cc", ":"))
# Eight ranks have eight looks: the colours again, each with the next one's dash.
_RANKS = (*LINES, *((colour, LINES[(place + 1) % len(LINES)][1]) for place, (colour, _) in enumerate(LINES)))

_INK = "#010203"  # stands for the page's own text colour, which only the page knows
_serial = itertools.count(1)
_drawing = threading.Lock()  # a panel draws from its thread while a cell draws from the notebook's


@dataclass(frozen=True)
class Plot:
    """A figure with what a reader who cannot see it needs. Renders itself in a notebook and in the book.

    ``draw`` takes the colour of text and axes and returns the figure.
    """

    title: str
    alt: str
    caption: str
    table: Table
    draw: Callable[[str], Figure]

    def svg(self, uid: str | None = None) -> str:
        """An ``<svg>`` element to stand in a page; ``uid`` keeps its ids apart from other figures'."""
        raw = _render(self.draw(_INK), "svg").decode()
        raw = re.sub(r"<metadata>.*?</metadata>", "", raw[raw.index("<svg") :], flags=re.DOTALL)
        uid = uid or f"m{hashlib.sha256((raw + self.alt).encode()).hexdigest()[:8]}-{next(_serial)}"
        raw = re.sub(r'\bid="([^"]+)"', rf'id="{uid}-\1"', raw)
        raw = re.sub(r'(xlink:href="#|url\(#)', rf"\1{uid}-", raw)
        named = f'role="img" aria-labelledby="{uid}-title {uid}-desc"'
        opening = f'<svg {named} style="max-width:100%;height:auto;color:inherit" '
        described = f'<title id="{uid}-title">{html.escape(self.title)}</title>'
        described += f'<desc id="{uid}-desc">{html.escape(self.alt)}</desc>'
        raw = raw.replace("<svg ", opening, 1).replace(_INK, "currentColor")
        return re.sub(r"(<svg [^>]*>)", lambda match: match.group() + described, raw, count=1).strip()

    def html(self, uid: str | None = None) -> str:
        """The figure, its caption, and its numbers in a table that opens."""
        return (
            f'<figure class="memlab-figure" style="margin:1em 0">{self.svg(uid)}'
            f"<figcaption>{html.escape(self.caption)}</figcaption>"
            f"<details><summary>The numbers of this figure</summary>{self.table._repr_html_()}</details></figure>"
        )

    def png(self) -> bytes:
        """Dark on white, for places that take no SVG."""
        return _render(self.draw("#222222"), "png")

    def save(self, path) -> Path:
        """Write the figure to ``path``, whose ending says the format: .svg or .png.

        Raises:
            ValueError: for another ending.
        """
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text('<?xml version="1.0" encoding="utf-8"?>\n' + self.svg(), encoding="utf-8")
        elif path.suffix == ".png":
            path.write_bytes(self.png())
        else:
            raise ValueError(f"a figure is saved as .svg or .png, not as {path.name!r}")
        return path

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/html": self.html(), "image/png": self.png(), "text/plain": f"{self.alt}\n{self.caption}"}


def _render(figure: Figure, kind: str) -> bytes:
    out = io.BytesIO()
    with _drawing, matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memlab"}):
        if kind == "svg":
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        else:
            figure.savefig(out, format="png", dpi=144, facecolor="white")
    return out.getvalue()


# ---- words about records ----


def caption(records, replayed: bool) -> str:
    """Where the records come from, each origin once."""
    seen = dict.fromkeys(record.where() for record in records)
    return "; ".join(seen) + (" · replayed from the record" if replayed else "")


def labels(*records: RunRecord, short: bool = False) -> list[str]:
    """A name for each record: what it does not share with the others, by vLLM's names or ``short``."""
    facts = [_facts(record) for record in records]
    names = [name for name in dict.fromkeys(name for each in facts for name in each)]
    for each, record in zip(facts, records, strict=True):  # what one asked for, another has by default
        each.update({name: record.flags.resolved.get(name) for name in names if name not in each})
    differing = [name for name in names if len({str(each[name]) for each in facts}) > 1]
    telling = [name for name in differing if name != "extra"]  # arguments are told where nothing else tells
    if len({tuple(str(each[name]) for name in telling) for each in facts}) == len(records):
        differing = telling
    if len(records) > 1 and not differing:
        return [f"run {number}" for number in range(1, len(records) + 1)]
    say = short_fact if short else fact
    return [", ".join(filter(None, (say(name, each.get(name)) for name in differing))) for each in facts]


def names(*records: RunRecord) -> list[str]:
    """``labels`` that are short enough for a figure, in fewer words where vLLM's take too many; else the phase in which
    each failed; else runs by number, which a table has to explain."""
    for found, most in ((labels(*records), 40), (labels(*records, short=True), 52)):
        if max(map(len, found)) <= most:
            return found
    phases = [(record.finding or {}).get("phase") for record in records]
    if None not in phases and len(set(phases)) == len(phases):
        return phases
    return [f"run {number}" for number in range(1, len(records) + 1)]


def _facts(record: RunRecord) -> dict[str, object]:
    joined = _joined(record)
    return {
        "model": record.model.name,
        "vLLM": record.engine.vllm,
        "card": record.card or record.machine.gpu or "CPU backend",
        **record.flags.given,
        **({"joined": joined} if joined else {}),
        "repeat": record.repeat,
    }


def _joined(record: RunRecord) -> str | None:
    """How the GPUs of a run talk; None for one GPU, or where nobody knows."""
    if (record.machine.gpu_count or 0) < 2:
        return None
    if record.variables.get("NCCL_P2P_DISABLE") == "1":
        return "without peer access"
    return {"nvlink": "over NVLink", "pcie": "over PCIe"}.get(record.machine.link)


def fact(name: str, value) -> str:
    """A flag and its value in a few words."""
    if name == "enforce_eager":
        return "eager" if value else "CUDA graphs"
    if name == "extra":
        return " ".join(value or ()) or "no other argument"
    if name == "joined":
        return value or ""
    if name in ("model", "card"):
        return str(value)
    if name == "kv_cache_memory_bytes" and value is not None:
        return f"pool of {show_gib(value / GIB)}"
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {'unset' if value is None else value}"


_SHORT = {
    "gpu_memory_utilization": "utilization {}",
    "max_model_len": "length {:,}",
    "max_num_batched_tokens": "{:,} tokens a step",
    "max_num_seqs": "{:,} sequences",
    "kv_cache_dtype": "{} KV cache",
}


def short_fact(name: str, value) -> str:
    """A flag and its value in the fewest words that tell it."""
    if name == "enable_chunked_prefill":
        return "chunking" if value else "chunking off"
    if name == "long_prefill_token_threshold":
        return f"at most {value:,} of one prompt" if value else ""
    return _SHORT[name].format(value) if name in _SHORT and value is not None else fact(name, value)


def words(name: str) -> str:
    """A term or a phase as prose has it."""
    return (
        name.replace("_", " ").replace("cuda", "CUDA").replace("kv cache", "KV cache").replace("non torch", "non-torch")
    )


def difference(before: float, after: float) -> str:
    """From one size in GiB to another, with its sign; ``none`` where it is too small to show."""
    change = after - before
    return "none" if abs(change) < 0.005 else show_gib(change, signed=True)


def _of_stage(record: RunRecord, rank: int) -> dict:
    """The prediction of a rank: of its stage, where a pipeline has several."""
    prediction = record.prediction or {}
    stages = prediction.get("stages")
    return stages[rank // (record.served_flags.tensor_parallel_size or 1)] if stages else prediction


def predicted(record: RunRecord, rank: int = 0) -> MemoryLedger | None:
    """A rank's ledger as it was predicted before the run, where the record holds one."""
    ledger = _of_stage(record, rank).get("ledger")
    return MemoryLedger(**ledger) if isinstance(ledger, dict) else ledger


def views(record: RunRecord, rank: int = 0) -> list[MemoryLedger]:
    """A rank's ledgers that say anything: predicted, stated, seen."""
    measured = (record.ranks[rank].stated, record.ranks[rank].seen) if rank < len(record.ranks) else ()
    return [view for view in (predicted(record, rank), *measured) if view is not None and view.known()]


# ---- memory over time ----


def budget_line(record: RunRecord, rank: int = 0) -> tuple[str, float] | None:
    """Where the budget ends on the scale of the device's memory: its name and GiB, where the record states it.

    The budget starts above the context, which was taken before vLLM's first snapshot.
    """
    known = [view for view in (record.ranks[rank].stated, record.ranks[rank].seen) if view is not None]
    budget = next((view.budget_gib for view in known if view.budget_gib is not None), None)
    context = next((view.context_gib for view in known if view.context_gib is not None), None)
    if budget is None:
        return None
    return ("budget", budget) if context is None else ("context and budget", context + budget)


@dataclass(frozen=True)
class _Line:
    """One rank's memory over time; ``phases`` are (name, start, highest GiB in it), ``budget`` by ``budget_line``."""

    label: str
    time_s: list[float]
    used_gib: list[float]
    phases: list[tuple[str, float, float]]
    budget: tuple[str, float] | None = None

    @property
    def peak(self) -> tuple[float, float]:
        """GiB, and the seconds at which it was first reached."""
        highest = max(self.used_gib)
        return highest, self.time_s[self.used_gib.index(highest)]

    def phase_at(self, time_s: float) -> str:
        return next((name for name, start, _ in reversed(self.phases) if start <= time_s), "")


def _lines(records) -> list[_Line]:
    found = []
    for record, label in zip(records, names(*records), strict=True):
        for number, rank in enumerate(record.ranks):
            if rank.timeline is None or not rank.timeline.used_gib:
                continue
            parts = [label, f"rank {number}" if sum(one.timeline is not None for one in record.ranks) > 1 else ""]
            line = rank.timeline
            phases = _phases(record.phases, line)
            label_of_rank = ", ".join(filter(None, parts))
            found.append(_Line(label_of_rank, line.time_s, line.used_gib, phases, budget_line(record, number)))
    if not found:
        raise ValueError("no record here holds a timeline: it was recorded without sampling memory")
    return found


def _phases(phases: list[Phase], line: Timeline) -> list[tuple[str, float, float]]:
    """Phases with the most memory in each; a phase without a sample of its own takes the last one before it."""
    ends = [phase.start_s for phase in phases[1:]] + [float("inf")]
    found = []
    for phase, end in zip(phases, ends[: len(phases)], strict=True):
        inside = [gib for time, gib in zip(line.time_s, line.used_gib, strict=True) if phase.start_s <= time < end]
        before = [gib for time, gib in zip(line.time_s, line.used_gib, strict=True) if time < phase.start_s]
        found.append((words(phase.name), phase.start_s, max(inside) if inside else (before or [0.0])[-1]))
    return found


def memory_name(records) -> str:
    """What the records' timelines measured: host or device memory."""
    measures = {rank.timeline.measure for record in records for rank in record.ranks if rank.timeline is not None}
    return "host memory" if measures == {"host"} else "device memory"


def timeline(record: RunRecord, *more: RunRecord, replayed: bool = False) -> Plot:
    """Memory over time of each rank, baseline subtracted, in GiB; the phases of the run that came furthest are marked.

    Raises:
        ValueError: where no record holds a timeline.
    """
    records = (record, *more)
    lines = _lines(records)
    memory = memory_name(records)
    rows = [
        (line.label or record.model.name, name, f"{start:.1f} s", show_gib(highest))
        for line in lines
        for name, start, highest in (*line.phases, ("peak", line.peak[1], line.peak[0]))
    ]
    header = ("run", "phase", "from", f"most {memory}")
    return Plot(
        title=f"{capitalised(memory)} over time",
        alt=_timeline_alt(lines, memory),
        caption=caption(records, replayed),
        table=Table(f"{capitalised(memory)} by phase, baseline subtracted", header, tuple(rows)),
        draw=lambda ink: _draw_timeline(lines, memory, budget_line(record), ink),
    )


def live(timelines: list[Timeline], phases: list[Phase]) -> Plot:
    """Memory over time of a run that goes on, a line for each rank.

    Raises:
        ValueError: where nothing was sampled yet.
    """
    names = [f"GPU {number}" if len(timelines) > 1 else "" for number in range(len(timelines))]
    lines = [
        _Line(name, line.time_s, line.used_gib, _phases(phases, line))
        for name, line in zip(names, timelines, strict=True)
        if line.used_gib
    ]
    if not lines:
        raise ValueError("nothing was sampled yet")
    memory = "host memory" if timelines[0].measure == "host" else "device memory"
    rows = [(line.label or "so far", show_gib(line.used_gib[-1]), show_gib(line.peak[0])) for line in lines]
    return Plot(
        title=f"{capitalised(memory)} so far",
        alt=_timeline_alt(lines, memory),
        caption="A run that goes on",
        table=Table(f"{capitalised(memory)} so far", ("", "now", "peak"), tuple(rows)),
        draw=lambda ink: _draw_timeline(lines, memory, None, ink),
    )


def _marked(lines: list[_Line]) -> _Line:
    """The line whose phases are marked: one that was refused or stopped early has few to show."""
    return max(lines, key=lambda line: len(line.phases))


def _timeline_alt(lines, memory: str) -> str:
    sentences = []
    for line in lines:
        peak, time = line.peak
        phase = line.phase_at(time)
        who = f" of {line.label}" if line.label else ""
        during = f", in the phase {phase}" if phase else ""
        sentence = f"The {memory}{who} peaks at {show_gib(peak)} after {time:.1f} s{during}"
        if line.budget:
            name, end = line.budget
            above = peak - end
            side = "above" if above > 0 else "below"
            distance = "level with" if abs(above) < 0.005 else f"{show_gib(abs(above))} {side}"
            sentence += f", {distance} {name} ({show_gib(end)})"
        sentences.append(sentence + ".")
    marked = _marked(lines)
    steps = ", ".join(f"{name} {show_gib(highest)}" for name, _, highest in marked.phases)
    if steps:
        sentences.append(f"Highest in each phase{' of ' + marked.label if marked.label else ''}: {steps}.")
    return " ".join(sentences)


def subplots(ink: str, width: float, height: float):
    """A figure of that many inches and its axes, whose text and lines have the colour ``ink``."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    dress(axes, ink)
    return figure, axes


def dress(axes, ink: str) -> None:
    """Axes as every figure here has them: on the page's own ground, two spines, the colour ``ink``."""
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(ink)
    axes.tick_params(colors=ink, labelcolor=ink)
    axes.xaxis.label.set_color(ink)
    axes.yaxis.label.set_color(ink)


def _draw_timeline(lines, memory: str, budget, ink: str) -> Figure:
    figure, axes = subplots(ink, 7.5, 4.4)
    top = max(line.peak[0] for line in lines)
    end = max(line.time_s[-1] for line in lines)
    marked = _marked(lines)
    alike = len({tuple(start for _, start, _ in line.phases) for line in lines}) == 1  # ranks of one run
    labels = [f"{line.label} (phases marked)" if line is marked and not alike else line.label for line in lines]
    for line, label, (colour, dash) in zip(lines, labels, itertools.cycle(_RANKS), strict=False):
        axes.plot(line.time_s, line.used_gib, color=colour, linestyle=dash, linewidth=1.8, label=label or None)
        axes.plot([line.peak[1]], [line.peak[0]], "o", color=colour, markersize=6)
    highest = max(lines, key=lambda line: line.peak[0])
    late = highest.peak[1] > 0.7 * end
    crossed = budget and 0 < budget[1] - highest.peak[0] < 0.1 * top  # by the budget's line: the name goes above it
    axes.annotate(
        f"peak {show_gib(highest.peak[0])}",
        (highest.peak[1], budget[1] if crossed else highest.peak[0]),
        xytext=(-8 if late else 8, 7),
        textcoords="offset points",
        ha="right" if late else "left",
        color=ink,
        weight="bold",
    )
    if budget:
        top = max(top, budget[1])
        axes.axhline(budget[1], color=ink, linestyle=(0, (6, 3)), linewidth=1)
        left, above = _budget_name_at(lines, highest, budget[1], end)
        axes.annotate(
            f"{budget[0]} {show_gib(budget[1])}",
            (0 if left else end * 1.01, budget[1]),
            xytext=(4 if left else -4, 6 if above else -4),
            textcoords="offset points",
            ha="left" if left else "right",
            va="bottom" if above else "top",
            color=ink,
        )
    axes.set(xlabel="seconds since the start", ylabel=f"{memory}, GiB", xlim=(0, end * 1.01), ylim=(0, top * 1.12))
    _mark_phases(axes, marked.phases, end, ink)
    if len(lines) > 1:
        columns = max(1, 70 // (8 + max(map(len, labels))))
        columns = min(columns, len(lines))
        figure.legend(loc="outside lower left", ncols=columns, frameon=False, labelcolor=ink)
    return figure


def _budget_name_at(lines, highest, budget: float, end: float) -> tuple[bool, bool]:
    """Whether the budget's name stands on the left, and whether above its line: where no curve nor the peak's name is.

    Its place is below the line on the left, before any curve has risen. Where one rises early, it goes above the line,
    on the side that the peak's name leaves free. Each name takes less than 0.4 of the width.
    """
    under = any(
        second < 0.4 * end and 0.85 * budget < gib
        for line in lines
        for second, gib in zip(line.time_s, line.used_gib, strict=True)
    )
    peak = highest.peak[1] / end
    named = (peak - 0.25, peak) if peak > 0.7 else (peak, peak + 0.25)
    return not under or named[0] > 0.4, under


def _mark_phases(axes, phases, end: float, ink: str) -> None:
    """A dotted line where each phase starts, its name slanted above; names that would collide move to the right."""
    place = -1.0
    for name, start, _ in phases:
        place = max(start / (end * 1.01), place + 0.045)
        axes.axvline(start, color=ink, linestyle=":", linewidth=0.8, alpha=0.7)
        axes.annotate(
            name,
            (start / (end * 1.01), 1),
            xytext=(place, 1.05),
            xycoords="axes fraction",
            textcoords="axes fraction",
            rotation=40,
            ha="left",
            va="bottom",
            rotation_mode="anchor",
            fontsize=9,
            color=ink,
            arrowprops={
                "arrowstyle": "-",
                "linestyle": ":",
                "color": ink,
                "linewidth": 0.8,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )


# ---- the ledger ----


def segments(view: MemoryLedger) -> list[tuple[str, float]]:
    """What a bar of this view stacks, from zero on: term and GiB.

    Predicted and stated show the terms of the budget, on the context. Seen shows how far the peak fills the budget and
    what it takes beyond; where no budget is known, the peak is one piece.
    """
    found = [("context", view.context_gib)]
    if view.view == "seen":
        if view.budget_gib is None or view.unprofiled_gib is None:
            found.append(("peak", (view.peak_gib or 0) - (view.context_gib or 0)))
        else:
            found += [
                ("budget", view.budget_gib + min(0.0, view.unprofiled_gib)),
                ("unprofiled", max(0.0, view.unprofiled_gib)),
            ]
    else:
        found += view.resident().items()
        found.append(("activation", view.activation_gib))
        if view.graphs_subtracted:
            found.append(("cuda_graphs_estimated", view.cuda_graphs_estimated_gib))
        found.append(("kv_cache", view.kv_cache_gib))
        if not view.graphs_subtracted:
            # Nothing was put aside for them: they are taken on top of the budget.
            found.append(("cuda_graphs_actual", view.cuda_graphs_actual_gib))
    return [(name, size) for name, size in found if size]


def context_of(record: RunRecord, rank: int = 0) -> float:
    """A rank's context in GiB, as seen, else as predicted; 0 where nobody knows it."""
    return next((view.context_gib for view in reversed(views(record, rank)) if view.context_gib is not None), 0.0)


@dataclass(frozen=True)
class Bar:
    """``context_gib`` is the record's: a bar whose view does not know it leaves that much room before it starts."""

    label: str
    view: MemoryLedger
    context_gib: float

    @property
    def start(self) -> float:
        return self.context_gib if self.view.context_gib is None else 0.0

    @property
    def end(self) -> float:
        return self.start + sum(size for _, size in segments(self.view))

    @property
    def budget_end(self) -> float | None:
        context = self.context_gib if self.view.context_gib is None else self.view.context_gib
        return None if self.view.budget_gib is None else context + self.view.budget_gib


def ledger(*records: RunRecord, replayed: bool = False) -> Plot:
    """Stacked bars in GiB, one a record and view: what vLLM stated beside what the driver saw.

    Raises:
        ValueError: where no record holds a ledger.
    """
    bars = [
        Bar("\n".join(filter(None, [label, view.view])), view, context_of(record))
        for record, label in zip(records, names(*records), strict=True)
        for view in views(record)
    ]
    if not bars:
        raise ValueError("no record here holds a ledger: vLLM stopped before it stated one, and nothing was sampled")
    return Plot(
        title="Memory by term",
        alt=" ".join(filter(None, [_ledger_alt(bars), _largest_difference(records)])),
        caption=caption(records, replayed) + _first_rank(records),
        table=ledger_table(*records),
        draw=lambda ink: draw_bars(bars, ink),
    )


def _first_rank(records) -> str:
    """What a caption adds where a bar is one rank's of several."""
    most = max(len(record.ranks) for record in records)
    return f" · the first of {most} ranks" if most > 1 else ""


def _ledger_alt(bars) -> str:
    sentences = []
    for bar in bars:
        name = bar.label.replace("\n", ", ")
        parts = segments(bar.view)
        if parts:
            largest, size = max(parts, key=lambda part: part[1])
            each = ", ".join(f"{words(term)} {show_gib(gib)}" for term, gib in parts)
            sentences.append(f"{capitalised(name)}: {words(largest)} is largest with {show_gib(size)}; {each}.")
        if bar.view.headroom_gib is not None:
            sentences.append(f"Headroom {show_gib(bar.view.headroom_gib)}.")
    return " ".join(sentences)


def _largest_difference(records) -> str:
    """The finding of a comparison of two: the stated term that moved most."""
    if len(records) != 2 or None in (records[0].stated, records[1].stated):
        return ""
    before, after = (dict(segments(record.stated)) for record in records)
    changes = {name: after[name] - before[name] for name in before if name in after}
    if not changes:
        return ""
    name = max(changes, key=lambda name: abs(changes[name]))
    first, second = names(*records)
    return f"From {first} to {second}, {words(name)} changes most: {difference(before[name], after[name])}."


def wrapped(label: str, width: int = 34) -> str:
    """A label in lines of about so many characters, broken after its commas."""
    lines = []
    for line in label.split("\n"):
        parts = textwrap.wrap(line.replace(" ", "\xa0").replace(",\xa0", ", "), width, break_long_words=False)
        lines += [part.replace("\xa0", " ") for part in parts]
    return "\n".join(lines)


def draw_bars(bars: list[Bar], ink: str, each: float = 0.72) -> Figure:
    """Stacked bars, one below the other, ``each`` of so many inches."""
    figure, axes = subplots(ink, 7.5, 1.7 + each * len(bars))
    longest = max(max(bar.end, bar.budget_end or 0) for bar in bars)
    limit = 1.18 * longest
    used = {}
    for row, bar in enumerate(bars):
        left, place = bar.start, -0.025 * limit
        for name, size in segments(bar.view):
            colour, hatch = STYLE.get(name, STYLE["budget"])
            axes.barh(row, size, 0.56, left, color=colour, hatch=hatch, edgecolor=ink, linewidth=0.7)
            used[name] = Patch(facecolor=colour, hatch=hatch, edgecolor=ink, linewidth=0.7, label=words(name))
            # A number wider than its piece moves to the right of the one before it.
            place = max(left + size / 2, place + 0.055 * limit)
            axes.text(place, row - 0.31, f"{size:.2f}", ha="center", va="bottom", fontsize=9, color=ink)
            left += size
        _draw_headroom(axes, row, left, bar, limit, ink)
        if bar.budget_end is not None:
            axes.plot([bar.budget_end] * 2, [row - 0.28, row + 0.4], color=ink, linewidth=2.2)
    axes.set_yticks(range(len(bars)), [wrapped(bar.label) for bar in bars])
    has_budget = any(bar.budget_end is not None for bar in bars)
    xlabel = "GiB; a heavy line ends context and budget" if has_budget else "GiB"
    axes.set(xlabel=xlabel, xlim=(0, limit), ylim=(len(bars) - 0.5, -0.62))
    order = [name for name in TERMS if name in used]
    figure.legend(
        handles=[used[name] for name in order], loc="outside lower center", ncols=4, frameon=False, labelcolor=ink
    )
    return figure


def _draw_headroom(axes, row: int, left: float, bar: Bar, limit: float, ink: str) -> None:
    """An outline of what stayed free; where it is longer than the picture, it runs off the edge."""
    headroom = bar.view.headroom_gib
    if headroom is None:
        return
    fits = left + headroom <= limit
    axes.barh(row, headroom, 0.56, left, fill=False, edgecolor=ink, linestyle=":", linewidth=1.2, clip_on=True)
    text = f"headroom\n{show_gib(headroom)}" + ("" if fits else " →")
    clear = max(left, bar.budget_end or 0.0)  # of the heavy line, which a peak below the budget leaves in the outline
    axes.text(clear + 0.01 * limit, row, text, ha="left", va="center", fontsize=8.5, color=ink)


def ledger_table(*records: RunRecord) -> Table:
    """Each term that is known, in GiB, with the difference.

    Of one record the columns are its views, and the difference is stated less predicted. Of several the columns are
    the records, and the difference is the last less the first.
    """
    if len(records) == 1:
        known = {view.view: view for view in views(records[0])}
        lines = [(words(term), [view.term(term) for view in known.values()]) for term in TERMS]
        comparable = {"predicted", "stated"} <= known.keys()
        pair = [list(known).index(name) for name in ("predicted", "stated")] if comparable else []
        columns, first = list(known), "term"
        meaning = "difference: stated less predicted" if pair else ""
    else:
        columns = names(*records)
        each = [{view.view: view for view in views(record)} for record in records]
        lines = [
            (f"{words(term)}, {view}", [ledgers[view].term(term) if view in ledgers else None for ledgers in each])
            for view in ("predicted", "stated", "seen")
            for term in TERMS
        ]
        pair, first = [0, len(records) - 1], "term and view"
        meaning = "difference: the last less the first"
    rows = []
    for name, values in lines:
        if all(value is None for value in values):
            continue
        cells = ["" if value is None else show_gib(value) for value in values]
        if pair:
            before, after = (values[index] for index in pair)
            known = before is not None and after is not None
            cells.append(difference(before, after) if known else "")
        rows.append((name, *cells))
    header = (first, *columns, *(["difference"] if pair else []))
    memory = "Memory of one GPU" if any(record.machine.gpu for record in records) else "Host memory"
    return Table(f"{memory} by term" + (f"; {meaning}" if meaning else ""), header, tuple(rows))


# Why a term's prediction differs from what vLLM stated or the driver saw.
_WHY = {
    "budget": "total × gpu_memory_utilization, exact",
    "context": "driver, libraries and card decide it; nobody plans it",
    "weights": "parameters × bytes, and what loading adds",
    "non_torch": "libraries decide it",
    "consumed": "weights and buffers are counted, memory outside PyTorch is estimated",
    "activation": "the profiled step; its kernels decide the last percent",
    "cuda_graphs_estimated": "vLLM captures a few and extrapolates; the planner's rule is fitted",
    "cuda_graphs_actual": "captured after the pool was taken",
    "kv_cache": "the rest of the budget: it takes every other term's error, with the opposite sign",
    "unprofiled": "what the run took beyond the plan: no rule predicts it",
}


def reconcile(record: RunRecord, rank: int = 0) -> Table:
    """Each term of one rank as predicted, stated and seen, whether the first is in its band, and why they differ."""
    known = {view.view: view for view in views(record, rank)}
    bands = _of_stage(record, rank).get("bands", {})
    stated = known.get("stated")
    given = bool(stated and stated.pool_given)
    rows = []
    for term, why in _WHY.items():
        values = [known[view].term(term) if view in known else None for view in ("predicted", "stated", "seen")]
        if values == [None] * 3:
            continue
        measured = next((value for value in values[1:] if value is not None), None)
        off = "" if None in (values[0], measured) else difference(values[0], measured)
        band, held = bands.get(term), ""
        if band and measured is not None:
            held = "yes" if band[0] - 0.005 <= measured <= band[1] + 0.005 else "no"
        if term == "kv_cache" and given:
            why = "its size was given in bytes"
        cells = ["" if value is None else show_gib(value) for value in values]
        rows.append((words(term), *cells, off, held, why))
    header = ("term", "predicted", "stated", "seen", "measured less predicted", "in the band", "why they differ")
    return Table("Predicted, stated and seen", header, tuple(rows))
