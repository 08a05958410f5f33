"""The pool of KV-cache blocks: which layers share a block table, the bytes of a block, the blocks of a request.

Layers of one kind form groups of equal size; a block holds one layer of each place in a group, and a request takes
blocks of every group. Source: vllm/v1/core/kv_cache_planning.py (0.33: _get_kv_cache_groups_uniform_page_size,
get_kv_cache_configs) and vllm/v1/kv_cache_interface.py (0.33:552-967); 0.26 has the same in kv_cache_utils.py.
"""

import functools
from dataclasses import dataclass

from memlab.shapes import CHUNKED, FULL, SLIDING, ModelShape


@dataclass(frozen=True)
class Layout:
    """``groups`` has the kind of each group; ``bytes_per_block`` is what one block takes on one rank."""

    groups: tuple[str, ...]
    bytes_per_block: int
    block_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def blocks_per_request(self, length: int, in_flight_tokens: int) -> int:
        """Blocks that one request of ``length`` tokens is counted with; ``in_flight_tokens`` are those of the steps
        that may be under way at once, which a window has to keep besides itself."""
        blocks = 0
        for kind in self.groups:
            if kind == SLIDING:
                blocks += -(-min(self.sliding_window - 1 + in_flight_tokens, length) // self.block_size) + 1
            elif kind == CHUNKED:
                blocks += -(-min(self.attention_chunk_size + in_flight_tokens, length) // self.block_size)
            else:
                blocks += -(-length // self.block_size)
        return blocks

    def longest(self, blocks: int, longest: int, in_flight_tokens: int) -> int:
        """The longest request, at most ``longest`` tokens, that so many blocks hold; 0 where not one token fits."""
        low, high = 0, longest
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_per_request(middle, in_flight_tokens) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low


def group(kinds: tuple[str, ...]) -> list[list[int]]:
    """Layers by group: as many groups of each kind as it has layers for one of the rarest kind."""
    by_kind: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(number)
    sizes = [len(layers) for layers in by_kind.values()]
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    groups = []
    for layers in by_kind.values():
        count = -(-len(layers) // size)
        groups += [layers[start::count] for start in range(count)]
    return groups


@functools.lru_cache(maxsize=256)
def layout(
    shape: ModelShape,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    block_size: int = 16,
    stage: tuple[int, int] | None = None,
    hybrid: bool = True,
) -> Layout:
    """The layout of one rank of one stage.

    Args:
        shape: as it is served.
        kv_cache_dtype, tensor_parallel_size, block_size: vLLM's flags.
        stage: (first, end) layers; None for all.
        hybrid: False where the hybrid KV-cache manager is disabled: windows are then kept whole.
    """
    kinds = shape.kinds()
    if not hybrid and len(set(kinds)) > 1:
        kinds = (FULL,) * len(kinds)
    first, end = stage or (0, len(kinds))
    groups = group(kinds)
    page = block_size * shape.kv_bytes_per_layer(kv_cache_dtype, tensor_parallel_size)
    widest = max(sum(first <= layer < end for layer in layers) for layers in groups)
    names = tuple(kinds[layers[0]] for layers in groups)
    return Layout(names, page * widest, block_size, shape.sliding_window, shape.attention_chunk_size)
