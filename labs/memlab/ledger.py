"""The memory ledger of one GPU (one rank): the terms, the three views, and what each view must add up to.

vLLM decides at start-up. 0.26 (vllm/v1/worker/gpu_worker.py:509-553):

    kv_cache = budget - weights - activation - non_torch - cuda_graphs_estimated

0.27 and later print one number for all that stays allocated (0.32 gpu_worker.py:676-753):

    kv_cache = budget - consumed - activation - cuda_graphs_estimated
"""

from dataclasses import asdict, dataclass, field, fields

from memlab import weights
from memlab.estimates import Step, buffers_gib, captured_gib, graphs_gib, step
from memlab.flags import ServeFlags
from memlab.kv_layout import Layout, layout
from memlab.quantization import expert_kernels
from memlab.shapes import ModelShape
from memlab.units import GIB
from memlab.versions import Rules, rules_for

VIEWS = ("predicted", "stated", "seen")

# What each term means, in the order in which a stacked bar shows them.
TERMS = {
    "total": "the card's memory as CUDA reports it, which vLLM multiplies",
    "budget": "total × gpu_memory_utilization",
    "context": "taken before vLLM's first snapshot (CUDA context, NCCL); outside the budget",
    "weights": "the model's parameters",
    "non_torch": "taken inside the budget by other than PyTorch",
    "consumed": "weights, runner buffers and non-torch memory, as 0.27 and later state them together",
    "activation": "peak of the profiled step above what stays, without CUDA graphs",
    "cuda_graphs_estimated": "CUDA graphs as estimated before the pool is sized",
    "cuda_graphs_actual": "CUDA graphs as captured",
    "kv_cache": "the pool of KV-cache blocks",
    "unprofiled": "what the run took beyond the budget and the context",
    "baseline": "held on the card before vLLM started, by the driver and by others",
    "peak": "the most that was taken at once, baseline subtracted",
    "headroom": "what was left on the card at the worst moment",
}


@dataclass(frozen=True)
class Identity:
    """Two sides that must agree: ``left_gib`` and ``right_gib`` within ``tolerance_gib``."""

    name: str
    left_gib: float
    right_gib: float
    tolerance_gib: float

    @property
    def holds(self) -> bool:
        return abs(self.left_gib - self.right_gib) <= self.tolerance_gib


@dataclass(frozen=True)
class MemoryLedger:
    """One view of one rank's memory, in GiB. A term that the view cannot know is None, never zero.

    ``graphs_subtracted`` says whether the estimate of the CUDA graphs was taken off the pool (a matter of version and
    runner); ``pool_given`` that the pool's size was given in bytes, so that the budget did not decide it.
    ``device_total`` is NVML's total, larger than ``total`` by what the driver keeps.
    """

    view: str
    total_gib: float | None = None
    device_total_gib: float | None = None
    budget_gib: float | None = None
    context_gib: float | None = None
    weights_gib: float | None = None
    non_torch_gib: float | None = None
    consumed_gib: float | None = None
    activation_gib: float | None = None
    cuda_graphs_estimated_gib: float | None = None
    cuda_graphs_actual_gib: float | None = None
    kv_cache_gib: float | None = None
    unprofiled_gib: float | None = None
    baseline_gib: float | None = None
    peak_gib: float | None = None
    headroom_gib: float | None = None
    graphs_subtracted: bool | None = None
    pool_given: bool | None = None

    def __post_init__(self):
        if self.view not in VIEWS:
            raise ValueError(f"a ledger's view is one of {', '.join(VIEWS)}, not {self.view!r}")

    def term(self, name: str) -> float | None:
        """A term of ``TERMS`` by its name, in GiB, or None where this view does not know it."""
        return getattr(self, f"{name}_gib")

    def known(self) -> dict[str, float]:
        """The terms that this view knows, in the order of ``TERMS``, in GiB."""
        return {name: value for name in TERMS if (value := self.term(name)) is not None}

    def resident(self) -> dict[str, float]:
        """What stays allocated before the pool: ``consumed``, or its parts where the version states them."""
        if self.consumed_gib is not None:
            return {"consumed": self.consumed_gib}
        parts = {"weights": self.weights_gib, "non_torch": self.non_torch_gib}
        return {name: value for name, value in parts.items() if value is not None}

    def budget_terms(self) -> dict[str, float]:
        """The terms that share the budget, in GiB; empty where the view does not know them all."""
        resident = self.resident()
        whole = "consumed" in resident or len(resident) == 2
        if not whole or self.activation_gib is None or self.kv_cache_gib is None:
            return {}
        terms = {**resident, "activation": self.activation_gib}
        if self.graphs_subtracted and self.cuda_graphs_estimated_gib is not None:
            terms["cuda_graphs_estimated"] = self.cuda_graphs_estimated_gib
        return {**terms, "kv_cache": self.kv_cache_gib}

    def identities(self) -> list[Identity]:
        """What this view must satisfy. Stated terms are printed with two decimals: half a unit each is granted."""
        found = []
        terms = self.budget_terms()
        if terms and self.budget_gib is not None and not self.pool_given:
            rounding = 0.0051 * (len(terms) + 2)
            found.append(Identity("the terms fill the budget", sum(terms.values()), self.budget_gib, rounding))
        if None not in (self.baseline_gib, self.peak_gib, self.headroom_gib, self.device_total_gib):
            left = self.baseline_gib + self.peak_gib + self.headroom_gib
            found.append(Identity("baseline, peak and headroom fill the card", left, self.device_total_gib, 0.001))
        if None not in (self.context_gib, self.budget_gib, self.unprofiled_gib, self.peak_gib):
            left = self.context_gib + self.budget_gib + self.unprofiled_gib
            found.append(Identity("context, budget and unprofiled make the peak", left, self.peak_gib, 0.001))
        return found


LEDGER_FIELDS = tuple(field.name for field in fields(MemoryLedger))


# ---- prediction ----

PLANNER = 6  # raise it with every change of a rule, so that a record says which rule it was compared with


@dataclass(frozen=True)
class Stage:
    """One rank of one stage: its ledger, the bands of its terms, what it profiles, how its blocks lie."""

    ledger: MemoryLedger
    bands: dict[str, tuple[float, float]]
    step: Step
    layout: Layout

    @property
    def blocks(self) -> int:
        return int(self.ledger.kv_cache_gib * GIB // self.layout.bytes_per_block)


@dataclass(frozen=True)
class Prediction:
    """A predicted ledger with a band for each term: the lowest and the highest value expected, in GiB.

    ``stages`` has one rank of each stage of a pipeline; ``ledger`` and the bands are those of the ``tightest``, which
    has the fewest blocks: all stages then take as many (vllm/v1/core/kv_cache_planning.py).
    """

    ledger: MemoryLedger
    bands: dict[str, tuple[float, float]] = field(default_factory=dict)
    kv_tokens: int | None = None
    planner: int = PLANNER
    kv_blocks: int | None = None
    max_concurrency: float | None = None
    needed_gib: float | None = None
    step: Step | None = None
    stages: tuple[Stage, ...] = ()
    tightest: int = 0

    def to_dict(self) -> dict:
        """For a record: what is known, rounded to a MiB. Of a pipeline each of its ``stages`` too."""
        found = {"planner": self.planner, **_rounded(self.ledger, self.bands), "kv_tokens": self.kv_tokens}
        if len(self.stages) > 1:
            found["stages"] = [_rounded(stage.ledger, stage.bands) for stage in self.stages]
        return found


def _rounded(ledger: MemoryLedger, bands: dict[str, tuple[float, float]]) -> dict:
    known = {name: value for name, value in asdict(ledger).items() if value is not None}
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in known.items()}
    return {"ledger": rounded, "bands": {name: [round(low, 3), round(high, 3)] for name, (low, high) in bands.items()}}


def weights_gib(shape: ModelShape, tensor_parallel_size: int = 1) -> float:
    """Parameters and tables of one rank, as they lie in memory; see ``weights``."""
    return weights.stage_gib(shape, tensor_parallel_size)


HYBRID_OFF, ASYNC_OFF = "--disable-hybrid-kv-cache-manager", "--no-async-scheduling"  # read from what is passed on
_CONTEXT_GIB = (0.70, 0.35, 1.00)  # H200, CUDA 13; the band covers other cards
_LINKED_FROM_GIB = 70
_GRAPHS_SPREAD = (0.55, 1.75)  # of their estimate, over the starts of 0.19.0 and 0.33.0 (``estimates.graphs_gib``)


def _stage(
    shape: ModelShape, total: float, flags: ServeFlags, rules: Rules, linked: bool, stages: list, number: int
) -> Stage:
    """One rank of stage ``number`` of ``stages``, on a card of ``total`` GiB."""
    ranks, (first, end) = flags.tensor_parallel_size or 1, stages[number]
    block, eager = flags.block_size or 16, bool(flags.enforce_eager)
    seqs, length = flags.max_num_seqs, flags.max_model_len
    budget = total * (
        rules.default_utilization if flags.gpu_memory_utilization is None else flags.gpu_memory_utilization
    )
    weight = weights.stage_gib(shape, ranks, (first, end), rules.split_limit)
    if flags.cpu_offload_gb:
        asked = round(flags.cpu_offload_gb * GIB)
        weight -= weights.offloaded_bytes(shape, asked, ranks, (first, end), rules.split_limit) / GIB
    left = 0.0
    if rules.unquantized_left and flags.quantization and not shape.config.get("quantization_config"):
        left = weights.unquantized_bytes(shape, ranks) / GIB
        weight += left
    runner = rules.runner(shape.architecture, shape.is_mixture)
    ends = {"first": number == 0, "last": number == len(stages) - 1}
    sizes = (flags.max_num_batched_tokens, seqs, length)
    profiled = step(shape, rules, *sizes, not eager, ranks, block, **ends)
    non_torch, low, high = rules.non_torch_gib
    if ranks > 1:
        more = rules.collectives_gib(linked)
        non_torch, low, high = non_torch + more[0], low + more[1], high + more[2]
    graphs = None if eager else graphs_gib(shape, runner, seqs, flags.max_cudagraph_capture_size, end - first)
    subtracted = graphs is not None and runner in rules.graphs_off_pool
    slack = 0.04 + 0.04 * profiled.peak_gib
    retained = profiled.retained_gib
    activation = profiled.peak_gib
    lightest = weight - left
    bands = {"weights": (lightest * 0.996 - 0.02, weight * 1.004 + 0.03), "context": _CONTEXT_GIB[1:]}
    terms = {"weights": weight}
    if rules.consumed:
        buffers = buffers_gib(shape, seqs, length, block) if rules.buffers else 0.0
        terms["consumed"] = weight + buffers + non_torch + retained
        least = lightest + buffers + low + 0.9 * retained
        bands["consumed"] = (least, weight + 1.1 * buffers + high + 1.1 * retained)
    else:
        activation += retained
        terms["non_torch"] = non_torch
        bands["non_torch"] = (low, high)
    slack += 0.05 if retained or profiled.vision_gib else 0.0
    terms["activation"] = activation
    bands["activation"] = (activation - slack, activation + slack)
    if graphs is not None:
        bands["cuda_graphs_estimated"] = tuple(factor * graphs for factor in _GRAPHS_SPREAD)
    taken = {name: value for name, value in terms.items() if name != "weights" or not rules.consumed}
    if subtracted:
        taken["cuda_graphs_estimated"] = graphs
    if flags.kv_cache_memory_bytes is None:
        pool = budget - sum(taken.values())
        bands["kv_cache"] = tuple(budget - sum(bands[name][edge] for name in taken) for edge in (1, 0))
    else:
        pool = flags.kv_cache_memory_bytes / GIB
    ledger = MemoryLedger(
        view="predicted",
        total_gib=total,
        budget_gib=budget,
        context_gib=_CONTEXT_GIB[0],
        cuda_graphs_estimated_gib=graphs,
        cuda_graphs_actual_gib=None if graphs is None or subtracted else captured_gib("V1", end - first),
        kv_cache_gib=pool,
        graphs_subtracted=None if graphs is None else subtracted,
        pool_given=flags.kv_cache_memory_bytes is not None or None,
        **{f"{name}_gib": value for name, value in terms.items()},
    )
    hybrid = HYBRID_OFF not in flags.extra
    pages = layout(shape, flags.kv_cache_dtype or "auto", ranks, block, (first, end), hybrid)
    return Stage(ledger, bands, profiled, pages)


def joined(total_gib: float, linked: bool | None) -> bool:
    """Whether NVLink joins cards of which that may not be known: servers join those of 70 GiB or more."""
    return total_gib >= _LINKED_FROM_GIB if linked is None else linked


def served(
    shape: ModelShape, flags: ServeFlags, vllm_version: tuple[int, int], capability: tuple[int, int] | None = None
) -> ModelShape:
    """The shape as flags, version and card make it; arguments as of ``predict``.

    Raises:
        ShapeError: for a data type or quantization that cannot be had of this checkpoint.
    """
    rules = rules_for(vllm_version)
    kernels = expert_kernels(capability, rules.trtllm_width, rules.scales_twice)
    return shape.served(flags.dtype, flags.quantization, kernels)


def predict(
    shape: ModelShape,
    total_gib: float,
    flags: ServeFlags,
    vllm_version: tuple[int, int] = (0, 33),
    linked: bool | None = None,
    capability: tuple[int, int] | None = None,
) -> Prediction:
    """The ledger of one rank before anything is started, on a GPU.

    Args:
        shape: of the model, as its checkpoint is.
        total_gib: the card's memory as CUDA reports it.
        flags: resolved (``flags.resolve``): the scheduler's flags must be set.
        vllm_version: whose accounting is followed (``versions.rules_for``).
        linked: whether NVLink joins the ranks of tensor parallelism; None where it is not known.
        capability: the card's compute capability, for the padding of its kernels; None where it is not known.

    Returns:
        The ledger with what the version states; bands for what is not exact.

    Raises:
        ShapeError: for a data type or quantization that cannot be counted.
    """
    rules = rules_for(vllm_version)
    shape = served(shape, flags, vllm_version, capability)
    linked = joined(total_gib, linked)
    split = shape.stages(flags.pipeline_parallel_size or 1)
    stages = [_stage(shape, total_gib, flags, rules, linked, split, number) for number in range(len(split))]
    tightest = min(range(len(stages)), key=lambda number: stages[number].blocks)
    here = stages[tightest]
    blocks = max(0, here.blocks)
    if flags.num_gpu_blocks_override is not None:
        blocks = flags.num_gpu_blocks_override
    length, pages = flags.max_model_len, here.layout
    per_request = pages.blocks_per_request(length, in_flight_tokens(flags, rules))
    concurrency = blocks / per_request
    tokens = blocks // len(pages.groups) * pages.block_size if rules.tokens_by_blocks else int(concurrency * length)
    return Prediction(
        ledger=here.ledger,
        bands=here.bands,
        kv_tokens=tokens,
        kv_blocks=blocks,
        max_concurrency=concurrency,
        needed_gib=per_request * pages.bytes_per_block / GIB,
        step=here.step,
        stages=tuple(stages),
        tightest=tightest,
    )


def in_flight_tokens(flags: ServeFlags, rules: Rules) -> int:
    """Tokens of the steps that may be under way at once (vllm/config/vllm.py, 0.33:588-609)."""
    batches = rules.in_flight_batches - 1 + (flags.pipeline_parallel_size or 1)
    return (1 if ASYNC_OFF in flags.extra else batches) * flags.max_num_batched_tokens
