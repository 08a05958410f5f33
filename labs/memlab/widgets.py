"""The control panel, a reader's guess and a quiz, in ipywidgets; in the book, which has no kernel, plain HTML.

Everything that a panel knows is in ``panel``; here it is drawn. A callback's exception is shown and raised again, so
that it fails a run from top to bottom as well.
"""

import asyncio
import base64
import functools
import html
import re
import signal
import textwrap
import time
import traceback
from dataclasses import dataclass

import ipywidgets as w

from memlab import clinic, finding_view, lab, panel, plots, recommend, record
from memlab.errors import MemlabError
from memlab.panel import Panel
from memlab.record import RunRecord, Traffic
from memlab.units import show_gib, show_tokens

RECORDED_RUNS = "../book/reference/recorded-runs.html"  # from a lab's page in the book
OOM_NOW = "../book/oom-now.html"
UNSET = ""  # in a Dropdown None means that nothing is chosen
DRAW_EVERY_S = 1.0
SAY_EVERY_S = 10.0

_STYLE = """<style>
.memlab-panel {max-width: 60em}
.memlab-panel .widget-html-content, .memlab-panel .jupyter-widgets:not(.mod-primary) {
  color: var(--jp-ui-font-color1, inherit)}
.memlab-panel.memlab-panel :focus-visible {outline: 2px solid var(--jp-ui-font-color1, currentColor) !important;
  outline-offset: 1px}
.memlab-panel.memlab-panel select {appearance: auto; background-image: none} /* ipywidgets' arrow is black on dark */
.memlab-panel .widget-html, .memlab-panel .widget-html-content {height: auto; line-height: 1.4; white-space: normal}
.memlab-panel figure {margin: 0} .memlab-panel figcaption {font-size: .9em}
.memlab-panel table {border-collapse: collapse; font-size: .92em}
.memlab-panel th, .memlab-panel td {padding: .15em .6em; text-align: right;
  border-bottom: 1px solid var(--jp-border-color2, #8886)}
.memlab-panel th:first-child, .memlab-panel td:first-child {text-align: left}
.memlab-panel .memlab-fold {text-align: left; font-weight: 600}
.memlab-panel .scroll {overflow-x: auto}
.memlab-panel .memlab-finding td {text-align: left; vertical-align: top}
.memlab-panel .memlab-finding pre {white-space: pre-wrap; overflow-wrap: anywhere; padding: .4em .7em;
  background: var(--jp-layout-color2, #8882)}
.memlab-note {font-size: .9em; margin: .3em 0 0 .4em}
.memlab-say {border-left: 4px solid currentColor; padding: .3em .7em; margin: .2em 0;
  background: var(--jp-layout-color2, #8882)}
.memlab-panel pre.memlab-command {user-select: all; white-space: pre-wrap; overflow-wrap: anywhere; margin: .2em 0;
  padding: .5em .7em; background: var(--jp-layout-color2, #8882);
  font-family: var(--jp-code-font-family, monospace); font-size: .9em}
.memlab-panel a {color: var(--jp-content-link-color, revert); text-decoration: underline}
.memlab-heard {position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%)}
.memlab-quiz .widget-radio-box label {height: auto; white-space: normal; line-height: 1.4}
</style>"""
# JupyterLab and Notebook take arrows and letters as commands to the notebook (the next cell, delete the cell) unless
# the element that has the focus says otherwise. And a screen reader reads out what changes in a place that was live
# before: ipywidgets sets neither attribute.
_KEYBOARD = """
if (!window.memlabKeyboard) {
  window.memlabKeyboard = true;
  document.addEventListener("focusin", ({target}) => {
    if (target.matches(".memlab-panel :is(select, [type=radio])")) target.dataset.lmSuppressShortcuts = "true";
    document.querySelectorAll(".memlab-live").forEach((place) => place.setAttribute("role", "status"));
  });
}
"""


def _wide() -> w.Layout:
    return w.Layout(width="100%")


def _styled(parts: list) -> w.VBox:
    """Parts under each other, with the style of a panel and a script that leaves the keyboard to its controls."""
    script = {"output_type": "display_data", "data": {"application/javascript": _KEYBOARD}, "metadata": {}}
    hidden = w.Layout(display="none")
    box = w.VBox([w.HTML(_STYLE, layout=hidden), w.Output(outputs=(script,), layout=hidden), *parts], layout=_wide())
    box.add_class("memlab-panel")
    return box


def _fold(title: str, parts: list) -> w.VBox:
    """Parts behind a button that opens and closes them; the keyboard does not reach the titles of an Accordion."""
    button = w.ToggleButton(description=title, layout=w.Layout(width="100%"))
    inside = w.VBox(parts, layout=_wide())

    def show(_=None) -> None:
        button.icon, button.tooltip = ("caret-down", "Open") if button.value else ("caret-right", "Closed")
        inside.layout.display = "" if button.value else "none"

    button.observe(show, "value")
    button.add_class("memlab-fold")
    show()
    return w.VBox([button, inside], layout=_wide())


def _say(text: str, head: str = "", role: str = "") -> str:
    head = f"<b>{html.escape(head)}</b> " if head else ""
    role = f' role="{role}"' if role else ""
    return f'<div class="memlab-say"{role}>{head}{html.escape(text)}</div>' if text else ""


def _announced(**layout: str) -> w.HTML:
    """A place whose changes are read out."""
    made = w.HTML(layout=w.Layout(**{"width": "100%", **layout}))
    made.add_class("memlab-live")
    return made


def _guarded(method):
    """A callback whose exception is shown in the panel, and raised again."""

    @functools.wraps(method)
    def call(self, *arguments):
        try:
            return method(self, *arguments)
        except Exception as error:
            self.show_error(error)
            raise

    return call


class ControlPanel(Panel):
    """The panel in a notebook: ``ControlPanel(lab, here, model, base)`` in the last line of a cell shows it.

    The arguments are those of ``panel.Panel``. ``result()`` gives the run of the current settings, whether the reader
    pressed Run or not; ``runs`` are all that were made.
    """

    _view: "_View | None" = None

    @property
    def view(self) -> "_View":
        """The widgets, made when they are first needed."""
        if self._view is None:
            self._view = _View(self)
        return self._view

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        if lab.in_book():
            return {"text/html": self.static_html(), "text/plain": self._text()}
        return self.view.box._repr_mimebundle_()

    def static_html(self) -> str:
        """For a page without a kernel: what a script of the book turns into a browser of recorded runs."""
        name, teaches = html.escape(self.lab), html.escape(" ".join(self.teaches))
        return (
            f'<div class="memlab-browser" data-lab="{name}" data-teaches="{teaches}">'
            "<p>In the lab, a control panel stands here: it changes the flags and starts vLLM. A page has no kernel to "
            f'start it with. <a href="{RECORDED_RUNS}">The recorded runs</a> show what it measured.</p></div>'
        )

    def _text(self) -> str:
        return f"Control panel of {self.lab}:\n{self.settings.flags.command(self.settings.model)}"

    def set(self, **changes) -> str:
        said = super().set(**changes)
        self._redraw()
        return said

    def reset(self) -> None:
        super().reset()
        self._redraw()

    def paste(self, text: str) -> str:
        said = super().paste(text)
        self._redraw()
        return said

    def changed(self) -> None:
        self._redraw()

    def _watch_result(self, live) -> None:
        self.live = live
        if self._view is not None:
            self._view.draw_live()

    def _redraw(self) -> None:
        if self._view is not None:
            self._view.refresh()


class _View:
    """The widgets of one panel. ``inputs`` are its controls by name."""

    def __init__(self, owner: ControlPanel):
        self.panel = owner
        self._refreshing = False
        self._drawn = self._said = 0.0
        self._draw_took = 0.0
        self._phase = ""
        self._shown: tuple | None = None
        self.notes = {name: w.HTML(layout=w.Layout(flex="1 1 16em", width="auto")) for name in panel.NAMES}
        self.inputs = {control.name: self._input(control) for control in owner.controls()}
        self.message = _announced()
        self.command = w.HTML(layout=_wide())
        self.predicted = w.HTML(layout=_wide())
        self.errors = w.Output(layout=_wide())
        replayed = owner.here.replayed
        self.run = w.Button(
            description="Show the recorded run" if replayed else "Run", icon="play", button_style="primary"
        )
        self.run.tooltip = "Show the recorded run of these settings" if replayed else "Start vLLM with these settings"
        self.stop = w.Button(
            description="Stop", icon="stop", disabled=True, tooltip="Stop vLLM and keep what was measured"
        )
        self.reset = w.Button(
            description="Back to the lab's settings", icon="undo", tooltip="Set every control as at first"
        )
        self.run.layout.width = self.stop.layout.width = self.reset.layout.width = "auto"
        self.pasted = w.Textarea(
            placeholder="vllm serve ..., docker run ..., or a compose file, systemd unit or Kubernetes container",
            description="",
            continuous_update=False,
            layout=w.Layout(width="auto", height="8em"),
        )
        self.pasted.tooltip = "A launch of vLLM; nothing of it is run"
        beside = w.Layout(width="auto", align_self="flex-start")
        self.take = w.Button(description="Set the controls from it", icon="paste", layout=beside)
        self.heard = _announced(width="auto", margin="0")
        self.ticker = _announced()
        self.live = w.HTML(layout=_wide())
        self.figure_of = w.RadioButtons(
            options=["Memory over time", "Ledger"], orientation="horizontal", tooltip="What the figure shows"
        )
        self.figure = w.HTML(layout=_wide())
        self.table = w.HTML(layout=_wide())
        self.removes = w.HBox(layout=w.Layout(flex_flow="row wrap", width="100%"))
        self.compared = w.VBox([self.figure_of, self.figure, self.table, self.removes], layout=_wide())
        self.run.on_click(self._run)
        self.stop.on_click(self._stop)
        self.reset.on_click(self._reset)
        self.take.on_click(self._take)
        self.figure_of.observe(self._redraw_figure, "value")
        self.box = self._box()
        self.refresh()

    def _box(self) -> w.VBox:
        taught = [self._row(name) for name in self.panel.teaches]
        flags = [self._row(name) for name in ("model", "card", *panel.FLAGS) if name not in self.panel.teaches]
        sent = [self._row(name) for name in panel.TRAFFIC if name not in self.panel.teaches]
        pasted = [self.pasted, self.take]
        folds = [_fold("All flags", flags), _fold("Traffic", sent), _fold("Paste a launch of vLLM", pasted)]
        buttons = w.HBox([self.run, self.stop, self.reset], layout=w.Layout(flex_flow="row wrap"))
        parts = [*taught, *folds, self.command, self.predicted, self.message, buttons]
        return _styled([*parts, self.errors, self.heard, self.ticker, self.live, self.compared])

    def _row(self, name: str) -> w.HBox:
        return w.HBox([self.inputs[name], self.notes[name]], layout=w.Layout(flex_flow="row wrap", width="100%"))

    def _input(self, control: panel.Control):
        common = {
            "description": control.name,
            "style": {"description_width": "15em"},
            "layout": w.Layout(width="30em", max_width="100%", flex="0 1 30em"),
            "tooltip": panel.HELP[control.name],
        }
        made = w.Combobox(continuous_update=False, **common) if control.free else w.Dropdown(**common)
        made.observe(functools.partial(self._changed, control.name), "value")
        return made

    # ---- what the reader does ----

    @_guarded
    def _changed(self, name: str, change) -> None:
        if self._refreshing:
            return
        if isinstance(self.inputs[name], w.Combobox):
            self.panel.enter(name, change["new"])
            self.refresh()
        else:
            self.panel.set(**{name: None if change["new"] == UNSET else change["new"]})

    @_guarded
    def _run(self, _) -> None:
        self.errors.outputs = ()
        self.panel.raise_error()
        self._drawn = self._said = 0.0
        self._phase = ""
        self.panel.start(self.draw_live, self._done)
        if self.panel.running:
            self._interrupt_stops()
        self.refresh()

    @_guarded
    def _stop(self, _) -> None:
        self.panel.stop()
        self.stop.disabled = True
        self.ticker.value = _say("The server is being stopped; what was measured is kept.", "Stopping.")

    @_guarded
    def _reset(self, _) -> None:
        self.panel.reset()

    @_guarded
    def _take(self, _) -> None:
        try:
            said = self.panel.paste(self.pasted.value)
        except MemlabError as error:
            self.message.value = _say(f"{error}. Nothing was changed.", "Not taken:", "alert")
            return
        self.refresh(said)

    def show_error(self, error: BaseException) -> None:
        """In the panel, and for whoever runs the notebook with no front end: an Output widget's state is searched."""
        lines = [f"{type(error).__name__}: {error}"]
        if not isinstance(error, MemlabError):
            lines = traceback.format_exception(error)
        shown = {"output_type": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": lines}
        self.errors.outputs = (shown,)

    def _interrupt_stops(self) -> None:
        """An idle kernel ignores its interrupt: while a run goes on, it stops the run."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no kernel, so nothing is idle: Ctrl-C arrives in wait()
            return

        def interrupted(number, frame) -> None:
            self.panel.stop()

        def look() -> None:
            now = signal.getsignal(signal.SIGINT)
            if self.panel.running:
                if now is signal.SIG_IGN:
                    signal.signal(signal.SIGINT, interrupted)
                loop.call_later(0.3, look)
            elif now is interrupted:
                signal.signal(signal.SIGINT, signal.SIG_IGN)

        loop.call_soon(look)

    # ---- drawing ----

    def refresh(self, said: str = "") -> None:
        """Show the panel's state in every widget."""
        owner = self.panel
        self._refreshing = True
        try:
            for control in owner.controls():
                self._show_control(control)
        finally:
            self._refreshing = False
        problem = owner.problem()
        parts = [_say(problem, "Cannot run:", "alert"), _say(said), _say(owner.word if not said else "")]
        parts += [_say(notice, "Note:") for notice in owner.notices()]
        self._put(self.message, "".join(parts))
        command = html.escape(owner.settings.flags.command(owner.settings.model or "MODEL"))
        note = '<p class="memlab-note">The command, to copy: one click selects it whole.</p>'
        self._put(self.command, f'<pre class="memlab-command" tabindex="0" aria-label="command">{command}</pre>{note}')
        self._put(self.predicted, "" if problem else _predicted_html(owner.prediction()))
        self.run.disabled = bool(problem) or owner.running
        self.stop.disabled = not owner.running
        self.stop.layout.display = "none" if owner.here.replayed else ""
        if not owner.running:
            self.ticker.value = ""
            self.live.value = ""
        self._draw_runs()

    @staticmethod
    def _put(target: w.HTML, value: str) -> None:
        if target.value != value:
            target.value = value

    def _show_control(self, control: panel.Control) -> None:
        owner, made, name = self.panel, self.inputs[control.name], control.name
        value, unset = owner.settings.value(name), owner.unset(name)
        if isinstance(made, w.Combobox):
            made.options = [panel.show(name, each) for each in control.values if each is not None]
            made.placeholder = "off" if control.off else unset
            if name not in owner.mistakes:
                made.value = panel.show(name, value)
        else:
            options = [(panel.show(name, each) or unset, UNSET if each is None else each) for each in control.values]
            if list(made.options) != options:
                made.options = options
            made.value = UNSET if value is None else value
        made.disabled = bool(control.off) or owner.running
        if name in owner.mistakes:
            text = f"Not read: {owner.mistakes[name]}"
        elif control.off:
            text = f"Off: {control.off}"
        else:
            text = panel.HELP[name]
            if value is not None and unset.startswith("vLLM's default:"):
                text += f"; {unset}"
        self._put(self.notes[name], f'<p class="memlab-note">{html.escape(text)}</p>')

    def draw_live(self) -> None:
        """The run that goes on: its plot about once a second, less often where drawing is slow; its state in words."""
        live, now = self.panel.live, time.monotonic()
        if live is None or not any(line.used_gib for line in live.timelines):
            return
        if now - self._drawn < max(DRAW_EVERY_S, 3 * self._draw_took):
            return
        self._drawn = now
        self.live.value = plots.live(live.timelines, live.phases).svg()
        self._draw_took = time.monotonic() - now
        phase = plots.words(live.phases[-1].name) if live.phases else "starting"
        used = [f"{show_gib(line.used_gib[-1])} now, {show_gib(max(line.used_gib))} at most" for line in live.timelines]
        if len(used) > 1:
            used = [f"GPU {number}: {each}" for number, each in enumerate(used)]
        text = f"{phase}, {live.seconds:.0f} s: {'; '.join(used)}"
        self.ticker.value = f'<div class="memlab-say" aria-hidden="true"><b>Running.</b> {html.escape(text)}</div>'
        if phase != self._phase or now - self._said > SAY_EVERY_S:
            self._phase, self._said = phase, now
            self.heard.value = f'<div class="memlab-heard">{html.escape(text)}</div>'

    def _done(self) -> None:
        if self.panel.error is not None:
            self.show_error(self.panel.error)
        self.refresh()
        if self.panel.error is None and self.panel.runs:
            self.heard.value = _say(lab.summary(self.panel.runs[-1]), "Ended.")

    @_guarded
    def _redraw_figure(self, _) -> None:
        self._shown = None
        self._draw_runs()

    def _draw_runs(self) -> None:
        runs, owner = list(self.panel.runs), self.panel
        shown = (self.figure_of.value, *(run.id for run in runs))
        if shown == self._shown:
            return
        self._shown = shown
        self.compared.layout.display = "" if runs else "none"
        if not runs:
            self.figure.value = self.table.value = ""
            self.removes.children = ()
            return
        make = plots.timeline if self.figure_of.value == "Memory over time" else plots.ledger
        try:
            self.figure.value = make(*runs, replayed=owner.here.replayed).html()
        except ValueError as error:  # nothing of these runs can be drawn: say why
            self.figure.value = _say(f"{error}.")
        self.table.value = runs_html(runs) + findings_html(runs)
        removes = []
        for number, run in enumerate(runs, 1):
            button = w.Button(description=f"Remove run {number}", icon="times", layout=w.Layout(width="auto"))
            button.tooltip = "Take it out of the comparison; its record stays on disk"
            button.on_click(functools.partial(self._remove, run))
            removes.append(button)
        self.removes.children = tuple(removes)

    @_guarded
    def _remove(self, run: RunRecord, _) -> None:
        self.panel.remove(run)


def _predicted_html(prediction) -> str:
    """The planner's ledger in a table that opens."""
    if prediction is None:
        return ""
    rows = []
    for name, value in prediction.ledger.known().items():
        band = prediction.bands.get(name)
        between = f"{show_gib(band[0])} to {show_gib(band[1])}" if band else ""
        rows.append((plots.words(name), show_gib(value), between))
    if prediction.kv_tokens is not None:
        rows.append(("KV cache, in tokens", show_tokens(prediction.kv_tokens), ""))
    table = plots.Table("Predicted before the start, by the planner", ("term", "predicted", "band"), tuple(rows))
    return f"<details><summary>What the planner predicts</summary>{table._repr_html_()}</details>"


def runs_table(runs: list[RunRecord]) -> plots.Table:
    """Runs side by side: what differs, the outcome, the peak of each rank, the pool."""
    rows = []
    for number, (run, label) in enumerate(zip(runs, plots.labels(*runs), strict=True), 1):
        peaks = [show_gib(rank.seen.peak_gib) for rank in run.ranks if rank.seen and rank.seen.peak_gib is not None]
        tokens = f"{run.kv.tokens:,}" if run.kv and run.kv.tokens else ""
        pool = run.stated.kv_cache_gib if run.stated else None
        cells = (run.outcome.replace("_", " "), ", ".join(peaks), tokens, "" if pool is None else show_gib(pool))
        rows.append((str(number), label or run.model.name, *cells))
    return plots.Table("Runs", ("run", "what differs", "outcome", "peak", "KV tokens", "KV cache"), tuple(rows))


def runs_html(runs: list[RunRecord]) -> str:
    """``runs_table`` with each run's record to download."""
    table = runs_table(runs)
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in (*table.header, "record"))
    body = []
    for row, run in zip(table.rows, runs, strict=True):
        data = base64.b64encode(record.dumps(run).encode()).decode()
        link = f'<a download="{html.escape(run.id)}.json" href="data:application/json;base64,{data}">download</a>'
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        body.append(f"<tr>{cells}<td>{link}</td></tr>")
        if run.error:
            body.append(f'<tr><td colspan="{len(table.header) + 1}">{html.escape(run.error[:400])}</td></tr>')
    rows = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table>{rows}</table></div>'


def findings_html(runs: list[RunRecord]) -> str:
    """What the doctor found of each run that failed."""
    found = [(number, finding_view.of(run)) for number, run in enumerate(runs, 1)]
    return "".join(
        f"<h4>Run {number}: what the doctor found</h4>{finding.html()}" for number, finding in found if finding
    )


# ---- a log of the reader's own ----


class DoctorPanel:
    """A place to paste a log of vLLM and read what ran out; ``diagnose`` does the same without a click.

    ``found`` is the last finding. The text stays in the kernel: nothing is sent anywhere.
    """

    def __init__(self):
        self.found: finding_view.View | None = None
        if lab.in_book():
            return
        wide = w.Layout(width="100%", height="10em")
        self.text = w.Textarea(placeholder="Paste the server's output here, whole", layout=wide)
        self.text.description, self.text.style.description_width = "Log", "4em"
        self.command = w.Text(placeholder="vllm serve ... (if the log does not show it)", layout=_wide())
        self.command.description, self.command.style.description_width = "Command", "4em"
        self.button = w.Button(description="Diagnose", icon="stethoscope", button_style="primary")
        self.button.on_click(self._clicked)
        self.said = _announced()
        self.shown = w.HTML(layout=_wide())

    def diagnose(self, text: str, command: str | None = None, **known) -> finding_view.View:
        """The finding of a log; ``known`` as for ``doctor.diagnose``, such as the card that the GPU played.

        Raises:
            MemlabError: for a command line that vLLM would refuse.
        """
        self.found = finding_view.of_text(text, command=command or None, **known)
        return self.found

    @_guarded
    def _clicked(self, _) -> None:
        if not self.text.value.strip():
            self.said.value = _say("Paste a log first: the output of vllm serve, from its start to the error.")
            return
        try:
            found = self.diagnose(self.text.value, self.command.value.strip())
        except MemlabError as error:
            self.shown.value, self.said.value = "", _say(f"{error}.")
            return
        self.said.value = _say(plots.capitalised(found.summary()) + ".", "Found.")
        self.shown.value = found.html()

    def show_error(self, error: BaseException) -> None:
        """An error of ours, where the reader looks."""
        self.said.value = _say(f"{type(error).__name__}: {error}", "This should not happen.")

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        if lab.in_book():
            link = f'<a href="{OOM_NOW}">OOM now</a>, or <code>memlab doctor FILE</code> in a terminal'
            return {
                "text/html": f"<p>In a notebook, a log is pasted here. In this page: {link}.</p>",
                "text/plain": "In a notebook, a log is pasted here.",
            }
        parts = [self.text, self.command, self.button, self.said, self.shown]
        return _styled(parts)._repr_mimebundle_(include=include, exclude=exclude)


# ---- the patients of a clinic ----


class Consultation:
    """The symptoms of a ward's patients, each with a choice of what it has; Commit hands the diagnoses to the ward.

    A choice left open is no diagnosis. In the book, which has no kernel, each patient's answer opens under it.
    """

    def __init__(self, ward: clinic.Ward):
        self.ward = ward
        if lab.in_book():
            return
        options = [("choose", None), *((finding_view.words(phase), phase) for phase in clinic.CHOICES)]
        self.choices = {
            name: w.Dropdown(
                options=options,
                value=None,
                description=name,
                tooltip=chart.patient.symptom,
                style={"description_width": "9em"},
                layout=w.Layout(width="24em", max_width="100%"),
            )
            for name, chart in ward.charts.items()
        }
        self.commit = w.Button(description="Commit", icon="lock")
        self.commit.on_click(self._committed)
        self.said = _announced()

    @_guarded
    def _committed(self, _) -> None:
        given = {name: choice.value for name, choice in self.choices.items() if choice.value and not choice.disabled}
        refused = []
        for name, phase in given.items():
            try:
                self.ward.guess(name, phase)
                self.choices[name].disabled = True
            except MemlabError as error:
                refused.append(str(error))
        counted = sum(chart.guess is not None for chart in self.ward.charts.values())
        text = f"{counted} of {len(self.choices)} diagnoses are committed."
        self.said.value = _say(" ".join([text, *(f"{reason}." for reason in refused)]))

    def show_error(self, error: BaseException) -> None:
        """An error of ours, where the reader looks."""
        self.said.value = _say(f"{type(error).__name__}: {error}", "This should not happen.")

    def _static_html(self) -> str:
        items = []
        for name, chart in self.ward.charts.items():
            found = clinic.diagnosis(self.ward.admit(name, on_phase=None))
            answer = f"<details><summary>What it has</summary><p>{html.escape(finding_view.words(found))}</p></details>"
            items.append(f"<li><b>{html.escape(name)}</b>: {html.escape(chart.patient.symptom)}{answer}</li>")
        return f"<ul>{''.join(items)}</ul>"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        if lab.in_book():
            return {"text/html": self._static_html(), "text/plain": str(self.ward.patients())}
        rows = []
        for name, choice in self.choices.items():
            symptom = w.HTML(html.escape(self.ward[name].patient.symptom), layout=w.Layout(flex="1 1 20em"))
            rows.append(w.HBox([choice, symptom], layout=w.Layout(flex_flow="row wrap")))
        return _styled([*rows, self.commit, self.said])._repr_mimebundle_(include=include, exclude=exclude)


# ---- a reader's guess ----


class Guess:
    """What a reader expects of some terms, in GiB, committed before the measurement is seen.

    Args:
        questions: a term of the ledger (``ledger.TERMS``) to its question.
    """

    def __init__(self, **questions: str):
        self.questions = questions
        self._fields: dict[str, w.Text] = {}
        if lab.in_book():
            return
        for term, question in questions.items():
            self._fields[term] = w.Text(
                description=plots.words(term),
                placeholder="GiB",
                continuous_update=False,  # else a click on Commit overtakes what was typed before it
                tooltip=question,
                style={"description_width": "7em"},
                layout=w.Layout(width="15em", max_width="100%"),
            )
        self._commit = w.Button(description="Commit", icon="lock")
        self._commit.on_click(self._committed)
        self._reply = _announced()

    @property
    def values(self) -> dict[str, float | None]:
        """The guesses in GiB; None where the reader gave none.

        Raises:
            MemlabError: for a text that is no size.
        """
        return {term: _size(term, self._fields[term].value) if self._fields else None for term in self.questions}

    def _committed(self, _) -> None:
        try:
            given = self.values
        except MemlabError as error:
            self._reply.value = _say(str(error), "Not read:", "alert")
            return
        for each in self._fields.values():
            each.disabled = True
        self._commit.description = "Committed"  # not disabled: the keyboard would lose its place in the notebook
        said = ", ".join(f"{plots.words(term)} {show_gib(value)}" for term, value in given.items() if value is not None)
        self._reply.value = _say(said or "no guess was given", "Committed:")

    def compare(self, run: RunRecord) -> plots.Table:
        """The guesses beside what was predicted and what the run measured, in GiB."""
        rows = []
        planned = plots.predicted(run)
        for term, guess in self.values.items():
            views = {view.view: view.term(term) for view in plots.views(run)}
            measured = views.get("stated") if views.get("stated") is not None else views.get("seen")
            cells = (guess, planned.term(term) if planned else None, measured)
            off = "" if None in (guess, measured) else show_gib(guess - measured, signed=True)
            rows.append((plots.words(term), *("" if each is None else show_gib(each) for each in cells), off))
        header = ("term", "your guess", "predicted", "measured", "yours less measured")
        return plots.Table("Your guess beside the measurement", header, tuple(rows))

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        asked = "".join(f"<li>{html.escape(question)}</li>" for question in self.questions.values())
        plain = "\n".join(self.questions.values())
        if lab.in_book():
            return {"text/html": f"<p>Write down, in GiB:</p><ol>{asked}</ol>", "text/plain": plain}
        rows = [
            w.HBox([field, w.HTML(html.escape(self.questions[term]))], layout=w.Layout(flex_flow="row wrap"))
            for term, field in self._fields.items()
        ]
        return _styled([*rows, self._commit, self._reply])._repr_mimebundle_()


def _size(term: str, text: str) -> float | None:
    text = text.strip().lower().removesuffix("gib").strip().replace(",", ".")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise MemlabError(f"{plots.words(term)}: {text!r} is no size; write GiB as a number, such as 12.5")
    return value


# ---- a goal ----


class GoalPanel:
    """Two limits to set, and the setting that the runs of a sweep recommend for them; ``advice`` has it as data.

    Args:
        runs: of a sweep.
        traffic: the load to judge by.
        ttft_p99_ms: the limit to begin with, of the 99th percentile of the time to first token.
        itl_p99_ms: the same of the inter-token latency.

    Raises:
        MemlabError: without runs.
    """

    def __init__(self, runs: list[RunRecord], traffic: Traffic, ttft_p99_ms: float, itl_p99_ms: float):
        self.runs, self.traffic = list(runs), traffic
        self.goal = recommend.Goal(ttft_p99_ms, itl_p99_ms)
        if lab.in_book():
            return
        self.ttft, self.itl = (self._field(name, value) for name, value in (("TTFT", ttft_p99_ms), ("ITL", itl_p99_ms)))
        self.said, self.shown = _announced(), w.HTML(layout=_wide())
        self._changed()

    @property
    def advice(self) -> recommend.Advice:
        """What the runs recommend for the goal as it is set now."""
        return recommend.recommend(self.runs, self.goal, self.traffic)

    def _field(self, name: str, value: float) -> w.BoundedFloatText:
        field = w.BoundedFloatText(
            value=value,
            min=1,
            max=3_600_000,
            description=f"p99 {name} at most, ms",
            tooltip=f"The 99th percentile of {name} in every load, in milliseconds",
            style={"description_width": "11em"},
            layout=w.Layout(width="19em", max_width="100%"),
        )
        field.observe(self._changed, "value")
        return field

    @_guarded
    def _changed(self, _=None) -> None:
        self.goal = recommend.Goal(self.ttft.value, self.itl.value)
        advice = self.advice
        self.said.value = _say(str(advice).partition("\n")[2])
        self.shown.value = advice.table()._repr_html_()

    def show_error(self, error: BaseException) -> None:
        """An error of ours, where the reader looks; what was recommended for other limits does not stay under it."""
        self.said.value = _say(f"{type(error).__name__}: {error}", "This should not happen.", "alert")
        self.shown.value = ""

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        if lab.in_book():
            advice = self.advice
            text = "".join(f"<p>{html.escape(line)}</p>" for line in str(advice).splitlines())
            return {"text/html": text + advice.table()._repr_html_(), "text/plain": str(advice)}
        fields = w.HBox([self.ttft, self.itl], layout=w.Layout(flex_flow="row wrap"))
        return _styled([fields, self.said, self.shown])._repr_mimebundle_()


# ---- a quiz ----


@dataclass(frozen=True)
class Answer:
    """One answer, and what it earns: for a wrong one, the misconception by its name and what is so instead."""

    text: str
    reply: str
    right: bool


class Quiz:
    """One question with answers to choose from; in the book each answer opens its reply.

    Args:
        text: the question; then each answer behind ``-``, the right one behind ``+``, with its reply indented under it.

    Raises:
        MemlabError: where not exactly one answer is right, or one has no reply.
    """

    def __init__(self, text: str):
        question, *answers = re.split(r"^([-+]) ", textwrap.dedent(text).strip(), flags=re.MULTILINE)
        marks, bodies = answers[::2], answers[1::2]
        found = []
        for mark, body in zip(marks, bodies, strict=True):
            answer, _, reply = body.partition("\n")
            found.append(Answer(answer.strip(), " ".join(reply.split()), mark == "+"))
        question = " ".join(question.split())
        if sum(answer.right for answer in found) != 1 or not all(answer.reply for answer in found):
            raise MemlabError(f"a quiz needs one right answer and a reply to each: {question}")
        answers = tuple(found)
        self.question, self.answers = question, answers
        if lab.in_book():
            return
        self.choice = w.RadioButtons(
            options=[(answer.text, number) for number, answer in enumerate(answers)],
            value=None,
            layout=_wide(),
            tooltip=question,
        )
        self.check = w.Button(description="Check", icon="check")
        self.reply = _announced()
        self.check.on_click(self._check)

    def _check(self, _) -> None:
        if self.choice.value is None:
            self.reply.value = _say("Choose an answer first.")
            return
        answer = self.answers[self.choice.value]
        self.reply.value = _say(answer.reply, "Right." if answer.right else "Not so.")

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        question = f"<p><b>{html.escape(self.question)}</b></p>"
        if lab.in_book():
            answers = "".join(
                f"<details><summary>{html.escape(a.text)}</summary>"
                f"<p>{'Right.' if a.right else 'Not so.'} {html.escape(a.reply)}</p></details>"
                for a in self.answers
            )
            html_ = f'<div class="memlab-quiz">{question}{answers}</div>'
            return {"text/html": html_, "text/plain": self.question}
        box = _styled([w.HTML(question, layout=_wide()), self.choice, self.check, self.reply])
        box.add_class("memlab-quiz")
        return box._repr_mimebundle_()
