"""The parity check of our decoder: its comparisons, and its failures."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.engine import vision_models
from tests.engine.families import FAMILIES, LATENTS, VARIANTS, build
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.kernels import backends
from tidemill.engine.kernels import elementwise as reference
from tidemill.engine.kernels.linear import Linear, LinearFactory
from tidemill.engine.kernels.quantised import Quantised
from tidemill.engine.kernels.reference import ReferenceAttention
from tidemill.engine.model import native
from tidemill.engine.model.config.architecture import Architecture
from tidemill.engine.model.config.hf_config import HFConfig, read_hf_config
from tidemill.engine.model.families import registry
from tidemill.engine.model.families.family import Family
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.hf.forward import TransformersNetwork
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.native import DTYPE_TOLERANCE, ParityResult
from tidemill.engine.model.network import decoder
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.parity import layerwise, parity_inputs
from tidemill.engine.model.vision.preprocessor_config import read_vision_config
from tidemill.engine.model.weights.checkpoint import WHOLE, Checkpoint, find_checkpoint
from tidemill.engine.model.weights.quantised import loading
from tidemill.engine.model.weights.quantised.quantization_config import read_quantization_config
from tidemill.engine.model.weights.weight_parts import Weight

CPU = torch.device("cpu")


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    """Return a folder with a tiny Qwen3, whose layers are equal."""
    build("Qwen3Config").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    return tmp_path / "model"


def parts_of(folder: Path) -> tuple[Checkpoint, HFConfig, Architecture]:
    """Return the parts of a folder."""
    hf_config = read_hf_config(str(folder))
    return find_checkpoint(str(folder)), hf_config, architecture_of(hf_config)


def check_parity(folder: Path, dtype: torch.dtype = torch.float32) -> ParityResult:
    """Check the model in a folder."""
    parts = parts_of(folder)
    return native.check_parity(*parts, native.load(*parts, dtype, CPU))


def settings(folder: Path, dtype: Any = "bfloat16") -> EngineConfig:
    """Return settings that run a folder's model on the CPU."""
    return EngineConfig(str(folder), dtype=dtype, device="cpu")


def test_a_model_in_bf16_is_proved_in_fp32(folder: Path) -> None:
    """The function is compared, not the rounding; the reported distance is that of bf16."""
    exact, rounded = check_parity(folder), check_parity(folder, torch.bfloat16)
    assert exact.holds
    assert exact.distance < 1e-5
    assert rounded.holds
    assert 1e-3 < rounded.distance < 0.1


def test_halves_that_no_kernel_of_the_cpus_takes_are_run_by_the_reference(folder: Path) -> None:
    """The reference is slow, but correct."""
    parity = check_parity(folder, torch.float16)
    assert parity.holds
    assert 1e-5 < parity.distance < 0.02


@pytest.mark.parametrize("name", sorted({*FAMILIES, *VARIANTS} - LATENTS))
def test_with_the_reference_in_place_of_kernels_it_is_the_same_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Devices without kernels use the reference."""
    monkeypatch.setattr(decoder, "choose_elementwise", lambda *_: reference)
    monkeypatch.setattr(native, "choose_backend", lambda *_: ReferenceAttention)
    build(name).save_pretrained(tmp_path)  # type: ignore[operator]
    assert check_parity(tmp_path).holds


def test_an_error_in_the_served_dtype_is_found_though_fp32_is_right(
    folder: Path,
) -> None:
    """A kernel may be broken for one type of number on one machine."""
    checkpoint, hf_config, architecture = parts_of(folder)
    wrong = replace(architecture, rms_norm_eps=1e-2)
    loaded = native.load(checkpoint, hf_config, wrong, torch.bfloat16, CPU)
    parity = native.check_parity(checkpoint, hf_config, architecture, loaded)
    assert not parity.holds
    assert parity.distance < DTYPE_TOLERANCE  # by which alone it would pass


@pytest.mark.parametrize("has_images", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.08])
def test_a_kernel_of_quantised_weights_is_compared_with_its_emulation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, factor: float, *, has_images: bool
) -> None:
    """Each layer alone would pass as rounding to fp8, and the logits as within 0.3.

    The emulation is shown the image, too: without it any kernel would hold.
    """
    if has_images:
        vision_models.save(vision_models.build("qwen3_vl"), folder)

    def multiply(weight: Quantised, bias: torch.Tensor | None) -> Linear:
        return lambda x: factor * functional.linear(x, weight.dequantised(), bias)

    choose = backends.choose_linear
    for module in (native, loading):
        monkeypatch.setattr(
            module, "has_quantised_linear", lambda dtype, *_: dtype == torch.float16
        )

    def choose_linear(ops: Any, device: torch.device) -> LinearFactory:
        if backends._IS_REFERENCE.get():
            return choose(ops, device)
        return LinearFactory(ops, [], quantised=[multiply])

    monkeypatch.setattr(decoder, "choose_linear", choose_linear)
    hf_config = read_hf_config(str(folder))
    quantization = read_quantization_config(hf_config, "fp8")
    checkpoint, architecture = (
        find_checkpoint(str(folder), quantization),
        architecture_of(hf_config),
    )
    parts, vision = (checkpoint, hf_config, architecture), read_vision_config(hf_config)
    assert (vision is not None) == has_images
    loaded = native.load(*parts, torch.float16, CPU, vision=vision)
    parity = native.check_parity(*parts, loaded, vision)
    assert parity.holds == (factor == 1)
    assert parity.distance < DTYPE_TOLERANCE


def test_a_kernel_of_the_served_dtype_is_found_in_a_models_first_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not all layers fit in fp32, the first ones are computed in both dtypes."""
    monkeypatch.setattr(parity_inputs, "MOST_BYTES", 1000)
    assert check_parity(folder, torch.bfloat16).holds
    choose = decoder.choose_elementwise

    def wrong_in_bf16(dtype: torch.dtype, device: torch.device) -> Any:
        ops = choose(dtype, device)
        wrong = SimpleNamespace(**vars(ops))
        wrong.rms_norm = lambda *given: 1.1 * ops.rms_norm(*given)
        return ops if dtype == torch.float32 else wrong

    monkeypatch.setattr(decoder, "choose_elementwise", wrong_in_bf16)
    assert not check_parity(folder, torch.bfloat16).holds


def test_rows_at_either_end_of_a_cut_vocabulary_are_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows have the loaded model's values, by the ids of requests."""
    for module in (layerwise, parity_inputs):
        monkeypatch.setattr(module, "PARITY_VOCAB", 64)
    checkpoint, hf_config, architecture = parts_of(folder)
    loaded = native.load(checkpoint, hf_config, architecture, torch.float32, CPU)
    assert native.check_parity(checkpoint, hf_config, architecture, loaded).holds
    embed, last = loaded.network._embed, architecture.vocab_size - 8
    monkeypatch.setattr(loaded.network, "_embed", lambda ids: embed(ids.clamp(max=last)))
    assert not native.check_parity(checkpoint, hf_config, architecture, loaded).holds


@pytest.mark.parametrize(
    ("family", "num_layers"), [("Qwen3Config", 2), ("Qwen2, some layers sliding", 3)]
)
def test_a_model_that_does_not_fit_in_fp32_is_checked_by_one_layer_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, num_layers: int
) -> None:
    """Two at least, and the note says how many of how many."""
    build(family).save_pretrained(tmp_path)  # type: ignore[operator]
    monkeypatch.setattr(parity_inputs, "MOST_BYTES", 1000)
    parity = check_parity(tmp_path)
    assert parity.holds
    assert parity.num_layers == num_layers
    loaded = load_model(settings(tmp_path))
    assert isinstance(loaded.network, Decoder)
    (note,) = loaded.notes
    assert f"the first {num_layers} of 4 layers" in note


@pytest.mark.parametrize("flops", [1e12, 1.2e9])
def test_a_window_is_passed_by_all_layers_or_the_first_ones_that_can_be_afforded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flops: float
) -> None:
    """Tokens in two chunks cross the window, so that not only the masks are compared."""
    network: Any = build("Qwen2, some layers sliding")
    network.config.sliding_window = 380
    network.save_pretrained(tmp_path)
    monkeypatch.setitem(parity_inputs.BUDGETS, "cpu", parity_inputs.Budget(flops, 2**28))
    monkeypatch.setattr(native, "_check_windows", lambda *_: None)
    checkpoint, hf_config, right = parts_of(tmp_path)
    inputs = parity_inputs.parity_inputs(right, CPU)
    expected = [(None, 400)] if flops == 1e12 else [(None, 40), (3, 400)]
    assert [(num_layers, len(tokens)) for num_layers, tokens in inputs] == expected
    blocks = [
        replace(block, attention=replace(block.attention, window=block.attention.window and 379))
        for block in right.blocks
    ]
    for architecture, holds in ((right, True), (replace(right, blocks=tuple(blocks)), False)):
        parts = (checkpoint, hf_config, architecture)
        loaded = native.load(*parts, torch.bfloat16, CPU)
        assert native.check_parity(*parts, loaded).holds == holds


def test_a_model_that_fits_on_a_gpu_must_fit_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers builds its network there, in a container that may have less memory."""
    weights = [Weight("embedding", (1000,), ())]
    free = {"cuda": 10_000, "cpu": 10_000}
    monkeypatch.setattr(parity_inputs, "free_bytes", lambda device: free[device.type])
    assert parity_inputs.fits(weights, torch.device("cuda"))
    for device in free:
        with monkeypatch.context() as patched:
            patched.setitem(free, device, 4_000)
            assert not parity_inputs.fits(weights, torch.device("cuda"))


def test_its_first_layers_are_enough_to_find_a_wrong_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one kind differ by their weights alone."""
    checkpoint, hf_config, architecture = parts_of(folder)
    monkeypatch.setattr(parity_inputs, "MOST_BYTES", 1000)
    wrong = replace(architecture, rms_norm_eps=1e-3)
    loaded = native.load(checkpoint, hf_config, wrong, torch.float32, CPU)
    parity = native.check_parity(checkpoint, hf_config, wrong, loaded)
    assert not parity.holds
    assert parity.num_layers == 2


def test_a_decoder_that_computes_something_else_gives_way_to_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is still served, and a note contains the distance."""

    def wrong(*args: Any) -> Architecture:
        return replace(registry._qwen3(*args), rms_norm_eps=0.1)

    monkeypatch.setitem(registry.FAMILIES, "qwen3", Family("Qwen3ForCausalLM", wrong))
    loaded = load_model(settings(folder))
    assert isinstance(loaded.network, TransformersNetwork)
    (note,) = loaded.notes
    assert "transformers runs this model" in note
    assert "relative distance 1.1" in note


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"attention_chunk_size": 7}, "has unsupported attention_chunk_size"),
    ],
)
def test_models_unknown_to_our_decoder_are_run_by_transformers(
    folder: Path, differs: dict[str, Any], words: str
) -> None:
    """One note contains the reason."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | differs))
    loaded = load_model(settings(folder))
    assert isinstance(loaded.network, TransformersNetwork)
    (note,) = loaded.notes
    assert words in note
    assert "\n" not in note


def test_a_family_that_has_no_entry_is_run_by_transformers(tmp_path: Path) -> None:
    """The note contains its name."""
    import transformers

    config = transformers.OlmoConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(settings(tmp_path))
    assert isinstance(loaded.network, TransformersNetwork)
    assert "does not implement model type 'olmo'" in loaded.notes[0]


def test_models_of_our_decoder_have_no_note(folder: Path) -> None:
    """A model as most are has no notes."""
    loaded = load_model(settings(folder))
    assert isinstance(loaded.network, Decoder)
    assert loaded.notes == ()
    assert loaded.max_model_len == 512
    assert load_model(replace(settings(folder), max_model_len=77)).max_model_len == 77


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    """The error does not depend on the implementation, and does not blame our decoder."""
    tensors = load_file(folder / WHOLE)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = value
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"down_proj\.weight contains NaN or infinity"):
        load_model(settings(folder))


def test_near_ties_of_experts_count_as_the_same_function() -> None:
    """A token in ten may be given to another expert; the rest must be the same."""
    expected = torch.ones(40, 8)
    few, many = (expected.repeat(2, 1, 1) for _ in range(2))
    few[:, 3] *= 1.05
    many[:, :8] *= 1.05
    assert native.is_within_tolerance(native.token_distances(few, expected), has_experts=True)
    assert not native.is_within_tolerance(native.token_distances(few, expected), has_experts=False)
    assert not native.is_within_tolerance(native.token_distances(many, expected), has_experts=True)
    few[1, -1] = 5
    assert not native.is_within_tolerance(native.token_distances(few, expected), has_experts=True)


def test_a_token_whose_rounding_is_amplified_may_differ_as_much_as_eagers() -> None:
    """The truth is in fp64: other tokens, or most of them, are errors of ours."""
    exact = torch.ones(40, 8, dtype=torch.float64)
    eager = exact.float()
    eager[3, 0] *= 1.002
    got = exact.float().repeat(2, 1, 1)
    got[:, 5, 0] *= 0.998
    agrees = partial(native.is_exact_as_eager, eager=eager, exact=exact)
    assert not native.is_within_tolerance(native.token_distances(got, eager), has_experts=False)
    assert agrees(got)
    assert not agrees(got * 1.0005)
    got[:, 5, 0] *= 0.98
    assert not agrees(got)
    torch.manual_seed(0)
    ours, eager, exact = torch.randn(2, 40, 8), torch.randn(40, 8), torch.randn(40, 8).double()
    assert not native.is_exact_as_eager(ours, eager, exact)


@pytest.mark.parametrize(("eps", "holds"), [(1e-6, True), (1e-3, False)])
def test_a_network_that_amplifies_rounding_is_ours(
    tmp_path: Path, eps: float, *, holds: bool
) -> None:
    """Large weights of queries and keys make it differ from eager by more than the tolerance."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                is_score = name.endswith(("q_proj.weight", "k_proj.weight"))
                parameter.normal_(0, 1.2 if is_score else 0.3)
    model.save_pretrained(tmp_path)
    checkpoint, hf_config, architecture = parts_of(tmp_path)
    parts = checkpoint, hf_config, replace(architecture, rms_norm_eps=eps)
    result = native.check_parity(*parts, native.load(*parts, torch.float32, CPU))
    assert result.holds is holds
    assert result.distance > native.TOLERANCE


def test_half_of_the_tokens_prove_experts_whose_inputs_are_rounded_to_eight_bits() -> None:
    """Rounding sends a third of the tokens to other experts; a wrong kernel moves all of them."""
    torch.manual_seed(0)
    logits, error, other_error, flips = torch.randn(4, 2, 40, 320)
    expected = native.EagerLogits(logits, rounded=logits + 0.02 * error)
    flipped = logits + 0.02 * other_error
    flipped[:, -13:] += 0.3 * flips[:, -13:]
    assert native.is_rounded(flipped, expected, has_experts=True, is_emulated=True)
    assert not native.is_rounded(flipped, expected, has_experts=True)
    wrong = logits + 0.06 * other_error
    assert not native.is_rounded(wrong, expected, has_experts=True, is_emulated=True)


def test_the_network_of_the_proof_is_gone_after_it(folder: Path) -> None:
    """One at a time must fit: nothing holds it until the collector comes by."""
    gc.collect()
    gc.disable()
    try:
        check_parity(folder, torch.bfloat16)
        left = [found for found in gc.get_objects() if type(found).__name__ == "Qwen3ForCausalLM"]
        assert not left
    finally:
        gc.enable()


def test_a_decoder_that_fails_gives_way_to_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers may run a model that it failed on."""

    def fail(*_args: object) -> torch.Tensor:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(Decoder, "forward", fail)
    loaded = load_model(settings(folder))
    assert isinstance(loaded.network, TransformersNetwork)
    assert "no kernel for this" in loaded.notes[0]
