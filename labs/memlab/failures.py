"""The failures of one start: what vLLM refused by counting, what ran out and in which step, what numbers alone show."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from memlab.doctor_rules import BUFFERS, ENCODING, PINNED, RULES, START, TRACEBACK, TRIAL, Rule
from memlab.episodes import SAYS_POOL, SIZED, Episode, Run, episodes
from memlab.facts import CONTEXTS_GIB, HIGHEST_UTILIZATION, Context, Facts, facts_at
from memlab.failing_step import CHECKS_POOL, by_order, functions_of, in_a_prompt, in_an_encoder, place
from memlab.findings import CONFIDENCE, Failure, Fix, evidence
from memlab.remedies import REMEDIES
from memlab.units import show_gib
from memlab.vllm_log import ERRORS, Event, phase_of, stated_kv, stated_ledger

# What vLLM counted itself: the message alone decides.
_REFUSED = {
    "free_memory_low": "free_memory_at_startup",
    "external_weights_high": "free_memory_at_startup",
    "cpu_memory_low": "free_memory_at_startup",
    "cpu_pool_low": "host_ram_oom",
    "kv_none": "kv_cache_none",
    "autofit_failed": "kv_cache_none",
    "cpu_budget_full": "kv_cache_none",
    "mm_reserve_too_big": "kv_cache_none",
    "kv_too_small": "max_model_len_exceeds_kv",
    "mamba_blocks": "mamba_blocks_lt_max_num_seqs",
    "profile_grew": "profile_assert_free_grew",
    "swap_too_large": "host_swap_space_config",
    "kv_swap_exhausted": "kv_swap_exhausted",
}
# Where the budget sizes the pool, what leaves more of it helps; a pool that was given stays as it is.
_BY_THE_BUDGET = {"kv_cache_none", "max_model_len_exceeds_kv", "mamba_blocks_lt_max_num_seqs"}
_FOR_THE_BUDGET = {"raise_utilization", "fewer_tokens", "chunked_prefill", "no_estimate", "quantize", "fewer_seqs"}
_DEVICE = {"oom", "load_oom", "sampler_oom", "pooler_oom", "cuda_oom", "cumem_oom", "cumem_error", "nccl_oom"}
_ON_HOST = {"host_oom", "shm_full"}
_SAYS_ITS_PLACE = {"load_oom": "weights_load", "sampler_oom": "sampler_warmup", "pooler_oom": "sampler_warmup"}
_SAYS_ITS_PLACE |= {"nccl_oom": "nccl_init_oom"}


def _fixes(rule: Rule, facts: Facts) -> tuple[tuple[Fix, ...], list[tuple[str, str]]]:
    """The remedies of a rule, sized and ranked by what they gain, and those that cannot be had here."""
    fixes, useless = [], list(rule.useless)
    for name, why in rule.remedies:
        remedy = REMEDIES[name]
        sized = rule.phase in _BY_THE_BUDGET and name in _FOR_THE_BUDGET
        if facts.pool_given and (sized or name == "raise_utilization"):
            useless.append((remedy.flag, "the pool has the size that was given, whatever the budget leaves"))
            continue
        change = remedy.size(facts) if facts.takes(remedy.since) else None
        if change is None:
            if name == "shorter_prompts":
                useless.append((remedy.flag, "the profiled step has max_num_batched_tokens, whatever the length"))
            if name == "raise_utilization" and facts.utilization is not None:
                share = facts.utilization
                useless.append((remedy.flag, f"it is at {share:g} of the card already; more is not free at the start"))
            continue
        from_, to, gains = change
        if gains is not None and gains <= 0:
            gains = None
        from_ = round(from_, 4) if isinstance(from_, float) else from_
        fixes.append(Fix(remedy.flag, from_, to, gains, remedy.costs, why))
    fixes.sort(key=lambda fix: -(fix.gains_gib or 0.0))
    return tuple(fixes), useless


def _numbers(facts: Facts) -> str:
    """The numbers of the decisive message, as the end of a sentence."""
    values = facts.values
    get = values.get
    card_gib = facts.card.total_gib if facts.card else get("total_gib")
    if get("tried_gib") is not None:
        free = "" if get("free_gib") is None else f", {show_gib(get('free_gib'))} were free"
        total = "" if get("total_gib") is None else f" of {show_gib(card_gib)}"
        return f": {show_gib(get('tried_gib'))} were asked for{free}{total}"
    if get("required_gib") is not None and get("current_gib") is not None:
        return f": {show_gib(get('required_gib'))} were asked for, it has {show_gib(get('current_gib'))}"
    if get("needed_gib") is not None and get("kv_cache_gib") is not None:
        return f": {show_gib(get('needed_gib'))} for {get('max_model_len')} tokens, of {show_gib(get('kv_cache_gib'))}"
    if get("budget_gib") is not None and get("free_gib") is not None and get("total_gib") is not None:
        return (
            f": {show_gib(get('free_gib'))} of {show_gib(card_gib)} are free, {show_gib(get('budget_gib'))} are planned"
        )
    if get("max_model_len") and get("kv_tokens"):
        return f": {get('max_model_len')} tokens against {get('kv_tokens')}"
    if get("available_blocks") is not None:
        return f": {get('available_blocks')} against {get('max_num_seqs')}"
    if get("free_after_gib") is not None and get("free_gib") is not None:
        return f": {show_gib(get('free_gib'))} before, {show_gib(get('free_after_gib'))} after"
    if get("requested_gib") is not None and get("free_gib") is not None:
        return f": {show_gib(get('requested_gib'))} were asked for, {show_gib(get('free_gib'))} of the host are free"
    if get("swap_gib") is not None and get("host_total_gib") is not None:
        return f": {show_gib(get('swap_gib'))} of {show_gib(get('host_total_gib'))}"
    pool = facts.term("kv_cache")
    if pool is not None and pool <= 0:
        return f": {show_gib(pool, signed=True)} are left"
    return ""


def _notes(phase: str, facts: Facts) -> tuple[str, ...]:
    """What else the numbers say, each by a rule of its own."""
    notes, values, ledger = [], facts.values, facts.ledger
    tried, total, free = (values.get(name) for name in ("tried_gib", "total_gib", "free_gib"))
    if tried and total and tried > 2 * total:
        notes.append(
            "More was asked for at once than the card has: no lack of capacity, but something that grows with the "
            "square of the length, such as an attention mask of a fallback kernel. Shorten --max-model-len or use "
            "another attention backend."
        )
    if tried is not None and free is not None and 0 < tried <= free:
        within = free - tried <= max(_SEGMENT_GIB, 0.25 * tried)
        notes.append(
            "As much as was asked for was free, but the allocator takes larger segments than it is asked for: the "
            "card is full to within one segment."
            if within
            else "More than was asked for was free, so not the card's size is the limit but the driver's or the "
            "host's: where GPU and host share one memory, the part that the GPU may have."
        )
    loose = values.get("unallocated_gib")
    if loose is not None and tried is not None and loose >= max(tried, 0.5):
        notes.append(
            f"PyTorch holds {show_gib(loose)} that it does not use, in pieces too small: fragmentation beside too "
            "little headroom."
        )
    ours, allocated = facts.process, values.get("allocated_gib")
    if ours is not None and allocated is not None and ours - allocated - (loose or 0.0) > 2.0:
        notes.append(
            f"{show_gib(ours - allocated - (loose or 0.0))} of this process are outside PyTorch: CUDA context, NCCL, "
            "graphs and kernels, most of it outside the budget."
        )
    if phase == "weights_load":
        notes.append(
            "Loading stopped at the first allocation that failed, so more than this is missing"
            + (f": {show_gib(allocated)} were loaded by then. " if allocated else ". ")
            + "A checkpoint called 4-bit keeps some layers in 16 bits."
        )
    if phase == "host_ram_oom" and values.get("exit_code") is not None:
        notes.append(
            "The exit code says SIGKILL. The kernel sends it where memory runs out; docker stop and a liveness probe "
            "send it too. dmesg, or the container's last state, tells which."
        )
    if phase == "kv_cache_none" and facts.engine != "V0" and (facts.version or (0, 8)) <= (0, 8):
        notes.append(
            "In early versions of V1 what other servers hold on this GPU counts too: the utilization must then be "
            "above what all of them hold together."
        )
    others = facts.others
    if phase == "other_process_on_gpu" and _one_holds_most(facts):
        notes.append(
            "One process holds most of the card. Where nvidia-smi shows it to be this server's own engine, another of "
            "its processes, such as the one that reads images, needs room beside it: then the budget has to be lower."
        )
    if others is not None and others > CONTEXTS_GIB and phase not in ("other_process_on_gpu", "free_memory_at_startup"):
        notes.append(f"Others than this process hold {show_gib(others)} on the card, CUDA contexts included.")
    if facts.card and total:
        notes.append(f"Sizes are those of the card that is played; the one that plays it has {show_gib(total)}.")
    share = facts.utilization
    if share is not None and share >= 0.95 and phase not in ("host_ram_oom", "host_swap_space_config"):
        notes.append(f"gpu_memory_utilization {share:g} leaves nearly nothing for what no profile counts.")
    if ledger is not None:
        if facts.charged is not None:
            notes.append(
                f"Non-torch memory is {show_gib(ledger.non_torch_gib)}, where a few hundred MiB are usual on one GPU: "
                "another process took memory meanwhile and is charged to the budget."
            )
        if ledger.cuda_graphs_actual_gib and ledger.graphs_subtracted is False and phase in _AFTER_THE_POOL:
            notes.append(
                f"The CUDA graphs ({show_gib(ledger.cuda_graphs_actual_gib)}) are outside the budget in this version."
            )
    if facts.engine == "V0" and phase in ("memory_profile", "max_model_len_exceeds_kv", "kv_cache_none"):
        notes.append(
            "V0 profiles a whole prompt of max_model_len in one step unless chunked prefill is on (it is by itself "
            "above 32768 tokens), so a shorter max_model_len or --enable-chunked-prefill also makes the step smaller."
        )
    if phase == "max_model_len_exceeds_kv" and int(facts.given.get("pipeline_parallel_size") or 1) > 1:
        notes.append(
            "With pipeline parallelism some versions compare the need of all layers with the pool of one stage; the "
            "estimated maximum length is too low then."
        )
    return tuple(notes)


_SEGMENT_GIB = 20 / 1024  # the least that PyTorch's allocator takes for a tensor above 1 MiB

_AFTER_THE_POOL = {"cuda_graph_capture", "sampler_warmup", "sampler", "kernel_warmup", "runtime_oom"}
_AFTER_THE_POOL |= {"runtime_prefill_spike", "runtime_logprobs", "ok"}


def _one_holds_most(facts: Facts) -> bool:
    listed, total = facts.values.get("processes_gib", ()), facts.values.get("total_gib")
    known = listed and total and facts.values.get("process_gib") and not facts.ballast
    return bool(known and max(listed) > 0.5 * total)


def _failure(
    phase: str,
    confidence: str,
    facts: Facts,
    decisive: Event,
    support=(),
    cause: str | None = None,
    rule: Rule | None = None,
) -> Failure:
    rule = rule or RULES[phase]
    fixes, useless = _fixes(rule, facts)
    return Failure(
        phase=phase,
        cause=(cause or rule.means) + _numbers(facts),
        confidence=confidence,
        missing_gib=facts.missing,
        evidence=evidence(decisive, *support),
        fixes=fixes,
        will_not_help=tuple(useless),
        notes=_notes(phase, facts),
        paste=rule.paste,
        rank=decisive.rank,
        ledger=facts.ledger,
    )


def _undetermined(cause: str, decisive: Event, ledger=None, paste=(TRACEBACK,)) -> Failure:
    return Failure(
        "undetermined", cause, "low", evidence=evidence(decisive), paste=tuple(paste), rank=decisive.rank, ledger=ledger
    )


_BEFORE_THE_POOL = {"weights_load", "memory_profile", "multimodal_profile"}


def _known(run: Run, episode: Episode, event: Event, context: Context, parts=()) -> Facts:
    """What is known at an event of an episode: nothing of the start before it, where the traceback is of a step that
    comes before what that start had done already, and so of another start."""
    placed = place(functions_of(episode.events), frozenset())
    if placed and placed[0] in _BEFORE_THE_POOL and episode.step in SIZED:
        return facts_at(episode.events, 0, event, context, parts)
    return facts_at(run.events, episode.before, event, context, parts)


def _device(run: Run, episode: Episode, context: Context) -> Failure:
    """Memory of the device ran out: where, by message, traceback, or the last step seen."""
    hits = [event for event in episode.events if event.kind in _DEVICE]
    full = next((event for event in hits if event.kind == "oom"), None)
    worded = next((event for event in hits if event.kind in _SAYS_ITS_PLACE and event.kind != "nccl_oom"), None)
    decisive = full or worded or hits[0]
    facts = _known(run, episode, decisive, context, hits[:20])
    own = functions_of(event for event in episode.events if event.rank == decisive.rank)
    functions = own if place(own, facts.seen) else functions_of(episode.events)
    placed = place(functions, facts.seen)
    support = [*hits[:2]]
    if full and facts.neighbours and facts.neighbours >= (facts.missing or 0.0):
        return _failure("other_process_on_gpu", "high", facts, decisive, cause=_neighbours(facts))
    if decisive.kind == "cuda_oom" and ("pin_failed", decisive.rank) in run.counts:
        pin = next(event for event in run.events if event.kind == "pin_failed")
        return _failure("host_ram_oom", "medium", facts, decisive, (pin,), rule=PINNED)
    if worded and not (placed and placed[0] == "memory_profile"):
        phase, confidence = _SAYS_ITS_PLACE[worded.kind], "high"
    elif placed:
        phase, confidence = placed[0], "high"
        support.append(placed[1])
        if phase == "sampler" and episode.step in ("ready", "serving"):
            phase = "runtime_oom"
    elif decisive.kind in ("cumem_oom", "cumem_error") and not run.counts.get(("load_started", decisive.rank)):
        phase, confidence = "sleep_wake_up", "medium"
    elif decisive.kind == "nccl_oom":
        phase, confidence = "nccl_init_oom", "high"
    else:
        phase, confidence = by_order(episode, facts), "medium"
        if phase == "runtime_oom" and in_a_prompt(episode, facts):
            phase = "runtime_prefill_spike"
    if phase is None and _more_than_any_budget(facts):
        phase, confidence = "weights_load", "low"
    if phase is None:
        return _undetermined(
            "memory of the GPU ran out, and nothing shows in which step" + _numbers(facts),
            decisive,
            facts.ledger,
            (TRACEBACK, START),
        )
    rule = ENCODING if phase == "runtime_oom" and in_an_encoder(functions) else None
    if phase == "memory_profile" and "profile_cudagraph_memory" in functions:
        rule = TRIAL
    return _failure(phase, confidence, facts, decisive, support, rule=rule)


def _buffer(run: Run, episode: Episode, context: Context) -> Failure:
    """A kernel's buffer that may not grow: not memory that ran out."""
    event = next(event for event in episode.events if event.kind in BUFFERS)
    facts = facts_at(run.events, episode.before, event, context)
    placed = place(functions_of(episode.events), facts.seen)
    prompt = "prefill" in event.text or (placed is not None and placed[0] == "runtime_prefill_spike")
    phase = "runtime_prefill_spike" if prompt else "runtime_oom"
    if placed and placed[0] in _STEPS_OF_THE_START:
        phase = placed[0]
    return _failure(phase, "high", facts, event, rule=BUFFERS[event.kind])


def _more_than_any_budget(facts: Facts) -> bool:
    """Whether PyTorch alone holds so much of the card that only what no budget limits can be it: the weights."""
    allocated, total = facts.values.get("allocated_gib"), facts.values.get("total_gib")
    return bool(allocated and total and facts.card is None and allocated > HIGHEST_UTILIZATION * total)


def _neighbours(facts: Facts) -> str:
    known = facts.values.get("process_gib") is not None or facts.values.get("allocated_gib") is not None
    return f"other processes hold {'' if known else 'at least '}{show_gib(facts.others)} of this card, which was needed"


def _of_episode(run: Run, episode: Episode, context: Context) -> Iterator[Failure]:
    """The failures of one episode, in the order of their lines."""
    events = episode.events
    kinds = {event.kind for event in events}
    refused: dict[str, Event] = {}
    for event in events:
        if event.kind in _REFUSED:
            known = refused.get(_REFUSED[event.kind])
            if known is None or len(event.values) > len(known.values):
                refused[_REFUSED[event.kind]] = event
    found: list[tuple[int, Failure]] = []
    for phase, event in refused.items():
        facts = facts_at(run.events, episode.before, event, context)
        cause = None
        if phase == "free_memory_at_startup" and (facts.others or 0.0) > CONTEXTS_GIB:
            cause = f"{RULES[phase].means}; other processes hold {show_gib(facts.others)}, CUDA contexts included"
        found.append((event.line_number, _failure(phase, "high", facts, event, cause=cause)))
    if kinds & _DEVICE and not _while_ending(kinds, functions_of(events)):
        failure = _device(run, episode, context)
        found.append((failure.evidence[0].line, failure))
    elif kinds & set(BUFFERS):
        failure = _buffer(run, episode, context)
        found.append((failure.evidence[0].line, failure))
    killed = [event for event in events if event.kind in _ON_HOST or _killed(event)]
    if killed and not kinds & _DEVICE and not refused:
        facts = facts_at(run.events, episode.before, killed[0], context, killed[:3])
        found.append((killed[0].line_number, _failure("host_ram_oom", _sure(killed), facts, killed[0], killed[1:3])))
    if refused and not kinds & _DEVICE:
        found += _left_over(run, episode, context, refused)
    if not found:
        found += [(one.evidence[0].line, one) for one in _without_a_message(run, episode, context)]
    for _, failure in sorted(found, key=lambda pair: pair[0]):
        yield failure


def _while_ending(kinds: set[str], functions: Mapping[str, Event]) -> bool:
    """Whether NCCL alone failed, while a process that had failed before closed it."""
    return kinds & _DEVICE == {"nccl_oom"} and "destroy_model_parallel" in functions


def _killed(event: Event) -> bool:
    if event.kind != "killed":
        return False
    return event.values.get("exit_code") in (137, -9, 9) or event.values.get("signal") == "KILL"


def _sure(killed: list[Event]) -> str:
    return "high" if any(event.kind in _ON_HOST for event in killed) else "medium"


def _left_over(run: Run, episode: Episode, context: Context, refused: Mapping[str, Event]):
    """A step in a traceback that the refusals before it cannot have come from: another start, whose end is cut off."""
    last = max(event.line_number for event in refused.values())
    later = [event for event in episode.events if event.line_number > last]
    named = {name: event for name, event in functions_of(later).items() if not CHECKS_POOL & {name}}
    placed = place(named, frozenset())
    if placed and placed[0] in ("sampler_warmup", "cuda_graph_capture", "kernel_warmup", "weights_load"):
        facts = facts_at(run.events, episode.before, placed[1], context)
        yield placed[1].line_number, _failure(placed[0], "low", replace(facts, values={}), placed[1])


def _without_a_message(run: Run, episode: Episode, context: Context) -> Iterator[Failure]:
    """What tracebacks without a message of memory tell: little, and with what to paste."""
    events = episode.events
    functions = functions_of(events)
    seen = frozenset(event.kind for event in run.events[: episode.before])
    ledger = stated_ledger(run.events[: episode.before])
    setting = next((event for event in events if event.kind == "bad_settings"), None)
    other = next((event for event in events if event.kind == "exception"), None)
    placed = place(functions, seen)
    errors = [event for event in events if event.kind in ERRORS]
    if setting:
        yield _undetermined(
            f"vLLM refuses these settings before it takes memory: {setting.values.get('rule')}", setting, paste=()
        )
    elif other and other.values["name"] not in ("RuntimeError", "ValueError", "AssertionError", "RayTaskError"):
        yield _undetermined(f"this ended by {other.values['name']}, which is not about memory", other, ledger, ())
    elif CHECKS_POOL & set(functions):
        event = next(functions[name] for name in functions if name in CHECKS_POOL)
        yield _undetermined(
            "vLLM's check of the KV cache failed: either nothing is left for the pool, or one request of max_model_len "
            "does not fit; the message is cut off",
            event,
            ledger,
            ("the ValueError below this traceback, and the lines on GPU blocks or KV cache before it",),
        )
    elif "initialize_cache" in functions and not placed:
        yield _undetermined(
            "V0 failed between the profile and serving: at the check of the KV cache, its allocation or the capture of "
            "CUDA graphs; the message is cut off" + _room(run, context, episode),
            functions["initialize_cache"],
            ledger,
            ("the last line of this traceback, which names the error", "the command line, for max_model_len"),
        )
    elif placed and not other and placed[0] in _STEPS_OF_THE_START:
        facts = _known(run, episode, placed[1], context)
        failure = _failure(placed[0], "low", facts, placed[1], errors[:2])
        yield replace(failure, paste=("the last line of this traceback: the error itself is cut off", *failure.paste))
    elif errors or functions:
        what = errors[0] if errors else next(iter(functions.values()))
        reason = "the engine ended, and the lines that say why are not here"
        if "collective_timeout" in {event.kind for event in events}:
            reason = "a rank waited in vain: another one failed before, and its lines are not here"
        yield _undetermined(
            reason,
            what,
            ledger,
            (TRACEBACK, "the lines of EngineCore and of each worker, not of the API server alone"),
        )


def _room(run: Run, context: Context, episode: Episode) -> str:
    """What V0's blocks hold, to be compared with max_model_len, as the end of a sentence."""
    kv = stated_kv(run.events[: episode.before])
    if kv.blocks is None:
        return ""
    size = kv.block_size or context.given.get("block_size") or 16
    return f". {kv.blocks} blocks of {size} hold {kv.blocks * size} tokens: a larger max_model_len does not fit"


_STEPS_OF_THE_START = {"sampler_warmup", "cuda_graph_capture", "kernel_warmup", "multimodal_profile", "memory_profile"}
_STEPS_OF_THE_START |= {"weights_load", "kv_cache_alloc_oom", "sleep_wake_up"}


# Steps that take memory at once and end with a line of their own: a log that ends in one most likely ended there.
_LAST_WORDS = {"graphs_progress": "cuda_graph_capture", "encoder_profile": "multimodal_profile"}


def _unsaid(run: Run, context: Context, failed: bool) -> Iterator[Failure]:
    """Failures that stand in numbers alone: a pool of no or too few blocks, and a capture that never ends."""
    if failed:
        return
    for number, event in enumerate(run.events):
        pool, blocks = event.values.get("kv_cache_gib"), event.values.get("gpu_blocks")
        empty = (event.kind in SAYS_POOL and pool is not None and pool <= 0) or (
            event.kind == "kv_blocks" and blocks == 0
        )
        if empty:
            facts = facts_at(run.events, len(run.events), event, context)
            yield _failure("kv_cache_none", "high" if blocks == 0 or pool is not None else "medium", facts, event)
            return
        if event.values.get("max_concurrency", 1.0) < 1.0:
            facts = facts_at(run.events, number + 1, event, context)
            yield _failure("max_model_len_exceeds_kv", "medium", facts, event)
            return
    if run.events and not run.stats:
        last = [event for event in run.events if phase_of(event) or event.kind == "graphs_captured"][-1:]
        phase = _LAST_WORDS.get(last[0].kind) if last else None
        if phase and last[0].values.get("progress_percent") in (None, 0.0):
            facts = facts_at(run.events, len(run.events), last[0], context)
            cause = RULES[phase].means + "; the log ends in this step, the error itself is not here"
            failure = _failure(phase, "low", facts, last[0], cause=cause)
            yield replace(failure, paste=("what comes after the last line: the error and its traceback",))


def failures_of(run: Run, context: Context) -> list[Failure]:
    """The failures of one start, in order; each phase once, with the best reading of it."""
    found: dict[str, Failure] = {}
    for episode in episodes(run):
        for failure in _of_episode(run, episode, context):
            known = found.get(failure.phase)
            if known is None or CONFIDENCE.index(failure.confidence) < CONFIDENCE.index(known.confidence):
                found[failure.phase] = failure
    if len(found) > 1:  # an engine that is dead says nothing beside the reason
        found.pop("undetermined", None)
    failed = bool(set(found) - {"undetermined"})
    for failure in _unsaid(run, context, failed):
        found.pop("undetermined", None)
        found[failure.phase] = failure
    if run.preempted and not found:
        facts = facts_at(run.events, len(run.events), run.preemptions, context)
        found["preemption_not_oom"] = _failure("preemption_not_oom", "high", facts, run.preemptions)
    return list(found.values())
