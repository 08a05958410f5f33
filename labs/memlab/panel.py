"""A control panel without its widgets: which controls there are, what each offers, what is legal, and what was run.

``widgets`` draws it. Everything here works with no front end, so that a notebook runs from top to bottom.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from memlab import cards, flags, lab, launch, ledger, record, shapes
from memlab.errors import FlagError, MemlabError
from memlab.flags import ServeFlags
from memlab.record import RunRecord, Traffic
from memlab.units import GIB, show_gib, show_tokens

FLAGS = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "enforce_eager",
    "block_size",
    "kv_cache_dtype",
    "tensor_parallel_size",
)
TRAFFIC = ("requests", "input_tokens", "output_tokens", "concurrency")
NAMES = ("model", "card", *FLAGS, *TRAFFIC)
CHOICES = {"card", "enable_chunked_prefill", "enforce_eager", "kv_cache_dtype", "tensor_parallel_size", "block_size"}

HELP = {
    "model": "a lab model (made-up weights, no download), a folder, or a name on Hugging Face",
    "card": "a smaller GPU that this one plays; gives its capacity, never its speed",
    "requests": "requests that are sent once the server is ready",
    "input_tokens": "tokens of prompt in each request",
    "output_tokens": "tokens of answer to each request",
    "concurrency": "requests under way at once",
    # Without the default in brackets: the control says what it is on this machine.
    **{f.name: re.sub(r" \([^()]*\)$", "", f.metadata["help"]) for f in flags.MODELLED},
}
_OFFERED = {
    "gpu_memory_utilization": (0.25, 0.5, 0.7, 0.8, 0.9, 0.95),
    "kv_cache_memory_bytes": (256 << 20, GIB // 2, GIB, 2 * GIB, 4 * GIB, 8 * GIB),
    "max_num_seqs": (1, 16, 64, 128, 256, 512, 1024),
    "max_num_batched_tokens": (512, 1024, 2048, 4096, 8192, 16384, 32768),
    "max_model_len": (2048, 4096, 8192, 16384, 32768, 65536, 131072),
    "enable_chunked_prefill": (True, False),
    "long_prefill_token_threshold": (0, 256, 512, 1024, 2048),
    "enforce_eager": (True, False),
    "block_size": (16, 32, 64, 128),
    "kv_cache_dtype": ("auto", "fp8"),
    "tensor_parallel_size": (1, 2, 4, 8),
    "requests": (1, 8, 16, 64),
    "input_tokens": (128, 1000, 4000, 8000, 16000),
    "output_tokens": (16, 32, 64, 256),
    "concurrency": (1, 2, 4, 8, 16),
}
# vLLM's own defaults where no card and no other flag decides (vllm/engine/arg_utils.py, vllm/config, 0.26 to 0.33).
_DEFAULTS = {
    "gpu_memory_utilization": 0.92,
    "long_prefill_token_threshold": 0,
    "enforce_eager": False,
    "kv_cache_dtype": "auto",
    "tensor_parallel_size": 1,
}


@dataclass(frozen=True)
class Settings:
    """What one run is asked for. Several loads, one after the other, are a tuple; the controls leave them alone."""

    model: str
    flags: ServeFlags
    traffic: Traffic | tuple[Traffic, ...] | None = None
    card: str | None = None

    @property
    def series(self) -> bool:
        """Whether several loads are sent."""
        return isinstance(self.traffic, tuple)

    def value(self, name: str):
        """The value of a control; None leaves it to vLLM, sends no traffic, or plays no card."""
        if name in ("model", "card"):
            return getattr(self, name)
        if name in TRAFFIC:
            return getattr(self.traffic, name) if self.traffic and not self.series else None
        return getattr(self.flags, name)

    def with_(self, **changes) -> "Settings":
        """A copy with some controls changed. ``requests=None`` sends nothing."""
        unknown = set(changes) - set(NAMES)
        if unknown:
            raise FlagError(f"no control {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
        own = {name: changes[name] for name in ("model", "card") if name in changes}
        flags_ = {name: value for name, value in changes.items() if name in FLAGS}
        sent = {name: value for name, value in changes.items() if name in TRAFFIC}
        traffic = self.traffic
        if sent and self.series:
            raise FlagError(f"{', '.join(sent)}: this lab sends a series of loads, which its controls do not change")
        if sent:
            before = {name: self.value(name) for name in TRAFFIC}
            after = {**before, **sent}
            if after["requests"] is None:
                traffic = None
            else:
                lengths = {name: after[name] or 128 for name in ("input_tokens", "output_tokens")}
                traffic = replace(self.traffic or Traffic(128, 128, 1), **{**after, **lengths})
        return replace(self, flags=self.flags.with_(**flags_), traffic=traffic, **own)


def _settings_of(run: RunRecord) -> Settings:
    return Settings(run.model.name, run.served_flags, tuple(run.sent) if run.loads else run.traffic, run.card)


@dataclass(frozen=True)
class Control:
    """``values`` are offered, None where vLLM may decide; ``free`` takes others too; ``off`` says why it is off."""

    name: str
    values: tuple
    free: bool
    off: str = ""


def show(name: str, value) -> str:
    """A value as its control shows it and reads it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "kv_cache_memory_bytes":
        for unit, size in (("G", GIB), ("M", 1 << 20)):
            if value and value % size == 0:
                return f"{value // size}{unit}"
    return str(value)


def parse(name: str, text: str):
    """A value from the text of its control; empty is None.

    Raises:
        FlagError: for what vLLM's own parser would refuse.
    """
    text = text.strip()
    if not text:
        return None
    if name in ("model", "card"):
        return text
    if name in TRAFFIC:
        if not text.isascii() or not text.isdigit() or int(text) < 1:
            raise FlagError(f"{name} {text!r} is no count: give a whole number from 1 on, or leave it empty")
        return int(text)
    option = "--" + name.replace("_", "-")
    if text in ("on", "off"):
        return getattr(flags.from_args([option if text == "on" else option.replace("--", "--no-", 1)]), name)
    return getattr(flags.from_args([f"{option}={text}"]), name)


@dataclass
class Panel:
    """Settings of one server, and the runs that were made of them.

    Args:
        lab: whose runs these are (``01-ledger``).
        here: where they run (``lab.here``).
        model, base, traffic, card: the settings to begin with. Of a series of loads, a server gets those whose
            requests fit its ``max_model_len``.
        teaches: the controls that stand in front.
    """

    lab: str
    here: "lab.Here"
    model: str
    base: ServeFlags
    traffic: Traffic | list[Traffic] | None = None
    card: str | None = None
    teaches: tuple[str, ...] = ("gpu_memory_utilization", "max_num_seqs", "enforce_eager")
    runs: list[RunRecord] = field(default_factory=list, init=False)

    def __post_init__(self):
        unknown = set(self.teaches) - set(NAMES)
        if unknown:
            raise FlagError(f"no control {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
        self._asked_of: dict[str, Settings] = {}
        self._thread: threading.Thread | None = None
        self.running = False
        self.mistakes: dict[str, str] = {}
        self._cancel = threading.Event()
        self._error: BaseException | None = None
        self._started: Settings | None = None
        self.live: lab.Live | None = None
        recorded = self._recorded() if self.here.replayed else []
        self.points = list(dict.fromkeys(_settings_of(each) for each in recorded))
        versions = {each.engine.vllm for each in recorded} or {lab.vllm_version()}
        self.vllm = max(versions, key=record.version_of)
        self.settings = self._first()
        self.word = ""
        if self.here.replayed:
            self._snap(self.settings, ())

    # ---- settings ----

    @property
    def shape(self) -> shapes.ModelShape | None:
        return shapes.LAB_MODELS.get(self.settings.model)

    def _first(self) -> Settings:
        traffic = tuple(self.traffic) if isinstance(self.traffic, list) else self.traffic
        return Settings(self.model, self.base, traffic, self.card)

    @property
    def asked(self) -> Settings:
        """The settings that are started: without the arguments that a panel leaves out, and loads that do not fit."""
        settings = replace(self.settings, flags=launch.safe(self.settings.flags)[0])
        longest = self.resolved.max_model_len
        if settings.series and longest and longest > 0:
            fitting = tuple(load for load in settings.traffic if load.longest_tokens <= longest)
            settings = replace(settings, traffic=fitting)
        return settings

    def set(self, **changes) -> str:
        """Change controls; returns what else moved, in replay, where only recorded runs can be shown."""
        self._take(self.settings.with_(**changes), tuple(changes))
        return self.word

    def enter(self, name: str, text: str) -> None:
        """Take what a reader typed into a control; what cannot be read is kept as a mistake, and blocks a run."""
        try:
            value = parse(name, text)
        except FlagError as error:
            self.mistakes[name] = str(error)
            return
        self.mistakes.pop(name, None)
        self.set(**{name: value})

    def reset(self) -> None:
        """The settings to begin with."""
        self._take(self._first(), ())

    def paste(self, text: str) -> str:
        """Take model and flags from a launch of vLLM (``launch.read``); returns what there is to say of it.

        Raises:
            FlagError: for a text that holds none; nothing is changed then.
        """
        found = launch.read(text)
        name = found.model
        if self.here.replayed and name not in {point.model for point in self.points}:
            raise MemlabError(
                f"{name} is not recorded, so it cannot be replayed: there are "
                f"{', '.join(sorted({point.model for point in self.points}))}"
            )
        off = {control.name: control.off for control in self.controls() if control.off}
        given = found.flags.set()
        ignored = [f"{name} is left as it was: {off[name]}" for name in given if name in off and not self.here.replayed]
        kept = {name: getattr(self.settings.flags, name) for name in off if name in FLAGS}
        if self.here.backend == "cpu" and found.flags.kv_cache_memory_bytes is None:
            kept["kv_cache_memory_bytes"] = self.settings.flags.kv_cache_memory_bytes
        serve = found.flags if self.here.replayed else found.flags.with_(**kept)
        self._take(replace(self.settings, model=name, flags=serve), FLAGS if self.here.replayed else ())
        return ". ".join(filter(None, [f"Taken: {name}", *found.notes, *ignored, self.word]))

    def _take(self, settings: Settings, moved: tuple[str, ...]) -> None:
        self.word = ""
        self.mistakes = {name: said for name, said in self.mistakes.items() if name not in moved} if moved else {}
        if self.here.replayed:
            self._snap(settings, moved)
        else:
            self.settings = settings

    def _snap(self, wanted: Settings, moved: tuple[str, ...]) -> None:
        """To the recorded run nearest to ``wanted``: one that has what was ``moved``, where there is one.

        A flag that is unset and one that has vLLM's default for it are the same run, whichever of the two was recorded.
        """
        taken = self._resolve(wanted.flags, wanted.card)

        def differs(point: Settings, name: str) -> bool:
            asked, known = wanted.value(name), point.value(name)
            if name in FLAGS and known is None and asked is not None:
                known = getattr(self._resolve(point.flags, point.card), name)
            asked = getattr(taken, name) if asked is None and name in FLAGS else asked
            return known not in (asked, wanted.value(name))

        def distance(point: Settings) -> tuple[int, int, int]:
            literally = [name for name in NAMES if point.value(name) != wanted.value(name)]
            return sum(name in moved for name in literally), sum(differs(point, name) for name in NAMES), len(literally)

        nearest = min(self.points, key=distance)
        apart = [name for name in NAMES if differs(nearest, name)]
        self.settings = nearest
        if apart:
            changes = ", ".join(f"{name} {show(name, nearest.value(name)) or self.unset(name)}" for name in apart)
            self.word = f"Only recorded runs can be replayed. The nearest has {changes}"

    def _recorded(self) -> list[RunRecord]:
        """The lab's runs on this machine that a panel can ask for: with nothing beside the flags, and of one load or
        several as its own."""
        found = [
            each
            for each in record.read_all()
            if each.lab == self.lab and each.machine.name == self.here.machine.name
            if not (each.instruments or each.variables or each.neighbour)
            if (each.sent is None or bool(each.loads) == isinstance(self.traffic, list))
        ]
        if not found:
            raise MemlabError(f"no run of {self.lab} is recorded on {self.here.machine.name}: run the lab live")
        return found

    # ---- controls ----

    def controls(self) -> list[Control]:
        """Every control with what it offers now, those that are taught first."""
        return [self.control(name) for name in (*self.teaches, *(name for name in NAMES if name not in self.teaches))]

    def control(self, name: str) -> Control:
        """One control with what it offers now."""
        if self.here.replayed:
            values = sorted({point.value(name) for point in self.points}, key=_order)
            if name in TRAFFIC and self._off(name):
                return Control(name, (None,), False, self._off(name))
            if name in TRAFFIC and name != "requests":
                values = sorted({point.value(name) for point in self.points if point.traffic}, key=_order)
            off = "" if len(values) > 1 else "recorded with this value only"
            return Control(name, tuple(values), False, off)
        off = self._off(name)
        if name == "model":
            return Control(name, tuple(dict.fromkeys([*self._models(), self.settings.model])), True, off)
        if off:
            return Control(name, (self.settings.value(name),), name not in CHOICES, off)
        values = [value for value in self._values(name) if value is not None]
        may_be_unset = not (name == "kv_cache_memory_bytes" and self.here.backend == "cpu")
        if self.settings.traffic is not None and name in ("input_tokens", "output_tokens"):
            may_be_unset = False
        now = self.settings.value(name)
        if now is not None and now not in values:
            values = sorted([*values, now], key=_order)
        return Control(name, ((None,) if may_be_unset else ()) + tuple(values), name not in CHOICES, "")

    def _models(self) -> list[str]:
        """The lab models that fit: on the CPU those whose weights take less than a quarter of the host's memory."""
        if self.here.backend != "cpu":
            return list(shapes.PANEL_MODELS)
        limit = (self.here.machine.total_gib or 0) / 4
        return [name for name in shapes.PANEL_MODELS if ledger.weights_gib(shapes.LAB_MODELS[name]) < limit]

    def _values(self, name: str) -> tuple:
        machine, shape = self.here.machine, self.shape
        if name == "card":
            return tuple(c.name for c in cards.CARDS.values() if c.total_gib + 1 <= (machine.total_gib or 0))
        values = _OFFERED[name]
        if name == "max_model_len" and shape:
            values = tuple(value for value in values if value <= shape.max_position_embeddings)
        elif name == "long_prefill_token_threshold" and self.resolved.max_model_len:
            values = tuple(value for value in values if value <= self.resolved.max_model_len)
        elif name == "block_size" and self.here.backend == "cpu":
            values = tuple(value for value in values if value % 32 == 0)
        elif name == "kv_cache_dtype" and self.here.backend == "cuda":
            values = tuple(value for value in values if not self._played().refuses(ServeFlags(kv_cache_dtype=value)))
        elif name == "tensor_parallel_size":
            values = tuple(value for value in values if not self._refuses_ranks(value))
        elif name == "kv_cache_memory_bytes":
            values = tuple(value for value in values if value / GIB < (machine.total_gib or 0) / 4)
        return values

    def _off(self, name: str) -> str:
        """Why a control does nothing on this machine, or an empty string."""
        if self.settings.series and name in TRAFFIC:
            return "this lab sends a series of loads"
        if self.settings.traffic is None and name in TRAFFIC and name != "requests":
            return "no requests are sent"
        if self.here.backend != "cpu":
            if name == "card" and not self._values("card"):
                return "no smaller card is known"
            if name == "tensor_parallel_size" and self.here.machine.gpu_count < 2:
                return "there is one GPU"
            return ""
        return {
            "card": "the CPU backend has no card to play another",
            "gpu_memory_utilization": "the CPU backend would take this share of the host: give kv_cache_memory_bytes",
            "enforce_eager": "the CPU backend has no CUDA graphs",
            "tensor_parallel_size": "the CPU backend has no GPUs to share a layer",
        }.get(name, "")

    def _played(self) -> cards.Card:
        """The card whose rules hold: the one that is played, or this machine's own."""
        if self.settings.card:
            return cards.find(self.settings.card)
        machine = self.here.machine
        capability = tuple(machine.compute_capability or (0, 0))
        return cards.Card(machine.gpu or "this GPU", machine.total_gib or 0, capability)

    def unset(self, name: str) -> str:
        """What an unset control means, in words: vLLM's default on this machine where there is one."""
        if name == "card":
            return "the card itself"
        if self.settings.series and name in TRAFFIC:
            return "a series of loads"
        if name == "requests":
            return "none, start only"
        if name == "concurrency":
            return "all at once"
        if name in TRAFFIC:
            return "none"
        value = self.default(name)
        return "vLLM's default" if value is None else f"vLLM's default: {show(name, value)}"

    def default(self, name: str):
        """What vLLM would fill in for a flag that is left to it, on this machine or on the card it plays."""
        if name == "block_size":
            return 128 if self.here.backend == "cpu" else 16
        if name in _DEFAULTS:
            return _DEFAULTS[name]
        if name not in FLAGS or self.shape is None:
            return None
        return getattr(self._resolve(self.settings.flags.with_(**{name: None}), self.settings.card), name)

    @property
    def resolved(self) -> ServeFlags:
        """The flags with the scheduler's filled in as vLLM would; as given for a model whose limit is not known."""
        return self._resolve(self.settings.flags, self.settings.card)

    def _resolve(self, asked: ServeFlags, card: str | None) -> ServeFlags:
        """``asked`` as vLLM fills it in on this machine, or on the ``card`` that it plays."""
        if self.shape is None:
            return asked
        length = self.shape.max_position_embeddings
        return record.resolve(asked, self.here.machine, self.here.backend, self.vllm, length, card)

    # ---- what is legal ----

    def problem(self) -> str:
        """Why these settings cannot be started, in vLLM's terms; empty where they can."""
        try:
            self.check()
        except MemlabError as error:
            return str(error)
        return ""

    def check(self) -> None:
        """Refuse what vLLM, the card or this machine refuses before anything is started.

        Raises:
            FlagError: naming the rule and the way out.
        """
        for mistake in self.mistakes.values():
            raise FlagError(mistake)
        settings, backend = self.settings, self.here.backend
        serve, traffic = settings.flags, settings.traffic
        if not (settings.model or "").strip() or settings.model.startswith("-"):
            raise FlagError("no model is named: choose a lab model, or give a folder or a name on Hugging Face")
        if "://" in settings.model:
            raise FlagError(
                f"{settings.model} is an address: a lab starts a lab model, a folder, or a Hugging Face name"
            )
        if serve.load_format not in launch.SAFE_LOAD_FORMATS:
            raise FlagError(f"load_format {serve.load_format} fetches weights by other means: leave it to vLLM")
        limit = self.shape.max_position_embeddings if self.shape else None
        flags.check(serve, limit)
        flags.check(self.resolved, limit)
        if self.here.replayed:
            return
        if backend == "cpu":
            self._check_cpu(serve)
        else:
            refusal = self._played().refuses(serve)
            if refusal:
                raise FlagError(refusal)
        ranks = self._refuses_ranks(serve.tensor_parallel_size or 1, serve.pipeline_parallel_size or 1)
        if ranks:
            raise FlagError(ranks)
        longest = self.resolved.max_model_len
        if settings.series:
            if not self.asked.traffic:
                raise FlagError(f"no load of this lab fits max_model_len ({longest}): raise it")
        elif traffic and longest and longest > 0 and traffic.input_tokens + traffic.output_tokens > longest:
            raise FlagError(
                f"a request of {traffic.input_tokens} and {traffic.output_tokens} tokens is longer than max_model_len "
                f"({longest}): vLLM would refuse it. Shorten it, or raise max_model_len"
            )

    def _check_cpu(self, serve: ServeFlags) -> None:
        if serve.gpu_memory_utilization is not None:
            raise FlagError(f"gpu_memory_utilization is off here: {self._off('gpu_memory_utilization')}")
        if serve.kv_cache_memory_bytes is None:
            raise FlagError("kv_cache_memory_bytes must be given: vLLM would take nearly all of the host's memory")
        total = self.here.machine.total_gib or 0
        if serve.kv_cache_memory_bytes / GIB > 0.8 * total:
            pool = show_gib(serve.kv_cache_memory_bytes / GIB)
            raise FlagError(f"a pool of {pool} does not leave enough of the host's {show_gib(total)}: lower it")
        if serve.block_size is not None and serve.block_size % 32:
            raise FlagError(f"block_size {serve.block_size}: the CPU backend's kernels take multiples of 32")

    def _refuses_ranks(self, ranks: int, groups: int = 1) -> str:
        """Why vLLM cannot spread the model over so many GPUs here (vllm/config/model.py, 0.32:1545-1550)."""
        heads = self.shape.num_attention_heads if self.shape else 0
        if heads % ranks:
            return (
                f"tensor_parallel_size {ranks}: the model's {heads} attention heads must be divisible by it; "
                "choose a divisor"
            )
        key_value = self.shape.num_key_value_heads if self.shape else ranks
        if max(key_value, ranks) % min(key_value, ranks):
            return f"tensor_parallel_size {ranks}: {key_value} key-value heads cannot be shared out evenly"
        count = max(1, self.here.machine.gpu_count)
        if ranks * groups > count:
            return f"tensor_parallel_size {ranks} needs {ranks * groups} GPUs, this machine has {count}: lower it"
        return ""

    def notices(self) -> list[str]:
        """What a reader should know before a start that is legal."""
        found = launch.safe(self.settings.flags)[1]
        if self.here.replayed or self.problem():
            return found
        left_out = len(self.settings.traffic) - len(self.asked.traffic) if self.settings.series else 0
        if left_out:
            found.append(f"{left_out} of the loads do not fit max_model_len and are left out")
        if self.shape is None:
            found.append(f"{self.settings.model} is no lab model: vLLM loads real weights, and may download them")
        predicted, longest = self.prediction(), self.resolved.max_model_len
        if predicted and predicted.kv_tokens is not None and predicted.kv_tokens < longest:
            found.append(
                f"the planner expects a pool of {show_tokens(predicted.kv_tokens)}, less than one request of "
                f"{longest}: vLLM is likely to refuse the start. That is a result too"
            )
        return found

    def prediction(self) -> ledger.Prediction | None:
        """The planner's ledger for the current settings; None for a model whose shape is not known."""
        asked = self.asked
        return lab.prediction(self.here, asked.model, asked.flags, asked.card, self.vllm)

    # ---- runs ----

    def start(self, watch: Callable[[], None] = lambda: None, done: Callable[[], None] = lambda: None) -> None:
        """Run the current settings in a thread; in replay at once. ``watch`` is called twice a second, ``done`` last.

        Raises:
            MemlabError: while a run goes on, and for settings that are not legal.
        """
        if self.running:
            raise MemlabError("a run goes on: stop it first, or wait for it")
        self.check()
        asked = self.asked
        if self.here.replayed:
            self._run(asked, lambda live: None, on_phase=None)
            done()
            return
        self._cancel.clear()
        self._started = asked

        def show_live(live) -> None:
            self.live = live
            watch()

        def work() -> None:
            try:
                self._run(asked, show_live, on_phase=None)
            except BaseException as error:  # kept: wait() raises it in the notebook's own thread
                self._error = error
            self.live, self.running = None, False
            try:
                done()
            except BaseException as error:
                self._error = self._error or error

        self.running = True
        self._thread = threading.Thread(target=work, name="memlab run", daemon=True)
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """What ended the last run in the thread and was not raised yet."""
        return self._error

    def _run(self, asked: Settings, watch, on_phase) -> RunRecord:
        found = lab.run(
            asked.model,
            asked.flags,
            list(asked.traffic) if asked.series else asked.traffic,
            asked.card,
            self.here.mode,
            lab=self.lab,
            on_phase=on_phase,
            watch=watch,
            cancel=self._cancel,
        )
        self._asked_of[found.id] = asked
        self.runs = [each for each in self.runs if each.id != found.id] + [found]
        return found

    def stop(self) -> None:
        """Stop the server in order; the record is kept. Returns at once."""
        self._cancel.set()

    def wait(self) -> None:
        """Wait for the run in the thread, and raise what ended it. The kernel's interrupt stops the server.

        Raises:
            Exception: whatever the run raised, once.
        """
        if not self.running:
            self.raise_error()
            return
        thread, said = self._thread, 0
        try:
            while thread is not None and thread.is_alive():
                thread.join(0.2)
                phases = self.live.phases if self.live else []
                for phase in phases[said:]:
                    lab.progress_line(phase.name, phase.start_s)
                    said += 1
        except KeyboardInterrupt:
            self.stop()
            thread.join()
            raise
        self.raise_error()

    def raise_error(self) -> None:
        """Raise what ended the last run in the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def result(self) -> RunRecord:
        """The newest run of exactly these settings that was not stopped; runs now where there is none.

        Raises:
            Exception: whatever a run in the thread raised; it is never lost.
            FlagError: for settings that are not legal.
        """
        if self.running and self._started != self.asked:
            print("A run of other settings goes on: waiting for it. The kernel's interrupt stops it.", flush=True)
        self.wait()
        self.check()
        asked = self.asked
        for found in reversed(self.runs):
            if self._asked_of[found.id] == asked and found.outcome != "stopped":
                return found
        self._cancel.clear()
        found = self._run(asked, self._watch_result, lab.progress_line)
        self.changed()
        return found

    def _watch_result(self, live) -> None:
        """While ``result`` itself runs: a subclass draws."""

    def changed(self) -> None:
        """The list of runs has changed: a subclass draws."""

    def remove(self, run: RunRecord) -> None:
        """Take a run out of the comparison; its record stays on disk."""
        self.runs = [each for each in self.runs if each.id != run.id]
        self.changed()


def _order(value) -> tuple:
    return value is not None, isinstance(value, str), value if value is not None else 0
