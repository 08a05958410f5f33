"""What the tests share that start real vLLM: its processes, a wait, a kernel of a reader."""

import contextlib
import os
import time
from pathlib import Path

import psutil
from jupyter_client.manager import KernelManager

LABS = Path(__file__).resolve().parent.parent / "labs"


def vllm_processes() -> list[int]:
    """Every process on this machine that runs vLLM through memlab."""
    lines = ((process.pid, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return [pid for pid, line in lines if "memlab.vllm_main" in line or "VLLM::" in line]


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
