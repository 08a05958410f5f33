"""A vLLM server as a child process: start it, wait for it, watch it, stop it, and see its memory come back."""

import http.client
import json
import re
import socket
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from memlab import flags, gpu, vllm_log, vllm_main
from memlab.errors import ServerError
from memlab.process import Child
from memlab.record import MemoryBack, Phase
from memlab.warm import Warm, start_vllm

HOST = "127.0.0.1"
BACK_WITHIN_GIB = 0.05  # what a driver may keep of a process that ended
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback goes through no proxy


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(f"port {port} is in use: name another, or none to get a free one") from error


@dataclass
class Server:
    """A running ``vllm serve``. Use it as a context manager: leaving stops it, whatever happened inside.

    Args:
        model: folder or name for vLLM.
        serve_flags: its flags.
        folder: where the log goes (``vllm.log``).
        uuids: the GPUs to use, by UUID; empty on the CPU backend.
        env: more variables for it.
        port: None for a free one.
        on_phase: called with (phase, seconds since the start) as each phase begins.
        warm: a process that waits, to be used for it.
    """

    model: str
    serve_flags: flags.ServeFlags
    folder: Path
    uuids: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    port: int | None = None
    on_phase: object = None
    warm: Warm | None = None
    events: list = field(default_factory=list, init=False)
    phases: list[Phase] = field(default_factory=list, init=False)
    resolved: dict = field(default_factory=dict, init=False)
    child: Child | None = field(default=None, init=False)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``vllm``: the command ``serve``."""
        return ["serve", self.model, *self.serve_flags.to_args(), "--host", HOST, "--port", str(self.port)]

    def start(self) -> None:
        """Start it; returns at once. The memory in use before is kept, to compare it at the end.

        Raises:
            ServerError: for a port in use, or where the process cannot be started.
        """
        if self.port is None:
            self.port = free_port()
        _check_port(self.port)
        self.before_gib = [gpu.used_gib(uuid) for uuid in self.uuids]
        self.foreign = [gpu.foreign(uuid) for uuid in self.uuids]
        self._parser = vllm_log.LogParser()
        self._lock = threading.Lock()
        self.origin = time.perf_counter()
        self._begin("starting")
        env = {**device_variables(self.uuids), **self.env}
        self.child = start_vllm(self.arguments, env, self.folder / "vllm.log", self._line, self.warm)

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.origin

    def _begin(self, phase: str) -> None:
        if not self.phases or self.phases[-1].name != phase:
            self.phases.append(Phase(phase, round(self.now(), 3)))
            if self.on_phase:
                self.on_phase(phase, self.now())

    def _line(self, line: str) -> None:
        stated = re.search(re.escape(vllm_main.PREFIX) + r"(\{.*\})", line)
        if stated:
            self.resolved = json.loads(stated.group(1))
        with self._lock:
            events = self._parser.feed(line)
            self.events += events
        for event in events:
            phase = vllm_log.phase_of(event)
            if phase and not {"ready", "stopping"} & {p.name for p in self.phases}:
                self._begin(phase)

    def mark(self, phase: str) -> None:
        """Mark a phase that the log does not tell, such as ``traffic``."""
        self._begin(phase)

    @property
    def phase(self) -> str:
        return self.phases[-1].name

    def wait_until_ready(self, timeout_s: float = 900, tick=None) -> bool:
        """Wait until it answers; True then, False where it ended instead. ``tick`` is called twice a second.

        Raises:
            TimeoutError: after ``timeout_s``.
        """
        last = 0.0
        while self.child.poll() is None:
            if self.healthy():
                self._begin("ready")
                return True
            if self.now() > timeout_s:
                raise TimeoutError(f"vLLM was not ready after {timeout_s:.0f} s, in the phase {self.phase}")
            if tick and self.now() - last > 0.5:
                tick(self.phase, self.now())
                last = self.now()
            time.sleep(0.1)
        self.child.wait(10)
        return False

    def healthy(self) -> bool:
        """Whether ``/health`` answers now."""
        try:
            with _direct.open(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (OSError, ValueError):
            return False

    def get(self, path: str) -> str:
        """The text of a page of the server, such as ``/metrics``.

        Raises:
            ServerError: where it does not answer.
        """
        try:
            with _direct.open(self.url + path, timeout=5) as answer:
                return answer.read().decode("utf-8", "replace")
        except (OSError, ValueError) as error:
            raise ServerError(f"the server does not answer {path}: {error}") from error

    def rpc(self, method: str, *arguments: str, timeout_s: float = 120) -> list:
        """Call a method of the workers; one answer a rank. Needs ``VLLM_SERVER_DEV_MODE=1`` and the method there.

        Raises:
            ServerError: where the server does not answer.
        """
        body = {"method": method, "args": arguments, "timeout": timeout_s}
        return self.post("/collective_rpc", body, timeout_s).get("results", [])

    def post(self, path: str, body: dict, timeout_s: float = 120) -> dict:
        """The server's answer to JSON, parsed; an empty one is an empty dict.

        Raises:
            ServerError: where it does not answer, or refuses.
        """
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        try:
            with _direct.open(urllib.request.Request(self.url + path, data, kind), timeout=timeout_s) as answer:
                text = answer.read()
            return json.loads(text) if text else {}
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServerError(f"the server does not answer {path}: {error}") from error

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def pids(self) -> list[int]:
        return self.child.pids() if self.child else []

    def stop(self) -> None:
        """Stop it in order and wait until every process is gone. Twice is harmless."""
        if self.child is None:
            return
        if self.phase != "stopped":
            self._begin("stopping")
            self.child.stop()
            with self._lock:
                self.events += self._parser.close()
            self._begin("stopped")

    def memory_back(self, timeout_s: float = 20) -> MemoryBack:
        """Watch the GPUs' memory return to what it was before the start; on the CPU the processes themselves.

        Returns the worst GPU; ``seconds`` is None where the memory was not back in time.
        """
        if not self.uuids:
            left = gpu.group_pss_gib(self.pids())
            return MemoryBack(0.0, round(left, 4), 0.0 if left == 0 else None)
        start = time.perf_counter()
        while True:
            now = [gpu.used_gib(uuid) for uuid in self.uuids]
            pairs = zip(self.before_gib, now, strict=True)
            before, after = max(pairs, key=lambda pair: pair[1] - pair[0])
            excess = after - before
            waited = time.perf_counter() - start
            if excess <= BACK_WITHIN_GIB or waited > timeout_s:
                seconds = round(waited, 3) if excess <= BACK_WITHIN_GIB else None
                return MemoryBack(round(before, 4), round(after, 4), seconds)
            time.sleep(0.02)


def device_variables(uuids: list[str]) -> dict[str, str]:
    """The variables that give a server these GPUs: indices in PCI order, where NVML's order is CUDA's."""
    if not uuids:
        return {}
    index = {device.uuid: str(device.index) for device in gpu.devices()}
    missing = [uuid for uuid in uuids if uuid not in index]
    if missing:
        raise ServerError(f"no GPU {', '.join(missing)} on this machine: `memlab preflight` lists them by UUID")
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(index[uuid] for uuid in uuids)}
