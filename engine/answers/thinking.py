"""How models think aloud: between which marks, and who opens them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.answers.flow import Flow, Waiting

Begins = Literal["open", "closed", "before"]
"""Where an answer begins: inside the thinking, behind it, or where the model may open it itself."""


@dataclass(frozen=True, slots=True)
class ThinkingForm:
    """Thoughts stand between `opens` and `closes`, before the answer.

    Some models leave out the opening mark, and `always_opens`: what comes first is thinking though
    no prompt has opened it.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    always_opens: bool = False

    def begins_after(self, prompt: str) -> Begins:
        """Return where an answer to this prompt begins."""
        end = prompt.rstrip()
        if end.endswith(self.opens):
            return "open"
        if end.endswith(self.closes):
            return "closed"
        return "open" if self.always_opens else "before"

    def goes_on(self, begun: str) -> Begins:
        """Return where an answer goes on that has begun so."""
        last_opened = max(begun.rfind(mark) for mark in self.opens)
        is_open = last_opened > max(begun.rfind(mark) for mark in self.closes)
        return "open" if is_open else "closed"

    def read(self, flow: Flow, *, is_open: bool) -> Waiting:
        """Read the thinking, if there is any, and stop before the answer."""
        start = flow.at
        yield from flow.skip_space()
        # A model may open again what its prompt has opened.
        if not (yield from flow.takes_any(self.opens)) and not is_open:
            flow.at = start
            return
        begin = flow.base
        yield from flow.pass_on(self.closes, flow.think)
        flow.end_thinking()
        flow.thinking.append((begin, flow.base))


THINK = ThinkingForm(("<think>",), ("</think>",))
R1_THINK = ThinkingForm(("<think>",), ("</think>",), always_opens=True)
MISTRAL_THINK = ThinkingForm(("[THINK]",), ("[/THINK]",))
GRANITE_THINK = ThinkingForm(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
