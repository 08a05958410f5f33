"""Goodput: requests and tokens a second that met stated limits, from the samples that a record keeps.

``vllm bench serve --goodput`` counts the same while it runs, for limits fixed before it starts. Here the limits are a
reader's and come after the run, in replay too; the rule is vLLM's (vllm/benchmarks/serve.py:640-665, 0.32): a request
is good if its time to first token and its mean time per output token are both within their limit, and goodput is good
requests over the load's duration.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from memlab.record import Latency, Load, RunRecord, Traffic


@dataclass(frozen=True)
class Limits:
    """The most that a good request takes, in milliseconds: to its first token, and for each further one on average."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0

    def met(self, ttft_ms: float, tpot_ms: float) -> bool:
        return ttft_ms <= self.ttft_ms and tpot_ms <= self.tpot_ms

    def __str__(self) -> str:
        return f"TTFT at most {self.ttft_ms:,.0f} ms and TPOT at most {self.tpot_ms:g} ms"


@dataclass(frozen=True)
class Goodput:
    """What met the limits; ``good`` of ``sent`` requests."""

    requests_per_s: float
    output_tokens_per_s: float
    good: int
    sent: int


def of(latency: Latency, limits: Limits) -> Goodput:
    """The goodput of one load. A request that failed is sent and not good.

    Raises:
        ValueError: for a record that has not a sample for each request: made before samples were kept, or of more
            requests than a record holds.
    """
    samples = (latency.ttft_samples_ms, latency.tpot_samples_ms, latency.output_samples_tokens)
    if any(len(each) != latency.completed for each in samples):
        raise ValueError("goodput needs the samples of every request, at most 500 of them: record the load again")
    good = [tokens for ttft, tpot, tokens in zip(*samples, strict=True) if limits.met(ttft, tpot)]
    seconds = latency.duration_s
    sent = latency.completed + latency.failed
    return Goodput(len(good) / seconds, sum(good) / seconds, len(good), sent)


# ---- loads of one kind ----


def kind(traffic: Traffic) -> str:
    """What a load stands for: ``mixed`` lengths, ``chat`` at a rate, a ``batch`` all at once; else how it comes."""
    if traffic.range_ratio or traffic.long_prompts:
        return "mixed"
    if traffic.requests_per_s:
        return "chat"
    if traffic.concurrency is None:
        return "batch"
    return f"{traffic.concurrency} at a time"


def loads_of(record: RunRecord) -> list[Load]:
    """The loads of a run that have a latency, a single one too."""
    if record.loads:
        return [load for load in record.loads if load.latency]
    if record.latency is None or record.traffic is None:
        return []
    return [Load(record.traffic, 0.0, record.latency.duration_s, [], record.latency)]


def repeats_of(records: Iterable[RunRecord]) -> dict[Traffic, list[Load]]:
    """Loads by what was sent, in the order sent: repeats of each other. A load sent once is a warm-up, and left out."""
    found: dict[Traffic, list[Load]] = {}
    for record in records:
        for load in loads_of(record):
            found.setdefault(load.traffic, []).append(load)
    return {traffic: loads for traffic, loads in found.items() if len(loads) > 1}


def p99(loads: Iterable[Load], name: str) -> list[float]:
    """The 99th percentile in ms of ``ttft`` or ``itl``, load by load."""
    return [getattr(load.latency, f"{name}_ms")["p99"] for load in loads]
