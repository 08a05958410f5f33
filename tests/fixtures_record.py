"""Synthetic run records for tests: made up, so that no test rests on a machine. None of them is a measurement."""

from dataclasses import replace

from memlab import record, shapes
from memlab.flags import ServeFlags
from memlab.ledger import MemoryLedger

CARD = "Synthetic GPU 40 GB"
HOSTILE = "<script>alert('x')</script>&\"synthetic\""

_PHASES = {
    "starting": 0.0,
    "loading_weights": 6.0,
    "profiling": 14.0,
    "sizing_kv_cache": 17.0,
    "capturing_graphs": 18.0,
    "ready": 24.0,
    "traffic": 26.0,
    "stopped": 40.0,
}


def _timeline(peak_gib: float, measure: str = "device") -> record.Timeline:
    points = [
        (0.0, 0.0),
        (5.0, 0.5),
        (6.0, 0.5),
        (13.5, 15.6),
        (15.0, 17.2),
        (16.9, 15.9),
        (17.5, peak_gib - 1.0),
        (24.0, peak_gib - 0.6),
        (30.0, peak_gib),
        (40.0, peak_gib - 0.1),
        (41.0, 0.0),
    ]
    return record.Timeline(measure, 50.0, [time for time, _ in points], [max(0.0, gib) for _, gib in points])


def _seen(peak_gib: float, budget_gib: float | None, context_gib: float | None, card_gib: float) -> MemoryLedger:
    unprofiled = None if budget_gib is None else peak_gib - budget_gib - context_gib
    return MemoryLedger(
        "seen",
        device_total_gib=card_gib,
        budget_gib=budget_gib,
        context_gib=context_gib,
        unprofiled_gib=unprofiled,
        baseline_gib=0.5,
        peak_gib=peak_gib,
        headroom_gib=card_gib - peak_gib - 0.5,
    )


def cuda_record(
    id: str = "synthetic-eager", graphs: bool = False, peak_gib: float = 32.7, **changes
) -> record.RunRecord:
    """A served run as vLLM 0.27 and later state it: ``consumed`` in one number."""
    estimated = 0.90 if graphs else None
    kv_gib = 15.30 if graphs else 16.20
    stated = MemoryLedger(
        "stated",
        total_gib=39.50,
        budget_gib=32.0,
        weights_gib=15.00,
        consumed_gib=15.20,
        activation_gib=0.60,
        cuda_graphs_estimated_gib=estimated,
        cuda_graphs_actual_gib=0.45 if graphs else None,
        kv_cache_gib=kv_gib,
        graphs_subtracted=True if graphs else None,
    )
    given = {"max_model_len": 16384, "max_num_batched_tokens": 2048, "enforce_eager": not graphs}
    made = record.RunRecord(
        id=id,
        lab="01-ledger",
        recorded_at="2000-01-01T00:00:00Z",
        machine=record.Machine("synthetic", CARD, 1, 39.50, 40.0, [9, 0], "none", "1.0", "13.0"),
        engine=record.Engine("cuda", "0.33.0", "2.14.0", "3.11.7", "V2", "FLASH_ATTN"),
        model=record.Model("llama-3.1-8b", "dummy", shapes.LAB_MODELS["llama-3.1-8b"].to_config()),
        flags=record.Flags(given, {**given, "max_num_seqs": 256, "gpu_memory_utilization": 0.81}),
        outcome="ok",
        ranks=[record.Rank(stated, _seen(peak_gib, 32.0, 0.40, 40.0), _timeline(peak_gib))],
        traffic=record.Traffic(8000, 64, 8),
        phases=[record.Phase(name, start) for name, start in _PHASES.items() if graphs or name != "capturing_graphs"],
        kv=record.KVCache(round(kv_gib * 8192), round(kv_gib * 512), 16, 7.5),
        latency=record.Latency(
            {"mean": 410.0, "p50": 402.5, "p90": 610.0, "p99": 655.0},
            {"mean": 9.1, "p50": 8.7, "p90": 11.0, "p99": 21.0},
            {"mean": 990.0, "p50": 980.0, "p90": 1200.0, "p99": 1300.0},
            completed=8,
            failed=0,
            duration_s=1.8,
            output_tokens_per_s=284.0,
            total_tokens_per_s=35800.0,
            input_tokens=64000,
            output_tokens=512,
        ),
        memory_back=record.MemoryBack(0.5, 0.5, 1.2),
        log=["synthetic line of a log"],
    )
    return replace(made, **changes)


def old_record(id: str = "synthetic-0.26") -> record.RunRecord:
    """The same as 0.26 states it: ``weights`` and ``non_torch`` apart, the graphs taken on top of the budget."""
    base = cuda_record(id)
    stated = MemoryLedger(
        "stated",
        total_gib=39.50,
        budget_gib=32.0,
        weights_gib=15.00,
        non_torch_gib=0.20,
        activation_gib=0.90,
        cuda_graphs_actual_gib=0.80,
        kv_cache_gib=15.90,
        graphs_subtracted=False,
    )
    return replace(
        base,
        engine=replace(base.engine, vllm="0.26.0"),
        ranks=[replace(base.ranks[0], stated=stated)],
    )


def cpu_record(id: str = "synthetic-cpu") -> record.RunRecord:
    """vLLM's CPU backend: host memory, the pool given in bytes, and no card, budget or context."""
    base = cuda_record(id)
    stated = MemoryLedger("stated", kv_cache_gib=1.0, pool_given=True)
    seen = MemoryLedger("seen", device_total_gib=16.0, baseline_gib=2.0, peak_gib=3.1, headroom_gib=10.9)
    given = {"max_model_len": 8192, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    line = replace(_timeline(3.1, "host"), used_gib=[0, 0.2, 0.2, 0.9, 1.0, 0.9, 2.1, 2.5, 3.1, 3.0, 0.0])
    return replace(
        base,
        machine=record.Machine("synthetic-cpu", None, 0, 16.0, cpu_cores=4),
        engine=replace(base.engine, backend="cpu", vllm="0.32.0", runner="V1"),
        model=record.Model("tiny-llama", "dummy", shapes.LAB_MODELS["tiny-llama"].to_config()),
        flags=record.Flags(given, {**given, "max_num_seqs": 128, "max_num_batched_tokens": 2048}),
        ranks=[record.Rank(stated, seen, line)],
        kv=record.KVCache(524288, 4096, 128, 64.0),
    )


def failed_record(id: str = "synthetic-oom") -> record.RunRecord:
    """A run that died before it stated anything, with text that HTML has to escape wherever a page shows it."""
    base = cuda_record(id)
    shape = {**base.model.shape, "architectures": [HOSTILE]}
    seen = replace(base.seen, budget_gib=None, context_gib=None, unprofiled_gib=None)
    return replace(
        base,
        model=replace(base.model, name=f"model {HOSTILE}", shape=shape),
        outcome="out_of_memory",
        ranks=[record.Rank(MemoryLedger("stated"), seen, base.ranks[0].timeline)],
        kv=None,
        latency=None,
        memory_back=None,
        error=f"CUDA out of memory {HOSTILE}",
        log=[HOSTILE],
    )


def two_rank_record(id: str = "synthetic-tp2") -> record.RunRecord:
    base = cuda_record(id)
    flags = ServeFlags(**base.flags.given, tensor_parallel_size=2).set()
    return replace(
        base,
        machine=replace(base.machine, gpu_count=2),
        flags=record.Flags(flags, {**base.flags.resolved, **flags}),
        ranks=[base.ranks[0], replace(base.ranks[0], seen=_seen(32.4, 32.0, 0.40, 40.0), timeline=_timeline(32.4))],
    )


ALL = (cuda_record, old_record, cpu_record, failed_record, two_rank_record)


def all_records() -> list[record.RunRecord]:
    """One of each kind, and the run with CUDA graphs."""
    return [make() for make in ALL] + [cuda_record("synthetic-graphs", graphs=True, peak_gib=32.2)]
