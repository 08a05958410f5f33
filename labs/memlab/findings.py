"""What the doctor finds, as data: the lines that it rests on, the changes that help, failures, a diagnosis."""

from dataclasses import asdict, dataclass

from memlab.ledger import MemoryLedger
from memlab.units import GIB, show_gib
from memlab.vllm_log import Event, StatedKV, clean, scrub

CONFIDENCE = ("high", "medium", "low")


@dataclass(frozen=True)
class Evidence:
    """A line of the log, from 1, and its message without prefixes."""

    line: int
    text: str


@dataclass(frozen=True)
class Fix:
    """One change. ``gains_gib`` is per GPU; None where neither log nor planner tells. ``flag`` may be a deed."""

    flag: str
    from_: object
    to: object
    gains_gib: float | None
    costs: str
    why: str

    def to_dict(self) -> dict:
        values = {**asdict(self), "gains_gib": _rounded(self.gains_gib)}
        return {name.rstrip("_"): value for name, value in values.items()}


def change(flag: str, from_: object, to: object) -> str:
    """From what to what, in words; bytes are given in GiB besides."""
    shown = [
        f"{value} ({show_gib(value / GIB)})"
        if flag == "--kv-cache-memory-bytes" and isinstance(value, int)
        else f"{value}"
        for value in (from_, to)
        if value is not None
    ]
    return " → ".join(shown)


@dataclass(frozen=True)
class Failure:
    """One failure. ``missing_gib`` is what was lacking, None where the log does not tell; ``rank`` that of its line."""

    phase: str
    cause: str
    confidence: str
    missing_gib: float | None = None
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[Fix, ...] = ()
    will_not_help: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    paste: tuple[str, ...] = ()
    rank: str | None = None
    ledger: MemoryLedger | None = None

    def to_dict(self) -> dict:
        """JSON-ready; ``will_not_help`` as ``[{"flag", "why"}]``."""
        return {
            "phase": self.phase,
            "cause": self.cause,
            "confidence": self.confidence,
            "missing_gib": _rounded(self.missing_gib),
            "rank": self.rank,
            "evidence": [asdict(one) for one in self.evidence],
            "fixes": [one.to_dict() for one in self.fixes],
            "will_not_help": [{"flag": flag, "why": why} for flag, why in self.will_not_help],
            "notes": list(self.notes),
            "ledger": _known(self.ledger),
        }


@dataclass(frozen=True)
class Diagnosis:
    """What a text shows. ``phase`` is the root cause's, else ``ok``, ``not_a_failure`` or ``undetermined``.

    ``harmless`` are lines that look like a failure and are none, each with the reason. ``weak_spot`` is what gives
    first in a start without a failure. ``starts`` counts the starts of a server in the text; a failure that comes again
    in a later one stands once.
    """

    phase: str
    failures: tuple[Failure, ...] = ()
    ledger: MemoryLedger | None = None
    kv: StatedKV = StatedKV()
    vllm_version: str | None = None
    engine: str | None = None
    enough: bool = True
    paste_also: tuple[str, ...] = ()
    harmless: tuple[tuple[Evidence, str], ...] = ()
    weak_spot: str | None = None
    card: str | None = None
    starts: int = 1

    def to_dict(self) -> dict:
        """JSON-ready, with the names that ``memlab doctor --json`` promises."""
        return {
            "phase": self.phase,
            "failures": [one.to_dict() for one in self.failures],
            "ledger": _known(self.ledger),
            "kv": {name: value for name, value in asdict(self.kv).items() if value is not None},
            "vllm_version": self.vllm_version,
            "engine": self.engine,
            "enough": self.enough,
            "paste_also": list(self.paste_also),
            "harmless": [{**asdict(one), "why": why} for one, why in self.harmless],
            "weak_spot": self.weak_spot,
            "card": self.card,
            "starts": self.starts,
        }


def without_failure(phase: str, enough: bool, stated: bool) -> str:
    """What is said where no failure was found; ``stated``: whether the text says anything of vLLM's memory."""
    cut = "no failure of memory is in these lines, and they end before the server is up"
    if phase == "ok":
        return "no failure of memory" if enough else cut
    if phase == "not_a_failure":
        return "no failure: these lines only look like one"
    return cut if stated else "nothing here is known to be of vLLM's memory"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _known(ledger: MemoryLedger | None) -> dict[str, float]:
    return {} if ledger is None else {f"{name}_gib": round(value, 3) for name, value in ledger.known().items()}


def evidence(*events: Event) -> tuple[Evidence, ...]:
    lines: dict[int, Evidence] = {}
    for event in events:
        text = clean(scrub(event.text), 400)
        if text not in {one.text for one in lines.values()}:
            lines.setdefault(event.line_number, Evidence(event.line_number, text))
    return tuple(lines.values())[:6]
