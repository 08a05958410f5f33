"""What ran out, when, and what to change: vLLM's output to findings.

``diagnose`` reads text line by line and keeps of it what states memory and what failed, so the length of a log does
not matter. ``RULES`` says for each phase what its failure means, which remedies help, and which advice cannot;
``REMEDIES`` says what each costs, and computes what it gains from the ledger that the log states, or from the planner
where the model's shape is known. A rule is about vLLM: of a log it uses messages, numbers and functions of the
traceback, never the name of a model.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil, floor

from memlab import cards, flags, shapes
from memlab.errors import FlagError, ShapeError
from memlab.ledger import MemoryLedger, predict, weights_gib
from memlab.units import GIB, show_gib
from memlab.vllm_log import (
    ERRORS,
    Event,
    StatedKV,
    arguments,
    clean,
    engine,
    free_at_start_gib,
    parse,
    phase_of,
    ranks,
    scrub,
    stated_kv,
    stated_ledger,
)

CONFIDENCE = ("high", "medium", "low")

# ---- findings ----


@dataclass(frozen=True)
class Evidence:
    """A line of the log, from 1, and its message without prefixes."""

    line: int
    text: str


@dataclass(frozen=True)
class Fix:
    """One change. ``gains_gib`` is per GPU; None where neither log nor planner tells. ``flag`` may be a deed."""

    flag: str
    from_: object
    to: object
    gains_gib: float | None
    costs: str
    why: str

    def to_dict(self) -> dict:
        values = asdict(self)
        return {name.rstrip("_"): value for name, value in values.items()}


@dataclass(frozen=True)
class Failure:
    """One failure. ``missing_gib`` is what was lacking, None where the log does not tell; ``rank`` that of its line."""

    phase: str
    cause: str
    confidence: str
    missing_gib: float | None = None
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[Fix, ...] = ()
    will_not_help: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    paste: tuple[str, ...] = ()
    rank: str | None = None
    ledger: MemoryLedger | None = None

    def to_dict(self) -> dict:
        """JSON-ready; ``will_not_help`` as ``[{"flag", "why"}]``."""
        return {
            "phase": self.phase,
            "cause": self.cause,
            "confidence": self.confidence,
            "missing_gib": _rounded(self.missing_gib),
            "rank": self.rank,
            "evidence": [asdict(one) for one in self.evidence],
            "fixes": [one.to_dict() for one in self.fixes],
            "will_not_help": [{"flag": flag, "why": why} for flag, why in self.will_not_help],
            "notes": list(self.notes),
            "ledger": _known(self.ledger),
        }


@dataclass(frozen=True)
class Diagnosis:
    """What a text shows. ``phase`` is the root cause's, else ``ok``, ``not_a_failure`` or ``undetermined``.

    ``harmless`` are lines that look like a failure and are none, each with the reason. ``weak_spot`` is what gives
    first in a start without a failure. ``starts`` counts the starts of a server in the text; a failure that comes again
    in a later one stands once.
    """

    phase: str
    failures: tuple[Failure, ...] = ()
    ledger: MemoryLedger | None = None
    kv: StatedKV = StatedKV()
    vllm_version: str | None = None
    engine: str | None = None
    enough: bool = True
    paste_also: tuple[str, ...] = ()
    harmless: tuple[tuple[Evidence, str], ...] = ()
    weak_spot: str | None = None
    card: str | None = None
    starts: int = 1

    def to_dict(self) -> dict:
        """JSON-ready, with the names that ``memlab doctor --json`` promises."""
        return {
            "phase": self.phase,
            "failures": [one.to_dict() for one in self.failures],
            "ledger": _known(self.ledger),
            "kv": {name: value for name, value in asdict(self.kv).items() if value is not None},
            "vllm_version": self.vllm_version,
            "engine": self.engine,
            "enough": self.enough,
            "paste_also": list(self.paste_also),
            "harmless": [{**asdict(one), "why": why} for one, why in self.harmless],
            "weak_spot": self.weak_spot,
            "card": self.card,
            "starts": self.starts,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _known(ledger: MemoryLedger | None) -> dict[str, float]:
    return {} if ledger is None else {f"{name}_gib": round(value, 3) for name, value in ledger.known().items()}


# ---- what is known at a failure ----

_DEFAULT_UTILIZATION = 0.92  # vllm/config/cache.py, 0.25 to 0.33
_RESERVE_GIB = 0.25  # given on top of what was missing, so that the next allocation of its kind fits too
_CONTEXTS_GIB = 1.5  # CUDA contexts of one's own processes and of the display take less
_HIGHEST_UTILIZATION = 0.97  # above it the CUDA context alone fails vLLM's check of free memory on most cards


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
    def others(self) -> float | None:
        """Held by other processes, in GiB, as an out-of-memory message tells, or the check of free memory."""
        values = self.values
        listed = values.get("processes_gib", ())
        total, free, ours = (values.get(name) for name in ("total_gib", "free_gib", "process_gib"))
        if ours is None and len(listed) > 1:
            allocated = values.get("allocated_gib", 0.0)
            enough = [size for size in listed if size >= allocated]
            ours = min(enough) if allocated and enough else max(listed)
        if ours is not None and None not in (total, free):
            return max(0.0, total - free - ours - self.ballast)
        if ours is not None:
            return max(0.0, sum(listed) - ours - self.ballast) if listed else None
        if "budget_gib" in values and None not in (total, free):
            return max(0.0, total - free - self.ballast)
        return None

    @cached_property
    def weights(self) -> float | None:
        return self.term("weights") or self.term("consumed")

    @cached_property
    def ranks(self) -> int:
        return int(self.given.get("tensor_parallel_size") or 1)

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

# ---- remedies ----

Change = tuple[object, object, float | None]


@dataclass(frozen=True)
class Remedy:
    """``size`` gives (from, to, GiB gained), or None where this remedy is not to be had here."""

    flag: str
    costs: str
    size: Callable[[Facts], Change | None]


def _lower_utilization(facts: Facts) -> Change | None:
    share, total = facts.utilization, facts.total
    if share is None:
        return None, "0.05 lower", None if total is None else 0.05 * total
    if total is None:
        return share, round(max(0.05, share - 0.05), 2), None
    to = floor((share - ((facts.missing or 0.0) + _RESERVE_GIB) / total) * 100) / 100
    to = round(min(to, share - 0.01), 2)
    return (share, to, (share - to) * total) if to > 0 else None


def _to_what_is_free(facts: Facts) -> Change | None:
    free, total = facts.values.get("free_gib"), facts.total
    if free is None or not total or facts.utilization is None:
        return _lower_utilization(facts)
    to = floor(free / total * 100 - 1e-9) / 100
    return (facts.utilization, to, (facts.utilization - to) * total) if to > 0 else None


def _raise_utilization(facts: Facts) -> Change | None:
    share, total = facts.utilization, facts.total
    highest = _HIGHEST_UTILIZATION
    if total and facts.free_at_start_gib:
        highest = min(highest, floor(facts.free_at_start_gib / total * 100) / 100)
    if share is None:
        return None, "higher, up to what is free at the start", None
    if share >= highest:
        return None
    if not total:
        return share, round(min(highest, share + 0.05), 2), None
    to = ceil((share + (facts.missing or 0.0) / total) * 100 + 1) / 100 if facts.missing else share + 0.05
    to = round(min(highest, to), 2)
    return share, to, (to - share) * total


def _fit_model_len(facts: Facts) -> Change | None:
    length = facts.values.get("max_model_len") or facts.kv.max_model_len or facts.given.get("max_model_len")
    fits = facts.values.get("possible_len") or facts.values.get("kv_tokens") or facts.kv.tokens
    if fits is None or (length and fits >= length):
        return (length, "lower", None) if length else (None, "lower", None)
    return length, max(1, int(fits)), facts.missing


def _half(name: str, gained: Callable[[Facts], float | None], planned: bool) -> Callable[[Facts], Change | None]:
    """Half of a flag's value, and what that gains: by the planner where the profile counts it, else by ``gained``."""

    def size(facts: Facts) -> Change | None:
        if name == "max_num_batched_tokens" and facts.engine == "V0" and not facts.given.get("enable_chunked_prefill"):
            return None  # V0 refuses fewer than max_model_len
        value = facts.values.get(name) or facts.given.get(name)
        if not isinstance(value, int) or value < 2:
            return None, "half", gained(facts)
        plan = facts.planned_gain(**{name: value // 2}) if planned else None
        return value, value // 2, plan or gained(facts)

    return size


def _part(name: str, share: float) -> Callable[[Facts], float | None]:
    def gained(facts: Facts) -> float | None:
        size = facts.term(name) if name != "tried" else facts.values.get("tried_gib")
        return None if size is None else size * share

    return gained


def _state_blocks(facts: Facts) -> Change | None:
    seqs, blocks = facts.values.get("max_num_seqs"), facts.values.get("available_blocks")
    return (seqs, blocks, None) if blocks else None


def _more_ranks(facts: Facts) -> Change | None:
    gain = None if facts.weights is None else facts.weights / 2
    return facts.ranks, 2 * facts.ranks, gain


def _quantize(facts: Facts) -> Change | None:
    if facts.given.get("quantization"):
        return None
    return None, "fp8, or a checkpoint of 4 bits", None if facts.weights is None else facts.weights / 2


def _offload(facts: Facts) -> Change | None:
    now = facts.given.get("cpu_offload_gb") or 0
    if facts.shape is None or not facts.total:
        return now, "what the weights exceed the card by", None
    over = weights_gib(facts.shape, facts.ranks) - 0.95 * facts.total
    return (now, ceil(over), float(ceil(over))) if over > 0 else None


def _small_kv(facts: Facts) -> Change | None:
    dtype = facts.given.get("kv_cache_dtype") or "auto"
    if str(dtype).startswith(("fp8", "nvfp4", "int", "turbo")):
        return None
    if facts.card and facts.card.refuses(flags.ServeFlags(kv_cache_dtype="fp8")):
        return None
    needed, pool = facts.values.get("needed_gib"), facts.term("kv_cache")
    if needed is None and pool and facts.missing and facts.values.get("kv_tokens"):
        needed = pool + facts.missing
    return dtype, "fp8", needed / 2 if needed else None


def _no_estimate(facts: Facts) -> Change | None:
    """Eager enlarges the pool only where the estimate of the graphs was taken off it: the V1 engine since 0.21."""
    subtracted = facts.ledger.graphs_subtracted if facts.ledger else None
    if facts.engine == "V0" or subtracted is False or (facts.version and facts.version < (0, 21)):
        return None
    return _no_graphs(facts)


def _no_graphs(facts: Facts) -> Change | None:
    return None if facts.given.get("enforce_eager") is True else (False, True, facts.graphs)


def _fewer_graphs(facts: Facts) -> Change | None:
    if facts.given.get("enforce_eager") is True:
        return None
    largest = facts.given.get("max_cudagraph_capture_size")
    return largest, (largest or 512) // 4, None if facts.graphs is None else facts.graphs / 2


def _fixed_pool(facts: Facts) -> Change | None:
    pool = facts.term("kv_cache")
    if pool is None:
        return None, "a size that leaves room", None
    to = pool - (facts.missing or 0.0) - _RESERVE_GIB
    fits = facts.values.get("fit_budget_bytes")
    if isinstance(fits, int) and fits > 0:
        to = min(to, fits / GIB)
    return (f"{pool:.2f} GiB", int(to * GIB), pool - to) if to > 0 else None


def _gather(facts: Facts) -> Change | None:
    loose = facts.values.get("unallocated_gib")
    if loose is not None and loose < 0.1:
        return None
    return None, "expandable_segments:True", loose


def _end_others(facts: Facts) -> Change | None:
    if facts.others is not None and facts.others < _CONTEXTS_GIB:
        return None
    return (None if facts.others is None else show_gib(facts.others)), "ended", facts.others


def _chunk(facts: Facts) -> Change | None:
    if facts.engine != "V0" or facts.given.get("enable_chunked_prefill") is True:
        return None
    return False, True, _part("activation", 0.5)(facts)


def _less_swap(facts: Facts) -> Change | None:
    swap, host = facts.values.get("swap_gib"), facts.values.get("host_total_gib")
    if swap is None:
        return facts.given.get("swap_space"), "lower, or 0", None
    to = floor((host or 0.0) * 0.4)
    return swap, to, swap - to


def _fixed(to: object, from_: object = None) -> Callable[[Facts], Change | None]:
    return lambda facts: (from_, to, None)


_FEWER = "fewer requests in one step"
_STEPS = "a long prompt takes more steps"
_HALF_STEP, _HALF_TRIED = _part("activation", 0.5), _part("tried", 0.5)
REMEDIES: dict[str, Remedy] = {
    "lower_utilization": Remedy("--gpu-memory-utilization", "a smaller KV cache", _lower_utilization),
    "what_is_free": Remedy("--gpu-memory-utilization", "a smaller KV cache", _to_what_is_free),
    "raise_utilization": Remedy("--gpu-memory-utilization", "headroom for what is not profiled", _raise_utilization),
    "max_model_len": Remedy("--max-model-len", "longer requests are refused", _fit_model_len),
    "fewer_tokens": Remedy("--max-num-batched-tokens", _STEPS, _half("max_num_batched_tokens", _HALF_STEP, True)),
    "smaller_step": Remedy("--max-num-batched-tokens", _STEPS, _half("max_num_batched_tokens", _HALF_TRIED, False)),
    "fewer_seqs": Remedy("--max-num-seqs", _FEWER, _half("max_num_seqs", lambda facts: None, True)),
    "fewer_rows": Remedy("--max-num-seqs", _FEWER, _half("max_num_seqs", _HALF_TRIED, False)),
    "seqs_to_blocks": Remedy("--max-num-seqs", _FEWER, _state_blocks),
    "more_gpus": Remedy("--tensor-parallel-size", "as many GPUs again", _more_ranks),
    "quantize": Remedy("--quantization", "some accuracy", _quantize),
    "offload_weights": Remedy("--cpu-offload-gb", "each step reads them over PCIe", _offload),
    "fp8_kv": Remedy("--kv-cache-dtype", "some accuracy; needs compute capability 8.9", _small_kv),
    "eager": Remedy("--enforce-eager", "slower decoding", _no_graphs),
    "no_estimate": Remedy("--enforce-eager", "slower decoding", _no_estimate),
    "fewer_graphs": Remedy("--max-cudagraph-capture-size", "slower decoding of larger batches", _fewer_graphs),
    "fixed_pool": Remedy("--kv-cache-memory-bytes", "a smaller KV cache; the budget no longer sizes it", _fixed_pool),
    "expandable": Remedy("PYTORCH_CUDA_ALLOC_CONF", "refused together with a KV connector", _gather),
    "end_others": Remedy("other processes (nvidia-smi)", "what they do", _end_others),
    "other_gpu": Remedy("CUDA_VISIBLE_DEVICES", "another GPU; set it before the process starts", _fixed("a free GPU")),
    "alone": Remedy("start-up order", "time", _fixed("one server after the other, with nothing ending meanwhile")),
    "mm_limit": Remedy("--limit-mm-per-prompt", "fewer or smaller items in a request", _fixed("fewer items")),
    "mm_reserve": Remedy("mm_ipc_gpu_memory_gb", "decoding of video on the CPU", _fixed("lower")),
    "chunked_prefill": Remedy("--enable-chunked-prefill", "more steps for a long prompt", _chunk),
    "upgrade": Remedy("vLLM", "a new version", _fixed("0.27 or later")),
    "no_prompt_logprobs": Remedy(
        "prompt_logprobs (of requests)",
        "requests get none",
        lambda facts: ("set", "not set", facts.values.get("tried_gib")),
    ),
    "max_logprobs": Remedy("--max-logprobs", "requests get fewer", _fixed("lower")),
    "less_swap": Remedy("--swap-space", "less room for preempted requests of V0", _less_swap),
    "more_swap": Remedy("--swap-space", "host memory", _fixed("higher")),
    "host_memory": Remedy("memory of the host or container", "host memory", _fixed("a higher limit")),
    "shared_memory": Remedy("--shm-size (of docker run)", "host memory", _fixed("16g or more, or --ipc=host")),
    "fewer_loaders": Remedy("--max-parallel-loading-workers", "a slower start", _fixed(1)),
    "less_host_cache": Remedy("--mm-processor-cache-gb, --kv-offloading-size", "host caches", _fixed("lower")),
    "sleep_level": Remedy("wake_up(tags)", "two calls", _fixed('first "weights", then "kv_cache"')),
    "no_all_reduce": Remedy("--disable-custom-all-reduce", "slower tensor parallelism", _fixed(True, False)),
    "no_nvls": Remedy("NCCL_NVLS_ENABLE", "slower collectives", _fixed(0)),
}  # fmt: skip

# ---- rules ----


@dataclass(frozen=True)
class Rule:
    """What a failure of one phase means. ``last_line`` is what a reader sees; ``remedies`` name ``REMEDIES``, each with
    the reason why it helps here, the most usual first; ``useless`` is advice that cannot help at this phase."""

    phase: str
    last_line: str
    means: str
    remedies: tuple[tuple[str, str], ...]
    useless: tuple[tuple[str, str], ...] = ()
    paste: tuple[str, ...] = ()


_HINT = "--gpu-memory-utilization"
_REFILLS = "the KV pool takes what it frees, so the headroom stays the same"
_NOT_YET = "it plans the KV pool, which is sized later"
_HOST = "it plans memory of the GPU; this is the host's"
_TRACEBACK = "the traceback above the error, from its first line, of the process that failed first"
_START = 'the log from the start of the server: version, "non-default args", "Model loading took", the KV cache lines'

RULES: dict[str, Rule] = {
    rule.phase: rule
    for rule in (
        Rule(
            "free_memory_at_startup",
            "Free memory on device … is less than desired GPU memory utilization",
            "less memory is free on the card than gpu_memory_utilization × total, before anything is loaded",
            (
                ("what_is_free", "the budget then fits what is free"),
                ("end_others", "what others hold counts against what is free"),
                ("other_gpu", "one on which nobody holds memory"),
            ),
            (
                ("--max-model-len", "nothing is loaded yet: only the budget and what is free are compared"),
                ("--kv-cache-memory-bytes", "the check is made with the budget all the same"),
                ("--quantization", "nothing of the model is loaded yet"),
            ),
        ),
        Rule(
            "other_process_on_gpu",
            "CUDA out of memory … Process … has … GiB memory in use (of several processes)",
            "another process holds the memory that was needed",
            (
                ("end_others", "it holds what is missing"),
                ("other_gpu", "set before CUDA starts, else it has no effect and all land on GPU 0"),
                ("lower_utilization", "each server takes its own share of the total: together below 1"),
            ),
            (("--max-model-len", "the memory is held by somebody else"),),
        ),
        Rule(
            "weights_load",
            "CUDA out of memory while the model loads; Failed to load model - not enough GPU memory",
            "the weights do not fit the card",
            (
                ("more_gpus", "each GPU holds a part of the weights"),
                ("quantize", "fewer bytes a parameter"),
                ("offload_weights", "a part of the weights stays in host memory"),
            ),
            (
                (_HINT, f"vLLM's own hint, and no help here: {_NOT_YET}, and weights take what they need"),
                ("--max-model-len", f"{_NOT_YET}; weights do not depend on it"),
                ("--max-num-seqs", "weights do not depend on it"),
                ("--enforce-eager", "graphs are captured after the weights are loaded"),
                ("--kv-cache-dtype", "it shrinks the KV cache, which is not there yet"),
            ),
        ),
        Rule(
            "memory_profile",
            "CUDA out of memory in profile_run or determine_available_memory",
            "the profiled step, with as many tokens as one step may have, does not fit beside the weights",
            (
                ("fewer_tokens", "the profiled step has so many tokens"),
                ("chunked_prefill", "else the profile runs a prompt of max_model_len in one step"),
                ("max_model_len", "without chunked prefill the profiled step is as long"),
                ("fewer_seqs", "the sampler is profiled with so many rows of the vocabulary"),
                ("more_gpus", "each GPU holds a part of the weights"),
                ("quantize", "smaller weights leave room for the step"),
            ),
            (
                (_HINT, f"{_NOT_YET}; it does not limit the profiled step"),
                ("--kv-cache-dtype", "the KV cache is not there yet"),
            ),
        ),
        Rule(
            "multimodal_profile",
            "CUDA out of memory after “Encoder cache will be initialized” or in embed_multimodal",
            "the encoder is profiled with the most and largest images or videos that a request may have, and that does "
            "not fit beside the weights",
            (
                ("mm_limit", "the encoder is profiled with so many"),
                ("fewer_tokens", "the encoder's budget follows it"),
                ("fewer_seqs", "so many requests are profiled"),
                ("more_gpus", "each GPU holds a part of the weights"),
            ),
            ((_HINT, f"{_NOT_YET}; it does not limit the profile"),),
        ),
        Rule(
            "profile_assert_free_grew",
            "Error in memory profiling. Initial free memory …, current free memory …",
            "more memory was free after the profile than before: another process gave memory back "
            "meanwhile (with unified memory, the page cache is enough)",
            (
                ("alone", "the profile compares free memory before and after"),
                ("end_others", "end or wait for what else uses this GPU"),
            ),
            (
                ("--gpu-memory-utilization", "nothing ran out: the measurement was disturbed"),
                ("--max-model-len", "nothing ran out: the measurement was disturbed"),
            ),
        ),
        Rule(
            "kv_cache_none",
            "No available memory for the cache blocks",
            "weights and the profiled step take the whole budget, so nothing is left for the KV cache",
            (
                ("raise_utilization", "the budget grows, and all of it goes to the pool"),
                ("fewer_tokens", "a smaller profiled step leaves more of the budget"),
                ("chunked_prefill", "else a whole prompt is profiled in one step"),
                ("fewer_seqs", "fewer rows in the profiled sampler, fewer buffers"),
                ("mm_limit", "where the model takes images: a smaller profiled encoder"),
                ("end_others", "early versions of V1 charge to the budget what others hold"),
                ("no_estimate", "no CUDA graphs to reserve for"),
                ("more_gpus", "each GPU holds a part of the weights"),
                ("quantize", "smaller weights leave more of the budget"),
            ),
            (("--kv-cache-dtype", "smaller blocks do not help where there is no memory for one"),),
        ),
        Rule(
            "max_model_len_exceeds_kv",
            "… KV cache is needed, which is larger than the available KV cache memory",
            "one request of max_model_len needs more KV cache than the pool has",
            (
                ("max_model_len", "one request then fits the pool"),
                ("raise_utilization", "all of the added budget goes to the pool"),
                ("fp8_kv", "half the bytes a token"),
                ("fewer_tokens", "a smaller profiled step leaves more for the pool"),
                ("chunked_prefill", "else a prompt of max_model_len is profiled in one step, which shrinks the pool"),
                ("no_estimate", "no CUDA graphs to reserve for"),
                ("more_gpus", "each GPU holds a part of the weights and of each token"),
                ("quantize", "smaller weights leave more for the pool"),
            ),
            (("--max-num-seqs", "one request alone must fit"),),
        ),
        Rule(
            "mamba_blocks_lt_max_num_seqs",
            "max_num_seqs (…) exceeds available Mamba cache blocks (…)",
            "a hybrid model needs a state block for each sequence, and the pool has fewer than max_num_seqs",
            (
                ("seqs_to_blocks", "each sequence then has its state block"),
                ("raise_utilization", "a larger pool has more blocks"),
            ),
            (("--max-model-len", "a state block is as large for a short sequence"),),
        ),
        Rule(
            "kv_cache_alloc_oom",
            "CUDA out of memory after the KV cache was sized, in initialize_kv_cache",
            "the pool was sized, but so much was not free when it was allocated",
            (
                ("lower_utilization", "a smaller pool is allocated"),
                ("fixed_pool", "the pool gets a size that fits"),
                ("end_others", "somebody may hold memory that the plan counts on"),
                ("expandable", "the allocator can use pieces that it holds"),
            ),
            (("--max-model-len", "the pool is sized by the budget, not by the length"),),
        ),
        Rule(
            "kernel_warmup",
            "CUDA out of memory in kernel_warmup",
            "kernels are warmed up and tuned after the pool has taken its share, and their workspace did not fit",
            (
                ("lower_utilization", "a smaller pool leaves room for the workspace"),
                ("fixed_pool", "the pool gets a size that leaves room"),
                ("smaller_step", "the warm-up runs a step of so many tokens"),
            ),
            (("--max-model-len", _REFILLS),),
        ),
        Rule(
            "cuda_graph_capture",
            "CUDA out of memory while “Capturing CUDA graphs”, in capture_model",
            "CUDA graphs are captured after the pool has taken its share, and what they need was not left",
            (
                ("lower_utilization", "a smaller pool leaves room for the graphs"),
                ("fixed_pool", "the pool gets a size that leaves room"),
                ("fewer_graphs", "fewer and smaller graphs"),
                ("eager", "no graphs are captured"),
                ("fewer_seqs", "the largest captured batch follows it, up to 512"),
            ),
            (
                ("--max-model-len", _REFILLS),
                ("--kv-cache-dtype", "the pool keeps its bytes and holds more tokens"),
            ),
        ),
        Rule(
            "sampler_warmup",
            "CUDA out of memory occurred when warming up sampler with … dummy requests",
            "the sampler is warmed up with max_num_seqs rows of the vocabulary after the pool has taken its share",
            (
                ("fewer_rows", "the sampler holds so many rows of the vocabulary"),
                ("lower_utilization", "a smaller pool leaves room for the sampler"),
                ("fixed_pool", "the pool gets a size that leaves room"),
                ("expandable", "the allocator can use pieces that it holds"),
                ("upgrade", "its profile counts the sampler"),
            ),
            (
                ("--max-model-len", _REFILLS),
                ("--max-num-batched-tokens", "the sampler's rows are requests, not tokens"),
            ),
        ),
        Rule(
            "nccl_init_oom",
            "NCCL error … Cuda failure 'out of memory'",
            "NCCL could not get memory on the device for its communicator",
            (
                ("end_others", "something else fills the card"),
                ("lower_utilization", "where it happens after the pool was allocated"),
                ("no_nvls", "NCCL's multicast buffers are the largest"),
                ("no_all_reduce", "no buffers of vLLM's own all-reduce"),
            ),
            (("--max-model-len", _REFILLS), ("PYTORCH_CUDA_ALLOC_CONF", "NCCL does not allocate through PyTorch")),
        ),
        Rule(
            "sampler",
            "CUDA out of memory in apply_top_k_top_p or the sampler",
            "the sampler sorts max_num_seqs rows of the vocabulary, which was not left beside the pool",
            (
                ("fewer_rows", "the sampler holds so many rows of the vocabulary"),
                ("lower_utilization", "a smaller pool leaves room for the sampler"),
                ("fixed_pool", "the pool gets a size that leaves room"),
                ("expandable", "the allocator can use pieces that it holds"),
            ),
            (("--max-model-len", _REFILLS),),
            (_START,),
        ),
        Rule(
            "runtime_prefill_spike",
            "CUDA out of memory while serving, in a kernel of the prefill",
            "the prefill of a prompt took more than the profile had counted, and the pool leaves no headroom for it",
            (
                ("lower_utilization", "a smaller pool leaves headroom"),
                ("fixed_pool", "the pool gets a size that leaves headroom"),
                ("smaller_step", "what a prefill step takes beyond the profile grows with its tokens"),
                ("expandable", "the allocator can use pieces that it holds"),
            ),
            (
                ("--enable-prefix-caching", "it saves work on shared prefixes, not memory of a step"),
                ("--max-num-seqs", "one prompt is enough"),
                ("--swap-space", "it is gone since V1, and never held activations"),
            ),
        ),
        Rule(
            "runtime_logprobs",
            "CUDA out of memory while serving, in _get_prompt_logprobs_dict or compute_logprobs",
            "a request asked for logprobs: the logits of every prompt token over the whole vocabulary were not left",
            (
                ("no_prompt_logprobs", "no logits of the prompt are kept"),
                ("smaller_step", "in the first model runner the logits are of a whole step's tokens"),
                ("lower_utilization", "a smaller pool leaves headroom"),
                ("fixed_pool", "the pool gets a size that leaves headroom"),
            ),
            (
                ("--max-model-len", _REFILLS),
                ("--max-logprobs", "the logits are taken over the whole vocabulary before the top is chosen"),
            ),
        ),
        Rule(
            "runtime_oom",
            "CUDA out of memory while serving; EngineCore encountered a fatal error",
            "while serving, an allocation that the profile had not counted found no headroom",
            (
                ("lower_utilization", "a smaller pool leaves headroom"),
                ("fixed_pool", "the pool gets a size that leaves headroom"),
                ("expandable", "the allocator can use pieces that it holds"),
                ("smaller_step", "what a step takes beyond the profile grows with its tokens"),
            ),
            (
                ("--max-model-len", _REFILLS),
                ("--enable-prefix-caching", "cached blocks are free blocks; the pool stays as large"),
                ("--block-size", "the pool stays as large"),
                ("--swap-space", "it is gone since V1, and never held activations"),
            ),
        ),
        Rule(
            "preemption_not_oom",
            "… is preempted …; Preemptions: …",
            "the pool of KV-cache blocks is full, so requests are preempted and recomputed: slow, not out of memory",
            (
                ("raise_utilization", "a larger pool"),
                ("fp8_kv", "half the bytes a token"),
                ("fewer_seqs", "fewer requests share the pool"),
                ("more_gpus", "each GPU holds a part of each token"),
            ),
            (
                ("--max-num-batched-tokens", "it does not change what a request holds in the pool"),
                ("PYTORCH_CUDA_ALLOC_CONF", "blocks come from the pool, not from the allocator"),
            ),
        ),
        Rule(
            "kv_swap_exhausted",
            "Aborted due to the lack of CPU swap space",
            "the pool was full and V0's swap space on the CPU too, so a request with several sequences had no place",
            (
                ("more_swap", "more room for preempted sequences"),
                ("raise_utilization", "a larger pool is full later"),
                ("fewer_seqs", "fewer requests share the pool"),
                ("max_model_len", "shorter requests hold less"),
                ("upgrade", "V1 computes preempted requests again and needs no swap"),
            ),
            (("PYTORCH_CUDA_ALLOC_CONF", "blocks come from the pool, not from the allocator"),),
        ),
        Rule(
            "host_swap_space_config",
            "Too large swap space. … out of the … total CPU memory",
            "V0's swap space is a part of the host's memory, and the host or container has too little",
            (
                ("less_swap", "so much of the host's memory is set aside for each GPU"),
                ("host_memory", "the check compares with what the container may use"),
            ),
            (("--gpu-memory-utilization", _HOST), ("--max-model-len", _HOST)),
        ),
        Rule(
            "host_ram_oom",
            "Killed; exit code 137 (SIGKILL); Cannot allocate memory",
            "the host's or container's memory ran out, not the GPU's: the kernel ended the process",
            (
                ("host_memory", "loading and each worker process take host memory"),
                ("shared_memory", "workers exchange data through /dev/shm"),
                ("fewer_loaders", "fewer workers read the checkpoint at once"),
                ("less_swap", "V0 pins so much for each GPU"),
                ("less_host_cache", "they are kept in host memory"),
            ),
            (
                ("--gpu-memory-utilization", _HOST),
                ("--max-model-len", _HOST),
                ("--max-num-seqs", _HOST),
                ("--quantization", "the file on disk is what is read; only a smaller checkpoint helps"),
            ),
            ("dmesg | grep -i -E 'oom|killed process', or the container's last state (kubectl describe pod)",),
        ),
        Rule(
            "sleep_wake_up",
            "CUDA Error: out of memory at … cumem_allocator.cpp; wake_up",
            "the memory given back by sleep could not be taken again at wake-up: something else has it",
            (
                ("end_others", "the trainer or another engine took it meanwhile"),
                ("sleep_level", "the weights come back before the pool needs its share"),
                ("lower_utilization", "less has to come back"),
                ("fixed_pool", "the pool to come back has the same size in every version"),
            ),
            (
                ("--max-model-len", _REFILLS),
                ("PYTORCH_CUDA_ALLOC_CONF", "sleep mode allocates outside PyTorch's segments"),
            ),
        ),
    )
}  # fmt: skip

# What vLLM counted itself: the message alone decides.
_REFUSED = {
    "free_memory_low": "free_memory_at_startup",
    "external_weights_high": "free_memory_at_startup",
    "cpu_memory_low": "free_memory_at_startup",
    "kv_none": "kv_cache_none",
    "autofit_failed": "kv_cache_none",
    "cpu_budget_full": "kv_cache_none",
    "mm_reserve_too_big": "kv_cache_none",
    "kv_too_small": "max_model_len_exceeds_kv",
    "mamba_blocks": "mamba_blocks_lt_max_num_seqs",
    "profile_grew": "profile_assert_free_grew",
    "swap_too_large": "host_swap_space_config",
    "kv_swap_exhausted": "kv_swap_exhausted",
}
_DEVICE = {"oom", "load_oom", "sampler_oom", "pooler_oom", "cuda_oom", "cumem_oom", "cumem_error", "nccl_oom"}
_DEVICE |= {"workspace_locked"}
_ON_HOST = {"host_oom", "shm_full"}
_SAYS_ITS_PLACE = {"load_oom": "weights_load", "sampler_oom": "sampler_warmup", "pooler_oom": "sampler_warmup"}
_SAYS_ITS_PLACE |= {"nccl_oom": "nccl_init_oom"}

_PROFILE = "profile_run determine_available_memory determine_num_available_blocks profile_num_available_blocks"
# Functions of a traceback, the most telling first: a step of the start holds calls that serving has too.
_PLACES: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (phase, frozenset(functions.split()))
    for phase, functions in (
        ("sleep_wake_up", "wake_up"),
        ("sampler_warmup", "_dummy_sampler_run _dummy_pooler_run"),
        ("memory_profile", "profile_cudagraph_memory"),
        ("cuda_graph_capture", "capture_model capture_graphs"),
        ("kernel_warmup", "kernel_warmup warmup_kernels"),
        (
            "weights_load",
            "load_model create_weights load_weights process_weights_after_loading get_model initialize_model",
        ),
        ("multimodal_profile", "profile_encoder_cache"),
        ("memory_profile", _PROFILE),
        ("kv_cache_alloc_oom", "init_cache_engine allocate_gpu_cache initialize_kv_cache"),
        ("kv_cache_alloc_oom", "_allocate_kv_cache_tensors _allocate_kv_cache allocate_kv_cache"),
        ("cuda_graph_capture", "warm_up_model"),
        ("nccl_init_oom", "init_worker_distributed_environment"),
        ("runtime_logprobs", "_get_prompt_logprobs_dict compute_logprobs gather_logprobs"),
    )
)
_ENCODER = {"embed_multimodal", "get_multimodal_embeddings", "_execute_mm_encoder", "_process_image_input"}
_ENCODER |= {"_process_video_input"}
_SAMPLER = {"sampler.py", "sample", "sample_tokens", "apply_top_k_top_p"}
_SERVES = {"run_busy_loop", "run_engine_loop", "engine_step", "step_async", "_run_engine"}
_CHECKS_POOL = {"raise_if_cache_size_invalid", "_check_enough_kv_cache_memory", "check_enough_kv_cache_memory"}
_PROMPT = re.compile("prefill|chunk")
# Where only the order of lines tells: what runs next after the last step that was seen to begin.
_AFTER = {
    "loading_weights": "weights_load",
    "profiling": "memory_profile",
    "compiling": "memory_profile",
    "sizing_kv_cache": "kv_cache_alloc_oom",
    "warming_up": "kv_cache_alloc_oom",
    "capturing_graphs": "cuda_graph_capture",
    "ready": "runtime_oom",
    "serving": "runtime_oom",
    "stopping": "runtime_oom",
}

_HARMLESS = {
    "autotuner_oom": "FlashInfer's autotuner tries large tactics, catches its own out-of-memory and takes another",
    "leaked_semaphore": "Python's resource tracker says so whenever a server ends in a hurry",
    "request_too_long": "one request was refused (HTTP 400); memory has nothing to do with it",
    "blocks_override": "the small pool of the trial capture that estimates the CUDA graphs, not the pool",
    "mm_sequence_short": "a warning about requests that may not fit; by itself nothing failed",
    "memory_summary": "the summary of a start that worked; the refusal with the same first words goes on otherwise",
    "stopping": "the workers are told to stop; the reason stands above",
}

# ---- reading ----

_KEPT_OF_A_RUN = 2000
_KEPT_RUNS = 40
_QUIET = frozenset(("stats", "iteration", "load_progress", "graphs_trial_progress", "compile_step"))
_REPEATS = 8  # of one kind and rank: a crash loop of requests says the same each time
_BEGIN_A_RUN = frozenset(("version", "arguments", "engine_config"))
_SAYS_POOL = frozenset(
    ("kv_available", "kv_given", "kv_auto", "memory_terms", "memory_profile", "kv_size", "kv_blocks")
)
_FAILS = ERRORS | {"frame", "exception", "collective_timeout", "forward_failed"}


@dataclass
class _Run:
    """One start of a server, as far as the text shows it."""

    events: list[Event] = field(default_factory=list)
    counts: dict[tuple, int] = field(default_factory=dict)
    stats: Event | None = None
    preemptions: Event | None = None
    preempted: int = 0
    fullest: Event | None = None
    ended: bool = False

    def add(self, event: Event) -> None:
        if event.kind in ("stats", "iteration"):
            self._traffic(event)
        elif event.kind == "preempted":
            self.preempted += 1
            self.preemptions = self.preemptions or event
        if event.kind in _QUIET and self.counts.get((event.kind, None)):
            return
        key = (event.kind, event.rank) if event.kind not in _QUIET else (event.kind, None)
        if event.kind == "frame":
            key = (*key, event.values["function"])
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.counts[key] <= _REPEATS and len(self.events) < _KEPT_OF_A_RUN:
            self.events.append(event)

    def _traffic(self, event: Event) -> None:
        self.stats = event
        if event.values.get("preemptions"):
            self.preempted += event.values["preemptions"]
            self.preemptions = self.preemptions or event
        usage = event.values.get("kv_usage_percent")
        if usage is not None and (self.fullest is None or usage > self.fullest.values["kv_usage_percent"]):
            self.fullest = event

    def begins_anew(self, event: Event) -> bool:
        """Whether the event can only be of another start."""
        kinds = {kind for kind, *_ in self.counts}
        if event.kind == "version":
            return bool(kinds - {"arguments", "exception"})
        if event.kind in ("arguments", "engine_config"):
            return bool(kinds & (ERRORS | _SAYS_POOL | {"model_loaded", "ready", "stats"}))
        if event.kind in ("load_started", "model_loaded"):
            return any((kind, event.rank) in self.counts for kind in _SAYS_POOL | {"ready", "engine_start_failed"})
        return False


class Reader:
    """Takes events one by one; keeps what a diagnosis needs, in bounds that do not grow with the log."""

    def __init__(self):
        self.runs: list[_Run] = [_Run()]
        self.harmless: dict[str, Event] = {}
        self.starts = 1

    def add(self, event: Event) -> None:
        """Take the next event."""
        if event.kind in _HARMLESS and (event.kind != "blocks_override" or not event.values["auto_blocks"]):
            self.harmless.setdefault(event.kind, event)
        if self.runs[-1].begins_anew(event):
            if len(self.runs) >= _KEPT_RUNS:
                del self.runs[_KEPT_RUNS // 2]
            self.runs.append(_Run())
            self.starts += 1
        self.runs[-1].add(event)


@dataclass
class _Episode:
    """Lines of failure with no sign of progress between them; ``before`` is how many events of the run precede them."""

    before: int
    step: str | None
    events: list[Event] = field(default_factory=list)


def _episodes(run: _Run) -> list[_Episode]:
    found: list[_Episode] = []
    current: _Episode | None = None
    step = None
    for number, event in enumerate(run.events):
        if event.kind in _FAILS:
            if current is None:
                current = _Episode(number, step)
                found.append(current)
            current.events.append(event)
            continue
        begins = phase_of(event)
        if event.kind == "graphs_captured":
            begins = "captured"
        if event.kind == "graphs_progress" and event.values.get("progress_percent") == 100.0:
            begins = None
        if begins and begins != "stopping":
            step = begins
        # Another rank may still say how far it came while the first one fails.
        own = current and event.rank in {one.rank for one in current.events}
        if current and begins and (own or begins in ("starting", "ready", "serving")):
            current = None
    return found


# ---- diagnosing ----


Command = str | list[str] | flags.ServeFlags | None


@dataclass(frozen=True)
class _Context:
    """What the caller knows besides the log."""

    given: Mapping[str, object]
    shape: shapes.ModelShape | None
    card: cards.Card | None
    total_gib: float | None


def _evidence(*events: Event) -> tuple[Evidence, ...]:
    lines: dict[int, Evidence] = {}
    for event in events:
        text = clean(scrub(event.text), 400)
        if text not in {one.text for one in lines.values()}:
            lines.setdefault(event.line_number, Evidence(event.line_number, text))
    return tuple(lines.values())[:6]


def _version(text: object) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", str(text or ""))
    return (int(match[1]), int(match[2])) if match else None


_FILES_OF_V1 = {"gpu_model_runner.py", "gpu_worker.py", "core.py", "kv_cache_utils.py", "kv_cache_planning.py"}
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
    if any(event.kind == "frame" and event.values["file"] in _FILES_OF_V1 for event in events):
        return "V1"
    if kinds & {"memory_profile", "memory_terms", "kv_blocks", "preempted", "kv_swap_exhausted", "swap_too_large"}:
        return "V0"
    if any(event.kind == "worker_failed" and "determine_num_available" in event.text for event in events):
        return "V0"
    if kinds & _KINDS_OF_V1:
        return "V1"
    return "V0" if version and version < (0, 8) else None


def _facts(run: _Run, before: int, decisive: Event, context: _Context, parts: Iterable[Event]) -> Facts:
    """What is known when ``decisive`` was printed; ``parts`` are further messages of the same failure."""
    events = run.events[:before]
    rank = decisive.rank if decisive.rank in ranks(events) else None
    values: dict[str, object] = {}
    for event in (*parts, decisive):
        values |= {name: value for name, value in event.values.items() if name not in ("file", "function")}
    said = engine(run.events)
    given = {**{name: value for name, value in said.items() if name in _MODELLED}, **arguments(run.events)}
    for event in run.events:
        if event.kind == "chunked_prefill":
            given.setdefault("max_num_batched_tokens", event.values.get("max_num_batched_tokens"))
    if any("PP" in (event.rank or "") for event in run.events):
        given.setdefault("pipeline_parallel_size", 2)
    given |= context.given
    facts = Facts(
        ledger=stated_ledger(events, rank),
        kv=stated_kv(events),
        values=values,
        given={name: value for name, value in given.items() if value is not None},
        free_at_start_gib=free_at_start_gib(run.events),
        engine=engine_generation(run.events),
        version=_version(said.get("vllm_version")),
        shape=context.shape,
        asked=context.given.get("gpu_memory_utilization"),
        card=context.card,
        real_total_gib=context.total_gib,
        seen=frozenset(event.kind for event in events),
        arguments_seen=any(event.kind == "arguments" for event in run.events),
    )
    return replace(facts, missing=_missing(facts))


def _missing(facts: Facts) -> float | None:
    """GiB that were lacking, on one GPU."""
    values, pool = facts.values, facts.term("kv_cache")
    pairs = (("needed_gib", "kv_cache_gib"), ("budget_gib", "free_gib"), ("tried_gib", "free_gib"))
    for more, less in (*pairs, ("swap_gib", "host_total_gib"), ("required_gib", "current_gib")):
        if values.get(more) is not None and values.get(less) is not None:
            lacking = values[more] - values[less]
            return lacking if lacking > 0 else None
    if pool is not None and pool < 0:
        return -pool
    length, tokens = values.get("max_model_len"), values.get("kv_tokens")
    if length and tokens and pool:
        return pool * (length / tokens - 1)
    return values.get("tried_gib")


def _fixes(rule: Rule, facts: Facts) -> tuple[tuple[Fix, ...], list[tuple[str, str]]]:
    """The remedies of a rule, sized and ranked by what they gain, and those that cannot be had here."""
    fixes, useless = [], list(rule.useless)
    for name, why in rule.remedies:
        remedy = REMEDIES[name]
        change = remedy.size(facts)
        if change is None:
            if name == "raise_utilization":
                share = facts.utilization
                useless.append((remedy.flag, f"it is at {share:g} of the card already; more is not free at the start"))
            continue
        from_, to, gains = change
        if gains is not None and gains <= 0:
            gains = None
        from_ = round(from_, 4) if isinstance(from_, float) else from_
        fixes.append(Fix(remedy.flag, from_, to, _rounded(gains), remedy.costs, why))
    fixes.sort(key=lambda fix: -(fix.gains_gib or 0.0))
    return tuple(fixes), useless


def _numbers(facts: Facts) -> str:
    """The numbers of the decisive message, as the end of a sentence."""
    values = facts.values
    get = values.get
    if get("tried_gib") is not None:
        free = "" if get("free_gib") is None else f", {show_gib(get('free_gib'))} were free"
        total = "" if get("total_gib") is None else f" of {show_gib(get('total_gib'))}"
        return f": {show_gib(get('tried_gib'))} were asked for{free}{total}"
    if get("needed_gib") is not None and get("kv_cache_gib") is not None:
        return f": {show_gib(get('needed_gib'))} for {get('max_model_len')} tokens, of {show_gib(get('kv_cache_gib'))}"
    if get("budget_gib") is not None and get("free_gib") is not None and get("total_gib") is not None:
        return (
            f": {show_gib(get('free_gib'))} of {show_gib(get('total_gib'))} are free, "
            f"{show_gib(get('budget_gib'))} are planned"
        )
    if get("max_model_len") and get("kv_tokens"):
        return f": {get('max_model_len')} tokens against {get('kv_tokens')}"
    if get("available_blocks") is not None:
        return f": {get('available_blocks')} against {get('max_num_seqs')}"
    if get("free_after_gib") is not None and get("free_gib") is not None:
        return f": {show_gib(get('free_gib'))} before, {show_gib(get('free_after_gib'))} after"
    if get("swap_gib") is not None and get("host_total_gib") is not None:
        return f": {show_gib(get('swap_gib'))} of {show_gib(get('host_total_gib'))}"
    pool = facts.term("kv_cache")
    if pool is not None and pool <= 0:
        return f": {show_gib(pool, signed=True)} are left"
    return ""


def _notes(phase: str, facts: Facts) -> tuple[str, ...]:
    """What else the numbers say, each by a rule of its own."""
    notes, values, ledger = [], facts.values, facts.ledger
    tried, total, free = (values.get(name) for name in ("tried_gib", "total_gib", "free_gib"))
    if tried and total and tried > 2 * total:
        notes.append(
            "More was asked for at once than the card has: no lack of capacity, but something that grows with the "
            "square of the length, such as an attention mask of a fallback kernel. Shorten --max-model-len or use "
            "another attention backend."
        )
    if tried is not None and free is not None and 0 < tried <= free:
        notes.append(
            "As much as was asked for was free, but the allocator takes larger segments than it is asked for: the "
            "card is full to within one segment."
        )
    loose = values.get("unallocated_gib")
    if loose is not None and tried is not None and loose >= max(tried, 0.5):
        notes.append(
            f"PyTorch holds {show_gib(loose)} that it does not use, in pieces too small: fragmentation beside too "
            "little headroom."
        )
    ours, allocated = values.get("process_gib"), values.get("allocated_gib")
    if ours is not None and allocated is not None and ours - allocated - (loose or 0.0) > 2.0:
        notes.append(
            f"{show_gib(ours - allocated - (loose or 0.0))} of this process are outside PyTorch: CUDA context, NCCL, "
            "graphs and kernels, most of it outside the budget."
        )
    if phase == "weights_load":
        notes.append(
            "Loading stopped at the first allocation that failed, so more than this is missing"
            + (f": {show_gib(allocated)} were loaded by then. " if allocated else ". ")
            + "A checkpoint called 4-bit keeps some layers in 16 bits."
        )
    if phase == "kv_cache_none" and facts.engine != "V0" and (facts.version or (0, 8)) <= (0, 8):
        notes.append(
            "In early versions of V1 what other servers hold on this GPU counts too: the utilization must then be "
            "above what all of them hold together."
        )
    others = facts.others
    if others is not None and others > _CONTEXTS_GIB and phase != "other_process_on_gpu":
        notes.append(f"Others than this process hold {show_gib(others)} on the card, CUDA contexts included.")
    share = facts.utilization
    if share is not None and share >= 0.95 and phase not in ("host_ram_oom", "host_swap_space_config"):
        notes.append(f"gpu_memory_utilization {share:g} leaves nearly nothing for what no profile counts.")
    if ledger is not None:
        non_torch = ledger.non_torch_gib
        if non_torch is not None and non_torch > 2.5 and facts.ranks == 1:
            notes.append(
                f"Non-torch memory is {show_gib(non_torch)}, where a few hundred MiB are usual on one GPU: another "
                "process took memory meanwhile and is charged to the budget."
            )
        if ledger.cuda_graphs_actual_gib and ledger.graphs_subtracted is False and phase in _AFTER_THE_POOL:
            notes.append(
                f"The CUDA graphs ({show_gib(ledger.cuda_graphs_actual_gib)}) are outside the budget in this version."
            )
    if facts.engine == "V0" and phase in ("memory_profile", "max_model_len_exceeds_kv", "kv_cache_none"):
        notes.append(
            "V0 profiles a whole prompt of max_model_len in one step unless chunked prefill is on (it is by itself "
            "above 32768 tokens), so a shorter max_model_len or --enable-chunked-prefill also makes the step smaller."
        )
    if phase == "max_model_len_exceeds_kv" and int(facts.given.get("pipeline_parallel_size") or 1) > 1:
        notes.append(
            "With pipeline parallelism some versions compare the need of all layers with the pool of one stage; the "
            "estimated maximum length is too low then."
        )
    return tuple(notes)


_AFTER_THE_POOL = {"cuda_graph_capture", "sampler_warmup", "sampler", "kernel_warmup", "runtime_oom"}
_AFTER_THE_POOL |= {"runtime_prefill_spike", "runtime_logprobs", "ok"}


def _failure(
    phase: str, confidence: str, facts: Facts, decisive: Event, support=(), cause: str | None = None
) -> Failure:
    rule = RULES[phase]
    fixes, useless = _fixes(rule, facts)
    return Failure(
        phase=phase,
        cause=(cause or rule.means) + _numbers(facts),
        confidence=confidence,
        missing_gib=_rounded(facts.missing),
        evidence=_evidence(decisive, *support),
        fixes=fixes,
        will_not_help=tuple(useless),
        notes=_notes(phase, facts),
        paste=rule.paste,
        rank=decisive.rank,
        ledger=facts.ledger,
    )


def _undetermined(cause: str, decisive: Event, ledger=None, paste=(_TRACEBACK,), support=()) -> Failure:
    evidence = _evidence(decisive, *support)
    return Failure(
        "undetermined", cause, "low", evidence=evidence, paste=tuple(paste), rank=decisive.rank, ledger=ledger
    )


def _of_vllm(event: Event) -> bool:
    """Whether a frame is of vLLM's own code; one that shows no folder is taken to be."""
    path = event.text.replace(" ", "").lower()
    return "vllm" in path or not any(slash in path for slash in "/\\")


def _functions(events: Iterable[Event]) -> dict[str, Event]:
    """The functions that tracebacks and executors name, each with its line."""
    found: dict[str, Event] = {}
    for event in events:
        if event.kind == "frame" and _of_vllm(event):
            for what in ("prefill", "chunk", "sampler"):
                if what in event.values["file"]:
                    found.setdefault(what + ".py", event)
            found.setdefault(event.values["function"], event)
        elif event.kind == "worker_failed" and "method" in event.values:
            found.setdefault(event.values["method"], event)
    return found


def _place(functions: Mapping[str, Event], seen: frozenset[str] | set[str]) -> tuple[str, Event] | None:
    """The phase that a traceback names, with the frame that says so."""
    profiled = set(functions) & set(_PROFILE.split())
    for phase, names in _PLACES:
        named = [functions[name] for name in functions if name in names]
        if not named or (phase == "sampler_warmup" and profiled):  # the profile runs the sampler too
            continue
        if phase == "memory_profile" and (_ENCODER & set(functions) or _encoder_was_last(seen)):
            phase = "multimodal_profile"
        return phase, named[-1]
    if _SAMPLER & set(functions):
        phase = "runtime_oom" if _SERVES & set(functions) else "sampler"
        return phase, next(functions[name] for name in functions if name in _SAMPLER)
    prompt = [functions[name] for name in functions if _PROMPT.search(name)]
    if prompt:
        return "runtime_prefill_spike", prompt[0]
    serves = [functions[name] for name in functions if name in _SERVES]
    if serves:
        return "runtime_oom", serves[0]
    return None


def _encoder_was_last(seen: frozenset[str] | set[str]) -> bool:
    return "mm_sequence_short" in seen or ("encoder_profile" in seen and not seen & {"compile_started", "compiled"})


def _device(run: _Run, episode: _Episode, context: _Context) -> Failure:
    """Memory of the device ran out: where, by message, traceback, or the last step seen."""
    hits = [event for event in episode.events if event.kind in _DEVICE]
    full = next((event for event in hits if event.kind == "oom"), None)
    worded = next((event for event in hits if event.kind in _SAYS_ITS_PLACE and event.kind != "nccl_oom"), None)
    decisive = full or worded or hits[0]
    facts = _facts(run, episode.before, decisive, context, hits[:20])
    own = _functions(event for event in episode.events if event.rank == decisive.rank)
    functions = own if _place(own, facts.seen) else _functions(episode.events)
    placed = _place(functions, facts.seen)
    support = [*hits[:2]]
    others, lacking = facts.others, facts.missing or 0.0
    if full and others is not None and others >= max(_CONTEXTS_GIB, lacking):
        return _failure("other_process_on_gpu", "high", facts, decisive, cause=_neighbours(others))
    if worded and not (placed and placed[0] == "memory_profile"):
        phase, confidence = _SAYS_ITS_PLACE[worded.kind], "high"
    elif placed:
        phase, confidence = placed[0], "high"
        support.append(placed[1])
        if phase == "sampler" and episode.step in ("ready", "serving"):
            phase = "runtime_oom"
    elif decisive.kind in ("cumem_oom", "cumem_error") and not run.counts.get(("load_started", decisive.rank)):
        phase, confidence = "sleep_wake_up", "medium"
    elif decisive.kind == "nccl_oom":
        phase, confidence = "nccl_init_oom", "high"
    else:
        phase, confidence = _by_order(run, episode, facts), "medium"
        if phase == "runtime_oom" and _in_a_prompt(episode, facts):
            phase = "runtime_prefill_spike"
    if phase is None and _more_than_any_budget(facts):
        phase, confidence = "weights_load", "low"
    if phase is None:
        return _undetermined(
            "memory of the GPU ran out, and nothing shows in which step" + _numbers(facts),
            decisive,
            facts.ledger,
            (_TRACEBACK, _START),
        )
    return _failure(phase, confidence, facts, decisive, support)


def _in_a_prompt(episode: _Episode, facts: Facts) -> bool:
    """Whether V0's forward pass failed at a tensor so large that it is of many tokens: decoding has one a sequence."""
    return "forward_failed" in {event.kind for event in episode.events} and facts.values.get("tried_gib", 0.0) > 0.1


def _more_than_any_budget(facts: Facts) -> bool:
    """Whether PyTorch alone holds so much of the card that only what no budget limits can be it: the weights."""
    allocated, total = facts.values.get("allocated_gib"), facts.values.get("total_gib")
    return bool(allocated and total and facts.card is None and allocated > _HIGHEST_UTILIZATION * total)


def _neighbours(others: float) -> str:
    return f"other processes hold {show_gib(others)} of this card, which was needed"


def _by_order(run: _Run, episode: _Episode, facts: Facts) -> str | None:
    """The step that was under way, where no traceback tells."""
    step = episode.step
    if step == "captured":
        return "sampler_warmup"
    if step == "starting" and facts.seen & {"load_progress", "runner"}:
        step = "loading_weights"
    if step == "warming_up":
        pool, tried = facts.term("kv_cache"), facts.values.get("tried_gib")
        allocated, resident = facts.values.get("allocated_gib"), facts.weights
        if pool and allocated and resident and allocated > 0.9 * (pool + resident):
            return "runtime_oom" if facts.engine == "V0" else "kernel_warmup"
        if pool and tried and not any(abs(tried * parts / pool - 1) < 0.01 for parts in range(1, 129)):
            return None
    phase = _AFTER.get(step or "")
    if phase == "memory_profile" and _encoder_was_last(facts.seen):
        return "multimodal_profile"
    return phase


def _of_episode(run: _Run, episode: _Episode, context: _Context) -> Iterator[Failure]:
    """The failures of one episode, in the order of their lines."""
    events = episode.events
    kinds = {event.kind for event in events}
    refused: dict[str, Event] = {}
    for event in events:
        if event.kind in _REFUSED:
            known = refused.get(_REFUSED[event.kind])
            if known is None or len(event.values) > len(known.values):
                refused[_REFUSED[event.kind]] = event
    found: list[tuple[int, Failure]] = []
    for phase, event in refused.items():
        facts = _facts(run, episode.before, event, context, ())
        cause = None
        if phase == "free_memory_at_startup" and (facts.others or 0.0) > _CONTEXTS_GIB:
            cause = f"{RULES[phase].means}; other processes hold {show_gib(facts.others)}, CUDA contexts included"
        found.append((event.line_number, _failure(phase, "high", facts, event, cause=cause)))
    if kinds & _DEVICE:
        failure = _device(run, episode, context)
        found.append((failure.evidence[0].line, failure))
    killed = [event for event in events if event.kind in _ON_HOST or _killed(event)]
    if killed and not kinds & _DEVICE and not refused:
        facts = _facts(run, episode.before, killed[0], context, killed[:3])
        found.append((killed[0].line_number, _failure("host_ram_oom", _sure(killed), facts, killed[0], killed[1:3])))
    if refused and not kinds & _DEVICE:
        found += _left_over(run, episode, context, refused)
    if not found:
        found += [(one.evidence[0].line, one) for one in _without_a_message(run, episode, context)]
    for _, failure in sorted(found, key=lambda pair: pair[0]):
        yield failure


def _killed(event: Event) -> bool:
    if event.kind != "killed":
        return False
    code = event.values.get("exit_code")
    return code in (137, -9, 9) or (code is None and event.text.lstrip().startswith(("Killed", "/", "bash")))


def _sure(killed: list[Event]) -> str:
    return "high" if any(event.kind in _ON_HOST or event.values.get("exit_code") for event in killed) else "medium"


def _left_over(run: _Run, episode: _Episode, context: _Context, refused: Mapping[str, Event]):
    """A step in a traceback that the refusals before it cannot have come from: another start, whose end is cut off."""
    last = max(event.line_number for event in refused.values())
    later = [event for event in episode.events if event.line_number > last]
    named = {name: event for name, event in _functions(later).items() if not _CHECKS_POOL & {name}}
    placed = _place(named, frozenset())
    if placed and placed[0] in ("sampler_warmup", "cuda_graph_capture", "kernel_warmup", "weights_load"):
        facts = _facts(run, episode.before, placed[1], context, ())
        yield placed[1].line_number, _failure(placed[0], "low", replace(facts, values={}), placed[1])


def _without_a_message(run: _Run, episode: _Episode, context: _Context) -> Iterator[Failure]:
    """What tracebacks without a message of memory tell: little, and with what to paste."""
    events = episode.events
    functions = _functions(events)
    seen = frozenset(event.kind for event in run.events[: episode.before])
    ledger = stated_ledger(run.events[: episode.before])
    setting = next((event for event in events if event.kind == "bad_settings"), None)
    other = next((event for event in events if event.kind == "exception"), None)
    placed = _place(functions, seen)
    errors = [event for event in events if event.kind in ERRORS]
    if setting:
        yield _undetermined(
            f"vLLM refuses these settings before it takes memory: {setting.values.get('rule')}", setting, paste=()
        )
    elif other and other.values["name"] not in ("RuntimeError", "ValueError", "AssertionError", "RayTaskError"):
        yield _undetermined(f"this ended by {other.values['name']}, which is not about memory", other, ledger, ())
    elif _CHECKS_POOL & set(functions):
        event = next(functions[name] for name in functions if name in _CHECKS_POOL)
        yield _undetermined(
            "vLLM's check of the KV cache failed: either nothing is left for the pool, or one request of max_model_len "
            "does not fit; the message is cut off",
            event,
            ledger,
            ("the ValueError below this traceback, and the lines on GPU blocks or KV cache before it",),
        )
    elif "initialize_cache" in functions and not placed:
        yield _undetermined(
            "V0 failed between the profile and serving: at the check of the KV cache, its allocation or the capture of "
            "CUDA graphs; the message is cut off" + _room(run, context, episode),
            functions["initialize_cache"],
            ledger,
            ("the last line of this traceback, which names the error", "the command line, for max_model_len"),
        )
    elif placed and not other and placed[0] in _STEPS_OF_THE_START:
        facts = _facts(run, episode.before, placed[1], context, ())
        failure = _failure(placed[0], "low", facts, placed[1], errors[:2])
        yield replace(failure, paste=("the last line of this traceback: the error itself is cut off", *failure.paste))
    elif errors or functions:
        what = errors[0] if errors else next(iter(functions.values()))
        reason = "the engine ended, and the lines that say why are not here"
        if "collective_timeout" in {event.kind for event in events}:
            reason = "a rank waited in vain: another one failed before, and its lines are not here"
        yield _undetermined(
            reason,
            what,
            ledger,
            (_TRACEBACK, "the lines of EngineCore and of each worker, not of the API server alone"),
        )


def _room(run: _Run, context: _Context, episode: _Episode) -> str:
    """What V0's blocks hold, to be compared with max_model_len, as the end of a sentence."""
    kv = stated_kv(run.events[: episode.before])
    if kv.blocks is None:
        return ""
    size = kv.block_size or context.given.get("block_size") or 16
    return f". {kv.blocks} blocks of {size} hold {kv.blocks * size} tokens: a larger max_model_len does not fit"


_STEPS_OF_THE_START = {"sampler_warmup", "cuda_graph_capture", "kernel_warmup", "multimodal_profile", "memory_profile"}
_STEPS_OF_THE_START |= {"weights_load", "kv_cache_alloc_oom", "sleep_wake_up"}


# Steps that take memory at once and end with a line of their own: a log that ends in one most likely ended there.
_LAST_WORDS = {"graphs_progress": "cuda_graph_capture", "encoder_profile": "multimodal_profile"}


def _unsaid(run: _Run, context: _Context, failed: bool) -> Iterator[Failure]:
    """Failures that stand in numbers alone: a pool of no or too few blocks, and a capture that never ends."""
    if failed:
        return
    for number, event in enumerate(run.events):
        pool, blocks = event.values.get("kv_cache_gib"), event.values.get("gpu_blocks")
        empty = (event.kind in _SAYS_POOL and pool is not None and pool <= 0) or (
            event.kind == "kv_blocks" and blocks == 0
        )
        if empty:
            facts = _facts(run, len(run.events), event, context, ())
            yield _failure("kv_cache_none", "high" if blocks == 0 or pool is not None else "medium", facts, event)
            return
        if event.values.get("max_concurrency", 1.0) < 1.0:
            facts = _facts(run, number + 1, event, context, ())
            yield _failure("max_model_len_exceeds_kv", "medium", facts, event)
            return
    if run.events and not run.stats:
        last = [event for event in run.events if phase_of(event) or event.kind == "graphs_captured"][-1:]
        phase = _LAST_WORDS.get(last[0].kind) if last else None
        if phase and last[0].values.get("progress_percent") in (None, 0.0):
            facts = _facts(run, len(run.events), last[0], context, ())
            cause = RULES[phase].means + "; the log ends in this step, the error itself is not here"
            failure = _failure(phase, "low", facts, last[0], cause=cause)
            yield replace(failure, paste=("what comes after the last line: the error and its traceback",))


def _of_run(run: _Run, context: _Context) -> list[Failure]:
    """The failures of one start, in order; each phase once, with the best reading of it."""
    found: dict[str, Failure] = {}
    for episode in _episodes(run):
        for failure in _of_episode(run, episode, context):
            known = found.get(failure.phase)
            if known is None or CONFIDENCE.index(failure.confidence) < CONFIDENCE.index(known.confidence):
                found[failure.phase] = failure
    if len(found) > 1:  # an engine that is dead says nothing beside the reason
        found.pop("undetermined", None)
    failed = bool(set(found) - {"undetermined"})
    for failure in _unsaid(run, context, failed):
        found.pop("undetermined", None)
        found[failure.phase] = failure
    if run.preempted and not found:
        facts = _facts(run, len(run.events), run.preemptions, context, ())
        found["preemption_not_oom"] = _failure("preemption_not_oom", "high", facts, run.preemptions)
    return list(found.values())


def _context(
    command: Command, config: Mapping | None, card: str | cards.Card | None, total_gib: float | None
) -> _Context:
    given: dict[str, object] = {}
    if isinstance(command, flags.ServeFlags):
        given = command.set()
    elif command:
        words = shlex.split(command) if isinstance(command, str) else list(command)
        while words and (words[0] in ("vllm", "serve", "python", "python3", "-m") or "=" in words[0].split("-")[0]):
            del words[0]
        if words and words[0].startswith("vllm."):
            del words[0]
        given = flags.from_args(flags.take_model(words)[1]).set()
    shape = None
    if config:
        try:
            shape = shapes.from_config(dict(config))
        except (ShapeError, KeyError, TypeError):
            shape = None
    return _Context(given, shape, cards.find(card) if isinstance(card, str) else card, total_gib)


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


def _conclude(reader: Reader, context: _Context) -> Diagnosis:
    failures: list[Failure] = []
    blamed: _Run | None = None
    for run in reader.runs:
        found = _of_run(run, context)
        if blamed is None and any(one.phase not in _NOT_FATAL for one in found):
            blamed = run
        failures += [one for one in found if (one.phase, one.cause) not in {(old.phase, old.cause) for old in failures}]
    root = next((one for one in failures if one.phase not in _NOT_FATAL), None) or next(iter(failures), None)
    run = blamed or reader.runs[-1]
    said = engine(event for one in reader.runs for event in one.events)
    ledger = root.ledger if root and root.ledger else stated_ledger(run.events)
    kv = stated_kv(run.events)
    generation = engine_generation(run.events)
    harmless = tuple((_evidence(event)[0], _HARMLESS[event.kind]) for event in reader.harmless.values())
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
        return Diagnosis(root.phase, enough=enough, paste_also=() if enough else paste or (_TRACEBACK,), **common)
    return _without_failure(run, ledger, kv, harmless, common, context)


def _without_failure(run: _Run, ledger, kv: StatedKV, harmless, common: dict, context: _Context) -> Diagnosis:
    kinds = {event.kind for event in run.events} | ({"stats"} if run.stats else set())
    started = bool(kinds & {"ready", "stats", "iteration"})
    pool = ledger is not None and ledger.kv_cache_gib is not None
    sized = pool or bool(
        kinds & {"engine_ready", "kv_size", "kv_concurrency", "graphs_captured", "graphs_profiled", "kv_given"}
    )
    if started or sized:
        more = () if started else ("what comes after the last line, up to “Application startup complete” or the error",)
        spot = weak_spot(run.events, ledger, kv, run, context)
        return Diagnosis("ok", enough=started, paste_also=more, weak_spot=spot, **common)
    if harmless:
        return Diagnosis("not_a_failure", **common)
    if kinds and run.events[-1].kind == "model_loaded":
        more = ("what comes after “Model loading took”: the profile of a step, then the KV cache; the error is there",)
        return Diagnosis("undetermined", enough=False, paste_also=more, **common)
    more = (_START, _TRACEBACK) if kinds else ("vLLM's own output: lines with INFO, WARNING or ERROR", _START)
    return Diagnosis("undetermined", enough=False, paste_also=more, **common)


def weak_spot(events: list[Event], ledger: MemoryLedger | None, kv: StatedKV, run, context: _Context) -> str | None:
    """What gives first in a start that worked, in a sentence; None where the log states too little."""
    if run.fullest and run.fullest.values["kv_usage_percent"] >= 95.0:
        usage = run.fullest.values["kv_usage_percent"]
        return f"the pool of the KV cache was {usage:g} % full: requests wait or are preempted; no memory runs out"
    if kv.max_concurrency is not None and kv.max_concurrency < 2.0:
        return f"the KV cache: {kv.max_concurrency:g} requests of full length fit, the next one waits"
    if ledger is None:
        return None
    total = context.card.total_gib if context.card else ledger.total_gib
    if total and ledger.budget_gib and not ledger.pool_given:
        outside = total - ledger.budget_gib
        if ledger.graphs_subtracted is False and ledger.cuda_graphs_actual_gib:
            outside -= ledger.cuda_graphs_actual_gib
        if outside < 0.05 * total:
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


# ---- for a terminal ----


def report(found: Diagnosis, fixes: int = 4) -> str:
    """A diagnosis as text for a terminal, free of control characters."""
    lines = []
    head = {"ok": "No failure of memory.", "not_a_failure": "No failure: these lines only look like one."}
    if found.phase in head:
        lines.append(head[found.phase])
    elif not found.failures:
        lines.append("Undetermined: nothing here is known to be of vLLM's memory.")
    if found.starts > 1:
        lines.append(f"{found.starts} starts of a server; a failure that comes again stands once.")
    for number, one in enumerate(found.failures, 1):
        lines += ["", f"{number}. {one.phase} ({one.confidence} confidence)", f"   {_sentence(one.cause)}"]
        if one.missing_gib is not None:
            lines.append(f"   Missing: {show_gib(one.missing_gib)}")
        lines += [f"   {note}" for note in one.notes]
        lines += [f"   line {line.line}: {line.text[:160]}" for line in one.evidence[:3]]
        if one.fixes:
            lines.append("   What helps:")
        for fix in one.fixes[:fixes]:
            gain = "" if fix.gains_gib is None else f" [{show_gib(fix.gains_gib, signed=True)}]"
            change = f"{fix.from_} → {fix.to}" if fix.from_ is not None else f"{fix.to}"
            lines.append(f"   - {fix.flag}: {change}{gain}. {_sentence(fix.why)} Costs: {fix.costs}.")
        if one.will_not_help:
            lines.append("   What cannot help:")
        lines += [f"   - {flag}: {_sentence(why)}" for flag, why in one.will_not_help]
    ledger = found.ledger.known() if found.ledger else {}
    if ledger:
        lines += ["", "Ledger: " + ", ".join(f"{name} {show_gib(size)}" for name, size in ledger.items())]
    if found.weak_spot:
        lines.append(f"Weak spot: {_sentence(found.weak_spot)}")
    lines += [f"Harmless, line {line.line}: {line.text[:100]} ({why})" for line, why in found.harmless]
    if found.paste_also:
        lines += ["", "Paste also:"] + [f"- {what}" for what in found.paste_also]
    return "\n".join("".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines).strip("\n")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
