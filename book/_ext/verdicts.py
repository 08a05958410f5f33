"""Verdicts on what people believe: data in book/verdicts.yml, shown where a page asks for one.

    ```{verdict} budget-is-a-limit
    ```

Each has a claim, a verdict (true, partly, false), what is so instead, and the measurement that settles it: ``holds``
lists comparisons of values in records, which are evaluated at every build. One that does not hold fails the build. The
versions that it was checked on are those of its records.
"""

import operator
import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import record_pages
from memlab.errors import RecordError

FILE = Path(__file__).resolve().parent.parent / "verdicts.yml"
WORDS = {"true": "True", "partly": "Partly true", "false": "Not so"}
VERSIONS = ("0.33", "0.26")  # what the book speaks of; one without a record is named as not checked
COMPARISON = re.compile(r"(?P<left>.+?)\s+(?P<sign><=|>=|<|>|=)\s+(?P<right>.+)")
SIGNS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "=": operator.eq}
TERM = re.compile(r"(?P<sign>[+-]?)\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<run>[\w.-]+)\s+(?P<key>[a-z]\S*))\s*")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """One belief. ``number`` is its place in the list of claims that the book answers, if it has one."""

    id: str
    claim: str
    verdict: str
    so: str
    holds: tuple[str, ...]
    number: int | None = None

    def records(self) -> list[str]:
        """Names of the records that it rests on, in order."""
        terms = [term for line in self.holds for side in sides(line)[::2] for term in terms_of(side)]
        return list(dict.fromkeys(run for _, run, _ in terms if run))


def sides(line: str) -> tuple[str, str, str]:
    match = COMPARISON.fullmatch(line.strip())
    if match is None:
        raise RecordError(f"{line!r} is no comparison of values in records: RUN key > RUN key + 0.5")
    return match.group("left", "sign", "right")


def terms_of(side: str) -> list[tuple[int, str | None, str]]:
    """A sum as (sign, run or None, key or number)."""
    found, at = [], 0
    while at < len(side):
        match = TERM.match(side, at)
        if match is None:
            raise RecordError(f"{side!r} is no sum of numbers and values in records")
        sign = -1 if match["sign"] == "-" else 1
        found.append((sign, match["run"], match["key"] or match["number"]))
        at = match.end()
    return found


def evaluate(line: str, value) -> bool:
    """Whether a comparison holds; ``value(run, key)`` looks a value up."""
    left, sign, right = sides(line)

    def total(side: str) -> float:
        return sum(s * (value(run, key) if run else float(key)) for s, run, key in terms_of(side))

    return SIGNS[sign](total(left), total(right))


def read(file: Path = FILE) -> dict[str, Verdict]:
    """The verdicts by id; none where the book has no such file.

    Raises:
        RecordError: for one that lacks a part, or whose verdict is no known word.
    """
    found = {}
    if not file.exists():
        return found
    for entry in yaml.safe_load(file.read_text(encoding="utf-8")) or []:
        try:
            verdict = Verdict(**{**entry, "verdict": str(entry["verdict"]).lower(), "holds": tuple(entry["holds"])})
        except (TypeError, KeyError) as error:
            raise RecordError(f"{file.name}: {entry} is no verdict ({error})") from error
        if verdict.verdict not in WORDS or not verdict.holds:
            raise RecordError(f"{file.name}, {verdict.id}: a verdict is {', '.join(WORDS)}, with what holds")
        found[verdict.id] = verdict
    return found


class VerdictBox(SphinxDirective):
    """An admonition: the claim, the verdict in a word, what is so, and what it rests on."""

    required_arguments = 1

    def run(self):
        library = self.env.app.memlab_records
        self.env.note_dependency(str(FILE))
        try:
            verdict = self.env.app.memlab_verdicts.get(self.arguments[0])
            if verdict is None:
                raise RecordError(f"no verdict {self.arguments[0]!r} in {FILE.name}")
            for line in verdict.holds:
                if not evaluate(line, library.value):
                    raise RecordError(f"verdict {verdict.id}: the records no longer bear it out: {line}")
            runs = [library.find(name) for name in verdict.records()]
        except (RecordError, ValueError) as error:
            logger.warning("%s", error, location=self.get_location(), type="record")
            return []
        for run in runs:
            self.env.note_dependency(str(library.path_of[run.id]))
        claim, messages = self.parse_inline(verdict.claim, lineno=self.lineno)
        title = nodes.title("", "", nodes.Text(f"{WORDS[verdict.verdict]}: “"), *claim, nodes.Text("”"), *messages)
        box = nodes.admonition("", title, classes=["memlab-verdict", f"verdict-{verdict.verdict}"])
        box += self.parse_text_to_nodes(verdict.so)
        box += self.checked(runs)
        return [box]

    @staticmethod
    def checked(runs) -> nodes.paragraph:
        versions = list(dict.fromkeys(run.engine.vllm for run in runs))
        missing = [v for v in VERSIONS if not any(version.startswith(f"{v}.") for version in versions)]
        text = f"Checked on vLLM {', '.join(versions)}"
        text += f"; not yet checked on {', '.join(missing)}." if missing else "."
        line = nodes.paragraph("", text + " Rests on ", classes=["memlab-checked"])
        for number, run in enumerate(runs):
            line += [nodes.Text(", " if number else ""), record_pages.link_to(run, run.id, run.where())]
        line += nodes.Text(".")
        return line


def read_verdicts(app) -> None:
    try:
        app.memlab_verdicts = read()
    except RecordError as error:
        raise ExtensionError(str(error)) from error


def setup(app):
    app.add_directive("verdict", VerdictBox)
    app.connect("builder-inited", read_verdicts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
