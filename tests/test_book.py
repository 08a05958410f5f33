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
PAGES = (
    "book/index",
    "book/start-here",
    "book/00-one-request",
    "book/01-ledger",
    "book/reference/recorded-runs",
    "book/reference/glossary",
    "labs/00-preflight",
    "labs/01-ledger",
)

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
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def expected(role: tuple[str, ...], source: Path) -> str:
    name, key, name2, key2 = role
    value = held(name, key, source) - (held(name2, key2, source) if name2 else 0)
    if key.endswith("_gib"):
        return units.show_gib(value, signed=bool(name2))
    sign = "−" if value < 0 else "+" if name2 else ""
    return sign + units.show_tokens(abs(value))


def test_the_numbers_of_the_chapter_are_those_of_its_records(site):
    roles = ROLE.findall((site["source"] / "book" / "01-ledger.md").read_text(encoding="utf-8"))
    shown = [value.get_text() for value in soup(site, "book/01-ledger").select(".record-value")]
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
    assert line.time_s[before] > start and line.used_gib[before] == line.used_gib[before - 1]
    assert all(line.used_gib[index] == max(line.used_gib) for index in after)
    assert series.running[busy] == held("h200-eager", "traffic.requests", site["source"])
    assert all(series.running[index] == 0 and line.time_s[after[0]] > series.time_s[index] for index in idle)


def test_a_missing_drawing_fails_the_build(tmp_path):
    built, _ = build_page(tmp_path, "```{drawing} absent A caption\nIts words.\n```")
    assert built.returncode != 0 and "no drawing assets/figures/absent.svg" in built.stdout + built.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_a_description_and_its_data(site, page):
    article = soup(site, page).select_one("article")
    figures = article.select("figure")
    for figure in figures:
        assert len(figure.select_one("svg[role=img] > desc").get_text()) > 60
        assert figure.select("details table tbody tr") and figure.find("figcaption").get_text()
    assert all(image.get("alt") for image in article.select("img"))
    assert len(figures) >= {"book/00-one-request": 3, "book/01-ledger": 3, "labs/01-ledger": 2}.get(page, 0)


@pytest.mark.parametrize("page", PAGES)
def test_no_id_is_given_twice(site, page):
    ids = [element["id"] for element in soup(site, page).select("article [id]")]
    assert len(ids) == len(set(ids))


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
            there = BeautifulSoup(target.read_text(encoding="utf-8"), "html.parser")
            assert there.find(id=unquote(parts.fragment)), address


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
        assert sums == {checksum for name, checksum in pin["files"].items() if name != "LICENSE"}


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


@pytest.mark.browser
@pytest.mark.parametrize("page", PAGES)
def test_a_page_needs_no_other_host_and_reports_no_error(browser, address, page):
    tab = browser.new_page(color_scheme="dark")
    problems, asked = [], []
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("dialog", lambda dialog: problems.append(dialog.message) or dialog.dismiss())
    tab.on("request", lambda request: asked.append(urlsplit(request.url)))
    tab.goto(f"{address}/{page}.html")
    tab.wait_for_load_state("networkidle")
    tab.close()
    assert {part.hostname for part in asked if part.scheme.startswith("http")} == {"127.0.0.1"}
    # sphinx-thebe 0.3.1 declares this name twice on each page; nothing uses it.
    assert [problem for problem in problems if "THEBE_JS_URL" not in problem] == []


@pytest.mark.browser
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_phone(browser, address, page):
    tab = browser.new_page(viewport={"width": 390, "height": 800})
    tab.goto(f"{address}/{page}.html")
    width = tab.evaluate("document.documentElement.scrollWidth")
    tab.close()
    assert width <= 390


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
