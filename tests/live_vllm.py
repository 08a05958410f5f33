"""What the tests share that start real vLLM: its processes, a wait, a kernel of a reader."""

import contextlib
import os
import time
import uuid
from pathlib import Path

import psutil
from jupyter_client.manager import KernelManager

LABS = Path(__file__).resolve().parent.parent / "labs"


# Whatever the tests start inherits it: a server that somebody else runs on this machine is none of theirs.
MARK = os.environ.setdefault("MEMLAB_TESTS", uuid.uuid4().hex)


def vllm_processes() -> list[int]:
    """Every process that runs vLLM through memlab and was started by these tests."""
    lines = ((process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return [
        process.pid for process, line in lines if ("memlab.vllm_main" in line or "VLLM::" in line) and _is_ours(process)
    ]


def _is_ours(process: psutil.Process) -> bool:
    """By the mark in its environment or in that of the process that started it: vLLM writes its title over its own.
    One that nobody can be found for is ours: it may have been left behind."""
    try:
        line = [process, *process.parents()]
    except psutil.NoSuchProcess:
        return False
    for each in line:
        try:
            environment = each.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if environment.get("PATH"):
            return environment.get("MEMLAB_TESTS") == MARK
    return True


def wait_until(condition, seconds: float = 30, what: str = "it did not happen in time"):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextlib.contextmanager
def kernel(runs: Path):
    """A notebook's kernel in the folder of the labs, as (manager, client); its runs go to ``runs``."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(LABS), env={**os.environ, "MEMLAB_RUNS": str(runs)})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(60)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
