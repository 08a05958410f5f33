"""The planner's weights and KV cache against vLLM's own model classes, which are built without memory (meta device).

That needs no GPU: a rank of any layout is built as vLLM builds it, with the sizes of its groups told, not made.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from memlab import configs, planner, shapes, weights
from memlab.quantization import ExpertKernels
from memlab.shapes import LAB_MODELS

pytest.importorskip("vllm")
H100 = json.loads((Path(__file__).parent / "data" / "planner" / "configs.json").read_text(encoding="utf-8"))
# The CPU build has no kernels for their 8-bit layers, or cannot look into their image processors.
NOT_HERE = (
    "quantized.w8a8", "Instruct-fp8-dynamic", "granite-vision", "Llama-4-Scout-17B", "Mistral-Small-3.1",
    "gemma-3-4b-it", "gemma-3-12b-it", "gemma-3-27b-it",
)  # fmt: skip
CONFIGS = {
    name: config
    for name, config in ({n: s.to_config() for n, s in LAB_MODELS.items()} | configs.PRESET_CONFIGS | H100).items()
    if not any(part in name for part in NOT_HERE)
}
LAYOUTS = ((1, 1), (2, 1), (8, 1), (1, 3), (2, 2))
CPU_KERNELS = ExpertKernels(32, 32)  # of mxfp4 experts, vllm/model_executor/layers/fused_moe/oracle/mxfp4.py
# Made with the model, gone when it is loaded: the order of rows (GPTQ) and zero points that are all alike.
NOT_KEPT = {"gptq": ("g_idx", "qzeros")}
# Input scales of 8-bit layers are not counted, and a vision tower is counted as one tensor: 0.02 % in place of 20 KiB.
ABOUT = ("fp8", "FP8", "DeepSeek-V3", "Kimi-VL", "phi-2")


def group(size: int, rank: int):
    """What a model reads of a group of ranks while it is built."""
    from vllm.distributed.parallel_state import GroupCoordinator

    made = object.__new__(GroupCoordinator)
    made.rank = made.rank_in_group = made.local_rank = rank
    made.ranks, made.world_size = list(range(size)), size
    made.device_group = made.cpu_group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    return made


@pytest.fixture
def build(tmp_path, monkeypatch):
    """(vLLM's configuration, its model) of the first rank of a stage, without memory."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    def made(config: dict, ranks: int, stages: int, stage: int = 0):
        (tmp_path / "config.json").write_text(json.dumps(config))
        asked = EngineArgs(
            model=str(tmp_path), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, dtype="bfloat16",
            max_model_len=2048, tensor_parallel_size=ranks, pipeline_parallel_size=stages,
            distributed_executor_backend="mp",
        ).create_engine_config()  # fmt: skip
        sizes = {"_TP": (ranks, 0), "_PP": (stages, stage), "_EP": (ranks, 0), "_WORLD": (ranks * stages, 0)}
        for name, (size, rank) in (sizes | dict.fromkeys(("_DP", "_DCP", "_PCP"), (1, 0))).items():
            monkeypatch.setattr(parallel_state, name, group(size, rank))
        with set_current_vllm_config(asked), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            return asked, initialize_model(asked)

    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_kv_cache_of_each_rank_are_those_of_vllms_own_classes(name, build):
    shape = shapes.from_config(CONFIGS[name]).served("bfloat16", kernels=CPU_KERNELS)
    method = shape.quantization.method if shape.quantization else None
    met = 0
    for ranks, stages in LAYOUTS:
        if planner._indivisible(shape, ranks):
            continue
        for stage, layers in enumerate(shape.stages(stages)):
            try:
                config, model = build(CONFIGS[name], ranks, stages, stage)
            except NotImplementedError as why:
                assert "MoE backend" in str(why) and name == "gpt-oss-20b-12-layers", "the CPU's own limit"
                continue
            sizes = [
                tensor.numel() * tensor.element_size()
                for key, tensor in model.named_parameters()
                if not key.endswith(NOT_KEPT.get(method, ()) or "\0")
            ]
            theirs = sum(weights.allocated(size) for size in sizes)
            ours = weights.stage_bytes(shape, ranks, layers) - weights.rotary_bytes(shape)
            if method and shape.latent:
                ours -= weights.absorbed_bytes(shape, ranks, layers[1] - layers[0])
            where = f"{ranks} ranks, stage {stage + 1} of {stages}"
            about = any(part in name for part in ABOUT)
            assert abs(ours - theirs) <= (2e-4 * theirs if about else 20 * 1024), where
            held = config.compilation_config.static_forward_context.values()
            pages = [layer.get_kv_cache_spec(config) for layer in held if hasattr(layer, "get_kv_cache_spec")]
            a_token = sum(page.page_size_bytes // page.block_size for page in pages)
            assert a_token == shape.kv_bytes_per_layer("auto", ranks) * (layers[1] - layers[0]), where
            met += 1
    assert met >= 4


@pytest.mark.parametrize("name", ["qwen2.5-7b", "gemma-3-1b", "llama-2-7b"])
def test_vllm_refuses_the_layouts_that_the_planner_refuses(name, build):
    for ranks in (3, 8):
        if planner._indivisible(LAB_MODELS[name], ranks):
            with pytest.raises(ValueError, match="must be divisible"):
                build(CONFIGS[name], ranks, 1)
        else:
            build(CONFIGS[name], ranks, 1)
