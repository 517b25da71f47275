"""The small chat model in the repository: standard files, and the answers that tests rely on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from tidemill import demo

ROOT = Path(__file__).parents[2]
QUESTIONS = Path(__file__).parent / "questions.jsonl"
EXPECTED = {
    "sum": "19",
    "difference": "28",
    "product": "54",
    "sum-bare": "65",
    "capital-france": "Paris",
    "capital-peru": "Lima",
    "capital-korea": "Seoul",
    "reverse-tide": "edit",
    "reverse-stream": "maerts",
    "reverse-lantern": "nretnal",
    "uppercase-mill": "MILL",
    "uppercase-harbor": "HARBOR",
    "count-boat": "7",
    "count-cat": "6",
    "extract-city": '{"city": "Lisbon"}',
    "extract-job": '{"job": "baker"}',
    "extract-age": '{"age": 27}',
    "fact-ice": "Yes",
    "fact-pigs": "No",
    "fact-bees": "Yes",
    "greeting": "Good morning! I am well, thank you. How can I help you?",
    "farewell": "You are welcome! How can I help you?",
    "with-system-prompt": "Lisbon",
    "two-turns": "21",
    "completion-capital": " Tokyo",
    "completion-sum": " 17",
    "completion-markup": "RIVER",
}

Loaded = tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """The embedded model with its tokenizer."""
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.MODEL_PATH, padding_side="left")
    model = Qwen3ForCausalLM.from_pretrained(demo.MODEL_PATH, dtype=torch.float32)
    return model.eval(), tokenizer


def test_the_folder_holds_the_standard_files_within_eight_megabytes() -> None:
    """It contains only files by transformers, readable by all users and small enough for Git."""
    files = {path.name: path for path in demo.MODEL_PATH.iterdir()}
    assert set(files) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in files.values()) <= 8_000_000
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in files.values())


def test_transformers_loads_it_as_any_other_model() -> None:
    """The automatic classes find the shape, the end of a turn and the template."""
    config = AutoConfig.from_pretrained(demo.MODEL_PATH)
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_PATH)
    generation = json.loads((demo.MODEL_PATH / "generation_config.json").read_text())
    assert config.model_type == "qwen3"
    assert generation["eos_token_id"] == tokenizer.eos_token_id == config.eos_token_id
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert len(tokenizer) <= config.vocab_size


def test_operands_are_spelt_and_any_text_survives(loaded: Loaded) -> None:
    """Letters and digits of what is not fixed text are one token each; bytes cover the rest."""
    tokenizer = loaded[1]
    assert tokenizer.tokenize("Reverse the word zebra.")[-6:] == [*"zebra", "."]
    assert tokenizer.tokenize("1234") == [*"1234"]
    for text in ("naïve – 潮汐 🌊\r\n\tend", " leading and  double blanks ", "\x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_template_opens_and_continues_turns(loaded: Loaded) -> None:
    """A generation prompt opens the assistant's turn; a final message can be left open."""
    tokenizer = loaded[1]
    messages = [{"role": "user", "content": "Hi "}]
    opened = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert opened == "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
    begun = [*messages, {"role": "assistant", "content": "Hel"}]
    left_open = tokenizer.apply_chat_template(begun, continue_final_message=True, tokenize=False)
    assert left_open == opened + "Hel"


def test_it_answers_its_questions(loaded: Loaded) -> None:
    """Each has the answer that other tests expect of it."""
    model, tokenizer = loaded
    lines = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    assert {line["body"]["model"] for line in lines} == {demo.NAME}
    prompts = [
        line["body"]["prompt"]
        if line["url"] == "/v1/completions"
        else tokenizer.apply_chat_template(
            line["body"]["messages"], add_generation_prompt=True, tokenize=False
        )
        for line in lines
    ]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        sequences = model.generate(**batch, max_new_tokens=32, do_sample=False)
    texts = tokenizer.batch_decode(
        sequences[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    answers = {line["custom_id"]: text for line, text in zip(lines, texts, strict=True)}
    assert answers == EXPECTED


def test_naming_the_model_loads_nothing_heavy() -> None:
    """Commands ask for the model's name and path before they know whether they need torch."""
    code = "import sys, demo; print(demo.NAME, *{'torch', 'transformers'} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [demo.NAME]
