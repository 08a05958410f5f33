"""The sampler: every extreme is kept, the baseline is subtracted, host memory is counted once."""

import os
import random
import subprocess
import sys
import time

import pytest

from memlab import gpu, lab
from memlab.errors import MemlabError
from memlab.units import GIB


@pytest.mark.parametrize("count", [1, 7, 1000, 54_321])
def test_no_extreme_is_lost_however_long_the_series(count):
    rng = random.Random(count)
    values = [rng.random() for _ in range(count)]
    values[rng.randrange(count)] += 10
    values[rng.randrange(count)] -= 10
    series = gpu.Extremes(buckets=50)
    for at, value in enumerate(values):
        series.add(float(at), value)
    times, kept = series.points()
    assert max(kept) == max(values)
    assert min(kept) == min(values)
    assert times == sorted(times)
    assert all(values[int(at)] == value for at, value in zip(times, kept, strict=True)), "a point was made up"
    assert len(kept) <= 4 * 50 + 2


def test_the_baseline_is_what_was_there_before():
    readings = iter([[5.0, 1.0], [5.5, 1.0], [9.0, 3.5], [5.0, 1.0]])
    sampler = gpu.Sampler(lambda: next(readings), "device", rate_hz=1000)
    assert sampler.baselines_gib == [5.0, 1.0]
    for _ in range(3):
        sampler.sample()
    first, second = sampler.timelines()
    assert max(first.used_gib) == 4.0
    assert max(second.used_gib) == 2.5
    assert min(first.used_gib) == 0.0


def test_a_load_between_two_readings_has_a_peak():
    """Of host memory a reading may take longer than a load."""
    readings = iter([[2.0], [3.0], [5.0], [4.0], [4.5], [4.25]])
    sampler = gpu.Sampler(lambda: next(readings), "device", rate_hz=1000)
    sampler.highest_gib()  # a load begins
    assert sampler.highest_gib() == [3.0]
    sampler.sample()
    assert sampler.highest_gib() == [3.0], "it begins where the load before ended"
    assert sampler.highest_gib() == [2.5]
    assert max(sampler.timelines()[0].used_gib) == 3.0
    with pytest.raises(StopIteration):
        sampler.sample()
    assert sampler.highest_gib() == [2.25] and isinstance(sampler.error, StopIteration), "a driver that is gone"


def test_a_driver_that_fails_in_the_middle_ends_the_watch_and_not_the_run():
    calls = iter(range(100))

    def read():
        if next(calls) > 3:
            raise OSError("the driver is gone")
        return [1.0]

    with gpu.Sampler(read, "device", rate_hz=1000) as sampler:
        time.sleep(0.1)
    assert isinstance(sampler.error, OSError)
    assert len(sampler.timelines()[0].used_gib) >= 1


def test_host_memory_of_a_group_rises_with_what_it_touches():
    code = "import time, sys; a = b'x' * (200 << 20); print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        with gpu.watch_host(lambda: [child.pid]) as sampler:
            time.sleep(0.3)
        used = sampler.timelines()[0].used_gib[-1]
        assert 200 / 1024 < used < 240 / 1024
        assert sampler.timelines()[0].measure == "host"
    finally:
        child.kill()
        child.wait()


def test_memory_that_two_processes_share_is_counted_once():
    code = (
        "import mmap, os, time; m = mmap.mmap(-1, 200 << 20); m.write(b'x' * (200 << 20)); "
        "pid = os.fork(); m.seek(0); m.read(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        pids = [int(child.stdout.readline()), int(child.stdout.readline())]
        assert 200 / 1024 < gpu.group_pss_gib(pids) < 260 / 1024
    finally:
        os.killpg(child.pid, 9)
        child.wait()


def test_processes_that_ended_count_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert gpu.group_pss_gib([child.pid]) == 0


@pytest.mark.skipif(bool(gpu.devices()), reason="this machine has a GPU")
def test_without_a_driver_the_error_names_the_way_out():
    with pytest.raises(MemlabError, match="MEMLAB_BACKEND=cpu"):
        gpu.watch_devices(["GPU-0"])


class FakeNvml:
    """NVML as far as the module uses it, with the driver's own answers as recorded on an H200."""

    NVMLError = RuntimeError

    def __init__(self, used_bytes, processes):
        self.used, self.running = used_bytes, processes

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-a":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle, version=1):
        return type("Memory", (), {"used": self.used, "total": 150_754_820_096})

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        if self.running is None:
            raise self.NVMLError("Not Supported")
        return [type("P", (), {"pid": pid, "usedGpuMemory": used}) for pid, used in self.running]


def test_foreign_processes_are_told_apart_where_the_driver_shows_them(monkeypatch):
    monkeypatch.setattr(gpu, "_nvml", lambda: FakeNvml(0, [(10, 2 << 30), (11, None)]))
    assert gpu.foreign("GPU-a", own_pids={10}) == [gpu.Process(11, None)]
    monkeypatch.setattr(gpu, "_nvml", lambda: FakeNvml(0, None))
    assert gpu.foreign("GPU-a") is None, "hidden processes are unknown, not absent"


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(gpu, "_nvml", lambda: FakeNvml(0, []))
    with pytest.raises(MemlabError, match="preflight"):
        gpu.watch_devices(["GPU-b"])


def test_an_allocators_history_begins_with_the_load_and_keeps_its_peak():
    before = [(900_000, 5 * GIB), (950_000, -5 * GIB)]
    load = [(1_000_000, 2 * GIB), (1_001_000, 3 * GIB), (1_002_500, -3 * GIB), (1_004_000, -GIB)]
    trace = lab.trace_since(1.0, allocated_bytes=16 * GIB, events=before + load)
    assert (trace.time_ms, trace.allocated_gib) == ([0.0, 1.0, 2.5, 4.0], [17.0, 20.0, 17.0, 16.0])
    assert lab.trace_since(2.0, 16 * GIB, before + load) is None


def test_a_watch_that_costs_much_looks_less_often():
    def read():
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return [1.0]

    with gpu.Sampler(read, "host", rate_hz=50) as sampler:
        start = time.perf_counter()
        time.sleep(1.5)
        seconds = time.perf_counter() - start
    assert 2 <= sampler.series[0].count <= seconds * gpu.MOST_OF_A_CORE / 0.02 + 2
