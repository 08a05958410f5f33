"""Models to serve without a download: ``config.json`` and a byte-level tokenizer, written locally.

With ``--load-format dummy`` vLLM makes up weights of the right shape, so memory is that of the real model.
"""

import json
from pathlib import Path

from memlab.shapes import LAB_MODELS, ModelShape

_SPECIAL = ("<|begin|>", "<|end|>")
_CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant: "


def _byte_symbols() -> list[str]:
    """One printable character for each byte, in order, as byte-level BPE writes them (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [symbols[byte] for byte in range(256)]


def tokenizer() -> dict:
    """A ``tokenizer.json`` with one token for each byte, behind the two special tokens."""
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *_byte_symbols()])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **special} for i, token in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def write(name: str, shape: ModelShape, folder: Path) -> Path:
    """Write a model of ``shape`` to ``folder``/``name``, ready for ``vllm serve``; returns that folder."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    begin, end = _SPECIAL
    files = {
        "config.json": shape.to_config(),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": begin,
            "eos_token": end,
            "model_max_length": shape.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    }
    for file, content in files.items():
        text = json.dumps(content, ensure_ascii=False, indent=None if file == "tokenizer.json" else 1)
        (target / file).write_text(text, encoding="utf-8")
    return target


def locate(model: str, folder: Path) -> tuple[Path | str, ModelShape | None, str | None]:
    """What to serve for ``model``: (path or name for vLLM, shape if it is a lab model, load format or None).

    A lab model is written to ``folder``; any other name goes to vLLM as it is, which then loads real weights.
    """
    if model in LAB_MODELS:
        return write(model, LAB_MODELS[model], folder), LAB_MODELS[model], "dummy"
    return model, None, None
