"""Overrides of a config.json: the merged config, and models that run with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.families import COMMON, ROPE, VARIANTS, build
from tests.engine.test_parity import run_all
from tests.engine.vision_models import build as build_seeing
from tests.engine.vision_models import save as save_seeing
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.families.overridden_config import read_overridden_config
from tidemill.engine.model.families.overrides import merge
from tidemill.engine.model.hf.forward import TransformersNetwork
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.parity.logits import chunked_logits
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SHORT, LONG = "Phi3, long rope", 300


def load(folder: Path, **settings: Any) -> LoadedModel:
    """Load a folder's model in fp32 on the CPU."""
    return load_model(EngineConfig(str(folder), dtype="float32", device="cpu", **settings))


def saved(name: str, folder: Path, **changes: Any) -> Path:
    """Write a tiny model, and change its config.json."""
    build(name).save_pretrained(folder)  # type: ignore[operator]
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return folder


@pytest.mark.parametrize(
    ("raw", "overrides", "merged"),
    [
        ({"a": 1, "b": {"c": 1}}, {"a": 2, "b": {"d": 2}}, {"a": 2, "b": {"d": 2}}),
        (
            {"text_config": {"a": 1, "b": 2}},
            {"text_config": {"a": 3}},
            {"text_config": {"a": 3, "b": 2}},
        ),
        (
            {"quantization_config": {"bits": 4}},
            {"quantization_config": {"bits": 8}},
            {"quantization_config": {"bits": 8}},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_scaling": YARN},
            {"rope_parameters": {"rope_theta": 1e6, **YARN}},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": None},
            {"rope_scaling": YARN},
            {"rope_theta": 1e6, "rope_scaling": YARN},
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0}},
            {"rope_parameters": None},
            {"rope_scaling": {}},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}},
            {"rope_parameters": {"factor": 8.0}},
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {},
                }
            },
        ),
    ],
)
def test_overrides_merge_configs_and_replace_the_rest(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], merged: Mapping[str, Any]
) -> None:
    """A rope keeps its base, whichever of its two names either of them has for it."""
    assert merge(raw, overrides) == merged


@pytest.mark.parametrize("name", ["Qwen3Config", "Qwen2Config"])
def test_yarn_by_an_override_is_yarn_by_the_config(tmp_path: Path, name: str) -> None:
    """Model cards describe it this way; its context is the length that it stretches to."""
    own = load(saved(name, tmp_path / "one"), hf_overrides={"rope_scaling": YARN})
    same = load(saved(name, tmp_path / "two", rope_parameters={**ROPE, **YARN}))
    plain = load(tmp_path / "one")
    tokens = torch.arange(20)
    assert isinstance(own.network, Decoder)
    assert (own.max_model_len, same.max_model_len, plain.max_model_len) == (2048, 2048, 512)
    assert torch.equal(chunked_logits(own, tokens), chunked_logits(same, tokens))
    assert not torch.allclose(chunked_logits(own, tokens), chunked_logits(plain, tokens), atol=1e-2)


def test_transformers_reads_overrides_as_our_decoder_does(tmp_path: Path) -> None:
    """A model that transformers runs has the requested rope."""
    folder = saved("Qwen3Config", tmp_path, attention_chunk_size=7)
    stretched = load(folder, hf_overrides={"rope_parameters": YARN}, max_model_len=2048)
    assert isinstance(stretched.network, TransformersNetwork)
    assert stretched.max_model_len == 2048
    ours = load(folder, hf_overrides={"rope_parameters": YARN, "attention_chunk_size": None})
    assert isinstance(ours.network, Decoder)
    tokens = torch.arange(20)
    assert torch.allclose(
        chunked_logits(stretched, tokens), chunked_logits(ours, tokens), atol=1e-3
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope_scalling": YARN}, "--hf-overrides sets rope_scalling, which transformers. classes"),
        ({"hidden_size": "x"}, "config.json with --hf-overrides has hidden_size 'x'"),
        ({"vocab_size": 5}, "the shapes of its weights do not match"),
        ({"rope_scaling": {**YARN, "factor": -4}}, "factor -4; it must be a number from 1 to"),
        ({"rope_scaling": {**YARN, "factor": 1e300}}, "must be a number from 1 to 10,000"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "factor '4'; it must be a number"),
        ({"rope_parameters": {"full_attention": {}}}, "cannot be loaded with --hf-overrides"),
        ({"model_type": "none"}, "none"),
    ],
)
def test_an_override_that_cannot_be_is_refused(
    tmp_path: Path, overrides: dict[str, Any], words: str
) -> None:
    """The error contains its name, and nothing is ignored."""
    folder = saved("Qwen3Config", tmp_path)
    with pytest.raises(ModelRefused, match=words):
        load(folder, hf_overrides=overrides)


def test_overrides_of_the_text_of_a_model_that_sees_are_named_within_it(tmp_path: Path) -> None:
    """At the top level they would have no effect."""
    build_seeing("gemma3").save_pretrained(tmp_path)
    settings = EngineConfig(str(tmp_path), hf_overrides={"sliding_window": 9})
    with pytest.raises(ModelRefused, match=re.escape('{"sliding_window": …}')):
        read_overridden_config(settings)
    within = EngineConfig(str(tmp_path), hf_overrides={"text_config": {"sliding_window": 9}})
    assert read_overridden_config(within).fields["sliding_window"] == 9


def greedy(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the output of transformers' class for a single request."""
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    ids = network.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1
    )
    written: list[int] = ids[0, len(prompt) :].tolist()
    return written


def test_a_long_rope_is_chosen_by_each_request(tmp_path: Path) -> None:
    """The longest possible length decides for all of a request's tokens, whatever is cached."""
    folder = saved(SHORT, tmp_path)
    model = load(folder)
    assert (model.max_model_len, model.original_positions, model.notes) == (512, 256, ())
    tokens = torch.randint(0, COMMON["vocab_size"], (LONG,), generator=torch.Generator()).tolist()
    requests = [
        SequenceRequest(prompt, max_tokens, Sampling(temperature=0))
        for prompt, max_tokens in (
            (tokens[:250], 6),
            (tokens, 6),
            (tokens[:250], 7),
            (tokens[:40], 6),
        )
    ]
    results, stats = run_all(model, requests, num_pages=60, budget=100)
    assert stats.cached_tokens > 0
    short, long, between, few = (result.token_ids for result in results)
    assert short == greedy(folder, tokens[:250], 6)
    assert long == greedy(folder, tokens, 6)
    assert few == greedy(folder, tokens[:40], 6)
    always = saved(SHORT, tmp_path / "long")
    rewritten = json.loads((always / "config.json").read_text())
    rewritten["rope_parameters"]["short_factor"] = rewritten["rope_parameters"]["long_factor"]
    (always / "config.json").write_text(json.dumps(rewritten))
    assert between == greedy(always, tokens[:250], 7)
    assert load(always).original_positions is None
    with pytest.raises(ModelRefused, match="more than the 512 positions"):
        load(folder, max_model_len=513)


def test_transformers_models_take_long_factors_too(tmp_path: Path) -> None:
    """Phimoe has other magnitudes for either, which go with them."""
    rope = VARIANTS[SHORT][1]["rope_parameters"] | {
        "original_max_position_embeddings": 256,
        "short_mscale": 1.2,
        "long_mscale": 1.4,
    }
    config = transformers.PhimoeConfig(
        **COMMON | {"num_hidden_layers": 1}, num_local_experts=2, rope_parameters=rope
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    long, short = load(tmp_path, max_model_len=512), load(tmp_path)
    assert (long.max_model_len, short.max_model_len) == (512, 256)
    assert "--max-model-len up to 512" in short.notes[-1]
    assert isinstance(long.network, TransformersNetwork)
    served: Any = long.network.module.config
    assert served.rope_parameters["short_factor"] == rope["long_factor"]
    assert served.rope_parameters["short_mscale"] == 1.4


@pytest.mark.parametrize(
    ("new", "sees", "network"),
    [
        ({}, False, Decoder),
        ({}, True, Decoder),
        ({"attention_chunk_size": 7}, False, TransformersNetwork),
    ],
    ids=["text", "with images", "by transformers"],
)
@pytest.mark.parametrize("of_text", [{}, {"tie_word_embeddings": False}], ids=["unsaid", "untied"])
def test_a_head_is_tied_if_the_whole_model_ties_it(
    tmp_path: Path, new: dict[str, Any], sees: object, network: type[Any], of_text: dict[str, Any]
) -> None:
    """Though its text says nothing of it, or that it is not, and no head is stored."""
    save_seeing(build_seeing("gemma3"), tmp_path)
    if not sees:
        (tmp_path / "preprocessor_config.json").unlink()
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["tie_word_embeddings"] = True
    raw["text_config"].pop("tie_word_embeddings", None)
    raw["text_config"] |= {**of_text, **new}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    loaded = load(tmp_path)
    assert isinstance(loaded.network, network)
    assert (loaded.vision_encoder is not None) == bool(sees)
