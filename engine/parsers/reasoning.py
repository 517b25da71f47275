"""Reasoning parser: the text between a model's reasoning marks, such as `<think>`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .text_stream import ParserCoroutine, TextStream

ReasoningStart = Literal["open", "closed", "before"]
"""Start of an answer: inside the reasoning, after it, or before the model may open it."""


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """Parses reasoning between `opens` and `closes`, before the answer.

    Some models omit the opening mark: with `always_opens` the answer starts with reasoning even if
    the prompt has not opened it. A `label` may follow the opening mark. `answer_tags`, if any, may
    be around the content; they are not part of it.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    always_opens: bool = False
    label: str = ""
    answer_tags: tuple[str, str] | None = None

    def start_after(self, prompt: str) -> ReasoningStart:
        """Return where an answer to this prompt starts."""
        end = prompt.rstrip()
        if end.endswith(self.opens):
            return "open"
        if end.endswith(self.closes):
            return "closed"
        return "open" if self.always_opens else "before"

    def start_continuing(self, begun: str) -> ReasoningStart:
        """Return where the continuation of this text starts."""
        last_opened = max(begun.rfind(mark) for mark in self.opens)
        is_open = last_opened > max(begun.rfind(mark) for mark in self.closes)
        return "open" if is_open else "closed"

    def read(self, stream: TextStream, *, is_open: bool) -> ParserCoroutine:
        """Parse the reasoning, if there is any, and stop before the answer."""
        stream.strip_from_content(self.answer_tags)
        start = stream.at
        yield from stream.skip_space()
        # A model may repeat the mark that its prompt ends with.
        if not (yield from stream.accept_any(self.opens)) and not is_open:
            stream.at = start
            return
        yield from stream.accept(self.label)
        begin = stream.base
        yield from stream.forward_until(self.closes, stream.emit_reasoning)
        stream.end_reasoning()
        stream.reasoning_spans.append((begin, stream.base))


THINK = ReasoningParser(("<think>",), ("</think>",))
R1_THINK = ReasoningParser(("<think>",), ("</think>",), always_opens=True)
ERNIE_THINK = replace(THINK, answer_tags=("<response>", "</response>"))
HUNYUAN_THINK = replace(THINK, answer_tags=("<answer>", "</answer>"))
MISTRAL_THINK = ReasoningParser(("[THINK]",), ("[/THINK]",))
SEED_THINK = ReasoningParser(("<seed:think>",), ("</seed:think>",))
COHERE_THINK = ReasoningParser(("<|START_THINKING|>",), ("<|END_THINKING|>",))
GEMMA_THINK = ReasoningParser(("<|channel>",), ("<channel|>",), label="thought\n")
MINIMAX_M3_THINK = ReasoningParser(("<mm:think>",), ("</mm:think>",))
LONGCAT_THINK = ReasoningParser(("<longcat_think>",), ("</longcat_think>",))
APERTUS_THINK = ReasoningParser(("<|inner_prefix|>",), ("<|inner_suffix|>",))
GRANITE_THINK = ReasoningParser(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
