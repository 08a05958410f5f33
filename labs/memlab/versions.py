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
    estimate of the CUDA graphs is taken off the pool, ``images`` those whose profile runs a vision tower.
    ``second_runner`` says which models the second model runner serves, ``all``, ``dense`` ones or none, besides the
    architectures of ``second_runner_also``; ``buffers`` charges what it keeps for each sequence. ``sampler_bytes`` is
    what the profiled sampler holds for each sequence and word besides the logits, ``sampler_gib`` what it holds
    besides; ``compiled_rows`` the rows of the hidden size that a compiled layer keeps. ``tokens_by_blocks`` is the
    older printed number of tokens. ``unquantized_left``: weights that are quantized as they are loaded leave the last
    large matrix as it was (``weights.unquantized_bytes``): seen in 0.33, not in 0.19, between them in the band.
    ``trtllm_width`` and ``scales_twice``: of mxfp4 experts (``quantization.expert_kernels``; 0.32 has 128 as 0.33 has,
    0.26 has 256 and frees the scales, 0.19 does not).
    Of memory beside PyTorch's each time value, lowest, highest; tensor parallelism adds
    what the collectives keep: ``linked_gib`` where NVLink joins the GPUs, else ``unlinked_gib``.
    """

    since: Version
    source: str
    default_utilization: float = 0.92
    consumed: bool = True
    graphs_off_pool: frozenset[str] = frozenset({"V1", "V2"})
    images: frozenset[str] = frozenset({"V1", "V2"})
    second_runner: str = "all"
    second_runner_also: frozenset[str] = frozenset()
    buffers: bool = True
    split_limit: bool = True
    null_block: bool = True
    unquantized_left: bool = True
    trtllm_width: int = 128
    scales_twice: bool = False
    tokens_by_blocks: bool = False
    in_flight_batches: int = 2
    sampler_bytes: float = 12.0
    sampler_gib: float = 0.01
    first_runner_sampler: tuple[float, float] = (12.43, 0.06)
    step_gib: float = 0.0
    compiled_rows: float = 6.0
    non_torch_gib: tuple[float, float, float] = (0.10, 0.05, 0.30)
    linked_gib: tuple[float, float, float] = (1.85, 0.55, 2.15)
    unlinked_gib: tuple[float, float, float] = (0.15, 0.0, 0.60)

    def runner(self, architecture: str, mixture: bool) -> str:
        """The model runner that serves such a model: ``V1`` or ``V2`` (vllm/config/vllm.py, use_v2_model_runner)."""
        second = {"all": True, "dense": not mixture, "none": False}[self.second_runner]
        return "V2" if second or architecture in self.second_runner_also else "V1"

    def collectives_gib(self, linked: bool) -> tuple[float, float, float]:
        """What tensor parallelism adds beside PyTorch: value, lowest, highest, of one rank.

        With NVLink 1.82 to 1.96 GiB, 9 starts of 0.19.0 on 2 and 4 H100, and 1.79 GiB (vLLM pull request #10511); of
        later versions less is logged, 0.7 GiB on 4 GPUs of compute capability 10, so their band is wide. Without 0.1 to
        0.3 GiB (vLLM issue #14452: RTX 5090, pull request #14447: RTX 3090). What vLLM allocates itself is smaller: 16
        MiB for the custom all-reduce, 4 to 128 MiB of symmetric memory (0.33: vllm/distributed/device_communicators/
        custom_all_reduce.py:138, all_reduce_utils.py:26-80); the rest is NCCL's.
        """
        return self.linked_gib if linked else self.unlinked_gib


# What changed was read in the source of each version; ``compiled_rows``, ``step_gib`` and ``non_torch_gib`` are fitted:
# for 0.33 to the H200 records of the families that ``split.json`` has in the fit half (there 0.08 to 0.14 GiB are taken
# beside PyTorch), for 0.26 to those of one H200, for 0.19 to the fit half of 44 starts on H100.
_V1 = frozenset({"V1"})
_MIXTURES = frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM"})  # of those that are counted here
_FIRST_DENSE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"})
_OF_0_33 = Rules(
    (0, 33),
    "vllm/v1/worker/gpu_worker.py (0.33:676-760), gpu/model_runner.py (0.33:993-1014: the sampler's second pass)",
)
_OF_0_29 = replace(
    _OF_0_33, since=(0, 29), sampler_bytes=0.0, sampler_gib=0.0, trtllm_width=256,
    source="vllm/v1/worker/gpu/model_runner.py (0.29:896: the second runner's graphs are estimated), "
    "vllm/v1/core/kv_cache_utils.py (0.29:975: the null block)",
)  # fmt: skip
_OF_0_27 = replace(
    _OF_0_29, since=(0, 27), graphs_off_pool=_V1, second_runner="dense", second_runner_also=_MIXTURES, null_block=False,
    source="vllm/v1/worker/gpu_worker.py (0.27:526-774: one number, consumed), gpu/model_runner.py (0.27:749)",
)  # fmt: skip
_OF_0_26 = replace(
    _OF_0_27, since=(0, 26), consumed=False, images=_V1, buffers=False,
    step_gib=0.035, compiled_rows=6.5, non_torch_gib=(0.22, 0.15, 0.45),
    source="vllm/v1/worker/gpu_worker.py (0.26:509-553), vllm/config/vllm.py (0.26:527-622)",
)  # fmt: skip
_OF_0_25 = replace(
    _OF_0_26, since=(0, 25), in_flight_batches=1, scales_twice=True,
    source="vllm/config/vllm.py (0.25: dense models on the second runner), vllm/v1/kv_cache_interface.py (0.25:485)",
)  # fmt: skip
_OF_0_24 = replace(
    _OF_0_25, since=(0, 24), second_runner="none", second_runner_also=_MIXTURES | _FIRST_DENSE,
    step_gib=0.0, compiled_rows=5.0, non_torch_gib=(0.25, 0.15, 0.50),
    source="vllm/config/vllm.py (0.24, DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES)",
)  # fmt: skip
_OF_0_23 = replace(_OF_0_24, since=(0, 23), second_runner_also=_FIRST_DENSE, source="vllm/config/vllm.py (0.23)")
_OF_0_22 = replace(
    _OF_0_23, since=(0, 22), second_runner_also=frozenset({"Qwen3ForCausalLM"}), source="vllm/config/vllm.py (0.22)"
)
_OF_0_21 = replace(
    _OF_0_22, since=(0, 21), second_runner_also=frozenset(),
    source="vllm/v1/core/kv_cache_utils.py (0.21:1701-1710), vllm/v1/worker/gpu_worker.py (0.21: split limit)",
)  # fmt: skip
_OF_0_20 = replace(
    _OF_0_21, since=(0, 20), split_limit=False, tokens_by_blocks=True,
    source="vllm/envs.py (0.20:1724: graphs are estimated), vllm/config/cache.py (0.20:66: 0.92)",
)  # fmt: skip
_OF_0_19 = replace(
    _OF_0_20, since=(0, 19), source="44 starts of 0.19.0 on H100 (llm-d-planner's validation data)",
    default_utilization=0.9, graphs_off_pool=frozenset(), linked_gib=(1.85, 1.75, 2.10), unquantized_left=False,
)  # fmt: skip
RULES = (
    _OF_0_19, _OF_0_20, _OF_0_21, _OF_0_22, _OF_0_23, _OF_0_24, _OF_0_25, _OF_0_26, _OF_0_27, _OF_0_29, _OF_0_33,
)  # fmt: skip


def rules_for(version: Version) -> Rules:
    """The rules of a version: those of the last change before it, the first ones for what is older."""
    fitting = [rules for rules in RULES if rules.since <= version]
    return fitting[-1] if fitting else RULES[0]


def validated(version: Version) -> bool:
    """Whether predictions for this version were held to measurements of it."""
    return version in RECORDED
