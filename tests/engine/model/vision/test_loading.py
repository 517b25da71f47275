"""Multimodal models are checked with an image, in all spellings, or served for text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.rank_threads import together
from tests.engine.vision_models import build, picture, save
from tests.long_parameters import with_long
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.kernels.communicator import SINGLE_RANK, Communicator
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import HFConfig, read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.native import DTYPE_TOLERANCE, ParityResult
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.parity import parity_inputs
from tidemill.engine.model.parity.logits import chunked_logits, parity_tokens
from tidemill.engine.model.vision.preprocessor_config import (
    LongestEdge,
    VisionConfig,
    read_vision_config,
)
from tidemill.engine.model.vision.soft_tokens import SoftTokens
from tidemill.engine.model.vision.squares import BySquares
from tidemill.engine.model.vision.tiles import Tiles
from tidemill.engine.model.weights.checkpoint import WHOLE, find_checkpoint

pytestmark = pytest.mark.usefixtures("proved")

KINDS = ["gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
# These are also compared in `tasks/test_image_processors`.
OTHERS = ["gemma4", "internvl"]
GLM = ["glm4v", "glm46v", "glm4v_moe", "glm_ocr"]
ALL_KINDS = with_long([*KINDS, "qwen3_vl_moe", "paddleocr_vl"], ["qwen3_5_moe", *GLM, *OTHERS])
PREPARATION = "preprocessor_config.json"
CPU = torch.device("cpu")


@pytest.fixture(name="folder_of", scope="module")
def fixture_folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that creates a new folder with the tiny model of a kind."""
    networks: dict[str, Any] = {}

    def folder_of(kind: str) -> Path:
        if kind not in networks:
            networks[kind] = build(kind)
        folder = tmp_path_factory.mktemp(kind)
        save(networks[kind], folder)
        return folder

    return folder_of


FolderOf = Callable[[str], Path]


def parse_hf_config(folder: Path) -> tuple[HFConfig, VisionConfig]:
    """Return a folder's config."""
    hf_config = read_hf_config(str(folder))
    vision = read_vision_config(hf_config)
    assert vision is not None
    return hf_config, vision


def check_parity(
    folder: Path, dtype: torch.dtype = torch.float32, *, change: Callable[[VisionConfig], None] = id
) -> ParityResult:
    """Check the model in a folder after a change of its image settings."""
    hf_config, vision = parse_hf_config(folder)
    change(vision)
    parts = find_checkpoint(str(folder)), hf_config, architecture_of(hf_config)
    return native.check_parity(*parts, native.load(*parts, dtype, CPU, vision=vision), vision)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of a JSON file."""
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_it_is_proved_with_an_image(folder_of: FolderOf, kind: str, dtype: torch.dtype) -> None:
    """VisionTower and decoder together, against transformers' whole class."""
    parity = check_parity(folder_of(kind), dtype)
    assert parity.holds
    assert parity.num_layers is None


def test_an_error_in_the_served_dtype_alone_is_found(folder_of: FolderOf) -> None:
    """The tolerance is the rounding error of transformers' whole class, with an image."""
    folder = folder_of("qwen3_vl")
    hf_config, vision = parse_hf_config(folder)
    checkpoint, architecture = find_checkpoint(str(folder)), architecture_of(hf_config)
    wrong = replace(architecture, rms_norm_eps=1e-2)
    loaded = native.load(checkpoint, hf_config, wrong, torch.bfloat16, CPU, vision=vision)
    parity = native.check_parity(checkpoint, hf_config, architecture, loaded, vision)
    assert not parity.holds
    assert parity.distance < DTYPE_TOLERANCE


def test_it_is_proved_past_a_window_that_is_longer_than_an_image(folder_of: FolderOf) -> None:
    """Both compare the same selection of many tokens."""
    folder = folder_of("gemma3")
    rewrite(folder / "config.json", lambda raw: raw["text_config"].update(sliding_window=400))
    assert check_parity(folder).holds


@pytest.mark.parametrize("kind", with_long(KINDS, ["glm4v", "paddleocr_vl"]))
def test_different_image_inputs_fail_the_check(folder_of: FolderOf, kind: str) -> None:
    """Levels that are off by a little are found."""

    def dim(vision: VisionConfig) -> None:
        vision.shades[:] -= np.float32(0.2)

    assert not check_parity(folder_of(kind), change=dim).holds


@pytest.mark.parametrize("kind", with_long(KINDS, OTHERS))
def test_where_not_all_layers_fit_the_first_are_compared(
    folder_of: FolderOf, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text's first layers are compared; its tower is complete."""
    monkeypatch.setattr(parity_inputs, "fits", lambda *_: False)
    assert check_parity(folder_of(kind)).num_layers == 2


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_folder_is_loaded_with_its_eye(folder_of: FolderOf, kind: str) -> None:
    """Our decoder runs it without a note."""
    model = load_model(EngineConfig(str(folder_of(kind)), dtype="float32", device="cpu"))
    assert isinstance(model.network, Decoder)
    assert model.vision_encoder is not None
    assert model.notes == ()


RENAMED = {
    "gemma3": [("vision_tower.", "vision_tower.vision_model.")],
    "qwen2_5_vl": [("visual.", "model.visual."), ("model.layers", "model.language_model.layers")],
}


@pytest.mark.parametrize("kind", RENAMED)
def test_a_tower_is_found_by_every_name_that_it_has_had(folder_of: FolderOf, kind: str) -> None:
    """Checkpoints of other ages call the same weights otherwise."""
    folder = folder_of(kind)
    _, vision = parse_hf_config(folder)
    before = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
    weights = load_file(folder / WHOLE)
    for old, new in RENAMED[kind]:
        weights = {
            (new + key.removeprefix(old) if key.startswith(old) else key): weight
            for key, weight in weights.items()
        }
    save_file(weights, folder / WHOLE, {"format": "pt"})
    after = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
    pixels = picture(vision.image_spec, 0, (56, 70), 1).pixels
    assert before.vision_encoder is not None
    assert after.vision_encoder is not None
    assert torch.equal(
        before.vision_encoder.tower.encode(pixels), after.vision_encoder.tower.encode(pixels)
    )


def test_a_flat_config_of_a_multimodal_model_is_read_too(folder_of: FolderOf) -> None:
    """Qwen2.5-VL on the hub has all fields of the text at the top level."""
    folder = folder_of("qwen2_5_vl")

    def flatten(raw: dict[str, Any]) -> None:
        text = raw.pop("text_config")
        raw |= {k: v for k, v in text.items() if k not in ("model_type", "rope_parameters")}
        section = {"type": "mrope", "mrope_section": [2, 3, 3]}
        raw |= {"rope_theta": 10_000.0, "rope_scaling": section}

    rewrite(folder / "config.json", flatten)
    model = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
    assert isinstance(model.network, Decoder)
    assert model.vision_encoder is not None
    assert check_parity(folder).holds


def test_a_head_that_is_tied_in_the_whole_is_tied(folder_of: FolderOf) -> None:
    """Small models of Qwen2.5-VL set it outside the text's config."""
    folder = folder_of("qwen2_5_vl")
    rewrite(folder / "config.json", lambda raw: raw.update(tie_word_embeddings=True))
    weights = load_file(folder / WHOLE)
    del weights["lm_head.weight"]
    save_file(weights, folder / WHOLE, {"format": "pt"})
    assert architecture_of(read_hf_config(str(folder))).tie_word_embeddings
    assert check_parity(folder).holds


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("gemma3", {"size": {"height": 56, "width": 28}}, "a different image size"),
        ("gemma3", {"do_center_crop": True}, "do_center_crop"),
        ("gemma3", {"image_mean": [0.5]}, "image_mean"),
        ("gemma3", {"image_std": [0, 0, 0]}, "image_std"),
        ("gemma3", {"do_rescale": False}, "do_rescale"),
        ("gemma4", {"max_soft_tokens": 71}, "max_soft_tokens 71"),
        ("gemma4", {"pooling_kernel_size": 2}, "a different patch size"),
        ("internvl", {"size": {"height": 56, "width": 28}}, "a different image size"),
        ("internvl", {"min_patches": 5}, "5 to 4 tiles"),
        ("mistral3", {"patch_size": 16}, "a different patch size"),
        ("mistral3", {"size": {"longest_edge": 9}}, "longest_edge 9"),
        ("qwen2_5_vl", {"patch_size": 16}, "a different patch size"),
        ("qwen2_5_vl", {"min_pixels": 9, "max_pixels": 8}, "between 9 and 8"),
        ("qwen2_5_vl", {"resample": 9}, "resample"),
        ("qwen2_5_vl", None, "no preprocessor_config.json"),
        ("paddleocr_vl", {"temporal_patch_size": 2}, "a different patch size"),
    ],
)
def test_a_model_with_unknown_image_preparation_is_served_for_text(
    folder_of: FolderOf, kind: str, change: dict[str, Any] | None, words: str
) -> None:
    """A note contains the reason."""
    folder = folder_of(kind)
    if change is None:
        (folder / PREPARATION).unlink()
    else:
        rewrite(folder / PREPARATION, lambda raw: raw.update(change))
    model = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
    assert isinstance(model.network, Decoder)
    assert model.vision_encoder is None
    [note] = model.notes
    assert "served without images" in note
    assert words in note


def test_a_kind_whose_images_are_not_known_is_served_for_text(folder_of: FolderOf) -> None:
    """Our decoder runs it, checked against the whole class, and a note is added."""
    folder = folder_of("llava")
    hf_config = read_hf_config(str(folder))
    parts = find_checkpoint(str(folder)), hf_config, architecture_of(hf_config)
    assert native.check_parity(*parts, native.load(*parts, torch.float32, CPU)).holds
    model = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
    assert isinstance(model.network, Decoder)
    assert model.vision_encoder is None
    assert model.notes == (
        "this model is served without images: images of 'llava' are not supported",
    )


@pytest.mark.parametrize("kind", with_long(["paddleocr_vl"], ["glm_ocr"]))
def test_tensors_that_only_published_files_have_are_left_out(
    folder_of: FolderOf, kind: str
) -> None:
    """They are GLM-OCR's multi-token prediction, and a head and positions of PaddleOCR's tower."""
    folder = folder_of(kind)
    if kind == "glm_ocr":
        extra = ["model.language_model.layers.4.eh_proj.weight"]
        rewrite(
            folder / "config.json",
            lambda raw: raw["text_config"].update(num_nextn_predict_layers=1),
        )
    else:
        tower = "visual.vision_model"
        extra = [f"{tower}.head.probe", f"{tower}.embeddings.packing_position_embedding.weight"]
    weights = load_file(folder / WHOLE)
    assert not {*extra} & {*weights}
    more = dict.fromkeys(extra, torch.ones(3, 3))
    save_file({**weights, **{key: own.clone() for key, own in more.items()}}, folder / WHOLE)
    model = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
    assert isinstance(model.network, Decoder)
    assert model.vision_encoder is not None
    assert model.notes == ()


def test_the_flat_config_of_paddleocr_is_read_too(folder_of: FolderOf) -> None:
    """On the hub its text is at the top level, and its tower has the type of the model."""
    folder = folder_of("paddleocr_vl")

    def flatten(raw: dict[str, Any]) -> None:
        text = raw.pop("text_config")
        raw |= {k: v for k, v in text.items() if k not in ("model_type", "rope_parameters")}
        section = {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]}
        raw |= {"rope_theta": 10_000, "rope_scaling": section, "tie_word_embeddings": False}
        raw |= {"compression_ratio": 1.0, "use_3d_rope": True, "rope_is_neox_style": True}
        frames = {"temporal_patch_size": 2, "tokens_per_second": 2}
        raw["vision_config"] |= frames | {"model_type": "paddleocr_vl"}

    rewrite(folder / "config.json", flatten)
    model = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
    assert isinstance(model.network, Decoder)
    assert model.vision_encoder is not None
    assert check_parity(folder).holds


def test_ranks_share_experts_stored_in_one_tensor_as_halves(folder_of: FolderOf) -> None:
    """Each rank reads its columns of the gates and of the ups."""
    folder = folder_of("qwen3_vl_moe")
    hf_config = read_hf_config(str(folder))
    parts = find_checkpoint(str(folder)), hf_config, architecture_of(hf_config)

    def logits(communicator: Communicator = SINGLE_RANK) -> torch.Tensor:
        loaded = native.load_shard(*parts, torch.float32, CPU, communicator=communicator)
        return chunked_logits(loaded, parity_tokens(loaded.vocab_size, ()))

    got, _ = together(2, logits)
    torch.testing.assert_close(got, logits(), atol=2e-4, rtol=1e-4)


def test_a_tower_that_lacks_weights_is_none(folder_of: FolderOf) -> None:
    """Its text is served, and the note names what is missing."""
    folder = folder_of("gemma3")
    weights = load_file(folder / WHOLE)
    del weights["multi_modal_projector.mm_soft_emb_norm.weight"]
    save_file(weights, folder / WHOLE, {"format": "pt"})
    model = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
    assert isinstance(model.network, Decoder)
    assert model.vision_encoder is None
    assert "mm_soft_emb_norm" in model.notes[0]


def test_tiles_can_be_limited(folder_of: FolderOf) -> None:
    """A limit that a model does not have is refused."""
    folder, fields = folder_of("internvl"), {"dtype": "float32", "device": "cpu"}

    def loaded(**options: Any) -> LoadedModel:
        return load_model(EngineConfig(str(folder), **fields, mm_processor_kwargs=options))

    vision_encoder = loaded(max_patches=1).vision_encoder
    assert vision_encoder is not None
    assert vision_encoder.image_spec.sizes.fit(9, 900) == (56, 56, 1, 4)
    with pytest.raises(ModelRefused, match=r"--mm-processor-kwargs: .* unsupported max_pixels"):
        loaded(max_pixels=9)


def test_tiles_are_those_of_transformers() -> None:
    """Shapes and sizes vary, also between two grids that are equally near."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    rng = np.random.default_rng(0)
    sizes = (np.exp(rng.uniform(0, 8, (200, 2)))).astype(int).tolist()
    for height, width in [*sizes, (500, 500), (56, 56), (100, 200), (400, 300), (1, 5000)]:
        for fewest, most in ((1, 12), (3, 5), (1, 1)):
            grid = Tiles(56, 4, fewest, most).grid(height, width)
            assert grid[::-1] == get_optimal_tiled_canvas((height, width), (56, 56), fewest, most)


def test_sizes_by_tokens_are_those_of_transformers() -> None:
    """Shapes vary up to lines, which have as many squares as fit the budget."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    rng = np.random.default_rng(0)
    sizes = (np.exp(rng.uniform(0, 8, (200, 2)))).astype(int).tolist()
    for height, width in [*sizes, (1, 1), (48, 48), (1, 3000), (3000, 1), (2000, 10)]:
        fit = SoftTokens(48, 280).fit(height, width)
        assert fit[:2] == get_aspect_ratio_preserving_size(height, width, 16, 2520, 3)
        assert fit[2:] == (fit.height // 48, fit.width // 48)


def test_bounds_of_pixels_can_be_overridden(folder_of: FolderOf) -> None:
    """vLLM supports the same; the compared input stays the same. Other options are refused."""
    folder = folder_of("qwen2_5_vl")

    def loaded(**options: Any) -> BySquares:
        config = EngineConfig(
            str(folder), dtype="float32", device="cpu", mm_processor_kwargs=options
        )
        vision_encoder = load_model(config).vision_encoder
        assert vision_encoder is not None
        assert isinstance(vision_encoder.image_spec.sizes, BySquares)
        return vision_encoder.image_spec.sizes

    assert loaded().max_pixels == 28 * 28 * 16
    assert loaded(max_pixels=56 * 56, min_pixels=28 * 28) == BySquares(28, 28 * 28, 56 * 56)
    with pytest.raises(ModelRefused, match=r"--mm-processor-kwargs: .* between 3136 and 9"):
        loaded(max_pixels=9)
    with pytest.raises(ModelRefused, match="not do_resize"):
        loaded(do_resize=False)


def test_sizes_by_the_longest_edge_are_those_of_transformers() -> None:
    """Whole squares that hold the image, and a break behind each row of them."""
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    for height, width in [(1, 1), (28, 29), (100, 99), (700, 500), (501, 4000), (4001, 37)]:
        fit = LongestEdge(28, 500).fit(height, width)
        pixels = np.empty((height, width, 3), np.uint8)
        assert fit[:2] == get_resize_output_image_size(pixels, 500, 28)
        assert fit[2:] == (fit.height // 28, fit.width // 28 + 1)
