"""What the doctor found of a run that failed: for a notebook, a page and a terminal.

>>> finding_view.of(run)          # in a notebook, beside the plot of the run
>>> print(finding_view.of(run))
"""

import html
from dataclasses import dataclass

from memlab import doctor, findings
from memlab.record import DIAGNOSED, RunRecord, without_none
from memlab.tables import Table, capitalised
from memlab.units import show_gib
from memlab.vllm_log import clean

SHOWN_FIXES = 4
SHOWN_LINES = 3
_TITLES = {
    "ok": "No failure",
    "not_a_failure": "No failure, but lines that look like one",
    "preemption_not_oom": "Preemption, not out of memory",
    "max_model_len_exceeds_kv": "A request of max_model_len does not fit the KV cache",
    "kv_cache_none": "Nothing left for the KV cache",
    "kv_cache_alloc_oom": "The KV cache could not be allocated",
    "host_ram_oom": "Host memory ran out",
    "profile_assert_free_grew": "Memory changed hands during the profile",
    "mamba_blocks_lt_max_num_seqs": "Fewer state blocks than sequences",
}
_SPELT = {"kv": "KV", "gpu": "GPU", "cuda": "CUDA", "oom": "OOM", "nccl": "NCCL", "lt": "fewer than", "ram": "memory"}


@dataclass(frozen=True)
class View:
    """A finding (``doctor.Diagnosis.to_dict``, without what is None) to be looked at; its text is of no trust."""

    data: dict

    @property
    def phase(self) -> str:
        """The phase of the root cause, as ``doctor.RULES`` spells it; ``ok`` where nothing failed."""
        return self.data["phase"]

    @property
    def failures(self) -> list[dict]:
        """The failures in their order."""
        return self.data.get("failures", [])

    def fixes(self, failure: dict, shown: int | None = SHOWN_FIXES) -> Table:
        """What helps, the most GiB first; the first few, or all."""
        rows = [(fix["flag"], change(fix), gain(fix), fix["why"], fix["costs"]) for fix in failure.get("fixes", [])]
        return Table("What helps", ("flag", "change", "gain", "why", "costs"), tuple(rows[:shown]), words=True)

    def html(self, whole: bool = False) -> str:
        """An element to stand in a page; ``whole``: with all that is known, where nothing else shows the run."""
        failures = [self._failure_html(number, one, whole) for number, one in enumerate(self.failures, 1)]
        parts = failures or [_paragraph("Found", self.summary())]
        if whole and self.data.get("starts", 1) > 1:
            starts = f"{self.data['starts']} starts of a server; a failure that comes again stands once"
            parts.insert(0, _paragraph("The log", starts))
        if whole and self.data.get("ledger"):
            parts.append(self.ledger()._repr_html_())
        if whole and self.data.get("harmless"):
            lines = [(f"line {one['line']}: {one['text']}", one["why"]) for one in self.data["harmless"]]
            parts.append(_listed("Looks like a failure, and is harmless", lines))
        if self.data.get("paste_also"):
            parts.append(_paragraph("To say more, the doctor needs", "; ".join(self.data["paste_also"])))
        return f'<div class="memlab-finding">{"".join(parts)}</div>'

    def ledger(self) -> Table:
        """What the log states of memory."""
        stated = self.data.get("ledger", {}).items()
        rows = tuple((name.removesuffix("_gib"), show_gib(size)) for name, size in stated)
        return Table("What the log states of one GPU", ("term", "size"), rows)

    def _failure_html(self, number: int, failure: dict, whole: bool) -> str:
        head = words(failure["phase"])
        if whole:
            order = f"{number}. " if len(self.failures) > 1 else ""
            head = f"{order}{head} ({failure['confidence']} confidence)"
        parts = [_paragraph(head, doctor_sentence(failure))]
        parts += [f"<p>{html.escape(note)}</p>" for note in failure.get("notes", [])]
        shown = None if whole else SHOWN_LINES
        lines = [f"{line['line']}: {line['text']}" for line in failure.get("evidence", [])[:shown]]
        if lines:
            which = f" of failure {number}" if whole and len(self.failures) > 1 else ""
            # A group, not a region: a page with several findings would have several landmarks of one name.
            named = f'role="group" aria-label="lines of the log{which}" tabindex="0"'
            parts.append(f"<pre {named}>{html.escape(chr(10).join(lines))}</pre>")
        if failure.get("fixes"):
            parts.append(self.fixes(failure, None if whole else SHOWN_FIXES)._repr_html_())
        if failure.get("will_not_help"):
            useless = [(one["flag"], one["why"]) for one in failure["will_not_help"]]
            parts.append(_listed("What cannot help", useless))
        return "".join(parts)

    def summary(self) -> str:
        """One line: what ran out, or that nothing did."""
        if self.failures:
            return doctor_sentence(self.failures[0])
        spot = self.data.get("weak_spot")
        said = findings.without_failure(self.phase, self.data.get("enough", True), bool(self.data.get("ledger")))
        return said + (f"; weak spot: {spot}" if spot else "")

    def __str__(self) -> str:
        lines = []
        for failure in self.failures:
            lines += [f"{words(failure['phase'])}: {doctor_sentence(failure)}", str(self.fixes(failure))]
        text = "\n".join(lines) or capitalised(self.summary())
        return "\n".join(clean(line, len(line)) for line in text.split("\n"))

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/html": self.html(), "text/plain": str(self)}


def _paragraph(head: str, text: str) -> str:
    end = "" if text.endswith(".") else "."
    return f"<p><b>{html.escape(head)}.</b> {html.escape(capitalised(text))}{end}</p>"


def _listed(head: str, items: list[tuple[str, str]]) -> str:
    lines = "".join(f"<li><code>{html.escape(what)}</code>: {html.escape(why)}</li>" for what, why in items)
    return f"<p><b>{html.escape(head)}</b></p><ul>{lines}</ul>"


def words(phase: str) -> str:
    """A phase in words: ``weights_load`` is Weights load."""
    return _TITLES.get(phase) or capitalised(" ".join(_SPELT.get(word, word) for word in phase.split("_")))


def doctor_sentence(failure: dict) -> str:
    """The cause, and what was missing where the log tells it."""
    missing = failure.get("missing_gib")
    return failure["cause"] + ("" if missing is None else f" (missing: {show_gib(missing)})")


def change(fix: dict) -> str:
    """From what to what."""
    return findings.change(fix["flag"], fix.get("from"), fix.get("to"))


def gain(fix: dict) -> str:
    """What it frees on each GPU, where that is known."""
    return show_gib(fix["gains_gib"], signed=True) if "gains_gib" in fix else ""


def of(run: RunRecord) -> View | None:
    """The finding of a run: the one it keeps, else what its log lines show; None for a run that did not fail."""
    if run.outcome not in DIAGNOSED:
        return None
    kept = run.finding or doctor.finding(
        "\n".join(run.log), run.served_flags, run.model.shape, run.card, run.machine.total_gib
    )
    return View(without_none(kept))


def of_text(text: str, **known) -> View:
    """The finding of a log; ``known`` as for ``doctor.diagnose``."""
    return View(without_none(doctor.finding(text, **known)))
