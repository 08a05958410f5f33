"""Models to serve without a download: ``config.json`` and a byte-level tokenizer, written locally.

With ``--load-format dummy`` vLLM makes up weights of the right shape, so memory is that of the real model.
"""

import itertools
import json
import os
import tempfile
from pathlib import Path

from memlab.shapes import LAB_MODELS, ModelShape

_SPECIAL = ("<|begin|>", "<|end|>")
_CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant: "
# Code points for the tokens of more than a byte: what bytes that are no UTF-8 decode to, ideographs, syllables, then
# the planes for private use, and last the rest of the planes for ideographs.
_CHARACTERS = (
    range(0xFFFD, 0xFFFE),
    range(0x4E00, 0xA000),
    range(0xAC00, 0xD7A4),
    range(0x20000, 0x2A6E0),
    range(0xF0000, 0xFFFFE),
    range(0x100000, 0x10FFFE),
    range(0x2A6E0, 0x3FFFE),
)


def _byte_symbols() -> list[str]:
    """One printable character for each byte, in order, as byte-level BPE writes them (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [symbols[byte] for byte in range(256)]


def _merges(symbols: list[str]):
    """Pairs of tokens that build the characters, one byte after the other; each pair once."""
    known = set()
    for point in itertools.chain(*_CHARACTERS):
        head, *tails = (symbols[byte] for byte in chr(point).encode())
        for tail in tails:
            if head + tail not in known:
                known.add(head + tail)
                yield head, tail
            head += tail


def tokenizer(vocab_size: int) -> dict:
    """A ``tokenizer.json`` of byte-level BPE that gives nearly every id of a vocabulary one character of its own.

    After the two special tokens comes one for each byte. The rest are characters, each merged byte by byte, with the
    few beginnings of characters that this takes. So text keeps its length from ids to text and back. A vocabulary as
    large as the model's matters twice. ``vllm bench serve`` makes a prompt by counting on from a random id: among few
    ids prompts would soon be the same, and lie in the prefix cache. And the model may answer with any id: one without
    text would wait in the stream for the next.

    Args:
        vocab_size: of the model, at least 258.
    """
    symbols = _byte_symbols()
    merges = list(itertools.islice(_merges(symbols), vocab_size - len(_SPECIAL) - len(symbols)))
    tokens = [*_SPECIAL, *symbols, *(head + tail for head, tail in merges)]
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
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def write(name: str, shape: ModelShape, folder: Path) -> Path:
    """Write a model of ``shape`` to ``folder``/``name``, ready for ``vllm serve``; returns that folder.

    Each file is put there whole: another server may be reading the one before.
    """
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    begin, end = _SPECIAL
    files = {
        "config.json": shape.to_config(),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer.json": tokenizer(shape.vocab_size),
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
        with tempfile.NamedTemporaryFile("w", dir=target, prefix=".", delete=False, encoding="utf-8") as draft:
            draft.write(text)
        os.chmod(draft.name, 0o644)
        os.replace(draft.name, target / file)
    return target


def locate(model: str, folder: Path) -> tuple[Path | str, ModelShape | None, str | None]:
    """What to serve for ``model``: (path or name for vLLM, shape if it is a lab model, load format or None).

    A lab model is written to ``folder``; any other name goes to vLLM as it is, which then loads real weights.
    """
    if model in LAB_MODELS:
        return write(model, LAB_MODELS[model], folder), LAB_MODELS[model], "dummy"
    return model, None, None
