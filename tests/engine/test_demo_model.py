"""The small chat model through the engine: greedy output to the token, and sane text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.families import judge
from tidemill.demo import MODEL_PATH
from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

pytestmark = pytest.mark.usefixtures("proved")

QUESTIONS = Path(__file__).parents[1] / "demo" / "questions.jsonl"
NUM_PROMPTS = 40
MAX_TOKENS = 24
SYSTEM = "You are a careful assistant. Answer each question briefly and to the point, please."


def ask_ids(tokenizer: Any) -> list[list[int]]:
    """Tokenise questions of many lengths, half of them behind one system prompt."""
    rng = random.Random(11)
    words = "water wheel moon river bridge stone wind harbor night boat".split()
    prompts = []
    for index in range(NUM_PROMPTS):
        question = rng.choice(
            (
                f"What is {rng.randint(1, 99)} + {rng.randint(1, 99)}?",
                f"Reverse the word {rng.choice(words)}.",
                f'How many words are in "{" ".join(rng.choices(words, k=rng.randint(3, 9)))}"?',
                f"Extract the age as JSON: {rng.choice(words)} is {rng.randint(20, 70)} years old.",
            )
        )
        system = [{"role": "system", "content": SYSTEM}] if index % 2 else []
        messages = [*system, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def test_greedy_output_of_40_prompts_is_transformers_eager_output() -> None:
    """Token for token, log-probabilities within 1e-3: chunked, prefix-shared and preempted."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = EngineConfig(
        str(MODEL_PATH),
        dtype="float32",
        device="cpu",
        max_num_seqs=24,
        max_num_batched_tokens=64,
    )
    model = load_model(config)
    prompts = ask_ids(AutoTokenizer.from_pretrained(MODEL_PATH))
    work = make_core(model, KVCacheSize(60, model.max_model_len), config)
    sampling = Sampling(temperature=0, logprobs=0)
    sequences = [work.add(SequenceRequest(ids, MAX_TOKENS, sampling)) for ids in prompts]
    while work.step() is not None:
        pass
    stats = work.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 500

    eager = AutoModelForCausalLM.from_pretrained(
        MODEL_PATH, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for ids, sequence in zip(prompts, sequences, strict=True):
        got = sequence.result()
        best, logprobs = judge(eager, ids, got.token_ids)
        assert len(got.token_ids) == MAX_TOKENS
        assert got.token_ids == best
        assert got.logprobs is not None
        assert [entry.logprob for entry in got.logprobs] == pytest.approx(logprobs, abs=1e-3)


def test_with_a_cache_of_eight_bits_nearly_all_tokens_are_the_same() -> None:
    """A page takes a quarter of one in fp32; the model is proved as it is without."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    lines = [json.loads(line)["body"] for line in QUESTIONS.read_text().splitlines()]
    prompts = [
        tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for body in lines
        if "messages" in body
    ][:12]
    config = EngineConfig(
        *(str(MODEL_PATH), "float32", "cpu"),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_dtype="fp8",
    )
    small = load_model(config)
    plain = small.with_kv_cache_dtype(None)
    assert plain.page_bytes == 4 * small.page_bytes
    rows = []
    for model in (small, plain):
        work = make_core(model, KVCacheSize(60, model.max_model_len), config)
        # What follows the end of an answer has no margin.
        sequences = [work.add(SequenceRequest(ids, 3, Sampling(temperature=0))) for ids in prompts]
        while work.step() is not None:
            pass
        rows.append([sequence.result().token_ids for sequence in sequences])
    same = sum(first == second for first, second in zip(*rows, strict=True))
    assert same >= 10
