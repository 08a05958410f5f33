"""What this machine is and whether a lab can run on it; each trouble with its fix."""

import shutil
import sys
from dataclasses import dataclass
from importlib import metadata

import psutil

from memlab import gpu, lab, vllm_main
from memlab.units import GIB, show_gib

MIN_DRIVER = 580  # CUDA 13.0, which vLLM 0.33's wheels are built for
CPU_LAB_GIB = 6  # the tiny model, its pool and PyTorch, with room


@dataclass(frozen=True)
class Check:
    """``level`` is ok, warning or error; ``fix`` says what to do about the last two."""

    name: str
    level: str
    detail: str
    fix: str = ""


def checks() -> list[Check]:
    """Every check, in the order in which one would fix things."""
    found = [_python(), _vllm()]
    devices = gpu.devices()
    if devices:
        found.append(_driver(devices[0]))
        found += [check for device in devices for check in _device(device)]
    else:
        found.append(Check("GPU", "ok", "no NVIDIA driver answers: labs run on the CPU backend or replay"))
    return [*found, _host_memory(bool(devices)), _disk()]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("Python", "ok", version)


def _vllm() -> Check:
    try:
        name = vllm_main.distribution()
    except metadata.PackageNotFoundError:
        return Check("vLLM", "warning", "not installed: labs replay recorded runs", "scripts/lab installs what fits")
    return Check("vLLM", "ok", f"{name} {metadata.version(name)}")


def _driver(device: gpu.Device) -> Check:
    detail = f"{device.driver} (CUDA {device.cuda})"
    if int(device.driver.split(".")[0]) < MIN_DRIVER:
        return Check("driver", "error", detail, f"vLLM 0.33 needs driver {MIN_DRIVER} or newer: update it and reboot")
    return Check("driver", "ok", detail)


def _device(device: gpu.Device) -> list[Check]:
    name = f"GPU {device.index}"
    used = gpu.used_gib(device.uuid)
    detail = f"{device.name}, {show_gib(device.total_gib - used)} free of {show_gib(device.total_gib)}, {device.uuid}"
    others = gpu.foreign(device.uuid)
    if others:
        held = [f"pid {p.pid}" + (f" ({show_gib(p.used_gib)})" if p.used_gib else "") for p in others]
        fix = "stop them, or choose another GPU: what they hold is missing from every plot"
        return [Check(name, "warning", f"{detail}; also used by {', '.join(held)}", fix)]
    if device.display_active:
        return [Check(name, "warning", f"{detail}; a display is on it", "expect noise of some MiB in its plots")]
    return [Check(name, "ok", detail)]


def _host_memory(has_gpu: bool) -> Check:
    free = psutil.virtual_memory().available / GIB
    if free < CPU_LAB_GIB and not has_gpu:
        fix = f"a live lab takes {CPU_LAB_GIB} GiB: close programs"
        return Check("host memory", "error", f"{show_gib(free)} free", fix)
    return Check("host memory", "ok", f"{show_gib(free)} free")


def _disk() -> Check:
    folder = lab.ROOT
    free = shutil.disk_usage(folder).free / GIB
    if free < 1:
        return Check("disk", "error", f"{show_gib(free)} free", "make room: runs are written to runs/ in the project")
    return Check("disk", "ok", f"{show_gib(free)} free")
