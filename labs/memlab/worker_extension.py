"""What PyTorch's allocator holds, read inside vLLM's worker (``--worker-extension-cls``), for runs that say so.

The methods are called through ``/collective_rpc``, which a server opens with ``VLLM_SERVER_DEV_MODE=1`` only. They read
and reset statistics; a run with them is marked as instrumented, since each call halts the worker for a moment.
"""

GIB = 2**30


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
