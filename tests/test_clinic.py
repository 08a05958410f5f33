"""The patients of the clinic: each is a start that vLLM takes, has a phase of its own, and is what the grid records."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures_record import cuda_record
from memlab import clinic, doctor, finding_view, flags, lab, record, sweep, vllm_log
from memlab.clinic import PATIENTS, Ward
from memlab.errors import MemlabError, RecordError
from memlab.widgets import Consultation

ROOT = Path(__file__).resolve().parent.parent
GRID = ROOT / "labs" / "grids" / f"{clinic.LAB}.json"
FREE_GIB = 22.88  # of 23.58, as vLLM prints it on the played RTX 3090


def replayed() -> lab.Here:
    return lab.here("replay")


def live_on(backend: str) -> lab.Here:
    return lab.Here("live", backend, cuda_record("synthetic").machine)


@pytest.mark.parametrize("patient", PATIENTS.values(), ids=PATIENTS)
def test_a_patient_and_its_cures_are_command_lines_that_vllm_takes(patient):
    for setting in [patient.setting, *(patient.treated(**cure) for cure in patient.cures)]:
        shape = record.shapes.LAB_MODELS[setting.model]
        flags.check(setting.flags, shape.max_position_embeddings)
        assert (setting.flags.max_model_len or 0) <= shape.max_position_embeddings


def test_the_grid_is_what_the_patients_are():
    assert json.loads(GRID.read_text()) == clinic.grid(), f"run: python -m memlab.clinic > {GRID.relative_to(ROOT)}"
    assert all(sweep.from_dict(entry).lab == clinic.LAB for entry in clinic.grid())


def test_every_way_to_die_that_the_doctor_places_at_the_start_has_a_patient():
    there = {patient.phase for patient in PATIENTS.values()}
    assert there <= {"ok", *doctor.RULES}
    assert {"free_memory_at_startup", "weights_load", "memory_profile", "kv_cache_none"} <= there
    assert {"max_model_len_exceeds_kv", "cuda_graph_capture", "sampler_warmup", "host_ram_oom"} <= there


@pytest.mark.parametrize("patient", [one for one in PATIENTS.values() if not one.on_cpu], ids=lambda one: one.name)
def test_the_arithmetic_of_a_patient_says_that_it_fails_or_serves(patient):
    """By the planner's terms on 23.58 GiB: what is asked for is more than there is, at the phase that is named."""
    setting, phase = patient.setting, patient.phase
    shape = record.shapes.LAB_MODELS[setting.model]
    weights = shape.parameters() * shape.dtype_bytes / 2**30
    utilization = setting.flags.gpu_memory_utilization
    budget = None if utilization is None else utilization * 23.58
    free = FREE_GIB if setting.neighbour is None or setting.neighbour.comes == "when_ready" else 16.0 - 0.7
    if phase == "free_memory_at_startup":
        assert budget > free
    elif phase == "weights_load":
        assert budget < free < weights
    elif phase == "kv_cache_none":
        assert weights < budget < weights + 0.6
    elif phase == "kv_cache_alloc_oom":
        assert weights + setting.flags.kv_cache_memory_bytes / 2**30 > FREE_GIB
    elif phase in ("cuda_graph_capture", "sampler_warmup"):
        left = FREE_GIB - weights - setting.flags.kv_cache_memory_bytes / 2**30
        assert 0.2 < left < 1.71, "the pool fits, what comes after it does not"
    elif phase == "max_model_len_exceeds_kv":
        needed = (setting.flags.max_model_len or shape.max_position_embeddings) * shape.kv_bytes_per_token() / 2**30
        assert budget - weights - 0.43 < needed
    elif phase in ("ok", "preemption_not_oom", "runtime_logprobs", "other_process_on_gpu", "kernel_warmup"):
        assert budget is None or weights + 1 < budget < free


def test_a_ward_admits_what_its_backend_can_show():
    assert {chart.patient.on_cpu for chart in Ward(live_on("cpu")).charts.values()} == {True}
    assert {chart.patient.on_cpu for chart in Ward(live_on("cuda")).charts.values()} == {False}
    ward = Ward(replayed())
    assert {"greedy", "tight", "overreaching", "slow", "worried"} <= set(ward.charts)
    for name, chart in ward.charts.items():
        assert ward.admit(name, on_phase=None).model.name == chart.patient.setting.model


@pytest.mark.parametrize("name", Ward(lab.here("replay")).charts)
def test_a_recorded_patient_has_what_it_was_made_to_have_and_its_cures_cure(name):
    ward = Ward(replayed())
    ward.admit(name)
    assert ward[name].found == PATIENTS[name].phase
    for cure in PATIENTS[name].cures:
        if clinic.recorded(PATIENTS[name].treated(**cure), ward.known):
            assert PATIENTS[name].well(ward.treat(name, **cure)), f"{name} is not cured by {cure}"


@pytest.mark.parametrize(("total_gib", "card"), [(139.8, clinic.CARD), (23.65, None), (23.58, None)])
def test_a_gpu_as_large_as_the_card_is_the_card_and_a_larger_one_plays_it(total_gib, card):
    here = live_on("cuda")
    ward = Ward(replace(here, machine=replace(here.machine, total_gib=total_gib)))
    assert ward.for_this_machine(PATIENTS["greedy"].setting).card == card


def test_a_gpu_that_is_smaller_than_the_card_is_told_to_replay():
    here = live_on("cuda")
    ward = Ward(replace(here, machine=replace(here.machine, total_gib=15.5)))
    with pytest.raises(MemlabError, match="replay"):
        ward.admit("greedy")


def stub_ward(monkeypatch, outcomes: dict[str, record.RunRecord]) -> Ward:
    """A ward on the CPU backend whose runs are the given records, by patient."""
    by_setting = {str(PATIENTS[name].setting): run for name, run in outcomes.items()}
    served = cuda_record("synthetic-served")
    monkeypatch.setattr(sweep.Setting, "run", lambda self, mode, **options: by_setting.get(str(self), served))
    return Ward(live_on("cpu"))


def test_the_sheet_counts_a_diagnosis_only_where_it_was_made_before_the_run(monkeypatch):
    failed = next(run for run in record.read_all() if finding_view.of(run))
    phase = finding_view.of(failed).phase
    ward = stub_ward(monkeypatch, {"tiny-hoarder": failed, "tiny-long-winded": failed})
    ward.guess("tiny-hoarder", phase)
    ward.admit("tiny-hoarder")
    ward.admit("tiny-long-winded")
    with pytest.raises(MemlabError, match="before the run"):
        ward.guess("tiny-long-winded", phase)
    assert ward.score() == 1
    assert ward.finding("tiny-hoarder").phase == phase
    ward.treat("tiny-hoarder", kv_cache_memory_bytes=1 << 28)
    row = next(row for row in ward.sheet().rows if row[0] == "tiny-hoarder")
    assert row[3] == "yes" and "kv_cache_memory_bytes 0.25 GiB" in row[4]


def test_what_is_no_patient_and_no_phase_is_refused_by_name():
    ward = Ward(live_on("cpu"))
    with pytest.raises(MemlabError, match="tiny-hoarder"):
        ward.admit("nobody")
    with pytest.raises(MemlabError, match="kv_cache_none"):
        ward.guess("tiny-hoarder", "fever")


def test_a_treatment_that_is_not_recorded_names_those_that_are():
    ward = Ward(replayed())
    for name in ward.charts:
        with pytest.raises(RecordError, match="Recorded are"):
            ward.treat(name, max_num_seqs=3)


def test_a_consultation_hands_on_what_was_chosen_and_locks_it():
    ward = Ward(live_on("cpu"))
    consultation = Consultation(ward)
    consultation.choices["tiny-slow"].value = "preemption_not_oom"
    consultation.commit.click()
    assert ward["tiny-slow"].guess == "preemption_not_oom" and ward["tiny-hoarder"].guess is None
    assert consultation.choices["tiny-slow"].disabled and "1 of 3" in consultation.said.value


# ---- what a run can have beside its flags ----


def test_a_variable_that_is_none_of_vllms_is_not_passed_on():
    with pytest.raises(MemlabError, match="LD_PRELOAD"):
        lab.run("tiny-llama", clinic.TINY, variables={"LD_PRELOAD": "x.so"}, mode="replay")


def test_a_neighbour_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(lab, "here", lambda mode: live_on("cpu"))
    with pytest.raises(MemlabError, match="leave neighbour out"):
        lab.run("tiny-llama", clinic.TINY, neighbour=record.Neighbour(1.0))


def test_variables_and_a_neighbour_set_two_runs_apart():
    run = cuda_record("synthetic")
    asked = (run.lab, run.model.name, run.served_flags, run.sent, run.card)
    assert record.differences(run, *asked) == {}
    assert set(record.differences(run, *asked, variables={"VLLM_USE_V2_MODEL_RUNNER": "0"})) == {"variables"}
    assert set(record.differences(run, *asked, neighbour=record.Neighbour(1.0))) == {"neighbour"}
    ids = {
        record.make_id(run.machine, run.engine, run.model.name, run.served_flags, run.sent, run.card, 1, neighbour)
        for neighbour in (None, record.Neighbour(1.0), record.Neighbour(1.0, "when_ready"))
    }
    assert len(ids) == 3


DEATHS = sorted((ROOT / "tests" / "data" / "clinic").glob("*.log"))


@pytest.mark.parametrize("log", DEATHS, ids=[log.stem for log in DEATHS])
def test_the_whole_log_of_a_patient_is_one_start_that_fails_as_it_was_made_to_and_the_doctor_names_a_cure(log):
    patient = PATIENTS[log.stem]
    found = doctor.diagnose(log.read_text(), card=clinic.CARD)
    assert (found.phase, len(found.failures), found.starts) == (patient.phase, 1, 1)
    helps = {fix.flag.lstrip("-").replace("-", "_") for fix in found.failures[0].fixes}
    cures = {"neighbour": "other processes (nvidia_smi)"}
    assert all(cures.get(name, name) in helps for cure in patient.cures for name in cure)
    assert not {fix.flag for fix in found.failures[0].fixes} & {flag for flag, _ in found.failures[0].will_not_help}


def recorded_deaths(log: Path) -> list[record.RunRecord]:
    """The records whose lines of memory this log has."""
    lines = set(vllm_log.memory_lines(vllm_log.parse_file(log)))
    return [run for run in record.read_all() if run.machine.name == "h200" and run.finding and lines >= set(run.log)]


@pytest.mark.parametrize("log", DEATHS, ids=[log.stem for log in DEATHS])
def test_a_record_whose_log_is_here_has_the_finding_of_todays_doctor(log):
    """Where it has not: memlab records diagnose RECORD LOG."""
    (run,) = recorded_deaths(log)
    assert lab.diagnosed(run, vllm_log.parse_file(log)).finding == run.finding


def test_a_record_takes_no_finding_from_the_log_of_another_run_and_none_where_nothing_failed():
    (run,) = recorded_deaths(DEATHS[0])
    with pytest.raises(RecordError, match="the log is not that of"):
        lab.diagnosed(run, vllm_log.parse_file(DEATHS[1]))
    served = next(each for each in record.read_all() if each.outcome == "ok")
    with pytest.raises(RecordError, match="did not fail"):
        lab.diagnosed(served, [])
