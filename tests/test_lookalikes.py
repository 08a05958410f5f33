"""Lines that sound like out of memory and are not, in vLLM's words: none of them makes a failure of a log."""

import importlib.util
import re
from pathlib import Path

import pytest

from memlab import vllm_log
from memlab.doctor import diagnose

LOGS = Path(__file__).resolve().parent / "data" / "vllm_logs"
SERVED = (LOGS / "h200-0.33.0-graphs.log").read_text()
FAILED = (LOGS / "h200-0.33.0-rtx-3090-pool-too-small.log").read_text()
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB "
    "of which 1.25 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the "
    "allocated memory 70.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)


def warned(file: str, *lines: str) -> str:
    return "\n".join(f"(EngineCore pid=9) WARNING 12-01 10:00:00 [{file}:1] {line}" for line in lines)


# The message, and where vLLM 0.32 and 0.33 print it with which words (None: another program does).
LOOKALIKES = {
    "a warm-up of a linear attention that was left out": (
        warned(
            "qwen_gdn_linear_attn.py",
            "GDN prefill kernel warmup (T=64) failed for layer model.layers.0.linear_attn. First inference may OOM "
            "due to autotuner.",
            "Traceback (most recent call last):",
            '  File "/usr/lib/vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py", line 1230, in _forward',
            '  File "/usr/lib/vllm/model_executor/layers/fla/ops/chunk.py", line 99, in chunk_gated_delta_rule',
            OOM,
        ),
        ("model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py", "First inference may OOM due to "),
    ),
    "a warm-up of Mamba that was left out": (
        warned(
            "mamba_mixer2.py",
            "Mamba2 SSD kernel warmup failed for layer layers.0.mixer (initial_states=True). First inference may "
            "experience latency spike or OOM due to autotuner.",
            "Traceback (most recent call last):",
            "torch.AcceleratorError: CUDA error: out of memory",
        ),
        ("model_executor/layers/mamba/mamba_mixer2.py", "latency spike or OOM due to autotuner."),
    ),
    "one way to add up over GPUs that is not to be had": (
        warned(
            "symm_mem.py",
            "SymmMemCommunicator: symmetric memory initialization failed: CUDA driver error: out of memory "
            "Communicator is not available. To suppress this warning set VLLM_ALLREDUCE_USE_SYMM_MEM=0",
        ),
        ("distributed/device_communicators/symm_mem.py", "symmetric memory initialization failed: %s "),
    ),
    "a wait for another process": (
        "(APIServer pid=1) INFO 12-01 10:00:00 [shm_broadcast.py:684] No available shared memory broadcast block found "
        "in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. "
        "compilation, weight/kv cache quantization).",
        ("distributed/device_communicators/shm_broadcast.py", "No available shared memory broadcast block found "),
    ),
    "blocks that are in use": (
        warned("block_pool.py", "Failed to reset prefix cache because some blocks (12) are not freed yet"),
        ("v1/core/block_pool.py", "Failed to reset prefix cache because some "),
    ),
    "the profile of graphs switched off": (
        warned(
            "gpu_worker.py",
            "CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Without it, CUDA "
            "graph memory is not accounted for during KV cache allocation, which may require lowering "
            "--gpu-memory-utilization to avoid OOM. Consider re-enabling it (the default as of v0.21.0) and "
            "increasing --gpu-memory-utilization from 0.9200 to 0.9300.",
        ),
        ("v1/worker/gpu_worker.py", "CUDA graph memory profiling is disabled "),
    ),
    "a plan of an earlier start": (
        warned(
            "startup_plan.py",
            "Startup plan not applied: current free memory (70.11 GiB) is below the recorded baseline (78.02 GiB); "
            "falling back to full memory profiling.",
        ),
        ("v1/worker/startup_plan.py", "Startup plan not applied: current free memory (%.2f GiB) is "),
    ),
    "responses that are kept": (
        warned(
            "serving.py",
            "`VLLM_ENABLE_RESPONSES_API_STORE` is enabled. This may cause a memory leak since we never remove "
            "responses from the store.",
        ),
        ("entrypoints/openai/responses/serving.py", "cause a memory leak since we never remove responses from "),
    ),
    "a leak that is avoided": (
        "(EngineCore pid=9) INFO 12-01 10:00:00 [nixl_utils.py:32] Setting UCX_RCACHE_MAX_UNRELEASED to '1024' to "
        "avoid a rare memory leak in UCX when using NIXL.",
        ("distributed/nixl_utils.py", "memory leak in UCX when using NIXL."),
    ),
    "fewer GPUs than were asked for": (
        warned(
            "ray_utils.py",
            "Tensor parallel size (8) exceeds available GPUs (4). This may result in Ray placement group allocation "
            "failures. Consider reducing tensor_parallel_size to 4 or less, or ensure your Ray cluster has 8 GPUs "
            "available.",
        ),
        ("v1/executor/ray_utils.py", "This may result in Ray placement group allocation failures. "),
    ),
    "the allocator before it tries again": (
        "[rank0]:[W1202 14:10:50.741267129 CUDACachingAllocator.cpp:3934] memory allocation failed with OOM on device "
        "0 while trying to allocate 234881024 bytes (free: 77135872, total: 150109880320)",
        None,
    ),
    "an autotuner that catches its own": ("[Autotuner]: OOM detected, falling back to default tactic", None),
    "a kernel's shared memory": (
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 163840, Hardware limit: "
        "101376. Reducing block sizes or `num_stages` may help.",
        None,
    ),
    "objects left behind": (
        "UserWarning: resource_tracker: There appear to be 3 leaked shared_memory objects to clean up at shutdown",
        None,
    ),
    "NCCL that is not closed in order": (
        "[rank0]:[W1202 14:10:50.7 ProcessGroupNCCL.cpp:1250] Warning: WARNING: destroy_process_group() was not called "
        "before program exit, which can leak resources.",
        None,
    ),
    "V0's swap space that is large": (
        "WARNING 01-11 15:51:18 config.py:451] Possibly too large swap space. 4.00 GiB out of the 7.60 GiB total CPU "
        "memory is allocated for the swap space.",
        None,
    ),
}

# States of memory that are in order: what a healthy start prints.
STATES = {
    "the pool": (
        "INFO 12-01 10:00:00 [gpu_worker.py:772] Available KV cache memory: 0.31 GiB",
        ("v1/worker/gpu_worker.py", "Available KV cache memory: %s GiB"),
    ),
    "a pool that was given": (
        "INFO 12-01 10:00:00 [gpu_worker.py:665] Initial free memory 78.0 GiB, reserved 4.0 GiB memory for KV Cache as "
        "specified by kv_cache_memory_bytes config and skipped memory profiling. This does not respect the "
        "gpu_memory_utilization config. Only use kv_cache_memory_bytes config when you want manual control of KV cache "
        "memory size. If OOM'ed, check the difference of initial free memory between the current run and the previous "
        "run where kv_cache_memory_bytes is suggested and update it correspondingly.",
        ("v1/worker/gpu_worker.py", "size. If OOM'ed, check the difference of initial free "),
    ),
    "padding of the pool": (
        "INFO 12-01 10:00:00 [gpu_worker.py:772] Available KV cache memory: 9.0 GiB\n"
        "WARNING 12-01 10:00:00 [kv_cache_utils.py:1208] Add 3 padding layers, may waste at most 6.25% KV cache memory",
        ("v1/core/kv_cache_utils.py", "Add %d padding layers, may waste at most %.2f%% KV cache memory"),
    ),
    "graphs": (
        "INFO 12-01 10:00:00 [gpu_model_runner.py:6369] Estimated CUDA graph memory: 1.08 GiB total\n"
        "INFO 12-01 10:00:00 [gpu_worker.py:772] Available KV cache memory: 9.0 GiB",
        ("v1/worker/gpu_model_runner.py", "Estimated CUDA graph memory: %.2f GiB total"),
    ),
    "sleep": (
        "INFO 12-01 10:00:00 [gpu_worker.py:772] Available KV cache memory: 9.0 GiB\n"
        "INFO 12-01 10:00:00 [gpu_worker.py:336] Sleep mode freed 60.11 GiB memory, 1.23 GiB memory is still in use.",
        ("v1/worker/gpu_worker.py", "Sleep mode freed %s GiB memory, "),
    ),
}


@pytest.mark.parametrize("line", [line for line, _ in LOOKALIKES.values()], ids=LOOKALIKES)
def test_a_line_that_only_sounds_like_it_is_named_and_is_no_failure(line):
    found = diagnose(line)
    assert (found.phase, found.failures) == ("not_a_failure", ())
    assert found.harmless


@pytest.mark.parametrize("line", [line for line, _ in LOOKALIKES.values()], ids=LOOKALIKES)
def test_it_changes_nothing_in_a_log_that_serves_nor_in_one_that_fails(line):
    for log, phase in ((SERVED, "ok"), (FAILED, "max_model_len_exceeds_kv")):
        lines = log.split("\n")
        for at in (0, len(lines) // 2, len(lines)):
            found = diagnose("\n".join([*lines[:at], line, *lines[at:]]))
            assert (found.phase, len(found.failures)) == (phase, phase != "ok")


@pytest.mark.parametrize("line", [line for line, _ in STATES.values()], ids=STATES)
def test_what_a_healthy_start_states_is_no_failure(line):
    found = diagnose(line)
    assert (found.phase, found.failures) == ("ok", ())


def test_an_error_is_not_taken_for_a_warning():
    line = f"(EngineCore pid=9) ERROR 12-01 10:00:00 [core.py:1] {OOM}"
    frame = (
        '(EngineCore pid=9) ERROR 12-01 10:00:00 [core.py:1]   File "/usr/lib/vllm/v1/x.py", line 1, in capture_model'
    )
    assert diagnose(f"{frame}\n{line}").phase == "cuda_graph_capture"
    assert diagnose(f"{warned('symm_mem.py', OOM)}\n{frame}\n{line}").phase == "cuda_graph_capture"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
@pytest.mark.parametrize("name", [name for name, (_, source) in (LOOKALIKES | STATES).items() if source])
def test_the_words_are_vllms(name):
    line, (path, words) = (LOOKALIKES | STATES)[name]
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    assert words in (Path(folder) / path).read_text()
    pieces = re.split(r"%[\d.]*[sdf]|%%", words)
    assert all(piece.strip() in line for piece in pieces)


def test_every_harmless_kind_has_a_reason_and_a_row_that_gives_it():
    from memlab.doctor import HARMLESS

    assert set(HARMLESS) - {row.kind for row in vllm_log.ROWS} == {"caught"}
