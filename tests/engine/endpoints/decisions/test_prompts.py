"""Prompts of decisions end where the answer's first token follows, whatever the chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scripted_model import METADATA, Scene, pretrained_tokenizer, text_model
from tidemill.engine.endpoints import text_endpoints
from tidemill.engine.parsers.registry import ParserSet, select_parsers
from tidemill.protocol.errors import RequestError

USER = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENED = "{{ '<think>\n' }}"
BODY = {"input": "The box is torn.", "questions": [{"type": "predicate", "instructions": "Torn?"}]}


def prompts(template: str | None, parsers: ParserSet, **fields: Any) -> list[str]:
    """Return the prompts of the reads of a decision."""
    model = replace(text_model(chat_template=template), max_model_len=4_096)
    decisions = text_endpoints(model, seed=0, parsers=parsers)[3]
    prepared = decisions.prepare(BODY | fields, METADATA)
    tokenizer = pretrained_tokenizer()
    return [tokenizer.decode(request.prompt_ids) for request in prepared.requests]


@pytest.mark.parametrize(
    ("template", "reasoning", "end"),
    [
        (USER + "[assistant]", "none", "[assistant]"),
        (USER + "[assistant]" + SWITCH, "qwen3", "[assistant]<think>\n\n</think>\n\n"),
        (USER + "[assistant]" + OPENED, "qwen3", "[assistant]<think>\n\n</think>\n\n"),
        (USER + "[assistant]" + OPENED, "deepseek_r1", "[assistant]<think>\n\n</think>\n\n"),
        (USER + "[assistant]", "deepseek_r1", "[assistant]<think>\n</think>\n\n"),
        (USER + "[assistant]", "mistral", "[assistant]"),
        (
            USER + "<|start|>assistant",
            "openai_gptoss",
            "<|start|>assistant<|channel|>final<|message|>",
        ),
    ],
)
def test_a_prompt_ends_after_the_reasoning(template: str, reasoning: str, end: str) -> None:
    """A template may switch thinking off, open it always, or leave it to the model."""
    parsers = select_parsers(template, reasoning=reasoning)
    [prompt] = prompts(template, parsers)
    assert prompt.startswith("[user]The box is torn.")
    assert prompt.endswith(f"Y for yes or N for no.{end}")
    off = {"chat_template_kwargs": {"thinking": False, "thinking_budget": 0}}
    assert prompts(template, parsers, **off) == [prompt]


def test_a_model_without_a_template_reads_plain_text() -> None:
    """Both layouts end with a word that the answer follows."""
    [prompt] = prompts(None, ParserSet())
    assert prompt.startswith("The box is torn.\n\nQuestion: Torn?")
    assert prompt.endswith("Y for yes or N for no.\n\nAnswer:")
    [prompt] = prompts(None, ParserSet(), question_layout="questions_first")
    assert prompt.startswith("Question: Torn?")
    assert prompt.endswith("The box is torn.\n\nAnswer:\n")


def test_an_input_longer_than_the_context_is_refused() -> None:
    """The error names the input, before anything runs."""
    scene = Scene()
    decisions = text_endpoints(scene.model, seed=0)[3]
    for text in ("word " * 40, "word " * 40_000):
        error = scene.fault(decisions, BODY | {"input": text})
        assert (error.param, error.code) == ("input", "context_length_exceeded")
        assert "maximum context length is 64 tokens" in error.message


@pytest.mark.parametrize("template", [USER, None])
def test_an_image_for_a_text_model_is_refused(template: str | None) -> None:
    """The error names the image's place, in the input and in a question."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    instructions = [{"type": "input_text", "text": "Torn?"}, image]
    for fields, place in (
        ({"input": [{"role": "user", "content": [image]}]}, "input.0.content.0"),
        (
            {"questions": [{"type": "predicate", "instructions": instructions}]},
            "questions.0.instructions.1",
        ),
    ):
        with pytest.raises(RequestError, match="does not support images") as raised:
            prompts(template, ParserSet(), **fields)
        assert (raised.value.param, raised.value.code) == (place, "images_not_supported")
