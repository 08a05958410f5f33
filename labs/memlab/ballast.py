"""``python -m memlab.ballast FREE_GIB``: hold the first visible GPU's memory until only FREE_GIB are free.

So a large GPU plays a smaller one: an allocation really fails where the smaller card's would. It speaks to the CUDA
driver itself, so that it needs no PyTorch and starts at once, and it holds on until it is killed.
"""

import ctypes
import json
import signal
import sys

from memlab.units import GIB, MIB

CHUNK = GIB
GRAIN = 2 * MIB  # what the driver hands out at least


class CudaError(RuntimeError):
    """A call of the CUDA driver that failed."""


class Driver:
    """The few calls of the CUDA driver API that holding memory takes."""

    def __init__(self):
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError("no NVIDIA driver on this machine (libcuda.so.1)") from error
        self._call("cuInit", 0)
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise CudaError(f"{name} failed with code {code}")

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def take(self, size_bytes: int) -> None:
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))


def hold(driver, free_bytes: int) -> int:
    """Take memory until ``free_bytes`` are free, to the driver's grain; returns the bytes taken.

    Raises:
        CudaError: where less is free already.
    """
    before = driver.free_bytes()
    if before < free_bytes:
        raise CudaError(f"only {before / GIB:.2f} GiB are free, {free_bytes / GIB:.2f} are to stay so")
    while (excess := driver.free_bytes() - free_bytes) >= GRAIN:
        driver.take(min(CHUNK, excess // GRAIN * GRAIN))
    return before - driver.free_bytes()


def main() -> None:
    try:
        driver = Driver()
        held = hold(driver, round(float(sys.argv[1]) * GIB))
    except (CudaError, IndexError, ValueError) as error:
        sys.exit(f"memlab ballast: {error}")
    print(json.dumps({"held_gib": held / GIB, "free_gib": driver.free_bytes() / GIB}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
