"""With the keyboard alone, in JupyterLab: lab 1 from its first cell to its last quiz, a server started and stopped."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

from live_vllm import vllm_processes, wait_until
from memlab import lab
from memlab.flags import ServeFlags
from memlab.panel import FLAGS, Panel
from memlab.record import RunRecord, Traffic
from memlab.units import show_gib
from memlab.widgets import Quiz
from test_book import browser, copy_tracked, open_one  # noqa: F401  (browser is a fixture)
from test_setup import Environment, load

RUN = "Show the recorded run"
FOCUSED = """() => {
    const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
    const page = document.querySelector(".jp-WindowedPanel-outer").getBoundingClientRect();
    return {
        name: (at.labels?.[0]?.innerText || at.getAttribute("aria-label") || at.innerText || "").trim(),
        value: at.matches("select") ? at.selectedOptions[0].text : at.value,
        cell: Number(at.closest(".jp-Cell")?.dataset.windowedListIndex ?? -1),
        isCell: at.matches(".jp-Cell"),
        inPanel: at.matches(".memlab-panel *"),
        outlined: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
        onScreen: box.bottom > page.top && box.top < page.bottom,
    };
}"""


class Reader:
    """Acts by keys alone; what stands on the page is only read."""

    def __init__(self, tab, file: Path):
        self.tab, self.file = tab, file
        self.ids = list(self.saved())
        folded = [cell.metadata.get("jupyter", {}).get("source_hidden") for cell in self.saved().values()]
        self.folded = {number for number, hidden in enumerate(folded) if hidden}

    def saved(self) -> dict:
        """The cells on disk by their ids."""
        return {cell.id: cell for cell in nbformat.read(self.file, as_version=4).cells}

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)

    def at(self) -> dict:
        return self.tab.evaluate(FOCUSED)

    def cell(self, name: str):
        return self.tab.locator(f".jp-Cell[data-windowed-list-index='{self.ids.index(name)}']")

    def go_to(self, cell: str) -> None:
        """Out of a panel with Shift+Tab, then by arrows from cell to cell; they pass over cells that are folded."""
        for _ in range(60):
            if self.at()["isCell"]:
                break
            self.press("Shift+Tab")
        start, wanted = self.at()["cell"], self.ids.index(cell)
        step, key = (1, "ArrowDown") if start < wanted else (-1, "ArrowUp")
        for number in range(start + step, wanted + step, step):
            if number not in self.folded:
                self._press_in_cell(key, number)

    def run(self, first: str, last: str) -> None:
        """The cells from ``first`` to ``last`` with Shift+Enter; waits for the last one's output."""
        self.go_to(first)
        for number in range(self.ids.index(first), self.ids.index(last) + 1):
            self._press_in_cell("Shift+Enter", number + 1)
        self.cell(last).locator(".jp-OutputArea-output").first.wait_for()
        assert not self.cell(last).get_by_text("Traceback").count(), self.cell(last).inner_text()

    def _press_in_cell(self, key: str, leads_to: int) -> None:
        self.press(key)
        self.tab.locator(f".jp-Cell:focus[data-windowed-list-index='{leads_to}']").wait_for()

    def tab_to(self, name: str, key: str = "Tab") -> list[str]:
        """With Tab to the control of this name; returns the names on the way. Each control shows that it has focus."""
        passed = []
        while len(passed) < 40:
            self.press(key)
            at = self.at()
            assert not at["inPanel"] or (at["outlined"] and at["onScreen"]), f"the focus is not seen: {at}"
            if at["name"] == name:
                return passed
            passed.append(at["name"])
        raise AssertionError(f"{key} does not lead to {name}, but over {passed}")

    def see_command(self, argument: str) -> None:
        """Wait until the panel has taken a change, and is redrawn."""
        self.cell("panel").locator(".memlab-command", has_text=f" {argument}").wait_for()
        self.tab.get_by_text("| Idle").wait_for()

    def heard(self, cell: str, text: str | re.Pattern) -> str:
        """What is read out: the live region of a cell's panel that comes to hold ``text``."""
        region = self.cell(cell).get_by_role("status").filter(has_text=text)
        region.wait_for(state="attached")  # what is only for the ear has no size
        return " ".join(region.inner_text().split())


@pytest.fixture
def reader(request, browser, tmp_path, monkeypatch):  # noqa: F811
    """Before a copy of the lab, in the JupyterLab that ``scripts/lab --replay`` starts, with no settings of a user.
    A test's parameter is another mode."""
    copy_tracked(tmp_path, "labs")
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    scripts_lab = load("lab")
    monkeypatch.setattr(scripts_lab, "ROOT", tmp_path)
    environment, servers = Environment(Path(sys.prefix)), []
    try:
        variables = environment.variables(MEMLAB_MODE=getattr(request, "param", "replay"))
        port, token = scripts_lab.start_jupyterlab(environment, variables, servers)
        tab = open_one(browser, f"http://127.0.0.1:{port}/lab/tree/01-ledger.ipynb?token={token}")
        tab.set_default_timeout(60_000)
        tab.locator(".jp-Cell:focus").wait_for()
        tab.get_by_text("| Idle").wait_for()  # before its kernel is there, a cell that is run is passed over
        yield Reader(tab, tmp_path / "labs" / "01-ledger.ipynb")
        tab.close()
    finally:
        scripts_lab.stop(servers)


def panel_of_the_lab() -> Panel:
    base = ServeFlags(gpu_memory_utilization=0.25, max_model_len=32768, enforce_eager=True)
    return Panel("01-ledger", lab.here("replay"), "llama-3.1-8b", base, Traffic(8000, 64, 8))


def recorded(**changes) -> RunRecord:
    """The record of the lab's settings, with some changed."""
    panel = panel_of_the_lab()
    assert panel.set(**changes) == "", "these settings are recorded"
    return panel.result()


@pytest.mark.browser
def test_lab_1_is_completed_with_the_keyboard_alone(reader):
    first, second, third = recorded(), recorded(enforce_eager=False), recorded(max_num_batched_tokens=2048)

    reader.run("text-01", "guess")
    reader.go_to("guess")
    reader.tab_to("weights")
    reader.tab.keyboard.type("16")
    reader.tab_to("peak")
    reader.tab.keyboard.type("40.5 GiB")
    reader.tab_to("Commit")
    reader.press("Enter")
    assert reader.heard("guess", "Committed:") == "Committed: weights 16.00 GiB, peak 40.50 GiB"
    reader.run("text-09", "prediction")

    reader.go_to("panel")
    reader.tab_to(RUN)
    reader.press("Enter")
    assert_is_read_out(reader, first)
    reader.run("text-10", "reconcile")

    reader.go_to("panel")
    reader.tab_to("enforce_eager")
    reader.press("ArrowUp")
    assert reader.at()["value"] == "off"
    reader.see_command("--no-enforce-eager")
    reader.tab_to(RUN)
    reader.press("Space")
    assert_is_read_out(reader, second)
    reader.run("text-17", "compare")

    reader.go_to("panel")
    reader.tab_to("Back to the lab's settings")
    reader.press("Enter")
    reader.see_command("--enforce-eager")
    reader.tab_to("All flags", "Shift+Tab")
    reader.press("Space")
    controls = panel_of_the_lab().controls()
    folded = {each.name for each in controls[3:] if each.name in ("model", "card", *FLAGS) and not each.off}
    assert folded == set(reader.tab_to("Traffic")), "every control under All flags that is on, and no other"
    reader.tab_to("max_num_batched_tokens", "Shift+Tab")
    reader.tab.keyboard.type("2048")
    assert reader.at()["value"] == "2048"
    reader.see_command("--max-num-batched-tokens 2048")
    reader.tab_to(RUN)
    reader.press("Enter")
    assert_is_read_out(reader, third)
    reader.run("text-20", "quiz-flag")

    reader.go_to("text-checks")
    for quiz in ("quiz-when", "quiz-sum", "quiz-flag"):
        answer(reader, quiz)

    reader.press("Control+s")
    reader.tab.locator(".lm-TabBar-tab.jp-mod-dirty").wait_for(state="detached")
    outputs = {name: cell.outputs for name, cell in reader.saved().items() if cell.cell_type == "code"}
    assert not [each for found in outputs.values() for each in found if each.output_type == "error"]
    assert lab.summary(first) in outputs["first-run"][0].text
    assert lab.summary(second) in outputs["second-run"][0].text
    compared = outputs["guessed"][0].data["text/html"]
    for guess, measured in ((16, first.stated.weights_gib), (40.5, first.seen.peak_gib)):
        assert show_gib(measured) in compared
        assert show_gib(guess - measured, signed=True) in compared


def assert_is_read_out(reader, run: RunRecord) -> None:
    assert reader.heard("panel", show_gib(run.seen.peak_gib)) == f"Ended. {lab.summary(run)}"
    reader.cell("panel").get_by_role("link", name="download").and_(
        reader.tab.locator(f"[download='{run.id}.json']")
    ).wait_for()


def answer(reader, cell: str) -> None:
    """One answer after the other until one is right; each wrong one is told its misconception."""
    quiz = eval(reader.saved()[cell].source, {"Quiz": Quiz})
    reader.tab_to(quiz.answers[0].text)
    reader.press("Space")
    for given, following in zip(quiz.answers, [*quiz.answers[1:], None], strict=True):
        reader.tab_to("Check")
        reader.press("Enter")
        assert reader.heard(cell, given.reply) == f"{'Right.' if given.right else 'Not so.'} {given.reply}"
        if given.right:
            return
        reader.tab_to(given.text, "Shift+Tab")
        reader.press("ArrowDown")
        assert reader.at()["name"] == following.text


@pytest.mark.live
@pytest.mark.browser
@pytest.mark.timeout(300)
@pytest.mark.parametrize("reader", ["live"], indirect=True)
def test_a_server_is_started_and_stopped_with_the_keyboard_alone(reader):
    reader.run("text-01", "guess")
    reader.go_to("panel")
    reader.tab_to("Run")
    reader.press("Enter")
    reader.heard("panel", re.compile("^starting, "))
    reader.tab_to("Stop")
    reader.press("Enter")
    assert reader.heard("panel", "Ended.").startswith("Ended. stopped, peak ")
    wait_until(lambda: vllm_processes() == [], 30, "the server is left")
    reader.tab_to("Run", "Shift+Tab")
    assert reader.at()["inPanel"], "the keyboard has not lost its place"
