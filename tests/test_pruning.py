"""What a sweep leaves out: only what surely cannot start, named with the GiB that it lacks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures_record import cpu_record, cuda_record
from memlab import lab, pruning, record
from memlab.flags import ServeFlags
from memlab.sweep import Setting
from memlab.units import GIB, MIB

H200 = lab.Here("replay", "cuda", replace(cuda_record().machine, name="h200", gpu="NVIDIA H200", total_gib=139.8))
HOST = lab.Here("live", "cpu", replace(cpu_record().machine, total_gib=16.0))
QUARTER = ServeFlags(gpu_memory_utilization=0.25, max_model_len=32768, max_num_seqs=64, enforce_eager=True)
TINY = ServeFlags(kv_cache_memory_bytes=256 * MIB, max_model_len=8192)


def judge(place=H200, model="llama-3.1-8b", base=QUARTER, free_gib=None, **changes):
    return pruning.cannot_start(Setting(model, base.with_(**changes)), place, "0.33.0", free_gib)


SERVED = [
    found
    for found in record.read_all()
    if found.outcome in ("ok", "stopped") and found.machine.name == "h200" and not found.neighbour
]


@pytest.mark.parametrize("found", SERVED, ids=lambda found: found.id)
def test_nothing_that_was_ever_served_would_have_been_pruned(found):
    setting = Setting(found.model.name, found.served_flags, card=found.card)
    place = lab.Here("replay", "cuda", found.machine)
    assert pruning.cannot_start(setting, place, found.engine.vllm) is None


def test_a_step_that_takes_more_than_the_budget_is_named_with_what_it_lacks():
    assert judge(max_num_batched_tokens=32768) is None
    pruned = judge(max_num_batched_tokens=1 << 20)
    assert "1,048,576 tokens" in str(pruned)
    assert 60 < pruned.missing_gib < 120, "108 KiB a token: 105 GiB of a budget of 35"


def test_a_pool_below_one_request_of_full_length_is_pruned():
    pruned = judge(gpu_memory_utilization=0.12, max_model_len=131072)
    assert "one request of 131,072 tokens takes 16.00 GiB" in pruned.reason
    assert pruned.missing_gib > 10
    assert judge(gpu_memory_utilization=0.12, max_model_len=-1) is None, "vLLM fits the length to the pool"


@given(st.floats(0.05, 0.95), st.integers(9, 20))
def test_more_tokens_in_a_step_never_make_a_setting_startable(utilization, power):
    first = judge(gpu_memory_utilization=utilization, max_num_batched_tokens=1 << power)
    more = judge(gpu_memory_utilization=utilization, max_num_batched_tokens=2 << power)
    if first is not None:
        assert more is not None
        assert more.missing_gib >= first.missing_gib or "one request" in first.reason


def test_a_budget_that_another_process_left_no_room_for_is_pruned():
    assert judge(gpu_memory_utilization=0.9) is None
    pruned = judge(gpu_memory_utilization=0.9, free_gib=60.0)
    assert pruned.missing_gib == pytest.approx(0.9 * 139.8 - (60 - 0.35))


def test_what_vllm_refuses_by_its_flags_lacks_no_memory():
    pruned = judge(max_num_batched_tokens=32)
    assert "must be at least max_num_seqs (64)" in pruned.reason
    assert pruned.missing_gib is None
    assert "through FlashInfer alone" in judge_on_a_3090(kv_cache_dtype="fp8").reason


def judge_on_a_3090(**changes):
    return pruning.cannot_start(Setting("llama-3.1-8b", QUARTER.with_(**changes), card="3090"), H200, "0.33.0")


def test_on_the_cpu_backend_the_pool_must_hold_a_request_and_the_host_the_pool():
    assert judge(HOST, "tiny-llama", TINY) is None
    assert judge(HOST, "tiny-llama", TINY, kv_cache_memory_bytes=8 * MIB).missing_gib == pytest.approx(8 / 1024)
    pruned = judge(HOST, "tiny-llama", TINY, free_gib=4.0, kv_cache_memory_bytes=8 * GIB)
    assert 4 < pruned.missing_gib < 4.1


def test_a_model_of_unknown_shape_is_run():
    assert judge(model="somebody/model", max_num_batched_tokens=1 << 20) is None


def test_a_plan_keeps_the_order_and_names_all_that_it_leaves_out():
    base = Setting("llama-3.1-8b", QUARTER, repeats=3, seconds=60)
    tries = pruning.vary("max_num_batched_tokens", (8192, 1 << 20, 512, 32), base)
    plan = pruning.plan(tries, H200)
    assert [setting.flags.max_num_batched_tokens for setting in plan.settings] == [8192, 512]
    assert [pruned.setting for pruned in plan.pruned] == [tries[1], tries[3]]
    assert plan.seconds == 360


def test_a_plan_says_once_what_its_settings_share_and_then_what_each_has_of_its_own():
    base = Setting("llama-3.1-8b", QUARTER, seconds=60)
    plan = pruning.plan(pruning.vary("max_num_batched_tokens", (8192, 32, 512), base), H200)
    shared = "llama-3.1-8b gpu_memory_utilization=0.25 max_model_len=32768 max_num_seqs=64 enforce_eager=True"
    head, every, *runs, pruned = str(plan).splitlines()
    assert head == "2 recorded runs; live about 2 min 00 s, one after the other"
    assert every.split(maxsplit=1) == ["all", shared]
    assert [line.split() for line in runs] == [["run", f"max_num_batched_tokens={tokens}"] for tokens in (8192, 512)]
    assert pruned.startswith("  pruned  max_num_batched_tokens=32: max_num_batched_tokens (32) must be at least")
    assert str(replace(plan, replayed=False)).startswith("2 runs, about 2 min")


def test_settings_of_two_models_share_no_model_in_a_plan():
    plan = pruning.plan([Setting("llama-3.1-8b", QUARTER), Setting("qwen3-8b", QUARTER)], H200)
    assert "  run     llama-3.1-8b\n" in str(plan) and "\n  all     gpu_memory" in str(plan)
    (alone,) = str(pruning.plan([Setting("llama-3.1-8b", QUARTER)], H200)).splitlines()[1:]
    assert alone.startswith("  run     llama-3.1-8b gpu_memory_utilization=0.25")
