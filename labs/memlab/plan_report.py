"""A plan for a terminal of 80 columns: a bar, a table, what vLLM would say, and what to change."""

import textwrap

from memlab.planner import Change, Plan, explain
from memlab.units import show_gib, show_tokens

_COLUMNS, _WIDTH = 80, 60
_MARKS = {"weights": "█", "consumed": "█", "non_torch": "▓", "activation": "▒", "cuda_graphs_estimated": "░",
          "kv_cache": "·"}  # fmt: skip
_NAMES = {"cuda_graphs_estimated": "cuda_graphs"}


def bar(found: Plan) -> str:
    """The budget as one line of characters, a share of it each; a legend follows."""
    ledger = found.prediction.ledger
    terms = {name: value for name, value in ledger.budget_terms().items() if value > 0}
    whole = max(sum(terms.values()), ledger.budget_gib)
    marks = "".join(_MARKS[name] * round(_WIDTH * value / whole) for name, value in terms.items())
    legend = "  ".join(f"{_MARKS[name]} {_NAMES.get(name, name)}" for name in terms)
    return f"|{marks[:_WIDTH]:<{_WIDTH}}| {show_gib(ledger.budget_gib)}\n {legend}"


def table(found: Plan) -> str:
    """Each term with its band."""
    ledger, rows = found.prediction.ledger, []
    for name in ("budget", *_MARKS, "cuda_graphs_actual"):
        value = ledger.term(name)
        if value is None:
            continue
        band = found.prediction.bands.get(name)
        between = f"{show_gib(band[0])} to {show_gib(band[1])}" if band else ""
        note = ""
        if name == "weights" and ledger.consumed_gib is not None:
            note = " (in consumed)"
        if name == "cuda_graphs_estimated" and not ledger.graphs_subtracted:
            note = " (not taken off the pool)"
        rows.append(f"{_NAMES.get(name, name):20}{show_gib(value):>12}   {between}{note}".rstrip())
    return "\n".join(rows)


def stages(found: Plan) -> str:
    """What one rank of each stage of a pipeline holds; the first and the last have the ends of the model beside."""
    header = ("stage", "layers", "weights", "activation", "kv_cache", "blocks")
    rows = [header]
    for number, stage in enumerate(found.prediction.stages):
        (first, end), ledger = found.layers_of_stages[number], stage.ledger
        sizes = map(show_gib, (ledger.weights_gib, ledger.activation_gib, ledger.kv_cache_gib))
        rows.append((str(number + 1), f"{first} to {end - 1}", *sizes, f"{stage.blocks:,}"))
    return "\n".join(f"{row[0]:6}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows)


def option(change: Change) -> str:
    """The change as it stands on vLLM's command line."""
    name = change.flag.replace("_", "-")
    if isinstance(change.to, bool):
        return f"--{name}" if change.to else f"--no-{name}"
    return f"--{name} {change.to}"


def _lines(words: str, first: str = "", rest: str = "") -> str:
    """Words in lines of the terminal's width; options and addresses stay whole."""
    return textwrap.fill(
        words, _COLUMNS, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def text(found: Plan, model: str = "MODEL", explained: bool = False) -> str:
    """The whole plan, predicted: nothing was started."""
    prediction, flags = found.prediction, found.flags
    version = ".".join(map(str, found.version))
    parts = [
        _lines(f"Predicted for vLLM {version} on {found.card.name}; nothing is started."),
        "",
        bar(found),
        "",
        table(found),
    ]
    if len(prediction.stages) > 1:
        parts += ["", stages(found)]
    if found.starts:
        parts += [
            "",
            f"It starts. GPU KV cache size: {show_tokens(prediction.kv_tokens)} ({prediction.kv_blocks:,} blocks)",
            f"Maximum concurrency for {flags.max_model_len:,} tokens per request: {prediction.max_concurrency:.2f}x",
            f"Reachable: max_num_seqs × max_model_len = {show_tokens(found.reachable_kv_tokens)}",
            f"Headroom on the card: {show_gib(found.headroom_gib)}. Host memory: {show_gib(found.host_gib)} or more",
        ]
        if found.suggested_kv_cache_bytes:
            parts.append(f"The pool in bytes: --kv-cache-memory-bytes {found.suggested_kv_cache_bytes}")
    else:
        parts += ["", _lines(f"It does not start: {found.failed_check}")]
        if found.changes:
            parts += ["", "Each of these alone lets it start:"]
            parts += [
                _lines(f"{option(change)} ({_before(change)}): a pool of {show_gib(change.kv_cache_gib)}", "  ", "    ")
                for change in found.changes
            ]
        else:
            parts += ["", _lines("No flag alone lets it start: take a larger card, more of them, or a smaller model.")]
    parts += [_lines(f"Note: {warning}.", rest="  ") for warning in found.warnings]
    if explained:
        parts += ["", *(_lines(f"{name:12} {rule}", rest=" " * 13) for name, rule in explain(found))]
    return "\n".join([*parts, "", found.command(model)])


def _before(change: Change) -> str:
    return "not set now" if change.from_ is None or change.from_ is False else f"now {change.from_}"
