"""``RunRecord``: what one run of vLLM asked for, said and took; its schema, its file, and how a replay finds it.

A record is one JSON file of at most 64 KiB. It is checked when it is written and when it is read, and holds no host
name, path or user name. ``labs/records/record.schema.json`` is the same schema for other programs.
"""

import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Literal

from memlab import cards, flags, shapes
from memlab.errors import RecordError, ShapeError
from memlab.ledger import MemoryLedger

SCHEMA = 1
MAX_BYTES = 64 * 1024
WATCHED = "watch"  # the lab of a record of somebody's running server: nobody asked for its run
RECORDS = Path(__file__).resolve().parent.parent / "records"

# "died" is a server that ended while serving, for another reason than memory.
Outcome = Literal["ok", "failed_to_start", "out_of_memory", "timed_out", "stopped", "died"]
DIAGNOSED = ("failed_to_start", "out_of_memory")  # outcomes of which the doctor says why


@dataclass(frozen=True)
class Machine:
    """Hardware and driver. On the CPU backend ``gpu`` is None and the totals are the host's memory.

    Of a server on another machine, watched from afar, all but the name may be None.
    """

    name: str
    gpu: str | None
    gpu_count: int | None
    total_gib: float | None
    nvml_total_gib: float | None = None
    compute_capability: list[int] | None = None
    link: Literal["nvlink", "pcie", "none"] | None = None
    driver: str | None = None
    cuda: str | None = None
    cpu_cores: int | None = None

    @property
    def hardware(self) -> str | None:
        """The GPUs by count and name; None where there is none, or none was seen."""
        return f"{self.gpu_count} × {self.gpu}" if self.gpu and self.gpu_count > 1 else self.gpu


@dataclass(frozen=True)
class Engine:
    """Versions and choices of the engine; None is what a watch from outside could not see."""

    backend: Literal["cuda", "cpu"] | None
    vllm: str
    torch: str | None
    python: str | None
    runner: Literal["V0", "V1", "V2"] | None = None
    attention: str | None = None
    sampler: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    name: str
    load_format: str | None
    shape: dict[str, object]
    parameters: int | None = None


@dataclass(frozen=True)
class Flags:
    """As given, and as vLLM resolved them; both by vLLM's names with underscores. What was not seen is not there."""

    given: dict[str, object]
    resolved: dict[str, object]


@dataclass(frozen=True)
class LongPrompts:
    """Requests of a second kind among those of a load: ``at_once`` of them each ``every_s`` seconds, the first after
    as long. Lengths in tokens."""

    input_tokens: int
    output_tokens: int
    requests: int
    every_s: float
    at_once: int = 1


@dataclass(frozen=True)
class Traffic:
    """Requests of random tokens. Lengths in tokens; ``concurrency`` None sends them all at once.

    ``shared_prefix_tokens`` of the input are the same in every request. ``requests_per_s`` spreads the requests over
    time, at random intervals of that mean rate. ``range_ratio`` varies both lengths by up to this share of them.
    ``prompt_logprobs`` asks for the log-probabilities of the prompt's own tokens, so many alternatives for each.
    ``long_prompts`` come among these requests, which are then the short ones.

    Raises:
        ValueError: for lengths that a load of two kinds cannot vary.
    """

    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int | None = None
    shared_prefix_tokens: int | None = None
    requests_per_s: float | None = None
    range_ratio: float | None = None
    prompt_logprobs: int | None = None
    long_prompts: LongPrompts | None = None

    def __post_init__(self):
        other = (self.shared_prefix_tokens, self.range_ratio, self.prompt_logprobs)
        if self.long_prompts and any(value is not None for value in other):
            raise ValueError(
                "a load with long_prompts has two fixed lengths: leave shared_prefix_tokens, range_ratio and "
                "prompt_logprobs out"
            )

    def in_words(self) -> str:
        """A line: the lengths, how many requests, how they come, and what else is asked for."""
        spread = f" ± {self.range_ratio:.0%}" if self.range_ratio else ""
        how = "all at once"
        if self.requests_per_s:
            how = f"{self.requests_per_s:g} a second"
        elif self.concurrency:
            how = f"{self.concurrency} at a time"
        parts = [f"{self.requests} requests of {self.input_tokens:,} + {self.output_tokens} tokens{spread}", how]
        if self.prompt_logprobs is not None:
            parts.append("with prompt_logprobs")
        if long := self.long_prompts:
            parts.append(f"and among them {long.requests} of {long.input_tokens:,} + {long.output_tokens} tokens")
            parts.append(f"{long.at_once} at once every {long.every_s:g} s")
        return ", ".join(parts)

    @property
    def longest_tokens(self) -> int:
        """Of one request, prompt and answer together."""
        kinds = [self, *([self.long_prompts] if self.long_prompts else [])]
        return max(kind.input_tokens + kind.output_tokens for kind in kinds)


@dataclass(frozen=True)
class Neighbour:
    """Another process on the same GPUs. It takes memory until only ``leaves_free_gib`` are free on each.

    It is there before the server, or comes when the server is ready; and it goes when the phase ``leaves_in`` begins.
    """

    leaves_free_gib: float
    comes: Literal["before", "when_ready"] = "before"
    leaves_in: str | None = None


@dataclass(frozen=True)
class Timeline:
    """Memory over time, baseline subtracted: seconds since the start of the server, GiB.

    ``measure`` says what was sampled: ``device`` (NVML's total in use less the baseline) or ``host`` (the process
    group's share of host memory). ``rate_hz`` is the rate of the samples before every extreme was kept of them.
    """

    measure: Literal["device", "host"]
    rate_hz: float
    time_s: list[float]
    used_gib: list[float]


@dataclass(frozen=True)
class Rank:
    """One GPU (or the host), in vLLM's order of ranks. ``foreign_gib`` is what other processes held at the start."""

    stated: MemoryLedger | None
    seen: MemoryLedger | None
    timeline: Timeline | None
    foreign_gib: float | None = None


@dataclass(frozen=True)
class Phase:
    name: str
    start_s: float


@dataclass(frozen=True)
class Series:
    """vLLM's own metrics over time; ``preemptions`` counts up."""

    time_s: list[float]
    kv_cache_usage: list[float]
    running: list[float]
    waiting: list[float]
    preemptions: list[float]


@dataclass(frozen=True)
class Latency:
    """From ``vllm bench serve``. Summaries by name (mean, p50, p90, p99); ``ttft_samples_ms`` has a request each, and
    so have, in the same order, ``tpot_samples_ms`` (the mean time of a token after the first; 0 for an answer of one)
    and ``output_samples_tokens``; ``itl_quantiles_ms`` the 101 percentiles of all inter-token latencies, from the least
    to the most. ``longest_itl_samples_ms`` has the longest of each request that had any. ``by_kind`` has ``short`` and
    ``long``, of a load of both."""

    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2el_ms: dict[str, float]
    completed: int
    failed: int
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    input_tokens: int
    output_tokens: int
    ttft_samples_ms: list[float] = field(default_factory=list)
    itl_quantiles_ms: list[float] = field(default_factory=list)
    longest_itl_samples_ms: list[float] = field(default_factory=list)
    by_kind: dict[str, "Latency"] = field(default_factory=dict)
    tpot_samples_ms: list[float] = field(default_factory=list)
    output_samples_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Allocator:
    """PyTorch's allocator on one rank, read in the worker: now, and at most during the load."""

    allocated_gib: float
    reserved_gib: float
    peak_allocated_gib: float
    peak_reserved_gib: float
    inactive_split_gib: float


@dataclass(frozen=True)
class Trace:
    """What PyTorch's allocator held at each allocation and release, as milliseconds since the first and GiB; the
    extremes of many thousands."""

    time_ms: list[float]
    allocated_gib: list[float]


@dataclass(frozen=True)
class Steps:
    """What the scheduler put into the steps of a load, a value each, from vLLM's log line for each step.

    Context tokens are of prompts, generation tokens of answers. ``elapsed_ms`` is the time that vLLM states, which is
    no step's own where it schedules one ahead of another. The first steps are kept; ``left_out`` counts the rest.
    """

    context_requests: list[int]
    context_tokens: list[int]
    generation_requests: list[int]
    generation_tokens: list[int]
    elapsed_ms: list[float]
    left_out: int = 0

    @property
    def tokens(self) -> list[int]:
        """Of prompts and answers together, a step each."""
        return [a + b for a, b in zip(self.context_tokens, self.generation_tokens, strict=True)]

    @property
    def most_tokens(self) -> int:
        """In one step."""
        return max(self.tokens)

    @property
    def most_context_tokens(self) -> int:
        """In one step."""
        return max(self.context_tokens)


@dataclass(frozen=True)
class Load:
    """One of several loads that a run sent one after the other; times on the run's clock.

    ``peak_gib`` is the most that each rank held during it, baseline subtracted. ``preemptions`` are those of this load,
    and so are the tokens that it looked up in the prefix cache and those found there. ``trace`` is of the first rank.
    """

    traffic: Traffic
    start_s: float
    end_s: float
    peak_gib: list[float]
    latency: Latency | None = None
    preemptions: int | None = None
    allocator: list[Allocator] = field(default_factory=list)
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    trace: Trace | None = None
    steps: Steps | None = None


@dataclass(frozen=True)
class KVCache:
    """The pool as vLLM stated it; ``max_concurrency`` counts requests of ``max_model_len``."""

    tokens: int | None
    blocks: int | None
    block_size: int | None
    max_concurrency: float | None


@dataclass(frozen=True)
class MemoryBack:
    """Memory in use before the start and after the end, and how long it took to come back."""

    before_gib: float
    after_gib: float
    seconds: float | None


@dataclass(frozen=True)
class RunRecord:
    """One run. ``variables`` are those that it was given beside its flags; ``finding`` is the doctor's, where it
    failed (``doctor.Diagnosis.to_dict``)."""

    id: str
    lab: str
    recorded_at: str
    machine: Machine
    engine: Engine
    model: Model
    flags: Flags
    outcome: Outcome
    ranks: list[Rank]
    schema: int = SCHEMA
    repeat: int = 1
    seed: int = 0
    card: str | None = None
    traffic: Traffic | None = None
    loads: list[Load] = field(default_factory=list)
    prediction: dict[str, object] | None = None
    phases: list[Phase] = field(default_factory=list)
    series: Series | None = None
    latency: Latency | None = None
    kv: KVCache | None = None
    memory_back: MemoryBack | None = None
    instruments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    neighbour: Neighbour | None = None
    error: str | None = None
    finding: dict[str, object] | None = None
    log: list[str] = field(default_factory=list)

    @property
    def sent(self) -> Traffic | list[Traffic] | None:
        """What was sent, as ``lab.run`` takes it."""
        return [load.traffic for load in self.loads] if self.loads else self.traffic

    @property
    def served_flags(self) -> flags.ServeFlags:
        """The flags as given."""
        return flags.ServeFlags(**{**self.flags.given, "extra": tuple(self.flags.given.get("extra", ()))})

    @property
    def stated(self) -> MemoryLedger | None:
        """The first rank's ledger as vLLM's log stated it."""
        return self.ranks[0].stated if self.ranks else None

    @property
    def seen(self) -> MemoryLedger | None:
        """The first rank's ledger as the driver saw it."""
        return self.ranks[0].seen if self.ranks else None

    def where(self) -> str:
        """One line for a figure's caption: hardware and versions."""
        if self.machine.gpu:
            hardware = self.machine.hardware
        elif self.engine.backend == "cpu":
            hardware = f"CPU backend, {self.machine.cpu_cores} cores, host memory"
        else:
            hardware = "hardware not seen"
        if self.card:
            hardware += f" playing {self.card}"
        weights = ", dummy weights" if self.model.load_format == "dummy" else ""
        return f"{self.model.name}{weights}, vLLM {self.engine.vllm}, {hardware}, {self.recorded_at[:10]}"


# ---- the schema: reading JSON into the classes above, strictly ----


def _parse(kind, value, where: str):
    """``value`` as ``kind``, or a RecordError that names the place."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        choices = typing.get_args(kind)
        if value is None:
            if type(None) in choices:
                return None
            raise RecordError(f"{where}: a value is missing")
        return _parse(next(choice for choice in choices if choice is not type(None)), value, where)
    if origin is Literal:
        if value not in typing.get_args(kind):
            raise RecordError(f"{where}: {value!r} is none of {', '.join(map(str, typing.get_args(kind)))}")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise RecordError(f"{where}: a list is needed, not {type(value).__name__}")
        (item,) = typing.get_args(kind)
        return [_parse(item, element, f"{where}[{i}]") for i, element in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{where}: an object is needed, not {type(value).__name__}")
        _, item = typing.get_args(kind)
        return {key: _parse(item, element, f"{where}.{key}") for key, element in value.items()}
    if is_dataclass(kind):
        return _parse_class(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is not object and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
        raise RecordError(f"{where}: {kind.__name__} is needed, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where}: {value} is no number that JSON can hold")
    return value


def _parse_class(kind, value, where: str):
    if not isinstance(value, dict):
        raise RecordError(f"{where}: an object is needed, not {type(value).__name__}")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise RecordError(f"{where}: unknown {', '.join(unknown)}")
    missing = sorted(_required(kind) - set(value))
    if missing:
        raise RecordError(f"{where}: {', '.join(missing)} missing")
    absent = {f.name: None for f in fields(kind) if f.default is f.default_factory}
    given = {name: _parse(hints[name], element, f"{where}.{name}") for name, element in value.items()}
    try:
        return kind(**{**absent, **given})
    except ValueError as error:
        raise RecordError(f"{where}: {error}") from error


def _required(kind) -> set[str]:
    """The fields that a file must have: those with neither a default nor None among their values."""
    hints = typing.get_type_hints(kind)
    no_default = (f.name for f in fields(kind) if f.default is f.default_factory)
    return {name for name in no_default if type(None) not in typing.get_args(hints[name])}


def json_schema() -> dict:
    """The schema as JSON Schema 2020-12, made from the classes above."""
    definitions: dict[str, dict] = {}

    def of(kind) -> dict:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [of(arg) for arg in args]}
        if origin is Literal:
            return {"enum": list(args)}
        if origin is list:
            return {"type": "array", "items": of(args[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": of(args[1])}
        if is_dataclass(kind):
            if kind.__name__ not in definitions:
                definitions[kind.__name__] = {}
                hints = typing.get_type_hints(kind)
                definitions[kind.__name__] = {
                    "type": "object",
                    "additionalProperties": False,
                    "required": sorted(_required(kind)),
                    "properties": {name: of(hint) for name, hint in hints.items()},
                }
            return {"$ref": f"#/$defs/{kind.__name__}"}
        names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
        return {"type": names[kind]} if kind in names else {}

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recorded run of vLLM",
        **of(RunRecord),
        "$defs": definitions,
    }


def from_dict(data: dict) -> RunRecord:
    """A record from parsed JSON.

    Raises:
        RecordError: naming the first place where it breaks the schema.
    """
    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise RecordError(f"the record's schema is {version!r}, this memlab reads {SCHEMA}: update the older one")
    record = _parse_class(RunRecord, data, "record")
    validate(record)
    return record


def to_dict(record: RunRecord) -> dict:
    """The record for JSON, without what is None: a term that a view cannot know is absent."""
    return without_none(asdict(record))


def without_none(value):
    """Data for JSON, with no key whose value is None at any depth."""
    if isinstance(value, dict):
        return {key: without_none(element) for key, element in value.items() if element is not None}
    return [without_none(element) for element in value] if isinstance(value, list | tuple) else value


# ---- what a record must satisfy beyond its types ----

_PRIVATE = (
    (re.compile(r"(?<![\w.:/])/(?:home|root|Users|tmp|mnt|data|workspace|work|var|opt|usr)/\S+"), "a path"),
    (re.compile(r"[A-Za-z]:\\\\?Users"), "a path"),
    (re.compile(r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:\d{1,3}\.){3}\d{1,3}\b"), "an address"),
    (re.compile(r"\b(?:hf_|sk-)[A-Za-z0-9]{16,}"), "a token"),
)


def privacy_problems(text: str, names: tuple[str, ...] = ()) -> list[str]:
    """What in ``text`` may name a person or a machine: paths, addresses, tokens, and the ``names`` given."""
    found = [f"{what}: {match.group()[:60]}" for pattern, what in _PRIVATE for match in pattern.finditer(text)]
    words = (name for name in names if len(name) > 2)
    return found + [f"a name: {name}" for name in words if re.search(rf"\b{re.escape(name)}\b", text)]


def validate(record: RunRecord) -> None:
    """Hold a record to what its parts say of each other.

    Raises:
        RecordError: naming the first contradiction.
    """

    def need(condition: bool, message: str):
        if not condition:
            raise RecordError(f"record {record.id}: {message}")

    need(re.fullmatch(r"[a-z0-9][a-z0-9._-]*", record.id) is not None, "the id is for a file name: a-z, 0-9, . _ -")
    need(re.fullmatch(r"\d{4}-\d{2}-\d{2}T[\d:]+Z", record.recorded_at) is not None, "recorded_at is UTC, ISO 8601")
    for number, rank in enumerate(record.ranks):
        for ledger, view in ((rank.stated, "stated"), (rank.seen, "seen")):
            if ledger is None:
                continue
            need(ledger.view == view, f"rank {number}: the ledger under {view} says it is {ledger.view}")
            for identity in ledger.identities():
                need(
                    identity.holds,
                    f"rank {number}, {view}: {identity.name}? {identity.left_gib:.3f}, {identity.right_gib:.3f} GiB",
                )
        line = rank.timeline
        if line is not None:
            need(len(line.time_s) == len(line.used_gib), f"rank {number}: the timeline's two lists differ in length")
            pairs = zip(line.time_s, line.time_s[1:], strict=False)
            need(all(a <= b for a, b in pairs), f"rank {number}: the timeline runs backwards")
            if rank.seen is not None and rank.seen.peak_gib is not None and line.used_gib:
                highest = max(line.used_gib)
                need(
                    abs(highest - rank.seen.peak_gib) < 0.001,
                    f"rank {number}: the peak is {highest:.3f} in the timeline, {rank.seen.peak_gib:.3f} in the ledger",
                )
    for number, steps in enumerate(load.steps for load in record.loads):
        lengths = {len(value) for value in asdict(steps).values() if isinstance(value, list)} if steps else {1}
        need(len(lengths) == 1, f"load {number}: the lists of its steps differ in length")
    starts = [phase.start_s for phase in record.phases]
    need(starts == sorted(starts), "the phases are out of order")


def dumps(record: RunRecord) -> str:
    """The record's file: JSON with short lists on one line.

    Raises:
        RecordError: where it breaks the schema or is larger than 64 KiB.
    """
    data = to_dict(record)
    from_dict(json.loads(json.dumps(data)))
    text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False)
    text = re.sub(r"\[\n[^\[\]{}\"]*\]", lambda match: re.sub(r"\s+", "", match.group()), text) + "\n"
    size = len(text.encode())
    if size > MAX_BYTES:
        raise RecordError(f"record {record.id} takes {size} bytes of at most {MAX_BYTES}: make its series coarser")
    return text


def write(record: RunRecord, folder: Path) -> Path:
    """Write the record to ``folder``/ID.json, whole or not at all.

    Raises:
        RecordError: also where the disk is full or the folder cannot be written; the record stays with the caller.
    """
    text = dumps(record)
    path = folder / f"{record.id}.json"
    partial = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        if folder.exists():
            partial.unlink(missing_ok=True)
        raise RecordError(
            f"the record could not be written to {folder} ({error.strerror}): make room or name another folder. The "
            "run itself is not lost: write it again with record.write"
        ) from error
    return path


def read(path: Path) -> RunRecord:
    """The record in a file.

    Raises:
        RecordError: for a file that is missing, no JSON, or against the schema.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise RecordError(f"{path} is no JSON ({error}): fetch it again") from error
    try:
        return from_dict(data)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error


def read_all(folder: Path = RECORDS) -> list[RunRecord]:
    """Every record under ``folder``, by id."""
    paths = (path for path in folder.rglob("*.json") if not path.name.endswith(".schema.json"))
    return sorted((read(path) for path in paths), key=lambda record: record.id)


# ---- what a replay looks for ----


def resolve(
    asked: flags.ServeFlags, machine: Machine, backend: str, vllm: str, model_max_len: int, card: str | None = None
) -> flags.ServeFlags:
    """``asked`` with the scheduler's flags as vLLM fills them in on ``machine``, or on the card that it plays."""
    if backend == "cpu":
        defaults = cards.cpu_batch_defaults(asked.world_size)
    else:
        played = cards.find(card) if card else None
        total, name = (played.total_gib, played.name) if played else (machine.total_gib or 0, machine.gpu or "")
        defaults = cards.batch_defaults(total, name, version_of(vllm))
    return flags.resolve(asked, *defaults, model_max_len)


def version_of(vllm: str) -> tuple[int, int]:
    """(0, 33) of ``0.33.0``."""
    major, minor = vllm.split(".")[:2]
    return int(major), int(minor)


def memory_flags(
    asked: flags.ServeFlags, machine: Machine, backend: str, vllm: str, model_max_len: int, card: str | None = None
) -> dict:
    """The flags that decide memory, as vLLM would fill them in; equal dictionaries, equal memory."""
    resolved = resolve(asked, machine, backend, vllm, model_max_len, card).set()
    defaults = {
        "gpu_memory_utilization": 0.92,
        "kv_cache_dtype": "auto",
        "enforce_eager": False,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "dtype": "auto",
        "long_prefill_token_threshold": 0,
        "enable_prefix_caching": True,
        "cpu_offload_gb": 0.0,
    }
    kept = {**defaults, **resolved, "extra": list(asked.extra)}
    for other in ("seed", "load_format"):
        kept.pop(other, None)
    return kept


def differences(
    record: RunRecord,
    lab: str,
    model: str,
    asked: flags.ServeFlags,
    traffic,
    card,
    instruments=(),
    variables: Mapping[str, str] | None = None,
    neighbour: Neighbour | None = None,
) -> dict:
    """Where a record differs from what is asked for: name to (asked, recorded)."""
    found = {}
    for name, wanted, recorded in (
        ("lab", lab, record.lab),
        ("model", model, record.model.name),
        ("card", card, record.card),
        ("traffic", traffic or None, record.sent),
        ("instruments", sorted(instruments), sorted(record.instruments)),
        ("variables", dict(variables or {}), record.variables),
        ("neighbour", neighbour, record.neighbour),
    ):
        if wanted != recorded:
            found[name] = (wanted, recorded)
    if record.lab == WATCHED:
        return found
    length = model_max_len(record)
    context = (record.machine, record.engine.backend, record.engine.vllm, length, record.card)
    wanted, recorded = memory_flags(asked, *context), memory_flags(record.served_flags, *context)
    for name in sorted(set(wanted) | set(recorded)):
        if wanted.get(name) != recorded.get(name):
            found[name] = (wanted.get(name), recorded.get(name))
    return found


def model_max_len(record: RunRecord) -> int:
    """The model's own limit in tokens."""
    try:
        return shapes.from_config(record.model.shape).max_position_embeddings
    except ShapeError:
        return int(record.model.shape.get("max_position_embeddings") or record.flags.resolved["max_model_len"])


def find(
    records: list[RunRecord],
    lab: str,
    model: str,
    asked: flags.ServeFlags,
    traffic: Traffic | list[Traffic] | None = None,
    card: str | None = None,
    machine: str | None = None,
    vllm: str | None = None,
    instruments: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
    neighbour: Neighbour | None = None,
) -> list[RunRecord]:
    """The recorded repeats of a run.

    Raises:
        RecordError: where there is none, naming the nearest and in what it differs.
    """
    pool = [
        record
        for record in records
        if machine in (None, record.machine.name) and (vllm is None or record.engine.vllm == vllm)
    ]
    if not pool:
        raise RecordError(f"no run is recorded on {machine or 'any machine'}: run the lab live")
    more = (instruments, variables, neighbour)
    gaps = [(differences(record, lab, model, asked, traffic, card, *more), record) for record in pool]
    matches = [record for gap, record in gaps if not gap]
    if matches:
        return sorted(matches, key=lambda record: record.repeat)
    gap, nearest = min(gaps, key=lambda pair: len(pair[0]))
    parts = ", ".join(f"{name} {recorded} instead of {wanted}" for name, (wanted, recorded) in gap.items())
    raise RecordError(f"this run is not recorded. The nearest is {nearest.id}: {parts}. Choose that, or run it live")


def _plain(traffic: Traffic | list[Traffic] | None):
    """Traffic for an id: what a traffic leaves open does not count, so that a new kind of it changes no id."""
    if isinstance(traffic, list):
        return [_plain(each) for each in traffic]
    given = asdict(traffic) if traffic else None
    return given and {key: value for key, value in given.items() if value is not None or key == "concurrency"}


def make_id(
    machine: Machine,
    engine: Engine,
    model: str,
    asked: flags.ServeFlags,
    traffic,
    card,
    repeat: int,
    neighbour: Neighbour | None = None,
) -> str:
    """A readable id: machine, version, model, a hash of everything else that was asked for, and the repeat."""
    more = [asdict(neighbour)] if neighbour else []
    rest = json.dumps([asdict(asked), _plain(traffic), card, engine.environment, *more], sort_keys=True)
    digest = hashlib.sha256(rest.encode()).hexdigest()[:6]
    kind = "eager" if asked.enforce_eager else "graphs"
    if engine.backend == "cpu":
        kind = "cpu"
    slug = re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower()).strip("-")
    return f"{machine.name}-{engine.vllm}-{slug}-{kind}-{digest}-r{repeat}"
