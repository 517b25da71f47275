"""Answers in channels, as gpt-oss writes them: thinking, calls of functions, and what is said.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{…}<|call|>`, `<|channel|>final<|message|>…<|return|>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from engine.answers.calls import UNREAD
from engine.answers.flow import Flow, Waiting
from engine.answers.json_text import members
from engine.answers.written import NAME, TEXT, Written

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADS = (_START, _CHANNEL)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Harmony:
    """Reads such an answer; a `CallForm` that reads thinking, too."""

    marks = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    final = f"{_CHANNEL}final{_MESSAGE}"

    def written(self, template: str) -> Written:
        """Return how calls are written, whatever the template: one, after thoughts and words."""
        del template
        begins = f"{_ENDS[0]}{_START}assistant"
        return Written(
            head=f"{_CHANNEL}commentary to=functions.{NAME} {_CONSTRAIN}json{_MESSAGE}",
            between=None,
            introduces=tuple(
                f"{_CHANNEL}{name}{_MESSAGE}{TEXT}{begins}" for name in ("analysis", "commentary")
            ),
            says=f"{self.final}{TEXT}",
        )

    def read(self, flow: Flow) -> Waiting:
        """Read one message after the other; what has no head is said."""
        while True:
            mark = yield from flow.pass_on((*_HEADS, *_ENDS), flow.say)
            if mark is None:
                return
            if mark in _HEADS:
                yield from self._message(flow, mark)

    def _message(self, flow: Flow, mark: str) -> Waiting:
        begin = flow.base - len(mark)
        head, body = yield from flow.until((_MESSAGE, *_ENDS))
        head = mark + head
        if body != _MESSAGE:
            flow.drop()
            return
        channel, recipient = _CHANNEL_NAME.search(head), _RECIPIENT.search(head)
        if recipient is not None:
            yield from _call(flow, recipient[1])
        elif channel is not None and channel[1] == "analysis":
            flow.part_thinking()
            yield from _body(flow, flow.think)
            flow.end_thinking()
            flow.thinking.append((begin, flow.base))
        else:
            flow.part_saying()
            yield from _body(flow, flow.say)


def _body(flow: Flow, sink: Callable[[str], None]) -> Waiting:
    """Hand on a message, whose end may be missing where the next one begins."""
    flow.drop()
    mark = yield from flow.pass_on((*_ENDS, _START), sink)
    if mark == _START:
        flow.unread(mark)


def _call(flow: Flow, name: str) -> Waiting:
    flow.drop()
    text, mark = yield from flow.until((*_ENDS, _START))
    try:
        members(text.strip() or "{}")
    except ValueError:
        flow.warn(UNREAD)
        flow.part_saying()
        flow.say(text)
    else:
        flow.call(name, text.strip() or "{}")
    flow.drop()
    if mark == _START:
        flow.unread(mark)


HARMONY = Harmony()
