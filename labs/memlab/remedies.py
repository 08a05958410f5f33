"""What can be changed, what it costs, and what it gains: by the ledger that the log states, or by the planner where the
model's shape is known."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor

from memlab.facts import CONTEXTS_GIB, HIGHEST_UTILIZATION, Facts
from memlab.ledger import weights_gib
from memlab.units import GIB, MIB, show_gib

_RESERVE_GIB = 0.25  # given on top of what was missing, so that the next allocation of its kind fits too

_BLOCKS_GIB = 0.02  # of a few blocks, and of what the log rounds away

_USUAL_UTILIZATION = 0.9  # vLLM's default to 0.19; a share below it is raised to it at least

Change = tuple[object, object, float | None]


@dataclass(frozen=True)
class Remedy:
    """``size`` gives (from, to, GiB gained), or None where this remedy is not to be had here; ``since`` is the version
    that brought the flag, where it is none of V0's."""

    flag: str
    costs: str
    size: Callable[[Facts], Change | None]
    since: tuple[int, int] | None = None


def _lower_utilization(facts: Facts) -> Change | None:
    return None if facts.pool_given else _lower_share(facts)


def _lower_share(facts: Facts) -> Change | None:
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
        return _lower_share(facts)
    to = min(1.0, floor(free / total * 100 - 1e-9) / 100)
    return (facts.utilization, to, (facts.utilization - to) * total) if to > 0 else None


def _raise_utilization(facts: Facts) -> Change | None:
    if facts.pool_given:
        return None
    share, total = facts.utilization, facts.total
    highest = HIGHEST_UTILIZATION
    if total and facts.free_at_start_gib:
        highest = min(highest, floor(facts.free_at_start_gib / total * 100) / 100)
    if share is None:
        return None, "higher, up to what is free at the start", None
    if share >= highest:
        return None
    pool = facts.term("kv_cache")
    if not total or not facts.missing:
        to = max(share + 0.05, _USUAL_UTILIZATION)
    else:
        to = ceil((share + facts.missing / total) * 100 + 1) / 100
        if pool is not None and pool <= 0:  # what is missing gives a pool of nothing
            to = max(to, _USUAL_UTILIZATION)
    to = round(min(highest, to), 2)
    return share, to, (to - share) * total if total else None


def _larger_pool(facts: Facts) -> Change | None:
    """The pool's size where it was given: what one request needs, and a block more, which stays empty."""
    given, needed = facts.given.get("kv_cache_memory_bytes"), facts.values.get("needed_gib")
    if not facts.pool_given:
        return None
    if needed is None:
        return given, "larger", None
    to = ceil((needed + _BLOCKS_GIB) * GIB / MIB) * MIB
    return given, to, to / GIB - (given / GIB if isinstance(given, int) else facts.values.get("kv_cache_gib", 0.0))


def _pool_to_host(facts: Facts) -> Change | None:
    """On the CPU backend, where the pool lies in host memory: as vLLM's refusal tells."""
    free = facts.values.get("free_gib")
    if facts.values.get("requested_gib") is None:
        return None
    if free is None:
        return None, "less than the host has free", None
    to = max(0.0, free - _RESERVE_GIB)
    return facts.given.get("kv_cache_memory_bytes"), int(to * GIB), facts.values["requested_gib"] - to


def _fit_model_len(facts: Facts) -> Change | None:
    length = facts.values.get("max_model_len") or facts.kv.max_model_len or facts.given.get("max_model_len")
    fits = facts.values.get("possible_len") or facts.values.get("kv_tokens") or facts.kv.tokens
    if fits is None or (length and fits >= length):
        return (length, "lower", None) if length else (None, "lower", None)
    return length, max(1, int(fits)), facts.missing


def _shorter_prompts(facts: Facts) -> Change | None:
    """V1 profiles a step of max_num_batched_tokens, unless chunked prefill was switched off."""
    chunks = facts.engine == "V1" and facts.given.get("enable_chunked_prefill") is not False
    return None if chunks else _fit_model_len(facts)


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


def _whole_steps(facts: Facts) -> Change | None:
    """The second model runner takes the logits of a prompt in pieces of a fixed size."""
    return None if facts.runner == "V2" else _half("max_num_batched_tokens", _HALF_TRIED, planned=False)(facts)


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
    told = facts.ranks_told
    return (None, "twice as many", gain) if told is None else (told, 2 * told, gain)


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
    if facts.card and facts.card.compute_capability < (8, 0):  # of FlashInfer (vllm/v1/attention/backends, 0.32)
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


def _fewer_captured(facts: Facts) -> Change | None:
    """The captured batches follow max_num_seqs in V0, and since 0.12 up to 256 (vllm/config/vllm.py, 0.33:2300)."""
    if facts.given.get("enforce_eager") is True or (facts.engine == "V1" and not facts.takes((0, 12))):
        return None
    value = facts.given.get("max_num_seqs")
    known = isinstance(value, int) and value > 1
    return (value, min(value // 2, 128), None) if known else (None, "128 or fewer", None)


def _fixed_pool(facts: Facts) -> Change | None:
    pool = facts.term("kv_cache")
    if pool is None:
        return None, "a size that leaves room", None
    to = pool - (facts.missing or 0.0) - _RESERVE_GIB
    fits = facts.values.get("fit_budget_bytes")
    if isinstance(fits, int) and fits > 0:
        to = min(to, fits / GIB)
    return (facts.given.get("kv_cache_memory_bytes"), int(to * GIB), pool - to) if to > 0 else None


def _gather(facts: Facts) -> Change | None:
    loose = facts.values.get("unallocated_gib")
    if loose is not None and loose < 0.1:
        return None
    return None, "expandable_segments:True", loose


def _end_others(facts: Facts) -> Change | None:
    if facts.others is not None and facts.others < CONTEXTS_GIB:
        return None
    return (None if facts.others is None else show_gib(facts.others)), "ended", facts.others


def _end_charged(facts: Facts) -> Change | None:
    return None if facts.charged is None else (show_gib(facts.charged), "ended", facts.charged)


def _chunk(facts: Facts) -> Change | None:
    if facts.engine != "V0" or facts.given.get("enable_chunked_prefill") is True:
        return None
    return False, True, _part("activation", 0.5)(facts)


def _end_others_early(facts: Facts) -> Change | None:
    """V1 to 0.9 took what was used on the card after the profile for its own (0.9.2: vLLM pull request #18974)."""
    newer = facts.version and facts.version > (0, 9) or facts.seen & _NEWER_THAN_0_9
    return None if facts.engine == "V0" or newer else _end_others(facts)


_NEWER_THAN_0_9 = {"graphs_profiled", "graphs_estimated", "graphs_subtracted", "memory_summary", "runner", "kv_given"}


def _newest(facts: Facts) -> Change | None:
    return None if facts.version and facts.version >= (0, 27) else (None, "0.27 or later", None)


def _less_swap(facts: Facts) -> Change | None:
    if facts.engine == "V1":
        return None
    swap, host = facts.values.get("swap_gib"), facts.values.get("host_total_gib")
    if swap is None:
        return facts.given.get("swap_space"), "lower, or 0", None
    to = floor((host or 0.0) * 0.4)
    return swap, to, swap - to


def _fixed(to: object, from_: object = None) -> Callable[[Facts], Change | None]:
    return lambda facts: (from_, to, None)


def _larger_buffer(facts: Facts) -> Change | None:
    needed = facts.values.get("required_bytes")
    return (None, 2 * needed, None) if isinstance(needed, int) else None


_FEWER = "fewer requests in one step"
_STEPS = "a long prompt takes more steps"
_GIVEN = "a smaller KV cache; the budget no longer sizes it"
_HALF_STEP, _HALF_TRIED = _part("activation", 0.5), _part("tried", 0.5)
REMEDIES: dict[str, Remedy] = {
    "lower_utilization": Remedy("--gpu-memory-utilization", "a smaller KV cache", _lower_utilization),
    "what_is_free": Remedy("--gpu-memory-utilization", "a smaller KV cache", _to_what_is_free),
    "raise_utilization": Remedy("--gpu-memory-utilization", "headroom for what is not profiled", _raise_utilization),
    "max_model_len": Remedy("--max-model-len", "longer requests are refused", _fit_model_len),
    "shorter_prompts": Remedy("--max-model-len", "longer requests are refused", _shorter_prompts),
    "fewer_tokens": Remedy("--max-num-batched-tokens", _STEPS, _half("max_num_batched_tokens", _HALF_STEP, True)),
    "smaller_step": Remedy("--max-num-batched-tokens", _STEPS, _half("max_num_batched_tokens", _HALF_TRIED, False)),
    "whole_steps": Remedy("--max-num-batched-tokens", _STEPS, _whole_steps),
    "fewer_seqs": Remedy("--max-num-seqs", _FEWER, _half("max_num_seqs", lambda facts: None, True)),
    "fewer_captured": Remedy("--max-num-seqs", _FEWER, _fewer_captured),
    "fewer_rows": Remedy("--max-num-seqs", _FEWER, _half("max_num_seqs", _HALF_TRIED, False)),
    "seqs_to_blocks": Remedy("--max-num-seqs", _FEWER, _state_blocks),
    "more_gpus": Remedy("--tensor-parallel-size", "as many GPUs again", _more_ranks),
    "quantize": Remedy("--quantization", "some accuracy", _quantize),
    "offload_weights": Remedy("--cpu-offload-gb", "each step reads them over PCIe", _offload),
    "fp8_kv": Remedy("--kv-cache-dtype", "some accuracy; a card of 8.9 on, of 8.0 on with FlashInfer", _small_kv),
    "eager": Remedy("--enforce-eager", "slower decoding", _no_graphs),
    "no_estimate": Remedy("--enforce-eager", "slower decoding", _no_estimate),
    "fewer_graphs": Remedy("--max-cudagraph-capture-size", "slower decoding of larger batches", _fewer_graphs, (0, 12)),
    "fixed_pool": Remedy("--kv-cache-memory-bytes", _GIVEN, _fixed_pool, (0, 11)),
    "larger_pool": Remedy("--kv-cache-memory-bytes", "headroom on the card", _larger_pool),
    "pool_to_host": Remedy("--kv-cache-memory-bytes", "a smaller KV cache", _pool_to_host),
    "expandable": Remedy("PYTORCH_CUDA_ALLOC_CONF", "refused together with a KV connector", _gather),
    "end_others": Remedy("other processes (nvidia-smi)", "what they do", _end_others),
    "end_early": Remedy("other processes (nvidia-smi)", "what they do", _end_others_early),
    "end_charged": Remedy("other processes (nvidia-smi)", "what they do", _end_charged),
    "other_gpu": Remedy("CUDA_VISIBLE_DEVICES", "another GPU; set it before the process starts", _fixed("a free GPU")),
    "alone": Remedy("start-up order", "time", _fixed("one server after the other, with nothing ending meanwhile")),
    "mm_limit": Remedy("--limit-mm-per-prompt", "fewer or smaller items in a request", _fixed("fewer items")),
    "mm_reserve": Remedy("mm_ipc_gpu_memory_gb", "decoding of video on the CPU", _fixed("lower")),
    "chunked_prefill": Remedy("--enable-chunked-prefill", "more steps for a long prompt", _chunk),
    "upgrade": Remedy("vLLM", "a new version", _newest),
    "newest": Remedy("vLLM", "a new version", _fixed("0.30 or later")),
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
    "fewer_compilers": Remedy("MAX_JOBS", "a slower first start", _fixed(4)),
    "larger_buffer": Remedy("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "memory beside the pool", _larger_buffer, (0, 11)),
    "less_host_cache": Remedy("--mm-processor-cache-gb, --kv-offloading-size", "host caches", _fixed("lower")),
    "sleep_level": Remedy("wake_up(tags)", "two calls", _fixed('first "weights", then "kv_cache"')),
    "no_all_reduce": Remedy("--disable-custom-all-reduce", "slower tensor parallelism", _fixed(True, False)),
    "no_nvls": Remedy("NCCL_NVLS_ENABLE", "slower collectives", _fixed(0)),
}  # fmt: skip
