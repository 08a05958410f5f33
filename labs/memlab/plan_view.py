"""A plan for a page: settings as text in, elements of HTML and a sentence out.

The page "Plan your memory" calls ``answer`` for every move of a slider; its first plan is drawn when the book is built.

>>> answer({"card": "NVIDIA GeForce RTX 3090", "max-model-len": "8192"})["said"]
'Predicted for vLLM 0.33 on NVIDIA GeForce RTX 3090: it starts. …'
"""

import functools
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from memlab import cards, configs, flags, ledger, planner, shapes, versions
from memlab.cards import CARDS, Card
from memlab.errors import FlagError, MemlabError
from memlab.flags import ServeFlags
from memlab.planner import Plan
from memlab.shapes import ModelShape
from memlab.tables import capitalised
from memlab.units import show_gib, show_tokens

OTHER_CARD, OWN_MODEL = "other", "config"
# Flags with a control of their own; the setting "more" holds any other, as a command line has them.
CONTROLLED = (
    "gpu-memory-utilization",
    "max-model-len",
    "max-num-batched-tokens",
    "max-num-seqs",
    "kv-cache-dtype",
    "enforce-eager",
    "tensor-parallel-size",
)
SETTINGS = (
    "card", "card-gib", "compute-capability", "model", "config", "vllm-version", *CONTROLLED, "more",
)  # fmt: skip
DEFAULTS = {
    **dict.fromkeys(SETTINGS, ""),
    "card": "NVIDIA GeForce RTX 3090",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "vllm-version": f"0.{versions.LAST[1]}",
    "max-model-len": "8192",
}
_BESIDE = {
    "card": ("card-gib",),
    "card-gib": ("card",),
    "compute-capability": ("card", "card-gib"),
    "model": ("config",),
    "config": ("model",),
}
VERSIONS = tuple(f"0.{minor}" for minor in range(versions.FIRST[1], versions.LAST[1] + 1))
MOST_CHARACTERS = 200_000  # of a pasted config.json

# Colour and hatch of a term, as the figures of the ledger have them (plots.STYLE).
STYLE = {
    "context": ("#8c8c8c", ""),
    "weights": ("#0b6fd0", ""),
    "non_torch": ("#9a8550", "M0 0L8 8M8 0L0 8"),
    "activation": ("#e8440a", "M0 0L8 8"),
    "cuda_graphs": ("#a044cc", "M4 4m-2 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0"),
    "kv_cache": ("#008f7a", "M2 2h.1M6 6h.1"),
}
_WORDS = {
    "non_torch": "non-torch and buffers",
    "cuda_graphs": "CUDA graphs",
    "kv_cache": "KV cache",
    "total": "the card",
    "headroom": "left on the card",
}
_BAR, _LANE = (24, 44), 8  # where the bar begins, its height, and the height of a band's lane, in pixels


@dataclass(frozen=True)
class Asked:
    """What settings ask for. ``model`` is a name for the command line."""

    card: Card
    shape: ModelShape
    model: str
    version: versions.Version
    flags: ServeFlags


# ---- settings ----


def read(settings: Mapping[str, str]) -> Asked:
    """The plan's arguments from settings; one that is missing or empty is left to vLLM.

    Raises:
        MemlabError: for a value that means nothing, naming it.
    """
    config = settings.get("config", "") if _chosen(settings, "model") == OWN_MODEL else ""
    shape, model = _shape(_chosen(settings, "model"), config)
    given = flags.from_args(_words(settings))
    strange = [word for word in given.extra if word not in (ledger.HYBRID_OFF, ledger.ASYNC_OFF)]
    if strange:
        raise FlagError(f"memlab does not count {' '.join(strange)}: leave it out of the plan")
    return Asked(_card(settings), shape, model, _version(_chosen(settings, "vllm-version")), given)


def _chosen(settings: Mapping[str, str], name: str) -> str:
    return settings.get(name) or DEFAULTS[name]


def _card(settings: Mapping[str, str]) -> Card:
    name = _chosen(settings, "card")
    if name != OTHER_CARD:
        return cards.find(name)
    size = settings.get("card-gib", "")
    try:
        total = float(size)
    except ValueError:
        raise FlagError(f"a card of {size!r:.60} GiB: give what CUDA reports, such as 79.19") from None
    card = planner.card_of(total)
    capability = settings.get("compute-capability", "")
    if not capability:
        return card
    first, _, second = capability.partition(".")
    if not (first.isdecimal() and second.isdecimal()):
        raise FlagError(f"{capability!r:.60} is no compute capability: write it as 8.6")
    return planner.with_capability(card, (int(first), int(second)))


def _version(text: str) -> versions.Version:
    if text not in VERSIONS:
        raise FlagError(
            f"{text!r:.60} is no version that is planned here: take one from {VERSIONS[0]} to {VERSIONS[-1]}"
        )
    return 0, int(text.partition(".")[2])


@functools.lru_cache(maxsize=32)
def _shape(name: str, config: str) -> tuple[ModelShape, str]:
    """A preset by its name, or the shape of a pasted config.json; the model's name for a command line."""
    if name != OWN_MODEL:
        return shapes.from_config(configs.preset(name)), name
    if not config.strip():
        raise MemlabError("no config.json yet: paste the model's own")
    if len(config) > MOST_CHARACTERS:
        raise MemlabError(f"a config.json of {len(config):,} characters: give at most {MOST_CHARACTERS:,}")
    try:
        parsed = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise MemlabError(f"the config.json is no JSON ({error}): paste the whole file") from None
    return shapes.from_config(parsed), "MODEL"


def _words(settings: Mapping[str, str]) -> list[str]:
    """The flags of ``vllm serve``, as a command line has them."""
    words = []
    for name in CONTROLLED:
        value = settings.get(name, "").strip()
        if name == "enforce-eager":
            if value not in ("", "1"):
                raise FlagError(f"enforce-eager {value!r:.60}: it is 1, or left out")
            words += ["--enforce-eager"] if value else []
        elif value:
            words.append(f"--{name}={value}")
    try:
        return [*words, *shlex.split(settings.get("more", ""))]
    except ValueError as error:
        raise FlagError(f"the other flags have a quote that does not match ({error})") from None


def from_link(query: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Settings from a link, and what of it was left out, in words. Never fails: what means nothing gets its default."""
    problems = [f"{name!r:.60} is no setting" for name in query if name not in SETTINGS]
    given = {name: query[name] for name in SETTINGS if name in query}
    good = {}
    for name, value in given.items():  # each alone, with what it is nothing without
        beside = {other: given[other] for other in _BESIDE.get(name, ()) if other in given}
        try:
            read({**DEFAULTS, **beside, name: value})
        except MemlabError as error:
            if not any(problem.endswith(str(error)) for problem in problems):
                problems.append(f"{name}: {error}")
        else:
            good[name] = value
    found = DEFAULTS | good
    try:
        asked = read(found)
        _planned(asked, changes=False)
    except MemlabError as error:
        return dict(DEFAULTS), [*problems, str(error)]
    if found["card"] != OTHER_CARD:
        found["card"] = asked.card.name
    return found, problems


# ---- the answer ----


def answer(settings: Mapping[str, str], changes: bool = True, link: bool = False) -> dict:
    """What the page shows for its settings.

    Args:
        settings: by the names of ``SETTINGS``; from a link, whatever that holds.
        changes: look for changes that let it start, which takes many plans.
        link: the settings come from a link: what is wrong there becomes its default.

    Returns:
        ``settings`` as they count, ``problems`` of a link, ``resolved`` flags, the model's own limit of tokens, the
        card's GiB, ``html`` by part and the sentence ``said``; or ``error`` where a setting means nothing.
    """
    problems: list[str] = []
    if link:
        settings, problems = from_link(settings)
    settings = {name: str(settings.get(name, "")) for name in SETTINGS}
    try:
        asked = read(settings)
        found = _planned(asked, changes)
    except MemlabError as error:
        return {"settings": settings, "problems": problems, "error": capitalised(str(error))}
    return {
        "settings": settings,
        "problems": problems,
        "starts": found.starts,
        "resolved": {
            "gpu-memory-utilization": round(found.prediction.ledger.budget_gib / found.card.total_gib, 4),
            "max-model-len": found.flags.max_model_len,
            "max-num-batched-tokens": found.flags.max_num_batched_tokens,
            "max-num-seqs": found.flags.max_num_seqs,
            "tensor-parallel-size": found.flags.tensor_parallel_size or 1,
        },
        "most_tokens": asked.shape.max_model_len,
        "total_gib": asked.card.total_gib,
        "html": parts(found, asked, changes),
        "said": said(found),
    }


def _planned(asked: Asked, changes: bool) -> Plan:
    return planner.plan(asked.shape, asked.card, asked.flags, asked.version, changes=changes)


def said(found: Plan) -> str:
    """The plan in a sentence or two."""
    where = f"Predicted for vLLM 0.{found.version[1]} on {found.card.name}:"
    if not found.starts:
        return f"{where} it does not start. {found.failed_check}"
    pool, tokens = show_gib(found.prediction.ledger.kv_cache_gib), show_tokens(found.prediction.kv_tokens)
    return f"{where} it starts. The KV cache has {pool}, {tokens}: {_at_once(found)}."


def _at_once(found: Plan) -> str:
    return f"{found.prediction.max_concurrency:.2f} requests of {show_tokens(found.flags.max_model_len)} at a time"


def parts(found: Plan, asked: Asked, changes: bool = True) -> dict[str, str]:
    """The elements of the page by the part that they go to."""
    return {
        "verdict": _verdict(found),
        "figure": figure(found),
        "table": table(found),
        "facts": _facts(found),
        "changes": _changes(found, changes),
        "command": f"<pre><code>{escape(found.command(asked.model))}</code></pre>",
        "plan-command": f"<pre><code>{escape(plan_command(found, asked))}</code></pre>",
    }


def plan_command(found: Plan, asked: Asked) -> str:
    """The line that prints the same plan in a terminal."""
    words = ["python3", "-m", "memlab", "plan"]
    words += ["--config", "config.json"] if asked.model == "MODEL" else ["--model", asked.model]
    if found.card.name in CARDS:
        words += ["--card", found.card.name]
    else:
        words += ["--card-gib", f"{found.card.total_gib:g}"]
        if found.card.source:
            words += ["--compute-capability", ".".join(map(str, found.card.compute_capability))]
    words += ["--vllm-version", f"0.{found.version[1]}", *asked.flags.to_args()]
    return f"PYTHONPATH=labs {shlex.join(words)}"


def _verdict(found: Plan) -> str:
    version, card = f"0.{found.version[1]}", escape(found.card.name)
    head = f"<p><strong>Predicted</strong> for vLLM {version} on {card}: it "
    if not found.starts:
        words = escape(found.failed_check)
        return f"{head}<strong>does not start</strong>. vLLM would say:</p><pre><code>{words}</code></pre>"
    lines = (
        f"GPU KV cache size: {show_tokens(found.prediction.kv_tokens)}\n"
        f"Maximum concurrency for {found.flags.max_model_len:,} tokens per request: "
        f"{found.prediction.max_concurrency:.2f}x"
    )
    return f"{head}<strong>starts</strong>. vLLM would print:</p><pre><code>{lines}</code></pre>"


def _facts(found: Plan) -> str:
    pairs = [
        ("blocks in the pool", f"{found.prediction.kv_blocks:,}"),
        ("one request of max_model_len takes", show_gib(found.prediction.needed_gib)),
        ("reachable by all requests", show_tokens(found.reachable_kv_tokens)),
        ("host memory", f"{show_gib(found.host_gib)} or more"),
    ]
    if found.starts and found.suggested_kv_cache_bytes:
        pairs.append(("the pool in bytes", f"--kv-cache-memory-bytes {found.suggested_kv_cache_bytes}"))
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    notes = "".join(f"<li>{escape(capitalised(warning))}.</li>" for warning in found.warnings)
    return f"<dl>{listed}</dl>" + (f"<ul>{notes}</ul>" if notes else "")


def _changes(found: Plan, looked: bool) -> str:
    if found.starts:
        return ""
    if not looked:
        return "<p>Looking for a change that lets it start …</p>"
    if not found.changes:
        return "<p>No flag alone lets it start: it takes two changes or more, another card, or a smaller model.</p>"
    items = []
    for change in found.changes:
        name, value = change.flag.replace("_", "-"), "1" if change.to is True else str(change.to)
        to, before = _shown(change.to), _shown(change.from_)
        items.append(
            f'<li data-flag="{escape(name)}" data-to="{escape(value)}"><code>--{escape(name)}</code> {escape(to)} '
            f"instead of {escape(before)}: a pool of {show_gib(change.kv_cache_gib)}</li>"
        )
    return f"<p>Each of these alone lets it start:</p><ul>{''.join(items)}</ul>"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) and value < 1 << 30 else str(value)


# ---- the bar ----


@dataclass(frozen=True)
class Segment:
    """A term's place on the card, from ``start_gib`` on; ``band`` is the lowest and highest place of its end."""

    term: str
    start_gib: float
    size_gib: float
    band: tuple[float, float] | None

    @property
    def end_gib(self) -> float:
        return self.start_gib + self.size_gib


def segments(found: Plan) -> list[Segment]:
    """The terms of the card in order; a term of nothing, or less, has no place.

    Where a version states weights and non-torch memory as one number, the band of both is that of their sum.
    """
    view, bands = found.prediction.ledger, found.prediction.bands
    graphs = view.cuda_graphs_estimated_gib if view.graphs_subtracted else view.cuda_graphs_actual_gib
    sizes = {"context": view.context_gib, "weights": view.weights_gib, "non_torch": non_torch_gib(found)}
    sizes |= {"activation": view.activation_gib, "kv_cache": view.kv_cache_gib}
    # What is not taken off the pool comes after it, beyond the budget.
    at = 4 if view.graphs_subtracted else 5
    order = [*list(sizes.items())[:at], ("cuda_graphs", graphs or 0.0), *list(sizes.items())[at:]]
    placed, start, resident = [], 0.0, 0.0
    for term, size in order:
        band = bands.get("cuda_graphs_estimated" if term == "cuda_graphs" else term)
        base = start
        if term == "weights":
            resident = start
        if term == "non_torch" and view.consumed_gib is not None:
            band, base = bands.get("consumed"), resident
        if size > 0:
            placed.append(Segment(term, start, size, band and (base + band[0], base + band[1])))
            start += size
    return placed


def non_torch_gib(found: Plan) -> float:
    """Non-torch memory; where a version states it with the weights as one number, what that holds besides them."""
    view = found.prediction.ledger
    return view.consumed_gib - view.weights_gib if view.non_torch_gib is None else view.non_torch_gib


def figure(found: Plan) -> str:
    """The stacked bar as an element of HTML: the card's memory in the order in which it is taken, bands below it."""
    view, placed = found.prediction.ledger, segments(found)
    scale = max(view.total_gib, placed[-1].end_gib, view.context_gib + view.budget_gib)
    top, height = _BAR

    def at(size_gib: float) -> str:
        return f"{100 * min(max(size_gib / scale, 0.0), 1.0):.3f}%"

    def label(place_gib: float, y: int, text: str) -> str:
        side = "start" if place_gib < scale / 2 else "end"  # where a phone has room for it
        return f'<text x="{at(place_gib)}" y="{y}" text-anchor="{side}">{text}</text>'

    drawn, lane = [], top + height + 10
    for one in placed:
        place = f'x="{at(one.start_gib)}" width="{at(one.size_gib)}"'
        drawn.append(
            f'<rect class="term" data-term="{one.term}" {place} y="{top}" height="{height}" '
            f'fill="url(#memlab-plan-{one.term})"/>'
        )
        if one.band:
            low, high = map(at, one.band)
            colour = STYLE[one.term][0]
            drawn.append(
                f'<g stroke="{colour}" stroke-width="3"><line x1="{low}" x2="{high}" y1="{lane}" y2="{lane}"/>'
                f'<line x1="{low}" x2="{low}" y1="{lane - 3}" y2="{lane + 3}"/>'
                f'<line x1="{high}" x2="{high}" y1="{lane - 3}" y2="{lane + 3}"/></g>'
            )
        lane += _LANE
    bottom = lane + 18
    budget, card = view.context_gib + view.budget_gib, view.total_gib
    edge = f'class="edge" y="{top}" height="{height}" width="{at(card)}"'
    marks = (
        f"<rect {edge}/>"
        f'<line class="budget" x1="{at(budget)}" x2="{at(budget)}" y1="{top - 4}" y2="{lane - 4}"/>'
        f"{label(budget, 14, f'budget {show_gib(view.budget_gib)}')}"
        f"{label(card, bottom - 4, f'card {show_gib(card)}')}"
    )
    named = 'role="img" aria-labelledby="memlab-plan-title memlab-plan-desc"'
    title = f'<title id="memlab-plan-title">Memory of {escape(found.card.name)}, predicted</title>'
    desc = f'<desc id="memlab-plan-desc">{escape(alt(found))}</desc>'
    svg = f'<svg {named} width="100%" height="{bottom}">{title}{desc}{_patterns()}{"".join(drawn)}{marks}</svg>'
    keys = "".join(f"<li>{_swatch(one.term)}{escape(word(one.term))} {show_gib(one.size_gib)}</li>" for one in placed)
    outcome = f"it starts, {_at_once(found)}" if found.starts else "it does not start"
    caption = f"<strong>Predicted</strong>: {outcome}"
    return f'<figcaption>{caption}</figcaption>{svg}<ul class="memlab-plan-key">{keys}</ul>'


def word(term: str) -> str:
    """A term as prose has it."""
    return _WORDS.get(term, term.replace("_", " "))


def alt(found: Plan) -> str:
    """What the bar shows, for who does not see it."""
    view = found.prediction.ledger
    terms = ", ".join(f"{word(one.term)} {show_gib(one.size_gib)}" for one in segments(found))
    short = "" if view.kv_cache_gib > 0 else " Nothing is left for the KV cache."
    return (
        f"A stacked bar of a card of {show_gib(view.total_gib)}: {terms}. "
        f"The budget is {show_gib(view.budget_gib)}.{short}"
    )


def _patterns() -> str:
    found = []
    for term, (colour, mark) in STYLE.items():
        path = f'<path class="mark" d="{mark}"/>' if mark else ""
        found.append(
            f'<pattern id="memlab-plan-{term}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" fill="{colour}"/>{path}</pattern>'
        )
    return f"<defs>{''.join(found)}</defs>"


def _swatch(term: str) -> str:
    fill = f"url(#memlab-plan-{term})"
    return f'<svg aria-hidden="true" width="16" height="16"><rect width="16" height="16" fill="{fill}"/></svg>'


# ---- the table ----


def table(found: Plan) -> str:
    """Each term with its band and its rule."""
    view, bands = found.prediction.ledger, found.prediction.bands
    rules = dict(planner.explain(found))
    graphs = view.cuda_graphs_estimated_gib if view.graphs_subtracted else view.cuda_graphs_actual_gib
    source = found.card.source or "as given"
    resident = "what the next row holds besides the weights"
    rows = [
        ("total", view.total_gib, f"as CUDA reports it ({source})"),
        ("context", view.context_gib, rules["context"]),
        ("budget", view.budget_gib, rules["budget"]),
        ("weights", view.weights_gib, rules["weights"]),
        ("non_torch", non_torch_gib(found), rules.get("non_torch", resident)),
        ("consumed", view.consumed_gib, rules.get("consumed")),
        ("activation", view.activation_gib, rules["activation"]),
        ("cuda_graphs", graphs, rules.get("cuda_graphs")),
        ("kv_cache", view.kv_cache_gib, rules["kv_cache"]),
        ("headroom", found.headroom_gib, "the card less the context, the budget and what comes on top of it"),
    ]
    body = []
    for term, size, rule in rows:
        if size is None:
            continue
        band = bands.get("cuda_graphs_estimated" if term == "cuda_graphs" else term)
        between = f"{show_gib(band[0])} to {show_gib(band[1])}" if band else ""
        body.append(
            f'<tr role="row" data-term="{term}"><th role="rowheader" scope="row">{escape(word(term))}</th>'
            f'<td role="cell">{show_gib(size)}</td><td role="cell">{between}</td>'
            f'<td role="cell" class="rule">{escape(rule)}</td></tr>'
        )
    # A phone shows the rows as blocks; the roles keep them a table to who hears it.
    names = ("term", "predicted", "between", "rule")
    head = "".join(f'<th role="columnheader" scope="col">{name}</th>' for name in names)
    return (
        '<table role="table"><caption>The terms of one GPU, predicted</caption>'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(body)}</tbody></table>'
    )
