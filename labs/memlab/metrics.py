"""What a vLLM server tells of itself on its ``/metrics`` page, at one moment and over time."""

import contextlib
import math
import threading
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from memlab.errors import MemlabError
from memlab.record import KVCache, Series
from memlab.vllm_log import clean

_SUMMED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
}
_USAGE, _CONFIG, _PYTHON = "vllm:kv_cache_usage_perc", "vllm:cache_config_info", "python_info"
_NAMES = (*_SUMMED, _USAGE, _CONFIG, _PYTHON)
_COLUMNS = ("kv_cache_usage", "running", "waiting", "preemptions")


@dataclass(frozen=True)
class Metrics:
    """A ``/metrics`` page of vLLM 0.26 to 0.33; None is what it does not tell.

    With data parallelism it has a line for each of ``engines``. Requests and tokens are summed over them.
    ``kv_cache_usage`` (0 to 1) is that of the fullest: each engine has a pool of its own, and preempts when that one is
    full, however empty the others are. A sum would pass 1, a mean would hide it. ``kv`` is the pool of one engine.
    """

    engines: int = 1
    kv_cache_usage: float | None = None
    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    model: str | None = None
    python: str | None = None
    config: dict[str, str] | None = None
    kv: KVCache | None = None


def read(text: str) -> Metrics | None:
    """The page's figures; None where it is no page of vLLM's engine.

    Anybody may have written it: only the lines with wanted names are parsed, so that a page of any length costs little,
    and its words are cleaned.
    """
    wanted = [row for row in text.split("\n") if row.startswith(_NAMES) and len(row) < 16_384][:2000]
    if not any(row.startswith("vllm:") for row in wanted):
        return None
    page = "\n".join(wanted) + "\n"
    try:
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except Exception:  # what the parser raises is not listed
        return None
    running = sum(sample.name == "vllm:num_requests_running" for sample in samples)
    found: dict[str, object] = {"engines": max(1, running)}
    for sample in samples:
        if sample.name in _SUMMED and math.isfinite(sample.value):
            name = _SUMMED[sample.name]
            found[name] = found.get(name, 0.0) + sample.value
        elif sample.name == _USAGE and math.isfinite(sample.value):
            found["kv_cache_usage"] = max(found.get("kv_cache_usage", 0.0), sample.value)
        elif sample.name == _CONFIG and "config" not in found:
            found["config"] = {clean(key, 60): clean(value, 60) for key, value in sample.labels.items()}
            found["kv"] = _pool(sample.labels)
        elif sample.name == _PYTHON:
            found["python"] = clean(sample.labels.get("version", ""), 40)
        if sample.name.startswith("vllm:") and "model_name" in sample.labels:
            found.setdefault("model", clean(sample.labels["model_name"]))
    return Metrics(**found)


def _pool(labels: dict[str, str]) -> KVCache:
    """The pool as the labels of ``vllm:cache_config_info`` state it."""
    return KVCache(
        tokens=label_number(labels.get("kv_cache_size_tokens"), int),
        blocks=label_number(labels.get("num_gpu_blocks"), int),
        block_size=label_number(labels.get("block_size"), int),
        max_concurrency=label_number(labels.get("kv_cache_max_concurrency"), float),
    )


def label_number(text: object, kind):
    """A label's number; None for ``None``, for no number and for one that JSON cannot hold."""
    with contextlib.suppress(ValueError, TypeError):
        value = kind(text)
        return value if math.isfinite(value) else None
    return None


def series(rows: list[tuple[float, Metrics]]) -> Series | None:
    """The pages that were read, with their seconds, as a record keeps them; None where none told all of it."""
    told = [(at, [getattr(row, name) for name in _COLUMNS]) for at, row in rows]
    told = [(at, values) for at, values in told if None not in values]
    if not told:
        return None
    columns = zip(*([round(value, 4) for value in values] for _, values in told), strict=True)
    return Series([round(at, 2) for at, _ in told], *map(list, columns))


class Scraper:
    """Reads ``/metrics`` a few times a second in a thread; ``series()`` has what was seen."""

    def __init__(self, server, rate_hz: float = 4.0, limit: int = 400):
        self.server, self.period, self.limit = server, 1 / rate_hz, limit
        self.rows: list[tuple[float, Metrics]] = []
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
            with contextlib.suppress(MemlabError):  # busy or ending: the next round tells
                at, found = self.server.now(), read(self.server.get("/metrics"))
                if found is not None:
                    self.rows.append((at, found))
            if len(self.rows) > self.limit:  # coarser from here on, evenly
                self.rows, self.period = self.rows[::2], self.period * 2
            self._stop.wait(self.period)

    def series(self, since_s: float = 0.0) -> Series | None:
        """What was seen from ``since_s`` on, on the server's clock; None where nothing was."""
        return series([(at, row) for at, row in self.rows if at >= since_s])
