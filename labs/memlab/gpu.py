"""What the driver sees: NVML devices, who else is on them, and a sampler that watches memory over time.

On vLLM's CPU backend the same sampler watches host memory instead: the process group's proportional share (PSS).
"""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from memlab.errors import MemlabError
from memlab.record import Timeline
from memlab.units import GIB

MOST_OF_A_CORE = 0.1  # what a sampler may take; to add up the pages of a vLLM process takes the kernel some 10 ms


@dataclass(frozen=True)
class Device:
    """A GPU by NVML. ``index`` is NVML's, which is CUDA's under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``."""

    index: int
    uuid: str
    name: str
    total_gib: float
    reserved_gib: float | None
    compute_capability: tuple[int, int]
    driver: str
    cuda: str
    display_active: bool


@dataclass(frozen=True)
class Process:
    """A process that holds memory of a GPU; ``used_gib`` is None where the driver hides it (containers, WSL2)."""

    pid: int
    used_gib: float | None


@dataclass(frozen=True)
class State:
    """A GPU at this moment, by NVML.

    ``processes`` (of compute and of graphics) is None where the driver shows none. ``unseen_gib`` is what is in use and
    no visible process holds; None where a visible process does not tell its share. ``compute_mode`` is default,
    exclusive (one process may use the GPU) or prohibited.
    """

    free_gib: float
    used_gib: float
    processes: list[Process] | None
    unseen_gib: float | None
    mig: bool
    compute_mode: str


@dataclass(frozen=True)
class Pair:
    """Two GPUs, by index: whether an NVLink joins them, whether one reads the other's memory (None: not told), and
    what the way between them crosses."""

    first: int
    second: int
    nvlink: bool
    peer_to_peer: bool | None
    path: str


def _nvml():
    """pynvml, initialised, or None where there is no NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # pynvml raises its own errors, and others where its library is broken
        return None
    return pynvml


def devices() -> list[Device]:
    """The GPUs of this machine, in NVML's order; empty without a driver."""
    nvml = _nvml()
    if nvml is None:
        return []
    driver = nvml.nvmlSystemGetDriverVersion()
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        found.append(
            Device(
                index=index,
                uuid=nvml.nvmlDeviceGetUUID(handle),
                name=nvml.nvmlDeviceGetName(handle),
                total_gib=nvml.nvmlDeviceGetMemoryInfo(handle).total / GIB,
                reserved_gib=_optional(
                    lambda h: nvml.nvmlDeviceGetMemoryInfo(h, nvml.nvmlMemory_v2).reserved / GIB, handle
                ),
                compute_capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
                driver=driver,
                cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
                display_active=bool(_optional(nvml.nvmlDeviceGetDisplayActive, handle)),
            )
        )
    return found


def visible(variables: Mapping[str, str] = os.environ) -> list[Device]:
    """The GPUs that CUDA_VISIBLE_DEVICES lets a process with these variables use; all of them where it is not set.

    It names GPUs by the start of their UUID or by index, and ends at the first word that names none, as CUDA reads it
    (CUDA C++ Programming Guide, environment variables). An index counts in PCI order, as vLLM takes it
    (vllm/platforms/cuda.py, ``device_control_id_to_physical_device_id``, 0.32).
    """
    found, named = devices(), variables.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return found
    chosen = []
    for word in named.split(","):
        word = word.strip()
        by_index = [device for device in found if word.isdigit() and device.index == int(word)]
        one = by_index or [device for device in found if word.startswith("GPU-") and device.uuid.startswith(word)]
        if len(one) != 1:
            break
        chosen += one
    return chosen


def _optional(call, handle):
    try:
        return call(handle)
    except Exception:  # not every driver and card answers every question
        return None


def used_gib(uuid: str) -> float:
    """Memory in use on a GPU now, by whomever, the driver's own part included."""
    nvml = _nvml()
    return nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).used / GIB


def processes(uuid: str) -> list[Process] | None:
    """Who holds memory on a GPU; None where the driver does not show it."""
    nvml = _nvml()
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
    except Exception:
        return None
    return [Process(p.pid, p.usedGpuMemory / GIB if p.usedGpuMemory else None) for p in running]


def foreign(uuid: str, own_pids: set[int] = frozenset()) -> list[Process] | None:
    """The processes on a GPU that are not ours; None where the driver does not show them."""
    running = processes(uuid)
    return None if running is None else [process for process in running if process.pid not in own_pids]


def link(uuids: list[str]) -> str:
    """How GPUs are joined: ``nvlink`` if each has an active link, ``pcie`` otherwise, ``none`` for one GPU."""
    nvml = _nvml()
    if nvml is None or len(uuids) < 2:
        return "none"

    def has_nvlink(uuid: str) -> bool:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        links = range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))
        return any(_optional(lambda h, n=n: nvml.nvmlDeviceGetNvLinkState(h, n), handle) for n in links)

    return "nvlink" if all(map(has_nvlink, uuids)) else "pcie"


def trouble() -> str | None:
    """Why an NVIDIA driver that is there does not answer; None where it answers, or where there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return None if getattr(error, "value", None) in absent else str(error)
    return None


def state(uuid: str) -> State:
    """What a GPU is doing now.

    Raises:
        NVMLError: where the driver does not answer for it.
    """
    nvml = _nvml()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    # The first version of this answer counts what the driver reserves as used.
    used = _optional(lambda h: nvml.nvmlDeviceGetMemoryInfo(h, nvml.nvmlMemory_v2).used, handle)
    used_gib = (memory.used if used is None else used) / GIB
    running = _everyone(nvml, handle)
    known = [process.used_gib for process in running or ()]
    mig = _optional(nvml.nvmlDeviceGetMigMode, handle)
    modes = {nvml.NVML_COMPUTEMODE_DEFAULT: "default", nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited"}
    return State(
        free_gib=memory.free / GIB,
        used_gib=used_gib,
        processes=running,
        unseen_gib=None if None in known else max(0.0, used_gib - sum(known)),
        mig=bool(mig) and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
        compute_mode=modes.get(_optional(nvml.nvmlDeviceGetComputeMode, handle) or 0, "exclusive"),
    )


def _everyone(nvml, handle) -> list[Process] | None:
    """Processes of compute and of graphics, each once; None where neither is shown."""
    asked = (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses)
    answers = [answer for call in asked if (answer := _optional(call, handle)) is not None]
    if not answers:
        return None
    found = {process.pid: process.usedGpuMemory for answer in answers for process in answer}
    return [Process(pid, used / GIB if used else None) for pid, used in sorted(found.items())]


def pairs(found: list[Device]) -> list[Pair]:
    """How each two of these GPUs are joined, as vLLM asks it (vllm/platforms/cuda.py, ``is_fully_connected``)."""
    nvml = _nvml()
    if nvml is None:
        return []
    crosses = {
        nvml.NVML_TOPOLOGY_INTERNAL: "the board",
        nvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
        nvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "the PCIe host bridge",
        nvml.NVML_TOPOLOGY_NODE: "the host bridges of one NUMA node",
        nvml.NVML_TOPOLOGY_SYSTEM: "the link between the CPUs",
    }
    joined = []
    for number, first in enumerate(found):
        for second in found[number + 1 :]:
            one, other = (nvml.nvmlDeviceGetHandleByUUID(device.uuid) for device in (first, second))

            def status(what: int, one=one, other=other):
                return _optional(lambda h: nvml.nvmlDeviceGetP2PStatus(h, other, what), one)

            reads = status(0)  # NVML_P2P_CAPS_INDEX_READ, which some releases of pynvml spell as a tuple
            path = _optional(lambda h, other=other: nvml.nvmlDeviceGetTopologyCommonAncestor(h, other), one)
            joined.append(
                Pair(
                    first.index,
                    second.index,
                    status(nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK,
                    None if reads is None else reads == nvml.NVML_P2P_STATUS_OK,
                    crosses.get(path, "an unknown way"),
                )
            )
    return joined


class Extremes:
    """A series of any length in bounded memory that keeps every extreme.

    Samples are gathered in buckets of equal count; of each, the lowest and the highest stay, with their times. When
    there are too many buckets, neighbours are joined.
    """

    def __init__(self, buckets: int = 200):
        if buckets < 2:
            raise ValueError("at least two buckets are needed to keep an order in time")
        self.limit = 2 * buckets
        self.size = 1
        self._done: list[tuple[tuple[float, float], tuple[float, float]]] = []
        self._open: list[tuple[float, float]] = []
        self.count = 0

    def add(self, time_s: float, value: float) -> None:
        self.count += 1
        self._open.append((time_s, value))
        if len(self._open) >= self.size:
            self._close()
            if len(self._done) >= self.limit:
                pairs = zip(self._done[::2], self._done[1::2], strict=True)
                self._done = [(min(a[0], b[0], key=_value), max(a[1], b[1], key=_value)) for a, b in pairs]
                self.size *= 2

    def _close(self) -> None:
        self._done.append((min(self._open, key=_value), max(self._open, key=_value)))
        self._open = []

    def points(self) -> tuple[list[float], list[float]]:
        """Times and values, in order, the extremes of each bucket once."""
        buckets = self._done + ([(min(self._open, key=_value), max(self._open, key=_value))] if self._open else [])
        found = sorted({point for pair in buckets for point in pair})
        return [time_s for time_s, _ in found], [value for _, value in found]


def _value(point: tuple[float, float]) -> float:
    return point[1]


class Sampler:
    """Watches memory in a thread of its own: ``with Sampler(...) as sampler: ...; sampler.timelines()``.

    ``read`` returns the memory in use of each rank, in GiB. It is called ``rate_hz`` times a second, or less often
    where it would take more than ``MOST_OF_A_CORE``: a watch must not slow what it watches. The first call of all,
    before anything starts, is the baseline, unless one is given. The clock starts at 0 with the sampler, or at
    ``origin`` (``time.perf_counter``).
    """

    def __init__(
        self,
        read,
        measure: str,
        rate_hz: float,
        baselines_gib: list[float] | None = None,
        buckets: int = 200,
        on_sample=None,
    ):
        self.read, self.measure, self.rate_hz = read, measure, rate_hz
        self.baselines_gib = list(read()) if baselines_gib is None else baselines_gib
        self.series = [Extremes(max(20, buckets // len(self.baselines_gib))) for _ in self.baselines_gib]
        self._highest = [0.0] * len(self.baselines_gib)
        self.origin = time.perf_counter()
        self.on_sample = on_sample
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory sampler", daemon=True)

    def __enter__(self):
        self.origin = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def now(self) -> float:
        """Seconds on the sampler's clock."""
        return time.perf_counter() - self.origin

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        period, due = 1 / self.rate_hz, time.perf_counter()
        while not self._stop.is_set():
            busy = time.thread_time()
            try:
                self.sample()
            except Exception as error:  # the run goes on, the record says that it was not watched to the end
                self.error = error
                return
            busy = time.thread_time() - busy
            due = max(due + max(period, busy / MOST_OF_A_CORE), time.perf_counter() - period)
            self._stop.wait(max(0.0, due - time.perf_counter()))

    def sample(self) -> list[float]:
        """One reading of all ranks, baseline subtracted."""
        values = self.read()
        at = self.now()
        held = [value - baseline for value, baseline in zip(values, self.baselines_gib, strict=True)]
        with self._lock:
            for number, value in enumerate(held):
                self.series[number].add(at, value)
                self._highest[number] = max(self._highest[number], value)
        if self.on_sample:
            self.on_sample(at, values)
        return held

    def highest_gib(self) -> list[float]:
        """The most that each rank held since this was last asked, baseline subtracted.

        A reading is taken now, for the time up to now and for that from now on: between two questions there may be less
        time than between two readings, which are rare where they are dear (host memory) or the machine is busy.
        """
        now = list(self._highest)
        try:
            now = self.sample()
        except Exception as error:  # the run goes on, the record says that it was not watched to the end
            self.error = error
        with self._lock:
            found, self._highest = [round(value, 4) for value in self._highest], now
            return found

    def timelines(self) -> list[Timeline]:
        """One timeline a rank: times to the millisecond, memory to a tenth of a MiB."""
        with self._lock:
            found = []
            for series in self.series:
                times, values = series.points()
                rate = round(series.count / max(times[-1], 1e-9), 1) if times else 0.0
                rounded = [round(value, 4) for value in values]
                found.append(Timeline(self.measure, rate, [round(t, 3) for t in times], rounded))
            return found


def watch_devices(uuids: list[str], rate_hz: float | None = None, **options) -> Sampler:
    """A sampler of GPUs, named by UUID: 200 Hz for one, less for several (a reading of one takes about 0.1 ms).

    Raises:
        MemlabError: where a GPU is not there.
    """
    nvml = _nvml()
    if nvml is None:
        raise MemlabError("no NVIDIA driver answers: check nvidia-smi, or run on the CPU backend (MEMLAB_BACKEND=cpu)")
    try:
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    except nvml.NVMLError as error:
        raise MemlabError(f"a GPU is not there ({error}): `memlab preflight` lists them by UUID") from error

    def read() -> list[float]:
        return [nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB for handle in handles]

    return Sampler(read, "device", rate_hz or max(50.0, 200.0 / len(uuids)), **options)


def group_pss_gib(pids: list[int]) -> float:
    """Host memory of some processes in GiB, shared pages shared out among those who map them (PSS).

    Where the kernel does not tell PSS, private memory (USS, or RSS at worst) is summed instead.
    """
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as rollup:
                total += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) * 1024
        except (OSError, StopIteration):
            try:
                total += psutil.Process(pid).memory_info().rss
            except psutil.Error:
                continue  # it ended meanwhile
    return total / GIB


def watch_host(pids, rate_hz: float = 20.0, **options) -> Sampler:
    """A sampler of host memory: ``pids`` returns the processes to count, at each reading."""
    return Sampler(lambda: [group_pss_gib(pids())], "host", rate_hz, baselines_gib=[0.0], **options)
