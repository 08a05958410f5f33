"""Load through ``vllm bench serve``."""

import json
import statistics
import subprocess
import time
from pathlib import Path

from memlab.errors import TrafficError
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


def latency(result: dict) -> Latency:
    """The result of ``vllm bench serve`` (its JSON, seconds inside lists, milliseconds in summaries)."""

    def summary(name: str) -> dict[str, float]:
        keys = {"mean": f"mean_{name}_ms"} | {f"p{p}": f"p{p}_{name}_ms" for p in PERCENTILES.split(",")}
        return {key: round(result[source], 3) for key, source in keys.items() if source in result}

    itls = sorted(value * 1000 for request in result.get("itls", []) for value in request)
    quantiles = statistics.quantiles(itls, n=100, method="inclusive") if len(itls) > 1 else []
    return Latency(
        ttft_ms=summary("ttft"),
        itl_ms=summary("itl"),
        e2el_ms=summary("e2el"),
        ttft_samples_ms=[round(value * 1000, 2) for value in result.get("ttfts", [])][:500],
        itl_quantiles_ms=[round(value, 2) for value in [*itls[:1], *quantiles, *itls[-1:]]] if quantiles else [],
        completed=result["completed"],
        failed=result.get("failed", 0),
        duration_s=round(result["duration"], 4),
        output_tokens_per_s=round(result["output_throughput"], 2),
        total_tokens_per_s=round(result["total_token_throughput"], 2),
        input_tokens=result["total_input_tokens"],
        output_tokens=result["total_output_tokens"],
    )
