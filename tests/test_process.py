"""No process outlives its parent, whatever ends the parent. The children here are stubborn on purpose."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from memlab import process, supervisor

LABS = Path(process.__file__).resolve().parent.parent

# Ignores Ctrl-C, has a child in the group and an orphan in a session of its own, as a vLLM engine may.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    open({mark!r} + ".orphan", "w").write(str(os.getpid()))
    time.sleep(600)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({mark!r}, "w").write(str(os.getpid()))
print("up", flush=True)
time.sleep(600)
"""

PARENT = """
import sys, time
from pathlib import Path
from memlab.process import Child
child = Child([sys.executable, "-c", {stubborn!r}], Path({log!r}))
while not Path({mark!r}).exists() or not Path({mark!r} + ".orphan").exists():
    time.sleep(0.02)
Path({mark!r} + ".pids").write_text(" ".join(map(str, child.pids())))
{then}
"""


def wait_for(condition, seconds: float, what: str):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def parent(tmp_path: Path, then: str, **options) -> tuple[subprocess.Popen, list[int]]:
    """Start a parent with a stubborn child; returns it and the child's processes."""
    mark = str(tmp_path / "mark")
    code = PARENT.format(
        stubborn=STUBBORN.format(mark=mark), log=str(tmp_path / "log"), mark=mark, then=textwrap.dedent(then)
    )
    started = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(LABS)}, **options)
    pids = tmp_path / "mark.pids"
    wait_for(lambda: pids.exists() and pids.read_text(), 30, "the child did not start")
    found = [int(pid) for pid in pids.read_text().split()]
    assert int((tmp_path / "mark.orphan").read_text()) in found, "the orphan that left the group is not seen"
    assert len(found) >= 3
    return started, found


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=["SIGKILL", "SIGTERM", "Ctrl-C"])
def test_a_parent_that_is_killed_leaves_nothing_behind(tmp_path, end):
    started, pids = parent(tmp_path, "time.sleep(600)")
    started.send_signal(end)
    started.wait(60)
    wait_for(lambda: all(map(gone, pids)), supervisor.ORPHAN_GRACE_S + 20, f"left: {pids}")


def test_a_kernel_killed_with_its_whole_group_leaves_nothing_behind(tmp_path):
    """Jupyter restarts a kernel by killing its process group."""
    started, pids = parent(tmp_path, "time.sleep(600)", start_new_session=True)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait(60)
    wait_for(lambda: all(map(gone, pids)), supervisor.ORPHAN_GRACE_S + 20, f"left: {pids}")


def test_an_exception_leaves_nothing_behind(tmp_path):
    started, pids = parent(tmp_path, "raise RuntimeError('as a cell might')", stderr=subprocess.DEVNULL)
    assert started.wait(60) == 1
    assert all(map(gone, pids))


def test_stop_ends_the_group_and_what_left_it(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "GRACE_S", 0.5)
    mark = str(tmp_path / "mark")
    child = process.Child([sys.executable, "-c", STUBBORN.format(mark=mark)], tmp_path / "log")
    wait_for(Path(mark + ".orphan").exists, 20, "the child did not start")
    wait_for(Path(mark).exists, 20, "the child did not start")
    pids = child.pids()
    child.stop()
    child.stop()
    assert all(map(gone, pids))
    assert child.poll() == 128 + signal.SIGKILL


def test_a_killed_supervisor_does_not_save_its_child(tmp_path):
    child = process.Child([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    pids = child.pids()
    child._supervisor.kill()
    child.stop()
    wait_for(lambda: all(map(gone, pids)), 10, f"left: {pids}")


def test_the_exit_code_and_every_line_come_through(tmp_path):
    lines = []
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(7)"
    child = process.Child([sys.executable, "-c", code], tmp_path / "log", on_line=lines.append)
    assert child.wait(30) == 7
    assert sorted(lines) == ["one", "two"]
    assert sorted((tmp_path / "log").read_text().split()) == ["one", "two"]
    child.stop()


def test_a_full_disk_stops_neither_the_child_nor_the_events(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    lines = []
    code = "for i in range(2000): print('line', i)"
    child = process.Child([sys.executable, "-c", code], full, on_line=lines.append)
    assert child.wait(30) == 0
    assert len(lines) == 2000
    assert isinstance(child.log_error, OSError)
    child.stop()


def test_a_reader_that_fails_does_not_block_the_child(tmp_path):
    def broken(line):
        raise ValueError("no")

    code = "print('x' * 200_000); print('y' * 200_000)"
    child = process.Child([sys.executable, "-c", code], tmp_path / "log", on_line=broken)
    assert child.wait(30) == 0
    assert isinstance(child.reader_error, ValueError)
    child.stop()
