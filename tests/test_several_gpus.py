"""Runs on several GPUs: the grids that record them, each rank's ledger, and what a sweep gains from more GPUs."""

import importlib.machinery
import importlib.util
import itertools
import json
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures_record import cpu_record, cuda_record
from memlab import cards, gpu, lab, ledger, models, plan_report, planner, plots, rank_plots, record, sweep, vllm_log
from memlab.errors import ServerError
from memlab.flags import ServeFlags
from memlab.shapes import LAB_MODELS

ROOT = Path(__file__).resolve().parent.parent


def script(name: str):
    """A file of scripts/ as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


# ---- the grids ----

RECORD = script("record")
GRIDS = {
    name: [sweep.from_dict(entry) for entry in json.loads(RECORD.named_grid(name).read_text())]
    for name in ("two-cards", "flagship")
}
FUSION_OFF = "-cc.pass_config.fuse_allreduce_rms=False"
EVERY = [setting for grid in GRIDS.values() for setting in grid]


def layout(setting: sweep.Setting) -> tuple[int, int]:
    """Tensor and pipeline parallel sizes."""
    return setting.flags.tensor_parallel_size or 1, setting.flags.pipeline_parallel_size or 1


def of(name: str, **wanted) -> list[sweep.Setting]:
    """The settings of a grid with these flags."""
    return [
        setting
        for setting in GRIDS[name]
        if all(getattr(setting.flags, flag) == value for flag, value in wanted.items())
    ]


def test_a_grid_goes_by_its_name_and_a_labs_name_stays_the_labs():
    assert RECORD.named_grid("two-cards") == ROOT / "labs" / "grids" / "two-cards.json"
    for name in ("01", "01-ledger", "nothing", None):
        assert RECORD.named_grid(name) is None


def test_every_setting_has_its_own_place_and_fits_a_call():
    for name, grid in GRIDS.items():
        assert len({str(setting) for setting in grid}) == len(grid)
        assert {setting.lab for setting in grid} == {name}
        assert all(setting.seconds < RECORD.NAMED_GRID_S for setting in grid)


def test_two_cards_hold_each_shape_in_each_layout_that_it_fits():
    small, middle, large = "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b-awq"
    eager = of("two-cards", enforce_eager=True, max_num_batched_tokens=2048)
    held = {(setting.model, layout(setting)) for setting in eager}
    apart, tensor, pipeline = (1, 1), (2, 1), (1, 2)
    assert held == {(model, how) for model in (small, middle, large) for how in (apart, tensor, pipeline)} - {
        (middle, apart)
    }
    assert not planner.plan(LAB_MODELS[middle], cards.find("3090"), eager[0].flags.with_(tensor_parallel_size=1)).starts
    assert {setting.repeats for setting in GRIDS["two-cards"] if layout(setting) == apart} == {2}, "two servers at once"


@pytest.mark.parametrize(("name", "layouts"), [("two-cards", {(2, 1), (1, 2)}), ("flagship", {(8, 1), (1, 8), (4, 2)})])
def test_batched_tokens_and_graphs_are_varied_in_each_layout(name, layouts):
    for sizes in layouts:
        settings = [setting for setting in GRIDS[name] if layout(setting) == sizes]
        assert {512, 2048, 8192} <= {setting.flags.max_num_batched_tokens for setting in settings}
        assert {setting.flags.enforce_eager for setting in settings} == {True, False}


def test_the_flagship_has_the_articles_settings_first_and_larger_cards_for_fewer_ranks():
    first = GRIDS["flagship"][0]
    asked = first.flags
    assert (first.model, layout(first), first.card) == ("llama-2-70b", (8, 1), "NVIDIA GeForce RTX 3090")
    assert (asked.gpu_memory_utilization, asked.max_num_batched_tokens, asked.max_num_seqs) == (0.85, 2048, 48)
    assert (asked.block_size, asked.enable_chunked_prefill, asked.enforce_eager) == (16, True, False)
    for setting in GRIDS["flagship"]:
        ranks = setting.flags.world_size
        assert (cards.find(setting.card).total_gib < 24) == (ranks == 8), str(setting)
    assert {setting.flags.world_size for setting in GRIDS["flagship"]} == {2, 4, 8}


def test_nvlink_multicast_is_off_wherever_gpus_talk():
    """NCCL, PyTorch's symmetric memory and FlashInfer, alone and fused with the norm: those that a card of 24 GB has
    not got either (0.33: vllm/distributed/device_communicators/cuda_communicator.py, vllm/config/vllm.py:179)."""
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    off |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    for setting in EVERY:
        wanted = off if setting.flags.world_size > 1 else {}
        assert setting.variables.items() >= wanted.items(), str(setting)
        assert (FUSION_OFF in setting.flags.extra) == (layout(setting)[0] > 1), str(setting)


def test_cards_without_nvlink_are_played_by_both_switches_together_and_beside_a_run_with_it():
    for grid in GRIDS.values():
        apart = [setting for setting in grid if "NCCL_P2P_DISABLE" in setting.variables]
        assert apart == [setting for setting in grid if "--disable-custom-all-reduce" in setting.flags.extra]
        joined = [setting.flags for setting in grid if setting not in apart]
        assert apart and all(setting.flags.with_(extra=(FUSION_OFF,)) in joined for setting in apart)


def test_fp8_is_recorded_on_a_card_that_has_it_beside_the_same_run_without():
    grid = GRIDS["two-cards"]
    fp8 = [setting for setting in grid if setting.flags.kv_cache_dtype == "fp8"]
    assert fp8 and all(cards.find(setting.card).refuses(setting.flags) is None for setting in fp8)
    first = fp8[0]
    assert first.flags.with_(kv_cache_dtype=None) in [each.flags for each in grid if each.card == first.card]


def test_the_planner_says_what_starts_and_the_bursts_fill_the_pool():
    refused = []
    for setting in EVERY:
        plan = planner.plan(LAB_MODELS[setting.model], cards.find(setting.card), setting.flags, changes=False)
        if not plan.starts:
            refused.append((setting.model, layout(setting), setting.flags.max_num_batched_tokens))
            continue
        loads = setting.traffic if isinstance(setting.traffic, list) else [setting.traffic]
        asked = max(load.requests * load.longest_tokens for load in loads)
        fp8 = setting.flags.kv_cache_dtype == "fp8"
        filled = min(plan.prediction.kv_tokens, plan.reachable_kv_tokens)
        assert fp8 or asked > filled, f"{setting}: {asked} tokens into {filled}"
    assert refused == [("qwen2.5-32b-awq", (1, 1), 8192)], "one card alone: a step of 8192 leaves no pool"


# ---- each rank's ledger ----

LOGS = ROOT / "tests" / "data" / "vllm_logs"
WORKERS = re.compile(r"\(EngineCore pid=\d+\) (.*\[(?:gpu_worker|model_runner|cudagraph_utils|parallel_state)\.py.*)")
ONCE = ("Available KV cache memory", "Using V2 Model Runner")  # logger.info_once: the first rank alone says it


def log_of(ranks: list[str], name: str = "graphs", heavier: str | None = None) -> list[vllm_log.Event]:
    """A real log of 0.33.0 on one GPU, its worker's lines said by each of these ranks; one may be heavier."""
    lines = []
    for line in (LOGS / f"h200-0.33.0-{name}.log").read_text().splitlines():
        said = WORKERS.match(line)
        if said is None:
            lines.append(line)
            continue
        once = any(words in line for words in ONCE)
        lines += [f"(Worker_{rank} pid={number}) {said[1]}" for number, rank in enumerate(ranks[: 1 if once else None])]
    weights = "Model loading took 15.0", "Model loading took 15.25"
    return list(vllm_log.parse(line.replace(*weights) if f"_{heavier} " in line else line for line in lines))


def eight_ranks(pipeline: bool = False) -> record.RunRecord:
    """Llama-2-70B on eight GPUs as the planner has it, its ranks a little apart; made up, no measurement."""
    sizes = {"pipeline_parallel_size": 8} if pipeline else {"tensor_parallel_size": 8}
    asked = of("flagship", max_num_batched_tokens=2048, enforce_eager=True, **sizes)[0]
    plan = planner.plan(LAB_MODELS[asked.model], cards.find(asked.card), asked.flags, changes=False)
    base = cuda_record("synthetic-eight")
    ranks = []
    for number in range(8):
        kept = plan.prediction.stages[number if pipeline else 0].ledger
        off = 0.01 * number
        stated = replace(
            kept,
            view="stated",
            context_gib=None,
            consumed_gib=kept.consumed_gib + off,
            kv_cache_gib=kept.kv_cache_gib - off,
        )
        peak = 1.2 + kept.budget_gib + off
        seen = ledger.MemoryLedger(
            "seen", device_total_gib=140.4, baseline_gib=116.0, peak_gib=peak, headroom_gib=140.4 - 116.0 - peak,
            context_gib=1.1, budget_gib=kept.budget_gib, unprofiled_gib=peak - 1.1 - kept.budget_gib,
        )  # fmt: skip
        ranks.append(record.Rank(stated, seen, record.Timeline("device", 50.0, [0.0, 9.0, 10.0], [0.0, peak, 0.0])))
    return replace(
        base,
        machine=replace(base.machine, gpu_count=8, link="nvlink"),
        model=record.Model(asked.model, "dummy", LAB_MODELS[asked.model].to_config()),
        flags=record.Flags(asked.flags.set(), asked.flags.set()),
        ranks=ranks,
        prediction=plan.prediction.to_dict(),
    )


@pytest.mark.parametrize("name", ["eager", "graphs"])
def test_every_rank_states_a_whole_ledger_though_the_pool_is_printed_once(name):
    events = log_of(["TP0", "TP1", "TP2"], name)
    alone = vllm_log.stated_ledger(list(vllm_log.parse_file(LOGS / f"h200-0.33.0-{name}.log")))
    assert vllm_log.ranks(events) == ["TP0", "TP1", "TP2"]
    for rank in ("TP0", "TP1", "TP2"):
        stated = vllm_log.stated_ledger(events, rank)
        assert stated == replace(alone, pool_given=stated.pool_given) and not stated.pool_given
        assert all(identity.holds for identity in stated.identities())


def test_a_prediction_is_held_to_the_stage_of_its_rank():
    tensor, pipeline = eight_ranks(), eight_ranks(pipeline=True)
    assert "stages" not in tensor.prediction and len(pipeline.prediction["stages"]) == 8
    assert len({plots.predicted(tensor, rank).weights_gib for rank in range(8)}) == 1
    first, middle, last = (plots.predicted(pipeline, rank) for rank in (0, 3, 7))
    assert first.weights_gib > middle.weights_gib < last.weights_gib, "the ends have the embeddings and the head"
    rows = {row[0]: row for row in plots.reconcile(pipeline, 3).rows}
    assert rows["KV cache"][4] == "−31 MiB", "rank 3 holds 0.03 GiB more than its own stage was predicted to"
    assert rows["KV cache"][5] == "yes"


def test_the_figure_of_ranks_says_how_far_they_are_apart():
    run = eight_ranks()
    plot = rank_plots.ranks(run)
    most, *_, least = (rank.stated.kv_cache_gib for rank in run.ranks)
    assert "8 ranks." in plot.alt
    assert f"Weights, stated: {run.ranks[0].stated.weights_gib:.2f} GiB on each." in plot.alt
    assert f"KV cache, stated: {least:.2f} GiB on rank 7 to {most:.2f} GiB on rank 0." in plot.alt
    assert "Context, seen: 1.10 GiB on each." in plot.alt
    assert [row[0] for row in plot.table.rows] == [*(f"rank {number}" for number in range(8)), "most less least"]
    apart = dict(zip(plot.table.header, plot.table.rows[-1], strict=True))
    assert apart["KV cache, stated"] == apart["buffers and non-torch, stated"] == "72 MiB"
    assert apart["weights, stated"] == "none"


def test_eight_ranks_lines_look_different():
    axes = plots.timeline(eight_ranks()).draw("#222222").axes[0]
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines if line.get_label().startswith("rank")}
    assert len(looks) == 8


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_stage_is_predicted_once_and_each_rank_stated_and_seen(pipeline):
    labels = [bar.label for bar in rank_plots._bars(eight_ranks(pipeline), "")]
    predicted = [label for label in labels if label.endswith("predicted")]
    assert predicted == (
        [f"stage {number}, predicted" for number in range(1, 9)] if pipeline else ["every rank, predicted"]
    )
    for view in ("stated", "seen"):
        assert [label for label in labels if label.endswith(view)] == [f"rank {number}, {view}" for number in range(8)]


def test_runs_over_nvlink_and_without_are_told_apart():
    one = eight_ranks()
    given = {**one.flags.given, "extra": ["--disable-custom-all-reduce"]}
    other = replace(one, flags=replace(one.flags, given=given), variables={"NCCL_P2P_DISABLE": "1"})
    assert plots.labels(one, other) == ["over NVLink", "without peer access"]
    flag = replace(one, flags=replace(one.flags, given=given))
    assert plots.labels(one, flag) == ["no other argument", "--disable-custom-all-reduce"]
    both = rank_plots.ranks(one, other)
    assert "Without peer access: 8 ranks." in both.alt and len(both.table.rows) == 18


def test_host_memory_is_no_ranks_own():
    one = cpu_record()
    stated = record.Rank(one.stated, None, None)
    plot = rank_plots.ranks(replace(one, ranks=[*one.ranks, stated]))
    assert "The host's memory, seen as a whole, peaks at 3.10 GiB." in plot.alt
    assert not any(name.endswith("seen") for name in plot.table.header)
    assert "rank 1, stated" in plot.svg() and "host, seen" in plot.svg() and "rank 0, seen" not in plot.svg()


def test_a_run_on_one_gpu_has_no_figure_of_ranks():
    with pytest.raises(ValueError, match="one GPU"):
        rank_plots.ranks(cuda_record())


def test_a_record_of_eight_ranks_fits_its_file(tmp_path):
    """The most that such a run keeps: memory of each rank at 50 Hz for ten minutes, a full log, two loads."""
    sizes = itertools.cycle(range(97))
    sampler = gpu.Sampler(lambda: [10 + 0.12345 * next(sizes) for _ in range(8)], "device", 50.0, [0.0] * 8)
    for _ in range(30_000):
        sampler.sample()
    made = eight_ranks(pipeline=True)
    ranks = [
        replace(rank, seen=None, timeline=line) for rank, line in zip(made.ranks, sampler.timelines(), strict=True)
    ]
    samples = [round(1234.5678 * number, 3) for number in range(64)]
    kept = {name: samples for name in ("ttft_samples_ms", "tpot_samples_ms", "longest_itl_samples_ms")}
    latency = replace(
        made.latency, **kept, itl_quantiles_ms=[*samples, *samples[:37]], output_samples_tokens=[256] * 64
    )
    loads = [record.Load(made.traffic, 100.123, 200.456, [21.2345] * 8, latency) for _ in range(2)]
    times = [round(0.517 * number, 3) for number in range(200)]
    log = vllm_log.memory_lines(log_of([f"PP{number}" for number in range(8)]))
    full = replace(
        made, ranks=ranks, loads=loads, traffic=None, latency=None, log=log,
        series=record.Series(times, times, times, times, times),
    )  # fmt: skip
    assert len(record.dumps(full)) < 0.9 * record.MAX_BYTES
    assert record.read(record.write(full, tmp_path)) == full
    assert sum("Actual usage is" in line for line in log) == 8, "each rank's own summary is kept"


# ---- how the GPUs are joined ----


def test_a_played_cards_ranks_are_joined_as_those_of_the_machine_that_plays_it():
    place = lab.Here("live", "cuda", replace(cuda_record().machine, total_gib=139.8, gpu_count=2, link="nvlink"))
    asked = of("two-cards", tensor_parallel_size=2)[0]

    def consumed(machine: record.Machine, **variables) -> float:
        at = replace(place, machine=machine)
        return lab.prediction(at, asked.model, asked.flags, asked.card, "0.33.0", variables).ledger.consumed_gib

    joined = consumed(place.machine)
    apart = consumed(replace(place.machine, link="pcie"))
    assert joined > apart + 1
    assert consumed(place.machine, NCCL_P2P_DISABLE="1") == apart


def test_two_ranks_of_the_cpu_backend_hold_half_of_the_weights_and_twice_the_tokens():
    place = lab.Here("live", "cpu", cpu_record().machine)
    flags = ServeFlags(kv_cache_memory_bytes=1 << 30)
    one, two = (lab.prediction(place, "tiny-llama", flags.with_(tensor_parallel_size=ranks)) for ranks in (1, 2))
    assert two.kv_tokens == 2 * one.kv_tokens
    assert two.ledger.weights_gib < 0.6 * one.ledger.weights_gib


# ---- the ballast of several GPUs ----


GPUS = [
    gpu.Device(number, f"GPU-{number}", "NVIDIA H200", 140.4, 0.6, (9, 0), "580", "13.0", False) for number in range(3)
]


@pytest.fixture
def ballasts(monkeypatch):
    """The ballasts that were started, as (GPU, GiB to leave free, child): small programs, and GPU 2 is full."""
    made = []

    class Small(lab.Child):
        def __init__(self, arguments, log, env, on_line):
            number = env["CUDA_VISIBLE_DEVICES"]
            code = "import time; print('{}', flush=True); time.sleep(60)"
            if number == "2":
                code = "import sys; sys.exit('memlab ballast: only 3.00 GiB are free')"
            made.append((number, arguments[-1], self))
            super().__init__([sys.executable, "-c", code], log, env, on_line)

    monkeypatch.setattr(lab, "Child", Small)
    monkeypatch.setattr(lab.server.gpu, "devices", lambda: GPUS)
    return made


def test_each_gpu_has_a_ballast_of_its_own_that_goes_with_the_run(ballasts, tmp_path):
    with lab.ballast(GPUS[:2], 23.58, tmp_path):
        assert [(number, free) for number, free, _ in ballasts] == [("0", "23.58"), ("1", "23.58")]
        assert all(child.poll() is None for *_, child in ballasts)
    assert all(child.poll() is not None for *_, child in ballasts)


def test_one_gpu_whose_memory_cannot_be_held_stops_the_others_ballast(ballasts, tmp_path):
    with (
        pytest.raises(ServerError, match="GPU 2 could not be held.*3.00 GiB are free"),
        lab.ballast(GPUS, 23, tmp_path),
    ):
        pass
    assert len(ballasts) == 3 and all(child.poll() is not None for *_, child in ballasts)


# ---- a sweep on several GPUs against one ----


def test_the_bench_compares_the_same_runs_alone_and_beside_others(monkeypatch, capsys):
    bench, asked = script("bench"), []
    place = lab.Here("live", "cuda", replace(cuda_record().machine, total_gib=139.8))
    idle = [SimpleNamespace(why_not=None)] * 2

    def swept(settings, mode, say, most_gpus):
        asked.append((len(settings), most_gpus))
        known = cuda_record()
        beside = 0.98 if most_gpus == 2 else 1.0
        faster = replace(known.latency, total_tokens_per_s=1000.0 * beside)
        return [replace(known, flags=record.Flags(each.flags.set(), {}), latency=faster) for each in settings]

    monkeypatch.setattr(lab, "here", lambda mode: place)
    clock = iter([0, 60, 100, 300, 400, 500])
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr("memlab.checks.find_gpus", lambda kernels: idle)
    monkeypatch.setattr("memlab.checks.kernels", lambda: None)
    monkeypatch.setattr(sweep, "sweep", swept)
    bench.bench_sweep()
    said = capsys.readouterr().out
    assert asked == [(1, 1), (4, 1), (4, 2)], "the first start, which compiles, is no part of it"
    assert "4 runs, one after the other         200 s" in said and "100 s, 2.00 times as fast" in said
    assert "worst +0 MiB" in said and "median 0.980" in said


def test_the_bench_has_nothing_to_compare_on_one_place(monkeypatch, capsys):
    monkeypatch.setattr(lab, "here", lambda mode: lab.Here("live", "cpu", cpu_record().machine))
    script("bench").bench_sweep()
    assert "nothing to compare" in capsys.readouterr().out


# ---- a pipeline's plan in words ----


def test_a_plan_of_a_pipeline_shows_each_stage_and_the_one_that_decides():
    asked = of("flagship", pipeline_parallel_size=8, max_num_batched_tokens=2048, enforce_eager=False)[0]
    plan = planner.plan(LAB_MODELS[asked.model], cards.find(asked.card), asked.flags, changes=False)
    rows = [line.split() for line in plan_report.stages(plan).splitlines()]
    assert [row[0] for row in rows] == ["stage", *map(str, range(1, 9))]
    blocks = [int(row[-1].replace(",", "")) for row in rows[1:]]
    assert min(blocks) == blocks[plan.prediction.tightest] == plan.prediction.kv_blocks
    assert blocks[0] < blocks[1] == blocks[6] > blocks[7], "the ends of the model lie on the first stage and the last"
    assert plan_report.stages(plan) in plan_report.text(plan)
    data = plan.to_dict()["stages"]
    assert [stage["layers"] for stage in data] == [[first, first + 10] for first in range(0, 80, 10)]
    assert [stage["kv_blocks"] for stage in data] == blocks


def test_a_plan_without_a_pipeline_shows_no_stages():
    asked = GRIDS["flagship"][0]
    plan = planner.plan(LAB_MODELS[asked.model], cards.find(asked.card), asked.flags, changes=False)
    assert "layers" not in plan_report.text(plan) and len(plan.to_dict()["stages"]) == 1


# ---- the record of a run on two GPUs ----


@pytest.fixture
def over(monkeypatch):
    """A run of the 8B shape that is over, on some of three GPUs: its log and samples are made, nothing is started."""
    monkeypatch.setattr(gpu, "devices", lambda: GPUS)
    monkeypatch.setattr(gpu, "link", lambda uuids: "nvlink" if len(uuids) > 1 else "none")
    monkeypatch.setattr(lab, "vllm_version", lambda: "0.33.0")

    def made(folder: Path, devices: list[gpu.Device], events: list[vllm_log.Event], *used: list[float]) -> lab._LiveRun:
        flags = ServeFlags(gpu_memory_utilization=0.25, max_model_len=32768, enforce_eager=True)
        flags = flags.with_(tensor_parallel_size=len(devices))
        place = lab.Here("live", "cuda", lab.this_machine("cuda", devices))
        asked = ("llama-3.1-8b", flags, None, None, "two-cards", (), {"NCCL_NVLS_ENABLE": "0"}, None, 0)
        run = lab._LiveRun(place, asked, folder, devices, None, None, None)
        run.server.foreign, run.server.events, run.outcome = [None] * len(devices), events, "ok"
        readings = iter(used)
        run.sampler = gpu.Sampler(lambda: next(readings), "device", 50.0)
        for _ in used[1:]:
            run.sampler.sample()
        return run

    return made


def test_each_gpus_memory_stands_beside_what_its_own_rank_stated(over, tmp_path):
    """The last GPU's rank speaks first in the log, and takes more than the other."""
    events = log_of(["TP1", "TP0"], "eager", heavier="TP1")
    run = over(tmp_path, GPUS[:2], events, [0.5, 0.75], [33.5, 36.75], [30.5, 31.75])
    made = run._record(run.sampler)
    record.validate(made)
    zero, one = made.ranks
    assert (zero.stated.weights_gib, one.stated.weights_gib) == (15.0, 15.25)
    assert (zero.seen.peak_gib, one.seen.peak_gib) == (33.0, 36.0)
    assert (zero.seen.baseline_gib, one.seen.baseline_gib) == (0.5, 0.75)
    assert made.machine.hardware == "2 × NVIDIA H200" and made.machine.link == "nvlink"
    assert made.variables == {"NCCL_NVLS_ENABLE": "0"}
    assert lab.linked(made.machine, made.variables)
    assert "Peak, seen: 33.00 GiB on rank 0 to 36.00 GiB on rank 1." in rank_plots.ranks(made).alt


def test_two_servers_of_one_setting_that_end_at_once_are_two_records(over, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_RUNS", str(tmp_path))
    monkeypatch.setattr(lab._LiveRun, "_watched", lambda run, timeout_s: None)
    write = record.write
    monkeypatch.setattr(record, "write", lambda made, folder: (time.sleep(0.2), write(made, folder)))
    runs = []
    for number in range(2):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        events = log_of(["TP0"], "eager")
        runs.append(over(folder, [GPUS[number]], events, [0.5], [35.5], [34.5]))
    threads = [threading.Thread(target=run.run, args=(1,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.record.repeat for run in runs) == [1, 2]
    assert len({path.name for path in tmp_path.rglob("*-r[0-9].json")}) == 2


def test_a_model_that_a_server_reads_is_whole_while_the_next_run_writes_it_again(tmp_path):
    shape, done, broken = LAB_MODELS["tiny-llama"], threading.Event(), []
    served = models.write("tiny-llama", shape, tmp_path)

    def read() -> None:
        while not done.is_set():
            try:
                json.loads((served / "tokenizer.json").read_text())
            except ValueError as error:
                broken.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        models.write("tiny-llama", shape, tmp_path)
    done.set()
    reader.join()
    assert broken == []
    assert not list(served.glob(".*")), "no draft is left"


def test_vllm_itself_reads_every_command_line_of_the_grids():
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for setting in EVERY:
        words = ["--model", setting.model, "--load-format", "dummy", *setting.flags.to_args()]
        read = EngineArgs.from_cli_args(parser.parse_args(words))
        assert (read.tensor_parallel_size, read.pipeline_parallel_size) == layout(setting)
        assert read.disable_custom_all_reduce == ("NCCL_P2P_DISABLE" in setting.variables)
        fused = read.compilation_config.pass_config.fuse_allreduce_rms
        assert fused is False if layout(setting)[0] > 1 else fused is None
        for name, value in setting.flags.set().items():
            assert getattr(read, name) == value, name
