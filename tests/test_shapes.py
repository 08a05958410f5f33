import pytest

from memlab import cards, models, shapes
from memlab.errors import MemlabError, ShapeError
from memlab.shapes import LAB_MODELS


@pytest.mark.parametrize(
    ("model", "parameters"),  # as counted in the published checkpoints
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-0.5b", 494_032_768),
        ("mistral-7b-v0.1", 7_241_732_096),
    ],
)
def test_parameters_are_those_of_the_published_checkpoint(model, parameters):
    assert LAB_MODELS[model].parameters() == parameters


def test_kv_bytes_of_a_token_follow_heads_and_data_type():
    llama = LAB_MODELS["llama-3.1-8b"]
    assert llama.kv_bytes_per_token() == 131_072
    assert llama.kv_bytes_per_token("fp8") == 65_536
    assert llama.kv_bytes_per_token(tensor_parallel_size=8) == 16_384
    assert llama.kv_bytes_per_token(tensor_parallel_size=16) == 16_384, "the last head is replicated, not divided"


def test_a_shape_survives_its_config():
    for shape in LAB_MODELS.values():
        assert shapes.from_config(shape.to_config()) == shape


def test_an_unknown_architecture_or_a_missing_field_is_named():
    with pytest.raises(ShapeError, match="MambaForCausalLM"):
        shapes.from_config({"architectures": ["MambaForCausalLM"]})
    config = LAB_MODELS["tiny-llama"].to_config()
    del config["vocab_size"]
    with pytest.raises(ShapeError, match="vocab_size"):
        shapes.from_config(config)


def test_vllms_defaults_depend_on_the_card_and_the_entry_point():
    assert cards.batch_defaults(139.8, "NVIDIA H200", (0, 33)) == (8192, 1024)
    assert cards.batch_defaults(139.8, "NVIDIA H200", (0, 33), "offline") == (16384, 1024)
    assert cards.batch_defaults(79.2, "NVIDIA A100-SXM4-80GB", (0, 33)) == (2048, 256)
    assert cards.batch_defaults(23.6, "NVIDIA GeForce RTX 3090", (0, 33)) == (2048, 256)
    assert cards.batch_defaults(178.0, "NVIDIA B200", (0, 33)) == (16384, 1024)
    assert cards.batch_defaults(178.0, "NVIDIA B200", (0, 26)) == (8192, 1024)


def test_a_card_is_found_by_a_part_of_its_name_or_refused_by_listing_all():
    assert cards.find("3090").total_gib < 24
    with pytest.raises(MemlabError, match="H200"):
        cards.find("GeForce")


@pytest.mark.parametrize("name", ["tiny-llama", "llama-2-70b-rank-of-8", "qwen2.5-0.5b"])
def test_a_lab_models_text_keeps_its_length_from_ids_to_text_and_back(name, tmp_path):
    """Else a prompt of ``vllm bench serve`` is longer than asked for, and an answer waits in the stream."""
    transformers = pytest.importorskip("transformers")
    size = LAB_MODELS[name].vocab_size
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.write(name, LAB_MODELS[name], tmp_path))
    assert tokenizer.vocab_size == size
    for start in (2, 200, size // 2, size - 300):
        prompt = [token for token in ((start + i) % size for i in range(2000)) if token > 1]
        text = tokenizer.decode(prompt)
        assert len(tokenizer.encode(text, add_special_tokens=False)) == len(prompt)
    text = "Which flag moves which term? Größe: 16 GiB"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
