"""Load through ``vllm bench serve``."""

import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path

from memlab.errors import ServerError, TrafficError
from memlab.record import Latency, Traffic
from memlab.warm import load_generator

PERCENTILES = "50,90,99"


def send(
    server,
    traffic: Traffic,
    model: str,
    folder: Path,
    seed: int = 0,
    tick=None,
    on_start=lambda: None,
) -> Latency | None:
    """Send ``traffic`` to a server with vLLM's own load generator and wait for the end.

    ``on_start`` is called when it begins to send: the first load of all waits until the generator is imported. Returns
    None where the server ended under it (the caller's log says why).

    Raises:
        TrafficError: where the load generator itself fails.
    """
    if traffic.prompt_logprobs is not None:
        return _send_whole(server, traffic, model, seed, tick, on_start)
    result = folder / "bench.json"
    result.unlink(missing_ok=True)
    arguments = [
        *("bench", "serve", "--base-url", server.url, "--model", model, "--seed", str(seed)),
        *(_two_kinds(traffic, folder, seed) if traffic.long_prompts else _one_kind(traffic)),
        *("--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"),
        *("--result-dir", str(folder), "--result-filename", result.name),
        *("--percentile-metrics", "ttft,itl,e2el", "--metric-percentiles", PERCENTILES),
    ]
    if traffic.concurrency:
        arguments += ["--max-concurrency", str(traffic.concurrency)]

    def watch(line: str) -> None:
        if "Starting main benchmark run" in line:  # vllm/benchmarks/serve.py, 0.26 to 0.33
            on_start()

    with load_generator() as generator:
        generator.begin(arguments, folder / "bench.log", watch)
        start = time.perf_counter()
        while (code := generator.wait(0.5)) is None:
            if not server.alive:
                return None
            if tick:
                tick("traffic", time.perf_counter() - start)
    if not result.exists():
        time.sleep(1)  # a server that is dying takes the load generator with it first
        if not server.alive or not server.healthy():
            return None
        tail = "\n".join((folder / "bench.log").read_text(errors="replace").splitlines()[-15:])
        raise TrafficError(f"vllm bench serve ended with code {code} and no result; its last lines:\n{tail}")
    found = json.loads(result.read_text())
    return latency(found, kinds_of(traffic, seed) if traffic.long_prompts else ())


def _one_kind(traffic: Traffic) -> list[str]:
    """Arguments for requests of random tokens, all of them alike."""
    prefix = traffic.shared_prefix_tokens or 0
    arguments = [
        *("--dataset-name", "random", "--num-prompts", str(traffic.requests)),
        *("--random-input-len", str(traffic.input_tokens - prefix), "--random-output-len", str(traffic.output_tokens)),
        *("--random-prefix-len", str(prefix), "--random-range-ratio", str(traffic.range_ratio or 0)),
    ]
    return arguments + (["--request-rate", str(traffic.requests_per_s)] if traffic.requests_per_s else [])


def _two_kinds(traffic: Traffic, folder: Path, seed: int) -> list[str]:
    """Arguments for a trace of arrivals, written to ``folder``: the one data set of the load generator that takes each
    request's second and lengths, and sends token ids (vllm/benchmarks/datasets/datasets.py, TimedTrace, 0.32).

    A prompt is made from its hashes, each for ``chunk`` tokens: one hash of its own for each prompt, so that none is in
    the prefix cache.
    """
    requests = arrivals(traffic, seed)
    file = folder / "arrivals.jsonl"
    lines = (
        {"timestamp": at, "input_length": read, "output_length": written, "hash_ids": [seed * 1_000_000 + number]}
        for number, (at, read, written) in enumerate(requests)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    chunk = max(read for _, read, _ in requests)
    return [
        *("--dataset-name", "timed_trace", "--dataset-path", str(file), "--num-prompts", str(len(requests))),
        *("--timed-trace-chunk-hash-size", str(chunk)),
    ]


def arrivals(traffic: Traffic, seed: int = 0) -> list[tuple[float, int, int]]:
    """Each request of a load of two kinds, in order: its second, the tokens of its prompt and of its answer.

    The short ones come at random intervals of a mean rate, or all at the beginning; the long ones at fixed times.
    """
    chance, long = random.Random(seed), traffic.long_prompts
    waits = [chance.expovariate(traffic.requests_per_s or math.inf) for _ in range(traffic.requests)]
    short = [(at, traffic.input_tokens, traffic.output_tokens) for at in itertools.accumulate(waits)]
    times = (long.every_s * (1 + number // long.at_once) for number in range(long.requests))
    return sorted([*short, *((at, long.input_tokens, long.output_tokens) for at in times)], key=lambda each: each[0])


def kinds_of(traffic: Traffic, seed: int = 0) -> list[str]:
    """``short`` or ``long`` for each request of ``arrivals``."""
    long = [traffic.long_prompts.input_tokens, traffic.long_prompts.output_tokens]
    return ["long" if lengths == long else "short" for _, *lengths in arrivals(traffic, seed)]


def _send_whole(server, traffic: Traffic, model: str, seed: int, tick, on_start) -> Latency | None:
    """Requests whose answers come in one piece: vLLM gives log-probabilities of a prompt no other way, and its load
    generator only streams (vllm/entrypoints/openai/completion/protocol.py, 0.32). The prompt is sent as token ids.
    """
    chance = random.Random(seed)
    body = {"model": model, "max_tokens": traffic.output_tokens, "ignore_eos": True, "temperature": 0}
    body["prompt_logprobs"] = traffic.prompt_logprobs
    prompts = [[chance.randrange(2, 200) for _ in range(traffic.input_tokens)] for _ in range(traffic.requests)]

    def ask(prompt: list[int]) -> float | None:
        began = time.perf_counter()
        try:
            answer = server.post("/v1/completions", {**body, "prompt": prompt}, timeout_s=300)
        except ServerError:
            return None
        return time.perf_counter() - began if answer.get("choices") else None

    on_start()
    start = time.perf_counter()
    with futures.ThreadPoolExecutor(traffic.concurrency or traffic.requests) as pool:
        waiting = {pool.submit(ask, prompt) for prompt in prompts}
        sent = set(waiting)
        while waiting:
            _, waiting = futures.wait(waiting, timeout=0.5)
            if tick:
                tick("traffic", time.perf_counter() - start)
            if not server.alive:
                for one in waiting:
                    one.cancel()
    took = time.perf_counter() - start
    times = sorted(1000 * second for one in sent if not one.cancelled() and (second := one.result()) is not None)
    if not times and not server.alive:
        return None
    read, written = len(times) * traffic.input_tokens, len(times) * traffic.output_tokens
    return Latency(
        ttft_ms={},
        itl_ms={},
        e2el_ms={name.removesuffix("_ms"): value for name, value in _summary(times, "").items()},
        completed=len(times),
        failed=traffic.requests - len(times),
        duration_s=round(took, 4),
        output_tokens_per_s=round(written / took, 2),
        total_tokens_per_s=round((read + written) / took, 2),
        input_tokens=read,
        output_tokens=written,
    )


def _summary(times_ms: list[float], name: str) -> dict[str, float]:
    """Mean and percentiles under the keys that ``vllm bench serve`` gives them; none of no times."""
    if not times_ms:
        return {}
    quantiles = statistics.quantiles(times_ms, n=100, method="inclusive") if len(times_ms) > 1 else times_ms * 99
    picked = {"mean": statistics.fmean(times_ms)} | {f"p{p}": quantiles[int(p) - 1] for p in PERCENTILES.split(",")}
    return {f"{key}{name and '_'}{name}_ms": round(value, 3) for key, value in picked.items()}


def _of_kind(result: dict, kinds: Sequence[str], kind: str) -> dict:
    """The part of a result that is of one kind of requests, with summaries of its own."""
    asked = [number for number, each in enumerate(kinds) if each == kind]
    answered = [number for number in asked if result["output_lens"][number]]
    part = {name: [result[name][number] for number in answered] for name in ("ttfts", "itls", "output_lens")}
    read = sum(result["input_lens"][number] for number in answered)
    written, took = sum(part["output_lens"]), result["duration"]
    times = list(zip(part["ttfts"], part["itls"], strict=True))
    return {
        **part,
        **_summary([1000 * first for first, _ in times], "ttft"),
        **_summary([1000 * gap for _, gaps in times for gap in gaps], "itl"),
        **_summary([1000 * (first + sum(gaps)) for first, gaps in times], "e2el"),
        "completed": len(answered),
        "failed": len(asked) - len(answered),
        "duration": took,
        "total_input_tokens": read,
        "total_output_tokens": written,
        "output_throughput": written / took,
        "total_token_throughput": (read + written) / took,
    }


def latency(result: dict, kinds: Sequence[str] = ()) -> Latency:
    """The result of ``vllm bench serve`` (its JSON, seconds inside lists, milliseconds in summaries).

    ``kinds`` has the kind of each request, of a load of several.
    """

    def summary(name: str) -> dict[str, float]:
        keys = {"mean": f"mean_{name}_ms"} | {f"p{p}": f"p{p}_{name}_ms" for p in PERCENTILES.split(",")}
        return {key: round(result[source], 3) for key, source in keys.items() if source in result}

    answered = [number for number, tokens in enumerate(result.get("output_lens", [])) if tokens][:500]

    def tpot(number: int) -> float:  # as vllm/benchmarks/serve.py:627-635 (0.32) has it for --goodput
        more = result["output_lens"][number] - 1
        return 1000 * sum(result["itls"][number]) / more if more else 0.0

    itls = sorted(value * 1000 for request in result.get("itls", []) for value in request)
    quantiles = statistics.quantiles(itls, n=100, method="inclusive") if len(itls) > 1 else []
    return Latency(
        ttft_ms=summary("ttft"),
        itl_ms=summary("itl"),
        e2el_ms=summary("e2el"),
        ttft_samples_ms=[round(1000 * result["ttfts"][number], 2) for number in answered],
        tpot_samples_ms=[round(tpot(number), 2) for number in answered],
        output_samples_tokens=[result["output_lens"][number] for number in answered],
        itl_quantiles_ms=[round(value, 2) for value in [*itls[:1], *quantiles, *itls[-1:]]] if quantiles else [],
        longest_itl_samples_ms=[round(1000 * max(gaps), 2) for gaps in result.get("itls", []) if gaps][:500],
        by_kind={kind: latency(_of_kind(result, kinds, kind)) for kind in dict.fromkeys(kinds)},
        completed=result["completed"],
        failed=result.get("failed", 0),
        duration_s=round(result["duration"], 4),
        output_tokens_per_s=round(result["output_throughput"], 2),
        total_tokens_per_s=round(result["total_token_throughput"], 2),
        input_tokens=result["total_input_tokens"],
        output_tokens=result["total_output_tokens"],
    )
