"""How the answers to one request are read: by the forms of its model, and by what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from engine.answers.calls import MISTRAL
from engine.answers.flow import Flow, FlowReader, Waiting
from engine.answers.forms import AnswerForms


@dataclass(frozen=True, slots=True)
class FormedReading:
    """Reads answers in these forms; a `Reading`.

    `is_open` says that they begin inside the thinking. `tools` has the schemas of what may be
    called; one call alone stands where it `is_single`, and where it `is_held` to a grammar, calls
    stand only where that has them. Ids of calls come of `key`: a line gives the same in every run.
    """

    forms: AnswerForms
    key: str
    is_open: bool = False
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_single: bool = False
    is_held: bool = False
    markers: frozenset[int] = frozenset()

    @property
    def thinks(self) -> bool:
        """Say whether an answer may begin with thinking."""
        return self.forms.thinks

    def reader(self, choice: int) -> FlowReader:
        """Begin to read the choice of that number."""
        flow = Flow(
            lambda index: self._id(choice, index),
            tools=self.tools,
            is_single=self.is_single,
            is_held=self.is_held,
        )
        return FlowReader(flow, self._read(flow))

    def _read(self, flow: Flow) -> Waiting:
        if self.forms.thinking is not None:
            yield from self.forms.thinking.read(flow, is_open=self.is_open)
        if self.forms.calls is None:
            yield from flow.pass_on((), flow.say)
        else:
            yield from self.forms.calls.read(flow)

    def _id(self, choice: int, index: int) -> str:
        digest = blake2b(f"{self.key} {choice} {index}".encode(), digest_size=12).hexdigest()
        # Mistral's templates take no others.
        return digest[:9] if self.forms.calls is MISTRAL else f"call_{digest}"
