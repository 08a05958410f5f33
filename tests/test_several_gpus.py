"""Runs on several GPUs: the grids that record them, each rank's ledger, and what a sweep gains from more GPUs."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path

import pytest

from memlab import cards, planner, sweep
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
    for lab in ("01", "01-ledger", "nothing", None):
        assert RECORD.named_grid(lab) is None


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
    for setting in EVERY:
        off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
        wanted = off if setting.flags.world_size > 1 else {}
        assert setting.variables.items() >= wanted.items(), str(setting)


def test_cards_without_nvlink_are_played_by_both_switches_together_and_beside_a_run_with_it():
    for grid in GRIDS.values():
        apart = [setting for setting in grid if "NCCL_P2P_DISABLE" in setting.variables]
        assert apart == [setting for setting in grid if "--disable-custom-all-reduce" in setting.flags.extra]
        joined = [setting.flags for setting in grid if setting not in apart]
        assert apart and all(setting.flags.with_(extra=()) in joined for setting in apart)


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
