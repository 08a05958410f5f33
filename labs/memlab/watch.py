"""``watch``: look at a vLLM server that somebody runs, from outside, and keep a record of what was seen.

Read-only: it gets four pages of the server, reads the driver, ``/proc`` and the log, sends no load and no signal. What
cannot be known is absent, and a note says what would show it. All text is scrubbed before it reaches the record.
"""

import contextlib
import getpass
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from memlab import flags, gpu, host, lab, ledger, metrics, record, shapes, vllm_log
from memlab.attach import (
    PERIOD_S,
    ROWS,
    Client,
    LogReader,
    Poller,
    Process,
    Unreachable,
    find_pid,
    public_extra,
    read_shape,
    torch_version,
    version_text,
)
from memlab.errors import MemlabError
from memlab.metrics import Metrics, label_number
from memlab.record import Engine, Flags, KVCache, Machine, Model, Rank, RunRecord, Series
from memlab.screen import FOREIGN_GIB, Gauge, Sight, View, frame, line, weak_spot
from memlab.units import show_gib
from memlab.vllm_log import clean

GONE_AFTER = 3  # connections refused in a row, where no process is seen
DEVICE_HZ = 20.0
HOST_HZ = 1.0  # the kernel walks a process's pages to tell its share


class Watch:
    """One watch, from the first look to the record.

    Raises:
        MemlabError: where nothing answers at ``url`` (unless ``pid`` names a server that may still be starting), where
            the answer is not vLLM's, and for a ``pid`` or ``log`` that cannot be read.
    """

    def __init__(self, url: str, pid: int | None = None, log: Path | None = None):
        self.client = Client(url)
        self.origin = time.perf_counter()
        self.started = datetime.now(UTC)
        self.notes: list[str] = []
        self.version: str | None = None
        self.served: dict = {}
        self._questions = 5  # a server behind a key may never answer them
        self.poller = Poller(self.client, self.origin)
        self._first_look(pid is not None)
        self.process = self._find(pid)
        self.reader = self._read_log(log)
        self.sampler: gpu.Sampler | None = None
        self.devices: list[gpu.Device] = []
        self.backend: str | None = None
        self.torch: str | None = None
        self.shape: shapes.ModelShape | None = None
        self.prediction: ledger.Prediction | None = None
        self.resolved: flags.ServeFlags | None = None
        self._predicted = False
        self.baselines: list[float | None] = []
        self.foreign: list[float | None] = []
        self.others: list[float | None] = []  # what the driver shows of other processes, at the first look
        self.used_gib: list[float] = []
        self.machine = Machine("unseen", gpu=None, gpu_count=None, total_gib=None)
        self._bases: list[float] = []
        self.outcome, self.error = "ok", None

    def now(self) -> float:
        """Seconds since the watch began."""
        return time.perf_counter() - self.origin

    # the first look

    def _first_look(self, may_be_starting: bool) -> None:
        try:
            page = self.client.get("/metrics")
        except Unreachable as error:
            if may_be_starting:
                return
            if error.status is not None:
                raise MemlabError(self._no_vllm(f"{error}")) from error
            raise MemlabError(
                f"nothing answers at {self.client.url} ({error}): is the server up, and on this port? Name it with "
                "--url; a server that is still starting is watched with --pid"
            ) from error
        found = metrics.read(page)
        if found is None:
            raise MemlabError(self._no_vllm("its /metrics has no vllm: figures"))
        self.poller.keep(self.now(), found)

    def _no_vllm(self, why: str) -> str:
        return (
            f"{self.client.url} answers, but not as vLLM ({why}): name vLLM's own address with --url. A server "
            "started with --disable-log-stats has no metrics: start it without"
        )

    def _ask(self) -> None:
        """Version and model, once they can be had."""
        with contextlib.suppress(Unreachable, ValueError, AttributeError, RecursionError):
            if self.version is None:
                self.version = version_text(json.loads(self.client.get("/version")).get("version"))
        with contextlib.suppress(Unreachable, ValueError, AttributeError, TypeError, RecursionError):
            if not self.served:
                models = json.loads(self.client.get("/v1/models")).get("data")
                served = next(one for one in models[:50] if isinstance(one, dict) and not one.get("parent"))
                self.served = {key: served.get(key) for key in ("id", "root", "max_model_len")}

    def _find(self, pid: int | None) -> Process | None:
        if pid is None:
            pid, note = find_pid(self.client.url)
            if pid is None:
                self.notes.append(note)
                return None
            try:
                return Process(pid)
            except MemlabError as error:
                self.notes.append(f"{error}.")
                return None
        named = Process(pid)
        listening = find_pid(self.client.url)[0] if self.poller.recent else None
        if listening not in (None, named.pid):
            raise MemlabError(f"process {named.pid} does not serve {self.client.url}: that is process {listening}")
        return named

    def _read_log(self, log: Path | None) -> LogReader | None:
        found = log or (self.process.log() if self.process else None)
        if found is None:
            self.notes.append("The stated ledger is not seen: pass --log, the file that the server's output goes to.")
            return None
        return LogReader(found, self.now)

    def _attach_memory(self) -> None:
        """Find out where the server's memory is, and watch it; tried again until it is there."""
        process = self.process
        if process is None or self.sampler is not None or not process.alive:
            return
        maps = process.maps()
        self.torch = self.torch or torch_version(maps)
        devices = gpu.devices()
        own = set(process.pids())
        used = [d for d in devices if any(p.pid in own for p in gpu.processes(d.uuid) or ())]
        on_cpu = self._engine().get("device") == "cpu" or not devices
        if not used and not on_cpu and "libcuda.so" in maps:
            # In a container the driver shows other process ids.
            named = "CUDA_VISIBLE_DEVICES" in process.variables or len(devices) == 1
            used = gpu.visible(process.variables) if named else []
        starting = not self.poller.recent and process.given and len(used) < process.given.world_size
        if used and not starting:
            self.backend, self.devices = "cuda", used
            now = [gpu.used_gib(device.uuid) for device in used]
            held = [self._own_gib(device.uuid) for device in used]
            self.baselines = [None if h is None else n - h for n, h in zip(now, held, strict=True)]
            self.others = [self._others_gib(device.uuid) for device in used]
            self._bases = [baseline or 0.0 for baseline in self.baselines]
            self.foreign = list(self.baselines)
            uuids = [device.uuid for device in used]
            self.sampler = gpu.watch_devices(uuids, DEVICE_HZ, baselines_gib=self._bases, on_sample=self._sampled)
            if None in self.baselines:
                self.notes.append("The driver does not show whose memory it is: all that is in use is shown.")
        elif not used and on_cpu and "libtorch" in maps and "libcuda.so" not in maps:
            self.backend = "cpu"
            self.baselines = self._bases = [0.0]
            self.sampler = gpu.watch_host(process.pids, HOST_HZ, on_sample=self._sampled)
        else:
            return
        self.machine = lab.this_machine(self.backend, self.devices or None)
        self.sampler.__enter__()
        self.sampler.origin = self.origin

    def _sampled(self, _, used_gib: list[float]) -> None:
        self.used_gib = used_gib

    def _own_gib(self, uuid: str) -> float | None:
        """What the server's processes hold on a GPU; None where the driver does not tell."""
        own = set(self.process.pids())
        held = [p.used_gib for p in gpu.processes(uuid) or () if p.pid in own]
        return None if not held or None in held else sum(held)

    def _others_gib(self, uuid: str) -> float | None:
        own = set(self.process.pids())
        others = gpu.foreign(uuid, own)
        held = [process.used_gib for process in others or ()]
        return None if others is None or None in held else round(sum(held), 4)

    def _engine(self) -> dict:
        return vllm_log.engine(self.reader.events) if self.reader else {}

    def _predict(self) -> None:
        """The flags as vLLM fills them in and, on a GPU, the planner's ledger; once flags and memory are seen."""
        process, length = self.process, self._max_model_len()
        version = self.version or self._engine().get("vllm_version")
        known = process is not None and process.given is not None and None not in (self.backend, length, version)
        if self._predicted or not known:
            return
        self._predicted = True
        name = process.model or self.served.get("root")
        folder = process.folder(name) if isinstance(name, str) else None
        self.shape = read_shape(folder) if folder else None
        with contextlib.suppress(MemlabError, ValueError, TypeError, ArithmeticError):
            asked = process.given.with_(max_model_len=length)
            self.resolved = record.resolve(asked, self.machine, self.backend, version, length)
            if self.shape and self.backend == "cuda":
                total = self.machine.total_gib
                capability = tuple(self.machine.compute_capability or ()) or None
                self.prediction = ledger.predict(
                    self.shape, total, self.resolved, record.version_of(version), capability=capability
                )

    def _max_model_len(self) -> int | None:
        for stated in (self.served.get("max_model_len"), self._engine().get("max_model_len")):
            if isinstance(stated, int) and not isinstance(stated, bool) and 0 < stated < 1 << 40:
                return stated
        return None

    # while it lasts

    def __enter__(self):
        self.poller.start()
        if self.reader:
            self.reader.start()
        self.look()
        return self

    def __exit__(self, *exception):
        self.poller.stop()
        if self.reader:
            self.reader.stop()
        if self.sampler:
            self.sampler.stop()

    def look(self) -> None:
        """What is not asked each second by the threads: the pages still missing, the memory, the others on the GPUs."""
        if self._questions and self.poller.recent and (self.version is None or not self.served):
            self._questions -= 1
            self._ask()
        self._attach_memory()
        self._predict()
        for number, used in enumerate(self.used_gib if self.devices else ()):
            own = self._own_gib(self.devices[number].uuid)
            if own is not None:
                self.foreign[number] = used - own

    def ended(self) -> bool:
        """Whether the server is gone; then ``outcome`` and ``error`` say how, as far as the log tells."""
        gone = not self.process.alive if self.process else self.poller.refused >= GONE_AFTER
        if not gone:
            return False
        if self.reader:
            self.reader.finish()
        error = lab.decisive_error(self.reader.events) if self.reader else None
        if error is not None:
            otherwise = "died" if self.poller.recent else "failed_to_start"
            self.outcome = "out_of_memory" if vllm_log.is_out_of_memory(error) else otherwise
            self.error = vllm_log.scrub(clean(error.text, 1000))
        elif self.poller.dead:
            self.outcome, self.error = "died", "the engine was dead (HTTP 503) before the server ended; no log says why"
        else:
            why = "its log has no error" if self.reader else "no log says why: pass --log next time"
            self.outcome, self.error = "stopped", f"the server ended during the watch; {why}"
        return True

    def latest(self) -> Metrics:
        return self.poller.recent[-1][1] if self.poller.recent else Metrics()

    def ledgers(self) -> list[dict[str, ledger.MemoryLedger]]:
        """The ledgers of each rank by view: what is known of them."""
        events = self.reader.events[:] if self.reader else []
        names = vllm_log.ranks(events) or [None]
        timelines = self.sampler.timelines() if self.sampler else []
        found = []
        for number in range(max(1, len(timelines))):
            name = names[number] if number < len(names) else names[0]
            views = {"predicted": self.prediction.ledger if self.prediction else None}
            stated = vllm_log.stated_ledger(events, name)
            if stated is not None and not all(identity.holds for identity in stated.identities()):
                stated = None  # of a version that is not understood, or of several servers in one file
            views["stated"] = stated or self._stated_by_metrics()
            if timelines and timelines[number].used_gib:
                total = self.devices[number].total_gib if self.devices else None
                free = vllm_log.free_at_start_gib(events)
                seen = lab.seen_ledger(timelines[number], views["stated"], total, self.baselines[number], free)
                if (seen.context_gib or 0.0) < 0:  # others came or went between vLLM's first look and this one
                    seen = replace(seen, context_gib=None, budget_gib=None, unprofiled_gib=None)
                views["seen"] = seen
            found.append({view: one for view, one in views.items() if one is not None and one.known()})
        return found

    def _stated_by_metrics(self) -> ledger.MemoryLedger | None:
        given = label_number((self.latest().config or {}).get("kv_cache_memory_bytes"), int)
        return None if given is None else ledger.MemoryLedger("stated", kv_cache_gib=given / (1 << 30), pool_given=True)

    def _pool(self) -> KVCache | None:
        stated = self.latest().kv
        if stated is None and self.reader:
            told = vllm_log.stated_kv(self.reader.events[:])
            if (told.tokens, told.blocks) != (None, None):
                stated = KVCache(told.tokens, told.blocks, told.block_size, told.max_concurrency)
        if stated is not None and stated.tokens is None and None not in (stated.blocks, stated.block_size):
            stated = replace(stated, tokens=stated.blocks * stated.block_size)
        return stated

    def sight(self, ledgers: list[dict]) -> tuple[Sight, int]:
        """What the rule looks at, of the rank with the least headroom, and that rank's number."""
        now, pool = self.latest(), self._pool()
        preempted = self.poller.change("preemptions", 60)
        seen = [views.get("seen") for views in ledgers]
        left = [(one.headroom_gib, number) for number, one in enumerate(seen) if one and one.headroom_gib is not None]
        number = min(left)[1] if left else 0
        growth = None
        if self.devices and None not in (self.foreign[number], self.baselines[number]):
            growth = self.foreign[number] - self.baselines[number]
        unprofiled = seen[number].unprofiled_gib if seen[number] else None
        if None not in (unprofiled, growth):
            unprofiled -= max(0.0, growth)
        return Sight(
            backend=self.backend,
            card=f"GPU {self.devices[number].index}" if self.devices else "the card",
            headroom_gib=seen[number].headroom_gib if seen[number] else None,
            unprofiled_gib=unprofiled,
            foreign_growth_gib=growth,
            host_free_gib=host.memory().available_gib if self.process else None,
            kv_usage=now.kv_cache_usage,
            pool_tokens=pool.tokens if pool else None,
            running=now.running,
            waiting=now.waiting,
            preempted=preempted[0] if preempted else None,
            engines=now.engines,
            max_num_seqs=self.resolved.max_num_seqs if self.resolved else None,
            max_model_len=self._max_model_len(),
            block_size=pool.block_size if pool else None,
            prefix_caching={"True": True, "False": False}.get((now.config or {}).get("enable_prefix_caching")),
        ), number

    def view(self) -> View:
        """What is shown now."""
        now, ledgers = self.latest(), self.ledgers()
        sight, number = self.sight(ledgers)
        last = self.poller.recent[-1][0] if self.poller.recent else 0.0
        silent = self.now() - last
        queries, hits = (self.poller.change(f"prefix_cache_{name}", 60) for name in ("queries", "hits"))
        share = hits[0] / queries[0] if queries and hits and queries[0] > 0 else None
        error = lab.decisive_error(self.reader.events[:]) if self.reader else None
        notes = [*self.notes, *(self.process.notes if self.process else [])]
        if (sight.foreign_growth_gib or 0.0) >= FOREIGN_GIB:
            grown = show_gib(sight.foreign_growth_gib)
            notes.append(f"The peak holds {grown} that other processes on {sight.card} took since the watch began.")
        return View(
            url=self.client.url,
            watched_s=self.now(),
            weak=weak_spot(sight),
            title=self._title(),
            pid=self.process.pid if self.process else None,
            silent_s=silent if silent > 3 * PERIOD_S else None,
            kv_usage=now.kv_cache_usage,
            pool_tokens=sight.pool_tokens,
            running=now.running,
            waiting=now.waiting,
            preemptions=now.preemptions,
            max_num_seqs=sight.max_num_seqs * sight.engines if sight.max_num_seqs else None,
            prompt_per_s=_rate(self.poller.change("prompt_tokens", 10)),
            generation_per_s=_rate(self.poller.change("generation_tokens", 10)),
            prefix_hits=share,
            memory=tuple(self._gauges(sight.host_free_gib)),
            ledgers=ledgers[number],
            log_error=clean(error.text, 300) if error else None,
            notes=tuple(notes),
        )

    def _title(self) -> tuple[str, ...]:
        version = self.version or self._engine().get("vllm_version")
        parts = [f"vLLM {clean(version, 40)}" if version else "vLLM", self._model_name() or "model not seen"]
        if self.devices:
            count = f"{len(self.devices)} × " if len(self.devices) > 1 else ""
            parts.append(count + clean(self.devices[0].name, 40))
        elif self.backend == "cpu":
            parts.append("CPU backend")
        if self.poller.dead:
            parts.append("the engine is dead (HTTP 503)")
        elif self.reader and self.reader.phase:
            parts.append(self.reader.phase.replace("_", " "))
        elif not self.poller.recent:
            parts.append("does not answer yet")
        return tuple(parts)

    def _model_name(self) -> str | None:
        """The model's name; of a path the last part."""
        known = (self.process.model if self.process else None, self.served.get("root"), self.served.get("id"))
        name = next((one for one in (*known, self.latest().model) if isinstance(one, str) and one.strip()), None)
        if name is None:
            return None
        is_path = name.startswith(("/", "~", ".")) or "\\" in name or name.count("/") > 1
        return clean(re.split(r"[/\\]", name.rstrip("/\\"))[-1] if is_path else name, 80)

    def _gauges(self, host_free_gib: float | None) -> list[Gauge]:
        found = []
        for number, value in enumerate(self.used_gib):
            used, peak = value - self._bases[number], max(self.sampler.timelines()[number].used_gib)
            if self.devices:
                device, foreign = self.devices[number], self.foreign[number]
                own = foreign is not None
                held = min(used, value - foreign) if own else used
                found.append(Gauge(f"GPU {device.index}", held, peak, own, device.total_gib, device.total_gib - value))
            else:
                found.append(Gauge("host", used, peak, True, self.machine.total_gib, host_free_gib))
        return found

    # the record

    def record(self) -> RunRecord:
        """What was seen, scrubbed. What was not seen is absent."""
        ledgers, events = self.ledgers(), self.reader.events[:] if self.reader else []
        engine, machine = vllm_log.engine(events), self.machine
        timelines = self.sampler.timelines() if self.sampler else []
        ranks = []
        for number, views in enumerate(ledgers):
            line_ = timelines[number] if timelines and timelines[number].used_gib else None
            if line_ or views.get("stated"):
                others = self.others[number] if self.others else None
                ranks.append(Rank(views.get("stated"), views.get("seen"), line_, others))
        if ledgers[0].get("stated") and ledgers[0]["stated"].total_gib:
            machine = replace(machine, total_gib=ledgers[0]["stated"].total_gib)
        version = self.version or version_text(engine.get("vllm_version")) or "unknown"
        name = self._model_name() or "unknown"
        slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())[:40].strip("-.")
        spot = weak_spot(self.sight(ledgers)[0])
        made = RunRecord(
            id=f"watch-{machine.name}-{version.lower()}-{slug or 'model'}-{self.started:%Y%m%d-%H%M%S}".replace(
                "+", "-"
            ),
            lab=record.WATCHED,
            recorded_at=self.started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            machine=machine,
            engine=Engine(
                backend=self.backend,
                vllm=version,
                torch=self.torch,
                python=version_text(self.latest().python),
                runner=engine.get("runner"),
                attention=engine.get("attention"),
                sampler=engine.get("sampler"),
                environment=self.process.environment() if self.process else {},
            ),
            model=Model(
                name,
                self._load_format(engine),
                self.shape.to_config() if self.shape else {},
                self.shape.parameters() if self.shape else None,
            ),
            flags=Flags(self._given(), self._resolved(engine, events)),
            outcome=self.outcome,
            ranks=ranks,
            prediction=self.prediction.to_dict() if self.prediction else None,
            phases=self.reader.phases if self.reader else [],
            series=self._series(),
            kv=self._pool(),
            error=self.error,
            finding={"weak_spot": spot.term, "sentence": spot.sentence},
            log=vllm_log.memory_lines(events, limit=20, line_chars=400),
        )
        return scrubbed(made)

    def _load_format(self, engine: dict) -> str | None:
        if self.process and self.process.given and self.process.given.load_format:
            return self.process.given.load_format
        return engine.get("load_format")

    def _given(self) -> dict[str, object]:
        if self.process is None or self.process.given is None:
            return {}
        extra = public_extra(self.process.given.extra)
        return {**self.process.given.set(), **({"extra": extra} if extra else {})}

    def _resolved(self, engine: dict, events: list) -> dict[str, object]:
        """The flags as vLLM states them: by the labels of its cache configuration, and by its log."""
        config = self.latest().config or {}
        stated: dict[str, object] = {
            "gpu_memory_utilization": label_number(config.get("gpu_memory_utilization"), float),
            "block_size": label_number(config.get("block_size"), int),
            "kv_cache_memory_bytes": label_number(config.get("kv_cache_memory_bytes"), int),
            "num_gpu_blocks_override": label_number(config.get("num_gpu_blocks_override"), int),
            "enable_prefix_caching": {"True": True, "False": False}.get(config.get("enable_prefix_caching")),
            "kv_cache_dtype": config.get("cache_dtype"),
            "max_model_len": self._max_model_len(),
        }
        for event in events:
            if event.kind == "chunked_prefill":
                stated["max_num_batched_tokens"] = event.values.get("max_num_batched_tokens")
        for name in ("dtype", "tensor_parallel_size", "pipeline_parallel_size", "enforce_eager", "quantization"):
            stated[name] = engine.get(name)
        return {name: value for name, value in stated.items() if value is not None}

    def _series(self) -> Series | None:
        rows = list(self.poller.rows)
        return metrics.series(rows[:: -(-len(rows) // ROWS)]) if rows else None


def _rate(change: tuple[float, float] | None) -> float | None:
    return change[0] / change[1] if change and change[1] > 0 else None


def scrubbed(found: RunRecord) -> RunRecord:
    """The record without paths, addresses, keys and names of people or machines, in whatever text they stand."""
    names = tuple({socket.gethostname(), getpass.getuser()} - lab.IMPERSONAL)

    def scrub(value):
        if isinstance(value, dict):
            return {key: scrub(element) for key, element in value.items()}
        if isinstance(value, list):
            return [scrub(element) for element in value]
        if not isinstance(value, str):
            return value
        text = clean(vllm_log.scrub(value), 1000)
        return "<private>" if record.privacy_problems(text, names) else text

    data = record.to_dict(found)
    return record.from_dict({key: value if key == "id" else scrub(value) for key, value in data.items()})


# ---- the command ----


class _Output:
    """Shows views: drawn in place on a terminal (each line is written over, the rest is cleared), else a line each.

    Where nobody reads any more, the watch ends as with Ctrl-C.
    """

    def __init__(self, out, live: bool, as_json: bool):
        self.out, self.live, self.as_json, self._height = out, live, as_json, 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.live:
            self._write("\x1b[?25h")

    def show(self, view: View) -> None:
        if not self.live:
            text = json.dumps(_stamped(view)) if self.as_json else line(view)
            return self._write(text + "\n")
        lines = frame(view)
        up = f"\x1b[{self._height}A" if self._height else ""
        self._height = len(lines)
        self._write("\x1b[?25l" + up + "\r" + "".join(f"{one}\x1b[K\n" for one in lines) + "\x1b[J")

    def _write(self, text: str) -> None:
        try:
            self.out.write(text)
            self.out.flush()
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):  # else Python complains of it once more at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.out.fileno())
            raise KeyboardInterrupt from error


def run(url: str, pid: int | None, log: Path | None, seconds: float | None, as_json: bool, out=None) -> int:
    """Watch until Ctrl-C, ``seconds`` or the server's end, then write the record; returns the exit code.

    Raises:
        MemlabError: where the watch cannot begin, or its record cannot be written.
    """
    out = out or sys.stdout
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise MemlabError(f"--seconds {seconds}: say for how long, in seconds, or leave it out")
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")
    live = not as_json and out.isatty() and os.environ.get("TERM") != "dumb"
    watch = Watch(url, pid, log)
    with _interrupted_by_a_hangup():
        with contextlib.suppress(KeyboardInterrupt), watch, _Output(out, live, as_json) as output:
            _loop(watch, seconds, output.show, PERIOD_S if live or as_json else 5 * PERIOD_S)
        made = watch.record()
        path = record.write(made, lab.runs_folder() / record.WATCHED)
        with contextlib.suppress(OSError):
            _say(made, path, as_json, out)
    return 0 if made.outcome in ("ok", "stopped") else 1


def _stamped(view: View) -> dict:
    return {"at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), **view.to_dict()}


def _loop(watch: Watch, seconds: float | None, show, every_s: float) -> None:
    due = watch.now()
    while True:
        watch.look()
        over = watch.ended()
        at_end = seconds is not None and watch.now() >= seconds
        if over or at_end or watch.now() >= due:
            show(watch.view())
            due += every_s * max(1, math.ceil((watch.now() - due) / every_s))
        if over or at_end:
            return
        rest = math.inf if seconds is None else seconds - watch.now()
        time.sleep(max(0.0, min(PERIOD_S, due - watch.now(), rest)))


def _say(made: RunRecord, path: Path, as_json: bool, out) -> None:
    if as_json:
        print(json.dumps({"path": str(path), "record": record.to_dict(made)}), file=out, flush=True)
        return
    error = f"\n  {made.error}" if made.error else ""
    print(f"\nThe watch ended: {lab.summary(made)}.{error}\nrecord    {path}", file=out, flush=True)


@contextlib.contextmanager
def _interrupted_by_a_hangup():
    """SIGTERM and a closed terminal end the watch as Ctrl-C does, so that the record is written."""

    def interrupt(*_):
        raise KeyboardInterrupt

    asked = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]
    if threading.current_thread() is not threading.main_thread():
        asked = []
    before = {number: signal.signal(number, interrupt) for number in asked}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
