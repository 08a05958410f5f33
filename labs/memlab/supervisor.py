"""``python -m memlab.supervisor FD COMMAND...``: runs a command and lets nothing of it outlive the parent.

It stands outside the command's process group and reads a pipe (file descriptor FD) whose only writer is the parent.
A byte asks for an orderly stop; the pipe's end means that the parent is gone, however it died. Then the command gets
SIGINT, a while to end, and SIGKILL for every process that is left. As a subreaper it inherits the command's orphans,
so that those that left the group are found too. Standard library only: it must start fast and never fail.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 15.0  # after an orderly request
ORPHAN_GRACE_S = 3.0  # after the parent's death
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Let orphaned descendants become children of this process (Linux; elsewhere the group alone is watched)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """All living processes below this one, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as stat:
                    state, parent = stat.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
    found, queue = [], [os.getpid()]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def reap() -> None:
    """Collect the exit of every child that has ended, except the command's own, which ``Popen`` collects."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid == command.pid:
            return
        os.waitpid(info.si_pid, os.WNOHANG)


def kill_everything() -> None:
    """SIGKILL to the group and to every descendant, until none is left."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for send, target in [(os.killpg, command.pid), *((os.kill, pid) for pid in descendants())]:
            try:
                send(target, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        command.poll()
        reap()
        if not descendants():
            return
        time.sleep(0.02)


def interrupt(grace_s: float) -> None:
    """SIGINT to the command, as Ctrl-C would send it, and a while for it to end."""
    try:
        os.kill(command.pid, signal.SIGINT)
        command.wait(grace_s)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        return


def watch(pipe: int) -> None:
    """Until the command ends by itself or a stop is due; then leave nothing behind."""
    while command.poll() is None:
        readable, _, _ = select.select([pipe], [], [], 0.2)
        if readable:
            ordered = bool(os.read(pipe, 1))
            interrupt(GRACE_S if ordered else ORPHAN_GRACE_S)
            break
        reap()
    kill_everything()


if __name__ == "__main__":
    # The terminal's Ctrl-C is the parent's to handle; it asks for the stop through the pipe.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    become_subreaper()
    pipe_fd, *arguments = sys.argv[1:]

    def in_child() -> None:
        for restored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(restored, signal.SIG_DFL)

    os.set_inheritable(int(pipe_fd), False)
    command = subprocess.Popen(arguments, start_new_session=True, preexec_fn=in_child)
    print(f"memlab supervisor: pid {command.pid}", flush=True)
    watch(int(pipe_fd))
    code = command.poll()
    sys.exit(128 - code if code is not None and code < 0 else code)
