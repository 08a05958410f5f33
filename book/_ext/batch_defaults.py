"""vLLM's defaults for a step, card by card and by entry point, from ``memlab.cards``.

```{batch-defaults}
```
"""

from sphinx.util.docutils import SphinxDirective

import record_pages
from memlab import cards

VERSION = (0, 33)
HEADER = ("card", "tokens, vllm serve", "tokens, LLM", "requests, vllm serve", "requests, LLM")


def rows() -> list[tuple[str, ...]]:
    """Cards that have the same defaults in one row, those with most first; the CPU backend last."""
    found: dict[tuple, list[str]] = {}
    for card in sorted(cards.CARDS.values(), key=lambda card: -card.total_gib):
        server, offline = (
            cards.batch_defaults(card.total_gib, card.name, VERSION, usage) for usage in ("server", "offline")
        )
        found.setdefault((server, offline), []).append(card.name.replace("NVIDIA ", "").replace("GeForce ", ""))
    alike = [(", ".join(names), *defaults) for defaults, names in found.items()]
    on_cpu = (cards.cpu_batch_defaults(usage=usage) for usage in ("server", "offline"))
    return [
        (name, f"{server[0]:,}", f"{offline[0]:,}", f"{server[1]:,}", f"{offline[1]:,}")
        for name, server, offline in [*alike, ("CPU backend, one rank", *on_cpu)]
    ]


class BatchDefaults(SphinxDirective):
    def run(self):
        self.env.note_dependency(cards.__file__)
        return [record_pages.table(HEADER, rows(), "memlab-numbers")]


def setup(app):
    app.add_directive("batch-defaults", BatchDefaults)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
