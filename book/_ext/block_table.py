"""The block table of the paged KV cache, to be tried in the page: requests come, take blocks, wait, are preempted.

    ```{block-table}
    ```

It emits ``<div class="memlab-block-table">`` around the state that the picture starts with, a sentence on it, and one
on what is simpler than in vLLM. ``assets/block-table.js`` adds the controls and draws what ``assets/block-pool.js``
decides; where no script runs, and on paper, the first state stays. It lies in assets/figures/block-table.html, drawn by
that same script: ``python tests/test_block_table.py`` draws it anew.
"""

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

STILL = Path(__file__).resolve().parent.parent.parent / "assets" / "figures" / "block-table.html"
STATE = (
    "A pool of 20 blocks with room for 8 tokens each. Request A has finished, and its full block is still cached. "
    "Requests C and D share the blocks of their system prompt. D has taken up a block of A, so its blocks are not "
    "neighbours."
)
KEY = (
    "B[2] is logical block 2 of request B; the small number is the physical block. Block 0 is the null block: no "
    "request gets it. The bar of GPU memory is not to scale."
)
SIMPLER = (
    "The rules are vLLM's. Two things are simpler: a step has room for every prompt, so none is split over steps, and "
    "a step ends before the next begins."
)


class BlockTable(SphinxDirective):
    def run(self):
        self.env.note_dependency(str(STILL))
        still = STILL.read_text(encoding="utf-8")
        opening = f'<div class="memlab-block-table"><div class="memlab-block-state">{still}</div>'
        elsewhere = addnodes.only(expr="not html")
        elsewhere += nodes.paragraph("", STATE)
        words = f'<p class="memlab-still">{STATE}</p><p>{KEY}</p><p>{SIMPLER}</p>'
        return [nodes.raw("", f"{opening}{words}</div>", format="html"), elsewhere]


def add_scripts(app, pagename, templatename, context, doctree) -> None:
    """Only a page with a block table loads what draws it."""
    if 'class="memlab-block-table"' in context.get("body", ""):
        app.add_css_file("block-table.css")
        app.add_js_file("block-pool.js")
        app.add_js_file("block-table.js")


def setup(app):
    app.add_directive("block-table", BlockTable)
    app.connect("html-page-context", add_scripts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
