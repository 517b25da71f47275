"""How models think aloud: between which marks, and who opens them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.answers.flow import Flow, Waiting


@dataclass(frozen=True, slots=True)
class ThinkingForm:
    """Thoughts stand between `opens` and `closes`, before the answer.

    Some models leave out the opening mark, and `always_opens`: what comes first is thinking though
    no prompt has opened it.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    always_opens: bool = False

    def is_open_after(self, prompt: str) -> bool:
        """Say whether an answer to this prompt begins inside the thinking."""
        end = prompt.rstrip()
        if any(end.endswith(mark) for mark in self.opens):
            return True
        return self.always_opens and not self.is_closed_after(prompt)

    def is_open_in(self, begun: str) -> bool:
        """Say whether an answer that has begun so goes on inside the thinking."""
        last_opened = max(begun.rfind(mark) for mark in self.opens)
        return last_opened > max(begun.rfind(mark) for mark in self.closes)

    def is_closed_after(self, prompt: str) -> bool:
        """Say whether the prompt has ended the thinking, so that none comes."""
        end = prompt.rstrip()
        return any(end.endswith(mark) for mark in self.closes)

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
