"""Quantized weights: which parts of a model a method stores in fewer bits, and the bytes of what it adds to them.

Sources: vllm/model_executor/layers/quantization/{fp8,awq_marlin,gptq_marlin,mxfp4,bitsandbytes}.py and
compressed_tensors/ (0.26 to 0.33), each method's ``create_weights``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from memlab.errors import ShapeError

# The linear layers of a decoder. Embeddings, norms, routers and the head stay in the model's own type.
LINEAR = ("attention", "mlp", "experts", "shared_expert")
MXFP4_GROUP, NVFP4_GROUP, BITSANDBYTES_GROUP, FP8_BLOCK = 32, 16, 64, 128

# What a pattern of modules that stay as they are names, the narrowest first.
_NAMES = {
    "shared_expert": "shared_expert", "experts": "experts", "router": None, "mlp.gate$": None, "gate$": None,
    "attn": "attention", "mlp": "mlp", "feed_forward": "mlp",
}  # fmt: skip


@dataclass(frozen=True)
class ExpertKernels:
    """What the kernels of a card make of mxfp4 experts: an expert's width and hidden size are padded to multiples of
    ``width`` and ``hidden``, the outputs of a matrix of scales to one of ``scales``. ``scales_twice``: the scales as
    loaded stay beside those. ``wide_bias``: biases are float32."""

    width: int = 1
    hidden: int = 1
    scales: int = 1
    scales_twice: bool = False
    wide_bias: bool = False


@dataclass(frozen=True)
class Quantization:
    """A method by vLLM's name, the bits of a weight, and how many weights share a scale.

    ``group_size`` is None for one scale a channel or tensor. ``zero_points`` are stored beside the scales.
    ``kept`` holds (layer, part) of what keeps the model's own type; a layer of None is every layer. ``kernels`` are
    those of mxfp4 experts.
    """

    method: str
    bits: int
    group_size: int | None = None
    zero_points: bool = False
    block: bool = False
    kept: frozenset[tuple[int | None, str]] = frozenset()
    kernels: ExpertKernels = ExpertKernels()

    def covers(self, part: str, layer: int | None) -> bool:
        """Whether the method stores this part of this layer."""
        if self.method == "mxfp4" and part != "experts":
            return False
        return part in LINEAR and not {(None, part), (layer, part)} & self.kept

    def bytes(self, inputs: int, outputs: int) -> list[int]:
        """Sizes of the tensors that stand for a matrix of inputs × outputs: the weight, its scales, its zero points."""
        weight = inputs * outputs * self.bits // 8
        if self.block:
            return [weight, -(-inputs // FP8_BLOCK) * -(-outputs // FP8_BLOCK) * 4]
        if self.method == "mxfp4":
            rows = inputs // MXFP4_GROUP
            scales = rows * (-(-outputs // self.kernels.scales) * self.kernels.scales)
            return [weight, scales, *([rows * outputs] if self.kernels.scales_twice else [])]
        if self.method == "bitsandbytes" and self.bits == 4:
            return [weight, inputs * outputs // BITSANDBYTES_GROUP * 4]
        if self.group_size is None:
            return [weight, outputs * 4]
        groups = -(-inputs // self.group_size) * outputs
        scale = 1 if self.group_size == NVFP4_GROUP else 2
        return [weight, groups * scale, *([groups * self.bits // 8] if self.zero_points else [])]


def _kept(patterns) -> frozenset[tuple[int | None, str]]:
    """(layer, part) that a list of module names or patterns keeps from being quantized."""
    found = set()
    for pattern in patterns or ():
        if re.search(r"vision|visual|embed|lm_head|projector|norm", pattern):
            continue
        layer = re.search(r"layers[.\\]+(\d+)\b", pattern)
        part = next((part for name, part in _NAMES.items() if re.search(name, pattern)), None)
        if part:
            found.add((int(layer[1]) if layer else None, part))
    return frozenset(found)


def _checked(found: Quantization) -> Quantization:
    """Refuse bits and groups that no method has.

    Raises:
        ShapeError: naming the value.
    """
    for name, value, known in (("bits", found.bits, range(1, 17)), ("group_size", found.group_size, range(1, 1 << 20))):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value not in known):
            raise ShapeError(f"config.json has a quantization_config with {name} {value!r:.60}: give the model's own")
    return found


def from_config(given: Mapping | None) -> Quantization | None:
    """``Quantization`` from the ``quantization_config`` of a ``config.json``; None where there is none.

    Raises:
        ShapeError: for a method whose layout is not counted here.
    """
    return _checked(_read(given)) if given else None


def _read(given: Mapping) -> Quantization:
    method = str(given.get("quant_method") or "?").lower()
    keep = given.get("modules_to_not_convert") or given.get("ignored_layers") or given.get("ignore")
    kept = _kept(keep)
    if method == "fp8":
        return Quantization("fp8", 8, block=bool(given.get("weight_block_size")), kept=kept)
    if method in ("awq", "awq_marlin"):
        size, bits = given.get("group_size", given.get("q_group_size", 128)), given.get("bits", given.get("w_bit", 4))
        return Quantization("awq", bits, size, bool(given.get("zero_point", True)), kept=kept)
    if method in ("gptq", "gptq_marlin"):
        size = given.get("group_size", 128)
        zeros = not given.get("sym", True)
        return Quantization("gptq", given.get("bits", 4), None if size == -1 else size, zeros, kept=kept)
    if method == "mxfp4":
        return Quantization("mxfp4", 4, MXFP4_GROUP, kept=kept)
    if method == "bitsandbytes":
        kept = _kept(given.get("llm_int8_skip_modules"))
        return Quantization("bitsandbytes", 4 if given.get("load_in_4bit") else 8, kept=kept)
    if method == "compressed-tensors":
        groups = list((given.get("config_groups") or {}).values())
        weights = [group["weights"] for group in groups if group.get("weights")]
        if weights:
            first = weights[0]
            strategy = first.get("strategy")
            group = first.get("group_size") if strategy in ("group", "tensor_group") else None
            zeros = not first.get("symmetric", True)
            return Quantization(method, first["num_bits"], group, zeros, strategy == "block", kept)
    raise ShapeError(
        f"quantization method {method!r} is not counted: fp8, awq, gptq, compressed-tensors, mxfp4 and bitsandbytes are"
    )


def expert_kernels(capability: tuple[int, int] | None, trtllm_width: int, scales_twice: bool) -> ExpertKernels:
    """Those that vLLM takes for mxfp4 experts on a card; a capability that is not known counts as 9.0.

    Compute capability 9.0: Triton's. 10.x: FlashInfer's, which pad an expert's width to ``trtllm_width``. Others:
    Marlin's. ``scales_twice`` says that the version keeps what Triton's were made from. Source:
    vllm/model_executor/layers/fused_moe/oracle/mxfp4.py (0.33:402-436, 837-917, 1444-1475; read in 0.19, 0.26, 0.32),
    vllm/third_party/triton_kernels/tensor_details/layout_details/hopper_scale.py. Stated elsewhere, with Marlin:
    gpt-oss-120b 65.97 GiB (vLLM issue #23278), gpt-oss-20b 13.72 GiB on an A100 by 0.19.0; with Triton and its scales
    twice: gpt-oss-120b 64.38 GiB (issue #33155).
    """
    if capability is None or capability[0] == 9:
        return ExpertKernels(64, 1, 256, scales_twice, wide_bias=True)
    return ExpertKernels(trtllm_width if capability[0] == 10 else 128, 256)


def from_flag(name: str) -> Quantization:
    """What ``--quantization`` makes of a checkpoint that is not quantized itself.

    Raises:
        ShapeError: for a method that needs a checkpoint of its own.
    """
    if name == "fp8":
        return Quantization("fp8", 8)
    if name == "bitsandbytes":
        return Quantization("bitsandbytes", 4)
    raise ShapeError(
        f"--quantization {name} needs a checkpoint that was quantized so: give its config.json, which has a "
        "quantization_config. Of an ordinary checkpoint vLLM makes fp8 or bitsandbytes"
    )
