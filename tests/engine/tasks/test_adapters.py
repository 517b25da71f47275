"""Adapters next to a model that writes text, and errors before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.engine import vision_models
from tests.engine.adapters import ALL, halves, write_adapter
from tests.engine.scripted_encoder import minilm
from tidemill import demo
from tidemill.engine.config import EngineConfig, LoraModule
from tidemill.engine.errors import ModelRefused
from tidemill.engine.load import load_served
from tidemill.engine.model.loading import load_model
from tidemill.engine_process.frames import Ready
from tidemill.protocol.contract import EngineError

pytestmark = pytest.mark.usefixtures("proved")

LOUD = (LoraModule("loud", "nowhere"),)


async def test_a_request_names_its_adapter(tmp_path: Path) -> None:
    """An adapter whose B is zero gives the model's own output; another one does not."""
    network = AutoModelForCausalLM.from_pretrained(demo.MODEL_PATH)
    modules = halves(network, size=0.4)
    still = {name: (down, 0 * up) for name, (down, up) in modules.items()}
    paths = [write_adapter(tmp_path / "loud", modules), write_adapter(tmp_path / "still", still)]
    adapters = tuple(LoraModule(path.name, str(path)) for path in paths)
    config = EngineConfig(str(demo.MODEL_PATH), device="cpu", lora_modules=adapters)
    served = load_served(config, served_names=("tiny",))
    try:
        assert served.info().adapters == ("loud", "still")
        assert Ready.unpack(Ready(served.info()).pack()).info == served.info()
        text_of = {}
        for name in ("tiny", "loud", "still"):
            body = {"model": name, "prompt": "The capital of France is", "temperature": 0}
            reply = await served.respond("/v1/completions", body, "req", 0)
            assert (reply.status_code, reply.body["model"]) == (200, name)
            text_of[name] = reply.body["choices"][0]["text"]
        assert text_of["still"] == text_of["tiny"] != text_of["loud"]
    finally:
        served.close()


def test_only_generative_models_support_adapters() -> None:
    """Other models refuse it by the adapter's name before they are loaded."""
    for model, words in ((minilm(), "or reranker"), (demo.SPEECH_PATH, "recognition model")):
        with pytest.raises(ModelRefused, match=rf"{words}.*adapters \(loud\)"):
            load_served(EngineConfig(str(model), lora_modules=LOUD))


def test_only_generative_models_support_a_cache_type() -> None:
    """Other models store no keys and values beyond a step, or store them in other slots."""
    for model, words in ((minilm(), "or reranker"), (demo.SPEECH_PATH, "recognition model")):
        with pytest.raises(ModelRefused, match=f"{words}.*--kv-cache-dtype fp8 "):
            load_served(EngineConfig(str(model), kv_cache_dtype="fp8"))


def test_only_generative_models_support_quantization_on_load() -> None:
    """For other models the error says which flag to remove."""
    for model in (minilm(), demo.SPEECH_PATH):
        with pytest.raises(ModelRefused, match="remove --quantization"):
            load_served(EngineConfig(str(model), quantization="fp8"), served_names=("m",))


def test_duplicate_or_too_many_adapters_are_refused() -> None:
    """A name must be unique."""
    with pytest.raises(EngineError, match="the name 'loud' is used for both"):
        load_served(EngineConfig("nowhere", lora_modules=LOUD), served_names=("loud",))
    with pytest.raises(EngineError, match="adapter name 'loud' is used twice"):
        EngineConfig("nowhere", lora_modules=LOUD * 2)
    with pytest.raises(EngineError, match="2 adapters exceed max_loras"):
        EngineConfig("nowhere", lora_modules=(*LOUD, LoraModule("b", "x")), max_loras=1)


def test_a_vision_model_supports_adapters_of_its_text_model(tmp_path: Path) -> None:
    """PEFT writes names of the whole model; Qwen2.5-VL's text model has no separate class."""
    pattern = rf".*language_model.*\.({'|'.join(ALL)})"
    for kind in ("gemma3", "qwen2_5_vl"):
        network = vision_models.build(kind)
        vision_models.save(network, tmp_path / kind)
        modules = {name: pair for name, pair in halves(network).items() if "language_model" in name}
        path = write_adapter(tmp_path / f"{kind}-own", modules, target_modules=pattern)
        config = EngineConfig(
            str(tmp_path / kind),
            dtype="float32",
            device="cpu",
            lora_modules=(LoraModule("own", str(path)),),
        )
        if kind == "gemma3":
            assert load_model(config).vision_encoder is not None
        else:
            with pytest.raises(
                ModelRefused, match="adapters are not supported for qwen2_5_vl_text models"
            ):
                load_model(config)
