"""The defaults for a step, as pages and planner have them, against vLLM's own function."""

import sys
from pathlib import Path

import pytest

from memlab import cards, lab
from memlab.record import version_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "book" / "_ext"))
arg_utils = pytest.importorskip("vllm.engine.arg_utils")
usage_lib = pytest.importorskip("vllm.usage.usage_lib")
CONTEXTS = {"server": usage_lib.UsageContext.OPENAI_API_SERVER, "offline": usage_lib.UsageContext.LLM_CLASS}
SIZES = (8.0, 23.6, 69.9, 70.0, 79.2, 139.8, 159.9, 160.0, 178.0, 288.0)


class Platform:
    """What vLLM asks of a platform when it looks for its defaults."""

    def __init__(self, total_gib: float = 0.0, name: str = "", cpu: bool = False):
        self.total_gib, self.name, self.cpu = total_gib, name, cpu

    def get_device_total_memory(self) -> int:
        return int(self.total_gib * 2**30)

    def get_device_name(self) -> str:
        return self.name

    def is_tpu(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return self.cpu


def vllms_own(platform: Platform, usage: str, monkeypatch, world_size: int = 1) -> tuple[int, int]:
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(world_size)
    return tokens[CONTEXTS[usage]], seqs[CONTEXTS[usage]]


@pytest.mark.parametrize("usage", CONTEXTS)
@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090"])
def test_the_defaults_of_a_card_are_vllms(usage, name, monkeypatch):
    version = version_of(lab.vllm_version())[:2]
    for total_gib in SIZES:
        own = vllms_own(Platform(total_gib, name), usage, monkeypatch)
        assert cards.batch_defaults(total_gib, name, version, usage) == own, f"{name} with {total_gib} GiB"


@pytest.mark.parametrize("usage", CONTEXTS)
def test_the_defaults_of_the_cpu_backend_are_vllms_and_grow_with_the_ranks(usage, monkeypatch):
    for ranks in (1, 2, 8):
        own = vllms_own(Platform(cpu=True), usage, monkeypatch, ranks)
        assert cards.cpu_batch_defaults(ranks, usage) == own


def test_the_page_has_each_card_once_with_vllms_numbers(monkeypatch):
    import batch_defaults

    *alike, on_cpu = batch_defaults.rows()
    named = [name for names, *_ in alike for name in names.split(", ")]
    assert len(named) == len(set(named)) == len(cards.CARDS)
    assert on_cpu[1:] == ("2,048", "4,096", "128", "256")
    for card in cards.CARDS.values():
        short = card.name.replace("NVIDIA ", "").replace("GeForce ", "")
        (row,) = [numbers for names, *numbers in alike if short in names.split(", ")]
        own = [vllms_own(Platform(card.total_gib, card.name), usage, monkeypatch) for usage in CONTEXTS]
        assert row == [f"{pair[part]:,}" for part in (0, 1) for pair in own]
