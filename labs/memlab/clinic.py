"""The patients of the OOM clinic: configurations that fail, each in its own way, and a ward in which to treat them.

A patient is a start of real vLLM that runs out of something, or only seems to. ``python -m memlab.clinic`` prints the
grid file by which they are recorded.
"""

import json
from dataclasses import asdict, dataclass, field, replace

from memlab import cards, finding_view, lab, record
from memlab.doctor import RULES
from memlab.errors import MemlabError, RecordError
from memlab.finding_view import View, words
from memlab.flags import ServeFlags
from memlab.plots import Table
from memlab.record import Neighbour, RunRecord, Traffic
from memlab.sweep import Setting
from memlab.units import GIB, MIB, show_gib

LAB = "07-oom-clinic"
CARD = "NVIDIA GeForce RTX 3090"
WELL = ServeFlags(gpu_memory_utilization=0.9, max_model_len=16384, enforce_eager=True)
SERVING = Traffic(8000, 64, requests=16, concurrency=8)
SHORT = Traffic(1000, 32, requests=16, concurrency=8)
TINY_SERVING = Traffic(300, 20, requests=8, concurrency=4)
TINY = ServeFlags(kv_cache_memory_bytes=GIB // 4, max_model_len=8192, enforce_eager=True)
NO_FAILURE = ("ok", "preemption_not_oom")


@dataclass(frozen=True)
class Patient:
    """A configuration that is ill.

    Args:
        name: to call it by.
        symptom: what its operator tells, who does not know what it has.
        setting: the run.
        phase: what it has (``doctor.RULES``), where the backend shows it; ``ok`` and ``preemption_not_oom`` are no OOM.
        cures: changes after which it serves, each to be recorded; there may be others.
        load: what it has to serve to count as cured.
    """

    name: str
    symptom: str
    setting: Setting
    phase: str
    cures: tuple[dict, ...] = ()
    load: Traffic | list[Traffic] = SERVING

    @property
    def on_cpu(self) -> bool:
        """Whether vLLM's CPU backend shows it."""
        return self.setting.model == "tiny-llama"

    def well(self, run: RunRecord) -> bool:
        """Whether a run served all that it was sent; of one that came for its preemptions, with none."""
        sent = [load.latency for load in run.loads] or [run.latency]
        answered = all(latency is None or latency.failed == 0 for latency in sent)
        relapsed = self.phase == "preemption_not_oom" and preemptions(run)
        return run.outcome == "ok" and answered and not relapsed

    def treated(self, **changes) -> Setting:
        """The run under load with some flags changed; ``neighbour=None`` sends the neighbour away."""
        others = {name: changes.pop(name) for name in ("neighbour",) if name in changes}
        flags = self.setting.flags.with_(**changes)
        return replace(self.setting, flags=flags, traffic=self.load, seconds=self.setting.seconds + 10, **others)


def _patient(name, symptom, phase, flags=WELL, traffic=None, *cures, **more) -> Patient:
    model = more.pop("model", "llama-3.1-8b")
    card = more.pop("card", None if model == "tiny-llama" else CARD)
    seconds = more.pop("seconds", 30.0)
    load = more.pop("load", None) or traffic or (TINY_SERVING if model == "tiny-llama" else SERVING)
    setting = Setting(model, flags, traffic, card, lab=LAB, seconds=seconds, **more)
    return Patient(name, symptom, setting, phase, tuple(cures), load)


PATIENTS = {
    patient.name: patient
    for patient in (
        _patient(
            "greedy",
            "It ends some seconds after the start, before a weight is loaded. The GPU is empty.",
            "free_memory_at_startup",
            WELL.with_(gpu_memory_utilization=0.99),
            None,
            {"gpu_memory_utilization": 0.9},
        ),
        _patient(
            "crowded",
            "It ran yesterday with the same command. Today it ends some seconds after the start.",
            "free_memory_at_startup",
            WELL,
            None,
            {"neighbour": None},
            neighbour=Neighbour(leaves_free_gib=16.0),
        ),
        _patient(
            "heavy",
            "A model of 13 billion parameters. It ends while the weights are loaded, and the message says to lower "
            "gpu_memory_utilization.",
            "weights_load",
            WELL.with_(max_model_len=4096),
            None,
            {"quantization": "fp8"},
            {"cpu_offload_gb": 8.0},
            model="llama-2-13b",
            load=SHORT,
        ),
        _patient(
            "breathless",
            "Somebody raised max_num_batched_tokens “for throughput”. The weights load, then it ends.",
            "memory_profile",
            WELL.with_(max_num_batched_tokens=131072),
            None,
            {"max_num_batched_tokens": 2048},
        ),
        _patient(
            "starved",
            "Somebody lowered gpu_memory_utilization “to be safe”. The weights load, then it ends.",
            "kv_cache_none",
            WELL.with_(gpu_memory_utilization=0.65),
            None,
            {"gpu_memory_utilization": 0.9},
        ),
        _patient(
            "tight",
            "Somebody lowered gpu_memory_utilization until it hurt. It ends, and says that a request would not fit.",
            "max_model_len_exceeds_kv",
            WELL.with_(gpu_memory_utilization=0.72),
            None,
            {"gpu_memory_utilization": 0.9},
        ),
        _patient(
            "overreaching",
            "Somebody raised gpu_memory_utilization as far as the first check lets it. It ends before it is ready.",
            "kernel_warmup",
            WELL.with_(gpu_memory_utilization=0.97, max_num_batched_tokens=8192),
            SERVING,
            {"gpu_memory_utilization": 0.96},
        ),
        _patient(
            "long-winded",
            "The command of the model's page, with no --max-model-len. The weights load, then it ends.",
            "max_model_len_exceeds_kv",
            WELL.with_(max_model_len=None),
            None,
            {"max_model_len": 16384},
        ),
        _patient(
            "hoarder",
            "Somebody gave the pool a size of its own. The weights load, the profile passes, then it ends.",
            "kv_cache_alloc_oom",
            WELL.with_(gpu_memory_utilization=None, kv_cache_memory_bytes=9 * GIB),
            None,
            {"kv_cache_memory_bytes": 5 * GIB},
        ),
        _patient(
            "camera-shy",
            "It serves with --enforce-eager. Without it, it ends while a bar counts CUDA graphs.",
            "cuda_graph_capture",
            WELL.with_(
                gpu_memory_utilization=None,
                kv_cache_memory_bytes=7200 * MIB,
                max_num_batched_tokens=512,
                enforce_eager=False,
            ),
            None,
            {"kv_cache_memory_bytes": 5 * GIB},
            seconds=75.0,
        ),
        _patient(
            "undecided",
            "Many small requests are expected, so max_num_seqs is 1024. All is loaded, then it ends at the last step "
            "of the start. (The first model runner.)",
            "sampler_warmup",
            WELL.with_(gpu_memory_utilization=None, kv_cache_memory_bytes=6400 * MIB, max_num_seqs=1024),
            None,
            {"max_num_seqs": 64},
            variables={"VLLM_USE_V2_MODEL_RUNNER": "0"},
        ),
        _patient(
            "shaken",
            "Two servers start at the same time on one GPU. One of them ends with an assertion.",
            "profile_assert_free_grew",
            ServeFlags(gpu_memory_utilization=0.4, max_model_len=4096, enforce_eager=True),
            None,
            {"neighbour": None},
            model="qwen2.5-0.5b",
            load=SHORT,
            neighbour=Neighbour(leaves_free_gib=12.0, leaves_in="profiling"),
        ),
        _patient(
            "curious",
            "It served for weeks. Since a new client asks for prompt_logprobs, it dies.",
            "runtime_logprobs",
            WELL.with_(gpu_memory_utilization=0.96),
            Traffic(8000, 1, requests=4, concurrency=2, prompt_logprobs=1),
            {"gpu_memory_utilization": 0.9},
        ),
        _patient(
            "pressed",
            "It served for weeks. Then somebody started a notebook on the same GPU.",
            "other_process_on_gpu",
            WELL,
            Traffic(8000, 1, requests=4, concurrency=2, prompt_logprobs=1),
            {"neighbour": None},
            neighbour=Neighbour(leaves_free_gib=0.1, comes="when_ready"),
        ),
        _patient(
            "slow",
            "At peak hours answers take twice as long. The dashboard shows a KV cache at 100 %.",
            "preemption_not_oom",
            WELL.with_(gpu_memory_utilization=None, kv_cache_memory_bytes=GIB, max_model_len=4096),
            [Traffic(500, 200, requests=40)] * 3,
            {"kv_cache_memory_bytes": 5 * GIB},
            seconds=60.0,
            card=None,
        ),
        _patient(
            "worried",
            "Its log is full of lines with “memory” and “OOM”. Its operator wants to know how ill it is.",
            "ok",
            WELL,
            SERVING,
            seconds=40.0,
        ),
        _patient(
            "tiny-long-winded",
            "A tiny model on the CPU backend. It ends before it answers, and names a length.",
            "max_model_len_exceeds_kv",
            TINY.with_(kv_cache_memory_bytes=8 * MIB),
            None,
            {"max_model_len": 3072},
            {"kv_cache_memory_bytes": GIB // 4},
            model="tiny-llama",
        ),
        _patient(
            "tiny-hoarder",
            "A tiny model on the CPU backend. Somebody copied the pool's size from a large GPU.",
            "host_ram_oom",
            TINY.with_(kv_cache_memory_bytes=1024 * GIB),
            None,
            {"kv_cache_memory_bytes": GIB // 4},
            model="tiny-llama",
        ),
        _patient(
            "tiny-slow",
            "A tiny model on the CPU backend. All requests are answered, but a counter called preemptions goes up.",
            "preemption_not_oom",
            TINY.with_(kv_cache_memory_bytes=16 * MIB, max_model_len=4096),
            Traffic(300, 300, requests=32),
            {"kv_cache_memory_bytes": GIB // 4},
            model="tiny-llama",
            seconds=50.0,
        ),
    )
}


def grid() -> list[dict]:
    """The settings of the patients and of their cures for ``scripts/record --grid``, each once; patients first.

    What another lab has recorded is left out.
    """
    wanted = [patient.setting for patient in PATIENTS.values() if not patient.on_cpu]
    wanted += [p.treated(**cure) for p in PATIENTS.values() if not p.on_cpu for cure in p.cures]
    others = [run for run in record.read_all() if run.lab != LAB]
    entries = []
    for setting in wanted:
        if recorded(setting, others):
            continue
        loads = setting.traffic if isinstance(setting.traffic, list) else [setting.traffic] if setting.traffic else []
        sent = [record.without_none(asdict(load)) for load in loads]
        entry = {
            "lab": setting.lab,
            "model": setting.model,
            "flags": setting.flags.set(),
            "traffic": sent if isinstance(setting.traffic, list) else sent[0] if sent else None,
            "card": setting.card,
            "variables": setting.variables or None,
            "neighbour": asdict(setting.neighbour) if setting.neighbour else None,
            "seconds": setting.seconds,
        }
        kept = {name: value for name, value in entry.items() if value is not None or name == "traffic"}
        if kept not in entries:
            entries.append(kept)
    return entries


# ---- the ward ----


@dataclass
class Chart:
    """What is known of one patient: the reader's diagnosis, the runs, the treatments."""

    patient: Patient
    guess: str | None = None
    run: RunRecord | None = None
    treatments: list[tuple[dict, RunRecord]] = field(default_factory=list)

    @property
    def found(self) -> str | None:
        """The phase as the doctor sees it, None before the run."""
        return None if self.run is None else diagnosis(self.run)

    @property
    def cured_by(self) -> dict | None:
        """The first treatment after which it was well."""
        return next((changes for changes, run in self.treatments if self.patient.well(run)), None)


def diagnosis(run: RunRecord) -> str:
    """The phase of a run: the doctor's of one that failed, else whether requests were preempted."""
    finding = finding_view.of(run)
    if finding is not None:
        return finding.phase
    return "preemption_not_oom" if preemptions(run) else "ok"


def preemptions(run: RunRecord) -> int:
    """Requests that had to give their blocks back, over the whole run."""
    return int(max(run.series.preemptions, default=0)) if run.series else 0


class Ward:
    """The patients that this machine can admit: live on its backend, else those that are recorded.

    Args:
        here: where the lab runs (``lab.here``).
    """

    def __init__(self, here: lab.Here):
        self.here = here
        known = self.known = record.read_all() if here.replayed else []
        self.charts = {
            name: Chart(patient)
            for name, patient in PATIENTS.items()
            if (recorded(patient.setting, known) if here.replayed else patient.on_cpu == (here.backend == "cpu"))
        }

    def __getitem__(self, name: str) -> Chart:
        try:
            return self.charts[name]
        except KeyError:
            raise MemlabError(f"no patient {name!r} here: there are {', '.join(self.charts)}") from None

    def patients(self) -> Table:
        """Who is here, and what they tell."""
        rows = tuple((name, chart.patient.symptom) for name, chart in self.charts.items())
        return Table("The ward", ("patient", "what its operator tells"), rows, words=True)

    def guess(self, name: str, phase: str) -> None:
        """Commit a diagnosis before the run.

        Raises:
            MemlabError: for a phase that there is not, and once the patient was admitted.
        """
        if phase not in CHOICES:
            raise MemlabError(f"no phase {phase!r}: say one of {', '.join(CHOICES)}")
        chart = self[name]
        if chart.run is not None:
            raise MemlabError(f"{name} was admitted already: a diagnosis counts before the run")
        chart.guess = phase

    def admit(self, name: str, on_phase=lab.progress_line) -> RunRecord:
        """Run a patient as it is; again, the same run. ``on_phase`` is that of ``lab.run``."""
        chart = self[name]
        if chart.run is None:
            chart.run = self._run(chart.patient.setting, on_phase)
        return chart.run

    def _run(self, setting: Setting, on_phase) -> RunRecord:
        if not self.here.replayed:
            return self.for_this_machine(setting).run(self.here.mode, on_phase=on_phase)
        found = recorded(setting, self.known)
        if not found:
            raise RecordError("this run is not recorded")
        if on_phase:
            print(f"Replayed: {found[0].where()}", flush=True)
        return found[0]

    def for_this_machine(self, setting: Setting) -> Setting:
        """A setting as it runs here: a GPU as large as the card that a patient needs is that card itself.

        Raises:
            MemlabError: on a GPU that is smaller.
        """
        total, needed = self.here.machine.total_gib, cards.find(CARD).total_gib
        if self.here.replayed or setting.card is None or total >= needed + 1:
            return setting
        if total < needed - 1:
            raise MemlabError(
                f"the patients need {show_gib(needed)}, and {self.here.machine.gpu} has {show_gib(total)}: "
                'say mode = "replay"'
            )
        return replace(setting, card=None)

    def finding(self, name: str) -> View | None:
        """What the doctor says of an admitted patient; None where nothing failed."""
        run = self[name].run
        return None if run is None else finding_view.of(run)

    def treat(self, name: str, **changes) -> RunRecord:
        """Run a patient with some flags changed; ``neighbour=None`` sends its neighbour away.

        Raises:
            FlagError: for flags that vLLM refuses.
            RecordError: in replay, for a treatment that is not recorded; it names those that are.
        """
        chart = self[name]
        try:
            run = self._run(chart.patient.treated(**changes), lab.progress_line)
        except RecordError as error:
            raise RecordError(f"this treatment is not recorded. Recorded are: {self.treatments(name)}") from error
        chart.treatments.append((changes, run))
        return run

    def treatments(self, name: str) -> str:
        """The recorded treatments of a patient, in words."""
        patient = self[name].patient
        cures = [cure for cure in patient.cures if recorded(patient.treated(**cure), self.known)]
        return "; ".join(in_words(cure) for cure in cures) or "none, it needs a live run"

    def sheet(self) -> Table:
        """The score sheet: what you said, what it was, what cured it, what it held then."""
        rows = []
        for name, chart in self.charts.items():
            said = words(chart.guess) if chart.guess else "nothing"
            was = words(chart.found) if chart.found else "not admitted yet"
            right = "" if not (chart.guess and chart.found) else "yes" if chart.guess == chart.found else "no"
            cure = in_words(chart.cured_by) if chart.cured_by is not None else "not yet"
            if chart.found == "ok":
                cure = "needs none"
            rows.append((name, said, was, right, cure, _peak(chart)))
        header = ("patient", "you said", "it was", "right", "cured by", "peak then")
        return Table(f"Score sheet: {self.score()} of {len(self.charts)} diagnosed", header, tuple(rows), words=True)

    def score(self) -> int:
        """How many diagnoses were right."""
        return sum(chart.guess is not None and chart.guess == chart.found for chart in self.charts.values())


CHOICES = tuple(
    dict.fromkeys(["ok", *(phase for phase in RULES if phase in {patient.phase for patient in PATIENTS.values()})])
)


def in_words(changes: dict) -> str:
    """A treatment as flags."""
    if not changes:
        return "nothing"
    parts = []
    for name, value in changes.items():
        if name == "neighbour" and value is None:
            parts.append("the neighbour gone")
        else:
            shown = show_gib(value / GIB) if name == "kv_cache_memory_bytes" and value else value
            parts.append(f"{name} {shown}")
    return ", ".join(parts)


def _peak(chart: Chart) -> str:
    cured = next((run for _, run in chart.treatments if chart.patient.well(run)), None)
    run = cured or chart.run
    return show_gib(run.seen.peak_gib) if run and run.seen and run.seen.peak_gib is not None else ""


def recorded(setting: Setting, known: list[RunRecord]) -> list[RunRecord]:
    """The recorded runs of a setting, whichever lab they were made for."""
    return [run for run in known if setting.is_of(run, any_lab=True)]


if __name__ == "__main__":
    print("[\n" + ",\n".join(f" {json.dumps(entry)}" for entry in grid()) + "\n]")
