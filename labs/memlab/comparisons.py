"""Figures over many runs: what a flag moves, and how memory and latency follow a size. See ``plots`` for the form."""

from dataclasses import dataclass

from matplotlib.patches import Patch

from memlab import plots
from memlab.plots import STYLE, Plot, Table, words
from memlab.record import RunRecord
from memlab.units import show_tokens

# What a budget is made of, as stated; a change of one is paid by the others, or by the budget itself.
_PARTS = ("consumed", "activation", "cuda_graphs_estimated", "kv_cache")


@dataclass(frozen=True)
class _Move:
    """What one change of flags did to each stated term, in GiB, and to the pool in tokens."""

    label: str
    terms: dict[str, float]
    tokens: int | None


def _move(base: RunRecord, other: RunRecord) -> _Move:
    before, after = base.stated, other.stated
    terms = {}
    for name in _PARTS:
        values = before.term(name), after.term(name)
        if values != (None, None):
            terms[name] = (values[1] or 0.0) - (values[0] or 0.0)
    tokens = None
    if base.kv and other.kv and None not in (base.kv.tokens, other.kv.tokens):
        tokens = other.kv.tokens - base.kv.tokens
    return _Move(_change(base, other), terms, tokens)


def _change(base: RunRecord, other: RunRecord) -> str:
    """What was asked of ``other`` and not of ``base``."""
    before, after = base.flags.given, other.flags.given
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    parts = [plots.fact(name, after.get(name, other.flags.resolved.get(name))) for name in names]
    if base.model.name != other.model.name:
        parts.insert(0, other.model.name)
    return ", ".join(parts) or "the same again"


def moves(base: RunRecord, *others: RunRecord, replayed: bool = False) -> Plot:
    """What each change moved from ``base``, term by term: bars to the right grew, bars to the left shrank.

    Raises:
        ValueError: where a run stated no ledger.
    """
    if not others or any(run.stated is None for run in (base, *others)):
        raise ValueError("what a flag moved needs two runs or more whose vLLM stated its memory")
    found = [_move(base, other) for other in others]
    header = ("change", *(words(name) for name in _PARTS), "KV cache in tokens")
    rows = tuple(
        (
            move.label,
            *(plots.difference(0.0, move.terms[name]) if name in move.terms else "" for name in _PARTS),
            "" if move.tokens is None else ("+" if move.tokens > 0 else "−") + show_tokens(abs(move.tokens)),
        )
        for move in found
    )
    return Plot(
        title="What each flag moves",
        alt=" ".join(_move_alt(move) for move in found),
        caption=plots.caption((base, *others), replayed),
        table=Table("Stated by vLLM: the change from the first run, by term", header, rows),
        draw=lambda ink: _draw_moves(found, ink),
    )


def _move_alt(move: _Move) -> str:
    each = [f"{words(name)} {plots.difference(0.0, gib)}" for name, gib in move.terms.items() if abs(gib) >= 0.005]
    return f"{plots.capitalised(move.label)}: {', '.join(each) or 'nothing moves'}."


def _draw_moves(found, ink: str):
    figure, axes = plots.subplots(ink, 7.5, 1.5 + 0.62 * len(found))
    used = {}
    for row, move in enumerate(found):
        ends = {True: 0.0, False: 0.0}
        for name, gib in move.terms.items():
            if abs(gib) < 0.005:
                continue
            colour, hatch = STYLE[name]
            axes.barh(row, gib, 0.6, ends[gib > 0], color=colour, hatch=hatch, edgecolor=ink, linewidth=0.7)
            ends[gib > 0] += gib
            used[name] = Patch(facecolor=colour, hatch=hatch, edgecolor=ink, linewidth=0.7, label=words(name))
        text = f" KV cache {plots.difference(0.0, move.terms.get('kv_cache', 0.0))}"
        axes.text(ends[True], row, text, ha="left", va="center", fontsize=9, color=ink)
    axes.axvline(0, color=ink, linewidth=1)
    axes.set_yticks(range(len(found)), [move.label for move in found])
    low = min(sum(min(0.0, gib) for gib in move.terms.values()) for move in found)
    high = max(sum(max(0.0, gib) for gib in move.terms.values()) for move in found)
    span = high - low
    axes.set(xlabel="change in GiB", xlim=(low - 0.05 * span, high + 0.35 * span), ylim=(len(found) - 0.4, -0.6))
    order = [used[name] for name in _PARTS if name in used]
    figure.legend(handles=order, loc="outside lower center", ncols=4, frameon=False, labelcolor=ink)
    return figure
