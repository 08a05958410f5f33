"""Load through ``vllm bench serve``."""

import json
import random
import statistics
import subprocess
import time
from concurrent import futures
from pathlib import Path

from memlab.errors import ServerError, TrafficError
from memlab.record import Latency, Traffic
from memlab.warm import Warm, start_vllm

PERCENTILES = "50,90,99"


def send(
    server,
    traffic: Traffic,
    model: str,
    folder: Path,
    seed: int = 0,
    tick=None,
    on_start=lambda: None,
    warm: Warm | None = None,
) -> Latency | None:
    """Send ``traffic`` to a server with vLLM's own load generator and wait for the end.

    The generator takes some seconds to start, unless a ``warm`` process is there for it; ``on_start`` is called when it
    begins to send. Returns None where the server ended under it (the caller's log says why).

    Raises:
        TrafficError: where the load generator itself fails.
    """
    if traffic.prompt_logprobs is not None:
        return _send_whole(server, traffic, model, seed, tick, on_start)
    result = folder / "bench.json"
    result.unlink(missing_ok=True)
    prefix = traffic.shared_prefix_tokens or 0
    arguments = [
        *("bench", "serve"),
        *("--base-url", server.url, "--model", model, "--dataset-name", "random"),
        *("--random-input-len", str(traffic.input_tokens - prefix), "--random-output-len", str(traffic.output_tokens)),
        *("--random-prefix-len", str(prefix), "--random-range-ratio", str(traffic.range_ratio or 0)),
        *("--num-prompts", str(traffic.requests), "--seed", str(seed)),
        *("--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"),
        *("--result-dir", str(folder), "--result-filename", result.name),
        *("--percentile-metrics", "ttft,itl,e2el", "--metric-percentiles", PERCENTILES),
    ]
    if traffic.concurrency:
        arguments += ["--max-concurrency", str(traffic.concurrency)]
    if traffic.requests_per_s:
        arguments += ["--request-rate", str(traffic.requests_per_s)]

    def watch(line: str) -> None:
        if "Starting main benchmark run" in line:  # vllm/benchmarks/serve.py, 0.26 to 0.33
            on_start()

    env = {**(warm.env if warm else {}), "CUDA_VISIBLE_DEVICES": ""}
    bench = start_vllm(arguments, env, folder / "bench.log", watch, warm)
    try:
        start = time.perf_counter()
        while bench.poll() is None:
            if not server.alive:
                return None
            if tick:
                tick("traffic", time.perf_counter() - start)
            try:
                bench.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
        code = bench.wait(10)
    finally:
        bench.stop()
    if not result.exists():
        time.sleep(1)  # a server that is dying takes the load generator with it first
        if not server.alive or not server.healthy():
            return None
        tail = "\n".join((folder / "bench.log").read_text(errors="replace").splitlines()[-15:])
        raise TrafficError(f"vllm bench serve ended with code {code} and no result; its last lines:\n{tail}")
    return latency(json.loads(result.read_text()))


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
    quantiles = statistics.quantiles(times, n=100, method="inclusive") if len(times) > 1 else times * 99
    picked = {f"p{p}": round(quantiles[int(p) - 1], 3) for p in PERCENTILES.split(",")} if times else {}
    read, written = len(times) * traffic.input_tokens, len(times) * traffic.output_tokens
    return Latency(
        ttft_ms={},
        itl_ms={},
        e2el_ms={"mean": round(statistics.fmean(times), 3), **picked} if times else {},
        completed=len(times),
        failed=traffic.requests - len(times),
        duration_s=round(took, 4),
        output_tokens_per_s=round(written / took, 2),
        total_tokens_per_s=round((read + written) / took, 2),
        input_tokens=read,
        output_tokens=written,
    )


def latency(result: dict) -> Latency:
    """The result of ``vllm bench serve`` (its JSON, seconds inside lists, milliseconds in summaries)."""

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
        completed=result["completed"],
        failed=result.get("failed", 0),
        duration_s=round(result["duration"], 4),
        output_tokens_per_s=round(result["output_throughput"], 2),
        total_tokens_per_s=round(result["total_token_throughput"], 2),
        input_tokens=result["total_input_tokens"],
        output_tokens=result["total_output_tokens"],
    )
