"""Prediction against records, the ballast, and sweeps that go on where they stopped."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fixtures_record import cuda_record
from memlab import ballast, cards, lab, ledger, record, sweep
from memlab.errors import FlagError, MemlabError
from memlab.flags import ServeFlags
from memlab.units import GIB, MIB

RECORDED = [found for found in record.read_all() if found.prediction and found.stated and found.stated.budget_gib]


@pytest.mark.parametrize("found", RECORDED, ids=lambda found: found.id)
def test_the_planner_meets_what_vllm_stated_on_every_recorded_start(found):
    """The planner of today: a record keeps the prediction of the planner that it was made with.

    What the collectives of tensor parallelism keep has a wide band, and so has vLLM's estimate of CUDA graphs: there
    every rank has to be inside it.
    """
    place = lab.Here("live", found.engine.backend, found.machine)
    asked = (place, found.model.name, found.served_flags, found.card, found.engine.vllm)
    today = lab.prediction(*asked, variables=found.variables)
    ranks = found.served_flags.tensor_parallel_size or 1
    for number, stage in enumerate(today.stages):
        for rank in found.ranks[number * ranks : (number + 1) * ranks]:
            pool, apart = rank.stated.kv_cache_gib, stage.ledger.kv_cache_gib - rank.stated.kv_cache_gib
            low, high = stage.bands.get("kv_cache", (pool, pool))
            wide = ranks > 1 or stage.ledger.cuda_graphs_estimated_gib
            assert abs(apart) <= 0.1 or (wide and low <= pool <= high)
            assert stage.ledger.weights_gib == pytest.approx(rank.stated.weights_gib, rel=0.01)
            if rank.stated.activation_gib is not None:
                low, high = stage.bands["activation"]
                assert low <= rank.stated.activation_gib <= high


def predicted(**flags) -> ledger.Prediction:
    asked = ServeFlags(gpu_memory_utilization=0.25, max_model_len=32768, enforce_eager=True).with_(**flags)
    resolved = record.flags.resolve(asked, 8192, 1024, 131072)
    return ledger.predict(record.shapes.LAB_MODELS["llama-3.1-8b"], 139.8, resolved)


def test_a_prediction_fills_its_own_budget():
    for flags in ({}, {"enforce_eager": False}, {"max_num_seqs": 64}, {"kv_cache_dtype": "fp8"}):
        (identity,) = predicted(**flags).ledger.identities()
        assert identity.holds


def test_each_flag_moves_the_term_it_should():
    base = predicted().ledger
    assert predicted(max_num_seqs=64).ledger.consumed_gib < base.consumed_gib
    few = predicted(max_num_seqs=64).ledger
    assert few.activation_gib < base.activation_gib, "1024 sequences: the sampler takes more than the forward pass"
    assert predicted(max_num_seqs=64, max_num_batched_tokens=32768).ledger.activation_gib > 3 * few.activation_gib
    assert predicted(enforce_eager=False).ledger.kv_cache_gib < base.kv_cache_gib
    assert predicted(kv_cache_dtype="fp8").kv_tokens == pytest.approx(2 * predicted().kv_tokens, rel=0.001)
    assert predicted(max_model_len=16384).ledger.weights_gib == base.weights_gib


# ---- a smaller card ----


class FakeDriver:
    def __init__(self, free_bytes: int):
        self.free = free_bytes

    def free_bytes(self) -> int:
        return self.free

    def take(self, size_bytes: int) -> None:
        assert size_bytes % ballast.GRAIN == 0
        self.free -= size_bytes


def test_the_ballast_leaves_what_the_smaller_card_would_have_free():
    driver = FakeDriver(139 * GIB + 3 * MIB)
    held = ballast.hold(driver, round(23.58 * GIB))
    assert 0 <= driver.free - 23.58 * GIB < ballast.GRAIN
    assert held + driver.free == 139 * GIB + 3 * MIB


def test_a_gpu_with_less_free_than_the_smaller_card_is_refused():
    with pytest.raises(ballast.CudaError, match="only 10.00 GiB"):
        ballast.hold(FakeDriver(10 * GIB), 20 * GIB)


def test_an_emulated_card_refuses_what_the_real_one_cannot_do():
    place = lab.Here("live", "cuda", cuda_record().machine)
    with pytest.raises(FlagError, match="through FlashInfer alone"):
        lab._check_emulation(place, cards.find("3090"), ServeFlags(kv_cache_dtype="fp8"))
    with pytest.raises(MemlabError, match="too small"):
        lab._check_emulation(place, cards.find("5090").__class__("Big", 200.0, (9, 0)), ServeFlags())


# ---- sweeps ----


@pytest.fixture
def runs(monkeypatch):
    """A machine whose runs are made up: what is run is noted, and becomes a record."""
    made: list[record.RunRecord] = []

    def run(model, flags, traffic, card, mode, *, lab, instruments, variables, neighbour, gpus, on_phase, warm):
        if flags.max_num_seqs == 13:
            raise MemlabError("no luck")
        found = cuda_record(f"synthetic-{len(made)}", lab=lab, flags=record.Flags(flags.set(), {}), traffic=traffic)
        made.append(found)
        return found

    monkeypatch.setattr(sweep.lab, "here", lambda mode: lab.Here("live", "cpu", cuda_record().machine))
    monkeypatch.setattr(sweep.lab, "vllm_version", lambda: "0.33.0")
    monkeypatch.setattr(sweep.lab, "run", run)
    monkeypatch.setattr(sweep, "known_runs", lambda kept: list(made))
    return made


def settings(*seqs: int, **more) -> list[sweep.Setting]:
    return [sweep.Setting("llama-3.1-8b", ServeFlags(max_num_seqs=number), **more) for number in seqs]


def test_a_sweep_runs_each_setting_once_and_resumes(runs):
    assert len(sweep.sweep(settings(32, 64), say=lambda line: None)) == 2
    assert len(sweep.sweep(settings(32, 64, 128), say=lambda line: None)) == 3
    assert [found.flags.given["max_num_seqs"] for found in runs] == [32, 64, 128]


def test_a_reader_s_sweep_does_not_take_the_book_s_records_for_runs_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_RUNS", str(tmp_path))
    assert sweep.known_runs() == []
    assert len(sweep.known_runs(kept=True)) == len(record.read_all())


def test_a_replayed_sweep_shows_as_many_starts_as_are_wanted_and_recorded():
    found = next(one for one in record.read_all() if one.repeat == 2 and not one.card)
    place = lab.Here("replay", found.engine.backend, found.machine)
    asked = (found.model.name, found.served_flags, found.sent)

    def starts(wanted: int) -> list[int]:
        return [one.repeat for one in sweep.replayed(sweep.Setting(*asked, lab=found.lab, repeats=wanted), place)]

    assert starts(1) == [1] and starts(2) == [1, 2]
    assert len(starts(99)) < 99


def test_what_would_end_too_late_is_not_begun(runs):
    said = []
    sweep.sweep(settings(32, 64, seconds=100), budget_s=50, say=said.append)
    assert runs == []
    assert all(line.startswith("skipped for time") for line in said[1:]) and len(said) == 3


def test_a_sweep_says_at_the_beginning_what_is_there_and_how_long_the_rest_takes(runs):
    said = []
    sweep.sweep(settings(32, seconds=120), say=said.append)
    sweep.sweep(settings(32, 64, 128, seconds=120), say=said.append)
    assert said[0] == "0 runs are there already, 1 to go on the CPU backend: about 2 min 00 s"
    assert said[3] == "1 runs are there already, 2 to go on the CPU backend: about 4 min 00 s"
    assert said[4] == "begins: llama-3.1-8b max_num_seqs=64"


def test_a_setting_that_fails_does_not_end_the_others(runs):
    with pytest.raises(MemlabError, match="no luck"):
        sweep.sweep(settings(13, 64), say=lambda line: None)
    assert [found.flags.given["max_num_seqs"] for found in runs] == [64]


@pytest.fixture
def two_gpus(runs, monkeypatch):
    """A machine of two idle GPUs: the GPUs that each run has, and what ran beside it, by max_num_seqs."""
    had, going, beside = {}, set(), {}
    gate = threading.Barrier(2, timeout=5)
    one = sweep.lab.run

    def run(model, flags, traffic, card, mode, *, gpus, **more):
        number = flags.max_num_seqs
        had[number] = gpus
        going.add(number)
        if flags.tensor_parallel_size != 2:
            gate.wait()
        beside[number] = set(going)
        found = one(model, flags, traffic, card, mode, gpus=gpus, **more)
        if flags.tensor_parallel_size != 2:
            gate.wait()
        going.discard(number)
        return found

    monkeypatch.setattr(sweep.lab, "run", run)
    monkeypatch.setattr(sweep.lab, "here", lambda mode: lab.Here("live", "cuda", cuda_record().machine))
    monkeypatch.setattr(sweep.lab, "warm_up", lambda: None)
    idle = [SimpleNamespace(device=SimpleNamespace(uuid=f"GPU-{number}"), why_not=None) for number in range(2)]
    busy = SimpleNamespace(device=SimpleNamespace(uuid="GPU-2"), why_not="a display is on it")
    monkeypatch.setattr(sweep.checks, "find_gpus", lambda kernels: [*idle, busy])
    monkeypatch.setattr(sweep.checks, "kernels", lambda: None)
    return had, beside


def test_runs_of_one_gpu_go_side_by_side_and_one_of_two_has_both(two_gpus):
    had, beside = two_gpus
    pair = sweep.Setting("llama-3.1-8b", ServeFlags(max_num_seqs=64, tensor_parallel_size=2))
    said = []
    found = sweep.sweep([*settings(8, 16, seconds=60), replace(pair, seconds=60), *settings(24, 32)], say=said.append)
    assert len(found) == 5
    assert said[0] == "0 runs are there already, 5 to go on 2 idle GPUs: about 3 min 30 s"
    assert sorted(had[64]) == ["GPU-0", "GPU-1"] and beside[64] == {64}
    assert beside[8] == beside[16] == {8, 16} and {*had[8], *had[16]} == {"GPU-0", "GPU-1"}
    assert beside[24] == beside[32] == {24, 32}


def test_a_sweep_that_may_use_one_gpu_goes_one_by_one(two_gpus, monkeypatch):
    had, beside = two_gpus
    pairs = [sweep.Setting("llama-3.1-8b", ServeFlags(max_num_seqs=64, tensor_parallel_size=2))]
    with pytest.raises(MemlabError, match="it needs 2 GPUs, and 1 are idle here"):
        sweep.sweep(pairs, say=lambda line: None, most_gpus=1)
    monkeypatch.setattr(threading.Barrier, "wait", lambda gate: None)
    sweep.sweep(settings(8, 16, 24), say=lambda line: None, most_gpus=1)
    assert {*had[8], *had[16], *had[24]} == {"GPU-0"}
    assert (beside[8], beside[16], beside[24]) == ({8}, {16}, {24})


def test_a_run_of_more_gpus_than_are_idle_is_left_out_and_the_rest_goes_on(two_gpus):
    had, _ = two_gpus
    large = sweep.Setting("llama-3.1-8b", ServeFlags(max_num_seqs=64, pipeline_parallel_size=4))
    with pytest.raises(MemlabError, match="it needs 4 GPUs, and 2 are idle here"):
        sweep.sweep([large, *settings(8, 16)], say=lambda line: None)
    assert set(had) == {8, 16}


def test_a_grid_entry_with_a_strange_key_is_refused():
    with pytest.raises(MemlabError, match="no setting"):
        sweep.from_dict({"model": "m", "flags": {"max_num_sequences": 3}})
