"""Events by the start of a server that they belong to, and by failure; what is kept does not grow with the log."""

from dataclasses import dataclass, field

from memlab.doctor_rules import HARMLESS
from memlab.vllm_log import ERRORS, PHASES, Event, phase_of

_KEPT_OF_A_RUN = 2000
_KEPT_RUNS = 40
_QUIET = frozenset(("stats", "iteration", "load_progress", "graphs_trial_progress", "compile_step"))
_REPEATS = 8  # of one kind and rank: a crash loop of requests says the same each time
SAYS_POOL = frozenset(("kv_available", "kv_given", "kv_auto", "memory_terms", "memory_profile", "kv_size", "kv_blocks"))
_NOT_BEFORE_ITS_SETTINGS = ERRORS | SAYS_POOL | {"model_loaded", "ready", "stats"}
_FAILS = ERRORS | {"frame", "exception", "collective_timeout", "forward_failed"}


@dataclass
class Run:
    """One start of a server, as far as the text shows it."""

    events: list[Event] = field(default_factory=list)
    counts: dict[tuple, int] = field(default_factory=dict)
    stats: Event | None = None
    preemptions: Event | None = None
    preempted: int = 0
    fullest: Event | None = None
    command: Event | None = None

    def add(self, event: Event) -> None:
        if event.kind in ("stats", "iteration"):
            self._traffic(event)
        elif event.kind == "preempted":
            self.preempted += 1
            self.preemptions = self.preemptions or event
        if event.kind in _QUIET and self.counts.get((event.kind, None)):
            return
        key = (event.kind, event.rank) if event.kind not in _QUIET else (event.kind, None)
        if event.kind == "frame":
            key = (*key, event.values["function"])
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.counts[key] <= _REPEATS and len(self.events) < _KEPT_OF_A_RUN:
            self.events.append(event)

    def _traffic(self, event: Event) -> None:
        self.stats = event
        if event.values.get("preemptions"):
            self.preempted += event.values["preemptions"]
            self.preemptions = self.preemptions or event
        usage = event.values.get("kv_usage_percent")
        if usage is not None and (self.fullest is None or usage > self.fullest.values["kv_usage_percent"]):
            self.fullest = event

    def begins_anew(self, event: Event) -> bool:
        """Whether the event can only be of another start."""
        if event.kind == "version":
            return bool({kind for kind, *_ in self.counts} - {"arguments", "exception"})
        if event.kind in ("arguments", "engine_config"):
            return any(kind in _NOT_BEFORE_ITS_SETTINGS for kind, *_ in self.counts)
        if event.kind in ("load_started", "model_loaded"):
            return any((kind, event.rank) in self.counts for kind in SAYS_POOL | {"ready", "engine_start_failed"})
        return False


class Reader:
    """Takes events one by one; keeps what a diagnosis needs, in bounds that do not grow with the log."""

    def __init__(self):
        self.runs: list[Run] = [Run()]
        self.harmless: dict[str, Event] = {}
        self.starts = 1
        self._command: Event | None = None

    def add(self, event: Event) -> None:
        """Take the next event. A pasted command is of the next start, and of one before it that has none."""
        if event.kind == "command":
            self._command = event
            if self.runs[-1].command is None or not self.runs[-1].events:
                self.runs[-1].command = event
            return
        if event.kind in HARMLESS and (event.kind != "blocks_override" or not event.values["auto_blocks"]):
            self.harmless.setdefault(event.kind, event)
        if self.runs[-1].begins_anew(event):
            if len(self.runs) >= _KEPT_RUNS:
                del self.runs[_KEPT_RUNS // 2]
            self.runs.append(Run(command=self._command))
            self.starts += 1
        self.runs[-1].add(event)


_BEFORE_SIZED = frozenset(PHASES[1 : PHASES.index("warming_up")])
SIZED = frozenset((*PHASES[PHASES.index("warming_up") : PHASES.index("stopping")], "captured"))


@dataclass
class Episode:
    """Lines of failure with no sign of progress between them; ``before`` is how many events of the run precede them."""

    before: int
    step: str | None
    events: list[Event] = field(default_factory=list)


def episodes(run: Run) -> list[Episode]:
    found: list[Episode] = []
    current: Episode | None = None
    step = None
    for number, event in enumerate(run.events):
        if event.kind in _FAILS:
            if current is None:
                current = Episode(number, step)
                found.append(current)
            current.events.append(event)
            continue
        begins = phase_of(event)
        if step in SIZED and begins in _BEFORE_SIZED:  # a line of another rank, late
            begins = None
        if event.kind == "graphs_captured":
            begins = "captured"
        if event.kind == "graphs_progress" and event.values.get("progress_percent") == 100.0:
            begins = None
        if begins and begins != "stopping":
            step = begins
        # Another rank may still say how far it came while the first one fails.
        own = current and event.rank in {one.rank for one in current.events}
        if current and begins and (own or begins in ("starting", "ready", "serving")):
            current = None
    return found
