"""The vision tower of a multimodal model: its parameters, and what it adds to the profiled step."""

from collections.abc import Mapping
from dataclasses import dataclass

from memlab.errors import ShapeError


@dataclass(frozen=True)
class Vision:
    """``layers`` are the parameters of the tower's layers, which tensor parallelism divides, ``ends`` those of its
    embeddings and of the projector, of which each rank has the whole. ``image_tokens`` is what one image of the largest
    size becomes in the text, ``image_pixels`` its pixels (each three values)."""

    layers: int
    ends: int
    image_tokens: int
    image_pixels: int


def _transformer(hidden: int, intermediate: int, layers: int, bias: bool, norms: int) -> int:
    """Encoder layers: four attention matrices and two of the MLP; ``norms`` values a layer."""
    matrices = 4 * hidden * hidden + 2 * hidden * intermediate
    biases = (4 * hidden + hidden + intermediate) if bias else 0
    return layers * (matrices + biases + norms)


def _siglip(config: Mapping, image: int, patch: int) -> tuple[int, int]:
    """Parameters of the layers and of the ends."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    embeddings = 3 * patch * patch * hidden + hidden + (image // patch) ** 2 * hidden
    return _transformer(hidden, config["intermediate_size"], layers, True, 4 * hidden), embeddings + 2 * hidden


def from_config(config: Mapping, text_hidden: int) -> Vision | None:
    """The tower of a whole ``config.json``; None for a model of text alone.

    Sources: vllm/model_executor/models/{siglip,pixtral,mllama4,moonvit,gemma3_mm,mistral3,llava_next,kimi_vl}.py.

    Raises:
        ShapeError: for a tower that is not counted.
    """
    tower = config.get("vision_config")
    if not tower:
        return None
    kind = tower.get("model_type", "?")
    patch, image = tower.get("patch_size", 14), tower.get("image_size", 896)
    side = image // patch
    if kind == "siglip_vision_model" and config.get("model_type") == "gemma3":
        hidden, tokens = tower["hidden_size"], config.get("mm_tokens_per_image", 256)
        projector = hidden * text_hidden + hidden
        layers, ends = _siglip(tower, image, patch)
        return Vision(layers, ends + projector, tokens, image * image)
    if kind == "siglip_vision_model" and config.get("model_type") == "llava_next":
        taken = config.get("vision_feature_layer", -2)
        count = len(taken) if isinstance(taken, list) else 1
        width = tower["hidden_size"] * count
        projector = width * text_hidden + text_hidden * text_hidden + 2 * text_hidden + text_hidden
        tiles = 1 + 10  # the base image and the most of image_grid_pinpoints
        layers, ends = _siglip(tower, image, patch)
        return Vision(layers, ends + projector, side * side * tiles, image * image * tiles)
    if kind == "pixtral":
        hidden, merge = tower["hidden_size"], config.get("spatial_merge_size", 2)
        intermediate, layers = tower["intermediate_size"], tower["num_hidden_layers"]
        gated = layers * (4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden)
        embeddings = 3 * patch * patch * hidden + hidden
        projector = hidden + merge * merge * hidden * hidden + hidden * text_hidden + text_hidden * text_hidden
        return Vision(gated, embeddings + projector, (side // merge) ** 2, image * image)
    if kind == "llama4_vision_model":
        hidden = tower["hidden_size"]
        layers = _transformer(hidden, tower["intermediate_size"], tower["num_hidden_layers"], True, 4 * hidden)
        embeddings = 3 * patch * patch * hidden + hidden + (side * side + 1) * hidden + 4 * hidden
        inner, outer = tower["projector_input_dim"], tower["projector_output_dim"]
        adapter = tower["intermediate_size"] * inner + inner * outer
        shuffled = int(side * side * tower.get("pixel_shuffle_ratio", 0.5) ** 2)
        tiles = 17  # 16 and the whole image
        projector = tower["vision_output_dim"] * text_hidden
        return Vision(layers, embeddings + adapter + projector, shuffled * tiles, image * image * tiles)
    if kind == "moonvit":
        hidden = tower["hidden_size"]
        layers = _transformer(hidden, tower["intermediate_size"], tower["num_hidden_layers"], True, 4 * hidden)
        grid = tower["init_pos_emb_height"] * tower["init_pos_emb_width"]
        embeddings = 3 * patch * patch * hidden + hidden + grid * hidden
        merged = 4 * hidden
        projector = 2 * hidden + merged * merged + merged + merged * text_hidden + text_hidden
        return Vision(layers, embeddings + 2 * hidden + projector, grid // 4, grid * patch * patch)
    raise ShapeError(
        f"vision tower {kind!r} is not counted: give the config.json of the text model alone (its text_config) and add "
        "the tower's weights yourself"
    )
