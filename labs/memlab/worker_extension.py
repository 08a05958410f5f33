"""What PyTorch's allocator holds, read inside vLLM's worker (``--worker-extension-cls``), for runs that say so.

The methods are called through ``/collective_rpc``, which a server opens with ``VLLM_SERVER_DEV_MODE=1`` only. They read
and reset statistics, and record a history; a run with them is marked as instrumented, since each call halts the worker
for a moment, and a history costs time at every allocation.
"""

GIB = 2**30
HISTORY_EVENTS = 100_000  # the latest are kept: about 20 steps of a model of 32 layers


class MemoryReader:
    """Mixed into vLLM's worker. Sizes in GiB, from ``torch.cuda.memory_stats``."""

    def memlab_allocator(self) -> dict[str, float]:
        """Allocated and reserved now and at most since ``memlab_reset_peaks``, and what lies in split blocks unused."""
        import torch

        stats = torch.cuda.memory_stats()

        def gib(name: str) -> float:
            return round(stats.get(name, 0) / GIB, 4)

        return {
            "allocated_gib": gib("allocated_bytes.all.current"),
            "reserved_gib": gib("reserved_bytes.all.current"),
            "peak_allocated_gib": gib("allocated_bytes.all.peak"),
            "peak_reserved_gib": gib("reserved_bytes.all.peak"),
            "inactive_split_gib": gib("inactive_split_bytes.all.current"),
        }

    def memlab_reset_peaks(self) -> None:
        """Let the peaks start anew from what is held now."""
        import torch

        torch.cuda.reset_peak_memory_stats()

    def memlab_begin_history(self) -> None:
        """Record every allocation from here on, with the Python lines that asked for it."""
        import torch

        torch.cuda.memory._record_memory_history(max_entries=HISTORY_EVENTS, stacks="python")

    def memlab_end_history(self, path: str) -> dict[str, object]:
        """Write the snapshot for PyTorch's viewer and stop recording.

        Args:
            path: a pickle beside the run's log; the rank is put before its suffix.

        Returns:
            ``allocated_bytes`` now, and ``events``: pairs of (microseconds since 1970, bytes; negative when freed).
        """
        import torch

        device = torch.cuda.current_device()
        stem, _, suffix = path.rpartition(".")
        torch.cuda.memory._dump_snapshot(f"{stem}-{device}.{suffix}")
        history = torch.cuda.memory._snapshot(device)["device_traces"][device]
        torch.cuda.memory._record_memory_history(enabled=None)
        signs = {"alloc": 1, "free_completed": -1}
        events = [(e["time_us"], signs[e["action"]] * e["size"]) for e in history if e["action"] in signs]
        return {"allocated_bytes": torch.cuda.memory_allocated(), "events": events}
