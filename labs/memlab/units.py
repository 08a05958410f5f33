"""Bytes, GiB and tokens: one place that reads and one that writes a quantity with its unit."""

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_HUMAN_READABLE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


def to_gib(size_bytes: float) -> float:
    """Bytes to GiB (2**30 bytes), unrounded."""
    return size_bytes / GIB


def to_bytes(size_gib: float) -> int:
    """GiB to whole bytes."""
    return round(size_gib * GIB)


def show_gib(size_gib: float, signed: bool = False) -> str:
    """A size in GiB with its unit: MiB below a tenth of a GiB, where two decimals would hide it.

    >>> show_gib(15.678), show_gib(0.0625), show_gib(-0.5, signed=True)
    ('15.68 GiB', '64 MiB', '−0.50 GiB')
    """
    size = abs(size_gib)
    text = f"{size * 1024:.0f} MiB" if 0 < size < 0.1 else f"{size:.2f} GiB"
    sign = "−" if size_gib < 0 else "+" if signed else ""
    return sign + text


def show_tokens(tokens: int) -> str:
    """A count of tokens with its unit.

    >>> show_tokens(151552)
    '151,552 tokens'
    """
    return f"{tokens:,} token" if tokens == 1 else f"{tokens:,} tokens"


def show_seconds(seconds: float) -> str:
    """A duration: milliseconds below a second, minutes from two minutes on.

    >>> show_seconds(0.0404), show_seconds(31.2), show_seconds(150)
    ('40.4 ms', '31.2 s', '2 min 30 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def parse_count(text: str) -> int:
    """A whole number as vLLM's flags take it: ``2048``, ``2k`` (2000), ``2K`` (2048), ``1.5G``.

    The rule is vLLM's ``human_readable_int`` (vllm/engine/arg_utils.py, 0.26 to 0.33): lower case counts
    in thousands, upper case in powers of 1024, and only the lower case takes a fraction.

    Raises:
        ValueError: for anything else, such as ``20GiB``.
    """
    text = text.strip()
    match = _HUMAN_READABLE.fullmatch(text)
    if match:
        number, suffix = match.groups()
        if suffix in _DECIMAL and len(number) < 300:
            return int(float(number) * _DECIMAL[suffix])
        if suffix in _BINARY and "." not in number:
            return int(number) * _BINARY[suffix]
    elif re.fullmatch(r"-?\d+", text):
        return int(text)
    raise ValueError(f"{text!r} is not a number that vLLM accepts: write 2048, 2k (2000) or 2K (2048), without a unit")
