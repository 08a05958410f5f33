"""What a failure of each phase means, which remedies help, which advice cannot, and what only looks like a failure.

A rule is about vLLM: it names messages, flags and steps, never a model.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """What a failure of one phase means. ``last_line`` is what a reader sees; ``remedies`` name ``REMEDIES``, each with
    the reason why it helps here, the most usual first; ``useless`` is advice that cannot help at this phase."""

    phase: str
    last_line: str
    means: str
    remedies: tuple[tuple[str, str], ...]
    useless: tuple[tuple[str, str], ...] = ()
    paste: tuple[str, ...] = ()


_HINT = "--gpu-memory-utilization"
_REFILLS = "the KV pool takes what it frees, so the headroom stays the same"
_NOT_YET = "it plans the KV pool, which is sized later"
_HOST = "it plans memory of the GPU; this is the host's"
TRACEBACK = "the traceback above the error, from its first line, of the process that failed first"
START = 'the log from the start of the server: version, "non-default args", "Model loading took", the KV cache lines'

RULES: dict[str, Rule] = {
    rule.phase: rule
    for rule in (
        Rule(
            "free_memory_at_startup",
            "Free memory on device … is less than desired GPU memory utilization",
            "less memory is free on the card than gpu_memory_utilization × total, before anything is loaded",
            (
                ("what_is_free", "the budget then fits what is free"),
                ("end_others", "what others hold is not free, nor the page cache where GPU and host share one memory"),
                ("other_gpu", "one on which nobody holds memory"),
            ),
            (
                ("--max-model-len", "nothing is loaded yet: only the budget and what is free are compared"),
                ("--kv-cache-memory-bytes", "the check is made with the budget all the same"),
                ("--quantization", "nothing of the model is loaded yet"),
            ),
        ),
        Rule(
            "other_process_on_gpu",
            "CUDA out of memory … Process … has … GiB memory in use (of several processes)",
            "another process holds the memory that was needed",
            (
                ("end_others", "it holds what is missing"),
                ("other_gpu", "set before CUDA starts, else it has no effect and all land on GPU 0"),
                ("lower_utilization", "each server takes its own share of the total: together below 1"),
            ),
            (("--max-model-len", "the memory is held by somebody else"),),
        ),
        Rule(
            "weights_load",
            "CUDA out of memory while the model loads; Failed to load model - not enough GPU memory",
            "the weights do not fit the card",
            (
                ("more_gpus", "each GPU holds a part of the weights"),
                ("quantize", "fewer bytes a parameter"),
                ("offload_weights", "a part of the weights stays in host memory"),
            ),
            (
                (_HINT, f"vLLM's own hint, and no help here: {_NOT_YET}, and weights take what they need"),
                ("--max-model-len", f"{_NOT_YET}; weights do not depend on it"),
                ("--max-num-seqs", "weights do not depend on it"),
                ("--enforce-eager", "graphs are captured after the weights are loaded"),
                ("--kv-cache-dtype", "it shrinks the KV cache, which is not there yet"),
            ),
        ),
        Rule(
            "memory_profile",
            "CUDA out of memory in profile_run or determine_available_memory",
            "the profiled step, with as many tokens as one step may have, does not fit beside the weights",
            (
                ("fewer_tokens", "the profiled step has so many tokens"),
                ("chunked_prefill", "else the profile runs a prompt of max_model_len in one step"),
                ("shorter_prompts", "without chunked prefill the profiled step is as long"),
                ("fewer_seqs", "the sampler is profiled with so many rows of the vocabulary"),
                ("more_gpus", "each GPU holds a part of the weights"),
                ("quantize", "smaller weights leave room for the step"),
            ),
            (
                (_HINT, f"{_NOT_YET}; it does not limit the profiled step"),
                ("--kv-cache-dtype", "the KV cache is not there yet"),
            ),
        ),
        Rule(
            "multimodal_profile",
            "CUDA out of memory after “Encoder cache will be initialized” or in embed_multimodal",
            "the encoder is profiled with the most and largest images or videos that a request may have, and that does "
            "not fit beside the weights",
            (
                ("mm_limit", "the encoder is profiled with so many"),
                ("fewer_tokens", "the encoder's budget follows it"),
                ("fewer_seqs", "so many requests are profiled"),
                ("more_gpus", "each GPU holds a part of the weights"),
            ),
            ((_HINT, f"{_NOT_YET}; it does not limit the profile"),),
        ),
        Rule(
            "profile_assert_free_grew",
            "Error in memory profiling. Initial free memory …, current free memory …",
            "more memory was free after the profile than before: another process gave memory back "
            "meanwhile (with unified memory, the page cache is enough)",
            (
                ("alone", "the profile compares free memory before and after"),
                ("end_others", "end or wait for what else uses this GPU"),
            ),
            (
                ("--gpu-memory-utilization", "nothing ran out: the measurement was disturbed"),
                ("--max-model-len", "nothing ran out: the measurement was disturbed"),
            ),
        ),
        Rule(
            "kv_cache_none",
            "No available memory for the cache blocks",
            "weights and the profiled step take the whole budget, so nothing is left for the KV cache",
            (
                ("raise_utilization", "the budget grows, and all of it goes to the pool"),
                ("larger_pool", "the pool has the size that was given"),
                ("fewer_tokens", "a smaller profiled step leaves more of the budget"),
                ("chunked_prefill", "else a whole prompt is profiled in one step"),
                ("shorter_prompts", "without chunked prefill the profiled step is as long"),
                ("fewer_seqs", "fewer rows in the profiled sampler, fewer buffers"),
                ("mm_limit", "where the model takes images: a smaller profiled encoder"),
                ("end_early", "early versions of V1 charge to the budget what others hold"),
                ("no_estimate", "no CUDA graphs to reserve for"),
                ("more_gpus", "each GPU holds a part of the weights"),
                ("quantize", "smaller weights leave more of the budget"),
            ),
            (("--kv-cache-dtype", "smaller blocks do not help where there is no memory for one"),),
        ),
        Rule(
            "max_model_len_exceeds_kv",
            "… KV cache is needed, which is larger than the available KV cache memory",
            "one request of max_model_len needs more KV cache than the pool has",
            (
                ("max_model_len", "one request then fits the pool"),
                ("larger_pool", "the pool has the size that was given"),
                ("end_charged", "what it took during the profile is charged to the budget"),
                ("raise_utilization", "all of the added budget goes to the pool"),
                ("fp8_kv", "half the bytes a token"),
                ("fewer_tokens", "a smaller profiled step leaves more for the pool"),
                ("fewer_seqs", "fewer rows in the profiled sampler, which leaves more where they are what takes most"),
                ("chunked_prefill", "else a prompt of max_model_len is profiled in one step, which shrinks the pool"),
                ("no_estimate", "no CUDA graphs to reserve for"),
                ("more_gpus", "each GPU holds a part of the weights and of each token"),
                ("quantize", "smaller weights leave more for the pool"),
            ),
            (("--enable-prefix-caching", "one request alone must fit"), ("--swap-space", "the pool is the GPU's")),
        ),
        Rule(
            "mamba_blocks_lt_max_num_seqs",
            "max_num_seqs (…) exceeds available Mamba cache blocks (…)",
            "a hybrid model needs a state block for each sequence, and the pool has fewer than max_num_seqs",
            (
                ("seqs_to_blocks", "each sequence then has its state block"),
                ("larger_pool", "the pool has the size that was given"),
                ("raise_utilization", "a larger pool has more blocks"),
            ),
            (("--max-model-len", "a state block is as large for a short sequence"),),
        ),
        Rule(
            "kv_cache_alloc_oom",
            "CUDA out of memory after the KV cache was sized, in initialize_kv_cache",
            "the pool was sized, but so much was not free when it was allocated",
            (
                ("lower_utilization", "a smaller pool is allocated"),
                ("fixed_pool", "the pool gets a size that fits"),
                ("end_others", "somebody may hold memory that the plan counts on"),
                ("expandable", "the allocator can use pieces that it holds"),
            ),
            (("--max-model-len", "the pool is sized by the budget, not by the length"),),
        ),
        Rule(
            "kernel_warmup",
            "CUDA out of memory in kernel_warmup",
            "kernels are warmed up and tuned after the pool has taken its share, and their workspace did not fit",
            (
                ("lower_utilization", "a smaller pool leaves room for the workspace"),
                ("fixed_pool", "the pool gets a size that leaves room"),
                ("smaller_step", "the warm-up runs a step of so many tokens"),
            ),
            (("--max-model-len", _REFILLS),),
        ),
        Rule(
            "cuda_graph_capture",
            "CUDA out of memory while “Capturing CUDA graphs”, in capture_model",
            "CUDA graphs are captured after the pool has taken its share, and what they need was not left",
            (
                ("lower_utilization", "a smaller pool leaves room for the graphs"),
                ("fixed_pool", "the pool gets a size that leaves room"),
                ("fewer_graphs", "fewer and smaller graphs"),
                ("eager", "no graphs are captured"),
                ("fewer_captured", "the largest captured batch is twice as many, up to 512"),
            ),
            (
                ("--max-model-len", _REFILLS),
                ("--kv-cache-dtype", "the pool keeps its bytes and holds more tokens"),
            ),
        ),
        Rule(
            "sampler_warmup",
            "CUDA out of memory occurred when warming up sampler with … dummy requests",
            "the sampler is warmed up with max_num_seqs rows of the vocabulary after the pool has taken its share",
            (
                ("fewer_rows", "the sampler holds so many rows of the vocabulary"),
                ("lower_utilization", "a smaller pool leaves room for the sampler"),
                ("fixed_pool", "the pool gets a size that leaves room"),
                ("expandable", "the allocator can use pieces that it holds"),
                ("upgrade", "its profile counts the sampler"),
            ),
            (
                ("--max-model-len", _REFILLS),
                ("--max-num-batched-tokens", "the sampler's rows are requests, not tokens"),
            ),
        ),
        Rule(
            "nccl_init_oom",
            "NCCL error … Cuda failure 'out of memory'",
            "NCCL could not get memory on the device for its communicator",
            (
                ("end_others", "something else fills the card"),
                ("lower_utilization", "where it happens after the pool was allocated"),
                ("no_nvls", "NCCL's multicast buffers are the largest"),
                ("no_all_reduce", "no buffers of vLLM's own all-reduce"),
            ),
            (("--max-model-len", _REFILLS), ("PYTORCH_CUDA_ALLOC_CONF", "NCCL does not allocate through PyTorch")),
        ),
        Rule(
            "sampler",
            "CUDA out of memory in apply_top_k_top_p or the sampler",
            "the sampler sorts max_num_seqs rows of the vocabulary, which was not left beside the pool",
            (
                ("fewer_rows", "the sampler holds so many rows of the vocabulary"),
                ("lower_utilization", "a smaller pool leaves room for the sampler"),
                ("fixed_pool", "the pool gets a size that leaves room"),
                ("expandable", "the allocator can use pieces that it holds"),
            ),
            (("--max-model-len", _REFILLS),),
            (START,),
        ),
        Rule(
            "runtime_prefill_spike",
            "CUDA out of memory while serving, in a kernel of the prefill",
            "the prefill of a prompt took more than the profile had counted, and the pool leaves no headroom for it",
            (
                ("lower_utilization", "a smaller pool leaves headroom"),
                ("fixed_pool", "the pool gets a size that leaves headroom"),
                ("smaller_step", "what a prefill step takes beyond the profile grows with its tokens"),
                ("expandable", "the allocator can use pieces that it holds"),
            ),
            (
                ("--enable-prefix-caching", "it saves work on shared prefixes, not memory of a step"),
                ("--max-num-seqs", "one prompt is enough"),
                ("--swap-space", "it is gone since V1, and never held activations"),
            ),
        ),
        Rule(
            "runtime_logprobs",
            "CUDA out of memory while serving, in _get_prompt_logprobs_dict or compute_logprobs",
            "a request asked for logprobs: its prompt's logits, a row of the vocabulary for each token, had no room",
            (
                ("no_prompt_logprobs", "no logits of the prompt are kept"),
                ("whole_steps", "in the first model runner the logits are of a whole step's tokens"),
                ("lower_utilization", "a smaller pool leaves headroom"),
                ("fixed_pool", "the pool gets a size that leaves headroom"),
            ),
            (
                ("--max-model-len", _REFILLS),
                ("--max-logprobs", "the logits are taken over the whole vocabulary before the top is chosen"),
            ),
        ),
        Rule(
            "runtime_oom",
            "CUDA out of memory while serving; EngineCore encountered a fatal error",
            "while serving, an allocation that the profile had not counted found no headroom",
            (
                ("lower_utilization", "a smaller pool leaves headroom"),
                ("fixed_pool", "the pool gets a size that leaves headroom"),
                ("expandable", "the allocator can use pieces that it holds"),
                ("smaller_step", "what a step takes beyond the profile grows with its tokens"),
            ),
            (
                ("--max-model-len", _REFILLS),
                ("--enable-prefix-caching", "cached blocks are free blocks; the pool stays as large"),
                ("--block-size", "the pool stays as large"),
                ("--swap-space", "it is gone since V1, and never held activations"),
            ),
        ),
        Rule(
            "preemption_not_oom",
            "… is preempted …; Preemptions: …",
            "the pool of KV-cache blocks is full, so requests are preempted and recomputed: slow, not out of memory",
            (
                ("raise_utilization", "a larger pool"),
                ("larger_pool", "the pool has the size that was given"),
                ("fp8_kv", "half the bytes a token"),
                ("fewer_seqs", "fewer requests share the pool"),
                ("more_gpus", "each GPU holds a part of each token"),
            ),
            (
                ("--max-num-batched-tokens", "it does not change what a request holds in the pool"),
                ("PYTORCH_CUDA_ALLOC_CONF", "blocks come from the pool, not from the allocator"),
            ),
        ),
        Rule(
            "kv_swap_exhausted",
            "Aborted due to the lack of CPU swap space",
            "the pool was full and V0's swap space on the CPU too, so a request with several sequences had no place",
            (
                ("more_swap", "more room for preempted sequences"),
                ("raise_utilization", "a larger pool is full later"),
                ("fewer_seqs", "fewer requests share the pool"),
                ("max_model_len", "shorter requests hold less"),
                ("upgrade", "V1 computes preempted requests again and needs no swap"),
            ),
            (("PYTORCH_CUDA_ALLOC_CONF", "blocks come from the pool, not from the allocator"),),
        ),
        Rule(
            "host_swap_space_config",
            "Too large swap space. … out of the … total CPU memory",
            "V0's swap space is a part of the host's memory, and the host or container has too little",
            (
                ("less_swap", "so much of the host's memory is set aside for each GPU"),
                ("host_memory", "the check compares with what the container may use"),
            ),
            (("--gpu-memory-utilization", _HOST), ("--max-model-len", _HOST)),
        ),
        Rule(
            "host_ram_oom",
            "Killed; exit code 137 (SIGKILL); Cannot allocate memory",
            "the host's or container's memory ran out, not the GPU's",
            (
                ("pool_to_host", "on the CPU backend the pool lies in host memory"),
                ("host_memory", "loading and each worker process take host memory"),
                ("shared_memory", "workers exchange data through /dev/shm"),
                ("fewer_compilers", "a first start may compile kernels, and each compiler takes GiB of it"),
                ("less_swap", "V0 pins so much for each GPU"),
                ("less_host_cache", "they are kept in host memory"),
            ),
            (
                ("--gpu-memory-utilization", _HOST),
                ("--max-model-len", _HOST),
                ("--max-num-seqs", _HOST),
                ("--max-parallel-loading-workers", "vLLM takes it and ignores it"),
                ("--quantization", "the file on disk is what is read; only a smaller checkpoint helps"),
            ),
            ("dmesg | grep -i -E 'oom|killed process', or the container's last state (kubectl describe pod)",),
        ),
        Rule(
            "sleep_wake_up",
            "CUDA Error: out of memory at … cumem_allocator.cpp; wake_up",
            "the memory given back by sleep could not be taken again at wake-up: something else has it",
            (
                ("end_others", "the trainer or another engine took it meanwhile"),
                ("sleep_level", "the weights come back before the pool needs its share"),
                ("lower_utilization", "less has to come back"),
                ("fixed_pool", "the pool to come back has the same size in every version"),
            ),
            (
                ("--max-model-len", _REFILLS),
                ("PYTORCH_CUDA_ALLOC_CONF", "sleep mode allocates outside PyTorch's segments"),
            ),
        ),
    )
}  # fmt: skip

# Failures that come in the place of another one, with means of their own.
ENCODING = Rule(
    "runtime_oom",
    RULES["runtime_oom"].last_line,
    "while serving, the encoder of images or videos asked for more than the profile had counted",
    (("mm_limit", "the encoder takes what the items of a step need"), *RULES["runtime_oom"].remedies),
    RULES["runtime_oom"].useless,
)
TRIAL = Rule(
    "memory_profile",
    "CUDA out of memory in profile_cudagraph_memory",
    "a few CUDA graphs are captured on trial, to estimate them all, and they do not fit beside the weights and what "
    "the profiled step left",
    (
        ("eager", "no graphs are captured, on trial neither"),
        ("fewer_graphs", "the largest one takes most"),
        ("fewer_captured", "the largest captured batch is twice as many, up to 512"),
        ("more_gpus", "each GPU holds a part of the weights"),
        ("quantize", "smaller weights leave room for the graphs"),
    ),
    ((_HINT, f"{_NOT_YET}; it does not limit the trial"), ("--kv-cache-dtype", "the KV cache is not there yet")),
)
PINNED = Rule(
    "host_ram_oom",
    "cudaHostRegister failed …; CUDA error: out of memory",
    "the host's memory for offloaded blocks could not be pinned, and CUDA tells of that at a later call, as if the "
    "GPU's memory had run out",
    (
        ("less_host_cache", "so much of the host's memory is pinned"),
        ("host_memory", "pinned memory cannot be swapped out"),
        ("newest", "newer versions go on without pinning"),
    ),
    RULES["host_ram_oom"].useless,
)
_NOT_SHORT = "no memory of the GPU is short"
_NO_ROOM_HELPS = (
    (_HINT, _NOT_SHORT),
    ("--kv-cache-memory-bytes", _NOT_SHORT),
    ("PYTORCH_CUDA_ALLOC_CONF", _NOT_SHORT),
)
# By the kind of the line, in the place of a failure while serving.
BUFFERS = {
    "workspace_locked": Rule(
        "runtime_oom",
        "Workspace is locked but allocation from … requires …",
        f"{_NOT_SHORT}: kernels share a workspace that got its size before serving and may not grow, and a step needed "
        "a larger one",
        (
            ("eager", "the workspace is locked once graphs are captured"),
            ("upgrade", "a backend that asks for too little at the start is a defect"),
        ),
        (*_NO_ROOM_HELPS, ("--max-model-len", "the workspace has the size that the warm-up needed")),
    ),
    "workspace_small": Rule(
        "runtime_oom",
        "Buffer overflow when allocating memory for … in AlignedAllocator",
        f"{_NOT_SHORT}: FlashInfer has a buffer of a fixed size, and a step needed a larger one",
        (
            ("larger_buffer", "the buffer then has so many bytes"),
            ("smaller_step", "a smaller step needs a smaller buffer"),
        ),
        _NO_ROOM_HELPS,
    ),
}

HARMLESS = {
    "pin_failed": "the host's memory for offloaded blocks stays pageable, so transfers are slower; older versions then "
    "fail at a later call",
    "autotuner_oom": "FlashInfer's autotuner tries large tactics, catches its own out-of-memory and takes another",
    "leaked_semaphore": "Python's resource tracker says so whenever a server ends in a hurry",
    "request_too_long": "one request was refused (HTTP 400); memory has nothing to do with it",
    "blocks_override": "the small pool of the trial capture that estimates the CUDA graphs, not the pool",
    "mm_sequence_short": "a warning about requests that may not fit; by itself nothing failed",
    "memory_summary": "the summary of a start that worked; the refusal with the same first words goes on otherwise",
    "caught": "vLLM caught it and only warns: what it tried is left out, and the start goes on",
    "warmup_skipped": "a kernel's warm-up failed and is left out; out of memory is what may come of it, not what was",
    "allocator_retry": "PyTorch's allocator gives its cache back and tries again; an OutOfMemoryError is a failure",
    "broadcast_wait": "a process waits long for another one; /dev/shm has room, and no memory is short",
    "symm_mem_off": "one way to add up over GPUs is not to be had; vLLM takes another",
    "blocks_held": "blocks of running requests cannot be reset; the pool is in use, not exhausted",
    "placement_notice": "there are fewer GPUs than were asked for; their memory has nothing to do with it",
    "kernel_resources": "the shared memory inside the GPU's processors is too small for one kernel: another size or "
    "backend is taken, or has to be; no flag of the GPU's memory changes it",
    "leak_notice": "a warning about a setting, on memory of the host, in the long run",
    "group_left": "NCCL is not closed in order at the end of a process; the reason of the end stands above",
    "swap_possible": "a warning of V0 about host memory set aside; the refusal has the word “Too”",
    "graphs_not_subtracted": "a warning about a setting; nothing ran out",
    "startup_plan_refused": "less memory is free than at the last start, so the profile is made anew",
    "stopping": "the workers are told to stop; the reason stands above",
}

# What stands at the end of a log, by phase, in vLLM's words and without the prefixes of its lines: the last sign of
# progress where an error does not name its step itself, the function in the traceback, the error. The words are
# those of public reports, of this book's records and of vLLM's source; the numbers only show their form.
_TRIED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 298.00 MiB. GPU 0 has a total capacity of 23.65 GiB "
    "of which 98.25 MiB is free."
)
_LOADED = "Model loading took 15.0 GiB memory and 3.260858 seconds"
_SIZED = "GPU KV cache size: 136,192 tokens, Maximum concurrency for 32,768 tokens per request: 4.16x"
_READY = "Application startup complete."


def _frame(path: str, line: int, function: str) -> str:
    return f'File "…/vllm/{path}", line {line}, in {function}'


PRINTED: dict[str, tuple[str, ...]] = {
    "nccl_init_oom": (
        _frame("v1/worker/gpu_worker.py", 1664, "init_worker_distributed_environment"),
        "torch.distributed.DistBackendError: NCCL error in: …/NCCLUtils.cpp:77, unhandled cuda error",
        "Cuda failure 2 'out of memory'",
    ),
    "free_memory_at_startup": (
        "ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization "
        "(0.95, 45.01 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ),
    "weights_load": (
        "Starting to load model",
        "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for "
        "weights, increasing --tensor-parallel-size, or using --quantization.",
    ),
    "memory_profile": (_LOADED, _frame("v1/worker/gpu_model_runner.py", 1392, "profile_run"), _TRIED),
    "multimodal_profile": (
        "Encoder cache will be initialized with a budget of 16384 tokens, and profiled with 1 image items of the "
        "maximum feature size.",
        _frame("model_executor/models/qwen2_vl.py", 1564, "embed_multimodal"),
        _TRIED,
    ),
    "profile_assert_free_grew": (
        "AssertionError: Error in memory profiling. Initial free memory 82.94 GiB, current free memory 90.17 GiB. "
        "This happens when other processes sharing the same container release GPU memory while vLLM is profiling "
        "during initialization.",
    ),
    "kv_cache_none": (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine.",
    ),
    "max_model_len_exceeds_kv": (
        "ValueError: To serve at least one request with the model's max seq len (16384), (2.0 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (1.3 GiB). Based on the available memory, the "
        "estimated maximum model length is 10656.",
    ),
    "mamba_blocks_lt_max_num_seqs": (
        "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Each decode sequence requires one "
        "Mamba cache block, so CUDA graph capture cannot proceed.",
    ),
    "kv_cache_alloc_oom": (_SIZED, _frame("v1/worker/gpu_model_runner.py", 7102, "initialize_kv_cache"), _TRIED),
    "kernel_warmup": (
        "JIT kernel warmup starting.",
        _frame("model_executor/warmup/kernel_warmup.py", 268, "kernel_warmup"),
        _TRIED,
    ),
    "cuda_graph_capture": (
        "Capturing CUDA graphs (PIECEWISE):   4%|▍         | 2/51 [00:00<00:03, 12.86it/s]",
        _frame("v1/worker/gpu_model_runner.py", 1619, "capture_model"),
        _TRIED,
    ),
    "sampler_warmup": (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
    ),
    "other_process_on_gpu": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "79.33 GiB of which 802.31 MiB is free. Process 4042162 has 49.78 GiB memory in use. Process 4045381 has "
        "22.37 GiB memory in use.",
    ),
    "runtime_prefill_spike": (
        _READY,
        _frame("v1/attention/backends/turboquant.py", 727, "_continuation_prefill"),
        _TRIED,
    ),
    "runtime_logprobs": (
        _READY,
        _frame("v1/worker/gpu_model_runner.py", 5121, "_get_prompt_logprobs_dict"),
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.82 GiB.",
    ),
    "sampler": (_frame("v1/sample/ops/topk_topp_sampler.py", 494, "apply_top_k_top_p"), _TRIED),
    "runtime_oom": (
        _READY,
        _frame("v1/engine/core.py", 1555, "run_busy_loop"),
        _TRIED,
        "EngineCore encountered a fatal error.",
    ),
    "sleep_wake_up": ("CUDA Error: out of memory at csrc/cumem_allocator.cpp",),
    "preemption_not_oom": (
        "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 412.5 tokens/s, "
        "Running: 31 reqs, Waiting: 9 reqs, Preemptions: 6, GPU KV cache usage: 99.7%",
    ),
    "host_ram_oom": ("The Python process exited with exit code 137 (SIGKILL). This may have been cause by OOM error.",),
    "host_swap_space_config": (
        "ValueError: Too large swap space. 4.00 GiB out of the 4.30 GiB total CPU memory is allocated for the swap "
        "space.",
    ),
    "kv_swap_exhausted": (
        "RuntimeError: Aborted due to the lack of CPU swap space. Please increase the swap space to avoid this error.",
    ),
}

# When each failure comes: of a start, in the order of its steps; while serving; and what is no lack of GPU memory.
_SERVING = (
    "other_process_on_gpu",
    "runtime_prefill_spike",
    "runtime_logprobs",
    "sampler",
    "runtime_oom",
    "sleep_wake_up",
)
_NOT_THE_GPU = ("preemption_not_oom", "host_ram_oom", "host_swap_space_config", "kv_swap_exhausted")
WHEN: dict[str, tuple[str, ...]] = {
    "start": tuple(phase for phase in PRINTED if phase not in (*_SERVING, *_NOT_THE_GPU)),
    "serving": _SERVING,
    "not_the_gpu": _NOT_THE_GPU,
}
