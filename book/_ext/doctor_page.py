"""The box of the page "The doctor": a log goes in, what memlab.doctor finds comes out, in the reader's browser.

    ```{doctor} tests/data/vllm_logs/h200-0.33.0-rtx-3090-pool-too-small.log      a log to try it with
    ```

``assets/the-doctor.js`` puts the controls in; where no script runs, a sentence stays with the command for a terminal.
The page asks for Python in its front matter: ``python: the-doctor.js``.
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import record_pages

CSS = "the-doctor.css"
COMMAND = "PYTHONPATH=labs python3 -m memlab doctor vllm.log"


class doctor_box(nodes.General, nodes.Element):
    """The place of the controls; its child is what a page without scripts shows."""


class DoctorBox(SphinxDirective):
    required_arguments = 1

    def run(self):
        example = Path(self.env.srcdir) / self.arguments[0]
        self.env.note_dependency(str(example))
        before = "The box that reads a log needs JavaScript. In a copy of this project, the same doctor runs as "
        sentence = nodes.paragraph("", before, nodes.literal("", COMMAND), nodes.Text("."))
        return [doctor_box("", sentence, example=example.read_text(encoding="utf-8"))]


def open_box(self, node) -> None:
    self.body.append(self.starttag(node, "div", CLASS="memlab-doctor", **{"data-command": COMMAND}))
    text = json.dumps(node["example"]).replace("<", "\\u003c")
    self.body.append(f'<script type="application/json">{text}</script>')


def close_box(self, node) -> None:
    self.body.append("</div>")


def add_styles(app, pagename, templatename, context, doctree) -> None:
    if 'class="memlab-doctor"' in context.get("body", ""):
        app.add_css_file(CSS)


def setup(app):
    app.setup_extension("record_pages")
    passed = (record_pages.pass_through, record_pages.pass_through)
    app.add_directive("doctor", DoctorBox)
    app.add_node(doctor_box, html=(open_box, close_box), latex=passed)
    app.connect("html-page-context", add_styles)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
