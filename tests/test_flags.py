import shlex

import pytest

from memlab import flags, launch
from memlab.errors import FlagError
from memlab.flags import ServeFlags


def test_a_pasted_command_comes_out_again_with_the_same_meaning():
    line = (
        "vllm serve meta-llama/Llama-3.1-8B --max_num_seqs=64 -tp 2 --gpu-memory-utilization 0.85 "
        "--max-num-batched-tokens 2K --no-enable-chunked-prefill --enforce-eager --served-model-name 'my model'"
    )
    found = launch.read(line)
    read = found.flags
    assert (read.max_num_seqs, read.tensor_parallel_size, read.max_num_batched_tokens) == (64, 2, 2048)
    assert read.enable_chunked_prefill is False
    assert read.extra == ("--served-model-name", "my model")
    assert launch.read(read.command(found.model)) == found


def test_a_value_that_vllm_refuses_is_refused_with_vllms_flag_in_the_message():
    with pytest.raises(FlagError, match="--kv-cache-memory-bytes"):
        flags.from_args(["--kv-cache-memory", "20GiB"])


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (ServeFlags(gpu_memory_utilization=1.2), "share"),
        (ServeFlags(gpu_memory_utilization=0.0), "share"),
        (ServeFlags(max_num_batched_tokens=32, max_num_seqs=64), "max_num_seqs"),
        (ServeFlags(max_num_batched_tokens=4096, max_model_len=8192, enable_chunked_prefill=False), "chunked"),
        (ServeFlags(block_size=17), "multiples of 16"),
        (ServeFlags(max_num_seqs=0), "at least 1"),
    ],
)
def test_combinations_that_vllm_refuses_are_named_before_a_start(wrong, word):
    with pytest.raises(FlagError, match=word):
        flags.check(wrong)


def test_a_budget_equal_to_the_model_length_is_enough_without_chunking():
    flags.check(ServeFlags(max_num_batched_tokens=8192, max_model_len=8192, enable_chunked_prefill=False))


def test_an_unset_number_of_sequences_is_lowered_to_the_step():
    resolved = flags.resolve(ServeFlags(max_num_batched_tokens=512), 8192, 1024, 131072)
    assert (resolved.max_num_batched_tokens, resolved.max_num_seqs) == (512, 512)


def test_without_chunking_the_step_grows_to_the_longest_request():
    resolved = flags.resolve(ServeFlags(enable_chunked_prefill=False, max_model_len=32768), 8192, 1024, 131072)
    assert resolved.max_num_batched_tokens == 32768


def test_the_step_is_no_larger_than_all_requests_together():
    resolved = flags.resolve(ServeFlags(max_model_len=1024, max_num_seqs=4), 8192, 1024, 131072)
    assert resolved.max_num_batched_tokens == 4096


def test_nothing_in_a_flag_reaches_a_shell_unquoted():
    command = ServeFlags(extra=("--served-model-name", "$(rm -rf ~); `id`")).command("a model; id")
    assert shlex.split(command.replace("\\\n", " ")) == [
        "vllm", "serve", "a model; id", "--served-model-name", "$(rm -rf ~); `id`",
    ]  # fmt: skip


@pytest.mark.live
def test_every_flag_is_one_that_vllm_knows_and_reads_alike():
    """Each modelled flag goes through vLLM's own parser and comes out with the same value."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = ServeFlags(
        gpu_memory_utilization=0.5, kv_cache_memory_bytes=1 << 30, max_model_len=4096, max_num_batched_tokens=2048,
        max_num_seqs=64, enable_chunked_prefill=False, long_prefill_token_threshold=16, enable_prefix_caching=False,
        block_size=32, kv_cache_dtype="fp8", num_gpu_blocks_override=10, enforce_eager=True,
        max_cudagraph_capture_size=8, tensor_parallel_size=2, pipeline_parallel_size=1, dtype="bfloat16",
        quantization="awq", load_format="dummy", cpu_offload_gb=1.0, seed=3,
    )  # fmt: skip
    assert set(given.set()) == {field.name for field in flags.MODELLED}
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = vars(parser.parse_args(given.to_args()))
    for name, value in given.set().items():
        assert parsed[name] == value, name
