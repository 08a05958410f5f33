"""What ran out, when, and what to change: vLLM's output to findings.

``diagnose`` reads text line by line and keeps of it what states memory and what failed, so the length of a log does
not matter. ``RULES`` says for each phase what its failure means, which remedies help, and which advice cannot;
``REMEDIES`` says what each costs and gains. The parts: ``findings`` are the results, ``facts`` what is known at a
failure, ``remedies`` and ``doctor_rules`` the knowledge, ``episodes`` the reading, ``failing_step`` and ``failures``
the conclusions.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from memlab import cards, flags, launch, shapes
from memlab.doctor_report import report
from memlab.doctor_rules import HARMLESS, RULES, START, TRACEBACK, Rule
from memlab.episodes import Reader, Run
from memlab.errors import ShapeError
from memlab.facts import Context, Facts, engine_generation
from memlab.failures import failures_of
from memlab.findings import CONFIDENCE, Diagnosis, Evidence, Failure, Fix, evidence
from memlab.ledger import MemoryLedger
from memlab.remedies import REMEDIES, Remedy
from memlab.units import show_gib
from memlab.vllm_log import Event, StatedKV, engine, parse, ranks, stated_kv, stated_ledger

__all__ = (
    "CONFIDENCE", "HARMLESS", "REMEDIES", "RULES", "Diagnosis", "Evidence", "Facts", "Failure", "Fix", "Reader",
    "Remedy", "Rule", "diagnose", "engine_generation", "finding", "report", "weak_spot",
)  # fmt: skip

Command = str | list[str] | flags.ServeFlags | None


def _context(
    command: Command, config: Mapping | None, card: str | cards.Card | None, total_gib: float | None
) -> Context:
    given: dict[str, object] = {}
    if isinstance(command, flags.ServeFlags):
        given = command.set()
    elif command:
        words = command if isinstance(command, str) else shlex.join(command)
        bare = words.lstrip().startswith("-")
        given = launch.read(f"vllm serve model {words}" if bare else words).flags.set()
    shape = None
    if config:
        try:
            shape = shapes.from_config(dict(config))
        except (ShapeError, KeyError, TypeError):
            shape = None
    return Context(given, shape, cards.find(card) if isinstance(card, str) else card, total_gib)


def diagnose(
    source: str | Iterable[str] | Iterable[Event],
    command: Command = None,
    config: Mapping | None = None,
    card: str | cards.Card | None = None,
    total_gib: float | None = None,
) -> Diagnosis:
    """What a text shows of vLLM's memory.

    Args:
        source: the text, its lines, or events of ``vllm_log``; read once, in order.
        command: the command line or its flags, for what the log does not state; with ``card``, as meant for that card.
        config: the model's ``config.json``, parsed, so that gains can be computed by the planner.
        card: the card that the GPU plays (``cards.CARDS``); utilizations are then shares of that card.
        total_gib: the real card's memory as CUDA reports it, for a log that does not state it.

    Raises:
        FlagError: for a command line that vLLM would refuse.
        MemlabError: for a card of no or of several.
    """
    lines = source.split("\n") if isinstance(source, str) else source
    reader = Reader()
    for event in _events(lines):
        reader.add(event)
    return _conclude(reader, _context(command, config, card, total_gib))


def _events(source: Iterable) -> Iterator[Event]:
    source = iter(source)
    first = next(source, None)
    if first is None:
        return
    rest = _chained(first, source)
    yield from rest if isinstance(first, Event) else parse(rest)


def _chained(first, rest: Iterator) -> Iterator:
    yield first
    yield from rest


_NOT_FATAL = ("preemption_not_oom", "undetermined")


def _conclude(reader: Reader, context: Context) -> Diagnosis:
    failures: list[Failure] = []
    blamed: Run | None = None
    for run in reader.runs:
        found = failures_of(run, replace(context, pasted=run.command.values) if run.command else context)
        if blamed is None and any(one.phase not in _NOT_FATAL for one in found):
            blamed = run
        failures += [one for one in found if (one.phase, one.cause) not in {(old.phase, old.cause) for old in failures}]
    root = next((one for one in failures if one.phase not in _NOT_FATAL), None) or next(iter(failures), None)
    run = blamed or reader.runs[-1]
    said = engine(event for one in reader.runs for event in one.events)
    ledger = root.ledger if root else stated_ledger(run.events)
    kv = stated_kv(run.events)
    generation = engine_generation(run.events)
    harmless = tuple((evidence(event)[0], HARMLESS[event.kind]) for event in reader.harmless.values())
    common = {
        "failures": tuple(failures),
        "ledger": ledger,
        "kv": kv,
        "vllm_version": str(said["vllm_version"]) if "vllm_version" in said else None,
        "engine": generation,
        "harmless": harmless,
        "card": context.card.name if context.card else None,
        "starts": reader.starts,
    }
    if root:
        paste = tuple(dict.fromkeys(line for one in failures for line in one.paste))
        enough = root.phase != "undetermined" and root.confidence != "low"
        if root.phase == "undetermined" and not root.paste:
            enough = True
        return Diagnosis(root.phase, enough=enough, paste_also=() if enough else paste or (TRACEBACK,), **common)
    return _without_failure(run, ledger, kv, harmless, common, context)


_SIZED = {"engine_ready", "kv_size", "kv_concurrency", "graphs_captured", "graphs_profiled", "kv_given"}
_SIZED |= {"memory_terms", "memory_profile"}


def _without_failure(run: Run, ledger, kv: StatedKV, harmless, common: dict, context: Context) -> Diagnosis:
    kinds = {event.kind for event in run.events} | ({"stats"} if run.stats else set())
    started = bool(kinds & {"ready", "stats", "iteration"})
    pool = ledger is not None and ledger.kv_cache_gib is not None
    sized = pool or bool(kinds & _SIZED)
    if started or sized:
        more = () if started else ("what comes after the last line, up to “Application startup complete” or the error",)
        spot = weak_spot(run.events, ledger, kv, run, context)
        if not started and _no_room_beside_the_budget(run.events, context):
            return Diagnosis("undetermined", enough=False, paste_also=more, weak_spot=spot, **common)
        return Diagnosis("ok", enough=started, paste_also=more, weak_spot=spot, **common)
    if harmless:
        return Diagnosis("not_a_failure", **common)
    if kinds and run.events[-1].kind == "model_loaded":
        more = ("what comes after “Model loading took”: the profile of a step, then the KV cache; the error is there",)
        return Diagnosis("undetermined", enough=False, paste_also=more, **common)
    more = (START, TRACEBACK) if kinds else ("vLLM's own output: lines with INFO, WARNING or ERROR", START)
    return Diagnosis("undetermined", enough=False, paste_also=more, **common)


def _beside_the_budget(ledger: MemoryLedger | None, context: Context) -> float | None:
    """GiB of the card beside the budget and the graphs that are outside it; None where the budget sizes no pool."""
    if ledger is None or not ledger.budget_gib or ledger.pool_given:
        return None
    total = context.card.total_gib if context.card else ledger.total_gib
    graphs = ledger.cuda_graphs_actual_gib if ledger.graphs_subtracted is False else None
    return total - ledger.budget_gib - (graphs or 0.0) if total else None


def _no_room_beside_the_budget(events: list[Event], context: Context) -> bool:
    """Whether a rank's budget leaves nothing for its CUDA context, which alone takes more."""
    stated = (stated_ledger(events, rank) for rank in ranks(events) or [None])
    return any((left := _beside_the_budget(one, context)) is not None and left <= 0 for one in stated)


def weak_spot(events: list[Event], ledger: MemoryLedger | None, kv: StatedKV, run, context: Context) -> str | None:
    """What gives first in a start that worked, in a sentence; None where the log states too little."""
    if run.fullest and run.fullest.values["kv_usage_percent"] >= 95.0:
        usage = run.fullest.values["kv_usage_percent"]
        return f"the pool of the KV cache was {usage:g} % full: requests wait or are preempted; no memory runs out"
    if kv.max_concurrency is not None and kv.max_concurrency < 2.0:
        return f"the KV cache: {kv.max_concurrency:g} requests of full length fit, the next one waits"
    if ledger is None:
        return None
    total = context.card.total_gib if context.card else ledger.total_gib
    outside = _beside_the_budget(ledger, context)
    if outside is not None and outside < 0.05 * total:
        return (
            f"headroom: {show_gib(outside, signed=outside < 0)} are left beside the budget and the graphs, "
            "for the CUDA context and all that no profile counts; lower --gpu-memory-utilization"
        )
    terms = ledger.budget_terms()
    if terms.get("activation", 0.0) > terms.get("kv_cache", 0.0) > 0:
        return (
            f"the activation ({show_gib(terms['activation'])}) takes more than the KV cache; "
            "a lower --max-num-batched-tokens gives it back, or --limit-mm-per-prompt where the model takes images"
        )
    return "none stands out" if terms else None


def finding(
    source: Iterable[Event] | Iterable[str] | str,
    command: Command = None,
    config: Mapping | None = None,
    card: str | cards.Card | None = None,
    total_gib: float | None = None,
) -> dict[str, object]:
    """A diagnosis as a record keeps it (``RunRecord.finding``); arguments as for ``diagnose``."""
    return diagnose(source, command, config, card, total_gib).to_dict()
