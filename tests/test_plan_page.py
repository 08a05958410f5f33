"""Plan your memory: the page says what `memlab plan` says, to eyes, ears and a keyboard, and takes any link."""

import contextlib
import functools
import http.server
import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from bs4 import BeautifulSoup

from memlab import cards, plan_view, planner, plots, shapes
from memlab.configs import PRESET_CONFIGS
from memlab.units import show_tokens
from test_book import CHROMIUM, _Quiet, axe_findings, copy_tracked, faults, in_scheme, jupyter_book, open_one, tab_to

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import plan_page  # noqa: E402

SHOWN = ("budget", "weights", "activation", "non_torch", "cuda_graphs", "kv_cache")

# Each repository's own count of parameters on Hugging Face, of some of every kind.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "google/gemma-3-1b-it": 999_885_952,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 15_706_484_224,
    "openai/gpt-oss-20b": 20_914_757_184,
    "google/gemma-3-27b-it": 27_432_406_640,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "openai/gpt-oss-120b": 116_829_156_672,
}


def in_a_terminal(command: str) -> dict:
    """The plan that ``memlab plan`` prints for the line that the page shows."""
    variable, _, *words = shlex.split(command)
    assert variable == "PYTHONPATH=labs"
    done = subprocess.run([sys.executable, *words, "--json"], cwd=ROOT, env={variable.split("=")[0]: "labs"},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def gib(text: str) -> float:
    """A size as the page shows it, in GiB."""
    number, unit = text.replace("−", "-").split()
    return float(number) / {"GiB": 1, "MiB": 1024}[unit]


def shown(html: str) -> dict:
    """The numbers of a page, as it shows them."""
    page = BeautifulSoup(html, "html.parser").find(class_="memlab-plan")
    rows = {row["data-term"]: row.find("td").get_text() for row in page.select("tbody tr")}
    return {
        "terms": {name: gib(rows.get(name, "0 GiB")) for name in SHOWN},
        "verdict": page.find(attrs={"data-part": "verdict"}).pre.get_text(),
        "changes": [(item["data-flag"], item["data-to"]) for item in page.select("[data-flag]")],
        "command": page.find(attrs={"data-part": "plan-command"}).get_text(),
    }


def check_that_the_page_says_what_the_command_says(html: str) -> None:
    page = shown(html)
    plan = in_a_terminal(page["command"])
    both_rounded = 0.0056  # to a hundredth of a GiB here, to a thousandth there
    assert page["terms"] == pytest.approx({name: plan[f"{name}_gib"] for name in SHOWN}, abs=both_rounded)
    if plan["starts"]:
        assert f"GPU KV cache size: {show_tokens(plan['kv_tokens'])}\n" in page["verdict"]
        assert page["verdict"].endswith(f"{plan['max_concurrency']:.2f}x")
    else:
        assert page["verdict"] == plan["failed_check"]
    flags = {change["flag"].replace("_", "-"): change["to"] for change in plan["changes"]}
    assert page["changes"] == [(name, "1" if to is True else str(to)) for name, to in flags.items()]


# ---- what stands in the page, without a browser ----


def test_the_colours_of_the_bar_are_those_of_the_ledgers_figures():
    ours = {term: colour for term, (colour, _) in plan_view.STYLE.items()}
    theirs = {term.removesuffix("_estimated"): colour for term, (colour, _) in plots.STYLE.items()}
    assert ours == {term: theirs[term] for term in ours}
    assert len({mark for _, mark in plan_view.STYLE.values()}) == len(ours) - 1  # context and weights are plain


def test_there_is_a_card_of_every_size_from_8_to_192_gb():
    sizes = [card.total_gib for card in cards.CARDS.values()]
    for sold in (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192):
        assert any(0.9 * sold / 1.0737 <= size <= sold for size in sizes), f"no card of {sold} GB"


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_a_preset_has_the_parameters_that_its_publisher_counts(name, count):
    assert shapes.from_config(PRESET_CONFIGS[name]).parameters() == count


@pytest.mark.parametrize("card", ["NVIDIA GeForce RTX 4060 Laptop GPU", "NVIDIA B200"])
@pytest.mark.parametrize("version", ["0.19", "0.26", "0.33"])
@pytest.mark.parametrize("model", PRESET_CONFIGS)
def test_every_preset_is_planned_and_its_segments_lie_end_to_end(model, version, card):
    settings = {"model": model, "card": card, "vllm-version": version}
    asked = plan_view.read(settings)
    found = planner.plan(asked.shape, asked.card, asked.flags, asked.version, changes=False)
    placed = plan_view.segments(found)
    for before, after in zip(placed, placed[1:], strict=False):
        assert after.start_gib == pytest.approx(before.end_gib)
    for one in placed:
        assert one.band is None or one.band[0] <= one.end_gib + 1e-9 and one.end_gib - 1e-9 <= one.band[1]
    ledger = found.prediction.ledger
    ends = {one.term: one.end_gib for one in placed}
    assert ("kv_cache" in ends) == (ledger.kv_cache_gib > 0)
    assert ends.get("kv_cache", ledger.context_gib + ledger.budget_gib) == pytest.approx(
        ledger.context_gib + ledger.budget_gib
    )


@pytest.mark.parametrize(
    ("query", "kept", "word"),
    [
        ({"max-model-len": "abc"}, {"max-model-len": "8192"}, "max-model-len"),
        ({"gpu-memory-utilization": "7", "max-num-seqs": "4"}, {"gpu-memory-utilization": ""}, "7"),
        ({"card": "<img src=x>"}, {"card": plan_view.DEFAULTS["card"]}, "card"),
        ({"card": "other", "card-gib": "nan"}, {"card": plan_view.DEFAULTS["card"]}, "GiB"),
        ({"model": "config", "config": "{"}, {"model": plan_view.DEFAULTS["model"]}, "no JSON"),
        ({"model": "config", "config": "[" * 100_000}, {"model": plan_view.DEFAULTS["model"]}, "JSON"),
        ({"vllm-version": "9.9"}, {"vllm-version": "0.33"}, "9.9"),
        ({"more": "--trust-remote-code"}, {"more": ""}, "--trust-remote-code"),
        ({"more": "'"}, {"more": ""}, "quote"),
        ({"enforce-eager": "yes"}, {"enforce-eager": ""}, "enforce-eager"),
        ({"no-such": "1"}, {}, "no-such"),
    ],
)
def test_what_a_link_holds_in_error_is_named_and_gets_its_default(query, kept, word):
    found, problems = plan_view.from_link(query)
    assert found.items() >= kept.items() and any(word in problem for problem in problems)
    assert "error" not in plan_view.answer(found)


def test_a_link_keeps_what_is_good_beside_what_is_not():
    found, problems = plan_view.from_link({"card": "H200", "max-num-seqs": "4", "max-model-len": "x"})
    assert (found["card"], found["max-num-seqs"]) == ("NVIDIA H200", "4") and len(problems) == 1


def test_nothing_that_a_reader_gives_becomes_markup():
    evil = '<img src=x onerror="alert(1)">'
    config = json.dumps(PRESET_CONFIGS["Qwen/Qwen3-8B"] | {"model_type": evil, "quantization_config": None})
    for settings in (
        {"model": "config", "config": config, "kv-cache-dtype": evil},
        {"model": "config", "config": config, "more": f"--dtype {shlex.quote(evil)}"},
        {"model": "config", "config": config, "more": f"--load-format {shlex.quote(evil)}"},
    ):
        answer = plan_view.answer(settings)
        assert "<img" not in json.dumps(answer.get("html", ""))


# ---- the page ----


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page, built without the rest of the book."""
    folder = tmp_path_factory.mktemp("book")
    copy_tracked(folder, "_config.yml", "assets", "book/_ext", "labs/memlab", "labs/records", "labs/grids/planner.json",
                 "scripts/bench", "tests/data/planner")  # fmt: skip
    (folder / "book" / "records.yml").write_text("")
    text = (ROOT / "book" / "plan-your-memory.md").read_text(encoding="utf-8")
    text = re.sub(r"\{doc\}`[^`]*`", "a page that is not built here", text)
    (folder / "book" / "plan-your-memory.md").write_text(text, encoding="utf-8")
    (folder / "_toc.yml").write_text("format: jb-book\nroot: book/plan-your-memory\n")
    built = jupyter_book(folder, folder)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return folder / "_build" / "html" / "book" / "plan-your-memory.html"


def test_the_accuracy_is_counted_from_the_records(page):
    bench, text = plan_page.bench(), page.read_text(encoding="utf-8")
    section = BeautifulSoup(text, "html.parser").find(id="how-near-it-comes")
    said, table = section.get_text(" ", strip=True), section.find("table")
    starts = bench.recorded_starts("0.33.0")
    assert f"{len(starts)} recorded starts of vLLM 0.33.0" in said
    for kind in bench.KINDS:
        some = any(kind in one["kinds"] for one in starts)
        assert (kind in said.split("Not validated by a record of 0.33.0:")[1].split(".")[0]) != some, kind
    rows = {
        row.find("td").get_text(): row.get_text(" ").replace("\u00a0", " ")
        for row in table.find("tbody").find_all("tr")
    }
    held_out = bench.accuracy(plan_page.sets(starts)["held out"])
    for term, words in plan_page.TERMS.items():
        if term in held_out:
            assert f"{held_out[term]['percent']:.2f} %" in rows[words], term


def test_the_first_plan_is_that_of_the_command_and_stands_there_without_scripts(page):
    html = page.read_text(encoding="utf-8")
    check_that_the_page_says_what_the_command_says(html)
    plan = BeautifulSoup(html, "html.parser").find(class_="memlab-plan")
    assert plan.form.has_attr("hidden") and not [button for button in plan("button") if not button.find_parent("form")]
    assert "Predicted" in plan.figure.figcaption.get_text() and plan.svg["role"] == "img"


@contextlib.contextmanager
def serving(folder: Path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def url(page):
    with serving(page.parent.parent) as address:
        yield f"{address}/book/plan-your-memory.html"


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no Chromium: install the system's package chromium")
    from playwright.sync_api import sync_playwright

    alone = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", alone])
        yield browser
        browser.close()


@pytest.fixture
def open_plan(chromium, url):
    opened = []
    yield lambda link="", at=url, **options: opened.append(open_one(chromium, at + link, **options)) or opened[-1]
    for tab in opened:
        assert faults(tab) == []
        assert {part.hostname for part in tab.asked if part.scheme.startswith("http")} <= {"127.0.0.1"}
        tab.close()


def until(tab, part: str, words: str) -> None:
    """Waits until a part of the page says this."""
    tab.wait_for_function(
        "([part, words]) => document.querySelector(`.memlab-plan ${part}`).textContent.includes(words)",
        arg=[part, words],
        timeout=60_000,
    )


def settled(tab) -> None:
    """Waits until the last move is heard, which is when its changes are looked for too."""
    tab.wait_for_function(
        """() => {
            const root = document.querySelector(".memlab-plan");
            return root.querySelector(".memlab-plan-heard").textContent === root.dataset.said &&
                !root.querySelector("[data-part=changes]").textContent.includes("Looking");
        }""",
        timeout=60_000,
    )


@pytest.mark.browser
def test_the_keyboard_alone_moves_a_slider_and_bar_text_and_voice_follow(open_plan):
    tab = open_plan()
    assert not [part.path for part in tab.asked if "/python/" in part.path]  # until a control is touched
    width = "document.querySelector('rect[data-term=kv_cache]').getBoundingClientRect().width"
    before = tab.evaluate(width)
    tab_to(tab, "input[data-for=gpu-memory-utilization]")
    tab.keyboard.press("ArrowLeft")
    until(tab, "[data-part=plan-command]", "--gpu-memory-utilization 0.91")
    assert tab.evaluate(width) < before
    settled(tab)
    check_that_the_page_says_what_the_command_says(tab.content())
    assert "it starts" in tab.locator(".memlab-plan-heard").text_content()


@pytest.mark.browser
def test_a_plan_that_does_not_start_says_so_in_vllms_words_and_a_change_applied_makes_it_start(open_plan):
    tab = open_plan()
    slider = tab.locator("input[data-for=max-model-len]")
    slider.focus()
    tab.keyboard.press("End")
    until(tab, "[data-part=verdict]", "larger than the available KV cache memory")
    settled(tab)
    check_that_the_page_says_what_the_command_says(tab.content())
    for flag in ("max-model-len", "cpu-offload-gb"):
        button = tab.locator(f"[data-flag={flag}] button")
        button.focus()
        tab.keyboard.press("Enter")
        until(tab, "[data-part=verdict]", "GPU KV cache size")
        settled(tab)
        check_that_the_page_says_what_the_command_says(tab.content())
        assert tab.evaluate("document.activeElement.name") == ("more" if flag == "cpu-offload-gb" else flag)
        slider.focus()
        tab.keyboard.press("Home")
        tab.locator("input[name=more]").fill("")
        slider.focus()
        tab.keyboard.press("End")
        until(tab, "[data-part=verdict]", "larger than the available KV cache memory")
        settled(tab)


@pytest.mark.browser
@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_that_python_loads_is_said_in_sight_of_the_control_that_asked_for_it(open_plan, size):
    tab = open_plan(viewport={"width": size[0], "height": size[1]})
    tab.route("**/part-3.js*", lambda route: None)  # it never comes
    slider = tab.locator("input[data-for=gpu-memory-utilization]")
    slider.focus()
    tab.keyboard.press("ArrowLeft")
    until(tab, ".memlab-status", "Python is loading")
    said, control = tab.locator(".memlab-status").bounding_box(), slider.bounding_box()
    assert 0 < control["y"] < said["y"] and said["y"] + said["height"] <= size[1]


@pytest.mark.browser
def test_of_many_moves_at_once_few_are_asked_for_and_the_last_is_shown(open_plan):
    tab = open_plan("#max-num-seqs=64")
    until(tab, "[data-part=plan-command]", "--max-num-seqs 64")
    settled(tab)
    asked = tab.evaluate(
        """() => {
            const slider = document.querySelector("input[data-for=max-num-seqs]");
            const call = memlabPython.call;
            window.asked = 0;
            memlabPython.call = (...given) => (window.asked++, call(...given));
            for (let at = 0; at < 30; at++) {
                slider.value = at;
                slider.dispatchEvent(new Event("input", { bubbles: true }));
            }
            return document.querySelector("input[name=max-num-seqs]").value;
        }"""
    )
    until(tab, "[data-part=plan-command]", f"--max-num-seqs {asked}")
    assert tab.evaluate("window.asked") == 2  # the first, and the newest while that was answered


@pytest.mark.browser
def test_the_buttons_copy_the_line_and_the_link(open_plan):
    tab = open_plan("#max-num-seqs=8")
    until(tab, "[data-part=plan-command]", "--max-num-seqs 8")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.get_by_role("button", name="Copy the vllm serve line").click()
    until(tab, ".memlab-status", "The line is copied")
    line = tab.evaluate("navigator.clipboard.readText()")
    assert shlex.split(line)[:3] == ["vllm", "serve", plan_view.DEFAULTS["model"]] and "--max-num-seqs 8" in line
    tab.get_by_role("button", name="Copy a link to this plan").click()
    until(tab, ".memlab-status", "The link is copied")
    assert tab.evaluate("navigator.clipboard.readText()") == tab.url


@pytest.mark.browser
def test_a_link_brings_the_settings_back(open_plan):
    settings = {"card": "NVIDIA H200", "model": "openai/gpt-oss-20b", "vllm-version": "0.26", "max-num-seqs": "64",
                "kv-cache-dtype": "fp8", "enforce-eager": "1", "more": "--cpu-offload-gb 2"}  # fmt: skip
    tab = open_plan("#" + urlencode(settings))
    until(tab, "[data-part=plan-command]", "openai/gpt-oss-20b")
    settled(tab)
    check_that_the_page_says_what_the_command_says(tab.content())
    again = open_plan(tab.url.removeprefix(tab.url.split("#")[0]))
    until(again, "[data-part=plan-command]", "openai/gpt-oss-20b")
    assert shown(again.content()) == shown(tab.content())
    assert again.locator("input[name=enforce-eager]").is_checked()


@pytest.mark.browser
def test_a_hostile_link_stays_text_and_the_first_plan_stays(open_plan):
    evil = "<img src=x onerror=alert(1)>"
    query = {"card": evil, "model": "config", "config": json.dumps({"architectures": [evil]}), "more": evil, evil: evil}
    tab = open_plan("#" + urlencode(query, quote_via=quote))
    until(tab, ".memlab-plan-error", "no setting")
    assert tab.locator(".memlab-plan img").count() == 0
    assert "41" in tab.locator("[data-part=verdict]").inner_text()
    assert tab.locator("select[name=card]").input_value() == plan_view.DEFAULTS["card"]
    assert axe_findings(tab) == []
    tab.faults.clear()  # axe asks for what the theme does not have


@pytest.mark.browser
def test_a_config_of_ones_own_is_planned_and_a_broken_one_gets_a_word_and_loses_nothing(open_plan):
    tab = open_plan()
    tab.locator("select[name=model]").select_option("config")
    until(tab, ".memlab-plan-error", "paste the model's own")
    box = tab.locator("textarea[name=config]")
    box.fill('{"architectures": ["EvilForCausalLM"]}')
    until(tab, ".memlab-plan-error", "EvilForCausalLM is not counted yet")
    box.fill('{"architectures":')
    until(tab, ".memlab-plan-error", "is no JSON")
    assert box.input_value() == '{"architectures":'
    box.fill(json.dumps(PRESET_CONFIGS["Qwen/Qwen3-4B"]))
    until(tab, "[data-part=table]", "4,022,468,096 parameters")
    assert tab.locator(".memlab-plan-error").is_hidden()


@pytest.mark.browser
def test_the_page_plans_from_disk_too(open_plan, page):
    tab = open_plan("#max-num-seqs=8", at=page.as_uri())
    until(tab, "[data-part=plan-command]", "--max-num-seqs 8")


@pytest.mark.browser
def test_no_barrier_that_axe_finds_and_it_fits_a_phone_in_both_modes(open_plan):
    tab = open_plan("#card=other&card-gib=16&max-model-len=131072")
    until(tab, "[data-part=verdict]", "does not start")
    settled(tab)
    for scheme, width in (("light", 1280), ("light", 320), ("dark", 1280), ("dark", 640)):
        in_scheme(tab, scheme)
        tab.set_viewport_size({"width": width, "height": 800})
        tab.wait_for_timeout(400)  # the sidebars slide away
        assert axe_findings(tab) == [], f"{scheme}, {width} px"
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.faults.clear()  # axe asks for what the theme does not have


@pytest.mark.browser
def test_on_a_phone_the_bar_stays_in_sight_of_a_control_and_hides_none(open_plan):
    tab = open_plan("#max-num-seqs=8", viewport={"width": 390, "height": 844})
    settled(tab)
    for control in ("input[data-for=tensor-parallel-size]", "input[name=more]", "select[name=card]"):
        tab.locator(control).focus()
        bar = tab.locator(".memlab-plan figure > svg").bounding_box()
        box = tab.locator(control).bounding_box()
        assert bar["y"] >= 0 and bar["y"] + bar["height"] <= box["y"] <= 844 - box["height"], control


@pytest.mark.browser
@pytest.mark.parametrize("link", ["card=Tesla+T4&model=deepseek-ai/DeepSeek-V3", "gpu-memory-utilization=0.3", ""])
def test_the_words_of_the_bar_stay_on_a_phone(open_plan, link):
    tab = open_plan(f"#{link}", viewport={"width": 320, "height": 844})
    if link:
        settled(tab)
    for text in tab.locator(".memlab-plan figure > svg text").all():
        box = text.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 320, text.inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("script", ["python.js", "plan-memory.js"])
def test_where_a_script_does_not_come_the_plan_stands_without_a_dead_control(chromium, url, script):
    tab = chromium.new_page()
    tab.route(f"**/{script}*", lambda route: route.abort())
    tab.goto(url)
    assert tab.locator(".memlab-plan :is(input, select, button):visible").count() == 0
    assert "GPU KV cache size" in tab.locator("[data-part=verdict]").inner_text()
    tab.close()


@pytest.mark.browser
def test_without_scripts_no_control_is_there_and_the_plan_is(open_plan):
    tab = open_plan(java_script_enabled=False)
    assert tab.locator(".memlab-plan :is(input, select, button):visible").count() == 0
    assert "GPU KV cache size" in tab.locator("[data-part=verdict]").inner_text()
