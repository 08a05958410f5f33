"""A browser of a lab's recorded runs, for pages that have no kernel behind them.

    ```{run-browser} 01-ledger gpu_memory_utilization enforce_eager       a lab, and the settings that come first
    ```

It emits ``<div class="memlab-browser" data-lab="…" data-teaches="…">`` around a sentence that links to the page of
recorded runs. A lab's panel puts the same into the book. ``assets/run-browser.js`` turns the element into controls and
figures; where no script runs, the sentence stays.

What the script shows is drawn here, at build time, by ``memlab.plots``: ``_static/runs/index.js`` has the settings of
every run, ``_static/runs/ID.js`` the rest of one. They are scripts, since a page from disk may not fetch data.
"""

import hashlib
import json
import os
from pathlib import Path

import matplotlib
from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import record_pages
from memlab import ledger, plots, rank_plots, record, traffic_plots, units

UID = "memlab-uid"  # in a figure's ids; the script puts a name of its own there each time it shows one
SOURCES = [Path(module.__file__) for module in (plots, rank_plots, traffic_plots, ledger, record, units)] + [
    Path(__file__)
]
RUNS = "_static/runs"
DRAWN = (
    plots.timeline,
    plots.ledger,
    rank_plots.ranks,
    traffic_plots.by_load,
    traffic_plots.allocator,
    traffic_plots.pool,
)

logger = logging.getLogger(__name__)


class run_browser(nodes.General, nodes.Element):
    """The place of a browser; its child is what a page without scripts shows."""


class RunBrowser(SphinxDirective):
    required_arguments = 1
    optional_arguments = 9

    def run(self):
        lab, *teaches = self.arguments
        runs = self.env.app.memlab_records.by_lab().get(lab, [])
        known = {name for each in record_pages.settings_of(runs).values() for name in each}
        for name in [name for name in teaches if name not in known]:
            logger.warning("no recorded run of %s has a setting %r", lab, name, location=self.get_location())
        if not runs:
            logger.warning("no recorded run of the lab %r", lab, location=self.get_location())
            return []
        link = record_pages.link_to(runs[0], "the page of recorded runs", lab)
        sentence = nodes.paragraph("", "Every recorded run of this lab is on ", link, nodes.Text("."))
        return [run_browser("", sentence, lab=lab, teaches=" ".join(teaches))]


def open_browser(self, node) -> None:
    data = {"data-lab": node["lab"], "data-teaches": node["teaches"]}
    self.body.append(self.starttag(node, "div", CLASS="memlab-browser", **data))


def close_browser(self, node) -> None:
    self.body.append("</div>")


# ---- what the script reads ----


def index(library: record_pages.Library) -> dict[str, dict]:
    """Of each lab: its runs with title and settings, and the run to start with."""
    found = {}
    for lab, runs in library.by_lab().items():
        named = record_pages.titles(runs)
        settings = record_pages.settings_of(runs)
        listed = [{"id": run.id, "title": named[run.id], "settings": settings[run.id]} for run in runs]
        found[lab] = {"start": central(listed), "runs": listed}
    return found


def central(listed: list[dict]) -> str:
    """The run that the others differ least from: most of them are one setting away."""

    def distance(one: dict) -> int:
        return sum(one["settings"].get(name) != value for other in listed for name, value in other["settings"].items())

    return min(listed, key=distance)["id"]


def contents(run: record.RunRecord, page: str, download: str | None) -> dict:
    """One run as the script shows it; ``page`` and ``download`` are addresses from the book's root."""
    peak = run.seen.peak_gib if run.seen else None
    pool = run.kv.tokens if run.kv else None
    facts = [
        ("outcome", run.outcome.replace("_", " ")),
        ("peak", "" if peak is None else units.show_gib(peak)),
        ("KV cache", "" if pool is None else units.show_tokens(pool)),
    ]
    terms = [
        (f"{plots.words(term)}, {view.view}", view.term(term))
        for view in plots.views(run)
        for term in ledger.TERMS
        if view.term(term) is not None
    ]
    return {
        "where": run.where(),
        "facts": [(name, value) for name, value in facts if value],
        "error": run.error,
        "command": record_pages.command_of(run),
        "page": page,
        "download": download,
        "figures": [figure for draw in DRAWN if (figure := drawn(draw, run))],
        "terms": terms,
        "tokens": pool,
    }


def drawn(draw, run: record.RunRecord) -> str | None:
    """A figure as HTML; None where the run has nothing to draw: it ended before."""
    try:
        return draw(run, replayed=True).html(uid=UID)
    except ValueError:
        return None


def write_runs(app, env) -> None:
    """Each run's file is kept from one build to the next while neither the record nor what draws it changes."""
    if app.builder.format != "html":
        return
    library = app.memlab_records
    folder = Path(app.outdir) / RUNS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.js").write_text(f"window.memlabLabs = {as_script(index(library))};\n", encoding="utf-8")
    sources = b"".join(path.read_bytes() for path in SOURCES) + matplotlib.__version__.encode()
    for run in library.records.values():
        path = library.path_of[run.id]
        page = f"{record_pages.PAGE}.html#{record_pages.anchor(run.id)}"
        file = env.dlfiles.get(os.path.relpath(path, app.srcdir))
        download = f"_downloads/{file[1]}" if file else None
        key = hashlib.sha256(sources + path.read_bytes() + f"{page} {download}".encode()).hexdigest()
        target = folder / f"{run.id}.js"
        if target.exists() and target.read_text(encoding="utf-8").startswith(f"// {key}\n"):
            continue
        script = f'(window.memlabRuns ??= {{}})["{run.id}"] = {as_script(contents(run, page, download))};\n'
        target.write_text(f"// {key}\n{script}", encoding="utf-8")
    kept = {"index", *library.records}
    for stale in [path for path in folder.glob("*.js") if path.stem not in kept]:
        stale.unlink()


def as_script(data) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def add_scripts(app, pagename, templatename, context, doctree) -> None:
    """Only a page that shows runs loads what shows them."""
    body = context.get("body", "")
    if 'class="memlab-browser' in body or "data-run=" in body:
        app.add_js_file("runs/index.js")
        app.add_js_file("run-browser.js")


def setup(app):
    app.setup_extension("record_pages")
    app.add_directive("run-browser", RunBrowser)
    passed = (record_pages.pass_through, record_pages.pass_through)
    app.add_node(run_browser, html=(open_browser, close_browser), latex=passed)
    app.connect("env-updated", write_runs)
    app.connect("html-page-context", add_scripts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
