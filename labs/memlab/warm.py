"""Processes that have imported vLLM and wait for their command, so that nothing measured waits for the imports.

Importing vLLM takes longer than most of what a lab measures. A ``Warm`` process does it while something else runs, and
becomes one server. A ``LoadGenerator`` does it once, and sends one load after the other, for one run after the other.
Neither has touched a GPU, so no memory of a GPU is taken before a command comes.
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
from pathlib import Path

from memlab import bench_main
from memlab.process import Child, environment

IDLE_S = 300  # a load generator that sent nothing for so long ends


class _Waiting:
    """A process that waits for orders: files in a folder of its own."""

    def __init__(self, module: str, *arguments: str, env: dict[str, str]):
        self._temporary = tempfile.TemporaryDirectory(prefix="memlab-warm-")
        self.folder = Path(self._temporary.name)
        command = [sys.executable, "-m", module, *arguments, str(self.folder)]
        self.child = Child(command, self.folder / "output.log", env)

    def _order(self, name: str, order: dict) -> None:
        draft = self.folder / "draft"
        draft.write_text(json.dumps(order), encoding="utf-8")
        os.replace(draft, self.folder / name)

    def stop(self) -> None:
        """End it, and what it does; returns when all of it is gone."""
        self.child.stop()
        self._temporary.cleanup()


class Warm(_Waiting):
    """One process in wait, for one command of vLLM. ``env`` are variables that vLLM reads while it is imported."""

    def __init__(self, env: dict[str, str] | None = None):
        self.env = dict(env or {})
        super().__init__("memlab.vllm_main", "--wait", env=self.env)

    @property
    def waiting(self) -> bool:
        """Whether it can still be given its command."""
        return self.child.poll() is None and not (self.folder / "order.json").exists()

    def go(self, arguments: list[str], env: dict[str, str], log: Path, on_line) -> Child:
        """Run ``vllm`` with these arguments in the process that waits; its output goes to ``log`` from now on."""
        self.child.redirect(log, on_line)
        self._order("order.json", {"arguments": arguments, "env": env})
        return self.child


def start_vllm(arguments: list[str], env: dict[str, str], log: Path, on_line, warm: Warm | None = None) -> Child:
    """``vllm`` with these arguments, in the warm process where one waits, else in a new one."""
    if warm is not None and warm.waiting and warm.env.items() <= env.items():
        return warm.go(arguments, env, log, on_line)
    return Child([sys.executable, "-m", "memlab.vllm_main", *arguments], log, env, on_line)


class LoadGenerator(_Waiting):
    """vLLM's load generator, for one load at a time (``memlab.bench_main``). It sees no GPU."""

    _ENV = {"CUDA_VISIBLE_DEVICES": ""}

    def __init__(self):
        super().__init__("memlab.bench_main", env=self._ENV)
        self._loads = 0
        self._ended = threading.Event()
        self._ended.set()
        self.timer: threading.Timer | None = None

    @property
    def ready(self) -> bool:
        """Whether it can be given a load, now or when it is imported."""
        return self.child.poll() is None and self._ended.is_set()

    def begin(self, arguments: list[str], log: Path, on_line) -> None:
        """Run ``vllm`` with these arguments; its output goes to ``log``, and each line of it to ``on_line``."""
        self._ended.clear()
        self._code: int | None = None
        self._loads += 1

        def watch(line: str) -> None:
            if line.startswith(bench_main.ENDED):
                self._code = int(line.removeprefix(bench_main.ENDED))
                self._ended.set()
            else:
                on_line(line)

        self.child.redirect(log, watch)
        order = {"arguments": arguments, "environment": environment(self._ENV), "folder": os.getcwd()}
        self._order(f"{self._loads}.json", order)

    def wait(self, timeout_s: float) -> int | None:
        """The load's exit code; None where it has not ended in that time. One that could not be begun has the code of
        the generator."""
        if self._ended.wait(timeout_s):
            self.child.redirect(self.folder / "output.log", None)
            return self._code
        return None if self.child.poll() is None else self.child.wait(10)


_idle: list[LoadGenerator] = []
_lock = threading.Lock()


def keep_a_load_generator() -> None:
    """See to it that one is there, or on its way, before it is needed."""
    with _lock:
        if not any(each.ready for each in _idle):
            _rest(LoadGenerator())


@contextlib.contextmanager
def load_generator():
    """A load generator for one load. It is kept for the next one, unless it was left in the middle of its load."""
    with _lock:
        generator = next((each for each in _idle if each.ready), None)
        if generator:
            _idle.remove(generator)
            generator.timer.cancel()
    generator = generator or LoadGenerator()
    try:
        yield generator
    finally:
        if generator.ready:
            with _lock:
                _rest(generator)
        else:
            generator.stop()


def _rest(generator: LoadGenerator) -> None:
    _idle.append(generator)
    generator.timer = threading.Timer(IDLE_S, _end_idle, [generator])
    generator.timer.daemon = True
    generator.timer.start()


def end_idle_load_generators() -> None:
    """End those that wait, and give their memory back to the host."""
    for each in list(_idle):
        _end_idle(each)


def _end_idle(generator: LoadGenerator) -> None:
    with _lock:
        if generator not in _idle:
            return
        _idle.remove(generator)
        generator.timer.cancel()
    generator.stop()
