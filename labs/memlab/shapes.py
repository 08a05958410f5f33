"""``ModelShape``: what memory depends on in a model's ``config.json``, and the shapes that the labs use."""

from dataclasses import dataclass

from memlab.errors import ShapeError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP; sizes in elements unless named otherwise.

    ``bias`` is that of the query, key and value projections (Qwen2 has one, Llama has none). ``sliding_window`` is how
    many tokens back every layer looks; None for all of them.
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

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def parameters(self) -> int:
        """Number of parameters. Llama-3.1-8B has 8,030,261,248.

        Source: the module list of vllm/model_executor/models/{llama,qwen2}.py; Mistral is Llama there.
        """
        query = self.num_attention_heads * self.head_dim
        key_value = 2 * self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (query + key_value) + query * self.hidden_size
        if self.bias:
            attention += query + key_value
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * (attention + mlp + norms) + self.hidden_size + embeddings

    def kv_bytes_per_token(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """Bytes of KV cache that one token takes on one rank: 2 × kv heads of the rank × head_dim × bytes × layers.

        ``auto`` is the model's own data type. Source: vllm/v1/kv_cache_interface.py (0.26:327-342) and, for heads that
        do not divide further, vllm/config/model.py (0.26:1328-1339).

        Raises:
            ShapeError: for a data type of the KV cache that this module does not know.
        """
        dtype = self.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        if dtype not in DTYPE_BYTES:
            raise ShapeError(f"no size is known for kv_cache_dtype {dtype!r}: use one of {', '.join(DTYPE_BYTES)}")
        heads = max(1, self.num_key_value_heads // tensor_parallel_size)
        return 2 * heads * self.head_dim * DTYPE_BYTES[dtype] * self.num_hidden_layers

    def to_config(self) -> dict:
        """The ``config.json`` of a model of this shape."""
        window = {} if self.sliding_window is None else {"sliding_window": self.sliding_window}
        return window | {
            "architectures": [self.architecture],
            "model_type": _MODEL_TYPES[self.architecture],
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": self.dtype,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


_MODEL_TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}


def from_config(config: dict) -> ModelShape:
    """``ModelShape`` from a Hugging Face ``config.json``, already parsed.

    Raises:
        ShapeError: for an architecture that this module does not count, or a missing field.
    """
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in _MODEL_TYPES:
        raise ShapeError(
            f"{architecture} is not counted yet: the shapes known here are {', '.join(_MODEL_TYPES)}. "
            "The labs still run it and measure it"
        )
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            architecture=architecture,
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float16",
            bias=architecture.startswith("Qwen2"),
            sliding_window=config.get("sliding_window") if architecture.startswith("Mistral") else None,
        )
    except KeyError as missing:
        raise ShapeError(f"config.json has no {missing}: give the file of the model itself, whole") from missing


def _llama(layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, length) -> ModelShape:
    sizes = (hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, length)
    return ModelShape("LlamaForCausalLM", *sizes, tie_word_embeddings=False, dtype="bfloat16")


# Sizes from the config.json of each model on Hugging Face; weights are never needed (--load-format dummy).
LAB_MODELS = {
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40, 128, 32000, 4096),
    "llama-2-70b-rank-of-8": _llama(80, 8192, 3584, 8, 1, 128, 4000, 4096),
    "tiny-llama": _llama(4, 256, 1024, 8, 4, 32, 4096, 8192),
    "qwen2.5-0.5b": ModelShape("Qwen2ForCausalLM", 896, 4864, 24, 14, 2, 64, 151936, 32768, True, "bfloat16", True),
    "mistral-7b-v0.1": ModelShape(
        "MistralForCausalLM", 4096, 14336, 32, 32, 8, 128, 32000, 32768, False, "bfloat16", sliding_window=4096
    ),
    "qwen2.5-7b": ModelShape("Qwen2ForCausalLM", 3584, 18944, 28, 28, 4, 128, 152064, 32768, False, "bfloat16", True),
}
