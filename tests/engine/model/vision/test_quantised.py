"""Multimodal models with quantised text keep images, unless their tower is quantised, too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.model.weights.quantised.checkpoints import FORMS, quantise
from tests.engine.vision_models import BEGIN, END, build, inputs_of, picture, save
from tidemill.engine.config import EngineConfig
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.parity import parity_inputs
from tidemill.engine.model.parity.logits import chunked_logits
from tidemill.engine.model.planning import plan_model
from tidemill.engine.model.vision.preprocessor_config import read_vision_config
from tidemill.engine.model.weights.checkpoint import WHOLE, find_checkpoint
from tidemill.engine.model.weights.quantised.quantization_config import read_quantization_config
from tidemill.engine.scheduling.images import ImageSpec
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

# What is left unquantised, as `modules_to_not_convert` or `ignore` of published models say.
TOWERS = ("visual", "vision_tower", "multi_modal_projector")
CPU = torch.device("cpu")


@pytest.fixture(name="folder_of", scope="module")
def fixture_folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that creates a folder with the tiny model of a kind in bf16."""
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save(build(kind).to(torch.bfloat16), made[kind])
        folder = tmp_path_factory.mktemp(kind)
        shutil.copytree(made[kind], folder, dirs_exist_ok=True)
        return folder

    return folder_of


FolderOf = Callable[[str], Path]


def settings(folder: Path, **others: Any) -> EngineConfig:
    """Return settings that run a folder's model in fp32 on the CPU."""
    return EngineConfig(str(folder), device="cpu", dtype="float32", **others)


def request_of(image_spec: ImageSpec) -> SequenceRequest:
    """Return a request of an image among some tokens."""
    image = picture(image_spec, 9, (60, 110), 3)
    shown = image_spec.placeholders(image.rows, image.columns)
    ids = [*range(20, 28), BEGIN, *shown, END, *range(40, 52)]
    return SequenceRequest(ids, 1, Sampling(), images=(image,))


@torch.inference_mode()
def eager_logits(folder: Path, request: SequenceRequest) -> torch.Tensor:
    """Return the logits of transformers' own class for a request, with a folder's plain weights."""
    network: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    logits: torch.Tensor = network(**inputs_of(folder, request), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize(
    ("form", "kind", "stored"),
    [
        # As Qwen3-VL-8B-Instruct-FP8, Ministral-3-8B-Instruct-2512, Qwen2.5-VL-7B-Instruct-AWQ and
        # llm-compressor's w4a16 name what is quantised.
        ("fp8, blocks", "qwen3_vl", "model.language_model.layers.0.mlp.up_proj.weight_scale_inv"),
        (
            "fp8, per tensor",
            "mistral3",
            "language_model.model.layers.0.mlp.up_proj.activation_scale",
        ),
        ("awq", "qwen2_5_vl", "model.layers.0.mlp.up_proj.qweight"),
        ("compressed int4", "gemma3", "language_model.model.layers.0.mlp.up_proj.weight_packed"),
    ],
)
def test_a_model_of_quantised_text_sees(
    folder_of: FolderOf, tmp_path: Path, form: str, kind: str, stored: str
) -> None:
    """With an image, its logits are those of transformers' class with dequantised weights."""
    folder = folder_of(kind)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    meant = quantise(form, folder, *TOWERS)
    assert stored in load_file(folder / WHOLE)
    save_file(meant, tmp_path / WHOLE, {"format": "pt"})
    loaded = load_model(settings(folder))
    assert isinstance(loaded.network, Decoder)
    assert loaded.vision_encoder is not None
    [note] = loaded.notes
    assert "as much memory as unquantised ones" in note
    plan = plan_model(settings(folder))
    assert plan.takes_images
    assert plan.notes == loaded.notes
    request = request_of(loaded.vision_encoder.image_spec)
    got = chunked_logits(loaded, torch.tensor(request.prompt_ids), request.images)[0]
    torch.testing.assert_close(got, eager_logits(tmp_path, request), atol=2e-4, rtol=1e-4)


def test_weights_that_are_made_fp8_leave_the_tower_as_it_is(folder_of: FolderOf) -> None:
    """A model made fp8 as it is read sees as before."""
    folder = folder_of("qwen3_vl")
    plain, made = (load_model(settings(folder, quantization=how)) for how in (None, "fp8"))
    assert plan_model(settings(folder, quantization="fp8")).takes_images
    assert plain.vision_encoder is not None
    assert made.vision_encoder is not None
    request = request_of(plain.vision_encoder.image_spec)
    pixels = request.images[0].pixels
    assert torch.equal(
        plain.vision_encoder.tower.encode(pixels), made.vision_encoder.tower.encode(pixels)
    )
    expected, got = (
        chunked_logits(model, torch.tensor(request.prompt_ids), request.images)
        for model in (plain, made)
    )
    apart = torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected)
    assert 0.01 < apart < 0.3


@pytest.mark.parametrize("form", ["fp8, blocks", None])
def test_its_first_layers_are_compared_where_not_all_fit(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch, form: str | None
) -> None:
    """Quantised in the files, or as they are read; its tower is whole."""
    folder = folder_of("qwen3_vl")
    if form is not None:
        quantise(form, folder, *TOWERS)
    monkeypatch.setattr(parity_inputs, "fits", lambda *_: False)
    hf_config = read_hf_config(str(folder))
    quantization = read_quantization_config(hf_config, "fp8")
    parts = find_checkpoint(str(folder), quantization), hf_config, architecture_of(hf_config)
    vision = read_vision_config(hf_config)
    parity = native.check_parity(
        *parts, native.load(*parts, torch.bfloat16, CPU, vision=vision), vision
    )
    assert parity.holds
    assert parity.num_layers == 2


@pytest.mark.parametrize(
    ("form", "kind", "module", "stored"),
    [
        ("fp8, per tensor", "mistral3", "multi_modal_projector.linear_1", "weight"),
        ("awq", "qwen2_5_vl", "visual.blocks.1.attn.proj", "qweight"),
    ],
)
def test_a_tower_with_a_quantised_tensor_is_not_served(
    folder_of: FolderOf, form: str, kind: str, module: str, stored: str
) -> None:
    """Load and plan name the tensor; its text is served."""
    folder = folder_of(kind)
    quantise(form, folder, *TOWERS)
    tensors = load_file(folder / WHOLE)
    pieces, _ = FORMS[form][1](tensors.pop(f"{module}.weight").float())
    tensors |= {f"{module}.{piece}": tensor for piece, tensor in pieces.items()}
    save_file(tensors, folder / WHOLE, {"format": "pt"})
    note = (
        f"this model is served without images: {module}.{stored} of its vision tower is quantised"
    )
    loaded = load_model(settings(folder))
    assert isinstance(loaded.network, Decoder)
    assert loaded.vision_encoder is None
    assert note in loaded.notes
    plan = plan_model(settings(folder))
    assert not plan.takes_images
    assert plan.notes == loaded.notes


def test_a_config_of_the_text_alone_may_say_how_it_is_quantised(folder_of: FolderOf) -> None:
    """Some tools write it there, and not at the top level."""
    folder = folder_of("mistral3")
    quantise("fp8, per tensor", folder, *TOWERS)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(settings(folder))
    assert isinstance(loaded.network, Decoder)
    assert loaded.vision_encoder is not None
