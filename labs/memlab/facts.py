"""What log, command line and config say at one failure: the ledger, the pool, the flags, the numbers of its message."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from memlab import cards, flags, shapes
from memlab.errors import FlagError, ShapeError
from memlab.ledger import MemoryLedger, predict
from memlab.vllm_log import (
    Event,
    StatedKV,
    arguments,
    engine,
    free_at_start_gib,
    ranks,
    resolved,
    stated_kv,
    stated_ledger,
)

_DEFAULT_UTILIZATION = 0.92  # vllm/config/cache.py, 0.25 to 0.33
CONTEXTS_GIB = 1.5  # CUDA contexts of one's own processes and of the display take less
_SERVER_GIB = 2.0  # other ranks of this server with a context here take less, each the same; so does a display
_NON_TORCH_GIB = 0.5  # usual on one GPU
HIGHEST_UTILIZATION = 0.97  # above it the CUDA context alone fails vLLM's check of free memory on most cards


@dataclass(frozen=True)
class Facts:
    """What the log, the command line and the model's config say at one failure; sizes are of one GPU.

    ``scale`` turns a utilization of the log into one of the card that is played: 1 for a real one.
    """

    ledger: MemoryLedger | None
    kv: StatedKV
    values: Mapping[str, object]
    given: Mapping[str, object]
    free_at_start_gib: float | None = None
    engine: str | None = None
    runner: str | None = None
    version: tuple[int, int] | None = None
    shape: shapes.ModelShape | None = None
    card: cards.Card | None = None
    real_total_gib: float | None = None
    asked: float | None = None
    missing: float | None = None
    seen: frozenset[str] = frozenset()
    arguments_seen: bool = False

    def term(self, name: str) -> float | None:
        return None if self.ledger is None else self.ledger.term(name)

    @cached_property
    def logged_total(self) -> float | None:
        """The real card's memory."""
        return self.term("total") or self.values.get("total_gib") or self.real_total_gib

    @cached_property
    def total(self) -> float | None:
        return self.card.total_gib if self.card else self.logged_total

    @cached_property
    def utilization(self) -> float | None:
        """As a share of ``total``: on a card that is played, of the played one."""
        if self.asked is not None:
            return self.asked
        share = self.values.get("gpu_memory_utilization") or self.given.get("gpu_memory_utilization")
        budget = self.term("budget") or self.values.get("budget_gib")
        if share is None:
            if budget and self.total:
                return round(budget / self.total, 4)
            default = _DEFAULT_UTILIZATION if self.version and self.version >= (0, 25) else None
            return default if self.arguments_seen and not self.card else None
        if self.card is None:
            return share
        return round(share * self.logged_total / self.card.total_gib, 4) if self.logged_total else None

    @cached_property
    def ballast(self) -> float:
        """What is held on the real card so that it plays the smaller one, in GiB."""
        return (self.logged_total or 0.0) - self.card.total_gib if self.card and self.logged_total else 0.0

    @cached_property
    def process(self) -> float | None:
        """What the process that failed holds, in GiB: in a container PyTorch gives it a number, as to any other."""
        listed = self.values.get("processes_gib", ())
        allocated = self.values.get("allocated_gib") or 0.0
        enough = [size for size in listed if size >= allocated]
        stated = self.values.get("process_gib")
        if stated is not None:  # 0 where the driver does not tell, as in some containers
            return stated or None
        if allocated and enough:
            return min(enough)
        return max(listed) if len(listed) > 1 else None

    @cached_property
    def others(self) -> float | None:
        """Held by other processes, in GiB, as an out-of-memory message tells, or the check of free memory."""
        values = self.values
        listed = values.get("processes_gib", ())
        total, free, ours = values.get("total_gib"), values.get("free_gib"), self.process
        if ours is not None and None not in (total, free):
            return max(0.0, total - free - ours - self.ballast)
        if ours is not None:
            return max(0.0, sum(listed) - ours - self.ballast) if listed else None
        if "budget_gib" in values and None not in (total, free):
            return max(0.0, total - free - self.ballast)
        return None

    @cached_property
    def neighbours(self) -> float:
        """What processes of somebody else hold, in GiB: contexts, and those of this server's other ranks, left out."""
        if self.others is None:
            return 0.0
        listed = sorted(self.values.get("processes_gib", ()))
        if self.ballast and listed:
            listed.pop()
        if self.values.get("process_gib") is None and self.process in listed:
            listed.remove(self.process)
        ours = [size for size in listed if size < CONTEXTS_GIB or (size < _SERVER_GIB and listed.count(size) > 1)]
        held = self.others - sum(ours)
        return held if held >= (CONTEXTS_GIB if len(ours) < len(listed) else _SERVER_GIB) else 0.0

    @cached_property
    def charged(self) -> float | None:
        """What another process took during the profile and vLLM charges to the budget, in GiB: more than one GPU's
        context and libraries can be."""
        non_torch = self.term("non_torch")
        return non_torch - _NON_TORCH_GIB if non_torch and non_torch > 2.5 and self.ranks == 1 else None

    @cached_property
    def pool_given(self) -> bool:
        """Whether the pool's size was given in bytes, so that the budget does not decide it."""
        return self.given.get("kv_cache_memory_bytes") is not None or bool(self.ledger and self.ledger.pool_given)

    @cached_property
    def weights(self) -> float | None:
        return self.term("weights") or self.term("consumed")

    @cached_property
    def ranks(self) -> int:
        return int(self.given.get("tensor_parallel_size") or 1)

    @cached_property
    def ranks_told(self) -> int | None:
        """``tensor_parallel_size``, None where nothing in the log or the command line tells it."""
        told = self.given.get("tensor_parallel_size") is not None or self.arguments_seen
        return self.ranks if told or self.ranks > 1 else None

    def takes(self, since: tuple[int, int] | None) -> bool:
        """Whether this vLLM may have a flag that came in with ``since``, which V0 never had."""
        return since is None or (self.engine != "V0" and (self.version is None or self.version >= since))

    @cached_property
    def graphs(self) -> float | None:
        return self.term("cuda_graphs_actual") or self.term("cuda_graphs_estimated")

    def planned_gain(self, **changes) -> float | None:
        """What a change of flags leaves over in the budget, by the planner, in GiB; None without the model's shape."""
        if self.shape is None or not self.total or (self.version and self.version < (0, 27)):
            return None
        known = {name: value for name, value in self.given.items() if name in _MODELLED}
        try:
            asked = flags.ServeFlags(**{**known, "kv_cache_memory_bytes": None})
            tokens, seqs = cards.batch_defaults(self.total, self.card.name if self.card else "", (0, 33))
            before, after = (
                predict(self.shape, self.total, flags.resolve(one, tokens, seqs, self.shape.max_position_embeddings))
                for one in (asked, asked.with_(**changes))
            )
        except (FlagError, ShapeError, TypeError, ZeroDivisionError):
            return None
        return after.ledger.kv_cache_gib - before.ledger.kv_cache_gib


_MODELLED = {one.name for one in flags.MODELLED}


@dataclass(frozen=True)
class Context:
    """What is known besides the log: by the caller, and ``pasted`` by a command that stands beside it."""

    given: Mapping[str, object]
    shape: shapes.ModelShape | None
    card: cards.Card | None
    total_gib: float | None
    pasted: Mapping[str, object] = field(default_factory=dict)


def _version(text: object) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", str(text or ""))
    return (int(match[1]), int(match[2])) if match else None


_FILES_OF_V1 = {"gpu_model_runner.py", "gpu_worker.py", "core.py", "kv_cache_utils.py", "kv_cache_planning.py"}
_FOLDERS_OF_V0 = ("vllm/worker/", "vllm/engine/multiprocessing/", "vllm/executor/", "vllm/core/")
_KINDS_OF_V1 = {"kv_available", "kv_size", "memory_summary", "graphs_estimated", "engine_start_failed", "engine_fatal"}
_KINDS_OF_V1 |= {"free_memory_low", "profile_grew", "mamba_blocks", "sampler_oom", "engine_dead", "graphs_profiled"}


def engine_generation(events: Iterable[Event]) -> str | None:
    """V0 or V1: as the log says, or as only one of them prints; None where nothing tells."""
    events = list(events)
    said = engine(events)
    if said.get("engine"):
        return str(said["engine"])
    version = _version(said.get("vllm_version"))
    if version and version >= (0, 11):
        return "V1"
    kinds = {event.kind for event in events}
    for event in events:  # both generations have this message, with other numbers
        if event.kind == "kv_too_small" and event.values:
            return "V1" if "needed_gib" in event.values else "V0"
    frames = [event for event in events if event.kind == "frame"]
    if any(event.values["file"] in _FILES_OF_V1 or "vllm/v1/" in event.text for event in frames):
        return "V1"
    if any(folder in event.text for event in frames for folder in _FOLDERS_OF_V0):
        return "V0"
    if kinds & {"memory_profile", "memory_terms", "kv_blocks", "preempted", "kv_swap_exhausted", "swap_too_large"}:
        return "V0"
    if any(event.kind == "worker_failed" and "determine_num_available" in event.text for event in events):
        return "V0"
    if kinds & _KINDS_OF_V1:
        return "V1"
    return "V0" if version and version < (0, 8) else None


_STATE_THE_SHARE = ("memory_profile", "budget", "memory_summary", "graphs_subtracted")


def facts_at(start: list[Event], before: int, decisive: Event, context: Context, parts: Iterable[Event] = ()) -> Facts:
    """What is known when ``decisive`` was printed, after ``before`` events of the start.

    ``parts`` are further messages of the same failure.
    """
    events = start[:before]
    rank = decisive.rank if decisive.rank in ranks(events) else None
    values: dict[str, object] = {}
    for event in (*parts, decisive):
        values |= {name: value for name, value in event.values.items() if name not in ("file", "function")}
    said = engine(start)
    given = {name: value for name, value in (said | resolved(start)).items() if name in _MODELLED}
    given |= {**context.pasted, **arguments(start)}
    for event in start:
        if event.kind in _STATE_THE_SHARE:
            given.setdefault("gpu_memory_utilization", event.values.get("gpu_memory_utilization"))
        if event.kind == "chunked_prefill":
            given.setdefault("max_num_batched_tokens", event.values.get("max_num_batched_tokens"))
    if any("PP" in (event.rank or "") for event in start):
        given.setdefault("pipeline_parallel_size", 2)
    given |= context.given
    facts = Facts(
        ledger=stated_ledger(events, rank),
        kv=stated_kv(events),
        values=values,
        given={name: value for name, value in given.items() if value is not None},
        free_at_start_gib=free_at_start_gib(start),
        engine=engine_generation(start),
        runner=said.get("runner"),
        version=_version(said.get("vllm_version")),
        shape=context.shape,
        asked=context.given.get("gpu_memory_utilization"),
        card=context.card,
        real_total_gib=context.total_gib,
        seen=frozenset(event.kind for event in events),
        arguments_seen=bool(context.pasted) or any(event.kind == "arguments" for event in start),
    )
    return replace(facts, missing=_missing(facts))


def _missing(facts: Facts) -> float | None:
    """GiB that were lacking, on one GPU."""
    values, pool = facts.values, facts.term("kv_cache")
    pairs = (("needed_gib", "kv_cache_gib"), ("budget_gib", "free_gib"), ("tried_gib", "free_gib"))
    for more, less in (
        *pairs,
        ("swap_gib", "host_total_gib"),
        ("requested_gib", "free_gib"),
    ):
        if values.get(more) is not None and values.get(less) is not None:
            lacking = values[more] - values[less]
            return lacking if lacking > 0 else None
    if pool is not None and pool < 0:
        return -pool
    length, tokens = values.get("max_model_len"), values.get("kv_tokens")
    if length and tokens and pool:
        return pool * (length / tokens - 1)
    return values.get("tried_gib")
