"""What changed between versions of vLLM in how memory is counted, as data with its source."""

from dataclasses import dataclass, replace

Version = tuple[int, int]
FIRST, LAST = (0, 19), (0, 33)
RECORDED = {(0, 19), (0, 26), (0, 33)}  # versions whose rules were held to measurements
RECORDED_PARALLEL = {(0, 19)}  # the same with tensor parallelism
BITSANDBYTES_APART = (0, 28)  # it left vLLM for a plugin (vLLM pull request #43529)


@dataclass(frozen=True)
class Rules:
    """The accounting of the versions from ``since`` on.

    ``consumed``: weights, buffers and non-torch memory are one number. ``graphs_off_pool`` names the runners whose
    estimate of the CUDA graphs is taken off the pool. ``second_runner`` says which models the second model runner
    serves: all, none, or dense ones and the architectures of ``second_runner_mixtures``; ``buffers`` charges what it
    keeps for each sequence. ``sampler_bytes`` is what the profiled sampler holds for each sequence and word besides the
    logits, ``sampler_gib`` what it holds besides; ``compiled_rows`` the rows of the hidden size that a compiled layer
    keeps. ``tokens_by_blocks`` is the older printed number of tokens. Of memory beside PyTorch's each time value,
    lowest, highest; tensor parallelism adds what the collectives keep: ``linked_gib`` where NVLink joins the GPUs,
    else ``unlinked_gib``.
    """

    since: Version
    source: str
    default_utilization: float = 0.92
    consumed: bool = True
    graphs_off_pool: frozenset[str] = frozenset({"V1", "V2"})
    second_runner: str = "all"
    second_runner_mixtures: frozenset[str] = frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM"})
    buffers: bool = True
    split_limit: bool = True
    null_block: bool = True
    tokens_by_blocks: bool = False
    in_flight_batches: int = 2
    sampler_bytes: float = 12.0
    sampler_gib: float = 0.01
    first_runner_sampler: tuple[float, float] = (12.43, 0.06)
    step_gib: float = 0.0
    compiled_rows: float = 6.0
    non_torch_gib: tuple[float, float, float] = (0.12, 0.05, 0.35)
    linked_gib: tuple[float, float, float] = (1.85, 0.55, 2.15)
    unlinked_gib: tuple[float, float, float] = (0.15, 0.0, 0.60)

    def runner(self, architecture: str, mixture: bool) -> str:
        """The model runner that serves such a model: ``V1`` or ``V2`` (vllm/config/vllm.py, 0.26:68-77, 550-622)."""
        dense = not mixture or architecture in self.second_runner_mixtures
        return "V2" if self.second_runner == "all" or (self.second_runner == "dense" and dense) else "V1"

    def collectives_gib(self, linked: bool) -> tuple[float, float, float]:
        """What tensor parallelism adds beside PyTorch: value, lowest, highest, of one rank.

        Measured with NVLink: 1.82 to 1.96 GiB, 11 starts of 0.19.0 on 2 and 4 H100; 1.79 GiB in vLLM pull request
        #10511; 0.7 GiB on 4 GPUs of compute capability 10 with 0.26. Without: 0.1 to 0.3 GiB, from vLLM issue #14452
        (RTX 5090) and pull request #14447 (RTX 3090). The custom all-reduce has 8 MiB more, symmetric memory 4 to
        128 MiB (vllm/distributed/device_communicators/, 0.33: custom_all_reduce.py:138, all_reduce_utils.py:26-80).
        """
        return self.linked_gib if linked else self.unlinked_gib


_OF_0_27 = Rules((0, 27), "vllm/v1/worker/gpu_worker.py (0.33:676-760), vllm/v1/core/kv_cache_planning.py (0.33)")
_OF_0_26 = replace(
    _OF_0_27, since=(0, 26), source="vllm/v1/worker/gpu_worker.py (0.26:509-553), vllm/config/vllm.py (0.26:550-622)",
    consumed=False, graphs_off_pool=frozenset({"V1"}), second_runner="dense", buffers=False, null_block=False,
    sampler_bytes=0.0, sampler_gib=0.0, step_gib=0.035, compiled_rows=6.5, non_torch_gib=(0.22, 0.15, 0.45),
)  # fmt: skip
_OF_0_25 = replace(_OF_0_26, since=(0, 25), source="as 0.26; dense models moved to the second runner in 0.25.1")
_OF_0_21 = replace(
    _OF_0_25, since=(0, 21), source="the line that vLLM prints: CUDA graph memory profiling is on since 0.21.0",
    default_utilization=0.9, second_runner="none", split_limit=False, tokens_by_blocks=True, in_flight_batches=1,
    step_gib=0.0, compiled_rows=5.0, non_torch_gib=(0.25, 0.15, 0.50),
)  # fmt: skip
_OF_0_19 = replace(
    _OF_0_21, since=(0, 19), source="44 starts of 0.19.0 on H100 (llm-d-planner's validation data)",
    graphs_off_pool=frozenset(), linked_gib=(1.85, 1.75, 2.10),
)  # fmt: skip
RULES = (_OF_0_19, _OF_0_21, _OF_0_25, _OF_0_26, _OF_0_27)


def rules_for(version: Version) -> Rules:
    """The rules of a version: those of the last change before it, the first ones for what is older."""
    fitting = [rules for rules in RULES if rules.since <= version]
    return fitting[-1] if fitting else RULES[0]


def validated(version: Version) -> bool:
    """Whether predictions for this version were held to measurements of it."""
    return version in RECORDED
