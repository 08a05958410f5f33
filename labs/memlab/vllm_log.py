"""vLLM's output, of any version from 0.4 to 0.33, as events; and what they state: a ledger, the KV pool, the engine.

A line becomes an event through a row of ``ROWS``; to teach the parser a line, add a row, whose anchor must hold a word
of ``_may_hold``. Nothing from a log is evaluated.

Two traps of 0.33: the V2 runner estimates the CUDA graphs by capturing some (v1/worker/gpu/cudagraph_utils.py:998), so
"Graph capturing finished" is printed twice, first for that trial; and the printed "peak activation" contains the
estimate (v1/worker/gpu_worker.py:748, the same in 0.32).
"""

import ast
import codecs
import io
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from os import PathLike
from typing import NamedTuple, TextIO

from memlab import pasted
from memlab.errors import MemlabError
from memlab.ledger import MemoryLedger
from memlab.units import to_gib

PHASES = (
    "starting",
    "loading_weights",
    "profiling",
    "compiling",
    "sizing_kv_cache",
    "warming_up",
    "capturing_graphs",
    "ready",
    "serving",
    "stopping",
)

_LINE_LIMIT = 32 * 1024
_REMEMBERED_CHARS = 300
_TEXT_LIMIT = 1000
_MESSAGE_LINES = 12
_MESSAGE_CHARS = 6000


@dataclass(frozen=True)
class Event:
    """One message of the log.

    ``values`` names its units (``_gib``, ``_tokens``, ``_s``, ``_bytes``); a value that was not printed is absent.
    ``line_number`` is the first line's, from 1; ``text`` the message without prefixes, at most 1000 characters;
    ``rank`` what the prefix tells of the worker ("TP0", "PP1_TP0", "DP0", "rank3", "pid448"), None for the only one
    and for the engine.
    """

    kind: str
    values: Mapping[str, object]
    line_number: int
    text: str
    rank: str | None = None


class _Lazy:
    """A pattern that is compiled when it is first tried: a log needs few, and all of them take long in a browser."""

    def __init__(self, pattern: str):
        self.pattern = pattern

    @cached_property
    def search(self) -> Callable[[str], re.Match | None]:
        return re.compile(self.pattern).search


@dataclass(frozen=True)
class Row:
    """How to know a message: it holds ``anchor`` and ``patterns[0]``; further patterns add values where they match.

    A message may break over lines: it goes on until ``patterns[0]`` matches and ``until`` is found, except where the
    anchor is ``vague``; a vague one goes on where ``broken`` matches. ``files`` are the vLLM files that print it, where
    the words alone are ambiguous; ``more`` lets later rows read the same message too; a ``fallback`` is vague and
    gives way to a message that may go on.
    """

    kind: str
    anchor: str
    patterns: tuple[_Lazy, ...] = ()
    until: str = ""
    files: tuple[str, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    convert: Callable[[str], dict] | None = None
    more: bool = False
    vague: bool = False
    broken: _Lazy | None = None
    fallback: bool = False


# --- values -------------------------------------------------------------------------------------------------------

_NUMBER = r"-?\d[\d,]{0,18}(?:\.\d{1,12})?"
_SIZE = rf"{_NUMBER}\s*(?:[KMGT]i?B|bytes|B)"
_UNITS = {"": 1 << 30, "B": 1, "BYTES": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def _size_gib(text: str) -> float:
    """A size with its unit, in GiB; without one it is taken as GiB."""
    number, unit = re.fullmatch(rf"({_NUMBER})\s*([A-Za-z]*)", text).groups()
    return float(number.replace(",", "")) * to_gib(_UNITS[unit.upper()])


def _integer(text: str) -> int:
    return int(text.replace(",", "").partition(".")[0])


def _real(text: str) -> float:
    return float(text.replace(",", ""))


# By the last word of a value's name; what is not here stays text.
_CONVERT: dict[str, Callable[[str], object]] = {
    "gib": _size_gib,
    **dict.fromkeys(("tokens", "blocks", "bytes", "len", "size", "seqs", "reqs", "items", "layers"), _integer),
    **dict.fromkeys(("preemptions", "device", "requests", "iteration", "code", "budget"), _integer),
    **dict.fromkeys(("s", "ms", "percent", "utilization", "concurrency"), _real),
}


def _p(pattern: str) -> _Lazy:
    """A pattern in which ``<name>`` is a number, ``<<name>>`` a size with its unit, a space any space.

    A space may be missing: a line that broke there loses it.
    """
    pattern = pattern.replace(" ?", " ").replace(" ", r"\s*")
    pattern = re.sub(r"<<(\w+)>>", lambda name: f"(?P<{name[1]}>{_SIZE})", pattern)
    return _Lazy(re.sub(r"(?<!\?P)<(\w+)>", lambda name: f"(?P<{name[1]}>{_NUMBER})", pattern))


@cache
def _converter(name: str) -> Callable[[str], object]:
    return _CONVERT.get(name.rpartition("_")[2], str)


def _values(match: re.Match) -> dict[str, object]:
    return {name: _converter(name)(text) for name, text in match.groupdict().items() if text is not None}


_CONFIG_KEYS = {
    "model": "model",
    "dtype": "dtype",
    "max_seq_len": "max_model_len",
    "load_format": "load_format",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "quantization": "quantization",
    "enforce_eager": "enforce_eager",
    "kv_cache_dtype": "kv_cache_dtype",
    "device_config": "device",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "chunked_prefill_enabled": "enable_chunked_prefill",
}
_CONFIG = re.compile(rf"(?:^|[\s,])({'|'.join(_CONFIG_KEYS)})=('[^']{{0,500}}'|\"[^\"]{{0,500}}\"|[^,\s)]{{1,200}})")


def _scalar(text: str) -> object:
    text = text.strip().removeprefix("torch.").removeprefix("LoadFormat.")
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"-?\d{1,18}\.\d{1,18}", text):
        return float(text)
    return text.strip("'\"")


def _config(text: str) -> dict[str, object]:
    """The settings in ``VllmConfig.__str__`` (vllm/config/vllm.py:2809 in 0.33) that a memory ledger cares about."""
    found: dict[str, object] = {}
    for key, value in _CONFIG.findall(text[:8000]):
        scalar = _scalar(value)
        if scalar is not None:
            found.setdefault(_CONFIG_KEYS[key], scalar)
    return found


_SECRET_KEYS = re.compile(r"key|token$|secret|password|credential|ssl", re.IGNORECASE)


def _arguments(text: str) -> dict[str, object]:
    """The scalars of "non-default args: {...}" (vllm/entrypoints/common/startup.py:96 in 0.33), no keys or tokens."""
    literal = text[text.find("{") : text.rfind("}") + 1][:16_000]
    try:
        found = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pairs = re.findall(r"'(\w{1,80})': ('[^']{0,500}'|-?[\w.]{1,80})(?=[,}])", literal)
        found = {key: _scalar(value) for key, value in pairs}
    if not isinstance(found, dict):
        return {}
    return {
        str(key): value
        for key, value in found.items()
        if isinstance(value, bool | int | float | str) and not _SECRET_KEYS.search(str(key))
    }


def _resolved(text: str) -> dict[str, object]:
    """The flags as vLLM filled them in, from the line that ``memlab.vllm_main`` adds to a server's output."""
    try:
        found = json.loads(text[text.find("{") : text.rfind("}") + 1])
    except (ValueError, RecursionError):
        return {}
    scalars = {str(name): value for name, value in found.items() if isinstance(value, bool | int | float | str)}
    return {name: value for name, value in scalars.items() if not _SECRET_KEYS.search(name)}


def _processes(text: str) -> dict[str, object]:
    """The memory of the processes that torch's message names by number, in GiB."""
    found = re.findall(rf"Process\s+\d+\s+has\s+({_SIZE})\s+memory\s+in\s+use", text)
    return {"processes_gib": tuple(_size_gib(size) for size in found)} if found else {}


# --- the table ----------------------------------------------------------------------------------------------------

_OOM_PARTS = (
    _p(r"Tried to allocate <<tried_gib>>"),
    _p(r"GPU (?P<device>\d{1,3})\b"),
    _p(r"total capaci?ty of <<total_gib>>"),
    _p(r"; <<total_gib>> total capacity"),
    _p(r"of which <<free_gib>> is free"),
    _p(r"this process has <<process_gib>> memory in use"),
    _p(r"allocated memory <<allocated_gib>> is allocated by PyTorch"),
    _p(r"with <<private_pools_gib>> allocated in private pools"),
    _p(r"<<unallocated_gib>> is reserved by PyTorch but unallocated"),
    _p(r"; <<already_allocated_gib>> already allocated"),
    _p(r"; <<free_gib>> free;"),
)
# Functions of vLLM that tell the step of a failure; what is for the prompt alone has "prefill" or "chunk" in its name.
_STEPS = (
    "init_device", "init_worker_distributed_environment", "load_model", "create_weights", "load_weights", "get_model",
    "initialize_model", "profile_num_available_blocks", "init_cache_engine", "allocate_gpu_cache", "run_engine_loop",
    "engine_step", "step_async", "_run_engine", "_execute_mm_encoder", "_process_image_input", "_process_video_input",
    "process_weights_after_loading", "determine_available_memory", "determine_num_available_blocks", "profile_run",
    "_dummy_sampler_run", "_dummy_pooler_run", "profile_cudagraph_memory", "embed_multimodal",
    "get_multimodal_embeddings", "profile_encoder_cache", "_check_enough_kv_cache_memory",
    "check_enough_kv_cache_memory", "get_kv_cache_configs", "raise_if_cache_size_invalid", "initialize_cache",
    "initialize_from_config", "initialize_kv_cache", "_allocate_kv_cache_tensors", "_allocate_kv_cache",
    "_initialize_cache", "allocate_kv_cache", "compile_or_warm_up_model", "warm_up_model", "kernel_warmup",
    "warmup_kernels", "capture_model", "capture_graphs", "execute_model", "sample_tokens", "sample",
    "apply_top_k_top_p", "compute_logprobs", "gather_logprobs", "_get_prompt_logprobs_dict", "compute_prompt_logprobs",
    "compute_prompt_token_id_logprobs", "compute_topk_logprobs", "compute_topk_scores", "compute_token_logprobs",
    "execute_mm_encoder", "make_layers", "wake_up", "sleep", "run_busy_loop", "run_engine_core",
    "destroy_model_parallel",
)  # fmt: skip
_FUNCTIONS = rf"(?P<function>{'|'.join(_STEPS)}|\w{{0,40}}(?:prefill|chunk)\w{{0,60}})"
_WHOLE_OR_BEGUN = {name[:length] for name in _STEPS for length in range(1, len(name) + 1)}
_BEGUN = "|".join(sorted(_WHOLE_OR_BEGUN - set(_STEPS)))
_BROKEN_FRAME = re.compile(
    rf'File "(?:[^"]{{0,400}}|[^"]{{0,400}}"(?:,(?: line(?: \d{{1,7}}(?:,(?: in(?: (?:{_BEGUN}))?)?)?)?)?)?)\s*$'
)
_BACKEND_FILES = ("cuda.py", "rocm.py", "xpu.py", "cpu.py", "selector.py", "interface.py")

_ENGINE = _p(r"(?:(?P<engine>V[01]) )?LLM engine \(v(?P<vllm_version>\d[\w.+-]{1,40})\)")

# First match wins, so what is frequent comes first and what is vague last. Sources are vLLM 0.33.0 unless said.
ROWS: tuple[Row, ...] = (
    # Serving. v1/metrics/loggers.py:283-325; V0: engine/metrics.py.
    Row("stats", "Avg prompt throughput", (
        _p(r"Avg prompt throughput: <prompt_per_s> tokens/s, Avg generation throughput: <generation_per_s> tokens/s, "
           r"Running: <running_reqs> reqs, (?:Swapped: \d+ reqs, )?(?:Waiting|Pending): <waiting_reqs> reqs"),
        _p(r"[CGXHT]PU KV cache usage: <kv_usage_percent>%(?:, Prefix cache hit rate: <prefix_hit_percent>%)?"),
        _p(r"Preemptions: <preemptions>"),
    )),
    Row("iteration", "Iteration(", (
        _p(r"Iteration\(<iteration>\): <context_requests> context requests, <context_tokens> context tokens, "
           r"<generation_requests> generation requests, <generation_tokens> generation tokens"),
        _p(r"elapsed time: <elapsed_ms> ms"),
        _p(r"KV cache usage: <kv_usage_percent>%"),
    ), vague=True),  # v1/metrics/loggers.py:196
    Row("preempted", "is preempted by PreemptionMode", (
        _p(r"is preempted by PreemptionMode\.(?P<mode>\w+)"),
        _p(r"total_(?:num_)?cumulative_preemption(?:_cnt)?=<preemptions>"),
    ), until="cumulative_preemption"),  # V0: core/scheduler.py
    # What runs. entrypoints/common/startup.py:18,96; v1/engine/core.py:140; v1/worker/gpu_worker.py:513.
    Row("version", "version ", (
        _p(r"(?:vLLM (?:API )?server|▀▄▀ █|API server) version (?P<vllm_version>\d[\w.+-]{1,40})"),
    ), vague=True),
    # The same words again where an engine dies: v1/engine/dump_input.py.
    Row("engine_dump", "Dumping input data for", (_ENGINE,), convert=_config),
    Row("engine_config", "LLM engine (v", (_ENGINE,), convert=_config, vague=True),
    Row("arguments", "non-default args:", (_p(r"non-default args: \{"),), until=r"\}\s*$", convert=_arguments),
    Row("resolved", "memlab resolved: ", (_p(r"memlab resolved: \{"),), until=r"\}\s*$", convert=_resolved),
    Row("runner", "V2 Model Runner", fixed={"runner": "V2"}),
    Row("runner", "using the V1 model runner", fixed={"runner": "V1"}),  # config/vllm.py:725
    Row("attention", "backend out of potential", (
        _p(r"Using (?P<attention>\w+) (?:attention )?backend out of potential"),
    )),  # platforms/cuda.py:509
    Row("attention", "Using ", (
        _p(r"Using (?:AttentionBackendEnum\.)?(?P<attention>[\w-]+(?: \w+){0,2}?) (?:attention )?backend(?:\.| on V1)"),
    ), files=_BACKEND_FILES, vague=True),
    Row("sampler", "for top-p & top-k sampling", (
        _p(r"Using (?:the )?(?P<sampler>\w+).{0,20} for top-p"),
    ), vague=True),
    Row("sampler", "to the PyTorch-native", fixed={"sampler": "PyTorch-native"}),
    Row("sampler", "top-p/top-k sampling", (
        _p(r"sampling (?:disabled|unavailable)"),
    ), fixed={"sampler": "PyTorch-native"}, vague=True),  # v1/sample/ops/topk_topp_sampler.py:122,158
    Row("chunked_prefill", "Chunked prefill is enabled", (
        _p(r"with max_num_batched_tokens=<max_num_batched_tokens>"),
    )),  # config/scheduler.py:311
    Row("max_model_len", "Using max model len", (_p(r"Using max model len <max_model_len>"),), vague=True),
    # Loading. v1/worker/gpu/model_runner.py:399,428. V0 and early V1 print GiB as "GB" (bytes / 2**30).
    Row("load_started", "Starting to load model"),
    Row("load_started", "Loading model from scratch"),
    Row("load_progress", "checkpoint shards", (_p(r"shards: <progress_percent>%"),), vague=True),
    Row("load_progress", "Multi-thread loading shards", (_p(r"shards: <progress_percent>%"),), vague=True),
    Row("weights_read", "Loading weights took", (_p(r"Loading weights took <seconds_s> sec"),)),
    Row("model_loaded", "Model loading took", (
        _p(r"took <weights_gib> G(?:i?B)?\b"),
        _p(r"and <seconds_s> sec"),
    ), until=r"sec|G(?:i?B)?\s*$"),
    Row("model_loaded", "Loading model weights took", (_p(r"took <weights_gib> G(?:i?B)?\b"),)),
    Row("offload", "Total CPU offloaded parameters", (_p(r"parameters: <offloaded_gib>"),)),
    Row("offload", "[PrefetchOffloader]", (
        _p(r"Total GPU memory saved: <<offloaded_gib>>"),
        _p(r"Static buffer pool: <<buffer_gib>>"),
    )),  # model_executor/offloader/prefetch.py:381, decimal GB
    Row("kv_offload", "OffloadScheduler: Allocating", (
        _p(r"Allocating <cpu_blocks> \w+ blocks \(<kv_offload_gib> GB"),
    )),  # v1/simple_kv_offload/manager.py:199, GiB printed as GB
    Row("weights_external", "Weights are held outside", (
        _p(r"of the <budget_gib> GiB utilization budget, <external_gib> GiB is externally held"),
        _p(r"and <engine_budget_gib> GiB remains"),
    )),  # v1/worker/utils.py:752
    # Profiling. compilation/monitor.py, v1/worker/gpu_worker.py:641-808, v1/worker/gpu/mm/encoder_runner.py:132.
    Row("encoder_profile", "Encoder cache will be", (
        _p(r"budget of <encoder_tokens> tokens,? and profiled with <profiled_items> (?P<modality>\w+) items"),
    )),
    Row("encoder_profile", "Starting profile run for multi-modal"),  # V0
    Row("encoder_skipped", "Skipping memory profiling for multimodal"),
    Row("mm_sequence_short", "is too short to hold the multi-modal", (
        _p(r"max_num_seqs = <profiled_tokens>\)"),
        _p(r"worst case \(<needed_tokens> tokens in total"),
    ), until="tokens in total"),  # V0: inputs/profiling
    Row("compile_started", "Starting torch.compile"),
    Row("compile_step", "Dynamo bytecode transform time", (_p(r"time: <seconds_s> s"),)),
    Row("compile_step", "Compiling a graph for", (_p(r"takes <seconds_s> s"),)),
    Row("compile_step", "load the compiled graph", (_p(r"took <seconds_s> s"),), vague=True),
    Row("compiled", "torch.compile t", (_p(r"torch\.compile (?:took|takes) <seconds_s> s"),)),
    Row("warmup_run", "Initial profiling/warmup run took", (_p(r"took <seconds_s> s"),)),
    Row("profiled", "Memory profiling takes", (_p(r"takes <seconds_s> seconds"),)),
    Row("memory_profile", "Memory profiling results", (
        _p(r"total_gpu_memory ?=? ?<<total_gib>>"),
        _p(r"gpu_memory_utilization ?=? ?<gpu_memory_utilization>"),
        _p(r"initial_memory_usage=<<initial_gib>>"),
        _p(r"peak_torch_memory=<<peak_torch_gib>>"),
        _p(r"memory_usage_post_profile=<<after_gib>>"),
        _p(r"non_torch_memory ?=? ?<<non_torch_gib>>"),
        _p(r"(?:kv_cache_size|available_kv_cache_memory) ?=? ?<<kv_cache_gib>>"),
        _p(r"current vLLM instance can use <<budget_gib>>"),
        _p(r"model weights take <<weights_gib>>"),
        _p(r"activation peak memory <<activation_gib>>"),
    ), until=r"gpu_memory_utilization=\d|available_kv_cache_memory\s+\S"),  # V0 0.6.4: worker/worker.py
    Row("budget", "the current vLLM instance can use total_gpu_memory", (
        _p(r"total_gpu_memory \(<<total_gib>>\) x "
           r"gpu_memory_utilization \(<gpu_memory_utilization>\) = <<budget_gib>>"),
    )),  # V0: worker/worker.py
    Row("memory_terms", "model weights take ", (
        _p(r"model weights take <<weights_gib>>; non_torch_memory takes <<non_torch_gib>>; "
           r"PyTorch activation peak memory takes <<activation_gib>>"),
        _p(r"reserved for KV Cache is <<kv_cache_gib>>"),
    ), until="reserved for KV Cache is "),
    Row("graphs_profiled", "Profiling CUDA graph memory", (_p(r"memory: (?P<graphs>[\w=() ,]{1,200})"),)),
    Row("graphs_estimated", "Estimated CUDA graph memory", (_p(r"memory: <<cuda_graphs_estimated_gib>>"),)),
    Row("kv_available", "Available KV cache memory", (_p(r"cache memory: <<kv_cache_gib>>"),)),
    Row("graphs_subtracted", "CUDA graph memory profiling is enabled", (
        _p(r"profiling is enabled"),
        _p(r"current --gpu-memory-utilization=<gpu_memory_utilization>"),
        _p(r"equivalent to --gpu-memory-utilization=<equivalent_utilization>"),
    ), until="without CUDA graph"),  # v1/worker/gpu_worker.py:787
    Row("graphs_not_subtracted", "CUDA graph memory profiling is disabled"),
    Row("profile_grew", "Error in memory profiling", (
        _p(r"Error in memory profiling"),
        _p(r"Initial free memory <free_gib> GiB, current free memory <free_after_gib> GiB"),
    ), until="happens when|current free memory"),  # v1/worker/gpu_worker.py:733
    Row("kv_given", "Initial free memory", (
        _p(r"Initial free memory <free_gib> GiB, reserved <kv_cache_gib> GiB memory for KV Cache"),
    )),  # v1/worker/gpu_worker.py:665
    Row("startup_plan", "Applying persisted startup plan", (_p(r"kv_cache_memory_bytes=<kv_cache_memory_bytes>"),)),
    Row("startup_plan_refused", "Startup plan not applied", (
        _p(r"free memory \(<<free_gib>>\)"),
        _p(r"baseline \(<<baseline_free_gib>>\)"),
    )),
    Row("kv_given", "Explicitly set (", (
        _p(r"Explicitly set \(<kv_cache_gib>/<host_total_gib>\) GiB for KV cache on node (?P<node>\d+)"),
    ), fixed={"backend": "cpu"}),  # v1/worker/cpu_worker.py:217
    Row("kv_auto", "Auto set (", (
        _p(r"Auto set \(<kv_cache_gib>/<host_total_gib>\) GiB for KV cache on node (?P<node>\d+)"),
        _p(r"with <budget_gib> GiB requested"),
        _p(r"worker\. <consumed_gib> GiB memory was consumed"),
    ), until="consumed", fixed={"backend": "cpu"}),  # v1/worker/cpu_worker.py:253
    Row("mm_reserve_too_big", "frontend multimodal GPU decoding reserves", (
        _p(r"reserves <reserve_gib> GiB"),
        _p(r"but only <kv_cache_gib> GiB is available"),
    ), until="KV cache"),
    Row("mm_reserve", "of GPU memory for frontend multimodal", (
        _p(r"Reserving <reserve_gib> GiB"),
        _p(r"reduced to <kv_cache_gib> GiB"),
    ), until="reduced to"),  # multimodal/gpu_ipc_memory.py:256
    # Sizing the pool. v1/core/kv_cache_utils.py:1147 (one line since 0.27), v1/core/kv_cache_planning.py.
    Row("kv_size", " KV cache size:", (
        _p(r"\b(?P<backend>[A-Z]{3}(?: \+ host)?) KV cache size: <kv_tokens> tokens"),
        _p(r"Maximum concurrency for <max_model_len> tokens"),
        _p(r"per request: <max_concurrency>x"),
    ), until=r"tokens\s*$|request:\s+[\d.]+x"),
    Row("kv_concurrency", "Maximum concurrency for", (
        _p(r"Maximum concurrency for <max_model_len> tokens per request: <max_concurrency>x"),
    )),
    Row("kv_blocks", " blocks: ", (
        _p(r"# (?:GPU|CUDA|cuda|rocm|cpu) blocks: <gpu_blocks>"),
        _p(r"# CPU blocks: <cpu_blocks>"),
    ), vague=True),  # V0: executor/executor_base.py
    Row("blocks_override", "Overriding num_gpu_blocks=", (
        _p(r"num_gpu_blocks=<auto_blocks> with num_gpu_blocks_override=<gpu_blocks>"),
    )),
    Row("kv_padding", "padding layers, may waste", (
        _p(r"Add <padding_layers> padding"),
        _p(r"most <wasted_percent>%"),
    )),
    Row("block_size", "Setting kv cache block size", (_p(r"size to <block_size> "),)),  # platforms/interface.py:777
    Row("block_size", "Setting attention block size", (_p(r"size to <block_size> tokens"),)),
    Row("max_model_len_fit", "Auto-fit max_model_len", (
        _p(r"(?:length <max_model_len> fits|reduced from <wanted_len> to <reduced_len>|max_model_len=<derived_len>)"),
        _p(r"\(<<kv_cache_gib>>"),
    )),
    Row("hybrid_disabled", "Hybrid KV cache manager is disabled"),
    # Warm-up and graphs. v1/worker/gpu/model_runner.py:1163, v1/worker/gpu_worker.py:969-1060.
    Row("warming_up", "Compile and warming up model for size"),
    Row("warming_up", "JIT kernel warmup starting"),  # model_executor/warmup/kernel_warmup.py:179
    Row("graphs_progress", "Capturing CUDA graph", (_p(r"Capturing CUDA graph"), _p(r": <progress_percent>%"))),
    Row("graphs_progress", "Capturing the model for CUDA graphs"),  # V0
    Row("graphs_progress", "Capturing cudagraphs for decoding"),  # V0, 0.7 on
    Row("graphs_captured", "Graph capturing finished", (
        _p(r"finished in <seconds_s> secs?,? took <cuda_graphs_actual_gib> G"),
    )),
    Row("graphs_compared", "CUDA graph pool memory", (
        _p(r"memory: <cuda_graphs_actual_gib> GiB \(actual\), <cuda_graphs_estimated_gib> GiB \(estimated\)"),
    )),
    Row("free_memory_low", "Free memory on device", (
        _p(r"Free memory on device (?:\S{1,40} )?\(<free_gib>/<total_gib> GiB\) on startup is less than"),
        _p(r"\((?P<gpu_memory_utilization>\d[\d.]{0,20}), <budget_gib> GiB\)"),
    )),  # v1/worker/utils.py:763
    Row("memory_summary", "Free memory on device", (
        _p(r"Free memory on device \(<free_gib>/<total_gib> GiB\) on startup\. Desired GPU memory utilization is "
           r"\((?P<gpu_memory_utilization>\d[\d.]{0,20}), <budget_gib> GiB\)"),
        _p(r"<weights_gib> GiB for weight,"),
        _p(r"<consumed_gib> GiB for consumed memory"),
        _p(r"<activation_printed_gib> GiB for peak activation"),
        _p(r"<non_torch_gib> GiB for non-torch memory"),
        _p(r"<cuda_graphs_actual_gib> GiB for CUDAGraph"),
        _p(r"`--kv-cache-memory=<fit_budget_bytes>` \([\d.-]+ GiB\) to fit"),
        _p(r"`--kv-cache-memory=<fit_card_bytes>` \([\d.-]+ GiB\) to fully"),
        _p(r"kv cache memory in use is <kv_cache_gib> GiB"),
    ), until="kv cache memory in use is"),  # v1/worker/gpu_worker.py:1029
    Row("engine_ready", "init engine (profile", (
        _p(r"took <seconds_s> s"),
        _p(r"compilation: <compile_s> s"),
    )),
    Row("ready", "Application startup complete"),
    Row("stopping", "[shutdown] API server: shutdown triggered"),
    Row("stopping", "Killing local vLLM worker processes"),
    # Sleep. v1/worker/gpu_worker.py:336, device_allocator/cumem.py:282, v1/executor/abstract.py:427.
    Row("sleep", "Sleep mode freed", (_p(r"freed <<freed_gib>>"), _p(r"<in_use_gib> GiB memory is still in use"))),
    Row("sleep_allocator", "CuMemAllocator: sleep freed", (
        _p(r"freed <<freed_gib>>"),
        _p(r"<<backed_up_gib>> is backed up in CPU"),
        _p(r"rest <<discarded_gib>>"),
    )),
    Row("wake", "to wake up tags", (_p(r"took <seconds_s> seconds"),)),
    # What only sounds like it. model_executor/layers/mamba/{mamba_mixer2,gdn/qwen_gdn_linear_attn}.py,
    # distributed/device_communicators/{shm_broadcast,symm_mem}.py, v1/core/block_pool.py, v1/executor/ray_utils.py,
    # entrypoints/openai/responses/serving.py, distributed/nixl_utils.py; Triton's runtime/errors.py; PyTorch.
    Row("warmup_skipped", "OOM due to autotuner"),
    Row("allocator_retry", "memory allocation failed with OOM on device"),
    Row("broadcast_wait", "No available shared memory broadcast block"),
    Row("symm_mem_off", "symmetric memory initialization failed"),
    Row("blocks_held", "Failed to reset prefix cache because some"),
    Row("placement_notice", "placement group allocation failures"),
    Row("kernel_resources", "out of resource: "),
    Row("leak_notice", "cause a memory leak since"),
    Row("leak_notice", "a rare memory leak in UCX"),
    Row("group_left", "destroy_process_group() was not called"),
    Row("swap_possible", "Possibly too large swap space"),  # V0
    # v1/kv_offload/cpu/gpu_worker.py:208 in 0.29, host_register.py:55 since; v1/simple_kv_offload/cuda_mem_ops.py:33
    # raises.
    Row("host_oom", "RuntimeError: cudaHostRegister failed"),
    Row("pin_failed", "HostRegister failed"),
    Row("pin_failed", "_register failed"),
    # Memory ran out.
    Row("load_oom", "Failed to load model - not enough GPU memory", more=True),  # v1/worker/gpu_model_runner.py:5079
    Row("load_oom", "Failed to create unquantized linear weights", more=True),  # 0.11: model_executor/layers/linear.py
    Row("sampler_oom", "occurred when warming up sampler", (
        _p(r"warming up sampler with <max_num_seqs> dummy"),
    )),  # v1/worker/gpu_model_runner.py:5930
    Row("pooler_oom", "occurred when warming up pooler"),
    Row("forward_failed", "Error in model execution", more=True),  # V0: worker/model_runner_base.py
    Row("oom", "out of memory. Tried to allocate", _OOM_PARTS,
        until="reserved by PyTorch but unallocated", convert=_processes),
    Row("cumem_oom", "out of memory at ", (_p(r"CUDA Error: out of memory at \S{0,200}cumem_allocator"),), vague=True),
    Row("cumem_error", "cumem_allocator.cpp", (_p(r"CUDA Error: (?P<reason>[\w ]{1,60}?) at "),), vague=True),
    Row("nccl_oom", "Cuda failure", (_p(r"Cuda failure(?: 2)?:? ?'?out of memory"),), vague=True),
    Row("nccl_error", "NCCL error in"),
    Row("collective_timeout", "collective operation timeout"),  # torch's watchdog: another rank may have failed before
    Row("cuda_oom", "CUDA error: out of memory"),
    Row("cuda_oom", "CUDA driver error: out of memory"),
    Row("cuda_oom", "cudaErrorMemoryAllocation"),
    Row("cuda_oom", "CUBLAS_STATUS_ALLOC_FAILED"),
    Row("cuda_oom", "HIP error: out of memory"),
    Row("cuda_oom", "Triton Error [CUDA]: out of memory"),
    Row("cuda_oom", "ERROR_OUT_OF_DEVICE_MEMORY"),  # Level Zero, of Intel's GPUs
    Row("autotuner_oom", "OOM detected, falling back"),  # FlashInfer; harmless
    Row("kv_none", "No available memory for the cache blocks"),  # v1/core/kv_cache_planning.py:58
    Row("kv_too_small", "To serve at least one request with", (
        _p(r"max seq len \(<max_model_len>\), \(<needed_gib> Gi?B KV cache is needed, which is larger than the "
           r"available KV cache memory \(<kv_cache_gib> Gi?B\)"),
        _p(r"estimated maximum model length is <possible_len>"),
    ), until="initializing the engine"),  # v1/core/kv_cache_planning.py:78
    Row("kv_too_small", "The model's max seq len", (
        _p(r"max seq len \(<max_model_len>\) is larger than the maximum number of tokens that can be stored in KV "
           r"cache \(<kv_tokens>\)"),
    )),  # V0: worker/worker.py
    Row("autofit_failed", "Cannot auto-fit max_model_len"),
    Row("mamba_blocks", "exceeds available Mamba cache", (
        _p(r"max_num_seqs \(<max_num_seqs>\) exceeds available Mamba cache blocks \(<available_blocks>\)"),
    )),  # config/compilation.py:1526
    Row("workspace_locked", "Workspace is locked", (
        _p(r"Workspace is locked"),
        _p(r"requires <<required_gib>>"),
        _p(r"current size is <<current_gib>>"),
    ), until="current size is"),  # v1/worker/workspace.py:244, MiB printed as MB
    Row("workspace_small", "Buffer overflow when allocating memory for", (
        _p(r"memory for (?P<buffer>\w{1,80}) with size <required_bytes>"),
        _p(r"only <left_bytes> bytes available"),
    )),  # FlashInfer: include/flashinfer/allocator.h
    Row("workspace_small", "Out of workspace memory in Aligned"),  # the same, to 0.1
    Row("external_weights_high", "Externally held weights on device"),
    Row("kv_swap_exhausted", "lack of CPU swap space"),  # V0
    Row("swap_too_large", "Too large swap space", (
        _p(r"swap space\. <<swap_gib>> out of the <<host_total_gib>> total"),
    )),
    Row("cpu_pool_low", "is less than requested memory for kv", (
        _p(r"on node \S{1,20} \(<free_gib>/<host_total_gib> GiB\) on kv cache allocation"),
        _p(r"requested memory for kv \(<requested_gib>"),
    )),  # v1/worker/cpu_worker.py:246
    Row("cpu_memory_low", "Available memory on node", (
        _p(r"on node \S{1,20} \(<free_gib>/<host_total_gib> GiB\) on (?P<step>startup|kv cache allocation) is less"),
    )),  # v1/worker/cpu_worker.py:208,246
    Row("cpu_budget_full", "(model weights and runtime), more than the", (
        _p(r"uses <consumed_gib> GiB"),
        _p(r"more than the <budget_gib> GiB of CPU memory"),
    )),  # v1/worker/cpu_worker.py:232
    Row("host_oom", "DefaultCPUAllocator", (_p(r"DefaultCPUAllocator:.{0,20}(?:allocate|enough) memory"),), vague=True),
    Row("host_oom", "emoryError", (_p(r"(?:^|[^A-Za-z])(?:_Array)?MemoryError\b"),), vague=True),
    Row("host_oom", "Cannot allocate memory"),
    Row("host_oom", "oom-kill", (_p(r"oom-kill"),), vague=True),
    Row("host_oom", "oom_kill event"),  # Slurm
    Row("host_oom", "emory: Killed process"),
    Row("host_oom", "OOMKilled"),
    Row("host_oom", "ray.exceptions.OutOfMemoryError"),
    Row("host_oom", "running low on memory"),  # Ray
    Row("host_oom", "OOM killer", (_p(r"by the OOM killer|by SIGKILL|OOM killer due"),), vague=True),
    Row("host_oom", "std::bad_alloc"),
    Row("shm_full", "insufficient shared memory"),
    Row("shm_full", "No space left on device", (_p(r"shm|psm_|Bus error|semaphore"),), vague=True),
    # Requests and settings that are refused.
    Row("request_too_long", "longer than the maximum model length", (
        _p(r"model length of <max_model_len>"),
    ), vague=True),
    Row("request_too_long", "This model's maximum context length", (_p(r"context length is <max_model_len>"),)),
    Row("bad_settings", "is smaller than max_model_len", (
        _p(r"max_num_batched_tokens \(<max_num_batched_tokens>\) is smaller than max_model_len \(<max_model_len>\)"),
    ), fixed={"rule": "max_num_batched_tokens >= max_model_len"}),  # config/scheduler.py:322
    Row("bad_settings", "must be greater than or equal to max_num_seqs", (
        _p(r"max_num_batched_tokens \(<max_num_batched_tokens>\)"),
        _p(r"max_num_seqs \(<max_num_seqs>\)"),
    ), fixed={"rule": "max_num_batched_tokens >= max_num_seqs"}),
    Row("bad_settings", "cannot be greater than the max_model_len", (
        _p(r"long_prefill_token_threshold \(<threshold_tokens>\)"),
    ), fixed={"rule": "long_prefill_token_threshold <= max_model_len"}),
    Row("bad_settings", "cannot be greater than max_num_seqs", fixed={"rule": "max_num_active_seqs <= max_num_seqs"}),
    Row("bad_settings", "does not allow any tokens", fixed={"rule": "max_num_scheduled_tokens"}),
    Row("bad_settings", "Partial Prefill is not supported", fixed={"rule": "no concurrent partial prefills"}),
    Row("bad_settings", "must be divisible by tensor parallel size", (
        _p(r"heads \(<attention_size>\) must be divisible by tensor parallel size \(<tensor_parallel_size>\)"),
    ), fixed={"rule": "attention heads divisible by tensor_parallel_size"}),
    Row("bad_settings", "Invalid prefix_match_unit", fixed={"rule": "prefix_match_unit"}),
    Row("bad_settings", "In Mamba cache align mode", fixed={"rule": "block_size <= max_num_batched_tokens"}),
    Row("bad_settings", "Hybrid KV cache manager was explicitly enabled", fixed={"rule": "hybrid KV cache manager"}),
    Row("bad_settings", "is incompatible with PYTORCH_CUDA_ALLOC_CONF", fixed={"rule": "no expandable segments"}),
    Row("bad_settings", "cpu_bytes_to_use must be specified", fixed={"rule": "kv_connector_extra_config"}),
    Row("bad_settings", "Selected backend", (
        _p(r"is not valid for"),
    ), fixed={"rule": "attention backend"}, vague=True),
    Row("bad_settings", "No valid attention backend found", fixed={"rule": "attention backend"}),
    Row("bad_settings", "unrecognized arguments:", (
        _p(r"unrecognized arguments: (?P<arguments>.{1,200})"),
    ), fixed={"rule": "known arguments"}),
    Row("bad_settings", "error: argument --", (_p(r"error: argument (?P<arguments>--[\w-]+)"),),
        fixed={"rule": "argument type"}),
    Row("bad_settings", "cannot be converted to <function human_readable", fixed={"rule": "argument type"}),
    # The end of an engine. v1/engine/core.py:1584, v1/engine/utils.py:1474, v1/executor/multiproc_executor.py:381.
    Row("engine_start_failed", "EngineCore failed to start"),
    Row("engine_fatal", "EngineCore encountered a fatal error"),
    Row("engine_fatal", "EngineCore hit an exception"),
    Row("engine_init_failed", "ngine core initialization failed"),
    Row("engine_dead", "EngineDeadError"),
    Row("engine_dead", "EngineCore encountered an issue"),
    Row("worker_init_failed", "WorkerProc initialization failed"),
    Row("worker_failed", "WorkerProc hit an exception"),
    Row("worker_failed", "Error executing method", (_p(r"executing method '?(?P<method>\w+)"),)),
    Row("worker_failed", "while processing method", (_p(r"processing method (?P<method>\w+)"),)),
    Row("host_oom", "SIGKILL", (_p(r"exit(?:ed)? (?:with )?(?:exit )?code <exit_code>.{0,40}SIGKILL"),), vague=True),
    Row("killed", "died unexpectedly", (_p(r"died unexpectedly"), _p(r"exit code: <exit_code>"))),
    Row("killed", "died with exit code", (_p(r"died with exit code <exit_code>"),)),
    Row("killed", "exit code", (_p(r"exit(?:ed)? (?:with )?(?:exit )?code:? <exit_code>"),), vague=True),
    Row("killed", "exited with code", (_p(r"with code (?P<exit_code>[1-9]\d{0,3})\b"),), vague=True),  # docker compose
    Row("killed", "Exit Code:", (_p(r"Code: (?P<exit_code>[1-9]\d{0,3})\b"),), vague=True),  # kubectl describe
    Row("killed", "was terminated", (_p(r"WorkerProc was terminated"),), vague=True),
    Row("killed", "Killed", (_p(r"^(?:\S{0,60}:? (?:line )?\d*:?\s*\d* )?Killed\b"),), vague=True,
        fixed={"signal": "KILL"}),  # a shell
    Row("leaked_semaphore", "leaked semaphore"),  # harmless
    Row("leaked_semaphore", "leaked shared_memory"),
    # Where a traceback was: functions that tell the phase of a failure. The second form is a short one of loggers.
    Row("frame", 'File "', (
        _p(rf'File "(?:[^"]{{0,400}}[/\\])?(?P<file>[\w.]{{1,80}})", line \d+, in {_FUNCTIONS}\s*$'),
    ), vague=True, broken=_BROKEN_FRAME),
    Row("frame", ", in ", (
        _p(rf"(?:^|[/\\\s])(?P<file>[\w.]{{1,80}}\.py):\d{{1,7}}, in {_FUNCTIONS}\s*$"),
    ), vague=True),
    Row("frame", 'File "', (
        _p(r'File "(?:[^"]{0,400}[/\\])?(?P<file>(?:chunk\w{0,40}|\w{0,40}prefill\w{0,40}|\w{0,20}sampler)\.py)", '
           r"line \d+, in (?P<function>\w{1,80})\s*$"),
    ), vague=True),
    Row("frame", "self.model_", (
        _p(r"^(?:\w{1,40} = )?self\.model_(?:runner|executor)\.(?P<function>load_model|profile_run|capture_model|"
           r"_dummy_sampler_run|determine_available_memory|determine_num_available_blocks|initialize_kv_cache)\("),
    ), vague=True, fixed={"file": ""}),  # the line of source below a frame, where the frame itself was cut off
    Row("frame", "raise_if_cache_size_invalid(", fixed={"file": "", "function": "raise_if_cache_size_invalid"}),
    Row("frame", "engine_core.run_busy_loop()", fixed={"file": "core.py", "function": "run_busy_loop"}),
    # Any other end of a traceback: that it was not memory.
    Row("cuda_oom", "OutOfMemoryError", (
        _p(r"^[\w.]{0,80}OutOfMemoryError(?::|$)"),
    ), until="Tried to allocate", fallback=True),
    Row("exception", "Error", (
        _p(r"^(?:[A-Za-z_]\w{0,60}\.){0,8}(?P<name>[A-Z]\w{0,60}Error)(?:: |:?$)"),
    ), fallback=True),
)  # fmt: skip


# --- prefixes -----------------------------------------------------------------------------------------------------

_SPACES = re.compile(r"\s{9,}")
_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_CONTAINER = re.compile(
    r"\s*(?:"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?(?: UTC)?\s+"
    r"(?:std(?:out|err) [FP] )?|"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})? \S{1,255} [\w@./-]{1,80}(?:\[\d{1,10}\])?: |"
    r"\[pod/[^\]\s]{1,255}\] |"
    r"[A-Za-z][\w.-]{0,80}\s+\| |"
    r"- (?:INFO|WARNING|ERROR) - (?:[\w.:]{1,80} - )*|"
    r"(?:INFO|NOTICE|WARNING|ERROR|DEFAULT) (?=\d{4}-\d\d-\d\dT)|"
    r"\[resource\.labels\.[^\]]{1,120}\] |"
    r"\[(?:[Ii]nfo|[Ww]arning|[Ee]rror|[Dd]ebug)\] (?:\(Process\) )?|"
    r"(?:> ?){1,4}|"
    r"\*\*(?=\()"
    r")"
)
_PROCESS = re.compile(
    r"\s*(?:\[rank(?P<torch_rank>\d{1,4})\]: ?|"
    r"\((?P<name>[A-Za-z][\w.:/-]{0,80}(?: [A-Z]{2,3}\d{1,4})*) (?:rank=(?P<rank>\d{1,4}) )?pid=(?P<pid>\d{1,10})"
    r"(?:, ip=[\w.:]{1,60})?\)\s?)"
)
_LEVEL = re.compile(
    r"\s*(?:"
    r"(?P<level>INFO|WARNING|ERROR|DEBUG|CRITICAL)(?::?\s+(?:\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?\s+)?)"
    r"(?:\[?(?P<file>[\w./]{1,120}\.py)(?::\d{1,6})?\]\s?)?|"
    r"\[?(?P<file2>[\w./]{1,120}\.py):\d{1,6}\]\s?"
    r")"
)
# What vLLM itself prints, in one go: most lines have this and nothing else before them.
_PLAIN = re.compile(
    r"(?:\((?P<name>[A-Za-z]\w{0,80}(?: [A-Z]{2,3}\d{1,4})*) pid=(?P<pid>\d{1,10})\) )?"
    r"(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[(?:[\w/]{1,120}/)?(?P<file>\w{1,80}\.py):\d{1,6}\] "
)
# Where vLLM's own prefix begins behind one that nobody knows here, or behind a progress bar that lost its line's end.
_BURIED = re.compile(
    r"\((?:EngineCore|APIServer|Worker|VllmWorker|RayWorkerWrapper)\w{0,40}(?: rank=\d{1,4})? pid=\d|"
    r"(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
)
_BURIED_WITHIN = 240
_REPEATED = re.compile(r"\[repeated \d{1,9}x across cluster\].{0,200}$", re.DOTALL)
_RANK_PARTS = re.compile(r"(?:DP|PP|PCP|TP|DCP|EP)\d{1,4}")
_ENGINE_PROCESSES = ("EngineCore", "APIServer", "ApiServer", "DPCoordinator", "DPEngineCoreActor", "LLMEngine")
_JSON_MESSAGES = ("message", "msg", "log", "textPayload", "line", "body", "MESSAGE", "jsonPayload")
_JSON_PROCESSES = ("vllm_process_name", "processName")


class _Line(NamedTuple):
    """A line without its prefixes. ``prefixed`` says whether vLLM's own prefix was there, so that a message begins."""

    text: str
    rank: str | None
    file: str
    prefixed: bool
    prefix: str


@lru_cache(maxsize=1024)
def _rank_of(name: str, number: str | None, pid: str | None) -> str | None:
    """The rank that a process's name tells (vllm/v1/executor/multiproc_executor.py:1214 in 0.33)."""
    parts = _RANK_PARTS.findall(name)
    if parts:
        return "_".join(parts)
    if number is not None:
        return f"rank{number}"
    numbered = re.fullmatch(r"EngineCore_(\d{1,4})", name)  # 0.10
    if numbered:
        return f"DP{numbered[1]}"
    if name.startswith(_ENGINE_PROCESSES) or re.fullmatch(r"(?:Vllm)?Worker(?:[-_]\d{1,4})?|MainProcess", name):
        return None
    return f"pid{pid}" if pid else None


def _strip(text: str) -> _Line:
    """Take off what containers, schedulers and vLLM itself put before a message."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if len(text) > _TEXT_LIMIT and "         " in text:
        text = _SPACES.sub(" ", text)
    for _ in range(6):
        match = None if text.startswith("(") else _CONTAINER.match(text)
        if not match:
            break
        text = text[match.end() :]
    plain = _PLAIN.match(text)
    if plain and "[repeated " not in text and text[plain.end() : plain.end() + 1] != "(":
        name, pid, file = plain.groups()
        rank = _rank_of(name, None, pid) if name else None
        return _Line(text[plain.end() :].strip(), rank, file, True, plain[0].strip())
    line = _known_line(text) if len(text) <= _REMEMBERED_CHARS else _of_vllm_prefix(text)
    if not line.prefixed and ("pid=" in text or ".py:" in text):
        buried = _BURIED.search(text, 1, _BURIED_WITHIN)
        if buried:
            return _of_vllm_prefix(text[buried.start() :])
    return line


def _of_vllm_prefix(text: str) -> _Line:
    """The general form of what ``_PLAIN`` knows."""
    whole = text
    rank, file, prefixed = None, "", False
    for _ in range(3):
        match = _PROCESS.match(text) if text.lstrip()[:1] in ("(", "[") else None
        if not match:
            break
        found = match["torch_rank"] or match["rank"]
        rank = _rank_of(match["name"] or "", found, match["pid"]) or rank
        prefixed = True
        text = text[match.end() :]
    if match := _LEVEL.match(text):
        file = (match["file"] or match["file2"] or "").rpartition("/")[2]
        prefixed = True
        text = text[match.end() :]
        while text.startswith("(") and (inner := _PROCESS.match(text)):
            text = text[inner.end() :]
    prefix = whole[: len(whole) - len(text)]
    if "[repeated " in text:
        text = _REPEATED.sub("", text)
    return _Line(text.strip(), rank, file, prefixed, prefix.strip())


_known_line = lru_cache(maxsize=4096)(_of_vllm_prefix)


def _may_be_prefixed(line: str) -> bool:
    """Whether a line may begin with a prefix of vLLM or of its processes: cheap, and wrong only towards yes."""
    return (
        ".py:" in line or "pid=" in line or "[rank" in line or "INFO" in line or "ERROR" in line or "WARNING" in line
        or "DEBUG" in line or "CRITICAL" in line
    )  # fmt: skip


def _unwrap_json(line: str) -> tuple[list[str], str | None]:
    """The message's lines in a JSON log record, and the process's name where the record has it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return [line], None
    process = None
    for _ in range(3):
        if isinstance(record, str) or not isinstance(record, dict):
            break
        process = next((str(record[key]) for key in _JSON_PROCESSES if key in record), process)
        record = next((record[key] for key in _JSON_MESSAGES if key in record), None)
    if not isinstance(record, str):
        return [line], process
    return record.split("\n")[:200], process


# --- the parser ---------------------------------------------------------------------------------------------------


_REQUEST = re.compile(r"(?:Received|Added) request ")  # vLLM's log of requests: prompts, of whatever words
_FRAME = re.compile(r'File "[^"]{0,400}", line \d{1,7}, in ([\w<>]{1,100})\s*$')


def _of_no_step(line: str) -> bool:
    """Whether a line is a frame of a traceback that tells no step: most of a traceback are."""
    match = _FRAME.search(line)
    if not match or match[1] in _WHOLE_OR_BEGUN:
        return False
    return "chunk" not in line and "prefill" not in line and "sampler" not in line


def interesting(line: str) -> bool:
    """Whether a line may hold a message of the table: cheap, and wrong only towards yes."""
    if " HTTP/1." in line or "DEBUG " in line or " request " in line and _REQUEST.search(line):
        return False  # the bulk of a long log: what states nothing of memory
    end = line.find("] ", 0, 160)
    text = line[end + 2 :] if end >= 0 and line.find(".py:", 0, end) >= 0 else line
    return _known_text(text) if len(text) <= _REMEMBERED_CHARS else _may_hold(text)


def _may_hold(line: str) -> bool:
    """Every anchor of ``ROWS`` contains one of these words; a few more are of messages that break over lines."""
    if 'File "' in line:
        return not _of_no_step(line)
    return (
        "ing " in line
        or " GiB" in line
        or "emory" in line
        or "not " in line
        or "ion " in line
        or " the" in line
        or "rror" in line
        or ".py:" in line
        or "KV cache" in line
        or "amba cache" in line
        or "eights" in line
        or "must be" in line
        or "ption" in line
        or "p mode" in line
        or "model's" in line
        or "request with" in line
        or "ompatible" in line
        or "LLM engine" in line
        or "init engine" in line
        or "backend" in line
        or "top-k" in line
        or "d prefi" in line
        or "ffloade" in line
        or "warmup" in line
        or " max_mo" in line
        or " set (" in line
        or "illed" in line
        or " failed to " in line
        or "da failure" in line
        or " args:" in line
        or "arguments:" in line
        or "code" in line
        or "ered" in line
        or "Avg " in line
        or "Iteration(" in line
        or "V2 Mod" in line
        or "shards" in line
        or "torch.c" in line
        or "Maximum" in line
        or "blocks" in line
        or "to wake" in line
        or "CUBLAS" in line
        or "oom-k" in line
        or "oom_k" in line
        or "OUT_OF" in line
        or "egister failed" in line
        or "Code:" in line
        or "OOM" in line
        or "bad_alloc" in line
        or "SIGKILL" in line
        or "died " in line
        or "was t" in line
        or "leaked" in line
        or "resource: " in line
        or "process_group" in line
        or "prefix cache" in line
        or ", in " in line
        or "self.model_" in line
        or "run_busy" in line
        or "cache_size" in line
        or "resolved" in line
        or "vllm serve" in line
        or "vllm.entry" in line
        or "api_server" in line
        or "ocker run" in line
        or "podman run" in line
        or "erdctl run" in line
        or "args:" in line
        or 'args"' in line
        or "command:" in line
        or 'command"' in line
        or "entrypoint:" in line
        or 'entrypoint"' in line
        or "LLM(" in line
        or "gineArgs(" in line
        or "space" in line
        or "llocat" in line
    )


# Every rank prints the same, every start of a crash loop too: what differs is the prefix.
_known_text = lru_cache(maxsize=4096)(_may_hold)


def _read(row: Row, text: str) -> dict[str, object] | None:
    """The values of a message, or None where it is not (or not yet) this row's."""
    values: dict[str, object] = dict(row.fixed)
    for number, pattern in enumerate(row.patterns):
        match = pattern.search(text)
        if match:
            for name, value in _values(match).items():
                values.setdefault(name, value)
        elif number == 0:
            return None
    if row.convert:
        values |= row.convert(text)
    return values


@lru_cache(maxsize=512)  # every rank prints the same traceback, and so does every start of a crash loop
def _match(text: str, file: str) -> tuple[list[tuple[Row, dict]], bool]:
    """The rows that a text fits, with their values, and whether it may go on in the next line."""
    found: list[tuple[Row, dict]] = []
    open_ended = False
    for row in ROWS:
        if row.anchor not in text or (row.files and file not in row.files) or (row.fallback and open_ended):
            continue
        values = _read(row, text)
        if values is None:
            open_ended = open_ended or not (row.vague or row.fallback)
            open_ended = open_ended or bool(row.broken and row.broken.search(text))
            continue
        found.append((row, values))
        if not row.more:
            open_ended = bool(row.until) and not re.search(row.until, text)
            break
    return found, open_ended


def _told(found: list[tuple[Row, dict]]) -> int:
    """How much a reading tells, to choose between readings: a message counts one, each value one more."""
    return sum(1 + len(values) for _, values in found)


class LogParser:
    """Turns lines into events. It keeps one unfinished message (a few lines), whatever the log's length.

    >>> parser = LogParser()
    >>> event, = parser.feed("INFO 08-14 14:07:22 [gpu_worker.py:563] Available KV cache memory: 6.87 GiB")
    >>> event.kind, event.values
    ('kv_available', {'kv_cache_gib': 6.87})
    """

    def __init__(self):
        self._number = 0
        self._previous = ""
        self._open: list[str] = []
        self._first: _Line | None = None
        self._first_number = 0
        self._progress: tuple | None = None
        self._between_load_and_pool = False
        self._pool_known: set[str | None] = set()
        self._launch: pasted.Launch | None = None
        self._launch_number = 0

    def feed(self, line: str) -> list[Event]:
        """Read one line, with or without its end; returns the events that are complete now."""
        if not self.waiting and not interesting(line):
            self.skip(1, line)
            return []
        return self.read(line)

    def close(self) -> list[Event]:
        """Give what an unfinished message at the end of the log tells. The parser can go on afterwards."""
        events = self._finish() + self._launched()
        self._previous = ""
        return events

    def skip(self, lines: int, last: str) -> None:
        """Count lines that ``interesting`` has refused; ``last`` is the last of them."""
        self._number += lines
        self._previous = last

    @property
    def waiting(self) -> bool:
        """Whether a message or a pasted command is unfinished, so that every further line matters."""
        return bool(self._open) or self._launch is not None

    def read(self, line: str) -> list[Event]:
        """As ``feed``, for a line that ``interesting`` has not refused, or where a message is ``waiting``."""
        self._number += 1
        line = line.rstrip()
        of_a_server = self._launch is None and line.startswith("(") and " pid=" in line
        events = [] if of_a_server else self._pasted(line)
        if "\r" in line:
            parts, process = line.split("\r")[-64:], None
        elif line.endswith("}") and line.lstrip().startswith("{"):
            parts, process = _unwrap_json(line[: 4 * _LINE_LIMIT])
        elif "%|" in line and (buried := _BURIED.search(line, line.index("%|"), _LINE_LIMIT)):
            parts, process = [line[: buried.start()], line[buried.start() :]], None
        else:
            events += self._part(line[:_LINE_LIMIT], None) if line else []
            self._previous = line[:_LINE_LIMIT]
            return events
        for part in parts:
            if part.strip():
                events += self._part(part[:_LINE_LIMIT], process)
        self._previous = parts[-1][:_LINE_LIMIT] if parts else ""
        return events

    def _pasted(self, line: str) -> list[Event]:
        """The flags of a command among the lines; its lines are read as any other too."""
        if self._launch is not None and self._launch.takes(line):
            return []
        events = self._launched()
        self._launch, self._launch_number = pasted.begun(line), self._number
        return events

    def _launched(self) -> list[Event]:
        launch, self._launch = self._launch, None
        found = launch.flags() if launch is not None else {}
        if not found:
            return []
        text = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in found.items())
        return [Event("command", found, self._launch_number, text[:_TEXT_LIMIT])]

    def _part(self, part: str, process: str | None) -> list[Event]:
        line = _strip(part)
        if process and line.rank is None:
            line = _Line(line.text, _rank_of(process, None, None), line.file, True, line.prefix)
        found, open_ended = _match(line.text, line.file)
        anchored = bool(found) or open_ended
        if not anchored and not self._open and (line.prefixed or not _may_be_prefixed(self._previous)):
            return []
        goes_on = not line.prefixed or (self._first is not None and line.prefix == self._first.prefix)
        if self._open and goes_on and not line.text.startswith(('File "', "Traceback", "^")):
            told = _told(self._best()[0])
            if not found or (not line.prefixed and _told(self._best(line.text)[0]) > told):
                return self._continue(line)
        events = self._finish()
        joined = None if line.prefixed or events else self._joined_to_previous(line)
        if joined is not None and (not anchored or _told(joined[1]) > _told(found)):
            line, found, open_ended = joined
        elif not anchored:
            return events
        elif line.rank is None and not line.prefixed and _may_be_prefixed(self._previous):
            before = _strip(self._previous[:_LINE_LIMIT])
            if not before.text and before.prefixed:  # the line broke after its prefix
                line = _Line(line.text, before.rank, line.file or before.file, True, before.prefix)
        if open_ended:
            self._open, self._first, self._first_number = [line.text], line, self._number
            return events
        return events + self._emit(found, line.text, line, self._number)

    def _joined_to_previous(self, line: _Line) -> tuple[_Line, list, bool] | None:
        """A message whose first words broke over two lines, so that neither showed its anchor."""
        if not self._previous or len(self._previous) > _MESSAGE_CHARS:
            return None
        if not _may_be_prefixed(self._previous):
            return None
        before = _strip(self._previous.rstrip("\r\n"))
        if not before.text or not before.prefixed or _match(before.text, before.file)[0]:
            return None
        texts = [before.text + glue + line.text for glue in (" ", "")]
        readings = [(*_match(text, before.file), text) for text in texts]
        found, open_ended, text = max(readings, key=lambda reading: (_told(reading[0]), reading[1]))
        if not found and not open_ended:
            return None
        return _Line(text, before.rank, before.file, True, before.prefix), found, open_ended

    def _continue(self, line: _Line) -> list[Event]:
        self._open.append(line.text)
        found, open_ended = self._best()
        full = len(self._open) >= _MESSAGE_LINES or sum(map(len, self._open)) >= _MESSAGE_CHARS
        return self._finish() if full or (found and not open_ended) else []

    def _best(self, *more: str) -> tuple[list[tuple[Row, dict]], bool]:
        """The reading that tells most, of the lines joined as words and as broken in the middle of a word."""
        readings = [_match(glue.join((*self._open, *more)), self._first.file) for glue in (" ", "")]
        return max(readings, key=lambda reading: (_told(reading[0]), not reading[1]))

    def _finish(self) -> list[Event]:
        if not self._open:
            return []
        found, _ = self._best()
        text, first = " ".join(self._open), self._first
        self._open, self._first = [], None
        return self._emit(found, text, first, self._first_number)

    def _emit(self, found, text: str, line: _Line, number: int) -> list[Event]:
        events = []
        for row, values in found:
            kind = self._in_order(row.kind, line.rank, line.file)
            if kind in _OF_A_FAILURE and line.file and "WARNING " in line.prefix:
                if kind not in OUT_OF_MEMORY:
                    continue
                kind = "caught"  # a failure is an error to vLLM; of what it catches and goes on without it warns
            if kind.endswith("_progress"):
                key = (kind, text.partition(":")[0], values.get("progress_percent") == 100.0)
                if key == self._progress:
                    continue
                self._progress = key
            events.append(Event(kind, values, number, text[:_TEXT_LIMIT], line.rank))
        return events

    def _in_order(self, kind: str, rank: str | None, file: str) -> str:
        """Tell the trial capture of 0.27 and later (V2 runner, before the pool is sized) from the real one."""
        if kind == "model_loaded":
            self._between_load_and_pool = True
            self._pool_known.clear()
        elif kind in ("kv_size", "kv_blocks", "kv_concurrency"):
            self._between_load_and_pool = False
        elif kind in ("kv_available", "kv_given"):
            if len(self._pool_known) < 4096:
                self._pool_known.add(rank)
        elif kind in ("graphs_captured", "graphs_progress"):
            trial = self._between_load_and_pool and rank not in self._pool_known and file != "gpu_model_runner.py"
            if trial:
                return kind.replace("graphs_", "graphs_trial_")
        return kind


def parse(lines: Iterable[str]) -> Iterator[Event]:
    """The events of a log's lines."""
    parser = LogParser()
    for line in lines:
        yield from parser.feed(line)
    yield from parser.close()


_PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xfd7zX")  # gzip, zip, zstd, xz


@contextmanager
def open_log(place: str | PathLike | int, closefd: bool = True) -> Iterator[TextIO]:
    """A log as text: UTF-8, or UTF-16, which PowerShell writes where output is redirected; other bytes are replaced.

    Args:
        place: a path, or the number of an open file, which stays open without ``closefd``.

    Raises:
        OSError: where it cannot be read.
        MemlabError: where it is packed.
    """
    with open(place, "rb", closefd=closefd) as file:
        start = file.peek(4)[:4]
        if start.startswith(_PACKED):
            name = "the standard input" if isinstance(place, int) else place
            raise MemlabError(f"{name} is packed: unpack it first, as in zcat vllm.log.gz | memlab doctor")
        marked = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        yield io.TextIOWrapper(file, "utf-16" if marked else "utf-8", errors="replace", newline="\n")


def parse_file(path: str | PathLike, block_chars: int = 1 << 20) -> Iterator[Event]:
    """The events of a log file, read in blocks.

    Raises:
        OSError: where it cannot be read.
    """
    with open_log(path) as file:
        yield from parse_stream(file, block_chars)


def parse_stream(file: TextIO, block_chars: int = 1 << 20) -> Iterator[Event]:
    """The events of an open text file, read in blocks to its end."""
    parser = LogParser()
    rest = before = ""
    waiting = False
    while block := file.read(block_chars):
        lines = (rest + block).split("\n")
        rest = lines.pop()[:_LINE_LIMIT]
        quiet = 0
        for line in lines:
            if waiting or interesting(line):
                if quiet:
                    parser.skip(quiet, before)
                    quiet = 0
                yield from parser.read(line)
                waiting = parser.waiting
            else:
                quiet += 1
                before = line
        if quiet:
            parser.skip(quiet, before[:_LINE_LIMIT])
    if rest:
        yield from parser.feed(rest)
    yield from parser.close()


# --- what events tell ---------------------------------------------------------------------------------------------

# The phase that an event begins. "Model loading took" ends the loading, so the profile begins; compiling happens
# within the profiled step; "Available KV cache memory" ends the profile. The progress bars of a trial capture and its
# "Graph capturing finished" belong to the profile (0.33 v1/worker/gpu_worker.py:641-808).
_BEGINS = {
    "version": "starting",
    "arguments": "starting",
    "engine_config": "starting",
    "load_started": "loading_weights",
    "load_progress": "loading_weights",
    "model_loaded": "profiling",
    "encoder_profile": "profiling",
    "compile_started": "compiling",
    "compile_step": "compiling",
    "compiled": "profiling",
    "graphs_profiled": "profiling",
    "graphs_trial_progress": "profiling",
    "graphs_trial_captured": "profiling",
    "profiled": "sizing_kv_cache",
    "memory_profile": "sizing_kv_cache",
    "kv_available": "sizing_kv_cache",
    "kv_given": "sizing_kv_cache",
    "kv_auto": "sizing_kv_cache",
    "kv_size": "warming_up",
    "kv_blocks": "warming_up",
    "warming_up": "warming_up",
    "graphs_progress": "capturing_graphs",
    "graphs_captured": "warming_up",
    "ready": "ready",
    "stats": "serving",
    "iteration": "serving",
    "stopping": "stopping",
}

# Memory of the device or of the host ran out.
OUT_OF_MEMORY = frozenset(
    ("oom", "load_oom", "sampler_oom", "pooler_oom", "cumem_oom", "nccl_oom", "cuda_oom", "host_oom", "shm_full")
)
# vLLM counted and refused to start: nothing was allocated in vain.
DOES_NOT_FIT = frozenset(
    ("free_memory_low", "kv_none", "kv_too_small", "autofit_failed", "mamba_blocks", "mm_reserve_too_big")
    + ("external_weights_high", "cpu_memory_low", "cpu_pool_low", "cpu_budget_full", "swap_too_large", "profile_grew")
)
ERRORS = (
    OUT_OF_MEMORY
    | DOES_NOT_FIT
    | {"cumem_error", "nccl_error", "workspace_locked", "workspace_small", "kv_swap_exhausted", "bad_settings"}
    | {"engine_start_failed", "engine_fatal", "engine_init_failed", "engine_dead", "worker_init_failed"}
    | {"worker_failed", "killed"}
)
_OF_A_FAILURE = OUT_OF_MEMORY | {"frame", "exception"}
_STATED_BY_A_WORKER = frozenset(
    ("model_loaded", "kv_available", "kv_given", "kv_auto", "memory_profile", "memory_terms", "memory_summary")
    + ("graphs_estimated", "graphs_captured", "graphs_trial_captured", "graphs_compared", "budget")
)
_MEMORY = (
    _STATED_BY_A_WORKER
    | {"kv_size", "kv_concurrency", "kv_blocks", "blocks_override", "kv_padding", "block_size", "max_model_len_fit"}
    | {"graphs_profiled", "graphs_subtracted", "graphs_not_subtracted", "startup_plan", "encoder_profile"}
    | {"encoder_skipped", "mm_reserve", "offload", "kv_offload", "weights_external", "chunked_prefill", "profiled"}
    | {"sleep", "sleep_allocator", "preempted", "hybrid_disabled", "runner", "attention", "sampler"}
)


def phase_of(event: Event) -> str | None:
    """The phase of ``PHASES`` that begins with this event, or None."""
    return _BEGINS.get(event.kind)


def is_error(event: Event) -> bool:
    """Whether the event is a failure; harmless look-alikes (an autotuner's OOM, a leaked semaphore) are not."""
    return event.kind in ERRORS


def is_out_of_memory(event: Event) -> bool:
    """Whether memory ran out, on the device or the host; a start refused by counting is not (``DOES_NOT_FIT``)."""
    return event.kind in OUT_OF_MEMORY or (event.kind == "killed" and event.values.get("exit_code") in (137, -9))


def _rank_order(rank: str | None) -> tuple:
    return (rank is not None, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", rank or "")])


def ranks(events: Iterable[Event]) -> list[str | None]:
    """The ranks that stated memory, in order; [None] for a single process, [] where none did.

    V0's driver has no prefix, so its rank is None beside the workers' "pid...".
    """
    found = {event.rank for event in events if event.kind in _STATED_BY_A_WORKER}
    return sorted(found, key=_rank_order)


def rank_number(name: str | None, tensor_parallel_size: int) -> int | None:
    """The number of a rank among a server's GPUs, stages of the pipeline first; None where the name does not tell.

    >>> rank_number("PP1_TP0", 2), rank_number("TP1", 2), rank_number("rank3", 2), rank_number(None, 1)
    (2, 1, 3, 0)
    """
    if name is None:
        return 0
    parts = {kind: int(number) for kind, number in re.findall(r"(PP|TP|rank)(\d+)", name)}
    if not parts:
        return None
    return parts.get("rank", parts.get("PP", 0) * tensor_parallel_size + parts.get("TP", 0))


def _of_rank(events: Iterable[Event], rank: str | None) -> list[Event]:
    """The events of one rank's last start, with those of the engine, which speaks for all ranks."""
    events = list(events)
    known = ranks(events)
    if rank not in known:
        if rank is not None or not known:
            return []
        rank = known[0]
    kept: list[Event] = []
    sized = False
    for event in events:
        if event.kind in _STATED_BY_A_WORKER and event.rank != rank:
            continue
        if event.kind == "model_loaded" and sized:  # a second start in the same log
            kept, sized = [], False
        sized = sized or event.kind in ("kv_available", "kv_given", "kv_auto", "memory_terms", "memory_profile")
        kept.append(event)
    return kept


def stated_ledger(events: Iterable[Event], rank: str | None = None) -> MemoryLedger | None:
    """What the log states of one rank's memory (the first rank's, for None), or None where it states nothing.

    - V0 0.6.4 prints the peak of torch's memory, weights included: activation = peak - weights.
    - V0 0.6.5 to 0.11 prints weights, non-torch memory and activation.
    - V1 to 0.26 prints the same three in a summary at the end of the start; 0.27 and later weights and non-torch
      memory together, as ``consumed`` (v1/worker/gpu_worker.py:1029).
    - In both summaries the printed activation contains the estimate of the CUDA graphs where that was subtracted
      (0.33 v1/worker/gpu_worker.py:748), so it is taken off. A build that prints it without is told by the sum.

    ``kv_cache`` is the pool after what later lines change: a reserve for video decoding (which is taken off the budget
    too) and a number of blocks given by hand.
    """
    found = _of_rank(events, rank)
    stated: dict[str, float] = {}
    seen: set[str] = set()
    given = None
    for event in found:
        kind, values = event.kind, event.values
        seen.add(kind)
        if kind in _STATED_BY_A_WORKER:
            stated |= {name: value for name, value in values.items() if name.endswith("_gib")}
        if kind in ("kv_given", "startup_plan"):
            given = True
        elif kind == "kv_available":
            given = bool(given)
        elif kind == "mm_reserve":
            stated["kv_cache_gib"] = values.get("kv_cache_gib")
            stated["reserve_gib"] = values["reserve_gib"]
        elif kind == "blocks_override" and "kv_available" in seen and values["auto_blocks"]:
            stated["kv_cache_gib"] *= values["gpu_blocks"] / values["auto_blocks"]
            given = True
        elif kind in ("memory_profile", "budget"):
            stated["gpu_memory_utilization"] = values.get("gpu_memory_utilization")
    if not seen & _STATED_BY_A_WORKER:
        return None
    if "memory_profile" in seen and "budget_gib" not in stated and stated.get("gpu_memory_utilization"):
        stated["budget_gib"] = stated["total_gib"] * stated["gpu_memory_utilization"]
    if "peak_torch_gib" in stated and "weights_gib" in stated:
        stated["activation_gib"] = stated["peak_torch_gib"] - stated["weights_gib"]
    if stated.get("budget_gib") is not None and "reserve_gib" in stated:
        stated["budget_gib"] -= stated["reserve_gib"]
    subtracted = _graphs_subtracted(seen)
    if "activation_printed_gib" in stated:
        stated["activation_gib"] = _without_graphs(stated, bool(subtracted))
    names = ("budget", "weights", "non_torch", "consumed", "activation", "cuda_graphs_estimated", "cuda_graphs_actual")
    terms = {f"{name}_gib": stated.get(f"{name}_gib") for name in ("total", *names, "kv_cache")}
    rounded = {name: None if value is None else round(value, 4) for name, value in terms.items()}
    return MemoryLedger(view="stated", **rounded, graphs_subtracted=subtracted, pool_given=given)


def _graphs_subtracted(seen: set[str]) -> bool | None:
    """Whether the pool was made smaller by the graphs' estimate; None where the log does not tell."""
    if "graphs_subtracted" in seen:
        return True
    if seen & {"graphs_not_subtracted", "memory_terms", "memory_profile", "memory_summary"}:
        return False
    return None


def _without_graphs(stated: Mapping[str, float], subtracted: bool) -> float:
    """The printed peak activation less the graphs' estimate that it contains, in GiB."""
    printed, estimate = stated["activation_printed_gib"], stated.get("cuda_graphs_estimated_gib")
    if not subtracted or estimate is None:
        return printed
    resident = stated.get("consumed_gib", stated.get("weights_gib", 0.0) + stated.get("non_torch_gib", 0.0))
    if "budget_gib" in stated and "kv_cache_gib" in stated:
        gap = stated["budget_gib"] - resident - printed - stated["kv_cache_gib"]
        if abs(gap - estimate) < abs(gap):
            return printed
    return printed - estimate


@dataclass(frozen=True)
class StatedKV:
    """The KV pool as the log states it; ``max_concurrency`` counts requests of ``max_model_len`` tokens."""

    tokens: int | None = None
    blocks: int | None = None
    block_size: int | None = None
    max_concurrency: float | None = None
    max_model_len: int | None = None


_KV_FIELDS = {
    "kv_tokens": "tokens",
    "gpu_blocks": "blocks",
    "block_size": "block_size",
    "max_concurrency": "max_concurrency",
    "max_model_len": "max_model_len",
    "reduced_len": "max_model_len",
    "derived_len": "max_model_len",
}


def stated_kv(events: Iterable[Event]) -> StatedKV:
    """The KV pool of the log's last start, in tokens and blocks; what was not stated is None."""
    found: dict[str, object] = {}
    sized = False
    for event in events:
        if event.kind == "engine_config" and sized:
            found, sized = {}, False
        if event.kind == "blocks_override" and not sized and not event.values["auto_blocks"]:
            continue  # the small pool of a trial capture
        sized = sized or event.kind in ("kv_size", "kv_blocks")
        for name, value in event.values.items():
            if name in _KV_FIELDS and isinstance(value, int | float):
                found[_KV_FIELDS[name]] = value
    tokens, blocks, size = (found.get(name) for name in ("tokens", "blocks", "block_size"))
    if size is None and tokens and blocks and tokens % blocks == 0:
        found["block_size"] = tokens // blocks
    elif tokens is None and blocks is not None and size:
        found["tokens"] = blocks * size
    return StatedKV(**found)


def free_at_start_gib(events: Iterable[Event], rank: str | None = None) -> float | None:
    """The memory that was free at vLLM's first look (its init snapshot), in GiB; of the first rank that says, for None.

    Printed in the summary, with a given pool, and where the start is refused.
    """
    for event in events:
        if event.kind in ("memory_summary", "kv_given", "free_memory_low", "profile_grew"):
            free = event.values.get("free_gib")
            if free is not None and rank in (None, event.rank):
                return free
    return None


def engine(events: Iterable[Event]) -> dict[str, object]:
    """The engine as the log states it: ``vllm_version``, ``engine``, ``runner``, ``attention``, ``sampler``, settings.

    The settings are those of "Initializing a V1 LLM engine ... with config", as vLLM resolved them.
    """
    found: dict[str, object] = {}
    for event in events:
        if event.kind in ("version", "engine_config", "engine_dump", "runner", "attention", "sampler"):
            found |= event.values
    return found


def arguments(events: Iterable[Event]) -> dict[str, object]:
    """The flags of "non-default args", under vLLM's names: scalars only, no keys or tokens."""
    return _last(events, "arguments")


def resolved(events: Iterable[Event]) -> dict[str, object]:
    """The flags as vLLM filled them in, of the last start that states them."""
    return _last(events, "resolved")


def _last(events: Iterable[Event], kind: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for event in events:
        if event.kind == kind:
            found = dict(event.values)
    return found


# --- privacy ------------------------------------------------------------------------------------------------------

_KNOWN_SITES = r"(?:127\.0\.0\.1|0\.0\.0\.0|localhost|docs\.vllm\.ai|vllm\.ai|github\.com/vllm-project|pytorch\.org)"
_SCRUBS = (
    (re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]"), ""),
    (re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{6,}", re.IGNORECASE), r"\1 <secret>"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-|AKIA)[\w-]{8,}"), "<secret>"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w.-]{8,}"), "<secret>"),
    (
        re.compile(
            r"(?i)((?:\b|_)(?:api[_-]?key|(?:hf|access|auth|api)[_-]?token|token|password|passwd|secret(?:[_-]?key)?)"
            r"['\"]?\s?[:=]\s?)(?!\d+\b|None\b|<)(?:'[^']*'|\"[^\"]*\"|[^\s,;)}'\"]+)"
        ),
        r"\1<secret>",
    ),
    (re.compile(rf"\b(?:https?|tcp|ftp|s3|gs|hdfs|zmq|ipc|grpc)://(?!{_KNOWN_SITES})[^\s'\"<>),]+"), "<url>"),
    (re.compile(r"\bfile://[^\s'\"<>),]+"), "<path>"),
    (re.compile(r"(['\"`])(?:/|~/|[A-Za-z]:\\)[^'\"`\n]*\1"), r"\1<path>\1"),
    (re.compile(r"(?<![\w/.:>-])(?:~|[A-Za-z]:(?=\\))?(?:[/\\][\w.@+~=-]+){2,}[/\\]?"), "<path>"),
    (re.compile(r"(?<![\w/.:>-])(?:~|/(?:home|root|mnt|data|Users|tmp|var|opt|usr|etc|srv))/?(?![\w])"), "<path>"),
    (re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})*\b"), "<user>"),
    (re.compile(r"(?<![\d.])(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\w)"), "<ip>"),
    (re.compile(r"(?<![\w:])(?!::1\b)(?:[0-9a-fA-F]{1,4}:){4,7}(?::?[0-9a-fA-F]{1,4}){1,4}|\bfe80::[\w:%]+"), "<ip>"),
    (
        re.compile(r"^([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?) \S+ (?=[\w@./-]+(?:\[\d+\])?: )", re.MULTILINE),
        r"\1 <host> ",
    ),
    (re.compile(r"\[pod/[^\]\s]+\]"), "[<host>]"),
    (
        re.compile(
            r"(?i)(\b(?:host|hostname|node_?name|master_addr)['\"]?\s?[:=]\s?)"
            r"(?!<|None|'?127\.0\.0\.1|'?localhost)['\"]?[\w.-]+['\"]?"
        ),
        r"\1<host>",
    ),
)


def scrub(text: str) -> str:
    """Text without absolute paths, addresses other than this machine's own, host and user names, keys and tokens."""
    for pattern, instead in _SCRUBS:
        text = pattern.sub(instead, text)
    return text


def clean(text: object, limit: int = 200) -> str:
    """Text of others for a terminal: no control characters, no direction marks, at most ``limit`` characters.

    What is cut ends in ``…``.
    """
    whole = str(text)
    shown = whole if len(whole) <= limit else whole[: limit - 1].rstrip() + "…"
    return "".join(c if c.isprintable() else "\ufffd" for c in shown)


def memory_lines(events: Iterable[Event], limit: int = 40, line_chars: int = 700) -> list[str]:
    """The messages that state memory, and the failures, scrubbed; repeats and what exceeds ``limit`` are left out.

    The rank stands before the message where there are several. Where there are too many, the first and the last stay.
    """
    first: list[str] = []
    last: deque[str] = deque(maxlen=limit // 2)
    for event in events:
        if event.kind in _MEMORY or event.kind in ERRORS:
            line = scrub(event.text)[:line_chars]
            line = f"{event.rank}: {line}" if event.rank else line
            if line not in first and line not in last:
                (first if len(first) < limit - limit // 2 else last).append(line)
    return first + list(last)
