"""The planner: counts against transformers' own classes, invariants, and 44 starts that others measured."""

import csv
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab import cards, configs, kv_layout, ledger, planner, quantization, shapes, sweep, versions, weights
from memlab.errors import FlagError, ShapeError
from memlab.flags import ServeFlags, resolve
from memlab.shapes import LAB_MODELS
from memlab.units import GIB, MIB

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "planner"
CONFIGS = json.loads((DATA / "configs.json").read_text())
ROWS = list(csv.DictReader((DATA / "h100-vllm-0.19.csv").open()))
H200, RTX_3090 = cards.find("H200"), cards.find("3090")


def planned(model: str, card=H200, version=(0, 33), **flags) -> planner.Plan:
    return planner.plan(LAB_MODELS[model], card, ServeFlags(**flags), version)


# ---- shapes ----


@pytest.mark.parametrize("name", LAB_MODELS)
def test_parameters_are_those_of_transformers_own_class(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = LAB_MODELS[name].to_config()
    config.pop("quantization_config", None)
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    counted = sum(tensor.numel() for tensor in model.parameters())
    counted += sum(tensor.numel() for key, tensor in model.named_buffers() if "bias" in key)
    assert LAB_MODELS[name].parameters() == counted


def test_a_multimodal_models_text_and_tower_are_both_counted():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = {**CONFIGS["mistralai/Mistral-Small-3.1-24B-Instruct-2503"], "tie_word_embeddings": False}
    with torch.device("meta"):
        model = transformers.Mistral3ForConditionalGeneration(transformers.AutoConfig.for_model(**config))
    counted = sum(tensor.numel() for tensor in model.parameters())
    assert shapes.from_config(config).parameters() == pytest.approx(counted, rel=1e-3)


def test_a_model_that_keeps_a_state_is_refused_by_what_it_keeps():
    with pytest.raises(ShapeError, match="mamba_d_state"):
        shapes.from_config({"architectures": ["JambaForCausalLM"], "mamba_d_state": 16})


@pytest.mark.parametrize("wrong", [{"hidden_size": "large"}, {"num_attention_heads": 0}, {"vocab_size": None}])
def test_a_field_of_the_wrong_kind_is_named(wrong):
    with pytest.raises(ShapeError, match="config.json"):
        shapes.from_config({**LAB_MODELS["tiny-llama"].to_config(), **wrong})


def test_an_unknown_quantization_is_refused_by_name():
    with pytest.raises(ShapeError, match="squeezellm"):
        quantization.from_config({"quant_method": "squeezellm"})


@pytest.mark.parametrize(
    ("name", "least", "most"),  # bits of a weight, embeddings and head in the model's own type
    [("llama-3.1-8b-fp8", 8, 10), ("qwen2.5-7b-awq", 4, 7), ("qwen2.5-7b-gptq", 4, 7), ("gpt-oss-20b", 4, 6)],
)
def test_quantized_weights_take_the_bits_of_their_method(name, least, most):
    shape = LAB_MODELS[name]
    assert least < 8 * weights.stage_bytes(shape) / shape.parameters() < most


def test_ranks_hold_shares_and_replicate_what_does_not_divide():
    shape = LAB_MODELS["llama-3.1-8b"]
    one, two, sixteen = (weights.stage_bytes(shape, ranks) for ranks in (1, 2, 16))
    assert one / 2 < two < one / 2 + 40 * MIB, "norms and the rotary table are replicated"
    assert sixteen > one / 16 + 8 * 2 * 4096 * 128 * 2 * 32 // 16, "half of 16 ranks repeat a KV head"


def test_latent_attention_is_replicated_in_the_kv_cache():
    shape = LAB_MODELS["deepseek-v2-lite-12-layers"]
    assert shape.kv_bytes_per_token(tensor_parallel_size=8) == shape.kv_bytes_per_token() == 12 * 576 * 2


def test_stages_divide_the_layers_as_vllm_does():
    shape = LAB_MODELS["qwen2.5-7b"]
    assert [end - first for first, end in shape.stages(3)] == [9, 10, 9]
    assert sum(weights.stage_bytes(shape, 1, stage) for stage in shape.stages(4)) > weights.stage_bytes(shape)


@given(st.integers(1, 1 << 33), st.booleans())
def test_an_allocation_is_at_least_its_size_and_at_most_a_segment_more(size, limited):
    assert size <= weights.allocated(size, limited) < size + 2 * MIB


# ---- the KV cache ----


@given(st.lists(st.sampled_from([shapes.FULL, shapes.SLIDING]), min_size=1, max_size=80))
def test_each_layer_is_in_one_group_of_one_kind(kinds):
    groups = kv_layout.group(tuple(kinds))
    assert sorted(layer for layers in groups for layer in layers) == list(range(len(kinds)))
    assert all(len({kinds[layer] for layer in layers}) == 1 for layers in groups)


def test_gemma_3_shares_a_block_among_six_groups_of_eight_layers():
    layout = kv_layout.layout(LAB_MODELS["gemma-3-12b-text"])
    assert len(layout.groups) == 6
    assert layout.bytes_per_block == 8 * 16 * 2 * 8 * 256 * 2


@pytest.mark.parametrize("name", [name for name, shape in LAB_MODELS.items() if len(set(shape.kinds())) > 1])
def test_groups_and_blocks_are_those_of_vllms_own_code(name):
    pytest.importorskip("vllm")
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

    shape = LAB_MODELS[name]
    sizes = {"block_size": 16, "num_kv_heads": shape.kv_heads(), "head_size": shape.head_dim, "dtype": torch.bfloat16}
    specs = {
        shapes.FULL: lambda: FullAttentionSpec(**sizes),
        shapes.SLIDING: lambda: SlidingWindowSpec(**sizes, sliding_window=shape.sliding_window),
        shapes.CHUNKED: lambda: ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=shape.attention_chunk_size),
    }
    layers = {str(number): specs[kind]() for number, kind in enumerate(shape.kinds())}
    theirs = kv_cache_utils._get_kv_cache_groups_uniform_page_size(layers)
    ours = kv_layout.layout(shape)
    grouped = sorted([int(layer) for layer in group.layer_names] for group in theirs)
    assert sorted(kv_layout.group(shape.kinds())) == grouped
    widest = max(len(group.layer_names) for group in theirs)
    assert ours.bytes_per_block == widest * theirs[0].kv_cache_spec.page_size_bytes
    taken = {"max_in_flight_tokens": 4096, "max_model_len": 8192}
    blocks = sum(
        spec.max_admission_blocks_per_request(**taken) if hasattr(spec, "max_admission_blocks_per_request") else 512
        for spec in (group.kv_cache_spec for group in theirs)
    )
    assert ours.blocks_per_request(8192, 4096) == blocks


@given(st.sampled_from(sorted(LAB_MODELS)), st.integers(1, 20000), st.integers(1, 20000))
def test_a_longer_request_takes_no_fewer_blocks(name, length, more):
    layout = kv_layout.layout(LAB_MODELS[name])
    assert layout.blocks_per_request(length, 4096) <= layout.blocks_per_request(length + more, 4096)


# ---- predictions ----

MODELS = st.sampled_from(sorted(configs.PLANNER_CONFIGS))


@settings(max_examples=60, deadline=None)
@given(MODELS, st.integers(64, 8192), st.integers(1, 64), st.booleans(), st.sampled_from([(0, 19), (0, 26), (0, 33)]))
def test_terms_fill_the_budget_and_grow_with_what_they_depend_on(name, tokens, seqs, eager, version):
    def predicted(tokens, seqs):
        asked = ServeFlags(max_model_len=2048, max_num_batched_tokens=tokens, max_num_seqs=seqs, enforce_eager=eager)
        return ledger.predict(LAB_MODELS[name], 139.8, resolve(asked, 8192, 1024, 2048), version)

    base, longer, wider = predicted(tokens, seqs), predicted(2 * tokens, seqs), predicted(tokens, 2 * seqs)
    assert all(identity.holds for identity in base.ledger.identities())
    assert longer.ledger.activation_gib >= base.ledger.activation_gib
    assert wider.ledger.kv_cache_gib <= base.ledger.kv_cache_gib
    for term, (low, high) in base.bands.items():
        value = base.ledger.term(term)
        assert low <= value <= high, term


@settings(max_examples=40, deadline=None)
@given(MODELS, st.floats(8, 192), st.integers(1, 16))
def test_a_larger_card_never_stops_what_a_smaller_one_starts(name, size, more):
    small, large = (planner.card_of(gib) for gib in (size, size + more))
    flags = ServeFlags(max_model_len=2048, max_num_batched_tokens=2048, max_num_seqs=64)
    first, second = (planner.plan(LAB_MODELS[name], card, flags) for card in (small, large))
    assert second.starts or not first.starts


@settings(max_examples=25, deadline=None)
@given(MODELS, st.floats(8, 48), st.sampled_from([4096, 8192, 32768]))
def test_each_change_lets_it_start_and_the_step_before_does_not(name, size, length):
    shape, card = LAB_MODELS[name], planner.card_of(size)
    asked = ServeFlags(max_model_len=min(length, shape.max_model_len))
    found = planner.plan(shape, card, asked)
    assert bool(found.changes) <= (not found.starts)
    for change in found.changes:
        assert planner.plan(shape, card, asked.with_(**{change.flag: change.to})).starts
        if change.flag == "max_model_len":
            assert not planner.plan(shape, card, asked.with_(max_model_len=change.to + 1)).starts


def test_what_only_a_version_does_is_told_apart():
    flags = {"max_model_len": 8192, "gpu_memory_utilization": 0.5}
    old, new = (planned("llama-3.1-8b", version=version, **flags).prediction.ledger for version in ((0, 19), (0, 33)))
    assert (old.graphs_subtracted, new.graphs_subtracted) == (False, True)
    assert (old.consumed_gib, new.non_torch_gib) == (None, None)
    assert planned("llama-3.1-8b", version=(0, 22)).flags.gpu_memory_utilization is None
    assert planned("llama-3.1-8b", version=(0, 22)).prediction.ledger.budget_gib == pytest.approx(0.9 * 139.8)


def test_a_version_without_records_says_so():
    assert any("not validated" in warning for warning in planned("llama-3.1-8b", version=(0, 30)).warnings)
    assert not any("not validated" in warning for warning in planned("llama-3.1-8b", version=(0, 33)).warnings)
    assert versions.rules_for((0, 40)) == versions.rules_for((0, 33))


@pytest.mark.parametrize(
    ("card", "flags", "words"),
    [
        (RTX_3090, {"gpu_memory_utilization": 0.99, "max_model_len": 4096}, "Free memory on device"),
        (RTX_3090, {}, "To serve at least one request with the model's max seq len (131072)"),
        (RTX_3090, {"gpu_memory_utilization": 0.6, "max_model_len": 4096}, "No available memory for the cache blocks"),
        (cards.find("T4"), {"max_model_len": 4096, "kv_cache_dtype": "fp8"}, "requires SM89+"),
        (cards.find("T4"), {"max_model_len": 4096, "dtype": "bfloat16"}, "Bfloat16 is only supported"),
        (cards.find("T4"), {"max_model_len": 4096}, "CUDA out of memory while the weights load"),
        (H200, {"tensor_parallel_size": 3}, "must be divisible by tensor parallel size"),
        (RTX_3090, {"kv_cache_memory_bytes": 9 * GIB, "max_model_len": 4096}, "while the KV cache is allocated"),
        (H200, {"max_num_batched_tokens": 32, "max_num_seqs": 64}, "max_num_seqs (64)"),
    ],
)
def test_a_start_that_fails_names_the_check_in_vllms_words(card, flags, words):
    found = planned("llama-3.1-8b", card, **flags)
    assert not found.starts
    assert words in found.failed_check


def test_a_data_type_that_the_card_lacks_is_changed_back():
    found = planned("llama-3.1-8b", replace(RTX_3090, compute_capability=(7, 5)), max_model_len=4096,
                    kv_cache_dtype="fp8")  # fmt: skip
    assert [(change.flag, change.to) for change in found.changes] == [("kv_cache_dtype", "auto")]


def test_the_backend_of_latent_attention_sets_the_block():
    blocks = [planned("deepseek-v2-lite-12-layers", max_model_len=8192, kv_cache_dtype=dtype).flags.block_size
              for dtype in ("auto", "fp8")]  # fmt: skip
    assert blocks == [16, 64]


def test_the_estimated_length_is_what_the_pool_would_hold():
    found = planned("gemma-3-12b-text", cards.find("A6000"), gpu_memory_utilization=0.55)
    estimate = int(found.failed_check.split("estimated maximum model length is ")[1].split(".")[0])
    assert 1000 < estimate < found.flags.max_model_len
    tokens = found.flags.max_num_batched_tokens
    fits = planned("gemma-3-12b-text", cards.find("A6000"), gpu_memory_utilization=0.55, max_model_len=estimate - 16,
                   max_num_batched_tokens=tokens, max_num_seqs=found.flags.max_num_seqs)  # fmt: skip
    assert fits.starts, fits.failed_check


def test_auto_takes_the_longest_request_that_fits():
    found = planned("llama-3.1-8b", RTX_3090, max_model_len=-1)
    assert found.starts
    assert 1 <= found.prediction.max_concurrency < 1.01


def test_fewer_batched_tokens_refill_the_pool_and_leave_the_headroom():
    wide, narrow = (planned("llama-3.1-8b", max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=tokens)
                    for tokens in (16384, 2048))  # fmt: skip
    assert narrow.headroom_gib == wide.headroom_gib
    assert narrow.prediction.ledger.kv_cache_gib > wide.prediction.ledger.kv_cache_gib + 1


def test_the_suggested_pool_starts_and_is_what_was_planned():
    found = planned("llama-3.1-8b", RTX_3090, max_model_len=8192)
    given = planned("llama-3.1-8b", RTX_3090, max_model_len=8192, kv_cache_memory_bytes=found.suggested_kv_cache_bytes)
    assert given.starts
    assert given.prediction.kv_tokens == pytest.approx(found.prediction.kv_tokens, rel=0.05)


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel_size": 0},
        {"pipeline_parallel_size": 99},
        {"cpu_offload_gb": -1.0},
        {"kv_cache_memory_bytes": 0},
        {"max_num_seqs": 0},
        {"gpu_memory_utilization": 1.5},
    ],
)
def test_values_without_meaning_are_refused(flags):
    with pytest.raises(FlagError, match=next(iter(flags))):
        planned("llama-3.1-8b", **flags)


# ---- against what was measured ----


def predicted_row(row: dict) -> ledger.Prediction:
    shape = shapes.from_config(CONFIGS[row["model"]])
    asked = ServeFlags(
        gpu_memory_utilization=float(row["gpu_memory_utilization"]),
        max_model_len=int(row["max_model_len"]),
        tensor_parallel_size=int(row["tp"]),
        pipeline_parallel_size=int(row["pp"]),
        dtype=row["dtype"].removeprefix("torch."),
        kv_cache_dtype=row["kv_cache_dtype"],
        quantization=None if row["quantization"] == "None" else row["quantization"],
    )
    flags = resolve(asked, 8192, 1024, shape.max_model_len)
    return ledger.predict(shape, float(row["init_total_memory_gib"]), flags, (0, 19))


def test_44_starts_on_h100_are_met():
    found = [(row, predicted_row(row)) for row in ROWS]
    inside = [low <= float(row["activation_memory_gib"]) <= high
              for row, one in found for low, high in [one.stages[0].bands["activation"]]]  # fmt: skip
    for row, one in found:
        first = one.stages[0].ledger  # the rank whose lines the data have
        assert first.weights_gib == pytest.approx(float(row["weight_memory_gib"]), rel=0.01)
        assert first.activation_gib == pytest.approx(float(row["activation_memory_gib"]), abs=0.25)
        assert one.kv_tokens == pytest.approx(int(row["kv_cache_tokens"]), rel=0.02)
        assert one.max_concurrency == pytest.approx(float(row["max_concurrency"]), rel=0.02)
    assert statistics.mean(inside) >= 0.95


# ---- the command ----


def memlab_plan(*words: str) -> subprocess.CompletedProcess:
    """On a bare Python: no site packages."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'labs')!r}); from memlab import cli; sys.exit(cli.main())"
    command = [sys.executable, "-I", "-S", "-c", code, "plan", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LAB_MODELS["llama-3.1-8b"].to_config()))
    return str(path)


KEYS = {
    "starts", "budget_gib", "weights_gib", "activation_gib", "non_torch_gib", "cuda_graphs_gib", "kv_cache_gib",
    "kv_tokens", "kv_blocks", "max_concurrency", "reachable_kv_tokens", "bands", "failed_check", "changes",
}  # fmt: skip


def test_the_command_prints_the_plan_as_json_on_a_bare_python(config):
    done = memlab_plan("--json", "--config", config, "--card-gib", "79.19", "--vllm-version", "0.19.0",
                       "--max-model-len", "8192", "--gpu-memory-utilization", "0.95")  # fmt: skip
    printed = json.loads(done.stdout)
    assert set(printed) >= KEYS
    assert printed["starts"] and printed["failed_check"] is None
    assert printed["kv_tokens"] == pytest.approx(476016, rel=0.01)
    assert all(low <= high for low, high in printed["bands"].values())


def test_the_command_shows_table_line_and_rules(config):
    done = memlab_plan("--config", config, "--card", "3090", "--max-model-len", "8192", "--explain")
    assert done.returncode == 0
    for words in ("GPU KV cache size:", "kv_cache", "vllm serve MODEL", "--max-model-len 8192", "8,030,261,248"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--card", "GeForce"], "name one of"),
        (["--card-gib", "0"], "what CUDA reports"),
        (["--card", "3090", "--max-num-seqs", "many"], "whole number"),
        (["--card", "3090", "--vllm-version", "latest"], "0.33.0"),
        (["--card", "3090", "--swap-space", "16"], "--swap-space"),
        (["--card", "3090", "--kv-cache-dtype", "nf4"], "nf4"),
    ],
)
def test_bad_input_gets_an_error_that_says_what_to_do(config, words, message):
    done = memlab_plan("--config", config, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# ---- what is to be recorded ----


def grid(name: str) -> list[sweep.Setting]:
    return [sweep.from_dict(entry) for entry in json.loads((ROOT / "labs" / "grids" / f"{name}.json").read_text())]


def test_the_grid_holds_forty_starts_of_a_dozen_shapes_that_the_planner_says_start():
    found = grid("planner")
    assert len(found) >= 40
    assert len({setting.model for setting in found}) >= 12
    for setting in found:
        assert planner.plan(LAB_MODELS[setting.model], H200, setting.flags).starts, str(setting)
    assert {str(setting) for setting in grid("planner-0.26")} < {str(setting) for setting in found}


@pytest.mark.parametrize("name", configs.PLANNER_CONFIGS)
def test_vllm_takes_each_config_and_sees_the_same_heads(name, tmp_path):
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    (tmp_path / "config.json").write_text(json.dumps(LAB_MODELS[name].to_config()))
    model = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, load_format="dummy").create_model_config()
    shape = LAB_MODELS[name]
    assert model.use_mla == shape.uses_latent_attention
    assert model.get_head_size() == (shape.latent.size if shape.latent else shape.head_dim)
    assert model.max_model_len == shape.max_model_len
