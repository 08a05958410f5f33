"""The control panel: what it offers is what vLLM takes, what it refuses vLLM refuses, and what it runs is kept."""

import base64
import html
import json
import os
import re
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fixtures_record as fixtures
from live_vllm import kernel, vllm_processes, wait_until
from memlab import lab, launch, notebook, panel, plots, record, widgets
from memlab.errors import FlagError, MemlabError, NotebookError
from memlab.flags import ServeFlags
from memlab.panel import Panel, Settings
from memlab.record import Machine, Traffic
from memlab.units import GIB
from memlab.widgets import UNSET, ControlPanel, Guess, Quiz

ROOT = Path(__file__).resolve().parent.parent
LABS = ROOT / "labs"
H200 = Machine("h200", "NVIDIA H200", 8, 139.80, 140.40, [9, 0], "nvlink", "580.1", "13.0")
RTX_3090 = Machine("rtx-3090", "NVIDIA GeForce RTX 3090", 2, 23.58, 24.0, [8, 6], "pcie", "580.1", "13.0")
HOST = Machine("cpu", None, 0, 24.0, cpu_cores=4)
ON_GPU = ServeFlags(gpu_memory_utilization=0.25, max_model_len=32768, enforce_eager=True)
ON_CPU = ServeFlags(kv_cache_memory_bytes=GIB, max_model_len=8192, enforce_eager=True)
PLACES = {"h200": (H200, "cuda"), "rtx-3090": (RTX_3090, "cuda"), "cpu": (HOST, "cpu")}


@pytest.fixture(autouse=True)
def _a_version_where_none_is_installed(monkeypatch):
    monkeypatch.setattr(lab, "vllm_version", lambda: "0.33.0")
    monkeypatch.delenv("MEMLAB_BOOK", raising=False)


def make(place: str = "cpu", kind=ControlPanel, **changes):
    machine, backend = PLACES[place]
    here = lab.Here("live", backend, machine)
    base = here.choose(ON_GPU, ON_CPU)
    traffic = here.choose(Traffic(8000, 64, 8), Traffic(1000, 32, 8, 4))
    options = {"model": here.default_model, "base": base, "traffic": traffic, **changes}
    return kind("01-ledger", here, **options)


def replaying(**changes):
    here = lab.here("replay")
    return ControlPanel("01-ledger", here, **{"model": "llama-3.1-8b", "base": ON_GPU,
                                              "traffic": Traffic(8000, 64, 8), **changes})  # fmt: skip


# ---- controls ----


@pytest.mark.live
@pytest.mark.parametrize("place", PLACES)
def test_every_value_that_is_offered_is_read_by_vllms_own_parser_as_the_panel_means_it(place):
    """Each control is driven through its widget to each value; the flags go through the parser of ``vllm serve``."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    made = make(place)
    driven = 0
    for control in made.controls():
        if control.off:
            assert made.view.inputs[control.name].disabled
            continue
        for value in control.values:
            made.reset()
            field = made.view.inputs[control.name]
            field.value = panel.show(control.name, value) if control.free else UNSET if value is None else value
            assert made.settings.value(control.name) == value, control.name
            parsed = vars(parser.parse_args([made.settings.model, *made.settings.flags.to_args()]))
            assert parsed["model_tag"] == made.settings.model
            for name, meant in made.settings.flags.set().items():
                assert parsed[name] == meant, name
            driven += 1
    assert driven > 40


@pytest.mark.parametrize("place", PLACES)
def test_a_control_says_what_vllm_takes_where_it_is_left_alone(place):
    made = make(place, base=ServeFlags(kv_cache_memory_bytes=GIB), traffic=None)
    tokens, seqs = {"h200": (8192, 1024), "rtx-3090": (2048, 256), "cpu": (2048, 128)}[place]
    field = made.view.inputs["max_num_seqs"]
    assert (made.default("max_num_batched_tokens"), made.default("max_num_seqs")) == (tokens, seqs)
    assert field.placeholder == f"vLLM's default: {seqs}"
    made.set(max_num_batched_tokens=64)
    assert field.placeholder == "vLLM's default: 64", "an unset number of sequences follows the step"


def test_an_emulated_card_brings_its_own_defaults():
    made = make("h200")
    made.set(card="NVIDIA GeForce RTX 3090")
    assert (made.default("max_num_batched_tokens"), made.default("max_num_seqs")) == (2048, 256)
    assert "fp8" not in made.control("kv_cache_dtype").values, "below 8.9 FlashInfer alone reads fp8"


def test_what_the_cpu_backend_does_not_have_is_off_and_says_why():
    made = make("cpu")
    for name, word in (("card", "no card"), ("gpu_memory_utilization", "kv_cache_memory_bytes"),
                       ("enforce_eager", "no CUDA graphs"), ("tensor_parallel_size", "no GPUs")):  # fmt: skip
        assert made.view.inputs[name].disabled, name
        assert word in html.unescape(made.view.notes[name].value), name
    assert None not in made.control("kv_cache_memory_bytes").values, "vLLM would take nearly all of the host"


def test_a_bare_number_a_suffix_and_nothing_are_read_as_vllm_reads_them():
    made = make("cpu")
    field = made.view.inputs["max_num_batched_tokens"]
    for text, value in (("2K", 2048), ("2k", 2000), (" 512 ", 512), ("", None)):
        field.value = text
        assert made.settings.flags.max_num_batched_tokens == value
        assert not made.view.run.disabled


def test_what_cannot_be_read_blocks_the_run_until_it_is_mended():
    made = make("cpu")
    field = made.view.inputs["max_num_seqs"]
    field.value = "20GiB"
    assert "20GiB" in made.view.message.value
    assert 'role="alert"' in made.view.message.value
    assert made.view.run.disabled
    assert field.value == "20GiB", "what was typed stays, to be mended"
    with pytest.raises(FlagError, match="20GiB"):
        made.result()
    field.value = "16"
    assert not made.view.run.disabled
    assert made.view.message.value == ""


def test_every_control_has_a_label_a_hint_and_a_place():
    view = make("h200").view
    assert list(view.inputs)[:3] == ["gpu_memory_utilization", "max_num_seqs", "enforce_eager"]
    assert set(view.inputs) == set(panel.NAMES)
    for name, field in view.inputs.items():
        assert field.description == name
        assert field.tooltip


def test_lengths_can_be_given_once_requests_are_sent():
    made = make("cpu", traffic=None)
    lengths = made.view.inputs["input_tokens"]
    assert lengths.disabled
    made.view.inputs["requests"].value = "3"
    assert not lengths.disabled
    lengths.value = "200"
    assert made.settings.traffic == Traffic(200, 128, 3)


def test_an_unknown_control_is_named():
    with pytest.raises(FlagError, match="swap_space"):
        make(teaches=("swap_space",))
    with pytest.raises(FlagError, match="swap_space"):
        make().set(swap_space=4)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("place", "changes", "words"),
    [
        ("h200", {"max_num_batched_tokens": 32, "max_num_seqs": 64}, "must be at least max_num_seqs"),
        ("h200", {"max_num_batched_tokens": 4096, "enable_chunked_prefill": False}, "smaller than max_model_len"),
        ("h200", {"gpu_memory_utilization": 1.2}, "more than 0 and at most 1"),
        ("h200", {"tensor_parallel_size": 3}, "32 attention heads must be divisible"),
        ("rtx-3090", {"tensor_parallel_size": 4}, "needs 4 GPUs, this machine has 2"),
        ("rtx-3090", {"kv_cache_dtype": "fp8"}, "through FlashInfer alone"),
        ("h200", {"card": "NVIDIA GeForce RTX 3090", "kv_cache_dtype": "fp8"}, "through FlashInfer alone"),
        ("h200", {"max_model_len": 262144}, "model's own limit"),
        ("h200", {"block_size": 17}, "multiples of 16"),
        ("h200", {"input_tokens": 32768}, "longer than max_model_len"),
        ("cpu", {"block_size": 16}, "multiples of 32"),
        ("cpu", {"kv_cache_memory_bytes": 23 * GIB}, "does not leave enough"),
        ("cpu", {"kv_cache_memory_bytes": None}, "must be given"),
        ("h200", {"model": "https://example.org/m"}, "is an address"),
        ("h200", {"model": "--trust-remote-code"}, "no model is named"),
    ],
)
def test_an_illegal_combination_is_explained_and_cannot_be_run(place, changes, words):
    made = make(place)
    made.set(**changes)
    assert words in made.problem()
    assert made.view.run.disabled
    assert html.escape(words) in made.view.message.value
    with pytest.raises(FlagError, match=re.escape(words)):
        made.start()
    made.reset()
    assert made.problem() == ""
    assert not made.view.run.disabled


def test_a_step_that_an_unset_flag_makes_too_small_is_found_on_the_resolved_flags():
    made = make("h200")
    made.set(max_num_seqs=1024, max_num_batched_tokens=None, max_model_len=None)
    assert made.problem() == ""
    made.set(card="NVIDIA GeForce RTX 3090", max_num_seqs=4096)
    assert "max_num_batched_tokens (2048) must be at least max_num_seqs (4096)" in made.problem()


@pytest.mark.live
def test_vllms_own_configuration_refuses_the_same(tmp_path):
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig

    from memlab import models

    def scheduler(**given):
        return SchedulerConfig(**{"max_model_len": 32768, "is_encoder_decoder": False, **given})

    shape = record.shapes.LAB_MODELS["tiny-llama"]
    folder = str(models.write("tiny-llama", shape, tmp_path))
    refused = {
        "must be at least": (lambda: scheduler(max_num_batched_tokens=32, max_num_seqs=64), "max_num_seqs"),
        "smaller than": (lambda: scheduler(max_num_batched_tokens=4096, max_num_seqs=8, enable_chunked_prefill=False),
                         "max_model_len"),
        "share": (lambda: CacheConfig(gpu_memory_utilization=1.2), "less than or equal to 1"),
        "own limit": (lambda: ModelConfig(model=folder, max_model_len=8193), "greater than the derived max_model_len"),
        "divisible": (
            lambda: ModelConfig(model=folder).verify_with_parallel_config(ParallelConfig(tensor_parallel_size=3)),
            "must be divisible by tensor parallel size",
        ),
    }  # fmt: skip
    for ours, (build, theirs) in refused.items():
        with pytest.raises(Exception, match=theirs):
            build()
        assert ours  # the words of the panel for the same, in the test above
    ModelConfig(model=folder, max_model_len=8192)
    scheduler(max_num_batched_tokens=32768, max_num_seqs=8, enable_chunked_prefill=False)


def test_a_pool_that_the_planner_finds_too_small_is_told_but_may_be_run():
    made = make("rtx-3090", model="llama-3.1-8b", base=ServeFlags(max_model_len=131072, gpu_memory_utilization=0.9))
    assert made.problem() == ""
    assert any("less than one request" in notice for notice in made.notices())


# ---- a pasted launch ----


MEANT = ServeFlags(max_num_seqs=64, max_model_len=8192, enforce_eager=True, extra=("--served-model-name", "my model"))
LINE = "--max-num-seqs 64 --max-model-len 8192 --enforce-eager --served-model-name 'my model'"
ARGV = ["--max-num-seqs", "64", "--max-model-len", "8192", "--enforce-eager", "--served-model-name", "my model"]
FORMS = {
    "line": f"vllm serve org/m {LINE}",
    "prompt, variables, redirection": f"$ CUDA_VISIBLE_DEVICES=0 nohup vllm serve org/m {LINE} > log.txt 2>&1 &",
    "path and continuation": "/opt/venv/bin/vllm serve org/m \\\n  " + LINE.replace(" --", " \\\n  --"),
    "after other commands": f"cd /srv && source venv/bin/activate\nvllm serve org/m {LINE} | tee log",
    "after a folder of that name": f"cd /srv/vllm; vllm serve org/m {LINE} # as it was",
    "module": f"python3 -m vllm.entrypoints.openai.api_server --model org/m {LINE}",
    "module, equals": f"python -m vllm.entrypoints.openai.api_server --model=org/m {LINE}",
    "shell": f'bash -c "vllm serve org/m {LINE}"',
    "lines without a continuation": "vllm serve org/m\n  " + LINE.replace(" --", "\n  --"),
    "PowerShell": "vllm serve org/m `\r\n  " + LINE.replace(" --", " `\r\n  --"),
    "cmd": "vllm serve org/m ^\r\n  " + LINE.replace(" --", " ^\r\n  --") + " ^\r\n",
    "set by a word processor": f"vllm serve org/m {LINE}".replace(" --", "\u00a0–").replace("'my model'", "“my model”"),
    "of a chat": f"`vllm serve org/m {LINE} \\\n`",
    "docker": f"docker run --gpus all --ipc=host -v ~/.cache/vllm:/root -p 8000:8000 -e HF_TOKEN=x --rm -it "
    f"vllm/vllm-openai:v0.33.0 --model org/m {LINE}",
    "docker, entrypoint": f"docker run -d --name vllm --entrypoint vllm registry:5000/vllm-openai serve org/m {LINE}",
    "compose, string": f"services:\n  web:\n    image: nginx\n  llm:\n    image: vllm/vllm-openai\n"
    f"    environment: [HF_TOKEN=x]\n    command: >\n      --model org/m {LINE}\n",
    "compose, list": "services:\n  llm:\n    image: own\n    entrypoint: [vllm, serve]\n    command: "
    + json.dumps(["org/m", *ARGV]),
    "compose, its command alone": "    command:\n"
    + "".join(f"      - {json.dumps(word)}\n" for word in ["--model", "org/m", *ARGV]),
    "compose, a template": "x-llm: &llm\n  image: vllm/vllm-openai\nservices:\n  llm:\n    <<: *llm\n    command: "
    + json.dumps(["--model", "org/m", *ARGV]),
    "systemd": "[Service]\nEnvironment=A=1 \"B=two words\"\nExecStart=/opt/v/bin/vllm serve org/m \\\n  # why\n  "
    + LINE.replace(" --", " \\\n  --")
    + "\nRestart=always\n",
    "kubernetes, args": "kind: Deployment\nspec:\n  template:\n    spec:\n      containers:\n      - name: llm\n"
    "        image: vllm/vllm-openai:latest\n        args: " + json.dumps(["--model", "org/m", *ARGV]),
    "kubernetes, JSON": json.dumps({"kind": "Pod", "spec": {"containers": [
        {"image": "vllm/vllm-openai", "args": ["--model", "org/m", *ARGV]}]}}),
    "kubernetes, shell": "kind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai\n    command: [/bin/sh, -c]\n"
    "    args:\n    - " + json.dumps(f"vllm serve org/m {LINE}"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_launch_of_any_form_gives_the_same_flags(form):
    found = launch.read(FORMS[form])
    assert (found.model, found.flags) == ("org/m", MEANT)


def test_what_stands_in_quotes_stays_as_it_is():
    found = launch.read("vllm serve org/m --served-model-name 'a – “b”\u00a0c'")
    assert found.flags.extra == ("--served-model-name", "a – “b”\u00a0c")


def test_variables_of_the_environment_are_left_out_with_a_word():
    assert "HF_TOKEN" in " ".join(launch.read(FORMS["docker"]).notes)
    assert "CUDA_VISIBLE_DEVICES" in " ".join(launch.read(FORMS["prompt, variables, redirection"]).notes)
    assert "A, B" in " ".join(launch.read(FORMS["systemd"]).notes)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "nothing was pasted"),
        ("ls -l", "no vLLM is started"),
        ("docker run nginx", "no vLLM is started"),
        ("docker ps --filter name=vllm", "docker run"),
        ("vllm bench serve --model m", "starts no server"),
        ("vllm serve", "no model is named"),
        ("vllm serve --model", "no model is named"),
        ("vllm serve --max-model-len 4", "no model is named"),
        ("vllm serve 'm", "quotes do not match"),
        ("vllm serve m --max-num-seqs many", "'many' is no whole number"),
        ("vllm serve m --max-model-len $LEN", "variables are not expanded"),
        ("vllm serve $(cat model)", "variables are not expanded"),
        ("services: [", "cannot be read in line 1|no YAML"),
        ("services:\n  web:\n    image: nginx\n", "starts vLLM"),
        ("[Service]\nExecStart=/usr/sbin/nginx\n", "starts no vLLM"),
        ("vllm serve m " + "x" * 70000, "too many"),
    ],
)
def test_a_bad_paste_is_explained_and_changes_nothing(text, word):
    made = make("cpu")
    before = made.settings
    made.view.pasted.value = text
    made.view.take.click()
    shown = html.unescape(made.view.message.value)
    assert re.search(word, shown), shown
    assert 'role="alert"' in made.view.message.value
    assert made.settings == before
    with pytest.raises(MemlabError):
        made.paste(text)


def test_a_paste_sets_the_controls_and_comes_out_again():
    made = make("h200")
    said = made.paste(FORMS["docker"])
    assert made.view.inputs["max_num_seqs"].value == "64"
    assert "HF_TOKEN" in said
    shown = html.unescape(made.view.command.value)
    assert launch.read(re.search(r">(vllm serve.*?)</pre>", shown, re.DOTALL).group(1)) == launch.Launch("org/m", MEANT)


def test_on_the_cpu_a_paste_leaves_what_is_off_and_keeps_the_pool():
    made = make("cpu")
    said = made.paste("vllm serve tiny-llama --gpu-memory-utilization 0.9 --max-num-seqs 8")
    assert "gpu_memory_utilization is left as it was" in said
    assert made.settings.flags.gpu_memory_utilization is None
    assert made.settings.flags.kv_cache_memory_bytes == GIB
    assert made.problem() == ""


@pytest.mark.parametrize(
    "argument",
    [
        "--trust-remote-code", "--trust_remote_code", "--trust-remote", "--host 0.0.0.0", "--host=0.0.0.0", "--port 80",
        "--api-key s3cret", "--tool-parser-plugin /x.py", "--middleware os.system", "--worker-cls a.b",
        "--config f.yaml",
        "--logits-processors a:b", "--uds /x", "--hf-overrides {}", "--hf-overrides.a b", "--kv-transfer-config {}",
        "--log-config-file f", "--distributed-executor-backend a.B", "-O3", "--download-dir /x", "--no-such-thing",
    ],
)  # fmt: skip
def test_what_loads_code_or_opens_a_connection_is_never_started(argument):
    made = make("cpu")
    made.paste(f"vllm serve tiny-llama --max-num-seqs 8 --max-logprobs 5 {argument}")
    name = argument.split()[0].partition("=")[0].replace("_", "-")
    assert name in made.settings.flags.command("m").replace("_", "-"), "it comes out again"
    assert made.asked.flags.extra == ("--max-logprobs", "5")
    assert any(notice.startswith(f"{name} is left out of the start: ") for notice in made.notices())
    assert name in made.view.message.value


@pytest.mark.live
def test_what_a_panel_may_start_is_what_vllm_has():
    """A typo in the list of harmless arguments would leave one out for ever."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = set(make_arg_parser(FlexibleArgumentParser())._option_string_actions)
    gone = {"--swap-space", "--disable-log-requests"}  # older versions have them
    assert launch.SAFE - known <= gone


def test_a_load_format_that_fetches_by_other_means_is_refused():
    made = make("h200")
    made.paste("vllm serve org/m --load-format runai_streamer")
    assert "load_format" in made.problem()


COUNT = st.none() | st.integers(1, 1 << 20)
SWITCH = st.none() | st.booleans()
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
EXTRA = st.lists(st.tuples(st.sampled_from(["--served-model-name", "--chat-template", "--api-key"]),
                           WORDS.filter(lambda word: not word.startswith("-")))).map(
    lambda pairs: tuple(word for pair in pairs for word in pair)
)  # fmt: skip
ANY_FLAGS = st.builds(
    ServeFlags,
    gpu_memory_utilization=st.none() | st.floats(0.01, 1.0),
    kv_cache_memory_bytes=COUNT,
    max_model_len=COUNT,
    max_num_batched_tokens=COUNT,
    max_num_seqs=COUNT,
    enable_chunked_prefill=SWITCH,
    enforce_eager=SWITCH,
    block_size=COUNT,
    kv_cache_dtype=st.sampled_from([None, "auto", "fp8", "fp8_e5m2"]),
    tensor_parallel_size=COUNT,
    quantization=st.sampled_from([None, "awq"]),
    extra=EXTRA,
)


@given(ANY_FLAGS, WORDS.filter(lambda word: not word.startswith("-") and "=" not in word))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_command_that_is_shown_means_the_same_when_it_is_pasted(serve, model):
    if re.search(r"\$[A-Za-z_({]|`", model):
        with pytest.raises(FlagError, match="variables are not expanded"):
            launch.read(serve.command(model))
    else:
        assert launch.read(serve.command(model)) == launch.Launch(model, serve)


# ---- replay ----


def test_in_replay_only_recorded_values_are_offered_and_each_leads_to_a_run():
    made = replaying()
    known = {Settings(r.model.name, r.served_flags, r.traffic, r.card) for r in record.read_all() if r.lab == made.lab}
    offered = 0
    for control in made.controls():
        for value in control.values:
            made.reset()
            field = made.view.inputs[control.name]
            if control.off:
                assert len(control.values) == 1
                continue
            field.value = UNSET if value is None else value
            assert made.settings in known
            assert made.settings.value(control.name) == value, f"{control.name} moved away from what was chosen"
            assert made.result().model.name == made.settings.model
            offered += 1
    assert offered > 10


def test_in_replay_what_moves_along_is_said():
    made = replaying()
    made.view.inputs["card"].value = "NVIDIA GeForce RTX 3090"
    assert made.settings.card == "NVIDIA GeForce RTX 3090"
    assert "Only recorded runs can be replayed" in made.view.message.value
    assert "max_model_len 16384" in made.view.message.value


def test_a_lab_that_asks_for_what_is_not_recorded_gets_the_nearest_with_a_word():
    made = replaying(base=ON_GPU.with_(max_num_seqs=3))
    assert made.settings.flags.max_num_seqs in (None, 64)
    assert "Only recorded runs" in made.word


def test_a_flag_left_to_vllm_replays_the_run_that_was_given_its_default():
    base = ServeFlags(kv_cache_memory_bytes=GIB // 4, max_model_len=2048, max_num_seqs=32, enforce_eager=True)
    recorded = next(run for run in record.read_all() if run.lab == "05-batched-tokens" and run.machine.name == "cpu")
    here = lab.Here("replay", "cpu", recorded.machine)
    made = Panel("05-batched-tokens", here, "tiny-llama", base, list(recorded.sent))
    assert made.settings.flags.max_num_batched_tokens == 2048, "what vllm serve takes on the CPU backend"
    assert made.word == ""


def test_a_flag_given_as_vllms_default_replays_the_run_that_left_it_to_vllm():
    recorded = next(run for run in record.read_all() if run.lab == "02-prefill" and run.machine.name == "h200")
    here = lab.Here("replay", "cuda", recorded.machine)
    base = ServeFlags(gpu_memory_utilization=0.25, max_model_len=66560, max_num_seqs=64, enforce_eager=True)
    made = Panel("02-prefill", here, "llama-3.1-8b", base.with_(max_num_batched_tokens=8192), list(recorded.sent))
    assert (made.settings.flags.max_num_batched_tokens, made.word) == (None, ""), "8192 is an H200's default"
    made.set(max_num_batched_tokens=32768)
    assert made.settings.flags.max_num_batched_tokens == 32768
    smaller = dict(gpu_memory_utilization=0.9, max_model_len=16384, max_num_batched_tokens=2048)
    assert made.set(card="NVIDIA GeForce RTX 3090", **smaller) == "", "2048 is that card's"
    assert made.settings.card == "NVIDIA GeForce RTX 3090"


def test_a_replayed_run_is_shown_at_once_and_says_that_it_is_one():
    made = replaying()
    made.view.run.click()
    assert [run.machine.name for run in made.runs] == ["h200"]
    assert "replayed from the record" in made.view.figure.value
    assert made.result() == made.runs[0]
    assert len(made.runs) == 1, "the run that was shown is the result"


def test_a_model_that_is_not_recorded_is_not_replayed():
    with pytest.raises(MemlabError, match="not recorded"):
        replaying().paste("vllm serve org/other --max-num-seqs 64")


# ---- runs side by side ----


def test_runs_are_compared_downloaded_and_removed():
    made = replaying()
    first = made.result()
    made.set(enforce_eager=False)
    second = made.result()
    assert made.runs == [first, second]
    links = re.findall(r'<a download="([^"]+)" href="data:application/json;base64,([^"]+)"', made.view.table.value)
    assert [name for name, _ in links] == [f"{first.id}.json", f"{second.id}.json"]
    assert [record.from_dict(json.loads(base64.b64decode(data))) for _, data in links] == [first, second]
    rows = widgets.runs_table(made.runs).rows
    assert [row[1] for row in rows] == ["eager", "CUDA graphs"]
    assert rows[0][4] == f"{first.kv.tokens:,}"
    made.view.figure_of.value = "Ledger"
    assert "CUDA graphs estimated" in made.view.figure.value
    made.view.removes.children[0].click()
    assert made.runs == [second]


def test_nothing_of_a_record_or_a_paste_reaches_the_page_unescaped():
    made = make("cpu")
    made.runs.append(fixtures.failed_record())
    made.paste(f"vllm serve tiny-llama --served-model-name {json.dumps(fixtures.HOSTILE)}")
    made.settings = made.settings.with_(model=fixtures.HOSTILE)
    view = made.view
    shown = [each.value for each in (view.message, view.command, view.predicted, view.table, view.figure)]
    assert "&lt;script" in "".join(shown)
    assert "<script" not in "".join(shown)


def test_a_run_of_several_loads_or_with_instruments_is_none_that_a_panel_can_ask_for(monkeypatch):
    recorded = [each for each in record.read_all() if each.lab == "01-ledger"]
    plain = next(each for each in recorded if each.traffic)
    loads = [record.Load(plain.traffic, 1.0, 2.0, [3.0])]
    others = [replace(plain, traffic=None, loads=loads), replace(plain, instruments=["allocator"], card="other")]
    monkeypatch.setattr(record, "read_all", lambda: [*recorded, *others])
    assert set(replaying().points) == {
        Settings(each.model.name, each.served_flags, each.traffic, each.card) for each in recorded
    }


SERIES = [Traffic(500, 16, 3, 1), Traffic(8000, 16, 3, 1), Traffic(30000, 16, 3, 1)]


def test_a_series_of_loads_is_sent_as_far_as_it_fits_and_its_controls_are_off():
    made = make("h200", traffic=SERIES)
    assert made.asked.traffic == tuple(SERIES)
    assert {made.control(name).off for name in panel.TRAFFIC} == {"this lab sends a series of loads"}
    made.set(max_model_len=16384)
    assert made.asked.traffic == tuple(SERIES[:2])
    assert any("do not fit max_model_len" in notice for notice in made.notices())
    made.set(max_model_len=400)
    assert "no load of this lab fits" in made.problem()
    with pytest.raises(FlagError, match="series"):
        made.set(requests=5)


def test_a_panel_replays_runs_of_its_own_kind_one_load_or_a_series(monkeypatch):
    recorded = record.read_all()
    plain = next(each for each in recorded if each.lab == "01-ledger" and each.traffic)
    several = replace(plain, traffic=None, loads=[record.Load(each, 1.0, 2.0, [3.0]) for each in SERIES])
    monkeypatch.setattr(record, "read_all", lambda: [*recorded, several])
    points = replaying(traffic=SERIES).points
    assert [point.traffic for point in points if point.series] == [tuple(SERIES)]
    assert not any(point.series for point in replaying().points)


def test_the_prediction_is_near_the_one_that_the_record_froze():
    """The panel's is by the planner of today; the record keeps that of the planner it was made with."""
    made = replaying()
    today, frozen = made.prediction().to_dict(), made.result().prediction
    assert today["planner"] >= frozen["planner"]
    assert today["kv_tokens"] == pytest.approx(frozen["kv_tokens"], rel=0.01)


def test_a_prediction_is_reconciled_term_by_term():
    rows = {row[0]: row for row in plots.reconcile(replaying().result()).rows}
    assert {"weights", "consumed", "activation", "KV cache", "unprofiled"} <= set(rows)
    assert rows["consumed"][5] == "yes", "the measured value is in the band"
    assert rows["unprofiled"][1] == "", "no rule predicts it"


# ---- runs in a thread ----


def stub_run(release: threading.Event, made=fixtures.cpu_record):
    """Stands in for ``lab.run`` where the subject is the panel's thread: waits until released or cancelled."""

    def run(*asked, cancel, watch, **options):
        while not release.wait(0.01):
            if cancel.is_set():
                return fixtures.replace(made(), outcome="stopped", error="stopped by the reader")
            watch(lab.Live(1.0, made().phases, [made().ranks[0].timeline]))
        return made()

    return run


def test_while_a_run_goes_on_it_is_drawn_and_no_second_can_begin(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(lab, "run", stub_run(release))
    made = make("cpu")
    view = made.view
    view.run.click()
    wait_until(lambda: "<svg" in view.live.value)
    assert view.run.disabled
    assert not view.stop.disabled
    assert view.inputs["max_num_seqs"].disabled
    assert "3.10 GiB at most" in view.heard.value
    assert "memlab-live" in view.heard._dom_classes, "a screen reader reads it out"
    with pytest.raises(MemlabError, match="a run goes on"):
        made.start()
    release.set()
    made.wait()
    assert not view.run.disabled
    assert view.live.value == ""
    assert made.result() is made.runs[0], "the reader's run is the result, and is not run again"


def test_a_stopped_run_is_kept_but_is_no_result(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(lab, "run", stub_run(release))
    made = make("cpu")
    made.view.run.click()
    made.view.stop.click()
    made.wait()
    assert [run.outcome for run in made.runs] == ["stopped"]
    release.set()
    assert made.result().outcome == "ok"


def test_a_result_of_other_settings_is_run_again(monkeypatch):
    release = threading.Event()
    release.set()
    asked = []
    run = stub_run(release)
    monkeypatch.setattr(lab, "run", lambda *a, **o: asked.append(a[1].max_num_seqs) or run(*a, **o))
    made = make("cpu", kind=Panel)
    made.result()
    made.result()
    made.set(max_num_seqs=8)
    made.result()
    assert asked == [None, 8]


def test_what_ends_a_run_is_shown_and_raised_at_the_next_result(monkeypatch):
    def fail(*asked, **options):
        raise MemlabError("the disk is full")

    monkeypatch.setattr(lab, "run", fail)
    made = make("cpu")
    made.view.run.click()
    wait_until(lambda: made.view.errors.outputs)
    assert made.view.errors.outputs[0]["evalue"] == "the disk is full"
    with pytest.raises(MemlabError, match="the disk is full"):
        made.result()


SETUP = """
from memlab import lab
from memlab.flags import ServeFlags
from memlab.record import Machine
from memlab.widgets import ControlPanel
lab.vllm_version = lambda: "0.32.0"
here = lab.Here("live", "cpu", Machine("cpu", None, 0, 24.0, cpu_cores=2))
panel = ControlPanel("t", here, "tiny-llama", ServeFlags(kv_cache_memory_bytes=1 << 30, enforce_eager=True))
def fail(*a, **o): raise ZeroDivisionError("division by zero")
panel
"""
HIDDEN = {
    "a control's callback": "panel._take = fail\npanel.view.inputs['max_num_seqs'].value = '8'",
    "a click": "panel.start = fail\npanel.view.run.click()",
    "a click on Remove": "import fixtures_record as f\npanel.runs.append(f.cpu_record()); panel.changed()\n"
    "panel.remove = fail\npanel.view.removes.children[0].click()",
    "the thread": "import time\nlab.run = fail\npanel.view.run.click()\ntime.sleep(1)",
    "drawing": "import time\nlab.run = lambda *a, watch, **o: watch(None)\npanel.view.draw_live = fail\n"
    "panel.view.run.click()\ntime.sleep(1)",
    "result": "lab.run = fail\npanel.result()",
    "a click on Stop": "panel.stop = fail\npanel.view.stop.click()",
    "a click on Back": "panel.reset = fail\npanel.view.reset.click()",
    "a click on Set the controls": "panel.paste = fail\npanel.view.take.click()",
    "the choice of the figure": "from memlab import plots\nimport fixtures_record as f\n"
    "panel.runs.append(f.cpu_record()); panel.changed()\nplots.ledger = fail\npanel.view.figure_of.value = 'Ledger'",
    "a guess": "from memlab import widgets\nguess = widgets.Guess(weights='?')\nwidgets._say = fail\n"
    "guess._commit.click()",
    "a quiz": "from memlab import widgets\nquiz = widgets.Quiz('Q?\\n+ a\\n  yes\\n- b\\n  no')\nwidgets._say = fail\n"
    "quiz.check.click()",
    "a diagnosis": "from memlab import widgets\ndoctor = widgets.DoctorPanel()\ndoctor.text.value = 'x'\n"
    "doctor.diagnose = fail\ndoctor.button.click()",
    "a consultation": "from memlab import clinic, widgets\nasked = widgets.Consultation(clinic.Ward(here))\n"
    "widgets._say = fail\nasked.commit.click()",
}


def execute_cells(tmp_path, *cells: str) -> None:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    source = tmp_path / "99-test.ipynb"
    nbformat.write(made, source)
    path = os.pathsep.join([str(LABS), str(ROOT / "tests")])
    notebook.execute(source, tmp_path / "out" / "99-test.ipynb", environment={"PYTHONPATH": path})


@pytest.mark.parametrize("where", HIDDEN)
def test_an_exception_anywhere_in_the_panel_fails_the_notebook(tmp_path, where):
    with pytest.raises(NotebookError, match="division"):
        execute_cells(tmp_path, SETUP, HIDDEN[where])


def test_a_panel_that_works_fails_nothing(tmp_path):
    execute_cells(tmp_path, SETUP, "panel.view.inputs['max_num_seqs'].value = '8'\npanel.settings.flags.max_num_seqs")


# ---- the book ----


def test_in_the_book_nothing_needs_a_kernel(monkeypatch):
    monkeypatch.setenv("MEMLAB_BOOK", "1")
    made = replaying(teaches=("gpu_memory_utilization", "max_num_seqs"))
    page = made._repr_mimebundle_()["text/html"]
    assert 'data-lab="01-ledger" data-teaches="gpu_memory_utilization max_num_seqs"' in page
    assert "recorded-runs" in page
    assert made._view is None, "no widget is made"
    guess, quiz = Guess(weights="How <much>?"), Quiz("Q?\n+ a\n  yes\n- b\n  no")
    assert "How &lt;much&gt;?" in guess._repr_mimebundle_()["text/html"]
    assert "<details><summary>b</summary><p>Not so. no</p>" in quiz._repr_mimebundle_()["text/html"]
    assert guess.compare(made.result()).rows[0][0] == "weights"


# ---- guesses and questions ----


def test_a_guess_is_locked_when_committed_and_compared_with_what_was_measured():
    guess = Guess(weights="What do the weights take?", peak="And the peak?")
    guess._fields["weights"].value = "16 GiB"
    guess._commit.click()
    assert guess._fields["weights"].disabled
    run = replaying().result()
    rows = {row[0]: row for row in guess.compare(run).rows}
    assert rows["weights"][1] == "16.00 GiB"
    assert rows["weights"][4] == plots.show_gib(16 - run.stated.weights_gib, signed=True)
    assert rows["peak"][1] == "", "no guess was given"
    assert rows["peak"][3] == plots.show_gib(run.seen.peak_gib)


def test_a_guess_that_is_no_size_is_not_committed():
    guess = Guess(weights="?")
    guess._fields["weights"].value = "much"
    guess._commit.click()
    assert "is no size" in guess._reply.value
    assert not guess._fields["weights"].disabled
    with pytest.raises(MemlabError, match="no size"):
        guess.compare(fixtures.cuda_record())


def test_a_wrong_answer_gets_its_own_reply():
    quiz = Quiz("Which?\n- one\n  The first belief.\n+ two\n  So it is.")
    quiz.check.click()
    assert "Choose an answer" in quiz.reply.value
    quiz.choice.value = 0
    quiz.check.click()
    assert "Not so." in quiz.reply.value
    assert "The first belief." in quiz.reply.value
    quiz.choice.value = 1
    quiz.check.click()
    assert "Right." in quiz.reply.value


@pytest.mark.parametrize("text", ["Q?\n- a\n  x", "Q?\n+ a\n+ b\n  x", "Q?\n+ a\n- b\n  x", "Q?"])
def test_a_question_without_one_right_answer_and_all_replies_is_refused(text):
    with pytest.raises(MemlabError, match="one right answer"):
        Quiz(text)


# ---- real vLLM ----


@pytest.fixture
def live_panel(monkeypatch):
    monkeypatch.undo()  # the version is the installed one
    here = lab.here("live")
    if here.backend != "cpu":
        pytest.skip("these settings are the CPU backend's")
    return ControlPanel("test", here, "tiny-llama", ON_CPU)


@pytest.mark.live
@pytest.mark.timeout(900)
def test_vllm_resolves_what_the_controls_say(live_panel, tmp_path, monkeypatch):
    """Two starts exercise every control that the CPU backend honours, each by a value that is not the default."""
    monkeypatch.setenv("MEMLAB_RUNS", str(tmp_path))
    inputs = live_panel.view.inputs
    one = {"kv_cache_memory_bytes": "512M", "max_num_seqs": "16", "max_num_batched_tokens": "1K",
           "max_model_len": "4096", "long_prefill_token_threshold": "512", "block_size": 64, "requests": "3",
           "input_tokens": "200", "output_tokens": "8", "concurrency": "2"}  # fmt: skip
    two = {"model": "qwen2.5-0.5b", "enable_chunked_prefill": False, "kv_cache_dtype": "fp8"}
    off = {"card", "gpu_memory_utilization", "enforce_eager", "tensor_parallel_size"}
    assert {*one, *two} == set(panel.NAMES) - off, "every control but those that the CPU backend lacks"
    for name, value in one.items():
        inputs[name].value = value
    found = live_panel.result()
    assert found.outcome == "ok", found.error
    stated = found.flags.resolved
    expected = {"kv_cache_memory_bytes": GIB // 2, "max_num_seqs": 16, "max_num_batched_tokens": 1024,
                "max_model_len": 4096, "long_prefill_token_threshold": 512, "block_size": 64}  # fmt: skip
    assert {name: stated[name] for name in expected} == expected
    assert found.kv.block_size == 64
    assert found.kv.tokens == live_panel.prediction().kv_tokens
    assert found.latency.completed == 3
    assert found.latency.output_tokens == 24
    assert found.latency.input_tokens == pytest.approx(600, rel=0.02)  # random text, tokenized anew by the server

    live_panel.reset()
    for name, value in two.items():
        inputs[name].value = value
    second = live_panel.result()  # a CPU without AVX-512 has no fp8 kernel: the flags are resolved all the same
    stated = second.flags.resolved
    assert second.model.name == "qwen2.5-0.5b"
    assert stated["kv_cache_dtype"] == "fp8"
    assert stated["enable_chunked_prefill"] is False
    assert stated["max_num_batched_tokens"] == live_panel.resolved.max_num_batched_tokens == 8192
    assert vllm_processes() == []


@pytest.mark.live
@pytest.mark.timeout(900)
def test_on_a_gpu_vllm_resolves_what_the_other_controls_say(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("MEMLAB_RUNS", str(tmp_path))
    here = lab.here("live")
    if here.backend != "cuda":
        pytest.skip("card, utilization, graphs and ranks are a GPU's")
    made = ControlPanel("test", here, "qwen2.5-0.5b", ServeFlags(max_model_len=4096, enforce_eager=True))
    ranks = 2 if 2 in made.control("tensor_parallel_size").values else None
    one = {"gpu_memory_utilization": "0.5", "enforce_eager": False, "tensor_parallel_size": ranks}
    for name, value in one.items():
        if not made.control(name).off:
            made.view.inputs[name].value = UNSET if value is None else value
    found = made.result()
    assert found.outcome == "ok", found.error
    assert (found.flags.resolved["gpu_memory_utilization"], found.flags.resolved["enforce_eager"]) == (0.5, False)
    assert found.stated.cuda_graphs_actual_gib > 0
    assert len(found.ranks) == (ranks or 1)
    made.reset()
    card = made.control("card")
    if not card.off:
        made.view.inputs["card"].value = card.values[1]
        played = made.result()
        assert (played.outcome, played.card) == ("ok", card.values[1]), played.error
        assert played.seen.total_gib < found.seen.total_gib


@pytest.mark.live
def test_stop_in_the_middle_of_a_start_keeps_the_record_and_leaves_nothing(live_panel, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_RUNS", str(tmp_path))
    view = live_panel.view
    view.run.click()
    wait_until(lambda: live_panel.live and max(live_panel.live.timelines[0].used_gib, default=0) > 0.3, 90)
    view.stop.click()
    live_panel.wait()
    assert vllm_processes() == []
    (kept,) = live_panel.runs
    assert kept.outcome == "stopped"
    assert kept.seen.peak_gib > 0
    assert record.read(next(tmp_path.glob("run-*/*-r1.json"))) == kept
    assert [phase.name for phase in kept.phases][-2:] == ["stopping", "stopped"]


@pytest.mark.live
def test_the_interrupt_of_an_idle_kernel_stops_the_panels_run(tmp_path):
    code = textwrap.dedent("""
        from memlab import lab
        from memlab.flags import ServeFlags
        from memlab.widgets import ControlPanel
        base = ServeFlags(kv_cache_memory_bytes=1 << 30, max_model_len=8192, enforce_eager=True)
        panel = ControlPanel("test", lab.here("live"), "tiny-llama", base)
        panel.view.run.click()
    """)
    with kernel(tmp_path) as (manager, client):
        client.execute(code)
        assert client.get_shell_msg(timeout=60)["content"]["status"] == "ok"
        wait_until(vllm_processes, 60)
        time.sleep(3)
        manager.interrupt_kernel()
        wait_until(lambda: not vllm_processes(), 60)
        wait_until(lambda: list(tmp_path.glob("run-*/*-r1.json")), 30)
        assert record.read(next(tmp_path.glob("run-*/*-r1.json"))).outcome == "stopped"
        client.execute("1 + 1")
        assert client.get_shell_msg(timeout=60)["content"]["status"] == "ok", "the kernel is there after it"
