"""A setting for a stated goal, from the records of a sweep: which one, by how much, and what it ties with.

    goal = Goal(ttft_p99_ms=1000, itl_p99_ms=50)
    advice = recommend(sweep.sweep(settings), goal)
    confirm(advice, mode="live")

The best of several measurements is also the luckiest, so its number is too good on average. That is why a
recommendation is run once more.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memlab import goodput, lab, plots, record, repeats
from memlab.errors import MemlabError, RecordError
from memlab.plots import Table
from memlab.record import RunRecord, Traffic
from memlab.repeats import Interval

# Two starts of one setting differ by some per cent, by more than loads on one server do: a lead has to be larger. Of
# three starts of the same setting in the records of lab 5 the throughput of equal loads differs by up to 3 %.
SAME = 0.05
# What the repeats of a setting say of the goal. A setting that meets it in some repeats only is not recommended.
MEETS, SOMETIMES, MISSES, FAILED, TOO_FEW = (
    "meets it",
    "not in every repeat",
    "misses it",
    "did not serve",
    "too few loads",
)


@dataclass(frozen=True)
class Goal:
    """Most output tokens a second, with the 99th percentiles of each load at most these many milliseconds."""

    ttft_p99_ms: float
    itl_p99_ms: float

    def __str__(self) -> str:
        return (
            f"most output tokens a second with p99 TTFT at most {self.ttft_p99_ms:,.0f} ms "
            f"and p99 ITL at most {self.itl_p99_ms:,.0f} ms"
        )


@dataclass(frozen=True)
class Candidate:
    """One setting and its repeats: output tokens a second, and the 99th percentiles in ms, load by load."""

    label: str
    run: RunRecord
    standing: str
    tokens_per_s: tuple[float, ...] = ()
    ttft_p99_ms: tuple[float, ...] = ()
    itl_p99_ms: tuple[float, ...] = ()

    @property
    def throughput(self) -> float:
        """The mean over the loads, in output tokens a second."""
        return statistics.fmean(self.tokens_per_s)

    def speed(self) -> str:
        """The same with its slowest and its fastest load, which differ by their requests."""
        return f"{self.throughput:,.0f} ({min(self.tokens_per_s):,.0f} to {max(self.tokens_per_s):,.0f})"

    def above(self, other: "Candidate") -> Interval:
        """By which share its throughput is above another's: load by load where both were sent the same ones."""
        paired = len(self.tokens_per_s) == len(other.tokens_per_s)
        return (repeats.paired_change if paired else repeats.change)(other.tokens_per_s, self.tokens_per_s)

    def excess(self, goal: Goal) -> float:
        """The worst 99th percentile over its limit: above 1 in at least one load that misses the goal."""
        return max(max(self.ttft_p99_ms) / goal.ttft_p99_ms, max(self.itl_p99_ms) / goal.itl_p99_ms)


@dataclass(frozen=True)
class Advice:
    """What the records recommend. ``pick`` is None where no setting meets the goal in every repeat.

    ``ties`` meet the goal too, and are not surely slower by more than ``SAME``; ``next_best`` is the fastest of those
    that are.
    """

    goal: Goal
    traffic: Traffic
    candidates: tuple[Candidate, ...]
    pick: Candidate | None
    ties: tuple[Candidate, ...] = ()
    next_best: Candidate | None = None

    def __str__(self) -> str:
        head = f"Goal: {self.goal}. Load: {self.traffic.in_words()}."
        return f"{head}\n{self._nothing() if self.pick is None else self._recommended()}"

    def _recommended(self) -> str:
        pick = self.pick
        parts = [f"Recommended: {pick.label}, {pick.speed()} output tokens/s."]
        if self.next_best:
            parts.append(f"That is {pick.above(self.next_best).show_change()} against {self.next_best.label}.")
        if self.ties:
            parts.append(f"Tied with it: {'; '.join(tie.label for tie in self.ties)}.")
        if not self.ties and not self.next_best:
            parts.append("No other setting meets the goal.")
        return " ".join(parts)

    def _nothing(self) -> str:
        served = [each for each in self.candidates if each.tokens_per_s]
        if not served:
            return "Nothing to recommend: no setting served its loads."
        nearest = min(served, key=lambda each: each.excess(self.goal))
        if nearest.standing == TOO_FEW:
            return f"Nothing to recommend: {repeats.ENOUGH} loads of a setting are needed, of the same kind."
        return (
            f"No setting meets the goal in every repeat. The nearest is {nearest.label}, at "
            f"{nearest.excess(self.goal):.2f} times a limit: allow more, send less, or change another flag."
        )

    def table(self) -> Table:
        """Each setting, the fastest first, with its throughput against the recommended one."""
        header = ("setting", "the goal", "output tokens/s, by load", "against the pick", "p99 TTFT", "p99 ITL")
        return Table(f"Settings for the goal: {self.goal}", header, tuple(map(self._row, self.candidates)))

    def _row(self, each: Candidate) -> tuple[str, ...]:
        if len(each.tokens_per_s) < 2:
            return each.label, each.standing, "", "", "", ""
        against = "" if self.pick in (None, each) else each.above(self.pick).show_change()
        most = [f"{max(values):,.0f} ms" for values in (each.ttft_p99_ms, each.itl_p99_ms)]
        return each.label, each.standing, each.speed(), "the pick" if each is self.pick else against, *most


def recommend(records: Sequence[RunRecord], goal: Goal, traffic: Traffic | None = None) -> Advice:
    """The setting with most throughput among those that meet the goal in every repeat.

    Args:
        records: of a sweep; those of one setting are repeats of it.
        goal: what has to be met.
        traffic: which of several kinds of load to judge by; None where only one was repeated.

    Raises:
        MemlabError: without records, and where no kind of load, or more than one, was repeated.
    """
    if not records:
        raise MemlabError("no runs to recommend a setting from: run the sweep first")
    traffic = traffic or _only(records)
    settings: dict[str, list[RunRecord]] = {}
    for each in records:
        settings.setdefault(str((each.model.name, each.card, each.flags.given)), []).append(each)
    firsts = [replace(found[0], repeat=1) for found in settings.values()]
    labels = plots.labels(*firsts) if len(firsts) > 1 else [firsts[0].model.name]
    candidates = [
        _candidate(label, found, traffic, goal) for label, found in zip(labels, settings.values(), strict=True)
    ]
    candidates.sort(key=lambda each: each.throughput if each.tokens_per_s else 0.0, reverse=True)
    good = [each for each in candidates if each.standing == MEETS]
    if not good:
        return Advice(goal, traffic, tuple(candidates), None)
    pick, *rest = good
    ties = tuple(each for each in rest if pick.above(each).low <= SAME)
    return Advice(goal, traffic, tuple(candidates), pick, ties, next((one for one in rest if one not in ties), None))


def _only(records: Sequence[RunRecord]) -> Traffic:
    """The one kind of load that was repeated."""
    found = list(goodput.repeats_of(records))
    if len(found) == 1:
        return found[0]
    if not found:
        raise MemlabError(f"no load was sent twice: send each {repeats.ENOUGH} times to one server")
    raise MemlabError(f"say which traffic to judge by: {'; '.join(each.in_words() for each in found)}")


def _candidate(label: str, records: list[RunRecord], traffic: Traffic, goal: Goal) -> Candidate:
    loads = [load for each in records for load in goodput.loads_of(each) if load.traffic == traffic]
    if any(each.outcome != "ok" for each in records) or any(load.latency.failed for load in loads):
        return Candidate(label, records[0], FAILED)
    speed = tuple(load.latency.output_tokens_per_s for load in loads)
    ttft, itl = (tuple(goodput.p99(loads, name)) for name in ("ttft", "itl"))
    met = [first <= goal.ttft_p99_ms and gap <= goal.itl_p99_ms for first, gap in zip(ttft, itl, strict=True)]
    standing = MEETS if all(met) else SOMETIMES if any(met) else MISSES
    return Candidate(label, records[0], standing if len(loads) >= repeats.ENOUGH else TOO_FEW, speed, ttft, itl)


# ---- once more ----


@dataclass(frozen=True)
class Confirmation:
    """The recommended setting on another server. ``change`` is its throughput against the first time."""

    confirmed: bool
    word: str
    run: RunRecord | None = None
    change: Interval | None = None

    def __str__(self) -> str:
        return self.word


def judge(advice: Advice, again: RunRecord) -> Confirmation:
    """Whether another run of the recommended setting bears it out: the goal is met in every load, and the throughput is
    not surely lower by more than ``SAME``."""
    found = _candidate(advice.pick.label, [again], advice.traffic, advice.goal)
    if found.standing != MEETS:
        worst = f", at {found.excess(advice.goal):.2f} times a limit" if found.tokens_per_s else ""
        return Confirmation(False, f"Not confirmed: {found.label} {found.standing} this time{worst}.", again)
    change = found.above(advice.pick)
    number = f"{found.speed()} output tokens/s, {change.show_change()} against the first time"
    if change.high < -SAME:
        return Confirmation(False, f"Not confirmed: slower this time, {number}.", again, change)
    return Confirmation(True, f"Confirmed on another server: the goal is met again, with {number}.", again, change)


def confirm(advice: Advice, mode: str = "auto", **options) -> Confirmation:
    """Run the recommended setting again, on a new server; in replay, look at another recorded start of it.

    ``options`` are more of ``lab.run``.

    Raises:
        MemlabError: where nothing was recommended.
    """
    if advice.pick is None:
        raise MemlabError("nothing was recommended, so there is nothing to confirm: state a goal that a setting meets")
    run = advice.pick.run
    asked = (run.model.name, run.served_flags, run.sent, run.card)
    if not lab.here(mode).replayed:
        return judge(advice, lab.run(*asked, mode=mode, lab=run.lab, **options))
    same = {"machine": run.machine.name, "vllm": run.engine.vllm}
    try:
        starts = record.find(record.read_all(), run.lab, *asked, **same)
    except RecordError:
        starts = []
    again = next((each for each in starts if each.id != run.id), None)
    if again is None:
        return Confirmation(False, "Not run again: one start of this setting is recorded. Run the lab live to confirm.")
    return judge(advice, again)
