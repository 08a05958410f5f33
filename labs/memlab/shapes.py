"""``ModelShape``: what memory depends on in a model's ``config.json``, and the shapes that the labs use."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from memlab import quantization
from memlab import vision as towers
from memlab.configs import LAB_CONFIGS, LARGE_CONFIGS, PLANNER_CONFIGS
from memlab.errors import ShapeError
from memlab.quantization import ExpertKernels, Quantization
from memlab.vision import Vision

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
FULL, SLIDING, CHUNKED = "full", "sliding", "chunked"
_LAYER_TYPES = {"full_attention": FULL, "sliding_attention": SLIDING, "chunked_attention": CHUNKED}
VOCABULARY_PADDING = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture: how many, how many a token goes to, the width of one, in which layers.

    ``shared_size`` is the width of the expert that every token takes; ``bias`` says that experts have biases,
    ``router_bias`` that the router has one, ``shared_gate`` that the shared expert is weighed by a gate.
    """

    count: int
    per_token: int
    intermediate_size: int
    layers: frozenset[int]
    shared_size: int = 0
    bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: the ranks of the latent vectors and the parts of a head.

    The KV cache holds one vector of ``kv_lora_rank`` + ``qk_rope_head_dim`` a token and layer.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def size(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class Tensor:
    """``count`` matrices of inputs × outputs that one rank holds as one allocation; ``part`` says what they are."""

    part: str
    inputs: int
    outputs: int
    count: int = 1

    @property
    def elements(self) -> int:
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What layers have beside their sizes. ``norms`` are those of a layer; ``sinks`` are gpt-oss's.

    ``ends_on_every_stage`` says that the family's code makes the embeddings and the head whatever stage of a pipeline
    it is on: no ``PPMissingLayer`` there (vllm/model_executor/models/, the same in 0.19, 0.26, 0.32 and 0.33).
    """

    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    ends_on_every_stage: bool = False


@dataclass(frozen=True)
class ModelShape(Layers):
    """A decoder's sizes, in elements unless named otherwise.

    ``bias`` is that of the query, key and value projections (Qwen2 has one, Llama has none). ``sliding_window`` is how
    many tokens back a layer of ``layer_types`` "sliding" looks, ``attention_chunk_size`` the same for "chunked".
    ``rotary_positions`` is how many rows of ``rotary_dim`` the rotary embeddings' tables have. ``max_model_len`` is the
    longest request that vLLM allows by default. ``stage_layers`` are the layers of each stage of a pipeline, where
    VLLM_PP_LAYER_PARTITION gives them.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    bias: bool = False
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    layer_types: tuple[str, ...] = ()
    max_model_len: int = 0
    rotary_dim: int = 0
    rotary_positions: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    quantization: Quantization | None = None
    vision: Vision | None = None
    stage_layers: tuple[int, ...] | None = None
    config: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def uses_latent_attention(self) -> bool:
        return self.latent is not None

    @property
    def is_mixture(self) -> bool:
        return self.experts is not None

    def parameters(self) -> int:
        """Number of parameters, of a vision tower too. Llama-3.1-8B has 8,030,261,248.

        Source: the module lists of vllm/model_executor/models/.
        """
        layers = sum(count * sum(t.elements for t in tensors) for count, tensors in self.layers(1))
        ends = sum(tensor.elements for tensor in self.ends(1, padded=False))
        return layers + ends

    def kv_heads(self, tensor_parallel_size: int = 1) -> int:
        """Heads in the KV cache of one rank; what does not divide further is replicated.

        Source: vllm/config/model.py (0.26:1328-1339). Latent attention has one.
        """
        return 1 if self.latent else max(1, self.num_key_value_heads // tensor_parallel_size)

    def kv_bytes_per_token(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """Bytes of KV cache that one token takes on one rank, in all layers, where none is left out by a window.

        2 × kv heads of the rank × head_dim × bytes × layers; for latent attention the latent vector × bytes × layers.
        ``auto`` is the model's own data type. Source: vllm/v1/kv_cache_interface.py (0.26:327-342).

        Raises:
            ShapeError: for a data type of the KV cache that this module does not know.
        """
        return self.kv_bytes_per_layer(kv_cache_dtype, tensor_parallel_size) * self.num_hidden_layers

    def kv_bytes_per_layer(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """The same of one layer."""
        size = self._kv_element(kv_cache_dtype)
        if self.latent:
            return 656 if kv_cache_dtype == "fp8_ds_mla" else int(self.latent.size * size)
        scales = 8 if kv_cache_dtype.endswith("per_token_head") else 0
        return self.kv_heads(tensor_parallel_size) * int(2 * self.head_dim * size + scales)

    def _kv_element(self, kv_cache_dtype: str) -> float:
        known = {**DTYPE_BYTES, "fp8_ds_mla": 1, "int8_per_token_head": 1, "fp8_per_token_head": 1,
                 "int4_per_token_head": 0.5}  # fmt: skip
        dtype = self.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        if dtype not in known:
            raise ShapeError(f"no size is known for kv_cache_dtype {dtype!r}: use one of auto, {', '.join(known)}")
        return known[dtype]

    def kinds(self) -> tuple[str, ...]:
        """What each layer looks at: ``full``, ``sliding`` or ``chunked``."""
        return self.layer_types or (FULL,) * self.num_hidden_layers

    # ---- what one rank of tensor parallelism holds ----

    def layers(
        self, tensor_parallel_size: int, first: int = 0, end: int | None = None, without: frozenset[int] = frozenset()
    ) -> list[tuple[int, list[Tensor]]]:
        """Layers from ``first`` up to ``end`` as (how many are alike, the tensors of one of them)."""
        end = self.num_hidden_layers if end is None else end
        kinds: dict[bool, tuple[int, int]] = {}
        for layer in range(first, end):
            if layer not in without:
                kind = self.experts is not None and layer in self.experts.layers
                count, example = kinds.get(kind, (0, layer))
                kinds[kind] = count + 1, example
        return [(count, self.layer(example, tensor_parallel_size)) for count, example in kinds.values()]

    def layer(self, number: int, tensor_parallel_size: int = 1) -> list[Tensor]:
        """The tensors of one layer on one rank, merged as vLLM merges them (query, key and value; gate and up)."""
        tensors = self._latent(tensor_parallel_size) if self.latent else self._attention(tensor_parallel_size)
        hidden = self.hidden_size
        tensors += [Tensor("norm", 1, hidden)] * (self.norms * (2 if self.norm_bias else 1))
        experts = self.experts
        if experts is None or number not in experts.layers:
            return tensors + self._mlp("mlp", self.intermediate_size, tensor_parallel_size, self.mlp_bias)
        kernels = self.quantization.kernels if self.quantization else ExpertKernels()
        width = _multiple(_share(experts.intermediate_size, tensor_parallel_size), kernels.width)
        padded, count = _multiple(hidden, kernels.hidden), experts.count
        tensors += [
            Tensor("router", hidden, count),
            Tensor("experts", padded, 2 * width, count),
            Tensor("experts", width, padded, count),
        ]
        if experts.router_bias:
            tensors.append(Tensor("bias", 1, count))
        if experts.bias:
            size = 4 // self.dtype_bytes if kernels.wide_bias else 1
            tensors += [Tensor("bias", size, 2 * width, count), Tensor("bias", size, padded, count)]
        if experts.shared_size:
            tensors += self._mlp("shared_expert", experts.shared_size, tensor_parallel_size, False)
        if experts.shared_gate:
            tensors.append(Tensor("router", hidden, 1))
        return tensors

    def _attention(self, tensor_parallel_size: int) -> list[Tensor]:
        heads = _share(self.num_attention_heads, tensor_parallel_size)
        query, pair = heads * self.head_dim, 2 * self.kv_heads(tensor_parallel_size) * self.head_dim
        tensors = [
            Tensor("attention", self.hidden_size, query + pair),
            Tensor("attention", query, self.hidden_size),
        ]
        if self.bias:
            tensors.append(Tensor("bias", 1, query + pair))
        if self.output_bias:
            tensors.append(Tensor("bias", 1, self.hidden_size))
        if self.qk_norm:
            tensors += [Tensor("norm", 1, self.head_dim)] * 2
        if self.sinks:
            tensors.append(Tensor("bias", 1, heads))
        return tensors

    def _latent(self, tensor_parallel_size: int) -> list[Tensor]:
        latent, hidden = self.latent, self.hidden_size
        heads = _share(self.num_attention_heads, tensor_parallel_size)
        query = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        tensors = [
            Tensor("norm", 1, latent.kv_lora_rank),
            Tensor("attention", latent.kv_lora_rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim)),
            Tensor("attention", heads * latent.v_head_dim, hidden),
        ]
        if latent.q_lora_rank is None:
            return [*tensors, Tensor("attention", hidden, latent.size), Tensor("attention", hidden, query)]
        rank = latent.q_lora_rank
        return [
            *tensors,
            Tensor("attention", hidden, rank + latent.size),  # one matrix, fused_qkv_a_proj
            Tensor("norm", 1, rank),
            Tensor("attention", rank, query),
        ]

    def _mlp(self, part: str, intermediate: int, tensor_parallel_size: int, bias: bool) -> list[Tensor]:
        width, hidden = _share(intermediate, tensor_parallel_size), self.hidden_size
        inner = (2 if self.gated else 1) * width
        tensors = [Tensor(part, hidden, inner), Tensor(part, width, hidden)]
        return tensors + ([Tensor("bias", 1, inner), Tensor("bias", 1, hidden)] if bias else [])

    def ends(
        self, tensor_parallel_size: int, first: bool = True, last: bool = True, padded: bool = True
    ) -> list[Tensor]:
        """What a stage holds besides its layers: the embeddings on the first, the norm and the head on the last.

        A head that is the embeddings is kept once on a stage. A vision tower is on every stage
        (vllm/model_executor/models/kimi_vl.py and its like).
        """
        first, last = first or self.ends_on_every_stage, last or self.ends_on_every_stage
        tensors = []
        if first or last and self.tie_word_embeddings:
            tensors.append(self._vocabulary("embedding", tensor_parallel_size, padded))
        if last:
            tensors += [Tensor("norm", 1, self.hidden_size)] * (2 if self.norm_bias else 1)
            if not self.tie_word_embeddings:
                tensors.append(self._vocabulary("head", tensor_parallel_size, padded))
            if self.head_bias:
                tensors.append(Tensor("bias", 1, self.vocab_size))
        if self.vision:
            tensors.append(Tensor("vision", 1, _share(self.vision.layers, tensor_parallel_size) + self.vision.ends))
        return tensors

    def _vocabulary(self, part: str, tensor_parallel_size: int, padded: bool) -> Tensor:
        rows = self.vocab_size
        if padded:
            rows = _share(-(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING, tensor_parallel_size)
        return Tensor(part, self.hidden_size, rows)

    def stages(self, pipeline_parallel_size: int) -> list[tuple[int, int]]:
        """(first, end) layers of each stage; what does not divide goes to the stages before the last.

        Source: vllm/distributed/utils.py, ``get_pp_indices`` (0.33:198-245).

        Raises:
            ShapeError: where ``stage_layers`` are not this many, or not all layers.
        """
        if self.stage_layers and pipeline_parallel_size > 1:
            sizes = self.stage_layers
            if len(sizes) != pipeline_parallel_size or sum(sizes) != self.num_hidden_layers or min(sizes) < 1:
                raise ShapeError(
                    f"VLLM_PP_LAYER_PARTITION {','.join(map(str, sizes))} must give each of {pipeline_parallel_size} "
                    f"stages its layers, {self.num_hidden_layers} in all"
                )
        else:
            share, rest = divmod(self.num_hidden_layers, pipeline_parallel_size)
            sizes = [share] * pipeline_parallel_size
            for number in range(2, rest + 2):
                sizes[-number] += 1
        ends = [sum(sizes[: number + 1]) for number in range(pipeline_parallel_size)]
        return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def partitioned(self, layers: str | None) -> "ModelShape":
        """The shape with the stages that VLLM_PP_LAYER_PARTITION gives, such as ``9,10,9``; None leaves it.

        Raises:
            ShapeError: where that is no list of whole numbers.
        """
        if not layers:
            return self
        if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", layers):
            raise ShapeError(f"VLLM_PP_LAYER_PARTITION {layers!r:.60}: give the layers of each stage, such as 9,10,9")
        return replace(self, stage_layers=tuple(map(int, layers.split(","))))

    def served(
        self, dtype: str | None = None, quantize: str | None = None, kernels: ExpertKernels | None = None
    ) -> "ModelShape":
        """The shape as ``--dtype`` and ``--quantization`` change it; ``auto`` and None leave it.

        ``kernels`` are those of the card for mxfp4 experts (``quantization.expert_kernels``).

        Raises:
            ShapeError: for a data type or method that cannot be had of this checkpoint.
        """
        found = self
        if dtype not in (None, "auto"):
            name = {"half": "float16", "float": "float32"}.get(dtype, dtype)
            if name not in ("float16", "bfloat16", "float32"):
                raise ShapeError(f"dtype {dtype!r} is none of vLLM's: auto, half, float16, bfloat16, float, float32")
            found = replace(found, dtype=name)
        elif found.dtype == "float32":
            found = replace(found, dtype="bfloat16")  # vllm/config/model.py: auto never serves float32 as it is
        if quantize and found.quantization is None:
            found = replace(found, quantization=quantization.from_flag(quantize))
        if kernels and found.quantization and found.quantization.method == "mxfp4":
            found = replace(found, quantization=replace(found.quantization, kernels=kernels))
        return found

    def to_config(self) -> dict:
        """The ``config.json`` of a model of this shape."""
        return dict(self.config)


def _share(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _multiple(size: int, of: int) -> int:
    """The next multiple."""
    return -(-size // of) * of


# ---- reading config.json ----


@dataclass(frozen=True, kw_only=True)
class _Family(Layers):
    """What a family's code has that its ``config.json`` does not say."""

    qkv_bias: bool = False
    tied: bool = False
    two_rotaries: bool = False


_LLAMA = _Family()
_GEMMA_3 = _Family(norms=4, qk_norm=True, tied=True, two_rotaries=True, ends_on_every_stage=True)
_FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "GraniteForCausalLM": _Family(tied=True),
    "Phi3ForCausalLM": _LLAMA,
    "PhiForCausalLM": _Family(
        qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True, gated=False, norms=1, norm_bias=True
    ),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(qk_norm=True),
    "GemmaForCausalLM": _Family(tied=True, ends_on_every_stage=True),
    "Gemma2ForCausalLM": _Family(norms=4, tied=True, ends_on_every_stage=True),
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": _GEMMA_3,
    "MixtralForCausalLM": _Family(ends_on_every_stage=True),
    "Qwen2MoeForCausalLM": _Family(qkv_bias=True, ends_on_every_stage=True),
    "Qwen3MoeForCausalLM": _Family(qk_norm=True, ends_on_every_stage=True),
    "DeepseekV2ForCausalLM": _LLAMA,
    "DeepseekV3ForCausalLM": _LLAMA,
    "GptOssForCausalLM": _Family(qkv_bias=True, output_bias=True, sinks=True, ends_on_every_stage=True),
    "Llama4ForCausalLM": _LLAMA,
    "Llama4ForConditionalGeneration": _LLAMA,
    "Mistral3ForConditionalGeneration": _LLAMA,
    "LlavaNextForConditionalGeneration": _LLAMA,
    "KimiVLForConditionalGeneration": _LLAMA,
}
ARCHITECTURES = tuple(_FAMILIES)
_STATE_SPACE = ("mamba", "ssm", "linear_num_key_heads", "recurrent", "kda")


def from_config(config: Mapping) -> ModelShape:
    """``ModelShape`` from a Hugging Face ``config.json``, already parsed.

    A multimodal model's text is read from its ``text_config``.

    Raises:
        ShapeError: for an architecture that this module does not count, or a missing field.
    """
    if not isinstance(config, Mapping):
        raise ShapeError("config.json is no object of fields: give the file of the model itself, whole")
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "?"
    text = next((config[key] for key in ("text_config", "llm_config") if config.get(key)), config)
    _check_kinds({"config": config, "text_config": text})
    if architecture not in _FAMILIES:
        state = [key for key in text if any(word in key for word in _STATE_SPACE)]
        why = f" (it keeps a state besides the KV cache: {state[0]})" if state else ""
        raise ShapeError(
            f"{architecture} is not counted yet{why}: the shapes known here are {', '.join(_FAMILIES)}. "
            "The labs still run it and measure it"
        )
    try:
        return _read(architecture, config, _whole(text, architecture))
    except KeyError as missing:
        raise ShapeError(f"config.json has no {missing}: give the file of the model itself, whole") from missing
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as wrong:
        raise ShapeError(f"config.json has a field of another kind than expected ({wrong})") from wrong


# Fields by what they must be; a field that is absent or null is left to its default. (least, most) of whole numbers.
_SIZES = dict.fromkeys(
    (
        "hidden_size", "intermediate_size", "intermediate_size_mlp", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings", "attention_chunk_size", "num_local_experts",
        "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
        "moe_layer_freq", "interleave_moe_layer_step", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "original_max_position_embeddings", "sliding_window_pattern", "_sliding_window_pattern", "patch_size",
        "image_size", "mm_tokens_per_image", "spatial_merge_size", "projector_input_dim", "projector_output_dim",
        "vision_output_dim", "init_pos_emb_height", "init_pos_emb_width",
    ),
    (1, 1 << 31),
)  # fmt: skip
_SIZES |= dict.fromkeys(
    ("kv_lora_rank", "q_lora_rank", "sliding_window", "shared_expert_intermediate_size", "n_shared_experts",
     "first_k_dense_replace"), (0, 1 << 31),
)  # fmt: skip
_SIZES |= {"num_hidden_layers": (1, 4096)}
_FRACTIONS = ("partial_rotary_factor", "factor", "pixel_shuffle_ratio")
_LISTS = {"layer_types": str, "mlp_only_layers": int, "no_rope_layers": int}
_OBJECTS = ("text_config", "llm_config", "vision_config", "quantization_config", "rope_scaling", "rope_parameters")


def _check_kinds(objects: Mapping[str, Mapping]) -> None:
    """Refuse a field that is of another kind than its name says, by its name.

    Raises:
        ShapeError: for the first such field of these objects, or of those in them.
    """
    for where, held in objects.items():
        if not isinstance(held, Mapping):
            raise ShapeError(f"config.json has {where} {held!r:.60}: it must be an object of fields")
        for name, value in held.items():
            if value is None:
                continue
            if name in _SIZES:
                least, most = _SIZES[name]
                if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                    raise ShapeError(
                        f"config.json has {name} {value!r:.60}: it must be a whole number from {least} to {most:,}"
                    )
            elif name in _FRACTIONS:
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                    raise ShapeError(f"config.json has {name} {value!r:.60}: it must be a number above 0")
            elif name in _LISTS:
                kind = _LISTS[name]
                if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
                    words = {str: "names", int: "whole numbers"}[kind]
                    raise ShapeError(f"config.json has {name} {value!r:.60}: it must be a list of {words}")
            elif name in _OBJECTS and name != where:
                _check_kinds({name: value})


# What the class of a configuration fills in where a published file leaves it out (transformers).
_GEMMA_3_TEXT = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_DEFAULTS = {
    "Gemma3ForConditionalGeneration": {**_GEMMA_3_TEXT, "max_position_embeddings": 131072, "sliding_window": 4096},
    "LlavaNextForConditionalGeneration": {"rms_norm_eps": 1e-5},
}


def _whole(text: Mapping, architecture: str) -> Mapping:
    stated = {name: value for name, value in text.items() if value is not None}
    return {**_DEFAULTS.get(architecture, {}), **stated}


def _read(architecture: str, config: Mapping, text: Mapping) -> ModelShape:
    family, heads = _FAMILIES[architecture], text["num_attention_heads"]
    layers, hidden = text["num_hidden_layers"], text["hidden_size"]
    latent = _read_latent(text) if text.get("kv_lora_rank") else None
    head_dim = text.get("head_dim") or hidden // heads
    if latent:
        head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    length = text["max_position_embeddings"]
    window, chunk = text.get("sliding_window"), text.get("attention_chunk_size")
    if text.get("use_sliding_window") is False:
        window = None
    kinds = _kinds(architecture, text, layers, window, chunk)
    own = next((text.get(key) or config.get(key) for key in ("dtype", "torch_dtype")
                if text.get(key) or config.get(key)), "float16")  # fmt: skip
    own = str(own).removeprefix("torch.")
    if own not in ("float32", "float16", "bfloat16"):
        raise ShapeError(f"config.json has dtype {own!r:.60}: weights are counted in float32, float16 or bfloat16")
    partial = text.get("partial_rotary_factor", 1.0)
    llama_bias = bool(text.get("attention_bias")) and latent is None
    layers_have = {each.name: getattr(family, each.name) for each in fields(Layers)}
    layers_have["output_bias"] |= llama_bias and architecture in ("LlamaForCausalLM", "GraniteForCausalLM")
    layers_have["mlp_bias"] |= bool(text.get("mlp_bias"))
    return ModelShape(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_dense_width(architecture, text),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=text["vocab_size"],
        max_position_embeddings=length,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", family.tied))),
        dtype=own,
        bias=family.qkv_bias or llama_bias,
        sliding_window=window if SLIDING in kinds else None,
        attention_chunk_size=chunk if CHUNKED in kinds else None,
        layer_types=kinds if set(kinds) != {FULL} else (),
        max_model_len=length if architecture.startswith("Gemma3") else _default_length(length, rope),
        **layers_have,
        rotary_dim=latent.qk_rope_head_dim if latent else int(head_dim * partial),
        rotary_positions=_rotary_positions(length, rope) + (length if family.two_rotaries else 0),
        experts=_read_experts(architecture, text, layers),
        latent=latent,
        quantization=quantization.from_config(config.get("quantization_config") or text.get("quantization_config")),
        vision=towers.from_config(config, hidden),
        config=dict(config),
    )


def _default_length(length: int, rope: Mapping) -> int:
    """vLLM's own ``max_model_len``; Gemma 3 states a length that is scaled already.

    Source: vllm/config/model.py, ``_get_and_verify_max_len`` (0.33:2545-2655).
    """
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "longrope":
        return int(rope.get("original_max_position_embeddings") or length)
    if kind in ("linear", "dynamic") and rope.get("factor"):
        return int(length * rope["factor"])
    return length


def _rotary_positions(length: int, rope: Mapping) -> int:
    """Positions in the table of a rotary embedding.

    Source: vllm/model_executor/layers/rotary_embedding/{linear_scaling_rope,dynamic_ntk_scaling_rope}.py.
    """
    kind = rope.get("rope_type") or rope.get("type")
    return int(length * rope["factor"]) if kind in ("linear", "dynamic") and rope.get("factor") else length


def _read_latent(text: Mapping) -> Latent:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(text.get("q_lora_rank"), *(text[name] for name in names))


def _dense_width(architecture: str, text: Mapping) -> int:
    """Width of the MLP of a layer without experts."""
    if architecture.startswith("Llama4"):
        return text.get("intermediate_size_mlp") or text["intermediate_size"]
    return text["intermediate_size"]


def _kinds(architecture: str, text: Mapping, layers: int, window, chunk) -> tuple[str, ...]:
    if text.get("layer_types"):
        named = tuple(_LAYER_TYPES.get(kind) for kind in text["layer_types"])
        if None in named or len(named) != layers:
            raise ShapeError(
                f"config.json has layer_types that are not counted here, or not one for each of {layers} layers: "
                f"{', '.join(sorted(set(map(str, text['layer_types']))))}"
            )
        return named if window or chunk else (FULL,) * layers
    if architecture.startswith("Llama4"):
        rotary = text.get("no_rope_layers") or [(number + 1) % 4 for number in range(layers)]
        return tuple(CHUNKED if chunk and rotary[number] else FULL for number in range(layers))
    if not window:
        return (FULL,) * layers
    if architecture == "Gemma2ForCausalLM" or architecture == "GptOssForCausalLM":
        return tuple(FULL if number % 2 else SLIDING for number in range(layers))
    if architecture.startswith("Gemma3"):
        pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or 6
        return tuple(SLIDING if (number + 1) % pattern else FULL for number in range(layers))
    return (SLIDING,) * layers


def _read_experts(architecture: str, text: Mapping, layers: int) -> Experts | None:
    everywhere = frozenset(range(layers))
    if architecture == "MixtralForCausalLM":
        return Experts(text["num_local_experts"], text["num_experts_per_tok"], text["intermediate_size"], everywhere)
    if architecture == "GptOssForCausalLM":
        sizes = text["num_local_experts"], text["num_experts_per_tok"], text["intermediate_size"]
        return Experts(*sizes, everywhere, bias=True, router_bias=True)
    if architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        step, dense = text.get("decoder_sparse_step", 1), set(text.get("mlp_only_layers") or ())
        sparse = frozenset(n for n in range(layers) if n not in dense and (n + 1) % step == 0)
        shared = text.get("shared_expert_intermediate_size", 0) if architecture.startswith("Qwen2") else 0
        sizes = text["num_experts"], text["num_experts_per_tok"], text["moe_intermediate_size"]
        return Experts(*sizes, sparse, shared, shared_gate=shared > 0)
    if text.get("n_routed_experts"):
        first, every = text.get("first_k_dense_replace", 0), text.get("moe_layer_freq", 1)
        sparse = frozenset(n for n in range(first, layers) if n % every == 0)
        width = text["moe_intermediate_size"]
        scored = text.get("topk_method") == "noaux_tc" or architecture == "DeepseekV3ForCausalLM"
        sizes = text["n_routed_experts"], text["num_experts_per_tok"], width
        return Experts(*sizes, sparse, width * (text.get("n_shared_experts") or 0), router_bias=scored)
    if architecture.startswith("Llama4"):
        step = text.get("interleave_moe_layer_step", 1)
        sparse = frozenset(n for n in range(layers) if (n + 1) % step == 0)
        width = text["intermediate_size"]
        return Experts(text["num_local_experts"], text["num_experts_per_tok"], width, sparse, width)
    return None


LAB_MODELS = {name: from_config(config) for name, config in (LAB_CONFIGS | PLANNER_CONFIGS | LARGE_CONFIGS).items()}
PANEL_MODELS = tuple(LAB_CONFIGS)  # those that the labs teach with; the others are there to hold the planner to
