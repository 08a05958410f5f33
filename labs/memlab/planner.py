"""A plan: what vLLM will say of a start before it is tried, why it would fail, and the least change that helps."""

from dataclasses import dataclass, field, replace

from memlab import versions
from memlab.cards import Card, batch_defaults, block_size
from memlab.errors import FlagError, ShapeError
from memlab.flags import ServeFlags, check, resolve
from memlab.kv_layout import layout
from memlab.ledger import HYBRID_OFF, Prediction, in_flight_tokens, predict
from memlab.shapes import ModelShape
from memlab.units import GIB, show_gib
from memlab.versions import Version

RESERVE_GIB = 150 / 1024  # what vLLM itself leaves beside a pool that it suggests (gpu_worker.py, 0.33)
_HOST_GIB = 4.0  # one worker with torch and CUDA loaded, beside the weights that pass through
_COUNTS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_gpu_blocks_override",
)
_STEP = 0.01  # of gpu_memory_utilization
_SEE = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


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
        """Host memory: each rank's process, and what is kept there of the weights. What passes through is more."""
        return self.flags.world_size * (_HOST_GIB + (self.flags.cpu_offload_gb or 0.0))

    @property
    def suggested_kv_cache_bytes(self) -> int | None:
        """For ``--kv-cache-memory-bytes``: the pool less what vLLM keeps free beside it; None where nothing is left."""
        ledger = self.prediction.ledger
        outside = 0.0 if ledger.graphs_subtracted else ledger.cuda_graphs_actual_gib or 0.0
        left = ledger.kv_cache_gib - outside - RESERVE_GIB
        return int(left * GIB) if left > 0 and not ledger.pool_given else None

    def command(self, model: str = "MODEL") -> str:
        """The ``vllm serve`` line, with the flags as given."""
        return self.given.command(model)

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
        }


def plan(
    shape: ModelShape, card: Card, given: ServeFlags, version: Version = versions.LAST, usage: str = "server"
) -> Plan:
    """The plan of one server.

    Args:
        shape: of the model, as its checkpoint is.
        card: each GPU.
        given: vLLM's flags; what is left open gets vLLM's own default for this card and version.
        version: (0, 19) to (0, 33); an older or newer one is counted by the nearest rules.
        usage: ``server`` or ``offline``.

    Raises:
        FlagError: for flags that vLLM refuses whatever the card.
        ShapeError: for a model or data type that is not counted.
    """
    _refuse(shape, given)
    flags = resolved(shape, card, given, version, usage)
    if flags.max_model_len and given.max_model_len == -1:
        flags = _fit_length(shape, card, flags, version)
    prediction = predict(shape, card.total_gib, flags, version)
    failed = failed_check(shape, card, flags, prediction, version)
    changes = _changes(shape, card, given, version, usage) if failed else []
    return Plan(
        shape, card, version, given, flags, prediction, failed, changes, _warnings(card, flags, prediction, version)
    )


def resolved(shape: ModelShape, card: Card, given: ServeFlags, version: Version, usage: str = "server") -> ServeFlags:
    """Flags as vLLM fills them in on this card."""
    tokens, seqs = batch_defaults(card.total_gib, card.name, version, usage)
    filled = resolve(given, tokens, seqs, shape.max_model_len)
    if filled.block_size is not None:
        return filled
    return filled.with_(block_size=block_size(card, shape.uses_latent_attention, given.kv_cache_dtype))


def _refuse(shape: ModelShape, flags: ServeFlags) -> None:
    """Refuse what has no meaning, so that nothing can be counted."""
    for name in _COUNTS:
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise FlagError(f"{name} {value} must be at least 1")
    share, stages = flags.gpu_memory_utilization, flags.pipeline_parallel_size or 1
    if share is not None and not 0 < share <= 1:
        raise FlagError(f"gpu_memory_utilization {share} is no share of the card: give more than 0 and at most 1")
    if stages > shape.num_hidden_layers:
        raise FlagError(f"pipeline_parallel_size {stages} is more than the model's {shape.num_hidden_layers} layers")
    if flags.cpu_offload_gb is not None and flags.cpu_offload_gb < 0:
        raise FlagError(f"cpu_offload_gb {flags.cpu_offload_gb} must not be negative")
    if flags.kv_cache_memory_bytes is not None and flags.kv_cache_memory_bytes < 1:
        raise FlagError(f"kv_cache_memory_bytes {flags.kv_cache_memory_bytes} must be at least 1")
    if flags.max_model_len is not None and flags.max_model_len < 1 and flags.max_model_len != -1:
        raise FlagError(f"max_model_len {flags.max_model_len} must be at least 1, or auto")


def _fit_length(shape: ModelShape, card: Card, flags: ServeFlags, version: Version) -> ServeFlags:
    """``--max-model-len auto``: the longest request that the pool holds."""

    def fits(length: int) -> bool:
        one = flags.with_(max_model_len=length)
        found = predict(shape, card.total_gib, one, version)
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
    try:
        check(flags, shape.max_model_len)
    except FlagError as refused:
        return str(refused)
    refusal = card.refuses(flags) or _unsupported(shape, card, flags)
    if refusal:
        return refusal
    ledger = prediction.ledger
    free = ledger.total_gib - ledger.context_gib
    utilization = ledger.budget_gib / ledger.total_gib
    if free < ledger.budget_gib:
        return (
            f"Free memory on device cuda:0 ({free:.2f}/{ledger.total_gib:.2f} GiB) on startup is less than desired GPU "
            f"memory utilization ({utilization:g}, {ledger.budget_gib:.2f} GiB). Decrease GPU memory utilization or "
            "reduce GPU memory used by other processes."
        )
    if ledger.weights_gib > free:
        return f"CUDA out of memory while the weights load: {show_gib(ledger.weights_gib)} into {show_gib(free)}."
    resident = ledger.consumed_gib or ledger.weights_gib + ledger.non_torch_gib
    if resident + ledger.activation_gib > free:
        return (
            f"CUDA out of memory in the profiled step: {show_gib(ledger.activation_gib)} beside "
            f"{show_gib(resident)} on {show_gib(free)}."
        )
    pool = ledger.kv_cache_gib - _null_block(prediction, version)
    if pool <= 0 or prediction.kv_blocks < 1:
        return (
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
        return (
            f"To serve at least one request with the model's max seq len ({flags.max_model_len}), "
            f"({prediction.needed_gib:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
            f"({pool:.2f} GiB). {estimate}Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
            f"initializing the engine. {_SEE}"
        )
    if ledger.pool_given and resident + ledger.activation_gib + ledger.kv_cache_gib > free:
        return f"CUDA out of memory while the KV cache is allocated: {show_gib(ledger.kv_cache_gib)} do not fit."
    return None


def _longest(shape: ModelShape, flags: ServeFlags, prediction: Prediction, version: Version) -> int:
    """The longest request that the pool as it is would hold (kv_cache_planning.py, _estimate_max_model_len)."""
    rules, ranks = versions.rules_for(version), flags.tensor_parallel_size or 1
    hybrid = HYBRID_OFF not in flags.extra
    pages = layout(shape, flags.kv_cache_dtype or "auto", ranks, flags.block_size or 16, hybrid=hybrid)
    usable = prediction.kv_blocks - (1 if rules.null_block else 0)
    return pages.longest(usable, flags.max_model_len, in_flight_tokens(flags, rules))


def _unsupported(shape: ModelShape, card: Card, flags: ServeFlags) -> str | None:
    """What the heads, or the card's compute capability, rule out (vllm/config/model.py, vllm/platforms/cuda.py)."""
    heads, ranks = shape.num_attention_heads, flags.tensor_parallel_size or 1
    if heads % ranks:
        return f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({ranks})."
    capability = ".".join(map(str, card.compute_capability))
    asked = flags.dtype if flags.dtype not in (None, "auto") else shape.dtype
    if asked == "bfloat16" and flags.dtype not in (None, "auto") and card.compute_capability < (8, 0):
        return (
            "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your GPU has compute "
            f"capability {capability}. You can use float16 instead by explicitly setting the `dtype` flag in CLI, for "
            "example: --dtype=half."
        )
    least = {"fp8": (7, 5), "awq": (7, 5), "gptq": (7, 0), "mxfp4": (8, 0), "bitsandbytes": (7, 0)}
    method = shape.quantization.method if shape.quantization else flags.quantization
    if method in least and card.compute_capability < least[method]:
        return (
            f"The quantization method {method} is not supported for the current GPU. Minimum capability: "
            f"{least[method][0] * 10 + least[method][1]}. Current capability: {capability.replace('.', '')}."
        )
    return None


def _starts(shape: ModelShape, card: Card, given: ServeFlags, version: Version, usage: str) -> float | None:
    """The pool that such a server has, in GiB; None where it does not start."""
    try:
        _refuse(shape, given)
        flags = resolved(shape, card, given, version, usage)
        found = predict(shape, card.total_gib, flags, version)
    except (FlagError, ShapeError):
        return None
    return None if failed_check(shape, card, flags, found, version) else found.ledger.kv_cache_gib


def _changes(shape: ModelShape, card: Card, given: ServeFlags, version: Version, usage: str) -> list[Change]:
    """For each flag that can help alone, the smallest change with which the server starts, the mildest flags first."""
    now = resolved(shape, card, given, version, usage)
    share = given.gpu_memory_utilization or versions.rules_for(version).default_utilization

    def pool(**flags) -> float | None:
        return _starts(shape, card, given.with_(**flags), version, usage)

    tried: list[tuple[str, object, list]] = []
    if given.kv_cache_memory_bytes is None:
        up = [round(share + _STEP * n, 2) for n in range(1, 100) if share + _STEP * n < 1]
        down = [round(share - _STEP * n, 2) for n in range(1, 100) if share - _STEP * n > 0]
        tried.append(("gpu_memory_utilization", share, [*up, *down]))
    else:
        sizes = [given.kv_cache_memory_bytes * n // 20 for n in (*range(19, 0, -1), *range(21, 81, 2))]
        tried.append(("kv_cache_memory_bytes", given.kv_cache_memory_bytes, sizes))
    longest = _largest(1, max(1, now.max_model_len - 1), lambda length: pool(max_model_len=length) is not None)
    now_dtype = given.kv_cache_dtype or "auto"
    steps = [*_halves(now.max_num_batched_tokens, 64), max(now.max_num_seqs, now.max_model_len)]
    tried += [
        ("max_model_len", now.max_model_len, [longest] if longest else []),
        ("max_num_batched_tokens", now.max_num_batched_tokens, steps),
        ("max_num_seqs", now.max_num_seqs, _halves(now.max_num_seqs, 1)),
        ("kv_cache_dtype", now_dtype, ["fp8"] if now_dtype == "auto" else ["auto"]),
        ("enforce_eager", False, [] if given.enforce_eager else [True]),
        ("quantization", None, [] if shape.quantization or given.quantization else ["fp8"]),
        (
            "tensor_parallel_size",
            now.tensor_parallel_size or 1,
            [(now.tensor_parallel_size or 1) * n for n in (2, 4, 8)],
        ),
        ("cpu_offload_gb", given.cpu_offload_gb or 0, list(range(1, 65))),
    ]
    found: list[Change] = []
    for flag, before, values in tried:
        for value in values:
            left = pool(**{flag: value})
            if left is not None:
                found.append(Change(flag, before, value, left))
                break
    return found


def _halves(value: int, least: int) -> list[int]:
    found = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return found


def _warnings(card: Card, flags: ServeFlags, prediction: Prediction, version: Version) -> list[str]:
    said = []
    if not versions.validated(version):
        nearest = versions.rules_for(version).since
        said.append(
            f"not validated: no run of vLLM 0.{version[1]} is recorded; the rules are those from 0.{nearest[1]} on"
        )
    if not card.source:
        said.append("the card's compute capability is not known: nothing is ruled out by it")
    ledger = prediction.ledger
    free = ledger.total_gib - ledger.context_gib - ledger.budget_gib
    if not ledger.pool_given and free < 1.0:
        said.append(
            f"{show_gib(max(free, 0.0))} are left on the card beside the budget. Fewer batched tokens do not raise "
            "that: what the step no longer takes goes to the pool. Lower gpu_memory_utilization, or give the "
            "pool in bytes"
        )
    reachable = flags.max_num_seqs * flags.max_model_len
    if prediction.kv_tokens and reachable < prediction.kv_tokens:
        said.append(
            f"the pool holds more than all requests together can fill ({reachable:,} tokens): it can be given in bytes"
        )
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
    shape, flags, step = found.shape, found.flags, found.prediction.step
    rules = versions.rules_for(found.version)
    ranks = flags.tensor_parallel_size or 1
    off_pool = found.prediction.ledger.graphs_subtracted
    quantized = f", linear layers as {shape.quantization.method} stores them" if shape.quantization else ""
    lines = [
        ("budget", f"{found.card.total_gib:.2f} GiB × gpu_memory_utilization"),
        (
            "weights",
            f"{shape.parameters():,} parameters over {ranks} rank{'s' if ranks > 1 else ''}{quantized}, with the "
            "tables of rotary embeddings, each large tensor up to the allocator's unit of 2 MiB "
            "(vllm/model_executor/models, c10/cuda/CUDACachingAllocator.cpp)",
        ),
        (
            "activation",
            f"the larger of the forward pass ({show_gib(step.forward_gib)}: tokens of a step × width of a layer) and "
            f"the sampler ({show_gib(step.sampler_gib)}: sequences × vocabulary); {rules.source}",
        ),
        ("cuda_graphs", f"by layers and captured sizes; {'' if off_pool else 'not '}taken off the pool"),
        ("kv_cache", f"the budget less the terms above ({rules.source})"),
        (
            "kv_tokens",
            f"blocks of {flags.block_size or 16} tokens; one request of {flags.max_model_len:,} tokens takes "
            f"{show_gib(found.prediction.needed_gib)} (vllm/v1/core/kv_cache_planning.py)",
        ),
    ]
    if rules.consumed:
        rest = f"buffers of sequences × vocabulary, the experts' workspace ({show_gib(step.retained_gib)}), CUDA's own"
    else:
        rest = "measured: CUDA's own, and the collectives' buffers with tensor parallelism"
    return [*lines[:2], ("non_torch", rest), *lines[2:]]


def with_capability(card: Card, capability: tuple[int, int]) -> Card:
    """The card with a compute capability that the caller knows."""
    return replace(card, compute_capability=capability, source=card.source or "given")
