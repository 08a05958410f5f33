"""GPUs by name: their memory as CUDA and as NVML report it, what they can do, and vLLM's defaults on them."""

from dataclasses import dataclass

from memlab.errors import MemlabError
from memlab.flags import ServeFlags


@dataclass(frozen=True)
class Card:
    """A GPU. ``total_gib`` is CUDA's figure, which vLLM multiplies; NVML's is larger by what the driver keeps.

    ``linked`` says whether servers of such cards join them by NVLink; None where that is not known.
    """

    name: str
    total_gib: float
    compute_capability: tuple[int, int]
    nvml_total_gib: float | None = None
    source: str = ""
    linked: bool | None = None

    def refuses(self, flags: ServeFlags) -> str | None:
        """Why this card cannot do what ``flags`` ask for, or None. An emulation must refuse it too."""
        if (flags.kv_cache_dtype or "auto").startswith("fp8") and self.compute_capability < (8, 9):
            capability = ".".join(map(str, self.compute_capability))
            why = "has no fp8"
            if self.compute_capability >= (8, 0):
                why = "reads an fp8 KV cache through FlashInfer alone, which the labs do not rely on"
            return f"{self.name} (compute capability {capability}) {why}: use kv_cache_dtype auto"
        return None


_LOGS = "PyTorch's message of a failed allocation, in public logs"
# total_gib as vLLM or PyTorch printed it on that card; the source says where.
CARDS = {
    card.name: card
    for card in (
        Card("NVIDIA B200", 178.35, (10, 0), None, "pytorch/ao pull request #4002", True),
        Card("NVIDIA H200", 139.80, (9, 0), 140.40, "this book's records", True),
        Card("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.97, (12, 0), None, _LOGS, False),
        Card("NVIDIA H100 80GB HBM3", 79.11, (9, 0), None, "vLLM pull request #48601", True),
        Card("NVIDIA A100-SXM4-80GB", 79.15, (8, 0), None, "vLLM issue #18446", True),
        Card("NVIDIA A100-SXM4-40GB", 39.49, (8, 0), None, _LOGS, True),
        Card("NVIDIA RTX A6000", 47.74, (8, 6), None, "vLLM issue #11230", False),
        Card("NVIDIA L40S", 44.42, (8, 9), None, "vLLM issue #15815", False),
        Card("NVIDIA GeForce RTX 5090", 31.37, (12, 0), None, "vLLM issue #14452", False),
        Card("NVIDIA GeForce RTX 5080", 15.48, (12, 0), None, "vLLM issue #14452", False),
        Card("NVIDIA GeForce RTX 4090", 23.65, (8, 9), None, "vLLM issue #24436", False),
        Card("NVIDIA GeForce RTX 3090", 23.58, (8, 6), None, "vLLM issue #10517", False),
        Card("NVIDIA A10G", 22.30, (8, 6), None, "vLLM issue #34643", False),
        Card("NVIDIA RTX A2000 12GB", 11.53, (8, 6), None, "vLLM issue #12030", False),
        Card("NVIDIA GeForce RTX 4060 Laptop GPU", 8.00, (8, 9), None, "vLLM issue #13882", False),
        Card("Tesla T4", 14.58, (7, 5), None, "vLLM issue #7590", False),
    )
}


def find(name: str) -> Card:
    """The card of this name, or the one whose name alone contains it (``3090``).

    Raises:
        MemlabError: where none or several match.
    """
    if name in CARDS:
        return CARDS[name]
    matches = [card for card in CARDS.values() if name.lower() in card.name.lower()]
    if len(matches) != 1:
        raise MemlabError(f"{len(matches)} cards match {name!r}: name one of {', '.join(CARDS)}")
    return matches[0]


def batch_defaults(
    total_gib: float, name: str, vllm_version: tuple[int, int], usage: str = "server"
) -> tuple[int, int]:
    """vLLM's own (max_num_batched_tokens, max_num_seqs) on a GPU, from ``EngineArgs.get_batch_defaults``.

    Args:
        total_gib: the card's memory as CUDA reports it.
        name: as the driver gives it.
        vllm_version: (0, 26) to (0, 33).
        usage: ``server`` for ``vllm serve``, ``offline`` for the class ``LLM``.

    Source: vllm/engine/arg_utils.py (0.26:2431-2512, 0.28:2582, 0.33:2940-3039).
    """
    if total_gib >= 160 and vllm_version >= (0, 28):
        return 16384, 1024
    if total_gib >= 70 and "a100" not in name.lower():
        return (8192 if usage == "server" else 16384), 1024
    return (2048 if usage == "server" else 8192), 256


def block_size(card: Card, latent_attention: bool, kv_cache_dtype: str | None) -> int:
    """vLLM's own block size on a GPU: 16, or the least that the backend of latent attention takes.

    Source: vllm/platforms/cuda.py (0.33:84-186) for the backend, vllm/v1/attention/backends/mla/ for its blocks.
    """
    if not latent_attention:
        return 16
    if card.compute_capability[0] == 10:
        return 32  # FLASHINFER_MLA
    quantized = (kv_cache_dtype or "auto").startswith("fp8")
    return 64 if card.compute_capability[0] == 9 and quantized else 16  # FLASHMLA, FLASH_ATTN_MLA or TRITON_MLA


def cpu_batch_defaults(world_size: int = 1, usage: str = "server") -> tuple[int, int]:
    """The same on vLLM's CPU backend (vllm/engine/arg_utils.py, 0.32)."""
    tokens, seqs = (2048, 128) if usage == "server" else (4096, 256)
    return tokens * world_size, seqs * world_size
