"""OOM now: the page says what memlab.doctor says, with nothing but a browser."""

import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from memlab import doctor, doctor_rules
from memlab.doctor import diagnose
from test_book import copy_tracked, jupyter_book

ROOT = Path(__file__).resolve().parent.parent

PHASES = tuple(doctor.RULES)
TYPED = str.maketrans("‘’", "''")  # prose gets typographic quotes


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """The folder of the pages OOM now and The doctor, built without the rest of the book."""
    folder = tmp_path_factory.mktemp("book")
    copy_tracked(folder, "_config.yml", "assets", "book/_ext", "labs/memlab", "tests/data")
    (folder / "labs" / "records").mkdir(parents=True)
    (folder / "book" / "records.yml").write_text("")
    for name in ("oom-now", "the-doctor"):
        text = (ROOT / "book" / f"{name}.md").read_text(encoding="utf-8")
        text = re.sub(r"\{doc\}`(?!oom-now|the-doctor)[^`]*`", "a page that is not built here", text)
        (folder / "book" / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / "_toc.yml").write_text("format: jb-book\nroot: book/oom-now\nchapters:\n  - file: book/the-doctor\n")
    built = jupyter_book(folder, folder)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return folder / "_build" / "html"


# ---- OOM now ----


@pytest.mark.parametrize("phase", PHASES)
def test_the_lines_of_an_entry_are_of_its_phase_and_enough_to_say_so(phase):
    found = diagnose("\n".join(doctor_rules.PRINTED[phase]))
    assert (found.phase, found.enough) == (phase, True)


def test_every_rule_comes_at_one_time():
    placed = [phase for phases in doctor_rules.WHEN.values() for phase in phases]
    assert sorted(placed) == sorted(PHASES) == sorted(doctor_rules.PRINTED)


@pytest.fixture(scope="module")
def entries(pages) -> BeautifulSoup:
    return BeautifulSoup((pages / "book" / "oom-now.html").read_text(encoding="utf-8"), "html.parser")


@pytest.mark.parametrize("phase", PHASES)
def test_an_entry_says_what_the_doctor_says(entries, phase):
    entry = entries.find("section", id=phase)
    rule, text = doctor.RULES[phase], entry.get_text().translate(TYPED)
    assert entry.pre.get_text().rstrip("\n") == "\n".join(doctor_rules.PRINTED[phase])
    first = doctor.REMEDIES[rule.remedies[0][0]]
    (fix,) = [p for p in entry.find_all("p", recursive=False) if p.get_text().startswith("First fix.")]
    assert fix.code.get_text() == first.flag and fix.get_text().endswith(f"Costs: {first.costs}.")
    named = [code.get_text() for code in entry.select("code")]
    assert named == [*(doctor.REMEDIES[name].flag for name, _ in rule.remedies), *(flag for flag, _ in rule.useless)]
    assert rule.means[1:] in text


def test_a_jump_leads_from_the_line_that_one_sees_to_its_entry(entries):
    links = {link["href"]: link.get_text().translate(TYPED) for link in entries.select(".memlab-jumps a")}
    for phase, rule in doctor.RULES.items():
        assert links[f"#{phase}"] == rule.last_line
    assert all(entries.find(id=target[1:]) for target in links)


def test_every_harmless_line_is_named_with_its_reason(entries):
    text = entries.find(id="harmless").get_text().translate(TYPED)
    assert all(why in text or why[1:] in text for why in doctor.HARMLESS.values())
