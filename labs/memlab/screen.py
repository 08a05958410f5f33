"""What ``memlab watch`` shows: a server's view as plain data, the rule that names its weak spot, and the text of both.

Nothing here reads anything. Text that came from a server or a log has passed through ``vllm_log.clean``.
"""

import shutil
import textwrap
import unicodedata
from dataclasses import asdict, dataclass, field

from memlab.ledger import TERMS, MemoryLedger
from memlab.units import show_gib, show_seconds

# Below this much free memory of the card, one allocation that no profile counts ends the server: FlashInfer alone takes
# 394 MiB for its workspace at first use (vllm/v1/attention/backends/flashinfer.py:95, 0.26).
HEADROOM_GIB = 0.5
# Below this the kernel is about to choose a process to kill, and the largest one is the server.
HOST_FREE_GIB = 1.0
# Less than this is what a driver and a desktop move by themselves.
FOREIGN_GIB = 0.25
# From here on a request that grows finds no block: running ones are preempted, new ones wait.
POOL_FULL = 0.95
# Whole blocks for each request leave this much over what all requests together can hold.
UNREACHABLE = 1.05


@dataclass(frozen=True)
class Sight:
    """What the rule looks at; None is what nobody told. Sizes in GiB, ``kv_usage`` from 0 to 1.

    ``headroom_gib`` is the least that was left on the card, ``unprofiled_gib`` what the run took beyond the budget,
    ``foreign_growth_gib`` what others on the card took since the watch began, ``preempted`` counts the last minute.
    ``running`` and ``waiting`` are summed over ``engines`` (data parallel), the other figures are those of one.
    """

    backend: str | None = None
    card: str = "the card"
    headroom_gib: float | None = None
    unprofiled_gib: float | None = None
    foreign_growth_gib: float | None = None
    host_free_gib: float | None = None
    kv_usage: float | None = None
    pool_tokens: int | None = None
    running: float | None = None
    waiting: float | None = None
    preempted: float | None = None
    engines: int = 1
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    prefix_caching: bool | None = None


@dataclass(frozen=True)
class WeakSpot:
    """The term that gives first: ``term`` is one of host_memory, headroom, foreign, kv_cache, max_num_seqs,
    unreachable, none, unknown."""

    term: str
    sentence: str


def weak_spot(sight: Sight) -> WeakSpot:
    """The one thing to mend, by rules in the order of what they cost: a dead server, slow requests, idle memory."""
    for rule in (_host, _headroom, _foreign, _pool, _requests, _unreachable):
        found = rule(sight)
        if found:
            return found
    if sight.kv_usage is None:
        return WeakSpot("unknown", "not known: the server states no metrics yet")
    seen = [f"{sight.kv_usage:.0%} of the pool is used"]
    if sight.headroom_gib is not None:
        seen.append(f"{show_gib(sight.headroom_gib)} were free on {sight.card} at the worst moment")
    elif sight.host_free_gib is not None:
        seen.append(f"{show_gib(sight.host_free_gib)} of host memory are free")
    unseen = "" if len(seen) > 1 else ". The memory itself is not seen"
    return WeakSpot("none", f"none. {', '.join(seen)}{unseen}")


def _host(sight: Sight) -> WeakSpot | None:
    if sight.host_free_gib is None or sight.host_free_gib >= HOST_FREE_GIB:
        return None
    mend = "give the server a smaller pool (--kv-cache-memory-bytes)" if sight.backend == "cpu" else "find what grows"
    free = show_gib(sight.host_free_gib)
    return WeakSpot(
        "host_memory",
        f"host memory {free}: when none is left, the kernel kills the largest process, which is the server. Stop other "
        f"programs, or {mend}",
    )


def _headroom(sight: Sight) -> WeakSpot | None:
    if sight.headroom_gib is None:
        return None
    unprofiled = max(0.0, sight.unprofiled_gib or 0.0)
    if sight.headroom_gib >= max(HEADROOM_GIB, unprofiled):
        return None
    why = "the next allocation that no profile counts (attention scratch, a kernel compiled late) ends the server"
    if sight.headroom_gib >= HEADROOM_GIB:
        why = f"the run took {show_gib(unprofiled)} beyond its budget so far, and as much again does not fit"
    others = ""
    if (sight.foreign_growth_gib or 0.0) >= FOREIGN_GIB:
        others = f" Other processes took {show_gib(sight.foreign_growth_gib)} of it since the watch began: stop them."
    return WeakSpot(
        "headroom",
        f"headroom {show_gib(sight.headroom_gib)} on {sight.card}: {why}.{others} Lower --gpu-memory-utilization",
    )


def _foreign(sight: Sight) -> WeakSpot | None:
    growth = sight.foreign_growth_gib
    if growth is None or growth < FOREIGN_GIB:
        return None
    if sight.headroom_gib is not None and sight.headroom_gib - growth >= HEADROOM_GIB:
        return None  # as much again still leaves room
    left = "" if sight.headroom_gib is None else f", and {show_gib(sight.headroom_gib)} were left at the worst moment"
    return WeakSpot(
        "foreign",
        f"other processes on {sight.card}: they took {show_gib(growth)} since the watch began{left}. "
        "vLLM planned without them: stop them, or restart the server beside them",
    )


def _pool(sight: Sight) -> WeakSpot | None:
    preempted = sight.preempted or 0
    full = sight.kv_usage is not None and sight.kv_usage >= POOL_FULL and (sight.waiting or 0) > 0
    if not full and preempted <= 0:
        return None
    signs = [f"{sight.kv_usage:.0%} used"] if sight.kv_usage is not None else []
    if sight.waiting:
        signs.append(f"{sight.waiting:.0f} {'request waits' if sight.waiting == 1 else 'requests wait'}")
    if preempted > 0:
        signs.append(f"{preempted:.0f} preemption{'s' if preempted != 1 else ''} in the last minute")
    return WeakSpot(
        "kv_cache",
        f"the pool of the KV cache: {', '.join(signs)}. Requests get slower; memory does not run out. A larger pool, "
        "a lower --max-num-seqs or --kv-cache-dtype fp8 helps",
    )


def _requests(sight: Sight) -> WeakSpot | None:
    if None in (sight.max_num_seqs, sight.running, sight.waiting):
        return None
    if sight.running < sight.max_num_seqs * sight.engines or sight.waiting <= 0:
        return None
    pool = "" if sight.kv_usage is None else f" while {sight.kv_usage:.0%} of the pool is used"
    room = "the host has memory free" if sight.backend == "cpu" else "the card has headroom"
    return WeakSpot(
        "max_num_seqs",
        f"--max-num-seqs {sight.max_num_seqs}: so many run, {sight.waiting:.0f} wait{pool}. Raise it where {room}",
    )


def _unreachable(sight: Sight) -> WeakSpot | None:
    if None in (sight.pool_tokens, sight.max_num_seqs, sight.max_model_len):
        return None
    block = sight.block_size or 1
    reachable = sight.max_num_seqs * -(-sight.max_model_len // block) * block
    if sight.pool_tokens <= UNREACHABLE * reachable:
        return None
    rest = "can only keep prefixes of requests that ended" if sight.prefix_caching else "is never used"
    return WeakSpot(
        "unreachable",
        f"part of the pool: --max-num-seqs {sight.max_num_seqs} of --max-model-len {sight.max_model_len} fill "
        f"{reachable / sight.pool_tokens:.0%} of it, and the rest {rest}. Raise one of the two, or give memory back",
    )


@dataclass(frozen=True)
class Gauge:
    """Memory of one GPU, or of the host's process group. ``used_gib`` and ``peak_gib`` are what the server holds where
    ``own`` says so, else everybody; ``total_gib`` and ``free_gib`` are those of the card or the host."""

    name: str
    used_gib: float
    peak_gib: float
    own: bool
    total_gib: float | None = None
    free_gib: float | None = None


@dataclass(frozen=True)
class View:
    """All that is shown of a server at one moment; what is None or missing was not seen."""

    url: str
    watched_s: float
    weak: WeakSpot
    title: tuple[str, ...] = ()
    pid: int | None = None
    silent_s: float | None = None
    kv_usage: float | None = None
    pool_tokens: int | None = None
    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None
    max_num_seqs: int | None = None
    prompt_per_s: float | None = None
    generation_per_s: float | None = None
    prefix_hits: float | None = None
    memory: tuple[Gauge, ...] = ()
    ledgers: dict[str, MemoryLedger] = field(default_factory=dict)
    log_error: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        """For a line of JSON: without what was not seen."""
        ledgers = {view: ledger.known() for view, ledger in self.ledgers.items()}
        data = {**asdict(self), "ledgers": ledgers, "watched_s": round(self.watched_s, 2)}
        return {key: value for key, value in data.items() if value not in (None, (), {}, [])}


def _columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)


def fit(text: str, width: int) -> str:
    """A text of at most ``width`` columns, its end cut off with an ellipsis."""
    if _columns(text) <= width:
        return text
    while text and _columns(text) > width - 1:
        text = text[:-1]
    return text + "…"


def _bar(share: float, width: int = 10) -> str:
    filled = round(min(1.0, max(0.0, share)) * width)
    return "█" * filled + "░" * (width - filled)


def frame(view: View, size: tuple[int, int] | None = None) -> list[str]:
    """The screen, at most ``size`` columns and rows of the terminal; what matters most stands first."""
    width, height = size or shutil.get_terminal_size()
    wrap = textwrap.TextWrapper(max(20, width), break_on_hyphens=False)
    row = textwrap.TextWrapper(max(20, width), break_on_hyphens=False, subsequent_indent=" " * 10)
    where = [view.url, *([f"pid {view.pid}"] if view.pid else []), f"watched for {show_seconds(view.watched_s)}"]
    lines = [" · ".join(view.title) or "vLLM", ", ".join(where)]
    if view.silent_s is not None:
        lines.append(f"The server has not answered for {show_seconds(view.silent_s)}.")
    lines += ["", *wrap.wrap(f"Weak spot: {view.weak.sentence}."), ""]
    if view.log_error:
        lines += [*wrap.wrap(f"The log says: {view.log_error}"), ""]
    lines += [line for text in (*_metrics(view), *map(_gauge, view.memory)) for line in row.wrap(text)]
    lines += _table(view.ledgers)
    if view.notes:
        lines += ["", *(line for note in view.notes for line in wrap.wrap(note))]
    foot = "Read-only. Ctrl-C ends the watch and writes its record; the server goes on."
    room = max(1, height - 3)
    if len(lines) > room:
        lines = [*lines[: room - 1], "…"]
    return [fit(line, width) for line in (*lines, "", foot)]


def _metrics(view: View) -> list[str]:
    lines = []
    if view.kv_usage is not None:
        pool = f" of {view.pool_tokens:,} tokens" if view.pool_tokens else ""
        lines.append(f"KV cache  {_bar(view.kv_usage)} {view.kv_usage:6.1%}{pool}")
    if view.running is not None:
        most = view.max_num_seqs
        bar = _bar(view.running / most) + " " if most else ""
        parts = [f"{view.running:.0f} running" + (f" of {most}" if most else "")]
        if view.waiting is not None:
            parts.append(f"{view.waiting:.0f} waiting")
        if view.preemptions is not None:
            parts.append(f"{view.preemptions:.0f} preemptions so far")
        lines.append(f"requests  {bar}{', '.join(parts)}")
    rates = (("prompt", view.prompt_per_s), ("generated", view.generation_per_s))
    tokens = [f"{name} {rate:,.0f}/s" for name, rate in rates if rate is not None]
    if view.prefix_hits is not None:
        tokens.append(f"{view.prefix_hits:.0%} of prompt tokens from the prefix cache")
    return [*lines, *([f"tokens    {', '.join(tokens)}"] if tokens else [])]


def _gauge(gauge: Gauge) -> str:
    bar = _bar(gauge.used_gib / gauge.total_gib) + " " if gauge.total_gib else ""
    total = f" of {show_gib(gauge.total_gib)}" if gauge.total_gib else ""
    parts = [f"{show_gib(gauge.used_gib)}{total}", f"peak {show_gib(gauge.peak_gib)}"]
    if gauge.free_gib is not None:
        parts.append(f"free {show_gib(gauge.free_gib)}")
    return f"{gauge.name:9} {bar}{', '.join(parts)}"


def _table(ledgers: dict[str, MemoryLedger]) -> list[str]:
    if not ledgers:
        return []
    names = [name for name in TERMS if any(ledger.term(name) is not None for ledger in ledgers.values())]
    first = max(map(len, ("ledger", *names)))
    lines = ["", f"{'ledger':{first}}" + "".join(f"{view:>12}" for view in ledgers)]
    for name in names:
        values = [ledger.term(name) for ledger in ledgers.values()]
        cells = "".join(f"{'' if value is None else show_gib(value):>12}" for value in values)
        lines.append(f"{name.replace('_', ' '):{first}}{cells}")
    return lines


def line(view: View) -> str:
    """One line for a file or a pipe."""
    parts = [f"{view.watched_s:7.1f} s"]
    if view.silent_s is not None:
        parts.append(f"no answer for {show_seconds(view.silent_s)}")
    if view.kv_usage is not None:
        parts.append(f"KV {view.kv_usage:.1%}")
    for name in ("running", "waiting", "preemptions"):
        value = getattr(view, name)
        if value is not None:
            parts.append(f"{name} {value:.0f}")
    parts += [f"{gauge.name} {show_gib(gauge.used_gib)}" for gauge in view.memory]
    return "  ".join([*parts, f"weak spot {view.weak.sentence}"])
