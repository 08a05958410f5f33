"""The weights of one rank, in bytes as PyTorch's allocator counts them when vLLM says what loading took.

A large tensor lies in a segment of its own, of whole units of 2 MiB. What is left over in it counts as allocated
unless the allocator splits it off: when it is more than 1 MiB, and the tensor is below ``max_split_size``, which vLLM
sets to 20 MiB while it loads (vllm/v1/worker/gpu_worker.py, 0.33:591, 0.26:422-431; not in 0.19). Source of the
allocator's rules: c10/cuda/CUDACachingAllocator.cpp, ``should_split`` and ``get_allocation_size``.
"""

import functools

from memlab.shapes import ModelShape, Tensor
from memlab.units import GIB, MIB

_SEGMENT, _LARGE, _REMAINDER, _SPLIT_BELOW = 2 * MIB, 10 * MIB, MIB, 20 * MIB


def allocated(size: int, split_limit: bool = True) -> int:
    """What a tensor of ``size`` bytes counts for; ``split_limit`` says that vLLM limits which blocks are split."""
    size = -(-size // 512) * 512
    if size < _LARGE:
        return size
    segment = -(-size // _SEGMENT) * _SEGMENT
    whole = segment - size <= _REMAINDER or (split_limit and size >= _SPLIT_BELOW)
    return segment if whole else size


def tensor_bytes(shape: ModelShape, tensor: Tensor, layer: int | None, split_limit: bool = True) -> int:
    """Bytes of one tensor of a rank, in the model's type or as its quantization stores it."""
    if shape.quantization and shape.quantization.covers(tensor.part, layer):
        parts = [size * tensor.count for size in shape.quantization.bytes(tensor.inputs, tensor.outputs)]
    else:
        parts = [tensor.elements * shape.dtype_bytes]
    return sum(allocated(size, split_limit) for size in parts)


def rotary_bytes(shape: ModelShape) -> int:
    """Tables of cos and sin for every position."""
    return shape.rotary_positions * shape.rotary_dim * shape.dtype_bytes


def absorbed_bytes(shape: ModelShape, tensor_parallel_size: int, layers: int) -> int:
    """Bytes of the halves of a quantized ``kv_b_proj`` that latent attention keeps a second time, in the model's type.

    Not quantized they are views of the weight, and take nothing: ``process_weights_after_loading`` splits and
    transposes what ``get_and_maybe_dequant_weights`` returns, the weight itself (vllm/model_executor/layers/attention/
    mla_attention.py, 0.32:1248-1326; vllm/model_executor/layers/quantization/utils/quant_utils.py, 0.32:529-533).
    """
    if shape.latent is None:
        return 0
    latent, heads = shape.latent, -(-shape.num_attention_heads // tensor_parallel_size)
    return layers * heads * (latent.qk_nope_head_dim + latent.v_head_dim) * latent.kv_lora_rank * shape.dtype_bytes


@functools.lru_cache(maxsize=256)  # the search for a change asks for the same weights again and again
def stage_bytes(
    shape: ModelShape, tensor_parallel_size: int = 1, stage: tuple[int, int] | None = None, split_limit: bool = True
) -> int:
    """Weights of one rank of one stage of the pipeline, in bytes.

    Without the split limit (0.19, 0.20) ``absorbed_bytes`` are counted where nothing is quantized too. That was seen,
    not read in vLLM: 0.19.0 states so much more for DeepSeek-V2-Lite and Kimi-VL on H100, which are held out, and
    0.33.0 does not for DeepSeek on an H200.

    Args:
        shape: as it is served (``ModelShape.served``).
        tensor_parallel_size: ranks that share each layer.
        stage: (first, end) layers; None for all.
        split_limit: of the version, see above.
    """
    first, end = stage or (0, shape.num_hidden_layers)
    kept = {layer for layer, _ in shape.quantization.kept} if shape.quantization else set()
    total = 0
    for layer in sorted(kept - {None}):
        if first <= layer < end:
            tensors = shape.layer(layer, tensor_parallel_size)
            total += sum(tensor_bytes(shape, tensor, layer, split_limit) for tensor in tensors)
    skipped = frozenset(layer for layer in kept if layer is not None)
    for count, tensors in shape.layers(tensor_parallel_size, first, end, without=skipped):
        total += count * sum(tensor_bytes(shape, tensor, None, split_limit) for tensor in tensors)
    ends = shape.ends(tensor_parallel_size, first == 0, end == shape.num_hidden_layers)
    total += sum(tensor_bytes(shape, tensor, None, split_limit) for tensor in ends)
    quantized = shape.quantization is not None and shape.quantization.covers("attention", None)
    if quantized or not split_limit:  # before the limit came, see below
        total += absorbed_bytes(shape, tensor_parallel_size, end - first)
    return total + rotary_bytes(shape)


def unquantized_bytes(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """The largest matrix of a layer in the model's own type: quantized as it is loaded, the last one is still there
    when vLLM says what loading took.

    Seen, not read in vLLM: 0.33 states so much more for Llama-2-13B in fp8 than its quantized weights are.
    """
    tensors = shape.layer(0, tensor_parallel_size)
    return max(tensor.elements * shape.dtype_bytes for tensor in tensors if tensor.part != "experts")


@functools.lru_cache(maxsize=256)
def offloaded_bytes(
    shape: ModelShape,
    asked_bytes: int,
    tensor_parallel_size: int = 1,
    stage: tuple[int, int] | None = None,
    split_limit: bool = True,
) -> int:
    """Bytes of one rank's weights that ``--cpu-offload-gb`` takes off the GPU.

    Whole parameters go, layer by layer, until they reach ``asked_bytes``, so a part of one goes beyond it.
    Source: vllm/model_executor/offloader/uva.py, ``_maybe_offload_to_cpu``.
    """
    moved = 0
    for layer in range(*(stage or (0, shape.num_hidden_layers))):
        for tensor in shape.layer(layer, tensor_parallel_size):
            if moved >= asked_bytes:
                return moved
            moved += tensor_bytes(shape, tensor, layer, split_limit)
    return moved


def stage_gib(
    shape: ModelShape, tensor_parallel_size: int = 1, stage: tuple[int, int] | None = None, split_limit: bool = True
) -> float:
    """``stage_bytes`` in GiB."""
    return stage_bytes(shape, tensor_parallel_size, stage, split_limit) / GIB
