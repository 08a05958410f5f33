"""The page "The doctor": in a browser, memlab's own modules find what they find here, and nothing leaves the tab."""

import functools
import gzip
import http.server
import json
import threading
from pathlib import Path

import pytest

from memlab import doctor, page
from test_book import axe_findings, browser, faults, open_one, open_tab, tab_to  # noqa: F401
from test_in_page import pages  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "tests" / "data" / "vllm_logs"
PAGE = "book/the-doctor"
WAIT_MS = 60_000

COMPARED = (
    "h200-0.33.0-rtx-3090-pool-too-small",  # fixes with and without a gain
    "h200-0.33.0-rtx-3090-oom",  # another process, and a harmless line
    "h200-0.33.0-rtx-3090-served",  # no failure
    "vllm-13882-rtx4060-negative-kv",
    "vllm-34643-orphans-logprobs-a10g",
    "vllm-40887-flashinfer-autotune-benign",
)
HOSTILE = (
    "ValueError: Free memory on device cuda:0 (1.0/24.0 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 21.6 GiB). <img src=x onerror=alert(1)></pre><script>alert(2)</script> Decrease GPU memory utilization"
)
SECRET = "a-secret-of-this-log"


# ---- what the page calls, without a page ----


def called(name: str, **arguments) -> dict:
    return json.loads(page.call(name, json.dumps(arguments)))


def test_the_page_is_told_what_the_command_line_prints(tmp_path):
    log = LOGS / f"{COMPARED[0]}.log"
    found = doctor.diagnose(log.read_text())
    answer = called("diagnose", log=str(log))["answer"]
    assert answer["finding"] == json.loads(json.dumps(found.to_dict())) and answer["text"] == doctor.report(found)
    assert answer["entries"] == {"max_model_len_exceeds_kv": "A request of max_model_len does not fit the KV cache"}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_a_log_that_powershell_redirected_reads_as_any_other(tmp_path, encoding):
    text = (LOGS / f"{COMPARED[0]}.log").read_text()
    log = tmp_path / "vllm.log"
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    log.write_bytes((mark + text.replace("\n", "\r\n")).encode(encoding))
    found = called("diagnose", log=str(log))["answer"]["finding"]
    assert found["ledger"] and found == json.loads(json.dumps(doctor.diagnose(text).to_dict()))


def test_a_command_that_vllm_would_refuse_is_answered_with_what_to_do():
    log = LOGS / f"{COMPARED[0]}.log"
    answer = called("diagnose", log=str(log), command="vllm serve m --gpu-memory-utilization seven")
    assert set(answer) == {"error"} and "no number" in answer["error"]


# ---- in the browser ----


class Noting(http.server.SimpleHTTPRequestHandler):
    """A server of a folder under a path, as a project's pages have it; it keeps what it is asked for."""

    asked: list[str] = []

    def translate_path(self, path):
        return super().translate_path(path.removeprefix("/project"))

    def log_message(self, *args):
        self.asked.append(self.requestline)


@pytest.fixture(scope="module")
def address(pages):  # noqa: F811
    handler = functools.partial(Noting, directory=pages)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/project/{PAGE}.html"
    server.shutdown()


@pytest.fixture(scope="module")
def warm(browser, address):  # noqa: F811
    """A tab in which Python runs, which the tests of the doctor's answers share."""
    tab = open_one(browser, address)
    tab.get_by_role("button", name="Try an example").click()
    tab.get_by_role("button", name="Copy as JSON").wait_for(timeout=WAIT_MS)
    yield tab
    tab.close()


def python_files(tab) -> list[str]:
    return [part.path for part in tab.asked if "/python/" in part.path]


def wait_for_finding(tab) -> None:
    tab.get_by_role("button", name="Copy as JSON").wait_for(timeout=WAIT_MS)


def diagnosed(tab, log: str) -> dict:
    return tab.evaluate("(log) => memlabPython.call('diagnose', {log: new Blob([log])})", log)


@pytest.mark.browser
@pytest.mark.parametrize("name", COMPARED)
def test_the_browser_finds_what_cpython_finds(warm, name):
    log = (LOGS / f"{name}.log").read_text()
    found = doctor.diagnose(log)
    answer = diagnosed(warm, log)
    assert answer["finding"] == json.loads(json.dumps(found.to_dict()))
    assert answer["text"] == doctor.report(found)


@pytest.mark.browser
def test_every_log_is_read_by_the_library_that_the_page_carries(warm):
    logs = {path.name: path.read_text(errors="replace") for path in (ROOT / "tests" / "data").glob("*/*.log")}
    assert len(logs) > 60
    for name, log in logs.items():
        assert diagnosed(warm, log)["finding"]["phase"] == doctor.diagnose(log).phase, name


@pytest.mark.browser
def test_a_start_is_planned_under_the_same_runtime(warm):
    from memlab.configs import LAB_CONFIGS

    for config in LAB_CONFIGS.values():
        given = {"config": config, "card": "3090", "served": "--max-model-len 4096"}
        answer = warm.evaluate("(given) => memlabPython.call('plan', given)", given)
        assert answer == called("plan", **given)["answer"]


@pytest.mark.browser
def test_python_is_not_loaded_before_the_box_is_touched_and_then_from_the_book_alone(open_tab, address):  # noqa: F811
    tab = open_tab(address)
    assert python_files(tab) == []
    tab.get_by_label("The log, from").focus()
    tab.get_by_text("Python is ready").wait_for(timeout=WAIT_MS)
    assert "index.js" in str(python_files(tab))
    assert {part.hostname for part in tab.asked if part.scheme.startswith("http")} == {"127.0.0.1"}
    assert faults(tab) == []


@pytest.mark.browser
def test_nothing_of_a_log_leaves_the_tab(open_tab, address):  # noqa: F811
    tab = open_tab(address)
    sent = []
    tab.on("request", lambda request: sent.append((request.method, request.url, request.post_data)))
    tab.on("websocket", lambda socket: sent.append(("websocket", socket.url, None)))
    tab.get_by_label("The log, from").fill(f"{SECRET}\n" + (LOGS / f"{COMPARED[0]}.log").read_text())
    wait_for_finding(tab)
    loaded = len(sent)
    away = [url for _, url, _ in sent if not url.startswith(("data:", "blob:"))]  # of the tab itself, those
    assert away and all(url.startswith(address.removesuffix(f"{PAGE}.html") + "_static/python/") for url in away)
    tab.get_by_label("The log, from").fill(f"{SECRET}\n" + (LOGS / f"{COMPARED[1]}.log").read_text())
    tab.get_by_text("Found: other processes").wait_for(timeout=WAIT_MS)
    assert len(sent) == loaded, "Python is there: a second log asks for nothing"
    assert all(method == "GET" and not body and SECRET not in url for method, url, body in sent)
    assert not [line for line in Noting.asked if SECRET in line or not line.startswith(("GET", "HEAD"))]
    kept = tab.evaluate(
        "JSON.stringify([Object.entries(localStorage), Object.entries(sessionStorage), document.cookie])"
    )
    assert SECRET not in kept and SECRET not in tab.url


@pytest.mark.browser
def test_the_page_works_from_disk(open_tab, pages):  # noqa: F811
    tab = open_tab((pages / f"{PAGE}.html").as_uri())
    tab.get_by_role("button", name="Try an example").click()
    wait_for_finding(tab)
    assert "needs more KV cache" in tab.get_by_role("status").first.inner_text() and faults(tab) == []


@pytest.mark.browser
def test_markup_in_a_log_stays_text(warm):
    warm.get_by_label("The log, from").fill(HOSTILE)
    shown = warm.locator(".memlab-doctor section")
    shown.get_by_text("onerror=alert(1)").first.wait_for(timeout=WAIT_MS)
    assert shown.locator("img, script").count() == 0 and faults(warm) == []


@pytest.mark.browser
def test_a_log_goes_in_and_its_finding_out_with_the_keyboard_alone(open_tab, address):  # noqa: F811
    tab = open_tab(address)
    tab_to(tab, ".memlab-doctor textarea")
    tab.keyboard.insert_text(HOSTILE.partition("<")[0])
    wait_for_finding(tab)
    assert "of 24 GiB" in (said := tab.get_by_role("status").first.inner_text()) or "21.6" in said
    tab_to(tab, ".memlab-doctor input[type=text]")
    tab.keyboard.type("vllm serve m --gpu-memory-utilization seven")
    tab.get_by_role("alert").get_by_text("no number").wait_for(timeout=WAIT_MS)
    assert tab.locator(".memlab-doctor section").is_hidden(), "the finding of another command is gone"
    tab.keyboard.press("ControlOrMeta+a")
    tab.keyboard.type("vllm serve m")
    wait_for_finding(tab)
    tab_to(tab, ".memlab-doctor section button")
    tab.keyboard.press("Enter")
    tab.locator(".memlab-doctor section [role=status]").get_by_text("cop", exact=False).wait_for()


@pytest.mark.browser
def test_a_file_is_read_beside_the_box_and_without_it(open_tab, address, tmp_path):  # noqa: F811
    tab = open_tab(address)
    large = tmp_path / "large.log"
    quiet = "(APIServer pid=1) INFO 12-01 10:00:00 a line of no interest\n" * 200_000
    large.write_text(quiet + (LOGS / f"{COMPARED[0]}.log").read_text())
    tab.get_by_label("Or open a file").set_input_files(large)
    wait_for_finding(tab)
    assert (
        tab.get_by_label("The log, from").input_value() == ""
        and "large.log" in tab.locator("#memlab-held").inner_text()
    )
    assert f"{200_000 + 51}: ValueError" in tab.locator(".memlab-doctor pre").inner_text()


@pytest.mark.browser
def test_an_empty_box_and_a_file_that_holds_no_text_get_a_word(open_tab, address, tmp_path):  # noqa: F811
    tab = open_tab(address)
    status = tab.get_by_role("status").first
    tab.get_by_role("button", name="Diagnose").click()
    assert status.inner_text().startswith("Paste a log first")
    log = (LOGS / f"{COMPARED[0]}.log").read_bytes()
    for name, data, word in (("empty.log", b"", "is empty"), ("vllm.log.gz", gzip.compress(log), "is packed")):
        (tmp_path / name).write_bytes(data)
        tab.get_by_label("Or open a file").set_input_files(tmp_path / name)
        status.get_by_text(word).wait_for(timeout=WAIT_MS)
        assert tab.locator(".memlab-doctor section").is_hidden() and name in tab.locator("#memlab-held").inner_text()


@pytest.mark.browser
def test_clear_forgets_the_log_and_what_was_found_and_keeps_the_command(open_tab, address):  # noqa: F811
    tab = open_tab(address)
    tab.locator("#memlab-command").fill("vllm serve m")
    tab.get_by_role("button", name="Try an example").click()
    wait_for_finding(tab)
    tab.get_by_role("button", name="Clear").click()
    assert (
        tab.evaluate("document.activeElement.value") == "" and tab.evaluate("document.activeElement.id") == "memlab-log"
    )
    assert tab.locator(".memlab-doctor section").is_hidden() and tab.get_by_role("status").first.inner_text() == ""
    assert tab.locator("#memlab-command").input_value() == "vllm serve m"


@pytest.mark.browser
def test_what_was_asked_for_comes_into_sight_and_does_not_move_who_types(open_tab, address):  # noqa: F811
    tab = open_tab(address, viewport={"width": 390, "height": 844})
    seen = "document.querySelector('.memlab-doctor section').getBoundingClientRect().top < innerHeight / 2"
    box = tab.get_by_label("The log, from")
    box.focus()
    tab.keyboard.insert_text(HOSTILE.partition("<")[0])
    wait_for_finding(tab)
    assert not tab.evaluate(seen) and tab.evaluate("scrollY") == 0
    tab.get_by_role("button", name="Diagnose").click()
    tab.wait_for_function(seen, timeout=WAIT_MS)


@pytest.mark.browser
def test_what_is_not_enough_leads_to_the_page_of_last_lines(warm):
    warm.get_by_label("The log, from").fill("it said CUDA out of memory")
    warm.locator(".memlab-doctor section a[href='oom-now.html']").wait_for(timeout=WAIT_MS)


@pytest.mark.browser
def test_a_diagnosis_can_be_stopped_and_begun_again(open_tab, address):  # noqa: F811
    tab = open_tab(address)
    tab.get_by_role("button", name="Try an example").click()
    tab.get_by_role("button", name="Stop").click()
    tab.get_by_text("Stopped.").wait_for()
    assert tab.locator(".memlab-doctor progress").is_hidden()
    tab.get_by_role("button", name="Diagnose").click()
    wait_for_finding(tab)


@pytest.mark.browser
@pytest.mark.parametrize("come", ["not at all", "damaged"])
def test_a_part_that_does_not_come_whole_is_said_and_asked_for_again(open_tab, address, come):  # noqa: F811
    tab = open_tab(address)
    half = "memlabPython.receive({"
    tab.route(
        "**/part-3.js*",
        lambda route: route.fulfill(body=half, content_type="text/javascript") if come == "damaged" else route.abort(),
    )
    tab.get_by_role("button", name="Try an example").click()
    tab.get_by_text("could not be loaded").wait_for(timeout=WAIT_MS)
    tab.unroute("**/part-3.js*")
    tab.get_by_role("button", name="Diagnose").click()
    wait_for_finding(tab)


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 320), ("dark", 320)])
def test_what_is_found_has_no_barrier_and_fits(open_tab, address, scheme, width):  # noqa: F811
    tab = open_tab(address, color_scheme=scheme, viewport={"width": width, "height": 800})
    assert axe_findings(tab) == []
    tab.get_by_role("button", name="Try an example").click()
    wait_for_finding(tab)
    assert axe_findings(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.parametrize("script", ["python.js", "the-doctor.js"])
def test_where_a_script_does_not_come_no_dead_control_stands(browser, address, script):  # noqa: F811
    tab = browser.new_page()
    tab.route(f"**/{script}*", lambda route: route.abort())
    tab.goto(address)
    box = tab.locator(".memlab-doctor")
    assert "memlab doctor vllm.log" in box.inner_text() and box.locator("button, input, textarea").count() == 0
    tab.close()


@pytest.mark.browser
def test_without_scripts_the_page_names_the_command_and_has_no_control(browser, address):  # noqa: F811
    tab = browser.new_page(java_script_enabled=False)
    tab.goto(address)
    box = tab.locator(".memlab-doctor")
    assert "memlab doctor vllm.log" in box.inner_text()
    assert box.locator("button, input, textarea").count() == 0
    tab.close()
