"""The memory ledger of one GPU (one rank): the terms, the three views, and what each view must add up to.

vLLM decides at start-up. 0.26 (vllm/v1/worker/gpu_worker.py:509-553):

    kv_cache = budget - weights - activation - non_torch - cuda_graphs_estimated

0.27 and later print one number for all that stays allocated (0.32 gpu_worker.py:676-753):

    kv_cache = budget - consumed - activation - cuda_graphs_estimated
"""

from dataclasses import asdict, dataclass, field, fields

from memlab.flags import ServeFlags
from memlab.shapes import ModelShape
from memlab.units import GIB

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

PLANNER = 2  # raise it with every change of a rule, so that a record says which rule it was compared with


@dataclass(frozen=True)
class Prediction:
    """A predicted ledger with a band for each term: the lowest and the highest value expected, in GiB."""

    ledger: MemoryLedger
    bands: dict[str, tuple[float, float]] = field(default_factory=dict)
    kv_tokens: int | None = None
    planner: int = PLANNER

    def to_dict(self) -> dict:
        """For a record: what is known, rounded to a MiB."""
        known = {name: value for name, value in asdict(self.ledger).items() if value is not None}
        rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in known.items()}
        bands = {name: [round(low, 3), round(high, 3)] for name, (low, high) in self.bands.items()}
        return {"planner": self.planner, "ledger": rounded, "bands": bands, "kv_tokens": self.kv_tokens}


def weights_gib(shape: ModelShape, tensor_parallel_size: int = 1) -> float:
    """Parameters and the table of rotary embeddings (cos and sin for every position), for one rank.

    Norms are replicated and embeddings divided with the rest; the error of dividing all is below a tenth of a percent.
    """
    rotary = shape.max_position_embeddings * shape.head_dim * shape.dtype_bytes
    return (shape.parameters() * shape.dtype_bytes / tensor_parallel_size + rotary) / GIB


def buffers_gib(shape: ModelShape, max_num_seqs: int, max_model_len: int, block_size: int = 16) -> float:
    """What the second model runner keeps for each sequence it may run.

    Counts of output tokens (int32 × vocabulary), a bit mask of prompt tokens and one of the grammar (vocabulary / 8
    each), and the block table twice (int32 × blocks). Source: vllm/v1/worker/gpu/sample/penalties.py:43-50,
    structured_outputs.py and block_table.py (0.33).
    """
    per_sequence = shape.vocab_size * (4 + 2 / 8) + 2 * 4 * (-(-max_model_len // block_size))
    return max_num_seqs * per_sequence / GIB


def activation_gib(shape: ModelShape, max_num_batched_tokens: int, max_num_seqs: int, compiled: bool) -> float:
    """Peak of the profiled step: the larger of the forward pass and the sampler.

    Forward: the gated MLP's two inputs and its product, with three rows of the hidden size; torch.compile keeps three
    more (fitted to records of 0.33). Sampler: the profile's second pass samples with top-k and top-p through
    FlashInfer, as `pip install vllm` has it, which holds the logits in the model's type and three float32 copies for
    each sequence, while the step's hidden states are still there (vllm/v1/worker/gpu/model_runner.py:993-1014 and
    vllm/v1/sample/ops/topk_topp_sampler.py, 0.33). Without FlashInfer it is one float32 copy.
    """
    rows = 6 if compiled else 3
    forward = max_num_batched_tokens * (3 * shape.intermediate_size + rows * shape.hidden_size) * shape.dtype_bytes
    logits = min(max_num_seqs, max_num_batched_tokens) * shape.vocab_size * (shape.dtype_bytes + 12)
    sampler = logits + max_num_batched_tokens * shape.hidden_size * shape.dtype_bytes
    return max(forward, sampler) / GIB


# Fitted to records of vLLM 0.33.0 on an H200, CUDA 13; the bands cover other cards.
_CONTEXT_GIB = (0.70, 0.35, 1.00)
_NON_TORCH_GIB = (0.12, 0.05, 0.35)
_GRAPH_LAYER_GIB = 0.92 / (51 * 32)  # estimate for one graph of one layer
_GRAPHS = 51  # captured sizes up to 512


def predict(
    shape: ModelShape, total_gib: float, flags: ServeFlags, vllm_version: tuple[int, int] = (0, 33)
) -> Prediction:
    """The ledger of one rank before anything is started, for a dense shape on a GPU.

    Args:
        shape: of the model.
        total_gib: the card's memory as CUDA reports it.
        flags: resolved (``flags.resolve``): the scheduler's flags must be set.
        vllm_version: 0.27 to 0.33, whose accounting it follows.

    Returns:
        The ledger with ``consumed`` and, where graphs are on, their estimate; bands for what is not exact.
    """
    ranks = flags.tensor_parallel_size or 1
    utilization = 0.92 if flags.gpu_memory_utilization is None else flags.gpu_memory_utilization
    eager = bool(flags.enforce_eager)
    budget = total_gib * utilization
    weights = weights_gib(shape, ranks)
    buffers = buffers_gib(shape, flags.max_num_seqs, flags.max_model_len, flags.block_size or 16)
    non_torch, non_torch_low, non_torch_high = _NON_TORCH_GIB
    consumed = weights + buffers + non_torch
    activation = activation_gib(shape, flags.max_num_batched_tokens, flags.max_num_seqs, not eager)
    graphs = None if eager else _GRAPH_LAYER_GIB * _GRAPHS * shape.num_hidden_layers
    slack = 0.04 + 0.04 * activation
    bands = {
        "weights": (weights - 0.02, weights + 0.05),
        "consumed": (weights + buffers + non_torch_low, weights + 1.1 * buffers + non_torch_high),
        "activation": (activation - slack, activation + slack),
        "context": _CONTEXT_GIB[1:],
    }
    if graphs is not None:
        bands["cuda_graphs_estimated"] = (0.4 * graphs, 2.0 * graphs)
    given = flags.kv_cache_memory_bytes
    if given is not None:
        kv = given / GIB
    else:
        kv = budget - consumed - activation - (graphs or 0.0)
        others = ("consumed", "activation", *(("cuda_graphs_estimated",) if graphs is not None else ()))
        bands["kv_cache"] = (
            budget - sum(bands[name][1] for name in others),
            budget - sum(bands[name][0] for name in others),
        )
    per_token = shape.kv_bytes_per_token(flags.kv_cache_dtype or "auto", ranks)
    block = flags.block_size or 16
    ledger = MemoryLedger(
        view="predicted",
        total_gib=total_gib,
        budget_gib=budget,
        context_gib=_CONTEXT_GIB[0],
        weights_gib=weights,
        consumed_gib=consumed,
        activation_gib=activation,
        cuda_graphs_estimated_gib=graphs,
        kv_cache_gib=kv,
        graphs_subtracted=None if graphs is None else True,
        pool_given=given is not None or None,
    )
    return Prediction(ledger, bands, max(0, int(kv * GIB // (per_token * block)) * block))
