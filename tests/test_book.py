"""The rendered book: it builds without a warning or a server, needs no other host, and says what the records say."""

import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup

import fixtures_record as fixtures
from memlab import record, units

ROOT = Path(__file__).resolve().parent.parent


def pages_of(contents: dict) -> list[str]:
    """The pages that a table of contents names, in its order."""
    here = [contents[key] for key in ("root", "file") if key in contents]
    below = [part for key in ("parts", "chapters", "sections") for part in contents.get(key, ())]
    return here + [page for part in below for page in pages_of(part)]


PAGES = pages_of(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))

# What pages may hold, whether or not one of them does today.
TRIED_OUT = """
# Tried out

```{run-browser} 01-ledger enforce_eager max_num_seqs
```

```{block-table}
```

$$budget = total \\times 0.92$$

```bash
vllm serve llama-3.1-8b
```

:::{admonition} A question
:class: dropdown
Its answer.
:::
"""
BROWSED = "book/tried-out"

# Every process that Python starts below the build says what it starts.
AUDIT = """
import os, sys
def hook(event, args):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
        with open(os.environ["AUDIT_LOG"], "a") as log:
            log.write(f"{args[:2]}\\n")
sys.addaudithook(hook)
"""


def jupyter_book(source: Path, out: Path, *options: str, **variables: str) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).with_name("jupyter-book"), "build", source, "--path-output", out]
    command += ["--all", "-n", "-W", "--keep-going", *options]
    environment = {**os.environ, **variables}
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=500)


def copy_tracked(folder: Path, *paths: str) -> None:
    """The tracked files under ``paths`` (all, if none), as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The book, with synthetic records beside the real ones, built where starting vLLM would be noticed."""
    source, out, trap = (tmp_path_factory.mktemp(name) for name in ("source", "out", "trap"))
    copy_tracked(source)
    for each in fixtures.all_records():
        record.write(each, source / "labs" / "records" / "synthetic")
    (source / "book" / "tried-out.md").write_text(TRIED_OUT)
    toc = yaml.safe_load((source / "_toc.yml").read_text())
    toc["parts"][-1]["chapters"].append({"file": "book/tried-out"})
    (source / "_toc.yml").write_text(yaml.safe_dump(toc, sort_keys=False))
    (trap / "sitecustomize.py").write_text(AUDIT)
    (trap / "vllm").write_text("#!/bin/sh\necho the vllm command >> $AUDIT_LOG\nexit 1\n")
    (trap / "vllm").chmod(0o755)
    log = trap / "audit.log"
    built = jupyter_book(
        source,
        out,
        MEMLAB_MODE="live",
        AUDIT_LOG=str(log),
        PATH=f"{trap}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=str(trap),
    )
    assert built.returncode == 0, built.stdout[-6000:] + built.stderr[-6000:]
    pages = out / "_build" / "html"
    return {"source": source, "pages": pages, "started": log.read_text().splitlines()}


def soup(site, page: str) -> BeautifulSoup:
    return BeautifulSoup((site["pages"] / f"{page}.html").read_text(encoding="utf-8"), "html.parser")


def build_page(folder: Path, text: str, *options: str, records=()) -> tuple[subprocess.CompletedProcess, Path]:
    """A book of one page over the given records."""
    copy_tracked(folder, "_config.yml", "assets", "book/_ext", "labs/memlab")
    (folder / "labs" / "records").mkdir()
    for each in records:
        record.write(each, folder / "labs" / "records")
    (folder / "book" / "records.yml").write_text("short: synthetic-eager\n")
    page = folder / "book" / "reference" / "recorded-runs.md"
    page.parent.mkdir()
    page.write_text(f"# Page\n\n{text}\n")
    (folder / "_toc.yml").write_text("format: jb-book\nroot: book/reference/recorded-runs\n")
    return jupyter_book(folder, folder, *options), folder / "_build"


# ---- the build ----


def test_importing_the_extensions_leaves_the_environment_alone():
    code = (
        "import importlib, os, pathlib, sys\n"
        "sys.path[:0] = ['book/_ext', 'labs']\n"
        "before = dict(os.environ)\n"
        "for each in sorted(pathlib.Path('book/_ext').glob('*.py')):\n"
        "    importlib.import_module(each.stem)\n"
        "print(sorted(set(os.environ.items()) ^ set(before.items())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_building_starts_no_server_whatever_the_environment_asks_for(site):
    assert any("ipykernel" in line for line in site["started"]), "the audit saw no kernel start: it watches nothing"
    assert not [line for line in site["started"] if "vllm" in line or "memlab" in line]


def test_the_build_carries_nothing_of_labs_but_its_pages_and_the_records(site):
    names = {path.name for path in site["pages"].rglob("*") if path.is_file()}
    assert not [name for name in names if name.endswith(".py")]


def test_a_missing_record_or_key_fails_the_build(tmp_path):
    text = """
{record}`short stated.kv_cache_gib` {record}`short stated.nonsense_gib` {record}`absent kv.tokens`
{record}`short kv.tokens - short engine.vllm` {record}`short`

```{record-figure} ledger absent
```
"""
    built, _ = build_page(tmp_path, text, records=[fixtures.cuda_record()])
    assert built.returncode != 0
    said = built.stdout + built.stderr
    for complaint in (
        "'short' has no value under 'stated.nonsense_gib'",
        "no recorded run 'absent'",
        "kv.tokens and engine.vllm have no difference",
        "'short' is neither",
    ):
        assert complaint in said
    assert said.count("no recorded run 'absent'") >= 2
    assert "stated.kv_cache_gib" not in said


def test_a_book_without_records_builds(tmp_path):
    built, out = build_page(tmp_path, "```{recorded-runs}\n```")
    assert built.returncode == 0, built.stderr[-3000:]
    assert "No run is recorded yet." in (out / "html" / "book" / "reference" / "recorded-runs.html").read_text()


def test_a_builder_without_svg_gets_a_picture_with_its_caption(tmp_path):
    text = "{record}`short seen.peak_gib`\n\n```{record-figure} timeline short\n```"
    eager = fixtures.cuda_record()
    built, out = build_page(tmp_path, text, "--builder", "custom", "--custom-builder", "latex", records=[eager])
    assert built.returncode == 0, built.stderr[-3000:]
    tex = next((out / "latex").glob("*.tex")).read_text(encoding="utf-8")
    assert "includegraphics" in tex and "Synthetic GPU 40 GB" in tex and "32.70 GiB" in tex
    assert list((out / "latex").glob("*.png"))


# ---- what the pages say ----

ROLE = re.compile(r"\{record\}`(\S+) (\S+?)(?: - (\S+) (\S+))?`")


def held(name: str, key: str, source: Path):
    aliases = yaml.safe_load((source / "book" / "records.yml").read_text())
    (path,) = (source / "labs" / "records").rglob(f"{aliases[name]}.json")
    value = record.read(path)
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)]
        else:
            value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def expected(role: tuple[str, ...], source: Path) -> str:
    name, key, name2, key2 = role
    value = held(name, key, source)
    if isinstance(value, str):
        return value
    value -= held(name2, key2, source) if name2 else 0
    if re.search(r"_gib(\.\d+)?$", key):
        return units.show_gib(value, signed=bool(name2))
    sign = "−" if value < 0 else "+" if name2 else ""
    return sign + units.show_tokens(abs(value))


def test_the_numbers_of_the_chapter_are_those_of_its_records(site):
    roles = ROLE.findall((site["source"] / "book" / "01-ledger.md").read_text(encoding="utf-8"))
    shown = [value.get_text() for value in soup(site, "book/01-ledger").select(".record-value:not(.memlab-verdict *)")]
    assert len(roles) >= 3
    assert shown == [expected(role, site["source"]) for role in roles]


def test_a_number_says_where_it_was_measured_and_links_there(site):
    link = soup(site, "book/01-ledger").select_one("a:has(.record-value)")
    assert re.search(r"vLLM \d", link["title"]) and "recorded-runs.html#" in link["href"]


def test_chapter_0_cites_the_moments_that_it_names(site):
    text = (site["source"] / "book" / "00-one-request.md").read_text(encoding="utf-8")
    (before, *after) = (int(index) for index in re.findall(r"used_gib\.(\d+)", text))
    (busy, *idle) = (int(index) for index in re.findall(r"kv_cache_usage\.(\d+)", text))
    (line,) = (rank.timeline for rank in held("h200-eager", "ranks", site["source"]))
    series = held("h200-eager", "series", site["source"])
    start = next(phase.start_s for phase in held("h200-eager", "phases", site["source"]) if phase.name == "traffic")
    ready = next(phase.start_s for phase in held("h200-eager", "phases", site["source"]) if phase.name == "ready")
    assert ready < line.time_s[before] < start, "the moment before the first request"
    assert all(start < line.time_s[index] and line.used_gib[index] == line.used_gib[before] for index in after)
    assert series.running[busy] == held("h200-eager", "traffic.requests", site["source"])
    assert all(series.running[index] == 0 for index in idle)


def test_a_missing_drawing_fails_the_build(tmp_path):
    built, _ = build_page(tmp_path, "```{drawing} absent A caption\nIts words.\n```")
    assert built.returncode != 0 and "no drawing assets/figures/absent.svg" in built.stdout + built.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_a_description_and_its_data(site, page):
    article = soup(site, page).select_one("article")
    figures = article.select("figure")
    for figure in figures:
        assert len(figure.select_one("svg[role=img] > desc").get_text()) > 60
        planned = figure.find_parent(class_="memlab-plan")  # its table stands open, below what vLLM would say
        assert (planned or figure).select("details table tbody tr, [data-part=table] tbody tr")
        assert figure.find("figcaption").get_text()
    assert all(image.get("alt") for image in article.select("img"))
    assert len(figures) >= {"book/00-one-request": 3, "book/01-ledger": 3, "labs/01-ledger": 2}.get(page, 0)


@pytest.mark.parametrize("page", PAGES)
def test_no_id_is_given_twice(site, page):
    ids = [element["id"] for element in soup(site, page).select("article [id]")]
    assert len(ids) == len(set(ids))


@functools.cache
def ids_of(file: Path) -> set[str]:
    page = BeautifulSoup(file.read_text(encoding="utf-8"), "html.parser")
    return {element["id"] for element in page.select("[id]")}


@pytest.mark.parametrize("page", PAGES)
def test_internal_links_resolve(site, page):
    for element in soup(site, page).select("a[href], link[href], script[src], img[src]"):
        address = element.get("href") or element.get("src")
        parts = urlsplit(address)
        if parts.scheme or not (parts.path or parts.fragment):
            continue
        here = site["pages"] / f"{page}.html"
        target = (here.parent / unquote(parts.path)).resolve() if parts.path else here
        assert target.exists(), address
        if parts.fragment and target.suffix == ".html":
            assert unquote(parts.fragment) in ids_of(target), address


def test_every_record_has_its_section_command_and_file(site):
    page = soup(site, "book/reference/recorded-runs")
    files = {path.name: path for path in (site["pages"] / "_downloads").rglob("*.json")}
    for each in record.read_all(site["source"] / "labs" / "records"):
        section = page.find(id=re.sub(r"[^a-z0-9]+", "-", each.id))
        assert section.name == "section" and each.id in section.get_text()
        assert "vllm serve" in section.get_text()
        assert json.loads(files[f"{each.id}.json"].read_text())["id"] == each.id


def test_markup_in_a_record_stays_text(site):
    text = (site["pages"] / "book" / "reference" / "recorded-runs.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert (
        fixtures.HOSTILE
        in soup(site, "book/reference/recorded-runs").select_one(".memlab-log pre:-soup-contains(alert)").text
    )


def test_no_two_recorded_runs_have_one_title(site):
    sections = soup(site, "book/reference/recorded-runs").select("section.memlab-run > :is(h2, h3)")
    titles = [heading.get_text() for heading in sections]
    assert len(titles) == len(set(titles))
    assert any("playing NVIDIA" in title for title in titles)


def test_a_lab_page_can_be_launched(site):
    links = [link["href"] for link in soup(site, "labs/01-ledger").select("a[href^='https://mybinder.org/']")]
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    place = urlsplit(config["repository"]["url"]).path
    assert [urlsplit(link).path for link in links] == [f"/v2/gh{place}/{config['repository']['branch']}"]
    assert urlsplit(links[0]).query == "urlpath=lab/tree/labs/01-ledger.ipynb"


# ---- what the pages load ----


def test_vendored_files_are_the_pinned_ones():
    vendor = ROOT / "assets" / "vendor"
    pins = json.loads((vendor / "pins.json").read_text())
    for pin in pins:
        folder = vendor / pin["folder"]
        assert (folder / "LICENSE").is_file() and pin["licence"] and pin["integrity"].startswith("sha512-")
        sums = {
            hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.name != "LICENSE" and path.is_file()
        }
        pinned = {**pin["files"], **pin.get("built", {})}
        assert sums == {checksum for name, checksum in pinned.items() if name != "LICENSE"}


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(_Quiet, directory=site["pages"])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium: install the system's package chromium")
    from playwright.sync_api import sync_playwright

    alone = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", alone])
        yield chromium
        chromium.close()


def open_one(browser, url: str, **options):
    """A tab at an address, settled, that notes what goes wrong in it and what it asks for."""
    tab = browser.new_page(**options)
    tab.faults, tab.asked = [], []
    tab.on("console", lambda message: tab.faults.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: tab.faults.append(str(error)))
    tab.on("dialog", lambda dialog: tab.faults.append(dialog.message) or dialog.dismiss())
    tab.on("request", lambda request: tab.asked.append(urlsplit(request.url)))
    tab.goto(url)
    tab.wait_for_load_state("networkidle")
    return tab


def in_scheme(tab, scheme: str) -> None:
    """Emulate a system's colour scheme; the page's theme follows by an event, which comes after the call."""
    tab.emulate_media(color_scheme=scheme)
    tab.wait_for_function("(scheme) => document.documentElement.dataset.theme === scheme", arg=scheme)


@pytest.fixture
def open_tab(browser):
    opened = []
    yield lambda url, **options: opened.append(open_one(browser, url, **options)) or opened[-1]
    for tab in opened:
        tab.close()


@pytest.fixture(scope="module", params=[*PAGES, BROWSED, "search"])
def page_tab(request, browser, address):
    """A tab for each page, which the tests of every page share."""
    tab = open_one(browser, f"{address}/{request.param}.html", device_scale_factor=2)
    yield tab
    tab.close()


def faults(tab) -> list[str]:
    # sphinx-thebe 0.3.1 declares this name twice on each page; nothing uses it.
    return [fault for fault in tab.faults if "THEBE_JS_URL" not in fault]


@pytest.mark.browser
def test_a_page_needs_no_other_host_and_reports_no_error(page_tab):
    assert {part.hostname for part in page_tab.asked if part.scheme.startswith("http")} == {"127.0.0.1"}
    assert faults(page_tab) == []


def axe_findings(tab, *rules: str) -> list[str]:
    from axe_playwright_python.base import AXE_FILE_PATH

    options = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
    if not tab.evaluate("'axe' in window"):
        tab.evaluate(AXE_FILE_PATH.read_text(encoding="utf-8"))
    found = tab.evaluate("(options) => axe.run(options)", options)["violations"]
    return [f"{each['id']}: {node['target']} {node['failureSummary']}" for each in found for node in each["nodes"]]


@pytest.mark.browser
def test_a_page_has_no_barrier_that_axe_finds(page_tab):
    for scheme, width, rules in (
        ("light", 1280, ()),
        ("light", 320, ()),
        ("dark", 1280, ("color-contrast", "link-in-text-block")),
    ):
        in_scheme(page_tab, scheme)
        page_tab.set_viewport_size({"width": width, "height": 800})
        assert axe_findings(page_tab, *rules) == [], f"{scheme}, {width} px"


# Text that ends right of the page, unless its box scrolls.
CUT_OFF = """() => {
    const can = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
    const scrolls = (e) => e && (can(e) || scrolls(e.parentElement));
    const texts = [...document.querySelectorAll("article :is(p, li, td, th, h1, h2, h3, pre, button, select)")];
    const beyond = texts.filter((e) => e.getBoundingClientRect().right > innerWidth + 1);
    return beyond.filter((e) => !scrolls(e)).map((e) => e.outerHTML);
}"""


@pytest.mark.browser
def test_a_page_fits_a_phone_and_a_window_at_twice_the_size(page_tab):
    for width in (640, 320):
        page_tab.set_viewport_size({"width": width, "height": 800})
        assert page_tab.evaluate("document.documentElement.scrollWidth") <= width
        assert page_tab.evaluate(CUT_OFF) == []


# Words of a figure that its frame cuts off.
OUTSIDE = """() => [...document.querySelectorAll("figure svg")].flatMap((svg) => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter((text) => {
        const box = text.getBoundingClientRect();
        const least = Math.min(box.left - frame.left, frame.right - box.right, box.top - frame.top,
            frame.bottom - box.bottom);
        return box.width > 0 && least < -1;
    }).map((text) => text.textContent);
})"""


@pytest.mark.browser
def test_every_word_of_a_figure_is_inside_its_frame(page_tab):
    assert page_tab.evaluate(OUTSIDE) == []


@pytest.mark.browser
def test_nothing_moves_for_who_asks_for_less_motion(open_tab, address):
    tab = open_tab(f"{address}/{BROWSED}.html", reduced_motion="reduce")
    moving = tab.evaluate(
        """[...document.querySelectorAll("*")].map((e) => getComputedStyle(e)).filter((style) =>
            style.animationName !== "none" || style.transitionDuration.replace(/[0s, ]/g, "") ||
            style.scrollBehavior === "smooth").length"""
    )
    assert moving == 0


@pytest.mark.browser
def test_the_search_finds_the_chapter_of_a_word(open_tab, address):
    tab = open_tab(f"{address}/book/index.html")
    tab.keyboard.press("Control+k")
    tab.keyboard.type("unprofiled")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#search-results a[href*='book/01-ledger.html']")
    assert {part.hostname for part in tab.asked} == {"127.0.0.1"}


@pytest.mark.browser
def test_the_dark_mode_that_a_reader_chose_stays(open_tab, address):
    tab = open_tab(f"{address}/book/index.html", color_scheme="light")
    theme = "document.documentElement.dataset.theme"
    for _ in range(3):
        if tab.evaluate(theme) != "dark":
            tab.locator(".theme-switch-button:visible").first.click()
    assert tab.evaluate(theme) == "dark"
    tab.goto(f"{address}/book/01-ledger.html")
    assert tab.evaluate(theme) == "dark"


@pytest.mark.browser
def test_a_command_has_a_button_that_copies_it_and_a_formula_is_set(open_tab, address):
    tab = open_tab(f"{address}/{BROWSED}.html")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.locator("article .highlight-bash button.copybtn").click()
    assert tab.evaluate("navigator.clipboard.readText()") == "vllm serve llama-3.1-8b"
    assert tab.locator("mjx-container").count() == 1


@pytest.mark.browser
def test_paper_gets_the_article_whole_in_ink(open_tab, address):
    tab = open_tab(f"{address}/{BROWSED}.html", color_scheme="dark", viewport={"width": 680, "height": 900})
    tab.get_by_role("button", name="Show this run").click()
    tab.wait_for_selector(".memlab-shown svg")
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    assert tab.get_by_text("Its answer.").is_visible()
    for hidden in (".bd-sidebar-primary", ".bd-header-article", "button.copybtn", ".memlab-browser select"):
        assert not tab.locator(hidden).first.is_visible()
    assert tab.evaluate("document.querySelector('.memlab-shown svg').getBoundingClientRect().right <= innerWidth")
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"


# ---- the browser of recorded runs ----


def tab_to(tab, selector: str) -> None:
    for _ in range(60):
        if tab.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
        tab.keyboard.press("Tab")
    raise AssertionError(f"the Tab key does not reach {selector}")


def chosen_run(tab) -> str:
    return urlsplit(tab.url).fragment.removeprefix("run=").split("&")[0]


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_runs_are_chosen_and_compared_with_the_keyboard_alone(open_tab, address, site, scheme):
    base = address if scheme == "http" else site["pages"].as_uri()
    tab = open_tab(f"{base}/{BROWSED}.html#run=synthetic-eager")
    shown = tab.locator(".memlab-shown")
    by_id = {each.id: each for each in record.read_all(site["source"] / "labs" / "records")}
    eager, graphs = by_id["synthetic-eager"], by_id["synthetic-graphs"]
    shown.get_by_text(units.show_tokens(eager.kv.tokens)).first.wait_for()
    assert shown.locator("svg[role=img]").count() == 2

    tab_to(tab, "select[name=enforce_eager]")
    tab.keyboard.press("ArrowUp")
    shown.get_by_text(units.show_tokens(graphs.kv.tokens)).first.wait_for()
    assert chosen_run(tab) == "synthetic-graphs" and "CUDA graphs" in tab.get_by_role("status").first.inner_text()

    tab_to(tab, ".memlab-browser fieldset button")
    tab.keyboard.press("Enter")
    tab.keyboard.press("Shift+Tab")
    tab_to(tab, ".memlab-browser fieldset button")
    tab.locator("select[name=enforce_eager]").focus()
    tab.keyboard.press("ArrowDown")
    row = shown.get_by_role("row").filter(has=tab.get_by_role("rowheader", name="KV cache, stated"))
    row.wait_for()
    change = eager.stated.kv_cache_gib - graphs.stated.kv_cache_gib
    assert row.get_by_role("cell").all_inner_texts()[-1] == units.show_gib(change, signed=True)
    assert shown.locator("svg[role=img]").count() == 4
    assert [fault for fault in faults(tab) if "fetch" not in fault] == []
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.browser
def test_a_choice_that_excludes_another_moves_to_the_nearest_run_and_says_so(open_tab, address):
    tab = open_tab(f"{address}/{BROWSED}.html#run=synthetic-graphs")
    tab.select_option("select[name=tensor_parallel_size]", "2")
    said = tab.get_by_role("status").first.inner_text()
    assert "nearest" in said and "enforce_eager from off to on" in said
    assert chosen_run(tab) == "synthetic-tp2"


@pytest.mark.browser
def test_every_value_that_is_offered_leads_to_a_recorded_run(open_tab, address, site):
    tab = open_tab(f"{address}/{BROWSED}.html#run=synthetic-eager")
    ids = {each.id for each in record.read_all(site["source"] / "labs" / "records")}
    for select in tab.locator(".memlab-browser select").all():
        name = select.get_attribute("name")
        for value in select.locator("option").evaluate_all("(options) => options.map((o) => o.value)"):
            tab.select_option(f"select[name={name}]", value)
            assert chosen_run(tab) in ids and select.input_value() == value


@pytest.mark.browser
def test_a_browser_shows_nothing_before_it_is_asked_and_is_clean_when_open(open_tab, address):
    tab = open_tab(f"{address}/{BROWSED}.html", viewport={"width": 320, "height": 800}, color_scheme="dark")
    assert tab.locator(".memlab-shown svg").count() == 0
    tab.get_by_role("button", name="Show this run").click()
    tab.wait_for_selector(".memlab-shown svg")
    assert axe_findings(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= 320
    assert "Replayed from the record" in tab.locator(".memlab-shown").inner_text()


@pytest.mark.browser
def test_markup_in_a_record_stays_text_in_the_browser(open_tab, address):
    tab = open_tab(f"{address}/{BROWSED}.html#run=synthetic-oom&with=synthetic-eager")
    tab.wait_for_selector(".memlab-shown svg")
    assert fixtures.HOSTILE in tab.locator(".memlab-shown").inner_text()
    assert tab.locator(".memlab-browser script").count() == 0 and faults(tab) == []


@pytest.mark.browser
def test_a_page_without_scripts_keeps_the_link_to_the_recorded_runs(open_tab, address):
    tab = open_tab(f"{address}/{BROWSED}.html", java_script_enabled=False)
    tab.get_by_role("link", name="the page of recorded runs").click()
    tab.wait_for_url("**/recorded-runs.html*")


@pytest.mark.browser
def test_a_link_to_a_recorded_run_unfolds_it_and_draws_it(open_tab, address):
    tab = open_tab(f"{address}/book/reference/recorded-runs.html#synthetic-eager")
    section = tab.locator("#synthetic-eager")
    section.locator("svg[role=img]").first.wait_for()
    assert section.get_by_text("vllm serve").is_visible()
    assert tab.locator("details[data-run][open]").count() == 1


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["book/01-ledger", "labs/01-ledger"])
def test_the_text_of_a_figure_is_readable_in_both_modes(browser, address, page, scheme):
    tab = browser.new_page(color_scheme=scheme)
    tab.goto(f"{address}/{page}.html")
    ink = tab.evaluate("getComputedStyle(document.querySelector('.memlab-figure svg text')).fill")
    ground = tab.evaluate(
        """(() => {
            for (let e = document.querySelector('.memlab-figure'); e; e = e.parentElement) {
                const colour = getComputedStyle(e).backgroundColor;
                if (!colour.endsWith(', 0)')) return colour;
            }
            return 'rgb(255, 255, 255)';
        })()"""
    )
    tab.close()
    assert contrast(ink, ground) >= 4.5, (ink, ground)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
