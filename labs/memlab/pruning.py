"""Settings of a sweep before it starts: what is worth a start, and what cannot start, by how many GiB.

Only what surely fails is left out: a setting is pruned where even the best end of the planner's band, or the card with
nobody else on it, is too small. What is merely expected to fail is run, and its failure is a record.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import psutil

from memlab import cards, checks, flags, lab, record, shapes
from memlab.errors import FlagError, MemlabError
from memlab.ledger import weights_gib
from memlab.sweep import Setting
from memlab.units import GIB, show_gib, show_seconds


@dataclass(frozen=True)
class Pruned:
    """A setting that cannot start: why, and how many GiB it lacks; None where no memory would help."""

    setting: Setting
    reason: str
    missing_gib: float | None = None

    @property
    def why(self) -> str:
        lacks = "" if self.missing_gib is None else f"{show_gib(self.missing_gib)} short: "
        return lacks + self.reason

    def __str__(self) -> str:
        return f"{self.setting}: {self.why}"


@dataclass(frozen=True)
class Plan:
    """What a sweep will run, in order, and what it leaves out; ``replayed`` where it shows recorded runs."""

    settings: list[Setting]
    pruned: list[Pruned]
    replayed: bool = False

    @property
    def seconds(self) -> float:
        """The estimate of all runs one after the other."""
        return sum(setting.seconds * setting.repeats for setting in self.settings)

    def __str__(self) -> str:
        runs = sum(setting.repeats for setting in self.settings)
        lasts = f"about {show_seconds(self.seconds)}, one after the other"
        words = {id(one): str(one).split() for one in (*self.settings, *(each.setting for each in self.pruned))}
        shared = [word for word in next(iter(words.values()), []) if all(word in each for each in words.values())]
        shared = shared if len(words) > 1 else []

        def own(setting: Setting) -> str:
            return " ".join(word for word in words[id(setting)] if word not in shared) or "nothing else"

        lines = [f"{runs} recorded runs; live {lasts}" if self.replayed else f"{runs} runs, {lasts}"]
        if not runs:
            lines = ["nothing to run: each setting is pruned" if self.pruned else "nothing to run"]
        lines += [f"  all     {' '.join(shared)}"] if shared else []
        lines += [f"  run     {own(setting)}" for setting in self.settings]
        lines += [f"  pruned  {own(pruned.setting)}: {pruned.why}" for pruned in self.pruned]
        return "\n".join(lines)


def vary(flag: str, values: Iterable, base: Setting) -> list[Setting]:
    """``base`` once for each value of one flag, in order; None leaves the flag to vLLM.

    Raises:
        FlagError: for a flag that memlab does not model.
    """
    return [replace(base, flags=base.flags.with_(**{flag: value})) for value in values]


def plan(settings: Sequence[Setting], place: "lab.Here") -> Plan:
    """Sort out what cannot start at ``place``. In replay only what the shape and the card decide is judged."""
    free_gib = None if place.replayed else most_free_gib(place)
    vllm = replayed_version(place) if place.replayed else lab.vllm_version()
    judged = [(setting, cannot_start(setting, place, vllm, free_gib)) for setting in settings]
    return Plan(
        [setting for setting, pruned in judged if pruned is None],
        [pruned for _, pruned in judged if pruned is not None],
        place.replayed,
    )


def most_free_gib(place: "lab.Here") -> float | None:
    """Free memory of the emptiest GPU that a run could have, or of the host; None where no GPU can be had now."""
    if place.backend == "cpu":
        return psutil.virtual_memory().available / GIB
    return max((one.free_gib for one in checks.find_gpus(checks.kernels()) if not one.why_not), default=None)


def cannot_start(setting: Setting, place: "lab.Here", vllm: str, free_gib: float | None = None) -> Pruned | None:
    """Why vLLM cannot start with a setting at ``place``, or None where it may.

    Args:
        setting: of a lab model; of a model whose shape is not known only its flags are judged.
        place: where it would run.
        vllm: the version.
        free_gib: free on the GPU, or on the host; None to judge the empty card.
    """
    shape = shapes.LAB_MODELS.get(setting.model)
    longest = shape.max_position_embeddings if shape else None
    try:
        flags.check(setting.flags, longest)
        refused = cards.find(setting.card).refuses(setting.flags) if setting.card else None
    except (FlagError, MemlabError) as error:
        return Pruned(setting, str(error))
    if refused:
        return Pruned(setting, refused)
    ranks = setting.flags.world_size
    if place.backend == "cuda" and ranks > (place.machine.gpu_count or 0) and not place.replayed:
        return Pruned(setting, f"it needs {ranks} GPUs, and {place.machine.gpu_count} are here")
    if shape is None or (setting.flags.pipeline_parallel_size or 1) > 1:
        return None
    if place.backend == "cpu":
        return _on_cpu(setting, shape, place, free_gib)
    return _on_gpu(setting, shape, place, vllm, free_gib)


def _on_cpu(setting: Setting, shape, place, free_gib: float | None) -> Pruned | None:
    pool = setting.flags.kv_cache_memory_bytes
    if pool is None:
        return None
    block = setting.flags.block_size or 128
    short = _too_small_a_pool(
        setting, shape, pool / GIB, setting.flags.max_model_len or shape.max_position_embeddings, block
    )
    if short:
        return short
    needed = weights_gib(shape) + pool / GIB
    available = place.machine.total_gib if free_gib is None else free_gib
    if needed > available:
        text = f"weights and pool take {show_gib(needed)} of host memory, and {show_gib(available)} are free"
        return Pruned(setting, text, needed - available)
    return None


def _on_gpu(setting: Setting, shape, place, vllm: str, free_gib: float | None) -> Pruned | None:
    asked, machine = setting.flags, place.machine
    played = cards.find(setting.card) if setting.card else None
    total = played.total_gib if played else machine.total_gib
    found = lab.prediction(place, setting.model, asked, setting.card, vllm, setting.variables)
    resolved = record.resolve(asked, machine, "cuda", vllm, shape.max_position_embeddings, setting.card)
    ledger, bands = found.ledger, found.bands
    context = bands["context"][0]
    given = asked.kv_cache_memory_bytes is not None
    free = min(total, free_gib or math.inf) - context
    if not given and ledger.budget_gib > free:
        text = (
            f"gpu_memory_utilization plans with {show_gib(ledger.budget_gib)}, and at most {show_gib(free)} are free "
            "when vLLM looks"
        )
        return Pruned(setting, text, ledger.budget_gib - free)
    least = bands["consumed"][0] + bands["activation"][0]
    pool = ledger.kv_cache_gib if given else bands["kv_cache"][1]
    if not given and pool <= 0:
        step = f"one step of {resolved.max_num_batched_tokens:,} tokens"
        text = f"what stays and {step} take {show_gib(least)} at least of a budget of {show_gib(ledger.budget_gib)}"
        return Pruned(setting, text, -pool)
    if given and least + pool > free:
        text = (
            f"weights, one step and the pool take {show_gib(least + pool)} at least, and {show_gib(free)} can be free"
        )
        return Pruned(setting, text, least + pool - free)
    return _too_small_a_pool(setting, shape, pool, resolved.max_model_len, asked.block_size or 16)


def _too_small_a_pool(setting: Setting, shape, pool_gib: float, longest: int, block: int) -> Pruned | None:
    """vLLM refuses a pool that does not hold one request of full length.

    A sliding window needs less, and is not judged; nor is a length that vLLM fits to the pool.
    """
    if shape.sliding_window is not None or setting.flags.max_model_len == -1:
        return None
    ranks = setting.flags.tensor_parallel_size or 1
    token = shape.kv_bytes_per_token(setting.flags.kv_cache_dtype or "auto", ranks)
    needed = math.ceil(longest / block) * block * token / GIB
    if needed <= pool_gib:
        return None
    text = f"one request of {longest:,} tokens takes {show_gib(needed)}, and the pool has {show_gib(pool_gib)} at most"
    return Pruned(setting, text, needed - pool_gib)


def replayed_version(place: "lab.Here") -> str:
    """The newest vLLM among the records of the machine that a replay shows."""
    versions = {found.engine.vllm for found in record.read_all() if found.machine.name == place.machine.name}
    return max(versions, key=record.version_of)
