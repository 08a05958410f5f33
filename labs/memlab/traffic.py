"""Load through ``vllm bench serve``, and vLLM's own metrics while it runs."""

import contextlib
import json
import statistics
import subprocess
import threading
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from memlab.errors import MemlabError, TrafficError
from memlab.record import KVCache, Latency, Series, Traffic
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


def metrics(text: str) -> dict[str, float]:
    """The gauges and counters of a ``/metrics`` page that a memory lab needs, summed over engines."""
    wanted = {
        "vllm:kv_cache_usage_perc": "kv_cache_usage",
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:num_preemptions_total": "preemptions",
        "vllm:prefix_cache_queries_total": "prefix_cache_queries",
        "vllm:prefix_cache_hits_total": "prefix_cache_hits",
    }
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in wanted:
                found[wanted[sample.name]] = found.get(wanted[sample.name], 0.0) + sample.value
    return found


def kv_cache(text: str) -> KVCache | None:
    """The pool as ``vllm:cache_config_info`` states it on a ``/metrics`` page (0.26 to 0.33)."""
    for family in text_string_to_metric_families(text):
        if family.name == "vllm:cache_config_info" and family.samples:
            labels = family.samples[0].labels

            def number(name, kind, labels=labels):
                try:
                    return kind(labels.get(name, ""))
                except ValueError:
                    return None

            return KVCache(
                tokens=number("kv_cache_size_tokens", int),
                blocks=number("num_gpu_blocks", int),
                block_size=number("block_size", int),
                max_concurrency=number("kv_cache_max_concurrency", float),
            )
    return None


class Scraper:
    """Reads ``/metrics`` a few times a second in a thread; ``series()`` has what was seen."""

    def __init__(self, server, rate_hz: float = 4.0, limit: int = 400):
        self.server, self.period, self.limit = server, 1 / rate_hz, limit
        self.rows: list[tuple[float, dict[str, float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics scraper", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(MemlabError, ValueError):  # busy or ending: the next round tells
                self.rows.append((self.server.now(), metrics(self.server.get("/metrics"))))
            if len(self.rows) > self.limit:  # coarser from here on, evenly
                self.rows, self.period = self.rows[::2], self.period * 2
            self._stop.wait(self.period)

    def series(self, since_s: float = 0.0) -> Series | None:
        """What was seen from ``since_s`` on, on the server's clock; None where nothing was."""
        rows = [(at, row) for at, row in self.rows if at >= since_s]
        if not rows:
            return None
        columns = ("kv_cache_usage", "running", "waiting", "preemptions")
        values = {name: [round(row.get(name, 0.0), 4) for _, row in rows] for name in columns}
        return Series(time_s=[round(at, 2) for at, _ in rows], **values)
