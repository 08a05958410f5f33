"""Many runs: on all idle GPUs at once, one run a GPU; what is recorded already is not run again."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from memlab import checks, lab, process, record
from memlab.errors import MemlabError
from memlab.flags import ServeFlags
from memlab.record import LongPrompts, Neighbour, RunRecord, Traffic
from memlab.units import show_seconds


@dataclass(frozen=True)
class Setting:
    """One point of a sweep. ``seconds`` is the estimate of one run; ``repeats`` how many are wanted."""

    model: str
    flags: ServeFlags
    traffic: Traffic | list[Traffic] | None = None
    card: str | None = None
    instruments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    neighbour: Neighbour | None = None
    lab: str = "sweep"
    repeats: int = 1
    seconds: float = 90.0

    def run(self, mode: str, **options) -> RunRecord:
        """One run of it, without progress lines unless asked; ``options`` are more of ``lab.run``."""
        return lab.run(
            self.model,
            self.flags,
            self.traffic,
            self.card,
            mode,
            lab=self.lab,
            instruments=self.instruments,
            variables=self.variables,
            neighbour=self.neighbour,
            **{"on_phase": None, **options},
        )

    def is_of(self, found: RunRecord, any_lab: bool = False) -> bool:
        """Whether a run is one of this setting; ``any_lab``: whichever lab it was made for."""
        asked = (found.lab if any_lab else self.lab, self.model, self.flags, self.traffic, self.card)
        return not record.differences(found, *asked, self.instruments, self.variables, self.neighbour)

    def __str__(self) -> str:
        flags = " ".join(f"{name}={value}" for name, value in self.flags.set().items())
        played = f" on {self.card}" if self.card else ""
        return f"{self.model}{played} {flags}"


def from_dict(data: dict) -> Setting:
    """A setting from a grid file's entry.

    Raises:
        MemlabError: for a key that a setting does not have.
    """
    try:
        given = data.get("traffic")
        traffic = [_load(each) for each in given] if isinstance(given, list) else _load(given) if given else None
        flags, instruments = ServeFlags(**data.get("flags", {})), tuple(data.get("instruments", ()))
        neighbour = Neighbour(**data["neighbour"]) if data.get("neighbour") else None
        read = {"flags": flags, "traffic": traffic, "instruments": instruments, "neighbour": neighbour}
        return Setting(**{**data, **read})
    except TypeError as error:
        raise MemlabError(f"no setting: {data} ({error})") from error


def _load(data: dict) -> Traffic:
    long = data.get("long_prompts")
    return Traffic(**{**data, **({"long_prompts": LongPrompts(**long)} if long else {})})


def recorded(setting: Setting, known: Iterable[RunRecord], machine: str, vllm: str) -> list[RunRecord]:
    """The runs of a setting among ``known``, of one machine and version."""
    return [
        found
        for found in known
        if (found.machine.name, found.engine.vllm) == (machine, vllm)
        and found.outcome != "stopped"
        and setting.is_of(found)
    ]


def known_runs() -> list[RunRecord]:
    """Kept records and this machine's live runs, each once."""
    live = [record.read(path) for path in lab.runs_folder().rglob("run-*/*-r[0-9]*.json")]
    return list({found.id: found for found in [*record.read_all(), *live]}.values())


def sweep(
    settings: list[Setting],
    mode: str = "auto",
    budget_s: float | None = None,
    say: Callable[[str], None] = print,
    on_record: Callable[[RunRecord], None] = lambda found: None,
) -> list[RunRecord]:
    """Run every setting as often as it wants, in order; returns the runs that there are, old and new.

    Run again, it goes on where it was stopped. A setting that fails is a record like any other.

    Args:
        settings: by priority.
        mode: auto, live or replay.
        budget_s: do not begin a run whose estimate ends later than this.
        say: gets a line at the beginning, and as each run begins and ends, with the time left.
        on_record: gets each new record, in the thread that made it.
    """
    place = lab.here(mode)
    if place.replayed:
        return [setting.run("replay") for setting in settings]
    work = _Work(settings, place, budget_s, say, on_record)
    return work.run()


class _Work:
    def __init__(self, settings, place, budget_s, say, on_record):
        self.place, self.budget_s, self.say, self.on_record = place, budget_s, say, on_record
        vllm = lab.vllm_version()
        known = known_runs()
        self.found: list[RunRecord] = []
        self.todo: queue.SimpleQueue[Setting] = queue.SimpleQueue()
        self.left_s = 0.0
        for setting in settings:
            there = recorded(setting, known, place.machine.name, vllm)[: setting.repeats]
            self.found += there
            for _ in range(setting.repeats - len(there)):
                self.todo.put(setting)
                self.left_s += setting.seconds
        self.start, self.stopping = time.perf_counter(), False
        self.lock = threading.Lock()
        self.errors: list[Exception] = []

    def run(self) -> list[RunRecord]:
        gpus = checks.find_gpus(checks.kernels()) if self.place.backend == "cuda" else []
        uuids = [one.device.uuid for one in gpus if not one.why_not] or [None]
        waiting = self.todo.qsize()
        if waiting:
            where = f"{len(uuids)} idle GPUs" if len(uuids) > 1 else "one GPU" if uuids[0] else "the CPU backend"
            left = show_seconds(self.left_s / min(waiting, len(uuids)))
            self.say(f"{len(self.found)} runs are there already, {waiting} to go on {where}: about {left}")
        workers = [threading.Thread(target=self._worker, args=(uuid, len(uuids)), daemon=True) for uuid in uuids]
        for worker in workers:
            worker.start()
        try:
            while any(worker.is_alive() for worker in workers):
                for worker in workers:
                    worker.join(0.2)
        except KeyboardInterrupt:
            self.stopping = True
            process.stop_all()
            for worker in workers:
                worker.join(60)
            raise
        if self.errors:
            raise self.errors[0]
        return self.found

    def _worker(self, uuid: str | None, workers: int) -> None:
        with contextlib.ExitStack() as stack:
            self._work_off(uuid, workers, stack)

    def _work_off(self, uuid: str | None, workers: int, stack: contextlib.ExitStack) -> None:
        ready = None  # a process that imported vLLM while the run before went on
        while not self.stopping:
            try:
                setting = self.todo.get_nowait()
            except queue.Empty:
                return
            elapsed = time.perf_counter() - self.start
            if self.budget_s is not None and elapsed + setting.seconds > self.budget_s:
                self.say(f"skipped for time: {setting}")
                continue
            warm, ready = ready, None if self.todo.empty() else lab.warm_up()
            if ready:
                stack.callback(ready.stop)
            try:
                self._one(setting, uuid, workers, warm)
            except Exception as error:  # one setting's failure must not end the others' runs
                self.errors.append(error)
                self.say(f"failed: {setting}: {error}")

    def _one(self, setting: Setting, uuid: str | None, workers: int, warm) -> None:
        before = time.perf_counter()
        self.say(f"begins: {setting}")
        found = setting.run("live", gpus=[uuid] if uuid else None, warm=warm)
        with self.lock:
            self.found.append(found)
            self.left_s -= setting.seconds
        self.on_record(found)
        took = show_seconds(time.perf_counter() - before)
        left = show_seconds(max(0.0, self.left_s / workers))
        self.say(f"{found.id}: {lab.summary(found)}; took {took}, about {left} left")
