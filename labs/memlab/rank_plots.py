"""Figures of runs on several GPUs: each rank's memory beside the others', and how far they are apart.

See ``plots`` for the form. vLLM gives every rank as many blocks as the rank with the fewest has room for
(vllm/v1/core/kv_cache_planning.py, 0.33:1581-1597), so what the others have beyond that stays unused.
"""

from collections.abc import Callable
from dataclasses import dataclass

from memlab import plots
from memlab.plots import Bar, Plot, words
from memlab.record import Rank, RunRecord
from memlab.tables import Table, capitalised
from memlab.units import show_gib

_SHOWN_GIB = 0.005  # less than this does not show in a size


@dataclass(frozen=True)
class _Column:
    """A size that each rank has, in GiB; ``of`` returns None where a rank does not know it."""

    name: str
    of: Callable[[Rank], float | None]


def _term(view: str, term: str) -> _Column:
    def of(rank: Rank) -> float | None:
        ledger = getattr(rank, view)
        return None if ledger is None else ledger.term(term)

    return _Column(f"{words(term)}, {view}", of)


def _beside_weights(rank: Rank) -> float | None:
    """Buffers and what lies outside PyTorch, the collectives' among it: ``consumed`` less the weights."""
    stated = rank.stated
    if stated is None or stated.weights_gib is None:
        return None
    return stated.non_torch_gib if stated.consumed_gib is None else stated.consumed_gib - stated.weights_gib


_COLUMNS = (
    _term("seen", "context"),
    _term("stated", "weights"),
    _Column("buffers and non-torch, stated", _beside_weights),
    _term("stated", "activation"),
    _term("stated", "cuda_graphs_actual"),
    _term("stated", "kv_cache"),
    _term("seen", "peak"),
    _term("seen", "unprofiled"),
    _term("seen", "headroom"),
)


def ranks(record: RunRecord, *more: RunRecord, replayed: bool = False) -> Plot:
    """Each rank's ledger of one or several runs: predicted for its stage, stated and seen, with their imbalance.

    Raises:
        ValueError: where a run has one rank alone, or none that says anything.
    """
    records = (record, *more)
    if any(len(one.ranks) < 2 for one in records):
        raise ValueError("a figure of ranks needs a run on several: this one has one GPU")
    named = list(zip(records, plots.names(*records), strict=True))
    bars = [bar for one, label in named for bar in _bars(one, label)]
    if not bars:
        raise ValueError("no rank here holds a ledger: vLLM stopped before it stated one, and nothing was sampled")
    return Plot(
        title="Memory of each rank",
        alt=" ".join(_alt(one, label) for one, label in named),
        caption=plots.caption(records, replayed),
        table=table(*records),
        draw=lambda ink: plots.draw_bars(bars, ink, each=0.5),
    )


def _whole_host(record: RunRecord) -> bool:
    """Whether memory was seen of the host as a whole, so that the first rank's stands for all."""
    timeline = record.ranks[0].timeline
    return timeline is not None and timeline.measure == "host"


def _bars(record: RunRecord, label: str) -> list[Bar]:
    """A stage's prediction goes before its ranks, the host's memory after all of them."""
    per_stage = record.served_flags.tensor_parallel_size or 1
    several, whole = len(record.ranks) > per_stage, _whole_host(record)
    found = []
    for number, rank in enumerate(record.ranks):
        if number % per_stage == 0:
            stage = f"stage {number // per_stage + 1}" if several else "every rank"
            found.append((stage, plots.predicted(record, number), number))
        found.append((f"rank {number}", rank.stated, number))
        if not whole:
            found.append((f"rank {number}", rank.seen, number))
    if whole:
        found.append(("host", record.seen, 0))
    return [
        Bar("\n".join(filter(None, [label, f"{who}, {view.view}"])), view, plots.context_of(record, number))
        for who, view, number in found
        if view is not None and view.known()
    ]


def _values(record: RunRecord, column: _Column) -> dict[int, float]:
    """What each rank has in a column, by its number. The host's memory is no rank's."""
    if column.name.endswith(", seen") and _whole_host(record):
        return {}
    return {number: value for number, rank in enumerate(record.ranks) if (value := column.of(rank)) is not None}


def _alt(record: RunRecord, label: str) -> str:
    sentences = [f"{capitalised(label) + ': ' if label else ''}{len(record.ranks)} ranks."]
    for column in _COLUMNS:
        values = _values(record, column)
        if not values or max(map(abs, values.values())) < _SHOWN_GIB:
            continue
        least, most = min(values, key=values.get), max(values, key=values.get)
        apart = values[most] - values[least]
        if len(values) < len(record.ranks):
            each = ", ".join(f"{show_gib(value)} on rank {number}" for number, value in values.items())
        elif apart < _SHOWN_GIB:
            each = f"{show_gib(values[least])} on each"
        else:
            each = f"{show_gib(values[least])} on rank {least} to {show_gib(values[most])} on rank {most}"
        sentences.append(f"{capitalised(column.name)}: {each}.")
    if _whole_host(record) and record.seen is not None:
        sentences.append(f"The host's memory, seen as a whole, peaks at {show_gib(record.seen.peak_gib)}.")
    return " ".join(sentences)


def table(record: RunRecord, *more: RunRecord) -> Table:
    """A row for each rank and, below, how far the ranks of a run are apart; a column for each size that is known."""
    records = (record, *more)
    known = [column for column in _COLUMNS if any(_values(one, column) for one in records)]
    rows = []
    for one, label in zip(records, plots.names(*records), strict=True):
        values = [_values(one, column) for column in known]
        for number in range(len(one.ranks)):
            cells = [show_gib(each[number]) if number in each else "" for each in values]
            rows.append((", ".join(filter(None, [label, f"rank {number}"])), *cells))
        apart = [max(each.values()) - min(each.values()) if len(each) > 1 else None for each in values]
        cells = ["" if gib is None else "none" if gib < _SHOWN_GIB else show_gib(gib) for gib in apart]
        rows.append((", ".join(filter(None, [label, "most less least"])), *cells))
    header = ("rank", *(column.name for column in known))
    return Table("Memory of each rank, in GiB", header, tuple(rows))
