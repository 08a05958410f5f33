"""``run``: one run of vLLM, live or replayed, that returns a ``RunRecord`` whatever became of it."""

import contextlib
import os
import platform
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

from memlab import cards, checks, doctor, gpu, metrics, models, record, server, traffic, vllm_log, vllm_main
from memlab.errors import FlagError, MemlabError, RecordError, ServerError
from memlab.flags import ServeFlags, check
from memlab.ledger import MemoryLedger, Prediction, predict, weights_gib
from memlab.process import Child
from memlab.record import (
    RECORDS,
    Allocator,
    Engine,
    Flags,
    Load,
    Machine,
    Model,
    Neighbour,
    Rank,
    RunRecord,
    Steps,
    Timeline,
    Trace,
    Traffic,
)
from memlab.units import GIB, show_gib, show_seconds
from memlab.warm import Warm, keep_a_load_generator

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULT_MACHINE = "h200"  # what a reader without a GPU sees
IMPERSONAL = {"root", "user", "ubuntu", "debian", "admin", "runner", "localhost"}  # names that name nobody
ENV = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": server.HOST}
LOCAL_ENV = {**ENV, "HF_HUB_OFFLINE": "1"}  # for a lab model, which needs no download
ROOMY_CORES = 8  # from here on a second process can import vLLM beside a start
# What a run can read besides, and what the server needs for any of it. It listens on the loopback interface alone.
INSTRUMENTS = {
    "allocator": "PyTorch's allocator, between the loads",
    "snapshot": "every allocation of each load, with a file for PyTorch's memory viewer beside the run's log",
    "steps": "what the scheduler put into each step of each load, from vLLM's log",
}
CORES = "VLLM_CPU_OMP_THREADS_BIND"  # the cores of each rank on the CPU backend
IN_WORKER = {"allocator", "snapshot"}  # read through READER, where PyTorch has a caching allocator
READER = ("--worker-extension-cls", "memlab.worker_extension.MemoryReader")
READER_ENV = {"VLLM_SERVER_DEV_MODE": "1"}
STEP_LINES = ("--enable-logging-iteration-details",)
STEERING = ("VLLM_", "PYTORCH_", "TORCH_", "NCCL_", "CUDA_MODULE_LOADING")  # what a run's own variables begin with
SMALL_CARD_GIB = 20  # below this the 8B shape in bf16 does not fit
TRACE_BUCKETS = 150  # at most four times as many points of an allocator's history
_numbering = threading.Lock()  # two runs of one setting that end at once must not take one number
MOST_STEPS = 1000  # of a load: two such loads leave a record below its size, and lab 4 on a CPU takes at most 996


def runs_folder() -> Path:
    """Where live runs go: ``MEMLAB_RUNS``, else ``runs/`` in the project, which git ignores."""
    return Path(os.environ.get("MEMLAB_RUNS") or ROOT / "runs")


def in_book() -> bool:
    """Whether the book is being built: its pages have no kernel, and are read on other machines than this."""
    return os.environ.get("MEMLAB_BOOK") == "1"


def backend() -> str | None:
    """``cuda``, ``cpu`` or None, by what is installed and there; ``MEMLAB_BACKEND=cpu`` overrides."""
    try:
        installed = vllm_main.distribution()
    except metadata.PackageNotFoundError:
        return None
    if installed == "vllm-cpu" or os.environ.get("MEMLAB_BACKEND") == "cpu":
        return "cpu"
    return "cuda" if gpu.visible() else None


def vllm_version() -> str:
    """The installed vLLM's version."""
    return metadata.version(vllm_main.distribution())


@dataclass(frozen=True)
class Here:
    """Where a lab runs: ``mode`` is live or replay, ``backend`` whose numbers it shows."""

    mode: str
    backend: str
    machine: Machine

    @property
    def replayed(self) -> bool:
        return self.mode == "replay"

    @property
    def default_model(self) -> str:
        """The lab model that suits this machine."""
        if self.backend == "cpu":
            return "tiny-llama"
        return "llama-3.1-8b" if (self.machine.total_gib or 0) >= SMALL_CARD_GIB else "qwen2.5-0.5b"

    def choose(self, cuda, cpu):
        """The value for this backend."""
        return cpu if self.backend == "cpu" else cuda

    def share_of_card(self, size_gib: float) -> float:
        """``gpu_memory_utilization`` for a budget of ``size_gib``, at most 0.9 of the card."""
        return min(0.9, round(size_gib / self.machine.total_gib, 2))

    def __str__(self) -> str:
        machine = self.machine
        if self.replayed:
            return f"Replayed: runs recorded on {machine.gpu or 'the CPU backend'}. Nothing is started on this machine."
        if self.backend == "cpu":
            return f"Live on vLLM's CPU backend: {machine.cpu_cores} cores. What is plotted is host memory."
        return f"Live on {machine.hardware}, {show_gib(machine.total_gib)} each, driver {machine.driver}."


def here(mode: str = "auto", of: str | None = None) -> Here:
    """Live where vLLM and its hardware are, else replay; ``MEMLAB_MODE`` overrides ``mode``.

    Args:
        mode: auto, live or replay.
        of: the lab whose runs a replay shows: on another machine than the default one, where that has none of them.

    Raises:
        MemlabError: for a mode that cannot be had.
    """
    mode = os.environ.get("MEMLAB_MODE") or mode
    if mode not in ("auto", "live", "replay"):
        raise MemlabError(f"mode {mode!r}: say auto, live or replay")
    found = backend() if mode != "replay" else None
    if mode == "live" and found is None:
        raise MemlabError(
            "vLLM cannot run here: it is not installed, or no NVIDIA driver answers. scripts/lab installs what fits "
            "this machine; mode='replay' shows recorded runs"
        )
    if found:
        return Here("live", found, this_machine(found))
    runs = [found for found in record.read_all() if of in (None, found.lab)]
    shown = min(runs, key=lambda found: found.machine.name != DEFAULT_MACHINE, default=None)
    if shown is None:
        raise RecordError(f"no recorded run of {of or 'any lab'} in {RECORDS.name}/: clone the project again, whole")
    return Here("replay", shown.engine.backend, shown.machine)


def machine_name(gpu_name: str) -> str:
    """A GPU's name for folders and ids: ``NVIDIA H200`` is ``h200``."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?i)nvidia|geforce", "", gpu_name).lower()).strip("-")


def this_machine(found: str, devices: list[gpu.Device] | None = None) -> Machine:
    """This machine as a record names it, for a run on ``devices`` (all that CUDA_VISIBLE_DEVICES leaves, if None)."""
    cores = psutil.cpu_count()
    if found == "cpu":
        total = round(psutil.virtual_memory().total / GIB, 2)
        return Machine("cpu", gpu=None, gpu_count=0, total_gib=total, cpu_cores=cores)
    devices = devices or gpu.visible()
    first = devices[0]
    return Machine(
        name=machine_name(first.name),
        gpu=first.name,
        gpu_count=len(devices),
        total_gib=round(first.total_gib - (first.reserved_gib or 0), 2),
        nvml_total_gib=round(first.total_gib, 2),
        compute_capability=list(first.compute_capability),
        link=gpu.link([device.uuid for device in devices]),
        driver=first.driver,
        cuda=first.cuda,
        cpu_cores=cores,
    )


def has_room() -> bool:
    """Whether a process can import vLLM while something else runs, and not slow it down."""
    return psutil.cpu_count() >= ROOMY_CORES


def warm_up() -> Warm | None:
    """A process that imports vLLM while something else runs, to become a server; None where there is no room."""
    return Warm(LOCAL_ENV) if has_room() else None


def progress_line(phase: str, seconds: float) -> None:
    """The default progress: a line as each phase begins."""
    print(f"[{seconds:6.1f} s] {phase.replace('_', ' ')}", flush=True)


def cores_for(ranks: int) -> str:
    """This process' cores shared out among ``ranks``, as vLLM's CPU backend reads them.

    By itself it gives each rank a NUMA node of its own, and refuses where there are fewer
    (0.32 vllm/utils/ompmultiprocessing.py:213). With fewer cores than ranks nothing is bound. Two ranks and the cores
    0 to 3: "0,1|2,3".
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks
    if not share:
        return "nobind"
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))


@contextlib.contextmanager
def claim_gpus(count: int, uuids: list[str] | None = None):
    """Hold ``count`` GPUs against other labs on this machine, those with most free memory first; yields the devices.

    A GPU that the preflight finds unfit, or that CUDA_VISIBLE_DEVICES hides, is left alone.

    Raises:
        ServerError: where too few can be had; it says of each GPU why.
    """
    import fcntl  # not on Windows, where labs replay

    found = [one for one in checks.find_gpus(checks.kernels()) if uuids is None or one.device.uuid in uuids]
    why_not = {one.name: one.why_not for one in found if one.why_not}
    with contextlib.ExitStack() as stack:
        held = []
        for one in sorted(found, key=lambda one: -one.free_gib):
            if one.why_not or len(held) == count:
                continue
            lock = stack.enter_context(_lock_file(one.device.uuid))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(one.device)
            except BlockingIOError:
                why_not[one.name] = "another lab holds it: wait for it, or stop it"
        if len(held) < count:
            reasons = "".join(f". {name}: {reason}" for name, reason in why_not.items())
            raise ServerError(
                f"{count} GPU{'s' if count > 1 else ''} needed, {len(held)} of {len(found)} can be had{reasons}. "
                "`memlab preflight` says more"
            )
        yield sorted(held, key=lambda device: device.index)


def _lock_file(uuid: str):
    """What holds a GPU while it is open and locked: a file that every user of this machine can open, never written."""
    path = Path(tempfile.gettempdir()) / f"memlab-{uuid}.lock"
    with contextlib.suppress(FileExistsError), path.open("x") as made:
        os.fchmod(made.fileno(), 0o644)
    return path.open()


def run(
    model: str,
    flags: ServeFlags,
    traffic: Traffic | list[Traffic] | None = None,
    card: str | None = None,
    mode: str = "auto",
    *,
    lab: str = "adhoc",
    instruments: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    neighbour: Neighbour | None = None,
    gpus: list[str] | None = None,
    seed: int = 0,
    timeout_s: float = 900,
    on_phase=progress_line,
    tick=None,
    watch=None,
    cancel: threading.Event | None = None,
    warm: Warm | None = None,
) -> RunRecord:
    """Start vLLM, send it traffic, stop it, and return what happened; or find the recorded run.

    A run that fails is a record too: read its ``outcome``, ``error`` and ``log``. Ctrl-C stops the server, keeps the
    record under ``runs/`` and goes on up.

    Args:
        model: a lab model (``shapes.LAB_MODELS``: no download), a folder, or a name on Hugging Face.
        flags: of ``vllm serve``.
        traffic: what to send once it is ready, several one after the other; None for a start alone.
        card: a smaller card that this GPU is to play (``cards.CARDS``); None for the real one. It gives capacity,
            never speed.
        mode: auto, live or replay; ``MEMLAB_MODE`` overrides it.
        lab: whose run it is.
        instruments: what to read besides (``INSTRUMENTS``). They disturb: the record names them, and latency comes from
            runs without them.
        variables: of the server's environment (``STEERING``), for what has no flag.
        neighbour: another process on the same GPUs.
        gpus: UUIDs to choose from; None for all.
        seed: of the traffic.
        timeout_s: for the start.
        on_phase: called with (phase, seconds) as each phase begins; None for silence.
        tick: called with (phase, seconds) twice a second.
        watch: called with a ``Live`` twice a second, from the thread that runs this.
        cancel: set it from another thread to stop the server in order; the record's outcome is then ``stopped``.
        warm: a process that has imported vLLM already (``warm_up``), to become the server.

    Raises:
        FlagError: for flags that vLLM refuses.
        RecordError: in replay, for a run that is not recorded; it names the nearest.
        ServerError: where no server could be started at all.
    """
    place = here(mode)
    shape = record.shapes.LAB_MODELS.get(model)
    check(flags, shape.max_position_embeddings if shape else None)
    unknown = sorted(set(instruments) - set(INSTRUMENTS))
    if unknown:
        raise MemlabError(f"no instrument {', '.join(unknown)}: there are {', '.join(INSTRUMENTS)}")
    strangers = [name for name in variables or {} if not name.startswith(STEERING)]
    if strangers:
        raise MemlabError(f"{', '.join(strangers)} is no variable of vLLM or PyTorch: set it in your shell instead")
    if place.replayed:
        more = {"instruments": instruments, "variables": variables, "neighbour": neighbour}
        return recorded(model, flags, traffic, card, lab=lab, **more, on_phase=on_phase)
    if IN_WORKER & set(instruments) and place.backend == "cpu":
        raise MemlabError("vLLM's CPU backend has no caching allocator to read: leave allocator and snapshot out")
    if neighbour and place.backend == "cpu":
        raise MemlabError("a neighbour takes a GPU's memory, and the CPU backend has none: leave neighbour out")
    played = cards.find(card) if card else None
    if played:
        _check_emulation(place, played, flags)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=_made(runs_folder())))

    def each_half_second(phase: str, seconds: float) -> None:
        if cancel is not None and cancel.is_set():
            raise _Cancelled
        if tick:
            tick(phase, seconds)
        if watch:
            watch(Live(live.server.now(), list(live.server.phases), live.sampler.timelines()))

    with contextlib.ExitStack() as stack:
        devices = stack.enter_context(claim_gpus(flags.world_size, gpus)) if place.backend == "cuda" else []
        if played:
            stack.enter_context(ballast(devices, played.total_gib, folder))
        asked = (model, flags, traffic, played, lab, tuple(instruments), dict(variables or {}), neighbour, seed)
        live = _LiveRun(place, asked, folder, devices, on_phase, each_half_second, warm)
        live.run(timeout_s)
    return live.record


def _check_emulation(place: Here, card: cards.Card, flags: ServeFlags) -> None:
    """Refuse what the emulated card could not do, and a machine that cannot play it."""
    if place.backend != "cuda":
        raise MemlabError(f"only a GPU can play a {card.name}: leave card=None on the CPU backend")
    if place.machine.total_gib < card.total_gib + 1:
        raise MemlabError(f"{place.machine.gpu} is too small to play a {card.name}: choose a smaller card")
    refusal = card.refuses(flags)
    if refusal:
        raise FlagError(refusal)


@contextlib.contextmanager
def ballast(devices: list[gpu.Device], free_gib: float, folder: Path, name: str = "ballast"):
    """Hold each GPU's memory so that only ``free_gib`` are free, as long as the context lasts.

    Raises:
        ServerError: where it cannot be held.
    """
    holders = []
    try:
        for device in devices:
            held = threading.Event()
            child = Child(
                [sys.executable, "-m", "memlab.ballast", str(free_gib)],
                folder / f"{name}-{device.index}.log",
                server.device_variables([device.uuid]),
                lambda line, held=held: held.set() if line.startswith("{") else None,
            )
            holders.append((device, child, held))
        for device, child, held in holders:
            while not held.wait(0.2):
                if child.poll() is not None:
                    raise ServerError(f"the memory of GPU {device.index} could not be held: {child.log.read_text()}")
        yield
    finally:
        for _, child, _ in holders:
            child.stop()


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemlabError(f"{folder} cannot be made ({error.strerror}): set MEMLAB_RUNS to a folder you own") from error
    return folder


def recorded(
    model: str,
    flags: ServeFlags,
    traffic: Traffic | list[Traffic] | None = None,
    card: str | None = None,
    *,
    lab: str = "adhoc",
    instruments: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    neighbour: Neighbour | None = None,
    on_phase=progress_line,
) -> RunRecord:
    """The recorded run of these settings, whatever the mode; the arguments are those of ``run``.

    Raises:
        RecordError: for a run that is not recorded; it names the nearest.
    """
    more = {"instruments": instruments, "variables": variables, "neighbour": neighbour}
    found = record.find(record.read_all(), lab, model, flags, traffic, card, **more)[0]
    if on_phase:
        print(f"Replayed: {found.where()}", flush=True)
    return found


def linked(machine: Machine, variables: Mapping[str, str] | None = None) -> bool | None:
    """Whether a run's GPUs talk over NVLink; None where that is not known. NCCL_P2P_DISABLE=1 keeps NCCL off it."""
    if (variables or {}).get("NCCL_P2P_DISABLE") == "1":
        return False
    return {"nvlink": True, "pcie": False}.get(machine.link)


def prediction(
    place: Here,
    model: str,
    flags: ServeFlags,
    card: str | None = None,
    vllm: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Prediction | None:
    """The planner's ledger for a lab model, before anything is started; None for a model whose shape is not known.

    A played card gives its capacity alone: GPUs are joined as those of this machine are. On the CPU backend only two
    terms are known beforehand: the weights, and the pool that is given in bytes, both of one rank.

    Args:
        place, model, flags, card, variables: as for ``run``.
        vllm: the version; None for the installed one.
    """
    shape = record.shapes.LAB_MODELS.get(model)
    if shape is None:
        return None
    if place.backend == "cpu":
        pool, block, ranks = flags.kv_cache_memory_bytes, flags.block_size or 128, flags.tensor_parallel_size or 1
        if pool is None:
            return None
        block_bytes = shape.kv_bytes_per_token(flags.kv_cache_dtype or "auto", ranks) * block
        weights = weights_gib(shape, ranks)
        known = MemoryLedger("predicted", weights_gib=weights, kv_cache_gib=pool / GIB, pool_given=True)
        return Prediction(known, kv_tokens=pool // block_bytes * block)
    vllm = vllm or vllm_version()
    resolved = record.resolve(flags, place.machine, "cuda", vllm, shape.max_position_embeddings, card)
    total = cards.find(card).total_gib if card else place.machine.total_gib
    joined, capability = linked(place.machine, variables), tuple(place.machine.compute_capability or ()) or None
    return predict(shape, total, resolved, record.version_of(vllm), joined, capability)


@dataclass(frozen=True)
class Live:
    """A run as it goes: seconds since its start, the phases that began, a timeline for each rank."""

    seconds: float
    phases: list[record.Phase]
    timelines: list[record.Timeline]


class _Cancelled(Exception):
    """The reader asked for the stop."""


class _LiveRun:
    """One live run, from the model's folder to the record on disk."""

    def __init__(self, place, asked, folder, devices, on_phase, tick, warm):
        model, flags, traffic_, card, self.lab, self.instruments, self.variables, self.neighbour, self.seed = asked
        self.place, self.model, self.folder = place, model, folder
        self.devices, self.tick, self.card = devices, tick, card
        self.traffic = traffic_ or None
        self.several = isinstance(traffic_, list)
        self.served, self.shape, load_format = models.locate(model, _made(runs_folder() / "models"))
        self.given = flags
        if load_format and flags.load_format is None:
            flags = flags.with_(load_format=load_format)
        predicted = prediction(place, model, self.given, card.name if card else None, variables=self.variables)
        self.prediction = predicted.to_dict() if predicted else None
        if card:
            flags = self._as_on(card, flags)
        env = LOCAL_ENV if self.shape else ENV
        if place.backend == "cpu" and flags.world_size > 1:
            env = {**env, CORES: os.environ.get(CORES) or cores_for(flags.world_size)}
        if IN_WORKER & set(self.instruments):
            flags, env = flags.with_(extra=(*flags.extra, *READER)), {**env, **READER_ENV}
        if "steps" in self.instruments:
            flags = flags.with_(extra=(*flags.extra, *STEP_LINES))
        self.flags = flags
        self.told = on_phase
        self.server = server.Server(
            str(self.served),
            flags,
            folder,
            [device.uuid for device in devices],
            {**env, **self.variables},
            on_phase=self._phase_began,
            warm=warm,
        )
        self.beside = contextlib.ExitStack()  # the neighbour, as long as it is there
        self.latency = self.kv = self.series = self.back = self.error = None
        self.outcome = "failed_to_start"
        self.loads: list[Load] = []
        self.record: RunRecord | None = None

    def _as_on(self, card: cards.Card, flags: ServeFlags) -> ServeFlags:
        """The flags that make vLLM plan as on the emulated card: its share of the real total, and its defaults."""
        machine = self.place.machine
        asked = 0.92 if flags.gpu_memory_utilization is None else flags.gpu_memory_utilization
        vllm = vllm_version()
        tokens, _ = cards.batch_defaults(card.total_gib, card.name, record.version_of(vllm))
        length = self.shape.max_position_embeddings if self.shape else flags.max_model_len or tokens
        resolved = record.resolve(flags, machine, "cuda", vllm, length, card.name)
        return flags.with_(
            gpu_memory_utilization=round(asked * card.total_gib / machine.total_gib, 6),
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_num_seqs=resolved.max_num_seqs,
        )

    def _phase_began(self, phase: str, seconds: float) -> None:
        if self.neighbour and phase == self.neighbour.leaves_in:
            self.beside.close()
        if self.told:
            self.told(phase, seconds)

    def _comes(self, when: str) -> None:
        """The neighbour takes its memory, if this is its time."""
        if self.neighbour and self.neighbour.comes == when:
            self.beside.enter_context(ballast(self.devices, self.neighbour.leaves_free_gib, self.folder, "neighbour"))

    def _neighbour_moved(self) -> bool:
        return self.neighbour is not None and (self.neighbour.comes != "before" or self.neighbour.leaves_in is not None)

    def run(self, timeout_s: float) -> None:
        with self.beside:
            self._comes("before")
            interrupted = self._watched(timeout_s)
        with _numbering:
            self.record = self._record(self.sampler)
            record.write(self.record, self.folder)
        if interrupted:
            print(f"Stopped; what was measured is kept in {self.folder / self.record.id}.json", flush=True)
            raise interrupted

    def _watched(self, timeout_s: float) -> KeyboardInterrupt | None:
        """From the start to the end of the server, with its memory watched; an interrupt is for the caller to raise."""
        interrupted = None
        self.sampler = sampler = self._sampler()
        with sampler, contextlib.ExitStack() as self.stack:
            sampler.origin = time.perf_counter()
            try:
                self.server.start()
                self.server.origin = sampler.origin
                self._serve(timeout_s)
            except TimeoutError as error:
                self.outcome, self.error = "timed_out", str(error)
            except _Cancelled:
                self.outcome, self.error = "stopped", "stopped by the reader"
            except KeyboardInterrupt as interrupt:
                self.outcome, self.error, interrupted = "stopped", "stopped by the reader", interrupt
            finally:
                self.stack.close()
                self.server.stop()
                self.beside.close()
                self.back = self.server.memory_back()
        return interrupted

    def _sampler(self):
        uuids = self.server.uuids
        return gpu.watch_devices(uuids) if uuids else gpu.watch_host(self.server.pids)

    def _serve(self, timeout_s: float) -> None:
        wanted = self.traffic if self.several else [self.traffic] if self.traffic else []
        if wanted and has_room():
            keep_a_load_generator()
        if not self.server.wait_until_ready(timeout_s, self.tick):
            self.outcome, self.error = self._why_it_ended("failed_to_start")
            return
        self.outcome = "ok"
        found = metrics.read(self.server.get("/metrics"))
        self.kv = found.kv if found else None
        self._comes("when_ready")
        if not wanted:
            return
        died = False
        with metrics.Scraper(self.server) as scraper:
            for number, each in enumerate(wanted):
                self._send(each, number)
                died = self._died_under_load()
                if died:
                    break
        started = [phase.start_s for phase in self.server.phases if phase.name == "traffic"]
        self.series = scraper.series(started[0]) if started else None
        if died:
            self.server.child.stop()
            self.outcome, self.error = self._why_it_ended("died")

    def _send(self, load: Traffic, number: int) -> None:
        """One load. Its seed is its own, so that no prompt of it is in the prefix cache from the load before."""
        began = []

        def begin() -> None:
            self.server.mark("traffic")
            began.append((self.server.now(), time.time(), len(self.server.events)))
            self.sampler.highest_gib()

        before = self._counters() if self.several else {}
        if self.several and "allocator" in self.instruments:
            self.server.rpc("memlab_reset_peaks")
        if self.several and "snapshot" in self.instruments:
            self.server.rpc("memlab_begin_history")
        self.latency = traffic.send(
            self.server, load, str(self.served), self.folder, self.seed + number, self.tick, begin
        )
        if not self.several or not began:
            return
        allocator, trace = [], None
        with contextlib.suppress(ServerError):  # a server that just died: the log says why
            if "allocator" in self.instruments:
                allocator = [Allocator(**read) for read in self.server.rpc("memlab_allocator")]
            if "snapshot" in self.instruments:
                file = str(self.folder / f"snapshot-load{number}.pickle")
                trace = trace_since(began[0][1], **self.server.rpc("memlab_end_history", file)[0])
        after = self._counters()
        steps = scheduled(self.server.events[began[0][2] :]) if "steps" in self.instruments else None
        self.loads.append(
            Load(
                load,
                round(began[0][0], 3),
                round(self.server.now(), 3),
                self.sampler.highest_gib(),
                self.latency,
                allocator=allocator,
                trace=trace,
                steps=steps,
                **{name: after[name] - before[name] for name in before if name in after},
            )
        )
        self.server.mark("between_loads")

    def _counters(self) -> dict[str, int]:
        """What vLLM counts since its start and a load tells of itself."""
        try:
            found = metrics.read(self.server.get("/metrics"))
        except ServerError:
            return {}
        names = ("preemptions", "prefix_cache_queries", "prefix_cache_hits")
        return {name: int(count) for name in names if (count := getattr(found, name, None)) is not None}

    def _died_under_load(self, patience_s: float = 10) -> bool:
        """Whether the server ended under the traffic. It may answer on for seconds while its engine is dead already."""
        if self.latency is None:
            return True
        if not self.latency.failed:
            return False
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if not self.server.alive or decisive_error(self.server.events):
                return True
            time.sleep(0.2)
        return False

    def _why_it_ended(self, otherwise: str) -> tuple[str, str]:
        """The outcome and the decisive line, from the log's events and the exit code."""
        code = self.server.child.poll()
        error = decisive_error(self.server.events)
        if error is not None:
            memory = vllm_log.is_out_of_memory(error)
            return "out_of_memory" if memory else otherwise, vllm_log.scrub(error.text)
        if code == 137:
            return "out_of_memory", "killed with SIGKILL, as the kernel does when the host's memory runs out"
        tail = self._tail()
        return otherwise, f"ended with code {code}; last lines: {tail}"

    def _tail(self, lines: int = 8) -> str:
        try:
            text = self.server.child.log.read_text(errors="replace")
        except OSError:
            return "(no log)"
        return vllm_log.scrub(" | ".join(text.splitlines()[-lines:]))[-1500:]

    def _record(self, sampler) -> RunRecord:
        events = self.server.events
        machine = self.place.machine if not self.devices else this_machine("cuda", self.devices)
        timelines = sampler.timelines()
        tp = self.flags.tensor_parallel_size or 1
        names = {vllm_log.rank_number(name, tp): name for name in vllm_log.ranks(events)}

        def stated_by(number: int) -> MemoryLedger | None:
            return vllm_log.stated_ledger(events, names[number]) if number in names else None

        ranks = []
        for number, timeline in enumerate(timelines):
            stated = stated_by(number)
            total = self.devices[number].total_gib if self.devices else None
            free = vllm_log.free_at_start_gib(events, names.get(number))
            seen = seen_ledger(timeline, stated, total, sampler.baselines_gib[number], free)
            if seen and self._neighbour_moved():  # the driver's total is then not vLLM's alone
                seen = replace(seen, context_gib=None, budget_gib=None, unprofiled_gib=None)
            ranks.append(Rank(stated, seen, timeline, self._foreign_gib(number)))
        if not self.devices:  # the host is watched as a whole, and each rank states its own
            ranks += [Rank(stated_by(number), None, None) for number in range(1, self.flags.world_size)]
        if ranks and ranks[0].stated and ranks[0].stated.total_gib:
            machine = replace(machine, total_gib=ranks[0].stated.total_gib)
        engine = self._engine()
        given = {**self.given.set(), **({"extra": list(self.given.extra)} if self.given.extra else {})}
        card = self.card.name if self.card else None
        asked = (self.model, self.given, self.traffic, card, 0, self.neighbour)
        stem = record.make_id(machine, engine, *asked)[:-1]
        repeat = next_repeat(stem)
        error = self.error
        if sampler.error:
            error = f"{error or ''} (memory was not watched to the end: {sampler.error})".strip()
        return RunRecord(
            id=f"{stem}{repeat}",
            lab=self.lab,
            recorded_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            machine=machine,
            engine=engine,
            model=self._model(),
            flags=Flags(given, self.server.resolved),
            outcome=self.outcome,
            ranks=ranks,
            repeat=repeat,
            seed=self.seed,
            card=card,
            traffic=None if self.several else self.traffic,
            loads=self.loads,
            prediction=self.prediction,
            phases=self.server.phases,
            series=self.series,
            latency=None if self.several else self.latency,
            instruments=sorted(self.instruments),
            variables=self.variables,
            neighbour=self.neighbour,
            kv=self.kv,
            memory_back=self.back,
            error=error,
            finding=self._finding(machine.total_gib),
            log=vllm_log.memory_lines(events),
        )

    def _finding(self, total_gib: float | None) -> dict[str, object] | None:
        """What the doctor makes of a run that failed."""
        if self.outcome not in record.DIAGNOSED:
            return None
        config = self.shape.to_config() if self.shape else None
        try:
            found = doctor.finding(self.server.events, self.given, config, self.card, total_gib)
        except MemlabError:
            return None
        return record.without_none(found)

    def _foreign_gib(self, number: int) -> float | None:
        if not self.devices or self.server.foreign[number] is None:
            return None
        known = [process.used_gib for process in self.server.foreign[number]]
        return None if None in known else round(sum(known), 4)

    def _engine(self) -> Engine:
        stated = vllm_log.engine(self.server.events)
        kept = ("VLLM_", "NCCL_", "PYTORCH_", "CUDA_MODULE", "OMP_")
        values = {**os.environ, **self.server.env}
        names = sorted(name for name in values if name.startswith(kept))
        return Engine(
            backend=self.place.backend,
            vllm=vllm_version(),
            torch=metadata.version("torch"),
            python=platform.python_version(),
            runner=stated.get("runner"),
            attention=stated.get("attention"),
            sampler=stated.get("sampler"),
            environment={name: vllm_log.scrub(values[name]) for name in names},
        )

    def _model(self) -> Model:
        if self.shape is None:
            return Model(self.model, self.flags.load_format or "auto", {})
        config = self.shape.to_config()
        return Model(self.model, self.flags.load_format, config, self.shape.parameters())


def seen_ledger(
    timeline: Timeline,
    stated: MemoryLedger | None,
    total_gib: float | None,
    baseline_gib: float | None,
    free_gib: float | None,
) -> MemoryLedger | None:
    """The ledger by the driver: baseline + peak + headroom is the card; context + budget + unprofiled the peak.

    The context is what was gone between the baseline and vLLM's first look, which prints the free memory.

    Args:
        timeline: of the rank, baseline subtracted.
        stated: the rank's ledger by vLLM's log.
        total_gib: the card's memory by NVML; None for host memory.
        baseline_gib: held before vLLM started; None where nobody saw it, the peak then holds it.
        free_gib: free at vLLM's first look.
    """
    if not timeline.used_gib:
        return None
    peak = max(timeline.used_gib)
    if timeline.measure == "host":
        return MemoryLedger(view="seen", peak_gib=peak)
    total, baseline = round(total_gib, 4), None if baseline_gib is None else round(baseline_gib, 4)
    context = unprofiled = budget = None
    if None not in (free_gib, baseline):
        context = round(total - baseline - free_gib, 4)
        if stated is not None and stated.budget_gib is not None and not stated.pool_given:
            budget = stated.budget_gib
            unprofiled = round(peak - context - budget, 4)
    return MemoryLedger(
        view="seen",
        total_gib=stated.total_gib if stated else None,
        device_total_gib=total,
        budget_gib=budget,
        context_gib=context,
        unprofiled_gib=unprofiled,
        baseline_gib=baseline,
        peak_gib=peak,
        headroom_gib=round(total - (baseline or 0.0) - peak, 4),
    )


def decisive_error(events) -> vllm_log.Event | None:
    """The error that explains an end best: memory that ran out, then what vLLM counted and refused, then the rest."""
    errors = [event for event in events if vllm_log.is_error(event)]

    def order(event):
        return (not vllm_log.is_out_of_memory(event), event.kind not in vllm_log.DOES_NOT_FIT, event.line_number)

    return min(errors, key=order, default=None)


def trace_since(start_s: float, allocated_bytes: int, events: list) -> Trace | None:
    """An allocator's history from ``start_s`` (seconds since 1970) on; None where nothing was allocated.

    Args:
        start_s: the beginning of the load; what came before it is left out.
        allocated_bytes: held at the end of the history.
        events: pairs of (microseconds since 1970, bytes; negative when freed), in order.
    """
    events = [(at, size) for at, size in events if at >= start_s * 1e6]
    if not events:
        return None
    held = allocated_bytes - sum(size for _, size in events)
    curve = gpu.Extremes(TRACE_BUCKETS)
    for at, size in events:
        held += size
        curve.add((at - events[0][0]) / 1000, held / GIB)
    times, sizes = curve.points()
    return Trace([round(at, 3) for at in times], [round(size, 4) for size in sizes])


def scheduled(events: list[vllm_log.Event]) -> Steps | None:
    """What the steps held whose lines are among ``events``; None where there is none."""
    found = [event.values for event in events if event.kind == "iteration" and "elapsed_ms" in event.values]
    found = [values for values in found if values["context_tokens"] or values["generation_tokens"]]
    if not found:
        return None
    kept = found[:MOST_STEPS]
    names = ("context_requests", "context_tokens", "generation_requests", "generation_tokens", "elapsed_ms")
    return Steps(*([values[name] for values in kept] for name in names), left_out=len(found) - len(kept))


def next_repeat(stem: str) -> int:
    """One more than the highest repeat of these settings among live and kept runs."""
    taken = [
        int(match.group(1))
        for folder in (runs_folder(), RECORDS)
        for path in folder.rglob(f"{stem}*.json")
        if (match := re.fullmatch(re.escape(stem) + r"(\d+)", path.stem))
    ]
    return max(taken, default=0) + 1


def keep(path: Path, folder: Path = RECORDS) -> Path:
    """Promote a live run's record to ``labs/records/MACHINE/LAB``, after a look for anything private.

    Raises:
        RecordError: naming what must not be published; for a watch of somebody's server, which no lab can replay.
    """
    import getpass
    import socket

    found = record.read(path)
    if found.lab == record.WATCHED:
        raise RecordError(
            f"{path.name} is of a server that was watched, and no lab can replay it: share the file itself"
        )
    names = {socket.gethostname(), getpass.getuser()} - IMPERSONAL
    problems = record.privacy_problems(record.dumps(found), tuple(names))
    if problems:
        raise RecordError(f"{path.name} holds what must not be published: {'; '.join(sorted(set(problems)))}")
    return record.write(found, folder / found.machine.name / found.lab)


def diagnosed(run: RunRecord, source: Iterable[vllm_log.Event]) -> RunRecord:
    """The run with what the doctor of today finds in its whole log: rules get better, records stay.

    Raises:
        RecordError: for a run that did not fail, or a log that is not this run's.
    """
    if run.outcome not in record.DIAGNOSED:
        raise RecordError(f"{run.id} did not fail ({run.outcome}): it has no finding")
    events = list(source)
    lines = vllm_log.memory_lines(events)
    missing = next((line for line in run.log if line not in lines), None)
    if missing:
        raise RecordError(f"the log is not that of {run.id}, whose line is not in it: {vllm_log.clean(missing)}")
    found = doctor.finding(events, run.served_flags, run.model.shape or None, run.card, run.machine.total_gib)
    return replace(run, finding=record.without_none(found))


def summary(found: RunRecord) -> str:
    """A line for the terminal: outcome, peak, and the memory that came back."""
    parts = [found.outcome.replace("_", " ")]
    for number, rank in enumerate(found.ranks):
        if rank.seen and rank.seen.peak_gib is not None:
            host = rank.timeline is not None and rank.timeline.measure == "host"
            which = f"GPU {number}: " if len(found.ranks) > 1 and not host else ""
            measure = "host memory" if host else "device memory"
            parts.append(f"{which}peak {show_gib(rank.seen.peak_gib)} of {measure}")
    if found.memory_back and found.memory_back.seconds is not None:
        waited = found.memory_back.seconds
        parts.append("memory back at once" if waited < 0.001 else f"memory back after {show_seconds(waited)}")
    return ", ".join(parts)
