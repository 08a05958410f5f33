"""The planner of the page "Plan your memory": controls, and the plan that they start with; and how near it comes.

    ```{planner}
    ```
    ```{planner-accuracy}
    ```

The first plan is drawn here, when the book is built, by ``memlab.plan_view``; ``assets/plan-memory.js`` shows the
controls and draws what the same module answers under Pyodide. Where no script runs, the first plan stays, with the
command that plans in a terminal. The page asks for Python in its front matter: ``python: plan-memory.js``.

The accuracy is what ``scripts/bench accuracy`` prints, counted from the records when the book is built.
"""

import functools
import json
from html import escape
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

import memlab
from memlab import plan_view
from memlab.cards import CARDS
from memlab.configs import PRESET_CONFIGS

ROOT = Path(__file__).resolve().parent.parent.parent
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


# ---- how near the predictions come ----

NO_BREAK = "\u00a0"
TERMS = {
    "weights": "weights",
    "consumed": "consumed: weights, buffers and non-torch memory",
    "activation": "activation",
    "cuda_graphs_estimated": "CUDA graphs, as vLLM estimates them",
    "kv_cache": "KV cache",
    "kv_tokens": "KV tokens",
}


@functools.cache
def bench():
    """``scripts/bench``, which has no suffix."""
    loader = SourceFileLoader("scripts_bench", str(ROOT / "scripts" / "bench"))
    module = module_from_spec(spec_from_loader("scripts_bench", loader))
    loader.exec_module(module)
    return module


def sets(starts: list[dict]) -> dict[str, list[dict]]:
    """The columns of the table: each half of the families without CUDA graphs, and the starts with them."""
    eager = [one for one in starts if "eager" in one["kinds"]]
    return {
        "fitted on": [one for one in eager if one["half"] == "fit"],
        "held out": [one for one in eager if one["half"] == "held out"],
        "with CUDA graphs": [one for one in starts if "CUDA graphs" in one["kinds"]],
    }


def table(rows: list[list[str]]) -> nodes.table:
    """A table whose first row is its head; a cell has a paragraph a line."""
    group = nodes.tgroup(cols=len(rows[0]))
    group += [nodes.colspec(colwidth=1) for _ in rows[0]]
    for part, some in ((nodes.thead(), rows[:1]), (nodes.tbody(), rows[1:])):
        for row in some:
            line = nodes.row()
            line += [nodes.entry("", *(nodes.paragraph("", words) for words in cell.split("\n"))) for cell in row]
            part += line
        group += part
    return nodes.table("", group)


def cell(figures: dict | None) -> str:
    """Mean absolute error, and the mean width of the bands with the share of what was measured in them."""
    if figures is None:
        return ""
    said = f"{figures['percent']:.2f} %"
    if "gib" in figures:
        said = f"{figures['gib']:.3f} GiB, {said}"
    if "width" in figures:
        width = f"{figures['width']:.2f} GiB ({figures['width_percent']:.1f} %)"
        said += f"\nband {width}, {figures['inside']:.0f} % inside"
    return said.replace(" %", NO_BREAK + "%").replace(" GiB", NO_BREAK + "GiB")


class PlannerAccuracy(SphinxDirective):
    def run(self):
        self.env.note_dependency(__file__)
        for path in (ROOT / "scripts" / "bench", *(ROOT / "labs" / "records").rglob("*.json")):
            self.env.note_dependency(str(path))
        made = bench()
        starts, older = made.recorded_starts("0.33.0"), made.csv_starts()
        columns = {name: chosen for name, chosen in sets(starts).items() if chosen}
        figures = {name: made.accuracy(chosen) for name, chosen in columns.items()}
        counts = {name: f"{made.counted(len(chosen), 'starts')} of {made.counted(shapes_of(chosen), 'shapes')}"
                  for name, chosen in columns.items()}  # fmt: skip
        rows = [["term", "aim", *(f"{name}: {counts[name]}" for name in columns)]]
        for name, words in TERMS.items():
            aim = made.AIMS.get(name, "")
            widest = f"\nband {made.WIDEST[name]}" if name in made.WIDEST else ""
            rows.append([words, aim + widest, *(cell(figures[column].get(name)) for column in columns)])
        kinds = {kind: [one for one in starts if kind in one["kinds"]] for kind in made.KINDS}
        there = ", ".join(f"{kind} {len(some)} of {made.counted(shapes_of(some), 'shapes')}"
                          for kind, some in kinds.items() if some)  # fmt: skip
        absent = [kind for kind, some in kinds.items() if not some]
        others = [kind for kind in absent if any(kind in one["kinds"] for one in older)]
        missing, settings = made.unrecorded()
        said = [
            f"The rules are held to {len(starts)} recorded starts of vLLM 0.33.0 on an H200, of {shapes_of(starts)} "
            f"shapes, and to {len(older)} starts of 0.19.0 on H100 that others measured, of {shapes_of(older)} shapes. "
            "The families of models are in two halves. Constants are fitted on one half. The other half is held out.",
            f"The recorded starts of 0.33.0 by kind: {there}.",
        ]
        if absent:
            line = f"Not validated by a record of 0.33.0: {' and '.join(absent)}. There the rules are vLLM's source."
            said.append(line + (f" Starts of 0.19.0 have {' and '.join(others)}." if others else ""))
        if missing:
            said.append(f"Of the {settings} starts that the planner's grid asks for, {len(missing)} are not recorded.")
        said.append("The table has the mean absolute error of each term, and how wide the bands are.")
        return [*(nodes.paragraph("", line) for line in said), table(rows)]


def shapes_of(starts: list[dict]) -> int:
    return len({one["model"] for one in starts})


def add_styles(app, pagename, templatename, context, doctree) -> None:
    """Only a page with a planner loads how it looks."""
    if 'class="memlab-plan"' in context.get("body", ""):
        app.add_css_file(CSS)


def setup(app):
    app.setup_extension("record_pages")  # finds memlab
    app.add_directive("planner", Planner)
    app.add_directive("planner-accuracy", PlannerAccuracy)
    app.connect("html-page-context", add_styles)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
