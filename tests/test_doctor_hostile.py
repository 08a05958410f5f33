"""What reaches the doctor from outside: broken, hostile and very long text. It is judged or refused, never obeyed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memlab import doctor, pasted, vllm_log
from memlab.errors import MemlabError

ROOT = Path(__file__).resolve().parent.parent
LOGS = [path.read_text() for folder in ("doctor", "vllm_logs") for path in (ROOT / "tests/data" / folder).glob("*.log")]
SHORT = [text for text in LOGS if len(text) < 8000]
PHASES = {*doctor.RULES, "ok", "not_a_failure", "undetermined"}
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]{6,}", text))


def holds(text: str) -> doctor.Diagnosis:
    """What must hold for any text at all."""
    found = doctor.diagnose(text)
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.phase in PHASES
    shown = doctor.report(found)
    assert all(character.isprintable() or character == "\n" for character in shown)
    shown.encode()
    lines = text.split("\n")
    for failure in found.failures:
        assert failure.evidence and failure.confidence in doctor.CONFIDENCE
        for evidence in failure.evidence:
            assert 1 <= evidence.line <= len(lines)
    return found


anything = st.text(st.characters(codec=None, categories=None), max_size=300)  # surrogates and control characters too


@many
@given(anything)
def test_any_text_is_judged(text):
    holds(text)


@st.composite
def damaged(draw) -> str:
    """A report with lines lost, doubled, cut, and with other text in between."""
    lines = draw(st.sampled_from(SHORT)).split("\n")
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(0, len(lines) - 1)))
        deed = draw(st.sampled_from(["lose", "double", "cut", "insert", "join"]))
        if deed == "lose":
            lines[at : at + 1] = []
        elif deed == "double":
            lines[at:at] = lines[at : at + 1]
        elif deed == "cut":
            lines[at] = lines[at][: draw(st.integers(0, 200))] if lines else ""
        elif deed == "insert":
            lines.insert(at, draw(anything))
        elif at + 1 < len(lines):
            lines[at : at + 2] = [lines[at] + lines[at + 1]]
        lines = lines or [""]
    return "\n".join(lines)


@many
@given(damaged())
def test_a_damaged_report_is_judged(text):
    holds(text)


@many
@given(st.sampled_from(SHORT), st.sampled_from(SHORT), st.lists(st.booleans(), min_size=1, max_size=60))
def test_two_ranks_that_speak_at_once_are_judged(one, other, turns):
    queues = [
        [f"(Worker_TP{rank} pid={448 + rank}) {line}" for line in text.split("\n")]
        for rank, text in enumerate((one, other))
    ]
    mixed = []
    for turn in turns:
        mixed += queues[turn][:1]
        del queues[turn][:1]
    holds("\n".join(mixed + queues[0] + queues[1]))


PREFIXES = (
    "2026-08-14T14:07:22.123456789Z stdout F ",
    "vllm-1  | ",
    "Aug 14 14:07:22 node7 vllm[991]: ",
    "[pod/vllm-0/server] ",
    "(RayWorkerWrapper pid=3151, ip=10.0.0.2) ",
    "[rank0]: ",
    "\x1b[36m",
    "ERROR 08-14 14:07:22 [core.py:99] ",
)


@many
@given(st.sampled_from(SHORT), st.lists(st.sampled_from(PREFIXES), min_size=1, max_size=3).map("".join))
def test_a_report_behind_any_prefixes_is_judged(text, prefix):
    holds("\n".join(prefix + line for line in text.split("\n")))


@pytest.mark.parametrize("prefix", PREFIXES)
def test_one_prefix_changes_no_phase(prefix):
    for text in SHORT:
        if not text.startswith(("(", "[", "INFO 20")):  # it has one, and a process stands in no logger's place
            prefixed = "\n".join(prefix + line for line in text.split("\n"))
            assert doctor.diagnose(prefixed).phase == doctor.diagnose(text).phase


@many
@given(st.sampled_from(SHORT), st.integers(20, 160))
def test_a_report_wrapped_at_any_width_is_judged(text, width):
    lines = text.split("\n")
    holds("\n".join(line[at : at + width] for line in lines for at in range(0, max(1, len(line)), width)))


@pytest.mark.parametrize("end", ["\r\n", "\r\r\n", " \n", "\x1b[0m\n"])
def test_the_end_of_a_line_changes_no_phase(end):
    for text in SHORT:
        assert doctor.diagnose(text.replace("\n", end)).phase == doctor.diagnose(text).phase


def test_characters_that_steer_a_terminal_do_not_reach_it():
    line = "ValueError: No available memory for the cache blocks. \x1b]0;owned\x07\x1b[2J\u202e\u2066\x9b31m\x00\ud800"
    shown = doctor.report(holds(line))
    assert not set("\x1b\x07\u202e\u2066\x9b\x00\ud800") & set(shown)


@pytest.mark.parametrize(
    "line",
    [
        "x" * 10_000_000,
        "CUDA out of memory. Tried to allocate " + "9" * 10_000_000,
        "non-default args: {" + "'a': 1, " * 1_000_000,
        "{" * 10_000_000,
        "(" * 5_000_000 + "Worker_TP0 pid=1) Available KV cache memory: 1 GiB",
        "/a" * 5_000_000 + " Killed",
        " " * 10_000_000 + "GiB",
        "vllm serve m " + "--max-num-seqs 1 " * 500_000,
        'File "' + "a/" * 5_000_000 + '", line 1, in capture_model',
        "\r" * 10_000_000,
    ],
    ids=lambda line: line[:12].strip() or "blank",
)
def test_a_line_of_ten_megabytes_is_read_to_its_end(line):
    text = f"{line}\nRuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests."
    assert holds(text).phase == "sampler_warmup"
    events = list(vllm_log.parse(iter([line])))
    assert all(len(event.text) <= 1000 for event in events)


def test_the_work_grows_as_the_log_and_not_faster():
    """Counted in calls of functions, so that a busy machine changes nothing."""

    def calls(text: str) -> int:
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT / 'labs')!r})\n"
            "from memlab import doctor\n"
            "text, calls = sys.stdin.read(), 0\n"
            "def count(frame, event, argument):\n    global calls\n    calls += 1\n"
            "sys.setprofile(count)\ndoctor.diagnose(text)\nsys.setprofile(None)\nprint(calls)"
        )
        done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True)
        return int(done.stdout)

    start = max(LOGS, key=len)
    once, four_times = calls(start * 10), calls(start * 40)
    assert four_times < 4.4 * once


def unbounded(pattern: re.Pattern) -> list:
    """Repeats without a bound that stand within another repeat: the form that can take exponential time."""
    found = []

    def walk(tree, inside: bool) -> None:
        for code, argument in tree:
            name = str(code)
            if name in ("MAX_REPEAT", "MIN_REPEAT"):
                low, high, body = argument
                endless = str(high) == "MAXREPEAT"
                if endless and inside:
                    found.append((pattern.pattern[:80], low))
                walk(body, inside or endless)
            elif name == "SUBPATTERN":
                walk(argument[-1], inside)
            elif name == "BRANCH":
                for branch in argument[1]:
                    walk(branch, inside)
            elif name in ("ASSERT", "ASSERT_NOT"):
                walk(argument[1], inside)

    from re import _parser

    walk(_parser.parse(pattern.pattern), False)
    return found


def test_no_pattern_has_an_endless_repeat_within_an_endless_repeat():
    patterns = {pattern for row in vllm_log.ROWS for pattern in row.patterns}
    for module in (vllm_log, pasted):
        patterns |= {value for value in vars(module).values() if isinstance(value, re.Pattern)}
    assert len(patterns) > 150
    assert [one for pattern in patterns for one in unbounded(pattern)] == []


@pytest.mark.parametrize("command", ["--dtype 'auto", "vllm serve 'm", "--max-num-seqs $N", "docker run", "\x00"])
def test_a_command_that_a_fuzzer_broke_is_refused_with_words(command):
    with pytest.raises(MemlabError):
        doctor.diagnose("", command)


@many
@given(anything, anything, st.sampled_from([None, "3090", "h100", "voodoo"]))
def test_a_command_a_config_or_a_card_is_taken_or_refused_with_words(text, command, card):
    try:
        doctor.diagnose(text, command, {"hidden_size": text}, card)
    except MemlabError as error:
        assert str(error)
