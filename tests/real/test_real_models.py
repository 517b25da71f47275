"""Trained models of every task, compared with transformers' classes in fp32."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from sentence_transformers import SentenceTransformer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

from tests.docs.blocks import commands_of
from tests.engine.model.encoders.small_encoders import TEXTS, cosines, loaded, requests, values
from tests.engine.speech_models import run, work_of
from tests.engine.test_demo_speech import reference_tokens
from tidemill.cli.main import main
from tidemill.engine.config import EngineConfig
from tidemill.engine.inspection import ENGLISH_ONLY, inspect_model
from tidemill.engine.load import load_served
from tidemill.engine.media.audio_decoding import decode
from tidemill.engine.model.encoders.encoder import Encoder
from tidemill.engine.model.encoders.position_bias import FARTHEST
from tidemill.engine.scheduling.speech import SpeechRequest
from tidemill.engine.storage.hub import find_folder
from tidemill.engine.text.vocabulary import load_vocabulary
from tidemill.protocol.in_flight import MemoryBudget
from tools.docs_report import ROOT, blocks_of

pytestmark = pytest.mark.long

RECORDINGS = Path(__file__).parents[2] / "examples" / "recordings"
QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Rewrite this politely: Send me the report now.",
    "Which is the largest planet of the solar system?",
    "List three colours.",
    "Was kostet ein Fahrrad?",
    "def add(a, b):",
    "Name the topic of this text in one or two words: The tide turns the mill's wheel twice a day.",
)
LANGUAGES = {"t1": "French", "t2": "English", "t3": "French", "t4": "English"}
NUM_TOKENS, NUM_LIKELIEST = 24, 5
RATE = 16_000


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}


def llama_of(path: Path) -> Any:
    """Return transformers' class with the tensors of a GGUF file of SmolLM2, rounded to bf16.

    llama.cpp stores the two halves of each query and key head interleaved.
    """
    reader = GGUFReader(path)
    metadata = {
        name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()
    }
    heads = {
        "attn_q": metadata["attention.head_count"],
        "attn_k": metadata["attention.head_count_kv"],
    }
    config = LlamaConfig(
        vocab_size=metadata["vocab_size"],
        hidden_size=metadata["embedding_length"],
        intermediate_size=metadata["feed_forward_length"],
        num_hidden_layers=metadata["block_count"],
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        rms_norm_eps=metadata["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["rope.freq_base"]},
        max_position_embeddings=metadata["context_length"],
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    tensors = {}
    for tensor in reader.tensors:
        name, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if kind in heads:
            pairs = weight.view(heads[kind], -1, 2, config.hidden_size)
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        layer = name.removeprefix("blk.")
        prefix = f"layers.{layer}.{LAYER_NAMES[kind]}" if layer else OTHER_NAMES[kind]
        tensors[f"{prefix}.weight"] = weight.bfloat16().float()
    model.model.load_state_dict(tensors)
    return model


def expected_row(model: Any, tokenizer: Any, question: str) -> tuple[str, list[dict[int, float]]]:
    """Return transformers' greedy text, and the likeliest log-probabilities of each step."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[0, ids.shape[1] :].tolist()
    steps = []
    for logits in made.logits:
        top = logits[0].log_softmax(-1).topk(NUM_LIKELIEST)
        steps.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
    return tokenizer.decode(tokens, skip_special_tokens=True), steps


async def test_rows_and_log_probabilities_of_smollm2_are_those_of_transformers(
    smollm2: Path,
) -> None:
    """Both get the values of the GGUF file's quantised numbers, in bf16."""
    vocabulary = load_vocabulary(str(smollm2), find_folder(str(smollm2)))
    model = llama_of(smollm2)
    model.generation_config.eos_token_id = vocabulary.eos_id
    served = load_served(EngineConfig(str(smollm2), device="cpu", dtype="float32"))
    with torch.inference_mode():
        for question in QUESTIONS:
            text, steps = expected_row(model, vocabulary.pretrained, question)
            body = {
                "model": served.info().model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": NUM_LIKELIEST,
            }
            reply = await served.respond("/v1/chat/completions", body, "r", 0)
            assert reply.status_code == 200, reply.body
            (choice,) = reply.body["choices"]
            assert choice["message"]["content"] == text
            for step, place in zip(steps, choice["logprobs"]["content"], strict=False):
                got = [each["logprob"] for each in place["top_logprobs"]]
                np.testing.assert_allclose(got, sorted(step.values(), reverse=True), atol=2e-3)
                assert math.isclose(place["logprob"], got[0])
    served.close()


@pytest.mark.parametrize("name", ["README.md", "docs/guides/decide-over-a-table.md"])
def test_the_decisions_that_a_page_shows_are_made_and_right(
    name: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digits of their probabilities depend on the processor."""
    monkeypatch.chdir(tmp_path)
    blocks = list(blocks_of(ROOT / name))
    [table] = [block for block in blocks if block.title == "tickets.csv"]
    [shown] = [block for block in blocks if block.title == "tickets.output.csv"]
    [words] = [
        words
        for block in blocks
        if block.language == "sh"
        for words in commands_of(block.text)
        if "--ask" in words
    ]
    if "--model" in words:
        place = words.index("--model")
        del words[place : place + 2]
    Path("tickets.csv").write_text(table.text, encoding="utf-8")
    assert main([*words[1:], "--model", str(smollm2)]) == 0
    made, expected = (
        list(csv.DictReader(io.StringIO(text)))
        for text in (Path("tickets.output.csv").read_text(encoding="utf-8"), shown.text)
    )
    for row, page_row in zip(made, expected, strict=True):
        assert row["language"] == page_row["language"] == LANGUAGES[row["id"]]
        shares = (float(each["language_confidence"]) for each in (row, page_row))
        assert math.isclose(*shares, abs_tol=0.05)


@pytest.mark.parametrize(("name", "max_tokens"), [("mpnet", 384), ("minilm", 256)])
def test_vectors_are_those_of_sentence_transformers(
    request: pytest.FixtureRequest, name: str, max_tokens: int
) -> None:
    """The engine's own network is used, beyond the distance where MPNet's keys share a bucket."""
    folder = request.getfixturevalue(name)
    model = SentenceTransformer(str(folder), device="cpu")
    ours = loaded(folder)
    assert isinstance(ours.network, Encoder)
    assert ours.notes == ()
    batch = requests(model.tokenizer, TEXTS, max_tokens)
    assert max(len(each.token_ids) for each in batch) > FARTHEST + 1
    got = values(ours, batch)
    got /= np.linalg.norm(got, axis=1, keepdims=True)
    expected = model.encode(TEXTS)
    assert cosines(got, expected).min() >= 0.999999
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_tiny_en_writes_what_transformers_writes(whisper_tiny_en: Path) -> None:
    """Tokens and segments are the same for the same samples; the model reports English only."""
    plan = inspect_model(EngineConfig(str(whisper_tiny_en), device="cpu")).plan
    assert plan is not None
    assert ENGLISH_ONLY in plan.notes
    budget = MemoryBudget(2**30)
    names = json.loads((RECORDINGS / "said.json").read_text())
    clips = [
        decode((RECORDINGS / name).read_bytes(), RATE, max_seconds=60, budget=budget)
        for name in names
    ]
    model = WhisperForConditionalGeneration.from_pretrained(whisper_tiny_en, dtype=torch.float32)
    processor = WhisperProcessor.from_pretrained(whisper_tiny_en)
    batch = [SpeechRequest(samples, wants_segments=True) for samples in clips]
    waited_for, ahead = (
        [one.result() for one in run(work_of(whisper_tiny_en, steps_ahead=count), *batch)]
        for count in (0, 1)
    )
    assert ahead == waited_for
    for samples, result in zip(clips, waited_for, strict=True):
        got = [list(segment.token_ids) for segment in result.segments]
        assert got == reference_tokens((model.eval(), processor), samples)
