"""``ServeFlags``: the flags of ``vllm serve`` that move memory, under vLLM's names, checked as vLLM checks them."""

import argparse
import functools
import shlex
from dataclasses import dataclass, field, fields, replace

from memlab.errors import FlagError
from memlab.units import parse_count

_ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--kv-cache-memory": "--kv-cache-memory-bytes",
}


def _count_or_auto(text: str) -> int:
    return -1 if text.strip().lower() in ("auto", "-1") else parse_count(text)


def _flag(parse, help):
    return field(default=None, metadata={"parse": parse, "help": help})


@dataclass(frozen=True)
class ServeFlags:
    """Flags of ``vllm serve``; None leaves a flag to vLLM. ``extra`` holds arguments this class does not model.

    Defaults and rules: vllm/engine/arg_utils.py, vllm/config/{cache,scheduler}.py, 0.26 to 0.33.
    """

    gpu_memory_utilization: float | None = _flag(float, "share of the card's memory that vLLM plans with (0.92)")
    kv_cache_memory_bytes: int | None = _flag(parse_count, "the pool's size, instead of what the budget leaves")
    max_model_len: int | None = _flag(_count_or_auto, "longest request, prompt and answer together")
    max_num_batched_tokens: int | None = _flag(parse_count, "tokens in one step")
    max_num_seqs: int | None = _flag(int, "requests in one step")
    enable_chunked_prefill: bool | None = _flag(bool, "split a prompt over steps (on)")
    long_prefill_token_threshold: int | None = _flag(int, "most tokens of one prompt in a step (0: no limit)")
    enable_prefix_caching: bool | None = _flag(bool, "reuse blocks of a shared prefix (on)")
    block_size: int | None = _flag(int, "tokens in a block of the KV cache (16; CPU 128)")
    kv_cache_dtype: str | None = _flag(str, "data type of the KV cache (auto)")
    num_gpu_blocks_override: int | None = _flag(int, "blocks in the pool, for tests")
    enforce_eager: bool | None = _flag(bool, "neither torch.compile nor CUDA graphs (off)")
    max_cudagraph_capture_size: int | None = _flag(int, "largest batch with a CUDA graph")
    tensor_parallel_size: int | None = _flag(int, "GPUs that share each layer (1)")
    pipeline_parallel_size: int | None = _flag(int, "groups of GPUs that share the layers (1)")
    dtype: str | None = _flag(str, "data type of weights and activations (auto)")
    quantization: str | None = _flag(str, "quantization of the weights")
    load_format: str | None = _flag(str, "how weights are loaded; dummy makes them up")
    cpu_offload_gb: float | None = _flag(float, "GiB of weights kept in host memory")
    seed: int | None = _flag(int, "random seed (0)")
    extra: tuple[str, ...] = ()

    def set(self) -> dict[str, object]:
        """The flags that are given, by vLLM's names with underscores, without ``extra``."""
        return {f.name: value for f in MODELLED if (value := getattr(self, f.name)) is not None}

    def with_(self, **changes) -> "ServeFlags":
        """A copy with some flags changed; ``None`` leaves one to vLLM again."""
        unknown = set(changes) - {f.name for f in fields(self)}
        if unknown:
            raise FlagError(f"memlab does not model {', '.join(sorted(unknown))}: pass it in extra=('--name', 'value')")
        return replace(self, **changes)

    def to_args(self) -> list[str]:
        """The arguments for ``vllm serve``, without the model."""
        args = []
        for name, value in self.set().items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                args.append(f"--{option}" if value else f"--no-{option}")
            else:
                args += [f"--{option}", str(value)]
        return args + list(self.extra)

    def command(self, model: str) -> str:
        """The command line that a reader can paste into a shell, a flag a line."""
        lines = [["vllm", "serve", model]]
        for word in self.to_args():
            if word.startswith("--"):
                lines.append([])
            lines[-1].append(word)
        return " \\\n    ".join(map(shlex.join, lines))

    @property
    def world_size(self) -> int:
        """GPUs that the server takes."""
        return (self.tensor_parallel_size or 1) * (self.pipeline_parallel_size or 1)


MODELLED = tuple(f for f in fields(ServeFlags) if f.name != "extra")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise FlagError(f"vLLM would refuse this command line: {message}")


def _reader(parse):
    """``parse`` whose own words about a wrong value reach the reader."""

    def read(text: str):
        try:
            return parse(text)
        except ValueError as error:
            what = {int: f"{text!r} is no whole number", float: f"{text!r} is no number"}.get(parse, str(error))
            raise argparse.ArgumentTypeError(what) from error

    return read


@functools.cache
def _parser() -> _Parser:
    parser = _Parser(prog="vllm serve", add_help=False)
    for f in MODELLED:
        option = "--" + f.name.replace("_", "-")
        if f.metadata["parse"] is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=None)
        else:
            parser.add_argument(option, type=_reader(f.metadata["parse"]), default=None)
    return parser


def from_args(args: list[str]) -> ServeFlags:
    """``ServeFlags`` from arguments as they stand behind ``vllm serve MODEL``; underscores and ``--name=value`` too.

    Raises:
        FlagError: for a value that vLLM's own parser would refuse.
    """
    normal = []
    for arg in args:
        name, equals, value = arg.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        normal.append(_ALIASES.get(name, name) + equals + value)
    known, extra = _parser().parse_known_args(normal)
    return ServeFlags(**vars(known), extra=tuple(extra))


def name_of(option: str) -> str:
    """vLLM's name of an option as it is typed: ``-tp``, ``--max-model-len`` and ``--max_model_len`` alike."""
    option = option.replace("_", "-")
    return _ALIASES.get(option, option).lstrip("-").replace("-", "_")


def take_model(words: list[str]) -> tuple[str | None, list[str]]:
    """The model that the words behind ``vllm serve`` name, or behind the module that did so before it, and the rest.

    None where they name none: it stands first, or behind ``--model``.
    """
    model, rest, number = None, [], 0
    if words and not words[0].startswith("-"):
        model, number = words[0], 1
    while number < len(words):
        option, equals, value = words[number].partition("=")
        if option in ("--model", "--model-tag", "--model_tag"):
            if not equals:
                number += 1
                value = words[number] if number < len(words) else ""
            model = value or model
        else:
            rest.append(words[number])
        number += 1
    return model, rest


def check(flags: ServeFlags, model_max_len: int | None = None) -> None:
    """Refuse what vLLM refuses before it touches the GPU, in its terms. Unset flags are not judged.

    Args:
        flags: flags as given or as resolved.
        model_max_len: the model's own limit in tokens, for a ``max_model_len`` left unset.

    Raises:
        FlagError: naming the rule and the way out. Sources: vllm/config/scheduler.py (0.26:273-295, 0.32:315-352),
            vllm/config/cache.py, vllm/config/model.py (0.32:2640-2660), vllm/platforms/cpu.py.
    """
    utilization = flags.gpu_memory_utilization
    if utilization is not None and not 0 < utilization <= 1:
        raise FlagError(f"gpu_memory_utilization {utilization} is no share of the card: give more than 0 and at most 1")
    for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "tensor_parallel_size"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise FlagError(f"{name} {value} must be at least 1")
    if flags.block_size is not None and flags.block_size % 16:
        raise FlagError(f"block_size {flags.block_size}: attention backends take multiples of 16 (on the CPU of 32)")
    tokens, seqs = flags.max_num_batched_tokens, flags.max_num_seqs
    if tokens is not None and seqs is not None and tokens < seqs:
        raise FlagError(
            f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs}), since each running request "
            "takes a token of the step: raise the first or lower the second"
        )
    length = model_max_len if flags.max_model_len in (None, -1) else flags.max_model_len
    if None not in (length, model_max_len) and length > model_max_len:
        raise FlagError(
            f"max_model_len ({length}) is greater than the model's own limit ({model_max_len}, "
            "max_position_embeddings): lower it"
        )
    threshold = flags.long_prefill_token_threshold
    if None not in (threshold, length) and threshold > length:
        raise FlagError(
            f"long_prefill_token_threshold ({threshold}) cannot be greater than max_model_len ({length}): lower it"
        )
    if flags.enable_chunked_prefill is False and tokens is not None and length is not None and tokens < length:
        raise FlagError(
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}): without chunked prefill a "
            "whole prompt goes into one step, so raise the first, lower the second, or leave chunked prefill on"
        )


def resolve(flags: ServeFlags, default_tokens: int, default_seqs: int, model_max_len: int) -> ServeFlags:
    """The four scheduler flags as vLLM fills them in (vllm/engine/arg_utils.py, 0.32:3097-3186).

    Args:
        default_tokens, default_seqs: the card's defaults, from ``cards.batch_defaults``.
        model_max_len: the model's own limit in tokens.
    """
    length = model_max_len if flags.max_model_len in (None, -1) else flags.max_model_len
    chunked = flags.enable_chunked_prefill is not False
    seqs = flags.max_num_seqs
    tokens = flags.max_num_batched_tokens
    if tokens is None:
        tokens = default_tokens if chunked else max(length, default_tokens)
        tokens = min(tokens, (seqs or default_seqs) * length)
    if seqs is None:
        seqs = min(default_seqs, tokens)
    return flags.with_(
        max_model_len=length, max_num_batched_tokens=tokens, max_num_seqs=seqs, enable_chunked_prefill=chunked
    )
