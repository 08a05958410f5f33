"""A plan: what vLLM will say of a start before it is tried, why it would fail, and the least change that helps."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from memlab import versions, weights
from memlab.cards import Card, batch_defaults, block_size
from memlab.errors import FlagError, ShapeError
from memlab.flags import ServeFlags, check, resolve
from memlab.kv_layout import layout
from memlab.ledger import HYBRID_OFF, Prediction, in_flight_tokens, joined, predict, served
from memlab.quantization import FP8_BLOCK, ExpertKernels
from memlab.shapes import ModelShape
from memlab.units import GIB, MIB, show_gib
from memlab.versions import Version

RESERVE_GIB = 150 / 1024  # what vLLM itself leaves beside a pool that it suggests (gpu_worker.py, 0.33)
_HOST_GIB = 4.0  # one worker with torch and CUDA loaded, beside the weights that pass through
_COUNTS = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "num_gpu_blocks_override": 1,
    "max_cudagraph_capture_size": 0,
    "long_prefill_token_threshold": 0,
}
_MOST = (1 << 31) - 1  # vLLM keeps counts as int32
_SHARE_STEPS = 100  # of gpu_memory_utilization: changes are in hundredths
TOKENS_STEP, BYTES_STEP = 16, 64 * MIB  # of max_num_batched_tokens and kv_cache_memory_bytes
_MOST_RANKS, _MOST_STAGES = 16, 8  # that a change proposes
_SEE = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."

# Why a start fails: its flags or the card rule it out, the budget is not free, an allocation fails, the pool is short.
_REFUSED, _BUDGET, _MEMORY, _POOL = "refused", "budget", "memory", "pool"

# The least compute capability of a quantization method, ``get_min_capability`` in
# vllm/model_executor/layers/quantization/ (0.33); of compressed-tensors that of its schemes.
_LEAST_CAPABILITY = {
    "fp8": (7, 5),
    "awq": (7, 5),
    "gptq": (6, 0),
    "mxfp4": (8, 0),
    "compressed-tensors": (7, 5),
    "bitsandbytes": (7, 0),
}
_FLASHINFER_HEADS = (64, 128, 256, 512)  # vllm/v1/attention/backends/flashinfer.py (0.33:690-693)


@dataclass(frozen=True)
class Change:
    """The smallest change of one flag that lets vLLM start; the pool that it then has, in GiB."""

    flag: str
    from_: object
    to: object
    kv_cache_gib: float

    def to_dict(self) -> dict:
        return {"flag": self.flag, "from": self.from_, "to": self.to, "kv_cache_gib": round(self.kv_cache_gib, 2)}


@dataclass(frozen=True)
class Plan:
    """What was asked, what is predicted, and what follows. ``flags`` are resolved, ``given`` as they were given.

    ``failed_check`` is the first check that fails, in vLLM's words; None where it starts. ``headroom_gib`` is what is
    left on the card beyond the budget and the context. ``suggested_kv_cache_bytes`` fills the budget after the graphs.
    """

    shape: ModelShape
    card: Card
    version: Version
    given: ServeFlags
    flags: ServeFlags
    prediction: Prediction
    failed_check: str | None
    changes: list[Change] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def starts(self) -> bool:
        return self.failed_check is None

    @property
    def reachable_kv_tokens(self) -> int:
        """Tokens that the requests of one moment can fill at most: max_num_seqs × max_model_len."""
        return self.flags.max_num_seqs * self.flags.max_model_len

    @property
    def headroom_gib(self) -> float:
        ledger = self.prediction.ledger
        taken = ledger.budget_gib
        if ledger.pool_given:
            taken = sum(ledger.budget_terms().values())
        outside = 0.0 if ledger.graphs_subtracted else ledger.cuda_graphs_actual_gib or 0.0
        return ledger.total_gib - ledger.context_gib - taken - outside

    @property
    def host_gib(self) -> float:
        """Host memory: each rank's process, what is kept there of the weights, and the token ids of all requests
        (int32, max_num_seqs × max_model_len: vllm/v1/worker/gpu/states.py, 0.33:33-43). Loading takes more."""
        tokens = 4 * self.reachable_kv_tokens / GIB
        return self.flags.world_size * (_HOST_GIB + (self.flags.cpu_offload_gb or 0.0) + tokens)

    @property
    def suggested_kv_cache_bytes(self) -> int | None:
        """For ``--kv-cache-memory-bytes``: the pool less what vLLM keeps free beside it; None where nothing is left."""
        ledger = self.prediction.ledger
        outside = 0.0 if ledger.graphs_subtracted else ledger.cuda_graphs_actual_gib or 0.0
        left = ledger.kv_cache_gib - outside - RESERVE_GIB
        return int(left * GIB) if left > 0 and not ledger.pool_given else None

    def command(self, model: str = "MODEL") -> str:
        """The ``vllm serve`` line, with the flags as given, and the variable that decides the stages."""
        stages = self.shape.stage_layers if (self.given.pipeline_parallel_size or 1) > 1 else None
        variable = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, stages))} " if stages else ""
        return variable + self.given.command(model)

    @property
    def layers_of_stages(self) -> list[tuple[int, int]]:
        """(first, end) layers of each stage of the pipeline, in the order of ``prediction.stages``."""
        return self.shape.stages(len(self.prediction.stages))

    def to_dict(self) -> dict:
        """The plan as JSON has it, in GiB and tokens."""
        ledger, prediction = self.prediction.ledger, self.prediction
        non_torch = ledger.non_torch_gib
        if non_torch is None:
            non_torch = ledger.consumed_gib - ledger.weights_gib
        actual = ledger.cuda_graphs_actual_gib
        graphs = ledger.cuda_graphs_estimated_gib if actual is None else actual
        names = {"cuda_graphs_estimated": "cuda_graphs"}
        bands = {names.get(name, name): [round(v, 3) for v in band] for name, band in prediction.bands.items()}
        return {
            "starts": self.starts,
            "budget_gib": round(ledger.budget_gib, 3),
            "weights_gib": round(ledger.weights_gib, 3),
            "activation_gib": round(ledger.activation_gib, 3),
            "non_torch_gib": round(non_torch, 3),
            "cuda_graphs_gib": round(graphs or 0.0, 3),
            "kv_cache_gib": round(ledger.kv_cache_gib, 3),
            "kv_tokens": prediction.kv_tokens,
            "kv_blocks": prediction.kv_blocks,
            "max_concurrency": round(prediction.max_concurrency, 2),
            "reachable_kv_tokens": self.reachable_kv_tokens,
            "bands": bands,
            "failed_check": self.failed_check,
            "changes": [change.to_dict() for change in self.changes],
            "consumed_gib": None if ledger.consumed_gib is None else round(ledger.consumed_gib, 3),
            "graphs_off_pool": bool(ledger.graphs_subtracted),
            "needed_gib": round(prediction.needed_gib, 3),
            "headroom_gib": round(self.headroom_gib, 3),
            "host_gib": round(self.host_gib, 1),
            "suggested_kv_cache_memory_bytes": self.suggested_kv_cache_bytes,
            "stages": [
                {
                    "layers": list(layers),
                    "weights_gib": round(stage.ledger.weights_gib, 3),
                    "activation_gib": round(stage.ledger.activation_gib, 3),
                    "kv_cache_gib": round(stage.ledger.kv_cache_gib, 3),
                    "kv_blocks": stage.blocks,
                }
                for layers, stage in zip(self.layers_of_stages, prediction.stages, strict=True)
            ],
            "warnings": self.warnings,
            "command": self.command(),
        }


def plan(
    shape: ModelShape,
    card: Card,
    given: ServeFlags,
    version: Version = versions.LAST,
    usage: str = "server",
    changes: bool = True,
) -> Plan:
    """The plan of one server.

    Args:
        shape: of the model, as its checkpoint is.
        card: each GPU.
        given: vLLM's flags; what is left open gets vLLM's own default for this card and version.
        version: (0, 19) to (0, 33); an older or newer one is counted by the nearest rules.
        usage: ``server`` or ``offline``.
        changes: look for changes that let it start, where it does not: that takes a hundred predictions.

    Raises:
        FlagError: for flags that vLLM refuses whatever the card.
        ShapeError: for a model or data type that is not counted.
    """
    _refuse(shape, given)
    flags = resolved(shape, card, given, version, usage)
    if flags.max_model_len and given.max_model_len == -1:
        flags = _fit_length(shape, card, flags, version)
    prediction = predict(shape, card.total_gib, flags, version, card.linked, card.compute_capability)
    failed = _failure(shape, card, flags, prediction, version)
    found = _changes(shape, card, given, version, usage, failed[0]) if failed and changes else []
    if failed and failed[0] == _POOL and given.max_model_len == -1:
        failed = (
            _POOL,
            (
                "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try "
                "increasing `gpu_memory_utilization`."
            ),
        )
    warnings = _warnings(shape, card, flags, prediction, version, failed)
    return Plan(shape, card, version, given, flags, prediction, failed[1] if failed else None, found, warnings)


def resolved(shape: ModelShape, card: Card, given: ServeFlags, version: Version, usage: str = "server") -> ServeFlags:
    """Flags as vLLM fills them in on this card."""
    tokens, seqs = batch_defaults(card.total_gib, card.name, version, usage)
    filled = resolve(given, tokens, seqs, shape.max_model_len)
    if filled.block_size is not None:
        return filled
    return filled.with_(block_size=block_size(card, shape.uses_latent_attention, given.kv_cache_dtype))


def _shown(value: int) -> str:
    return str(value) if abs(value) < 10**18 else "of more than 18 digits"


def _refuse(shape: ModelShape, flags: ServeFlags) -> None:
    """Refuse what has no meaning, so that nothing can be counted."""
    for name, least in _COUNTS.items():
        value = getattr(flags, name)
        if value is not None and not least <= value <= _MOST:
            raise FlagError(f"{name} {_shown(value)} must be at least {least} and at most {_MOST}")
    share, stages = flags.gpu_memory_utilization, flags.pipeline_parallel_size or 1
    if share is not None and not 0 < share <= 1:
        raise FlagError(f"gpu_memory_utilization {share} is no share of the card: give more than 0 and at most 1")
    if stages > shape.num_hidden_layers:
        raise FlagError(f"pipeline_parallel_size {stages} is more than the model's {shape.num_hidden_layers} layers")
    if flags.cpu_offload_gb is not None and not 0 <= flags.cpu_offload_gb <= _MOST:
        raise FlagError(f"cpu_offload_gb {flags.cpu_offload_gb} must not be negative: give GiB of weights, such as 10")
    if flags.kv_cache_memory_bytes is not None and not 1 <= flags.kv_cache_memory_bytes < 1 << 50:
        raise FlagError(
            f"kv_cache_memory_bytes {_shown(flags.kv_cache_memory_bytes)} must be at least 1 and fit a card"
        )
    length = flags.max_model_len
    if length is not None and length != -1 and not 1 <= length <= _MOST:
        raise FlagError(f"max_model_len {_shown(length)} must be at least 1 and at most {_MOST}, or auto")


def _fit_length(shape: ModelShape, card: Card, flags: ServeFlags, version: Version) -> ServeFlags:
    """``--max-model-len auto``: the longest request that the pool holds."""

    def fits(length: int) -> bool:
        one = flags.with_(max_model_len=length)
        found = predict(shape, card.total_gib, one, version, card.linked, card.compute_capability)
        return found.needed_gib <= found.ledger.kv_cache_gib - _null_block(found, version)

    return flags.with_(max_model_len=_largest(1, flags.max_model_len, fits) or flags.max_model_len)


def _null_block(prediction: Prediction, version: Version) -> float:
    """The block that the pool always holds back, where the version's check leaves it out."""
    if not versions.rules_for(version).null_block or not prediction.kv_blocks:
        return 0.0
    return prediction.ledger.kv_cache_gib / (prediction.kv_blocks + 1)


def _largest(low: int, high: int, fits) -> int | None:
    """The largest number from ``low`` to ``high`` that fits, where fewer always fit better; None if none does."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def failed_check(
    shape: ModelShape, card: Card, flags: ServeFlags, prediction: Prediction, version: Version
) -> str | None:
    """The first check of a start that fails, in vLLM's words; None where it starts.

    Sources: vllm/v1/worker/utils.py (0.33:763), vllm/v1/core/kv_cache_planning.py (0.33:50-88), and PyTorch's own words
    where an allocation fails.
    """
    found = _failure(shape, card, flags, prediction, version)
    return found[1] if found else None


def _failure(
    shape: ModelShape, card: Card, flags: ServeFlags, prediction: Prediction, version: Version
) -> tuple[str, str] | None:
    """Why it fails (``_REFUSED`` and so on), and the check in vLLM's words."""
    try:
        check(flags, shape.max_model_len)
    except FlagError as refused:
        return _REFUSED, str(refused)
    refusal = _indivisible(shape, flags.tensor_parallel_size or 1) or _ruled_out(shape, card, flags)
    if refusal:
        return _REFUSED, refusal
    ledger = prediction.ledger
    free = ledger.total_gib - ledger.context_gib
    if free < ledger.budget_gib:
        utilization = ledger.budget_gib / ledger.total_gib
        return _BUDGET, (
            f"Free memory on device cuda:0 ({free:.2f}/{ledger.total_gib:.2f} GiB) on startup is less than desired GPU "
            f"memory utilization ({utilization:g}, {ledger.budget_gib:.2f} GiB). Decrease GPU memory utilization or "
            "reduce GPU memory used by other processes."
        )
    for stage in (each.ledger for each in prediction.stages):
        resident = sum(stage.resident().values())
        if stage.weights_gib > free:
            return (
                _MEMORY,
                f"CUDA out of memory while the weights load: {show_gib(stage.weights_gib)} into {show_gib(free)}.",
            )
        if resident + stage.activation_gib > free:
            return _MEMORY, (
                f"CUDA out of memory in the profiled step: {show_gib(stage.activation_gib)} beside "
                f"{show_gib(resident)} on {show_gib(free)}."
            )
    pool = ledger.kv_cache_gib - _null_block(prediction, version)
    if pool <= 0 or prediction.kv_blocks < 1:
        return _POOL, (
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            f"engine. {_SEE}"
        )
    if flags.num_gpu_blocks_override is not None:
        pool = prediction.needed_gib * prediction.max_concurrency
    if prediction.needed_gib > pool:
        longest = _longest(shape, flags, prediction, version)
        estimate = (
            f"Based on the available memory, the estimated maximum model length is {longest}. " if longest else ""
        )
        return _POOL, (
            f"To serve at least one request with the model's max seq len ({flags.max_model_len}), "
            f"({prediction.needed_gib:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
            f"({pool:.2f} GiB). {estimate}Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
            f"initializing the engine. {_SEE}"
        )
    for stage in (each.ledger for each in prediction.stages):
        if ledger.pool_given and sum(stage.resident().values()) + stage.activation_gib + stage.kv_cache_gib > free:
            return _MEMORY, (
                f"CUDA out of memory while the KV cache is allocated: {show_gib(stage.kv_cache_gib)} do not fit."
            )
    return None


def _longest(shape: ModelShape, flags: ServeFlags, prediction: Prediction, version: Version) -> int:
    """The longest request that the pool as it is would hold (kv_cache_planning.py, _estimate_max_model_len)."""
    rules, ranks = versions.rules_for(version), flags.tensor_parallel_size or 1
    hybrid = HYBRID_OFF not in flags.extra
    pages = layout(shape, flags.kv_cache_dtype or "auto", ranks, flags.block_size or 16, hybrid=hybrid)
    usable = prediction.kv_blocks - (1 if rules.null_block else 0)
    return pages.longest(usable, flags.max_model_len, in_flight_tokens(flags, rules))


def _indivisible(shape: ModelShape, ranks: int) -> str | None:
    """Why a model does not divide among the ranks of tensor parallelism.

    Sources: vllm/config/model.py (0.33:1557-1564), vllm/distributed/utils.py (0.33:50-55, 135-155),
    vllm/model_executor/layers/quantization/utils/fp8_utils.py (0.33:1318-1327). gpt-oss pads its experts.
    """
    heads, pairs = shape.num_attention_heads, shape.num_key_value_heads
    if heads % ranks:
        return f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({ranks})."
    if not shape.latent and (pairs % ranks if pairs >= ranks else ranks % pairs):
        return f"{max(pairs, ranks)} is not divisible by {min(pairs, ranks)} (KV heads and tensor parallel size)"
    experts = shape.experts
    widths = [] if experts and len(experts.layers) == shape.num_hidden_layers else [shape.intermediate_size]
    if experts and shape.architecture != "GptOssForCausalLM":
        widths += [experts.intermediate_size, experts.shared_size]
    quantized = shape.quantization
    for width in widths:
        if width % ranks:
            return f"{width} is not divisible by {ranks} (width of a layer and tensor parallel size)"
        whole = quantized and (FP8_BLOCK if quantized.block else quantized.group_size)
        if whole and ranks > 1 and width // ranks % whole:
            return (
                f"Weight input_size_per_partition = {width // ranks} is not divisible by {whole}: "
                "tensor_parallel_size splits the layer into shards that are not a whole number of quantization groups."
            )
    return None


def _ruled_out(shape: ModelShape, card: Card, flags: ServeFlags) -> str | None:
    """What the card's compute capability, or the checkpoint's own quantization, rules out.

    Sources: vllm/platforms/cuda.py (0.33:639-657), vllm/config/vllm.py (0.33:925-936), vllm/config/model.py
    (0.33:1452-1462), vllm/v1/attention/backends/triton_attn.py (0.33:509-530) and flashinfer.py (0.33:690-703).
    """
    capability = ".".join(map(str, card.compute_capability))
    if flags.dtype == "bfloat16" and card.compute_capability < (8, 0):
        return (
            f"Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your {card.name} GPU has "
            f"compute capability {capability}. You can use float16 instead by explicitly setting the `dtype` flag in "
            "CLI, for example: --dtype=half."
        )
    own = shape.quantization
    if own and flags.quantization and own.method not in flags.quantization.replace("_", "-"):
        return (
            f"Quantization method specified in the model config ({own.method}) does not match the quantization method "
            f"specified in the `quantization` argument ({flags.quantization})."
        )
    method = own.method if own else flags.quantization
    least = _LEAST_CAPABILITY.get(method, (0, 0))
    if card.compute_capability < least:
        return (
            f"The quantization method {method} is not supported for the current GPU. Minimum capability: "
            f"{least[0] * 10 + least[1]}. Current capability: {capability.replace('.', '')}."
        )
    if reads_fp8(shape, card, flags.kv_cache_dtype or "auto") is False:
        instead = "float16" if card.compute_capability < (8, 0) else "bfloat16"
        return (
            f"FP8 KV cache is not supported by the Triton attention backend on {card.name} (compute capability "
            f"{capability}); native FP8 (fp8e4nv) requires SM89+. Re-run with --kv-cache-dtype {instead}."
        )
    return None


def reads_fp8(shape: ModelShape, card: Card, kv_cache_dtype: str) -> bool | None:
    """Whether attention on this card reads such an fp8 KV cache; None for other data types.

    From compute capability 8.9 on every backend does. From 8.0 on FlashInfer does, which vLLM installs: for heads of
    64, 128, 256 or 512, without attention sinks or latent attention, and not scaled by token and head.
    """
    if not kv_cache_dtype.startswith("fp8"):
        return None
    if card.compute_capability >= (8, 9):
        return True
    flashinfer = shape.head_dim in _FLASHINFER_HEADS and not shape.sinks and not shape.latent
    return flashinfer and card.compute_capability >= (8, 0) and kv_cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2")


def _first(low: int, high: int, enough: Callable[[int], bool]) -> int | None:
    """The first number from ``low`` to ``high`` that is enough, where each later one is; None where none is."""
    if low > high or not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def _changes(shape: ModelShape, card: Card, given: ServeFlags, version: Version, usage: str, why: str) -> list[Change]:
    """For each flag that can help alone, the smallest change with which the server starts, the mildest flags first.

    ``why`` it fails now says in which direction a flag can help.
    """
    now = resolved(shape, card, given, version, usage)
    share = given.gpu_memory_utilization or versions.rules_for(version).default_utilization
    found: list[Change] = []

    def outcome(**flags) -> tuple[str | None, float]:
        """Why such a server fails, None where it starts, and its pool in GiB."""
        asked = given.with_(**flags)
        try:
            _refuse(shape, asked)
            full = resolved(shape, card, asked, version, usage)
            if asked.max_model_len == -1:
                full = full.with_(max_model_len=1)  # it starts where one token fits
            predicted = predict(shape, card.total_gib, full, version, card.linked, card.compute_capability)
        except (FlagError, ShapeError):
            return _REFUSED, 0.0
        failed = _failure(shape, card, full, predicted, version)
        return (failed[0] if failed else None), predicted.ledger.kv_cache_gib

    def starts(flag: str, value) -> bool:
        return outcome(**{flag: value})[0] is None

    def add(flag: str, before, value) -> bool:
        """Keep the change if it lets the server start."""
        if value is None:
            return False
        failed, pool = outcome(**{flag: value})
        if failed is None:
            found.append(Change(flag, before, value, pool))
        return failed is None

    def any_of(flag: str, before, values) -> None:
        next((value for value in values if add(flag, before, value)), None)

    def less(flag: str, before: int, least: int, step: int = 1) -> None:
        """The largest value below ``before``, in whole steps, that starts."""
        value = _largest(-(-least // step), (before - 1) // step, lambda count: starts(flag, count * step))
        add(flag, before, None if value is None else value * step)

    if why == _BUDGET:
        place = _largest(1, math.ceil(share * _SHARE_STEPS) - 1, lambda n: outcome(
            gpu_memory_utilization=n / _SHARE_STEPS)[0] != _BUDGET)  # fmt: skip
        add("gpu_memory_utilization", share, place and place / _SHARE_STEPS)
    elif why == _POOL and given.kv_cache_memory_bytes is None:
        place = _first(math.floor(share * _SHARE_STEPS) + 1, _SHARE_STEPS, lambda n: outcome(
            gpu_memory_utilization=n / _SHARE_STEPS)[0] != _POOL)  # fmt: skip
        add("gpu_memory_utilization", share, place and place / _SHARE_STEPS)
    if given.kv_cache_memory_bytes is not None:
        bytes_, most = given.kv_cache_memory_bytes, int(card.total_gib * GIB)
        if why == _POOL:
            place = _first(bytes_ // BYTES_STEP + 1, most // BYTES_STEP, lambda n: outcome(
                kv_cache_memory_bytes=n * BYTES_STEP)[0] != _POOL)  # fmt: skip
            add("kv_cache_memory_bytes", bytes_, place and place * BYTES_STEP)
        else:
            less("kv_cache_memory_bytes", min(bytes_, most), BYTES_STEP, BYTES_STEP)
    if given.max_model_len != -1:
        less("max_model_len", now.max_model_len, 1)
    tokens, seqs, whole = now.max_num_batched_tokens, now.max_num_seqs, not now.enable_chunked_prefill
    least = max(given.max_num_seqs or 1, now.max_model_len if whole else 1)
    if tokens < least:
        add("max_num_batched_tokens", tokens, least)
    else:
        less("max_num_batched_tokens", tokens, least, TOKENS_STEP)
    less("max_num_seqs", seqs, 1)
    if given.enable_chunked_prefill is False:
        add("enable_chunked_prefill", False, True)
    if given.block_size is not None:
        any_of("block_size", given.block_size, [block_size(card, shape.uses_latent_attention, given.kv_cache_dtype)])
    if given.num_gpu_blocks_override is not None:
        before, most = given.num_gpu_blocks_override, _MOST // now.block_size
        enough = _first(before + 1, most, lambda count: starts("num_gpu_blocks_override", count))
        add("num_gpu_blocks_override", before, enough)
    dtype = given.kv_cache_dtype or "auto"
    add("kv_cache_dtype", dtype, "auto" if dtype != "auto" else "fp8")
    if not given.enforce_eager:
        add("enforce_eager", False, True)
    if (given.dtype or "auto") in ("bfloat16", "float32"):
        add("dtype", given.dtype, "half")
    if given.quantization:
        any_of("quantization", given.quantization, [shape.quantization.method] if shape.quantization else [])
    elif not shape.quantization:
        add("quantization", None, "fp8")
    ranks, stages = given.tensor_parallel_size or 1, given.pipeline_parallel_size or 1
    fewer = range(min(ranks, _MOST_RANKS + 1) - 1, 0, -1) if _indivisible(shape, min(ranks, _MOST)) else ()
    more = range(ranks + 1, _MOST_RANKS + 1)
    any_of("tensor_parallel_size", ranks, [n for n in (*fewer, *more) if not _indivisible(shape, n)])
    any_of("pipeline_parallel_size", stages, range(stages + 1, min(_MOST_STAGES, shape.num_hidden_layers) + 1))
    offloaded = given.cpu_offload_gb or 0
    whole = served(shape, given, version, card.compute_capability)
    heaviest = math.ceil(max(weights.stage_gib(whole, ranks, stage) for stage in shape.stages(stages)))
    add("cpu_offload_gb", offloaded, _first(
        math.floor(offloaded) + 1, heaviest, lambda gib: starts("cpu_offload_gb", gib)))  # fmt: skip
    return found


def _warnings(
    shape: ModelShape,
    card: Card,
    flags: ServeFlags,
    prediction: Prediction,
    version: Version,
    failed: tuple[str, str] | None,
) -> list[str]:
    said = []
    ledger, ranks = prediction.ledger, flags.tensor_parallel_size or 1
    if not versions.validated(version):
        nearest = versions.rules_for(version).since
        said.append(
            f"not validated: no run of vLLM 0.{version[1]} is recorded; the rules are those from 0.{nearest[1]} on"
        )
    elif ranks > 1 and version not in versions.RECORDED_PARALLEL:
        said.append(
            f"no run of vLLM 0.{version[1]} with tensor parallelism is recorded: what its collectives keep is taken "
            "from other versions, and the band of non-torch memory is wide"
        )
    if not card.source:
        said.append("the card's compute capability is not known: nothing is ruled out by it")
    if len(prediction.stages) > 1:
        said.append(
            f"the terms are those of stage {prediction.tightest + 1} of {len(prediction.stages)}, which has room for "
            "the fewest blocks: every stage takes as many"
        )
    low, high = prediction.bands.get("kv_cache", (ledger.kv_cache_gib,) * 2)
    if failed is None and low < prediction.needed_gib:
        said.append(
            f"it is close: one request of full length needs {show_gib(prediction.needed_gib)}, and the pool may be as "
            f"small as {show_gib(max(low, 0.0))}"
        )
    elif failed and failed[0] == _POOL and high >= prediction.needed_gib:
        said.append(f"it is close: the pool may be as large as {show_gib(high)}")
    free = ledger.total_gib - ledger.context_gib - ledger.budget_gib
    if not ledger.pool_given and 0 <= free < 1.0:
        said.append(
            f"{show_gib(free)} are left on the card beside the budget. Fewer batched tokens do not raise "
            "that: what the step no longer takes goes to the pool. Lower gpu_memory_utilization, or give the "
            "pool in bytes"
        )
    reachable = flags.max_num_seqs * flags.max_model_len
    if prediction.kv_tokens and reachable < prediction.kv_tokens:
        said.append(
            f"the pool holds more than all requests together can fill ({reachable:,} tokens): it can be given in bytes"
        )
    if card.compute_capability < (8, 0) and card.source:
        said.append("FlashAttention needs compute capability 8.0: vLLM's Triton kernels take its place")
    if reads_fp8(shape, card, flags.kv_cache_dtype or "auto") and card.compute_capability < (8, 9):
        said.append("below compute capability 8.9 only FlashInfer reads an fp8 KV cache: it must be installed")
    method = shape.quantization.method if shape.quantization else flags.quantization
    if method == "bitsandbytes" and version >= versions.BITSANDBYTES_APART:
        said.append("from vLLM 0.28 on bitsandbytes is a plugin of its own: install vllm-bnb-plugin")
    return said


def card_of(total_gib: float, capability: tuple[int, int] = (9, 0)) -> Card:
    """A card of which only the memory is known.

    Raises:
        FlagError: for a size that no card has.
    """
    if not 1 <= total_gib <= 2048:
        raise FlagError(f"a card of {total_gib:g} GiB: give what CUDA reports, such as 79.19")
    return Card(f"GPU of {total_gib:g} GiB", total_gib, capability)


def explain(found: Plan) -> list[tuple[str, str]]:
    """(number, the rule behind it) of a plan, in the order of the table."""
    flags, step, ledger = found.flags, found.prediction.step, found.prediction.ledger
    shape = served(found.shape, flags, found.version, found.card.compute_capability)
    rules = versions.rules_for(found.version)
    ranks, stages = flags.tensor_parallel_size or 1, len(found.prediction.stages)
    parts = [f"{count} {name}" for count, name in ((ranks, "ranks"), (stages, "stages")) if count > 1]
    shared = f", divided among {' and '.join(parts)}" if parts else ""
    if stages > 1 and shape.ends_on_every_stage:
        shared += "; every stage has the embeddings and the head"
    quantized = ""
    if shape.quantization:
        which = "experts" if shape.quantization.method == "mxfp4" else "linear layers"
        quantized = f", its {which} as {shape.quantization.method} stores them"
    if shape.quantization and shape.quantization.kernels != ExpertKernels():
        quantized += " (experts padded for the card's kernels)"
    offloaded = f"; {flags.cpu_offload_gb:g} GiB of it stay in host memory" if flags.cpu_offload_gb else ""
    share = ledger.budget_gib / ledger.total_gib
    used = "the pool's size is given, so the budget does not decide it" if ledger.pool_given else rules.source
    lines = [
        (
            "budget",
            f"{ledger.total_gib:.2f} GiB × gpu_memory_utilization {share:.4g} (vllm/v1/worker/utils.py)",
        ),
        (
            "weights",
            f"{found.shape.parameters():,} parameters in {shape.dtype}{quantized}{shared}; the tables of the rotary "
            "embeddings; each large tensor rounded up to the allocator's unit of 2 MiB (vllm/model_executor/models, "
            f"c10/cuda/CUDACachingAllocator.cpp){offloaded}",
        ),
    ]
    rest = "CUDA's own, measured"
    if ranks > 1:
        value, low, high = rules.collectives_gib(_linked(found.card))
        joined = "NVLink" if _linked(found.card) else "PCIe"
        rest += f", and what the collectives keep over {joined}: {value:.2f} GiB, measured {low:.2f} to {high:.2f}"
    if rules.consumed:
        experts = f"; the experts' workspace, {show_gib(step.retained_gib)}" if shape.is_mixture else ""
        buffers = "weights; buffers of max_num_seqs × vocabulary (vllm/v1/worker/gpu/sample/penalties.py)"
        lines.append(("consumed", f"{buffers}{experts}; {rest}"))
    else:
        lines.append(("non_torch", rest))
    larger = "forward pass" if step.forward_gib >= step.sampler_gib else "sampler"
    images = f"; beside it the images of a step, {show_gib(step.vision_gib)}" if step.vision_gib else ""
    lines.append(
        (
            "activation",
            f"the profiled step's peak, here of the {larger}: forward pass {show_gib(step.forward_gib)} "
            f"({flags.max_num_batched_tokens:,} tokens × width of a layer), sampler {show_gib(step.sampler_gib)} "
            f"({flags.max_num_seqs:,} sequences × {shape.vocab_size:,} words){images} (profile_run in vllm/v1/worker)",
        )
    )
    if ledger.cuda_graphs_estimated_gib is not None:
        taken = "taken off the pool" if ledger.graphs_subtracted else "not taken off the pool, so it comes on top"
        lines.append(("cuda_graphs", f"fitted to starts: layers × captured batch sizes; in this version {taken}"))
    lines += [
        ("kv_cache", f"the budget less the terms above; {used}" if not ledger.pool_given else used),
        (
            "kv_tokens",
            f"{found.prediction.kv_blocks:,} blocks of {flags.block_size} tokens; one request of "
            f"{flags.max_model_len:,} tokens takes {show_gib(found.prediction.needed_gib)} "
            "(vllm/v1/core/kv_cache_planning.py)",
        ),
        ("context", "what CUDA takes before vLLM looks, measured on an H200; outside the budget"),
    ]
    return lines


def _linked(card: Card) -> bool:
    return joined(card.total_gib, card.linked)


def with_capability(card: Card, capability: tuple[int, int]) -> Card:
    """The card with a compute capability that the caller knows."""
    return replace(card, compute_capability=capability, source=card.source or "given")
