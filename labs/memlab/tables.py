"""A table of text, for a terminal, a notebook and a page; and how a sentence begins."""

import html
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row. ``words``: the cells hold words, not numbers."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: bool = False

    def __str__(self) -> str:
        """For a terminal."""
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        just = str.ljust if self.words else str.rjust
        text = ["  ".join([line[0].ljust(widths[0]), *map(just, line[1:], widths[1:])]).rstrip() for line in lines]
        text.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.caption, *text])

    def _repr_pretty_(self, printer, cycle) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        # JupyterLab and the book align cells as numbers want it.
        align = ' style="text-align:start"' if self.words else ""
        head = "".join(f'<th scope="col"{align}>{html.escape(name)}</th>' for name in self.header)
        body = "".join(
            f'<tr><th scope="row"{align}>{html.escape(first)}</th>'
            + "".join(f"<td{align}>{html.escape(cell)}</td>" for cell in rest)
            + "</tr>"
            for first, *rest in self.rows
        )
        parts = f"<caption>{html.escape(self.caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f'<div class="memlab-table"><table>{parts}</table></div>'


def capitalised(text: str) -> str:
    """``text`` as a sentence begins; vLLM and names of flags keep their case."""
    return text if text.startswith("vLLM") or "_" in text.split()[0] else text[:1].upper() + text[1:]
