"""What the operating system grants this process: memory, CPUs, /dev/shm, files; and a container or WSL2 around it.

Each function reads, and changes nothing. ``root`` is where ``/proc`` and ``/sys`` stand; tests put others there.
"""

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from memlab.units import GIB

ROOT = Path("/")
_UNLIMITED = 1 << 62  # what cgroup v1 reports, about, where there is no limit


@dataclass(frozen=True)
class Memory:
    """Host memory in GiB. ``limit_gib`` is the control group's, None without one; ``available_gib`` heeds it."""

    total_gib: float
    available_gib: float
    swap_gib: float
    limit_gib: float | None


@dataclass(frozen=True)
class Cpus:
    """``usable`` are those that this process may run on (cpuset, affinity); ``quota``: CPUs' worth of time."""

    present: int
    usable: int
    quota: float | None


def is_wsl() -> bool:
    """Windows' subsystem for Linux, told by the kernel's name as vLLM tells it (vllm/platforms/interface.py)."""
    return "microsoft" in " ".join(platform.uname()).lower()


def is_container(root: Path = ROOT) -> bool:
    """Docker, Podman, Kubernetes and their like, by the marks that they leave."""
    if (root / ".dockerenv").exists() or (root / "run" / ".containerenv").exists():
        return True
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return True
    groups = _text(root / "proc" / "1" / "cgroup") or ""
    return any(mark in groups for mark in ("docker", "kubepods", "containerd", "libpod"))


def memory(root: Path = ROOT) -> Memory:
    """What is there and what may be had, the control group's limit included (cgroup v1 and v2)."""
    seen = psutil.virtual_memory()
    available, limits = seen.available, []
    for limit, used in _memory_groups(root):
        if limit < seen.total:
            limits.append(limit)
            available = min(available, max(0, limit - used))
    limit_gib = min(limits) / GIB if limits else None
    return Memory(seen.total / GIB, available / GIB, psutil.swap_memory().total / GIB, limit_gib)


def cpus(root: Path = ROOT) -> Cpus:
    """CPUs that are there, that this process may use, and the share of time that its control group gets."""
    present = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    quotas = []
    for folder in _groups(root, "cpu"):
        quota, period = [*(_text(folder / "cpu.max") or "").split(), "", ""][:2]
        if not quota:
            quota = (_text(folder / "cpu.cfs_quota_us") or "").strip()
            period = (_text(folder / "cpu.cfs_period_us") or "").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return Cpus(present, usable, min(quotas, default=None))


def shared_memory_gib(root: Path = ROOT) -> tuple[float, float] | None:
    """Size and free space of /dev/shm; None where there is none (Mac, Windows)."""
    try:
        usage = shutil.disk_usage(root / "dev" / "shm")
    except OSError:
        return None
    return usage.total / GIB, usage.free / GIB


def open_files() -> int | None:
    """The most files that a process may ask to have open (the hard limit); None where there is no limit."""
    try:
        import resource
    except ImportError:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def _groups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and of those above it, for one controller."""
    found = []
    for line in (_text(root / "proc" / "self" / "cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys" / "fs" / "cgroup" / (controller if controllers else "")
        # In a container the path is often the host's: the folder is then missing, and the mount itself is the group.
        here = mount / path.strip("/")
        while here != mount and mount in here.parents:
            found.append(here)
            here = here.parent
        found.append(mount)
    return [folder for folder in found if folder.is_dir()]


def _memory_groups(root: Path) -> list[tuple[int, int]]:
    """(limit, memory that cannot be had back) in bytes of each control group that has a limit."""
    found = []
    for folder in _groups(root, "memory"):
        for limit_file, usage_file, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _text(folder / limit_file), _text(folder / usage_file)
            if limit and usage and limit.strip().isdigit() and int(limit) < _UNLIMITED:
                rows = (row.split() for row in (_text(folder / "memory.stat") or "").splitlines())
                cache = next((int(row[1]) for row in rows if len(row) == 2 and row[0] == cached), 0)
                found.append((int(limit), max(0, int(usage) - cache)))
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
