"""Recorded runs in the pages: every measured number and figure comes from a record in labs/records/.

    {record}`h200-eager kv.tokens`                             a value, linked to its record
    {record}`h200-graphs kv.tokens - h200-eager kv.tokens`     a difference
    ```{record-figure} ledger h200-eager h200-graphs           a function of memlab.plots, over records
    ```
    ```{record-figure} good steps-256 steps-1024               with options, where the function takes some
    :ttft-ms: 2000
    ```
    ```{record-finding} 3090-097                               what the doctor found of a run that failed
    ```
    ```{recorded-runs}                                         the page that shows every record
    ```

A record goes by its id or by a name that book/records.yml gives it. One that is missing, or that lacks the key, is a
warning, which fails the build.
"""

import os
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import yaml
from docutils import nodes
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "labs"))

from memlab import (  # noqa: E402
    comparisons,
    finding_view,
    flags,
    plots,
    rank_plots,
    record,
    schedule_plots,
    token_plots,
    traffic_plots,
    units,
)
from memlab.errors import RecordError  # noqa: E402

RECORDS = ROOT / "labs" / "records"
ALIASES = ROOT / "book" / "records.yml"
PAGE = "book/reference/recorded-runs"
FIGURES = {
    "timeline": plots.timeline,
    "ledger": plots.ledger,
    "moves": comparisons.moves,
    "activation": traffic_plots.activation,
    "allocator": traffic_plots.allocator,
    "by-load": traffic_plots.by_load,
    "changes": token_plots.changes,
    "dial": token_plots.dial,
    "first-tokens": schedule_plots.first_tokens,
    "gaps": schedule_plots.gaps,
    "good": token_plots.good,
    "pauses": schedule_plots.pauses,
    "pool": traffic_plots.pool,
    "ranks": rank_plots.ranks,
    "schedule": schedule_plots.schedule,
    "speeds": traffic_plots.speeds,
    "throughput": traffic_plots.throughput,
    "trace": traffic_plots.trace,
    "waits": traffic_plots.waits,
}
VALUE = re.compile(r"(?P<id>\S+)\s+(?P<key>\S+)(?:\s+[-−]\s+(?P<id2>\S+)\s+(?P<key2>\S+))?")

logger = logging.getLogger(__name__)


class Library:
    """The records, by id and by the names of book/records.yml."""

    def __init__(self):
        self.paths = sorted(path for path in RECORDS.rglob("*.json") if not path.name.endswith(".schema.json"))
        by_path = {path: record.read(path) for path in self.paths}
        self.records = {found.id: found for found in by_path.values()}
        self.path_of = {found.id: path for path, found in by_path.items()}
        self.aliases = yaml.safe_load(ALIASES.read_text(encoding="utf-8")) or {}

    def find(self, name: str) -> record.RunRecord:
        try:
            return self.records[self.aliases.get(name, name)]
        except KeyError:
            raise RecordError(f"no recorded run {name!r}: see labs/records/ and book/records.yml") from None

    def by_lab(self) -> dict[str, list[record.RunRecord]]:
        """The runs of each lab, alike ones beside each other."""
        found: dict[str, list[record.RunRecord]] = {}
        for run in sorted(self.records.values(), key=lambda run: (run.lab, run.machine.name, run.card or "", run.id)):
            found.setdefault(run.lab, []).append(run)
        return found

    def value(self, name: str, key: str):
        """What a record holds under a dotted key, such as ``stated.kv_cache_gib`` or ``latency.ttft_ms.p50``."""
        found = self.find(name)
        for part in key.split("."):
            if isinstance(found, dict):
                found = found.get(part)
            elif isinstance(found, list) and part.isdigit():
                found = found[int(part)] if int(part) < len(found) else None
            else:
                found = getattr(found, part, None)
        if found is None or callable(found):
            raise RecordError(f"the recorded run {name!r} has no value under {key!r}")
        return found


def show(key: str, value, signed: bool = False) -> str:
    """A value with its unit, which the key names."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, int | float):
        return str(value)
    if re.search(r"_gib\b", key):
        return units.show_gib(value, signed)
    sign = "−" if value < 0 else "+" if signed else ""
    if re.search(r"_ms\b", key):
        return sign + units.show_seconds(abs(value) / 1000)
    if key.endswith("tokens_per_s"):
        return f"{sign}{abs(value):,.0f} tokens/s"
    if re.search(r"(_s|\bseconds)$", key):
        return sign + units.show_seconds(abs(value))
    if re.search(r"(tokens|max_model_len)$", key):
        return sign + units.show_tokens(abs(round(value)))
    return sign + (f"{abs(value):,}" if isinstance(value, int) else f"{abs(value):g}")


def anchor(id: str) -> str:
    return nodes.make_id(id)


def link_to(run: record.RunRecord, text: str, tip: str, *classes: str) -> addnodes.pending_xref:
    """A link to a record's section."""
    link = addnodes.pending_xref("", refdomain="", reftype="record", reftarget=run.id, reftitle=tip)
    # A line of a log keeps its dashes and quotes.
    link += nodes.inline("", text, classes=list(classes), support_smartquotes=False)
    return link


class RecordValue(SphinxRole):
    def run(self):
        match = VALUE.fullmatch(self.text.strip())
        library = self.env.app.memlab_records
        try:
            if match is None:
                raise RecordError(f"{self.text!r} is neither 'ID key' nor 'ID key - ID key'")
            shown, runs = self.read(library, match)
        except RecordError as error:
            logger.warning("%s", error, location=self.get_location(), type="record")
            return [nodes.problematic(self.rawtext, self.rawtext)], []
        for found in runs:
            self.env.note_dependency(str(library.path_of[found.id]))
        where = " less ".join(f"{found.where()} ({found.id})" for found in runs)
        return [link_to(runs[0], shown, where, "record-value")], []

    @staticmethod
    def read(library: Library, match) -> tuple[str, list[record.RunRecord]]:
        name, key, name2, key2 = match.group("id", "key", "id2", "key2")
        value = library.value(name, key)
        if name2 is None:
            return show(key, value), [library.find(name)]
        other = library.value(name2, key2)
        if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in (value, other)):
            raise RecordError(f"{key} and {key2} have no difference: they are no numbers")
        return show(key, value - other, signed=True), [library.find(name), library.find(name2)]


def resolve_record(app, env, node, content):
    """The link from a value to its record's section."""
    if node.get("reftype") != "record":
        return None
    return make_refnode(app.builder, node["refdoc"], PAGE, anchor(node["reftarget"]), content, node["reftitle"])


class record_plot(nodes.General, nodes.Element):
    """A figure still to be drawn, for whichever builder asks."""


class RecordFigure(SphinxDirective):
    required_arguments = 1
    optional_arguments = 9
    option_spec = {"ttft-ms": float, "tpot-ms": float, "only": str}

    def run(self):
        function, *names = self.arguments
        options = {name.replace("-", "_"): value for name, value in self.options.items()}
        library = self.env.app.memlab_records
        try:
            if function not in FIGURES or not names:
                raise RecordError(f"a record-figure is one of {', '.join(FIGURES)} and the records that it shows")
            runs = [library.find(name) for name in names]
            plot = FIGURES[function](*runs, **options)
        except (RecordError, TypeError, ValueError) as error:
            logger.warning("%s", error, location=self.get_location(), type="record")
            return []
        for found in runs:
            self.env.note_dependency(str(library.path_of[found.id]))
        ids = [found.id for found in runs]
        return [record_plot("", function=function, runs=ids, options=options, alt=plot.alt)]


class RecordFinding(SphinxDirective):
    required_arguments = 1

    def run(self):
        library = self.env.app.memlab_records
        try:
            found = library.find(self.arguments[0])
            finding = finding_view.of(found)
            if finding is None:
                raise RecordError(f"{self.arguments[0]} did not fail: there is no finding to show")
        except RecordError as error:
            logger.warning("%s", error, location=self.get_location(), type="record")
            return []
        self.env.note_dependency(str(library.path_of[found.id]))
        caption = nodes.paragraph("", "", nodes.emphasis("", f"What the doctor says of this run: {found.where()}."))
        return [caption, nodes.raw("", finding.html(), format="html")]


class DrawFigures(SphinxPostTransform):
    """Inline SVG with its table for HTML; a picture with its alt text and caption for any other builder."""

    default_priority = 9

    def run(self, **kwargs):
        for number, node in enumerate(list(self.document.findall(record_plot)), 1):
            runs = [self.app.memlab_records.find(id) for id in node["runs"]]
            plot = FIGURES[node["function"]](*runs, **node["options"])
            node.replace_self(
                self.html(plot, number) if self.app.builder.format == "html" else self.picture(plot, number)
            )

    def html(self, plot, number: int):
        return nodes.raw("", plot.html(uid=f"figure-{number}"), format="html")

    def picture(self, plot, number: int):
        name = f"{self.env.docname.replace('/', '-')}-{number}.png"
        path = Path(self.app.outdir) / "record-figures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        plot.save(path)
        uri = os.path.relpath(path, self.app.srcdir)
        self.env.images.add_file(self.env.docname, uri)
        image = nodes.image(uri=uri, alt=plot.alt, candidates={"*": uri})
        return nodes.figure("", image, nodes.caption("", plot.caption))


# ---- the page of all records ----


class folded(nodes.General, nodes.Element):
    """What opens under a line, of a run whose figures a script adds there."""


def open_folded(self, node) -> None:
    self.body.append(self.starttag(node, "details", **{"data-run": node["run"]}))
    self.body.append(f"<summary>{self.encode(node['summary'])}</summary>")


def close_folded(self, node) -> None:
    self.body.append("</details>")


def pass_through(self, node) -> None:
    pass


def table(header, rows, *classes: str) -> nodes.table:
    """A table of text or of nodes; the first column heads its row."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1, stub=number == 0) for number in range(len(header))))
    group["cols"] = len(header)
    body = [nodes.row("", *(entry(cell) for cell in row)) for row in rows]
    group += [nodes.thead("", nodes.row("", *(entry(cell) for cell in header))), nodes.tbody("", *body)]
    return nodes.table("", group, classes=["memlab-table", *classes])


def entry(cell) -> nodes.entry:
    return nodes.entry("", cell if isinstance(cell, nodes.Node) else nodes.paragraph("", cell))


def key_flags(run: record.RunRecord) -> str:
    given = {name: value for name, value in run.flags.given.items() if name not in ("load_format", "seed", "extra")}
    return ", ".join(plots.fact(name, value) for name, value in given.items())


def traffic_of(run: record.RunRecord) -> str:
    """What was sent; several loads in their order."""
    sent = run.sent if isinstance(run.sent, list) else [run.sent] if run.sent else []
    return "; then ".join(load.in_words() for load in sent) or "none"


def command_of(run: record.RunRecord) -> str:
    """The line that starts the same server, with the variables that it was given."""
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in run.variables.items())
    return variables + run.served_flags.command(run.model.name)


def neighbour_in_words(neighbour: record.Neighbour) -> str:
    """What another process on the GPU did."""
    when = "when the server is ready" if neighbour.comes == "when_ready" else "before the server"
    ends = f", ends when {neighbour.leaves_in.replace('_', ' ')} begins" if neighbour.leaves_in else ""
    return f"comes {when} and leaves {units.show_gib(neighbour.leaves_free_gib)} free{ends}"


def settings_of(runs: list[record.RunRecord]) -> dict[str, dict[str, str]]:
    """What was asked for by id, with ``repeat``: the which of the runs with the same settings, in the order of time.

    A record's own count is of one environment, and starts at 1 again where a later run had another.
    """
    every = {}
    counts = Counter()
    for run in sorted(runs, key=lambda run: (run.recorded_at, run.id)):
        every[run.id] = settings(run)
        alike = tuple(every[run.id].items())
        counts[alike] += 1
        every[run.id]["repeat"] = str(counts[alike])
    return every


def settings(run: record.RunRecord) -> dict[str, str]:
    """What was asked for, in words by name: the model, where it ran, the flags as vLLM fills them in, the traffic."""
    length = record.model_max_len(run)
    engine = run.engine
    resolved = record.memory_flags(run.served_flags, run.machine, engine.backend, engine.vllm, length, run.card)
    order = [field.name for field in flags.MODELLED]
    known = {name: resolved[name] for name in sorted(resolved, key=lambda n: order.index(n) if n in order else 99)}
    return {
        "model": run.model.name,
        "machine": run.machine.hardware or "CPU backend",
        "card": run.card or "none",
        "vLLM": engine.vllm,
        **{name: setting(name, value) for name, value in known.items()},
        "instruments": " ".join(run.instruments) or "none",
        "variables": " ".join(f"{name}={value}" for name, value in run.variables.items()) or "none",
        "neighbour": neighbour_in_words(run.neighbour) if run.neighbour else "none",
        "traffic": traffic_of(run),
    }


def setting(name: str, value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "unset"
    if isinstance(value, list):
        return " ".join(value) or "none"
    return units.show_gib(units.to_gib(value)) if name == "kv_cache_memory_bytes" else str(value)


def in_words(name: str, value: str) -> str:
    """A setting where its value alone would not say what it is of."""
    if name in ("model", "machine", "traffic"):
        return value
    if name == "card":
        return "no played card" if value == "none" else f"playing {value}"
    if name == "enforce_eager":
        return "eager" if value == "on" else "CUDA graphs"
    return f"{name} {value}"


def titles(runs: list[record.RunRecord]) -> dict[str, str]:
    """A title for each run by id: what one looks for first, and further settings until no two titles are the same."""
    every = settings_of(runs)
    names = list(dict.fromkeys(name for each in every.values() for name in each))
    chosen = {}
    for run in runs:
        played = ["card"] if run.card else []
        planned = ["gpu_memory_utilization", "enforce_eager"] if run.machine.gpu else []
        chosen[run.id] = ["model", "machine", *played, "vLLM", *planned]

    def title(id: str) -> str:
        return ", ".join(in_words(name, every[id].get(name, "unset")) for name in chosen[id])

    while True:
        alike: dict[str, list[str]] = {}
        for id in chosen:
            alike.setdefault(title(id), []).append(id)
        grown = False
        for ids in alike.values():
            values = {name: {every[id].get(name) for id in ids} for name in names if name not in chosen[ids[0]]}
            telling = next((name for name in values if len(values[name]) > 1), None)
            if telling:
                grown = True
                for id in ids:
                    chosen[id].append(telling)
        if not grown:
            return {id: title(id) for id in chosen}


class RecordedRuns(SphinxDirective):
    """The runs of each lab: an overview, and a section a run, whose body opens."""

    def run(self):
        library = self.env.app.memlab_records
        self.env.note_dependency(str(ALIASES))
        for path in library.paths:
            self.env.note_dependency(str(path))
        if not library.records:
            return [nodes.paragraph("", "No run is recorded yet.")]
        found = []
        named = titles([run for runs in library.by_lab().values() for run in runs])  # of one page, and so of all labs
        for lab, runs in library.by_lab().items():
            section = nodes.section("", nodes.title("", f"Lab {lab}"), ids=[f"lab-{anchor(lab)}"])
            section += self.overview(runs)
            section += [self.section(run, named[run.id], library) for run in runs]
            found.append(section)
        return found

    def overview(self, runs) -> nodes.table:
        rows = []
        for run in runs:
            played = f" playing {run.card}" if run.card else ""
            link = link_to(run, (run.machine.gpu or "CPU backend") + played, run.id)
            peak = run.seen.peak_gib if run.seen else None
            rows.append(
                (
                    nodes.paragraph("", "", link),
                    run.engine.vllm,
                    run.model.name,
                    key_flags(run),
                    run.outcome.replace("_", " "),
                    "" if peak is None else units.show_gib(peak),
                )
            )
        return table(("machine", "vLLM", "model", "flags given", "outcome", "peak"), rows)

    def section(self, run: record.RunRecord, title: str, library: Library) -> nodes.section:
        section = nodes.section("", nodes.title("", title), ids=[anchor(run.id)], classes=["memlab-run"])
        if run.error:
            section += nodes.paragraph("", f"Outcome: {run.outcome.replace('_', ' ')}. {run.error}")
        body = folded("", summary="Ledger, command, facts and log", run=run.id)
        ledger = plots.ledger_table(run)
        if ledger.rows:
            body += table(ledger.header, ledger.rows, "memlab-numbers")
        if len(run.ranks) > 1:
            ranks = rank_plots.table(run)
            body += table(ranks.header, ranks.rows, "memlab-numbers")
        body += self.command(run)
        body += table(("of this run", "value"), self.facts(run))
        if run.log:
            text = "\n".join(run.log)
            body += nodes.literal_block(text, text, language="text", classes=["memlab-log"])
        file = "/" + library.path_of[run.id].relative_to(ROOT).as_posix()
        download = addnodes.download_reference("", "", refdoc=self.env.docname, reftarget=file, reftype="download")
        download += nodes.literal("", f"{run.id}.json")
        body += nodes.paragraph("", "Download the record: ", download)
        section += body
        return section

    @staticmethod
    def command(run: record.RunRecord) -> nodes.literal_block:
        text = command_of(run)
        return nodes.literal_block(text, text, language="bash")

    def facts(self, run: record.RunRecord) -> list[tuple[str, str]]:
        machine, engine = run.machine, run.engine
        hardware = f"{machine.gpu_count} × {machine.gpu}" if machine.gpu else f"{machine.cpu_cores} CPU cores"
        driver = [f"{name} {value}" for name, value in (("driver", machine.driver), ("CUDA", machine.cuda)) if value]
        parts = [
            ("hardware", ", ".join([hardware, *driver])),
            ("memory", "" if machine.total_gib is None else units.show_gib(machine.total_gib)),
            ("engine", f"vLLM {engine.vllm}, torch {engine.torch}, Python {engine.python}"),
            ("runner and attention", ", ".join(filter(None, [engine.runner, engine.attention]))),
            ("environment", ", ".join(f"{name}={value}" for name, value in engine.environment.items())),
            ("emulated card", run.card or ""),
            ("weights", run.model.load_format),
            ("KV cache", units.show_tokens(run.kv.tokens) if run.kv and run.kv.tokens else ""),
            ("traffic", traffic_of(run) if run.sent else ""),
            ("neighbour on the GPU", neighbour_in_words(run.neighbour) if run.neighbour else ""),
            ("recorded", f"{run.recorded_at}, repeat {run.repeat}"),
            ("slowed by", ", ".join(run.instruments)),
            ("id", run.id),
        ]
        return [(name, value) for name, value in parts if value]


def read_records(app) -> None:
    try:
        app.memlab_records = Library()
    except RecordError as error:
        raise ExtensionError(str(error)) from error


def setup(app):
    # The labs in the book replay recorded runs: building it never starts a server, whatever the environment asks for. A
    # panel has no kernel behind it there: it leaves its place to run_browser.
    os.environ.update(MEMLAB_MODE="replay", MEMLAB_BOOK="1")
    app.add_role("record", RecordValue())
    app.add_directive("record-figure", RecordFigure)
    app.add_directive("record-finding", RecordFinding)
    app.add_directive("recorded-runs", RecordedRuns)
    app.add_node(record_plot)
    app.add_node(folded, html=(open_folded, close_folded), latex=(pass_through, pass_through))
    app.add_post_transform(DrawFigures)
    app.connect("builder-inited", read_records)
    app.connect("missing-reference", resolve_record)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
