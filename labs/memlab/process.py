"""A child process that cannot outlive us: started through ``memlab.supervisor``, its output read line by line."""

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import psutil

from memlab import supervisor
from memlab.errors import ServerError

LABS = Path(__file__).resolve().parent.parent
_alive: weakref.WeakSet["Child"] = weakref.WeakSet()


def environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment for a child: memlab importable, output unbuffered and without colours."""
    path = os.pathsep.join(filter(None, [str(LABS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", **extra}


class Child:
    """A supervised command. ``on_line`` gets each line of its output (stdout and stderr), in a thread of its own.

    Raises:
        ServerError: where it cannot be started.
    """

    def __init__(self, arguments: list[str], log: Path, env: dict[str, str] | None = None, on_line=None):
        self.log, self.on_line = log, on_line
        self.log_error: OSError | None = None
        self.reader_error: Exception | None = None
        self.pid: int | None = None
        read_end, self._pipe = os.pipe()
        try:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "memlab.supervisor", str(read_end), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment(env or {}),
                pass_fds=[read_end],
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._pipe)
            raise ServerError(f"{arguments[0]} could not be started: {error}") from error
        finally:
            os.close(read_end)
        self._stopped = False
        self._output = threading.Lock()
        self._file = self._opened(log)
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, name="log reader", daemon=True)
        self._reader.start()
        _alive.add(self)
        self._started.wait(10)

    def redirect(self, log: Path, on_line) -> None:
        """Write the output to ``log`` and give it to ``on_line`` from the next line on."""
        with self._output:
            self.log, self.on_line = log, on_line
            if self._file is not None:
                self._file.close()
            self._file = self._opened(log)

    def _opened(self, log: Path):
        try:
            return log.open("w", encoding="utf-8")
        except OSError as error:
            self.log_error = error
            return None

    def _read(self) -> None:
        for raw in self._supervisor.stdout:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            if self.pid is None and (match := re.fullmatch(r"memlab supervisor: pid (\d+)", line)):
                self.pid = int(match.group(1))
                self._started.set()
                continue
            with self._output:
                self._take(line)
        self._started.set()
        with self._output:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _take(self, line: str) -> None:
        if self._file is not None:
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except OSError as error:  # a full disk must neither stop the run nor lose the events
                self._file, self.log_error = None, error
        if self.on_line:
            try:
                self.on_line(line)
            except Exception as error:  # the child's pipe must be read to the end whatever happens here
                self.reader_error = error

    def poll(self) -> int | None:
        """The exit code (128 + signal where a signal ended it), or None while it runs."""
        return self._supervisor.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end and the last line of output.

        Raises:
            subprocess.TimeoutExpired: after ``timeout_s``.
        """
        code = self._supervisor.wait(timeout_s)
        self._reader.join(10)
        return code

    def pids(self) -> list[int]:
        """The command's processes, its own included, the supervisor's not."""
        try:
            return [child.pid for child in psutil.Process(self._supervisor.pid).children(recursive=True)]
        except psutil.Error:
            return []

    def stop(self) -> None:
        """SIGINT, a while, then SIGKILL for all that is left; returns when every process is gone. Twice is harmless."""
        if self._stopped:
            return
        self._stopped = True
        left = self.pids()
        with contextlib.suppress(OSError):  # the supervisor may be gone already
            os.write(self._pipe, b"x")
        try:
            self.wait(supervisor.GRACE_S + 35)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
        finally:
            os.close(self._pipe)
            if self._supervisor.poll() is None or self._supervisor.returncode < 0:
                self._kill(left)
            _alive.discard(self)

    def _kill(self, pids: list[int]) -> None:
        """What a supervisor that was itself killed could not end: the group, and what was seen below it."""
        for send, target in [(os.killpg, self.pid), *((os.kill, pid) for pid in pids)]:
            with contextlib.suppress(ProcessLookupError, PermissionError, TypeError):
                send(target, signal.SIGKILL)


@atexit.register
def stop_all() -> None:
    """Stop every child that is still there."""
    for child in list(_alive):
        child.stop()
