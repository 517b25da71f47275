"""Supported models, and refusals with the name and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.families import ONLY_OURS, build
from tidemill.engine.config import EngineConfig, LoraModule
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import TIE
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine.model.families.refused_types import ONLY_OWN_TYPES
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.planning import plan_model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "dtype": "float32",
}


def folder_of(folder: Path, config: dict[str, Any], name: str = "config.json") -> str:
    """Return a folder with one JSON file."""
    (folder / name).write_text(json.dumps(config))
    return str(folder)


def reason_of(settings: EngineConfig) -> str:
    """Return why a model is refused, without its name; load and plan agree."""
    with pytest.raises(ModelRefused) as loaded:
        load_model(settings)
    with pytest.raises(ModelRefused) as planned:
        plan_model(settings)
    assert str(loaded.value) == str(planned.value)
    return str(loaded.value).removeprefix(f"{settings.model}: ")


@pytest.mark.parametrize("content", ["", "{", '{"model_type": "no_such_type"}'])
def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path, content: str) -> None:
    """An empty, broken or unknown config is reported with the folder's name."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelRefused, match=str(tmp_path)):
        load_model(EngineConfig(str(tmp_path)))


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    """A config that brings its own class is refused and its file never imported."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}'
    )
    witness = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(ModelRefused):
        load_model(EngineConfig(str(tmp_path)))
    assert not witness.exists()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Only safetensors are read: a pickle could run code."""
    network: Any = build("LlamaConfig")
    network.config.save_pretrained(tmp_path)
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="safetensors"):
        load_model(EngineConfig(str(tmp_path)))


def test_a_model_that_does_not_fit_into_memory_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other implementation, which would need as much memory, tries to load it."""
    build("LlamaConfig").save_pretrained(tmp_path)  # type: ignore[operator]

    def load(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(native, "load", load)
    refused = r"does not fit .*Tried to allocate 2.00 GiB.*--quantization fp8 .*--tensor-parallel"
    with pytest.raises(ModelRefused, match=refused):
        load_model(EngineConfig(str(tmp_path)))


OWN = [
    (
        {"model_type": "nemotron", "norm_eps": 1e-5, "attention_chunk_size": 16},
        "attention_chunk_size",
    ),
    ({"model_type": "falcon", "alibi": True}, "alibi true"),
    ({"model_type": "stablelm", "layer_norm_eps": 1e-5, "qk_layernorm": True}, "qk_layernorm True"),
]


@pytest.mark.parametrize(("config", "words"), OWN)
def test_models_that_neither_runs_are_refused_with_the_engines_reason_first(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A field that its decoder does not know, and then what is wrong with transformers' class."""
    folder = folder_of(tmp_path, SIZES | config)
    own = (
        f"the engine's own decoder does not support it (config.json has unsupported {words}), and "
        "neither does"
    )
    why = ONLY_OWN_TYPES[config["model_type"]]
    assert reason_of(EngineConfig(folder, device="cpu")) == f"{own} transformers: {why}."


def test_models_with_settings_for_the_engines_own_decoder_are_refused_too(tmp_path: Path) -> None:
    """It would be refused without them, too."""
    folder = folder_of(tmp_path, SIZES | OWN[0][0])
    settings = EngineConfig(folder, device="cpu", lora_modules=(LoraModule("sql", folder),))
    assert "has unsupported attention_chunk_size" in reason_of(settings)
    assert "merge" not in reason_of(settings)


def test_a_class_that_fails_at_its_layers_is_the_second_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nemotron's class would fail this way if it were not listed."""
    monkeypatch.setattr("tidemill.engine.model.hf.model.reason_refused", lambda _: None)
    config = transformers.NemotronConfig(**SIZES, attention_chunk_size=16)
    transformers.NemotronForCausalLM(config).save_pretrained(tmp_path)
    reason = reason_of(EngineConfig(str(tmp_path), device="cpu"))
    assert reason.startswith(
        "the engine's own decoder does not support it (config.json has unsupported "
        "attention_chunk_size"
    )
    assert "NemotronForCausalLM does not pass the arguments of the attention" in reason


def test_missing_weights_have_their_own_error(tmp_path: Path) -> None:
    """The model is of a family whose class runs models that the engine's own decoder does not."""
    folder = folder_of(tmp_path, SIZES | {"model_type": "cohere", "use_qk_norm": True})
    with pytest.raises(ModelRefused, match=r"^\S+ has neither"):
        load_model(EngineConfig(folder, device="cpu"))


def test_families_of_ours_alone_are_those_whose_classes_are_not_tested() -> None:
    """Each has its reason."""
    assert {getattr(transformers, name).model_type for name in ONLY_OURS} == ONLY_OWN_TYPES.keys()


def test_an_adapter_is_refused_as_a_model(tmp_path: Path) -> None:
    """The error names its base model and the options for both."""
    raw = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B"}
    folder = folder_of(tmp_path, raw, "adapter_config.json")
    reason = reason_of(EngineConfig(folder))
    assert reason.startswith("it is an adapter, not a model")
    assert "(Qwen/Qwen3-8B, according to its adapter_config.json)" in reason
    assert reason.endswith(f"with --lora-modules NAME={folder}")
    folder_of(tmp_path, {"base_model_name_or_path": None}, "adapter_config.json")
    assert "pass its base model" in reason_of(EngineConfig(folder))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model_index.json"], "it is a diffusion model (model_index.json)"),
        (["onnx/model.onnx"], "(it contains onnx/model.onnx): other"),
        (["onnx/model.onnx"], "these are for ONNX: use the version of the model in safetensors"),
        (["weights.npz"], "these are for MLX"),
        (["openvino_model.xml"], "these are for OpenVINO"),
        (["model.onnx", "pytorch_model.bin"], "convert it with"),
    ],
)
def test_a_folder_for_another_library_is_refused_by_its_name(
    files: list[str], words: str, tmp_path: Path
) -> None:
    """The sentence names the library, and what to use instead."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if "model_index.json" not in files:
        folder_of(tmp_path, SIZES | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 16})
    with pytest.raises(ModelRefused) as refused:
        load_model(EngineConfig(str(tmp_path), device="cpu"))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("quantised", "words"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX (4 bits)"),
        ({"quantization_config": {"quant_method": "exl3"}}, "ExLlamaV3 (exl3)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ],
)
def test_a_format_of_weights_that_is_not_read_is_refused_by_its_name(
    quantised: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """The sentence names the formats that are, and how to quantise at load."""
    raw = SIZES | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 16} | quantised
    reason = reason_of(EngineConfig(folder_of(tmp_path, raw), device="cpu"))
    assert reason.startswith(f"its weights are quantised with {words}, but only fp8, ")
    assert "use the unquantised model, which --quantization fp8 or int8" in reason


def test_a_key_that_a_class_lacks_is_an_error_in_words(tmp_path: Path) -> None:
    """Its config class has layers of a kind for which its default rope has no parameters."""
    folder = folder_of(tmp_path, {"model_type": "cohere_compass"})
    with pytest.raises(ModelRefused, match="cannot be loaded: the key 'full_attention' is missing"):
        plan_model(EngineConfig(folder, device="cpu"))


def test_weights_in_their_publishers_own_format_are_recognised(tmp_path: Path) -> None:
    """Mistral's repositories contain them in addition to those in transformers' format."""
    folder = folder_of(tmp_path, {"dim": 64}, "params.json")
    (tmp_path / "consolidated.safetensors").touch()
    assert "fetch config.json, model*.safetensors and the tok" in reason_of(EngineConfig(folder))
    folder_of(tmp_path, SIZES | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 16})
    with pytest.raises(ModelRefused, match=r"\(it contains consolidated\.safetensors\)"):
        load_model(EngineConfig(folder, device="cpu"))


@pytest.mark.parametrize(
    ("head", "use"),
    [
        ("ForMultipleChoice", "it chooses one of several endings"),
        ("ForQuestionAnswering", "it marks the answer to a question"),
        ("ForNextSentencePrediction", "it predicts whether one sentence"),
    ],
)
def test_a_decoder_with_a_trained_head_writes_no_text(head: str, use: str, tmp_path: Path) -> None:
    """Its head is not for words, even if its embeddings are tied to such a head."""
    raw = SIZES | {"model_type": "qwen2", "architectures": [f"Qwen2{head}"], TIE: True}
    settings = EngineConfig(folder_of(tmp_path, raw), device="cpu")
    reason = reason_of(settings)
    assert reason.startswith(f"it has a trained head (Qwen2{head}) that no endpoint serves: {use}")
    assert "--convert embed" in reason
    assert endpoints_of(settings) is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("kimi_k2", "use a version that transformers' own classes run"),
        ("internvl_chat", "-hf, such as OpenGVLab/InternVL3-8B-hf"),
    ],
)
def test_a_type_with_custom_code_is_refused_with_an_alternative(
    kind: str, words: str, tmp_path: Path
) -> None:
    """Custom code is never run, and no flag changes that."""
    raw = {"model_type": kind, "auto_map": {"AutoConfig": "configuration.Config"}}
    reason = reason_of(EngineConfig(folder_of(tmp_path, raw)))
    assert f"knows its model type {kind!r}, and code from a model's folder" in reason
    assert words in reason


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("wav2vec2", "it is a speech model; only Whisper's family and Qwen2-Audio"),
        ("vits", "text-only class"),
    ],
)
def test_a_type_without_a_decoder_is_refused_in_words_of_ours(
    kind: str, words: str, tmp_path: Path
) -> None:
    """The error does not list the classes that transformers tried."""
    assert words in reason_of(EngineConfig(folder_of(tmp_path, {"model_type": kind})))
