"""What a reader sees of a finding: of every recorded run that failed, and of a log that means harm."""

import pytest

from fixtures_record import cuda_record
from memlab import doctor, finding_view, record
from memlab.widgets import DoctorPanel, findings_html

FAILED = [found for found in record.read_all() if finding_view.of(found)]
HOSTILE = (
    "ValueError: Free memory on device cuda:0 (1.0/24.0 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 21.6 GiB). <img src=x onerror=alert(1)> \x1b]0;title\x07 Decrease GPU memory utilization"
)


@pytest.mark.parametrize("run", FAILED, ids=lambda run: run.id)
def test_a_recorded_failure_says_what_ran_out_and_what_helps(run):
    found = finding_view.of(run)
    assert found.phase in doctor.RULES
    failure = found.failures[0]
    assert failure["confidence"] in ("high", "medium") and failure["fixes"]
    missing = failure.get("missing_gib")
    assert (missing is None) == (found.phase == "profile_assert_free_grew"), "there, nothing is short"
    gains = [fix.get("gains_gib") or 0.0 for fix in failure["fixes"]]
    assert missing is None or max(gains) >= missing > 0, "no fix gives back what is missing"
    page = found.html()
    assert all(finding_view.html.escape(fix["flag"]) in page for fix in failure["fixes"][: finding_view.SHOWN_FIXES])


def test_a_run_that_served_has_no_finding():
    assert finding_view.of(cuda_record("synthetic-ok")) is None
    assert findings_html([cuda_record("synthetic-ok")]) == ""


def test_a_finding_that_a_run_keeps_is_shown_rather_than_read_again():
    run = FAILED[0]
    kept = doctor.finding("\n".join(FAILED[1].log), FAILED[1].served_flags, card=FAILED[1].card)
    again = record.from_dict({**record.to_dict(run), "finding": record.without_none(kept)})
    assert finding_view.of(again).phase == kept["phase"] != finding_view.of(run).phase


def test_nothing_of_a_log_becomes_markup_or_moves_a_cursor():
    found = finding_view.of_text(HOSTILE)
    assert "<img" not in found.html() and "&lt;img" in found.html()
    assert "\x1b" not in str(found)


def test_the_doctor_panel_finds_on_a_click_and_says_what_it_needs():
    panel = DoctorPanel()
    panel.button.click()
    assert "Paste a log first" in panel.said.value
    panel.text.value = "\n".join(FAILED[0].log)
    panel.button.click()
    assert panel.found.phase == finding_view.of(FAILED[0]).phase
    assert "memlab-finding" in panel.shown.value
    panel.command.value = "vllm serve m --gpu-memory-utilization seven"
    panel.button.click()
    assert "no number" in panel.said.value and panel.shown.value == ""
