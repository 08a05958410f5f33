"""The planner of the page "Plan your memory": controls, and the plan that they start with.

    ```{planner}
    ```

The first plan is drawn here, when the book is built, by ``memlab.plan_view``; ``assets/plan-memory.js`` shows the
controls and draws what the same module answers under Pyodide. Where no script runs, the first plan stays, with the
command that plans in a terminal. The page asks for Python in its front matter: ``python: plan-memory.js``.
"""

import json
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

import memlab
from memlab import plan_view
from memlab.cards import CARDS
from memlab.configs import PRESET_CONFIGS

CSS = "plan-memory.css"
CAPABILITIES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16")


def quarters(low: int, high: int) -> list[int]:
    """Whole numbers from ``low`` to ``high``, four to each doubling."""
    found, base = [], low
    while base <= high:
        found += sorted({base * part // 4 for part in (4, 5, 6, 7)})
        base *= 2
    return [value for value in found if value <= high]


SLIDERS = {
    "gpu-memory-utilization": [round(0.30 + 0.01 * step, 2) for step in range(71)],
    "max-model-len": quarters(256, 1 << 20),
    "max-num-batched-tokens": quarters(256, 1 << 16),
    "max-num-seqs": quarters(1, 2048),
    "tensor-parallel-size": [1, 2, 4, 8, 16],
}
UNITS = {"max-model-len": "tokens", "max-num-batched-tokens": "tokens", "max-num-seqs": "requests"}
UNITS["tensor-parallel-size"] = "GPUs"
HELP = {
    "gpu-memory-utilization": "share of the card that vLLM plans with",
    "max-model-len": "longest request, prompt and answer together",
    "max-num-batched-tokens": "tokens in one step",
    "max-num-seqs": "requests in one step",
    "tensor-parallel-size": "GPUs that share each layer",
}
RESULT = (  # part and its heading, below the controls
    ("verdict", "What vLLM would say"),
    ("changes", None),
    ("command", "The line to copy"),
    ("table", "Term by term"),
    ("facts", None),
)


def options(values, chosen: str) -> str:
    """Elements of a choice, from (value, text)."""
    return "".join(
        f'<option value="{escape(value)}"{" selected" if value == chosen else ""}>{escape(text)}</option>'
        for value, text in values
    )


def select(name: str, label: str, values, more: str = "") -> str:
    chosen = plan_view.DEFAULTS[name]
    return f'<label{more}><span>{label}</span><select name="{name}">{options(values, chosen)}</select></label>'


def slider(name: str, resolved: float) -> str:
    """A slider over values, and a field beside it that takes any; an empty field leaves the flag to vLLM."""
    values, given = SLIDERS[name], plan_view.DEFAULTS[name]
    at = min(range(len(values)), key=lambda number: abs(values[number] - resolved))
    unit = UNITS.get(name, "")
    return (
        '<div class="memlab-plan-flag">'
        f'<label for="plan-{name}"><code>--{name}</code> <span>{HELP[name]}</span></label>'
        f'<input type="range" min="0" max="{len(values) - 1}" value="{at}" data-for="{name}" data-unit="{unit}" '
        f'data-values="{" ".join(map(str, values))}" aria-label="{name}" aria-valuetext="{resolved} {unit}">'
        f'<input type="text" inputmode="decimal" autocomplete="off" id="plan-{name}" name="{name}" '
        f'value="{escape(given)}" placeholder="vLLM: {resolved}"></div>'
    )


def controls(resolved: dict[str, float]) -> str:
    """The form; a script shows it."""
    sizes = sorted(CARDS.values(), key=lambda card: card.total_gib)
    cards = [(card.name, f"{card.name.removeprefix('NVIDIA ')} ({card.total_gib:g} GiB)") for card in sizes]
    models = [(name, name.rpartition("/")[2]) for name in PRESET_CONFIGS]
    capabilities = [("", "not known"), *((each, each) for each in CAPABILITIES)]
    where = (
        select("card", "card", [*cards, (plan_view.OTHER_CARD, "another, by its memory")]),
        '<label hidden data-when="card=other"><span>its memory in GiB, as CUDA reports it</span>'
        '<input type="text" inputmode="decimal" autocomplete="off" name="card-gib"></label>',
        select("compute-capability", "its compute capability", capabilities, ' hidden data-when="card=other"'),
        select("model", "model", [*models, (plan_view.OWN_MODEL, "another, by its config.json")]),
        select("vllm-version", "vLLM", [(each, each) for each in reversed(plan_view.VERSIONS)]),
    )
    config = (
        '<label hidden data-when="model=config" class="memlab-plan-config"><span>the model\'s config.json</span>'
        '<textarea name="config" rows="6" spellcheck="false" autocomplete="off"></textarea></label>'
    )
    dtype = [("", "vLLM's own: auto"), *((each, each) for each in KV_DTYPES[1:])]
    rest = (
        select("kv-cache-dtype", "<code>--kv-cache-dtype</code> data type of the KV cache", dtype),
        '<label class="memlab-plan-check"><input type="checkbox" name="enforce-eager" value="1"> '
        "<span><code>--enforce-eager</code> neither torch.compile nor CUDA graphs</span></label>",
        '<label class="memlab-plan-more"><span>other flags of <code>vllm serve</code></span>'
        '<input type="text" name="more" autocomplete="off" spellcheck="false" '
        'placeholder="--cpu-offload-gb 4"></label>',
    )
    sliders = "".join(slider(name, resolved[name]) for name in SLIDERS)
    return (
        '<form hidden autocomplete="off" aria-label="Settings of the plan">'
        f'<fieldset><legend>GPU and model</legend><div class="memlab-controls">{"".join(where)}</div>{config}'
        "</fieldset>"
        f"<fieldset><legend>Flags</legend><p>An empty field leaves its flag to vLLM.</p>{sliders}"
        f'<div class="memlab-controls">{"".join(rest)}</div></fieldset>'
        '<p class="memlab-plan-buttons"><button type="button" data-do="reset">Back to the first plan</button> '
        '<button type="button" data-do="link">Copy a link to this plan</button></p>'
        "</form>"
    )


def planner() -> str:
    """The whole element."""
    asked = plan_view.read(plan_view.DEFAULTS)
    found = plan_view.answer(plan_view.DEFAULTS)
    shown = []
    for part, heading in RESULT:
        shown.append(f"<h2>{heading}</h2>" if heading else "")
        kind = ' class="memlab-table"' if part == "table" else ""
        shown.append(f'<div data-part="{part}"{kind}>{found["html"][part]}</div>')
    return (
        f'<div class="memlab-plan" data-defaults="{escape(json.dumps(plan_view.DEFAULTS))}" '
        f'data-most="{asked.shape.max_model_len}"><div>'
        f'<div class="memlab-plan-seen"><figure data-part="figure">{found["html"]["figure"]}</figure>'
        '<p class="memlab-plan-error" role="alert" tabindex="0" hidden></p></div>'
        f"{controls(found['resolved'])}"
        '<div class="memlab-plan-wait"><p class="memlab-status" role="status"></p>'
        '<progress max="1" value="0" aria-label="Python is loading" hidden></progress></div></div>'
        '<p class="memlab-plan-heard" aria-live="polite"></p>'
        f"{''.join(shown)}"
        "<p>The same plan in a terminal, in a copy of this project; it needs Python alone:</p>"
        f'<div data-part="plan-command">{found["html"]["plan-command"]}</div></div>'
    )


class Planner(SphinxDirective):
    def run(self):
        for module in ("plan_view", "planner", "ledger", "estimates", "weights", "shapes", "cards", "versions"):
            self.env.note_dependency(str(Path(memlab.__file__).parent / f"{module}.py"))
        self.env.note_dependency(__file__)
        found = plan_view.answer(plan_view.DEFAULTS)
        elsewhere = addnodes.only(expr="not html")
        elsewhere += nodes.paragraph("", found["said"])
        return [nodes.raw("", planner(), format="html"), elsewhere]


def add_styles(app, pagename, templatename, context, doctree) -> None:
    """Only a page with a planner loads how it looks."""
    if 'class="memlab-plan"' in context.get("body", ""):
        app.add_css_file(CSS)


def setup(app):
    app.setup_extension("record_pages")  # finds memlab
    app.add_directive("planner", Planner)
    app.connect("html-page-context", add_styles)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
