"""What a start of vLLM takes besides weights and pool, for one rank: the profiled step, buffers, CUDA graphs."""

from dataclasses import dataclass

from memlab.shapes import ModelShape
from memlab.units import GIB
from memlab.versions import Rules

_MLA_WORKSPACE_ROWS = 64 * 1024
_MOST_GRAPHS = 512  # the largest batch that is captured by default
_ALL_GRAPHS = 51  # sizes up to 512
# Estimates by the second runner: fitted to the records of 0.33.0 on an H200 of llama-3.1-8b and qwen2.5-7b; that of
# qwen2.5-0.5b is 0.6 of it. By the first: to 0.19.0 on H100. vLLM itself captures a few graphs and multiplies
# (vllm/v1/worker/gpu/cudagraph_utils.py, 0.32: _extrapolate_full_graph_memory), and what one takes is the driver's.
_GRAPH_LAYER_GIB = 0.92 / 32
_FIRST_RUNNER_GRAPHS_GIB, _FIRST_RUNNER_GRAPH_LAYER_GIB = 0.35, 0.0145


@dataclass(frozen=True)
class Step:
    """The profiled step, in GiB: the larger of ``forward`` and ``sampler`` is its peak, beside a vision tower's
    images; ``retained`` is the experts' workspace, which stays."""

    forward_gib: float
    sampler_gib: float
    vision_gib: float
    retained_gib: float

    @property
    def peak_gib(self) -> float:
        return max(self.forward_gib, self.sampler_gib) + self.vision_gib


def buffers_gib(shape: ModelShape, max_num_seqs: int, max_model_len: int, block_size: int = 16) -> float:
    """What the second model runner keeps for each sequence it may run.

    Counts of output tokens (int32 × vocabulary), a bit mask of prompt tokens and one of the grammar (vocabulary / 8
    each), and the block table twice (int32 × blocks). Source: vllm/v1/worker/gpu/sample/penalties.py:43-50,
    structured_outputs.py and block_table.py (0.33).
    """
    per_sequence = shape.vocab_size * (4 + 2 / 8) + 2 * 4 * (-(-max_model_len // block_size))
    return max_num_seqs * per_sequence / GIB


def workspace_gib(shape: ModelShape, max_num_batched_tokens: int, tensor_parallel_size: int = 1) -> float:
    """The experts' two workspaces, tokens × experts of a token × the wider of their output and the hidden size.

    Source: vllm/model_executor/layers/fused_moe/experts/triton_moe.py, ``workspace_shapes`` (0.33:240-255).
    """
    if shape.experts is None:
        return 0.0
    width = -(-shape.experts.intermediate_size // tensor_parallel_size)
    columns = max(width, shape.hidden_size) + max(2 * width, shape.hidden_size)
    return max_num_batched_tokens * shape.experts.per_token * columns * shape.dtype_bytes / GIB


def _forward_gib(shape, tokens, seqs, length, block, ranks, rows, retained) -> float:
    """Forward pass of one layer: its MLP (two inputs and the product), or latent attention's up-projection.

    A dense layer before the first with experts runs before their workspace is there, so it counts less that.
    """
    hidden = rows * shape.hidden_size
    inner = 3 if shape.gated else 2
    experts, size = shape.experts, tokens * shape.dtype_bytes / GIB
    dense = size * (inner * -(-shape.intermediate_size // ranks) + hidden)
    if experts is None:
        peak = dense
    else:
        peak = size * (inner * -(-experts.shared_size // ranks) + experts.count + hidden)
        leading = min(experts.layers, default=0)
        if leading > 0:
            peak = max(peak, dense - retained)
        if len(experts.layers) < shape.num_hidden_layers - leading:
            peak = max(peak, dense)
    if shape.latent:
        latent, heads = shape.latent, -(-shape.num_attention_heads // ranks)
        vectors = max(min(max(8 * length, 4 * seqs * block), _MLA_WORKSPACE_ROWS), seqs * block)
        up = vectors * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        query = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        beside = tokens * (query + latent.size + heads * latent.v_head_dim + 2 * shape.hidden_size)
        peak = max(peak, (up + beside) * shape.dtype_bytes / GIB)
    return peak


def step(
    shape: ModelShape,
    rules: Rules,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    compiled: bool,
    tensor_parallel_size: int = 1,
    block_size: int = 16,
    first: bool = True,
    last: bool = True,
) -> Step:
    """The step that vLLM profiles before it sizes the pool.

    Forward: a layer's MLP with three rows of the hidden size (torch.compile keeps more); for latent attention the
    workspace that projects 65,536 latent vectors up (vllm/model_executor/layers/attention/mla_attention.py:936-948,
    0.33). Sampler: logits in the model's type and what sampling holds beside them for each sequence and word, while the
    step's hidden states are there (vllm/v1/worker/gpu/model_runner.py:993-1014,
    vllm/v1/sample/ops/topk_topp_sampler.py, 0.33). Only the last stage samples, only the first sees images.
    """
    tokens, ranks = max_num_batched_tokens, tensor_parallel_size
    rows = (rules.compiled_rows if compiled else 3) + (0 if last else 2)
    retained = workspace_gib(shape, tokens, ranks)
    forward = _forward_gib(shape, tokens, max_num_seqs, max_model_len, block_size, ranks, rows, retained)
    sampler = 0.0
    if last:
        held, constant = rules.sampler_bytes, rules.sampler_gib
        if rules.runner(shape.architecture, shape.is_mixture) == "V1":
            held, constant = rules.first_runner_sampler
        logits = min(max_num_seqs, tokens) * shape.vocab_size * (shape.dtype_bytes + held)
        sampler = (logits + tokens * shape.hidden_size * shape.dtype_bytes) / GIB + constant
    images = 0.0
    if first and shape.vision and rules.runner(shape.architecture, shape.is_mixture) in rules.images:
        count = max(1, tokens // shape.vision.image_tokens)
        pixels = count * 3 * shape.vision.image_pixels
        images = (tokens * shape.hidden_size + pixels) * shape.dtype_bytes / GIB
    constant = rules.step_gib
    return Step(forward + constant, sampler + constant, images, retained)


_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 2 * _MOST_GRAPHS + 1, 16))


def captured_sizes(largest: int) -> int:
    """How many batch sizes have a CUDA graph: 1, 2, 4, then each 8 up to 256, each 16 from there."""
    return sum(size <= largest for size in _SIZES)


def graphs_gib(shape: ModelShape, runner: str, max_num_seqs: int, largest: int | None, layers: int) -> float:
    """CUDA graphs as vLLM estimates them before the pool is sized, in GiB; fitted, see ``_GRAPH_LAYER_GIB``."""
    largest = min(2 * max_num_seqs, _MOST_GRAPHS) if largest is None else largest
    if largest < 1:
        return 0.0
    if runner == "V1":
        more = 0.5 if shape.latent else 0.2 if shape.is_mixture else 0.0
        return _FIRST_RUNNER_GRAPHS_GIB + _FIRST_RUNNER_GRAPH_LAYER_GIB * layers + more
    return _GRAPH_LAYER_GIB * layers * captured_sizes(largest) / _ALL_GRAPHS


def captured_gib(runner: str, layers: int) -> float:
    """CUDA graphs as captured; fitted to 0.19.0 and 0.26.0 for runners that share their pool less, to 0.33.0."""
    return 0.39 + 0.016 * layers if runner == "V1" else 0.45 / 32 * layers
