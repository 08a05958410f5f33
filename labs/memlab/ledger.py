"""The memory ledger of one GPU (one rank): the terms, the three views, and what each view must add up to.

vLLM decides at start-up. 0.26 (vllm/v1/worker/gpu_worker.py:509-553):

    kv_cache = budget - weights - activation - non_torch - cuda_graphs_estimated

0.27 and later print one number for all that stays allocated (0.32 gpu_worker.py:676-753):

    kv_cache = budget - consumed - activation - cuda_graphs_estimated
"""

from dataclasses import dataclass, fields

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
