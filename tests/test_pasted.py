"""Flags of a server that stand beside a log: what people paste, in the forms in which they paste it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab import doctor, flags, pasted, vllm_log, vllm_main
from memlab.errors import FlagError

WANTED = {"max_model_len": 8192, "gpu_memory_utilization": 0.95, "tensor_parallel_size": 2}

FORMS = {
    "a command": "$ vllm serve some/model --max-model-len 8192 --gpu-memory-utilization=0.95 -tp 2",
    "over lines": (
        "vllm serve some/model \\\n  --max_model_len 8192 \\\n  --gpu-memory-utilization 0.95 \\\n  -tp 2 --port 8000"
    ),
    "over lines, the backslashes lost": (
        "vllm serve some/model\n--max-model-len 8192\n--gpu-memory-utilization 0.95\n--tensor-parallel-size 2"
    ),
    "the module": (
        "CUDA_VISIBLE_DEVICES=0,1 python3 -m vllm.entrypoints.openai.api_server --model some/model "
        "--max-model-len 8192 --gpu-memory-utilization 0.95 --tensor-parallel-size 2"
    ),
    "docker": (
        "sudo docker run --gpus all --shm-size 16g -e HF_TOKEN=$TOKEN -p 8000:8000 vllm/vllm-openai:v0.20.0 \\\n"
        "    --model some/model --max-model-len 8192 \\\n    --gpu-memory-utilization 0.95 --tensor-parallel-size 2"
    ),
    "within quotes": 'bash -c "vllm serve some/model --max-model-len 8192 --gpu-memory-utilization 0.95 -tp 2"',
    "a script that echoes": (
        "+ exec vllm serve some/model --max-model-len 8192 --gpu-memory-utilization 0.95 --tensor-parallel-size 2"
    ),
    "compose, one string": (
        "services:\n  vllm:\n    image: vllm/vllm-openai\n    command: >\n"
        "      --model some/model --max-model-len 8192\n"
        "      --gpu-memory-utilization 0.95 --tensor-parallel-size 2\n    ports:\n      - 8000:8000"
    ),
    "compose, a list": (
        'command: ["--model", "some/model", "--max-model-len", "8192",\n  "--gpu-memory-utilization", "0.95",\n'
        '  "--tensor-parallel-size", "2"]\nports: ["8000:8000"]'
    ),
    "kubernetes": (
        "      containers:\n      - name: vllm\n        args:\n        - serve\n        - some/model\n"
        '        - --max-model-len\n        - "8192"\n        - "--gpu-memory-utilization=0.95"\n'
        "        - --tensor-parallel-size=2\n        resources:\n          limits: {nvidia.com/gpu: 2}"
    ),
    "systemd": (
        "[Service]\nExecStart=/opt/venv/bin/vllm serve some/model --max-model-len 8192 \\\n"
        "    --gpu-memory-utilization 0.95 --tensor-parallel-size 2\nRestart=always"
    ),
    "offline": (
        'llm = LLM(\n    model="some/model",\n    max_model_len=8192,\n    gpu_memory_utilization=0.95,\n'
        "    tensor_parallel_size=2,\n)"
    ),
}


def commands(text: str) -> list[dict]:
    return [event.values for event in vllm_log.parse(text.split("\n")) if event.kind == "command"]


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_the_flags_are_read_in_each_form_in_which_people_paste_them(text):
    assert commands(text) == [WANTED]


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_a_command_beside_a_log_gives_what_the_log_does_not_state(text):
    log = (
        'File "vllm/v1/worker/gpu_worker.py", line 1, in _dummy_sampler_run\ntorch.OutOfMemoryError: CUDA out of memory'
    )
    for paste in (f"{text}\n\n{log}", f"{log}\n\n{text}"):
        found = doctor.diagnose(paste)
        (change,) = [fix for fix in found.failures[0].fixes if fix.flag == "--gpu-memory-utilization"]
        assert (found.phase, change.from_) == ("sampler_warmup", 0.95)


@pytest.mark.parametrize(
    "line",
    [
        "usage: vllm serve [model_tag] [options] --max-model-len MAX_MODEL_LEN",
        "vllm serve: error: argument --max-model-len: invalid value",
        "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory.",
        "INFO [gpu_worker.py:1] The current --gpu-memory-utilization=0.9200 is equivalent to another",
        "INFO [startup.py:96] non-default args: {'max_model_len': 4096}",
        "when I run vllm serve it dies",
        "vllm serve $MODEL --max-model-len $LENGTH",
    ],
)
def test_what_only_names_flags_is_no_command(line):
    assert commands(line) == []


def test_what_cannot_be_read_is_left_out_and_the_rest_stays():
    assert commands("vllm serve m --max-model-len ${LEN} --max-num-seqs 16 --gpu-memory-utilization") == [
        {"max_num_seqs": 16}
    ]


def test_switches_are_on_or_off():
    text = "vllm serve m --enforce-eager --no-enable-prefix-caching --max-num-seqs 4"
    assert commands(text) == [{"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 4}]
    assert commands('LLM("m", enforce_eager=True, max_num_seqs=4)') == [{"enforce_eager": True, "max_num_seqs": 4}]


def test_the_log_outweighs_the_paste_and_the_caller_outweighs_both():
    log = (
        "vllm serve m --max-num-seqs 64 --max-model-len 100\n"
        "(APIServer pid=1) INFO 12-01 10:00:00 [startup.py:96] non-default args: {'max_num_seqs': 32}\n"
        'File "vllm/v1/worker/gpu_worker.py", line 1, in _dummy_sampler_run\ntorch.OutOfMemoryError: CUDA out of memory'
    )

    def seqs(**known) -> object:
        failure = doctor.diagnose(log, **known).failures[0]
        return next(fix.from_ for fix in failure.fixes if fix.flag == "--max-num-seqs")

    assert seqs() == 32
    assert seqs(command="vllm serve m --max-num-seqs 16") == 16


def test_a_command_before_a_start_is_that_starts():
    failed = 'File "vllm/v1/worker/gpu_worker.py", line 1, in {}\ntorch.OutOfMemoryError: CUDA out of memory'
    text = "\n".join(
        [
            "vllm serve m --max-num-seqs 64",
            "vLLM API server version 0.20.0",
            failed.format("_dummy_sampler_run"),
            "vllm serve m --max-num-seqs 32",
            "vLLM API server version 0.20.0",
            failed.format("capture_model"),
        ]
    )
    found = doctor.diagnose(text)
    assert [one.phase for one in found.failures] == ["sampler_warmup", "cuda_graph_capture"]
    seqs = [fix.from_ for one in found.failures for fix in one.fixes if fix.flag == "--max-num-seqs"]
    assert seqs == [64, 32]


def test_the_line_of_our_own_server_states_what_vllm_filled_in():
    line = vllm_main.PREFIX + '{"gpu_memory_utilization": 0.92, "max_num_seqs": 256, "kv_cache_dtype": "auto"}'
    (event,) = vllm_log.parse([line])
    assert event.kind == "resolved"
    assert vllm_log.resolved([event]) == {"gpu_memory_utilization": 0.92, "max_num_seqs": 256, "kv_cache_dtype": "auto"}


def test_a_secret_beside_the_flags_is_not_kept():
    (event,) = vllm_log.parse(["vllm serve m --api-key sk-abcdefghijklmnop --max-num-seqs 4"])
    assert "sk-" not in event.text + str(event.values)


@given(st.lists(st.sampled_from([*"\n\\'\"[]:,-= ", "vllm serve m ", "args:", "LLM(", "--max-model-len ", "8", "- "])))
def test_a_broken_command_raises_nothing(parts):
    for found in commands("".join(parts)):
        assert set(found) <= {field.name for field in flags.MODELLED}


def test_a_command_that_is_given_is_refused_where_vllm_would():
    with pytest.raises(FlagError, match="max-num-seqs"):
        doctor.diagnose("", "docker run vllm/vllm-openai --model m --max-num-seqs many")
    assert pasted.begun("a line of a log") is None
