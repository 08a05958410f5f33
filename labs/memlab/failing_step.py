"""In which step of vLLM memory ran out: by the functions of a traceback, else by what was under way."""

import re
from collections.abc import Iterable, Mapping

from memlab.episodes import Episode
from memlab.facts import Facts
from memlab.vllm_log import Event

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
            "load_model create_weights load_weights process_weights_after_loading get_model initialize_model "
            "make_layers",
        ),
        ("multimodal_profile", "profile_encoder_cache"),
        ("memory_profile", _PROFILE),
        ("kv_cache_alloc_oom", "init_cache_engine allocate_gpu_cache initialize_kv_cache"),
        ("kv_cache_alloc_oom", "_allocate_kv_cache_tensors _allocate_kv_cache allocate_kv_cache"),
        ("cuda_graph_capture", "warm_up_model"),
        ("nccl_init_oom", "init_worker_distributed_environment"),
        (
            "runtime_logprobs",
            "_get_prompt_logprobs_dict compute_logprobs gather_logprobs compute_prompt_logprobs compute_topk_logprobs "
            "compute_prompt_token_id_logprobs compute_topk_scores compute_token_logprobs",
        ),
    )
)
_ENCODER = {"embed_multimodal", "get_multimodal_embeddings", "_execute_mm_encoder", "_process_image_input"}
_ENCODER |= {"_process_video_input", "execute_mm_encoder"}
_SAMPLER = {"sampler.py", "sample", "sample_tokens", "apply_top_k_top_p"}
_SERVES = {"run_busy_loop", "run_engine_loop", "engine_step", "step_async", "_run_engine"}
CHECKS_POOL = {"raise_if_cache_size_invalid", "_check_enough_kv_cache_memory", "check_enough_kv_cache_memory"}
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


def _of_vllm(event: Event) -> bool:
    """Whether a frame is of vLLM's own code; one that shows no folder is taken to be."""
    path = event.text.replace(" ", "").lower()
    return "vllm" in path or not any(slash in path for slash in "/\\")


def functions_of(events: Iterable[Event]) -> dict[str, Event]:
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


def place(functions: Mapping[str, Event], seen: frozenset[str] | set[str]) -> tuple[str, Event] | None:
    """The phase that a traceback names, with the frame that says so."""
    profiled = set(functions) & set(_PROFILE.split())
    for phase, names in _PLACES:
        named = [functions[name] for name in functions if name in names]
        if not named or (phase == "sampler_warmup" and profiled):  # the profile runs the sampler too
            continue
        if phase == "memory_profile" and (_ENCODER & set(functions) or encoder_was_last(seen)):
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


def in_an_encoder(functions: Iterable[str]) -> bool:
    """Whether the functions of a traceback are of the encoder of images or videos."""
    return bool(_ENCODER & set(functions))


def encoder_was_last(seen: frozenset[str] | set[str]) -> bool:
    return "mm_sequence_short" in seen or ("encoder_profile" in seen and not seen & {"compile_started", "compiled"})


def in_a_prompt(episode: Episode, facts: Facts) -> bool:
    """Whether V0's forward pass failed at a tensor so large that it is of many tokens: decoding has one a sequence."""
    return "forward_failed" in {event.kind for event in episode.events} and facts.values.get("tried_gib", 0.0) > 0.1


def by_order(episode: Episode, facts: Facts) -> str | None:
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
    if phase == "memory_profile" and encoder_was_last(facts.seen):
        return "multimodal_profile"
    return phase
