"""Drawings in the pages: an SVG of assets/figures/ inline, so that it takes the page's text colour.

    ```{drawing} one-request A caption, in plain text.
    What the drawing shows, in words or as a table: it opens under the drawing.
    ```

The SVG brings its own <title> and <desc> for a reader who cannot see it; any builder but HTML gets the latter alone.
"""

import html
from pathlib import Path
from xml.etree import ElementTree

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

FIGURES = Path(__file__).resolve().parent.parent.parent / "assets" / "figures"
SVG = "{http://www.w3.org/2000/svg}"


class Drawing(SphinxDirective):
    required_arguments = 2
    final_argument_whitespace = True
    has_content = True

    def run(self):
        name, caption = self.arguments
        path = FIGURES / f"{name}.svg"
        if not path.is_file():
            raise self.error(f"no drawing assets/figures/{name}.svg")
        self.env.note_dependency(str(path))
        svg = path.read_text(encoding="utf-8")
        described = ElementTree.fromstring(svg).findtext(f"{SVG}desc")
        if not described:
            raise self.error(f"assets/figures/{name}.svg has no <desc>")
        opening = (
            f'<figure class="memlab-figure">{svg}<figcaption>{html.escape(caption)}</figcaption>'
            "<details><summary>This drawing in words</summary>"
        )
        elsewhere = addnodes.only(expr="not html")
        elsewhere += nodes.paragraph("", f"{caption} {' '.join(described.split())}")
        return [
            nodes.raw("", opening, format="html"),
            *self.parse_content_to_nodes(),
            nodes.raw("", "</details></figure>", format="html"),
            elsewhere,
        ]


def setup(app):
    app.add_directive("drawing", Drawing)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
