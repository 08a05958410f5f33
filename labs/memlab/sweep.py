"""Many runs: on all idle GPUs at once, each on as many as it needs; what is recorded already is not run again."""

import collections
import contextlib
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
        named = {**self.flags.set(), **self.variables}
        words = [*(f"{name}={value}" for name, value in named.items()), *self.flags.extra]
        played = f" on {self.card}" if self.card else ""
        return f"{self.model}{played} {' '.join(words)}"


def from_dict(data: dict) -> Setting:
    """A setting from a grid file's entry.

    Raises:
        MemlabError: for a key that a setting does not have.
    """
    try:
        given = data.get("traffic")
        traffic = [_load(each) for each in given] if isinstance(given, list) else _load(given) if given else None
        asked, instruments = data.get("flags", {}), tuple(data.get("instruments", ()))
        flags = ServeFlags(**{**asked, "extra": tuple(asked.get("extra", ()))})
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


def known_runs(kept: bool = False) -> list[RunRecord]:
    """This machine's live runs; with ``kept``, the book's records too. Each once."""
    live = [record.read(path) for path in lab.runs_folder().rglob("run-*/*-r[0-9]*.json")]
    return list({found.id: found for found in [*(record.read_all() if kept else ()), *live]}.values())


def replayed(setting: Setting, place: "lab.Here") -> list[RunRecord]:
    """The recorded runs of a setting, as many as it wants where there are so many.

    Raises:
        RecordError: where there is none; it names the nearest.
    """
    first = setting.run("replay")
    there = recorded(setting, record.read_all(), place.machine.name, first.engine.vllm)
    return [first, *(each for each in there if each.id != first.id)][: setting.repeats]


def sweep(
    settings: list[Setting],
    mode: str = "auto",
    budget_s: float | None = None,
    say: Callable[[str], None] = print,
    on_record: Callable[[RunRecord], None] = lambda found: None,
    kept: bool = False,
    most_gpus: int | None = None,
) -> list[RunRecord]:
    """Run every setting as often as it wants, in order; returns the runs that there are, old and new.

    Run again, it goes on where it was stopped. A setting that fails is a record like any other.

    Args:
        settings: by priority.
        mode: auto, live or replay.
        budget_s: do not begin a run whose estimate ends later than this.
        say: gets a line at the beginning, and as each run begins and ends, with the time left.
        on_record: gets each new record, in the thread that made it.
        kept: whether the book's records count as done, for who adds to them; the speed of another machine of the same
            name is not this one's.
        most_gpus: use no more GPUs than so many; None for all that are idle.
    """
    place = lab.here(mode)
    if place.replayed:
        return [found for setting in settings for found in replayed(setting, place)]
    work = _Work(settings, place, budget_s, say, on_record, kept, most_gpus)
    return work.run()


class _Work:
    """The queue of a sweep, and the GPUs that it may use; the CPU backend is one place."""

    def __init__(self, settings, place, budget_s, say, on_record, kept, most_gpus):
        self.place, self.budget_s, self.say, self.on_record = place, budget_s, say, on_record
        vllm = lab.vllm_version()
        known = known_runs(kept)
        self.found: list[RunRecord] = []
        self.todo: collections.deque[Setting] = collections.deque()
        for setting in settings:
            there = recorded(setting, known, place.machine.name, vllm)[: setting.repeats]
            self.found += there
            self.todo += [setting] * (setting.repeats - len(there))
        self.start, self.stopping = time.perf_counter(), False
        self.errors: list[Exception] = []
        gpus = checks.find_gpus(checks.kernels()) if place.backend == "cuda" else []
        self.idle: list[str | None] = [one.device.uuid for one in gpus if not one.why_not][:most_gpus] or [None]
        self.places = len(self.idle)
        self.left_s = sum(setting.seconds * self._needs(setting) for setting in self.todo)  # of one place
        self.changed = threading.Condition()

    def _needs(self, setting: Setting) -> int:
        """How many of the places one run takes."""
        return setting.flags.world_size if self.place.backend == "cuda" else 1

    def run(self) -> list[RunRecord]:
        if self.todo:
            where = f"{self.places} idle GPUs" if self.places > 1 else "one GPU" if self.idle[0] else "the CPU backend"
            left = show_seconds(self._left_s())
            self.say(f"{len(self.found)} runs are there already, {len(self.todo)} to go on {where}: about {left}")
        runs: list[threading.Thread] = []
        with contextlib.ExitStack() as stack:
            try:
                self._hand_out(runs, stack)
                while any(run.is_alive() for run in runs):
                    for run in runs:
                        run.join(0.2)
            except KeyboardInterrupt:
                self.stopping = True
                process.stop_all()
                for run in runs:
                    run.join(60)
                raise
        if self.errors:
            raise self.errors[0]
        return self.found

    def _hand_out(self, runs: list[threading.Thread], stack: contextlib.ExitStack) -> None:
        """Begin the runs in their order, each as soon as as many GPUs are idle as it needs."""
        ready = None  # a process that imports vLLM while the run before begins
        while self.todo:
            setting = self.todo.popleft()
            needed = self._needs(setting)
            if needed > self.places:
                self.errors.append(MemlabError(f"{setting}: it needs {needed} GPUs, and {self.places} are idle here"))
                self.say(f"left out: {self.errors[-1]}")
                continue
            with self.changed:
                while len(self.idle) < needed:
                    self.changed.wait(0.5)
                taken = [self.idle.pop(0) for _ in range(needed)]
            if self.budget_s is not None and time.perf_counter() - self.start + setting.seconds > self.budget_s:
                self.say(f"skipped for time: {setting}")
                self._give_back(taken)
                continue
            warm, ready = ready, lab.warm_up() if self.todo else None
            if ready:
                stack.callback(ready.stop)
            runs.append(threading.Thread(target=self._one, args=(setting, taken, warm), daemon=True))
            runs[-1].start()

    def _give_back(self, taken: list[str | None]) -> None:
        with self.changed:
            self.idle += taken
            self.changed.notify_all()

    def _left_s(self) -> float:
        return max(0.0, self.left_s / self.places)

    def _one(self, setting: Setting, taken: list[str | None], warm) -> None:
        before = time.perf_counter()
        self.say(f"begins: {setting}")
        try:
            found = setting.run("live", gpus=taken if taken[0] else None, warm=warm)
            with self.changed:
                self.found.append(found)
                self.left_s -= setting.seconds * len(taken)
            self.on_record(found)
            took = show_seconds(time.perf_counter() - before)
            self.say(f"{found.id}: {lab.summary(found)}; took {took}, about {show_seconds(self._left_s())} left")
        except Exception as error:  # one setting's failure must not end the others' runs
            if not self.stopping:
                self.errors.append(error)
                self.say(f"failed: {setting}: {error}")
        finally:
            self._give_back(taken)
