"""Calls of tools as JSON between marks: what hermes, mistral and granite write."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from engine.answers.flow import Flow, Waiting
from engine.answers.json_text import items, members, skip_value
from engine.answers.tagged_arguments import read_function, read_pairs
from engine.answers.written import LISTED, NAME, Written

_MAX_NAME_CHARS = 200
UNREAD = "A call of a tool could not be read; it is left in the content."


class Said(NamedTuple):
    """A call as it was read; without arguments, or an id, where the model wrote none."""

    name: str
    arguments: str | None = None
    call_id: str | None = None


Calls = Generator[None, None, Sequence[Said] | None]
"""Reads what follows a mark; None, somewhere in it, where that is no call."""


class CallForm(Protocol):
    """How a model writes calls. `marks` are what its special tokens are written like."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return them."""

    def written(self, template: str) -> Written:
        """Return how calls are written by a model with this template."""

    def read(self, flow: Flow) -> Waiting:
        """Read an answer to its end, and the calls in it."""


class Following(Protocol):
    """Reads the calls that follow a mark."""

    def __call__(self, flow: Flow) -> Calls:
        """Return them, or None."""


@dataclass(frozen=True, slots=True)
class MarkedCalls:
    """Calls that begin with one of the marks `opens`, anywhere in an answer; a `CallForm`.

    Models whose template has the `sign` write them otherwise. A model may leave the mark out before
    what is `unmarked`, and then calls one of its tools.
    """

    opens: tuple[str, ...]
    follows: Following
    writes: Written
    other_marks: tuple[str, ...] = ()
    sign: str = ""
    writes_with_sign: Written | None = None
    unmarked: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Return what special tokens are written like."""
        return self.opens + self.other_marks

    def written(self, template: str) -> Written:
        """Return how they are written by a model with this template."""
        if self.writes_with_sign is not None and self.sign in template:
            return self.writes_with_sign
        return self.writes

    def read(self, flow: Flow) -> Waiting:
        """Read an answer; what cannot be read of it stays what it says, mark and all."""
        marks = (*self.marks, *(() if flow.is_held else self.unmarked))
        while (mark := (yield from flow.pass_on(marks, flow.say))) is not None:
            if mark in self.unmarked:
                flow.unread(mark)
            said = None if mark in self.other_marks else (yield from self.follows(flow))
            if said is not None and (mark in self.opens or names_tools(flow, said)):
                tell(flow, said)
                continue
            # `pass_on` has dropped all before.
            flow.at = len(mark) if mark in self.unmarked else 0
            name, _, _ = flow.text[flow.at : flow.at + _MAX_NAME_CHARS].partition(">")
            if mark in self.marks or said is not None or name in flow.tools:
                flow.warn(UNREAD)
            flow.say(mark)


def tell(flow: Flow, said: Sequence[Said]) -> None:
    """Tell calls that were read, and forget their text."""
    for call in said:
        flow.call(call.name, call.arguments or "{}", call.call_id)
    flow.drop()


def names_tools(flow: Flow, said: Sequence[Said]) -> bool:
    """Say whether calls name tools alone, and have arguments: what bears no mark may be a text."""
    return all(call.name in flow.tools and call.arguments is not None for call in said)


def json_calls(text: str) -> list[Said]:
    """Return the calls of a JSON text, an object or an array of them; ValueError for any other."""
    if text.lstrip().startswith("["):
        return [call for item in items(text) for call in json_calls(item)]
    said = members(text)
    if "function" in said and isinstance(said["function"][0], dict):
        return json_calls(said["function"][1])
    name, _ = said.get("name") or said.get("function") or (None, "")
    if not isinstance(name, str) or not name:
        raise ValueError("it names nothing to call")
    given = said.get("arguments") or said.get("parameters")
    if given is None:
        return [Said(name)]
    value, arguments = given
    if isinstance(value, str):  # a text of JSON inside JSON
        members(value)
        return [Said(name, value)]
    if value is None:
        return [Said(name, "{}")]
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")  # noqa: TRY004 - a value of the text, not ours
    return [Said(name, arguments)]


def following_json(flow: Flow) -> Generator[None, None, list[Said] | None]:
    """Read one JSON value that is a call, or an array of calls."""
    start = flow.at
    if not (yield from skip_value(flow)):
        return None
    try:
        return json_calls(flow.text[start : flow.at]) or None
    except ValueError:
        return None


def _hermes(flow: Flow) -> Calls:
    """Read calls up to the mark of their end, which may be missing; mostly there is one."""
    said: list[Said] = []
    after = flow.at
    while True:
        yield from flow.skip_space()
        if said and (yield from flow.takes("</tool_call>")):
            return said
        if said and (yield from flow.peek(1)) not in ("<", "{"):
            break
        found = yield from _hermes_calls(flow, may_be_bare=not said)
        if found is None:
            break
        said += found
        after = flow.at
    flow.at = after
    return said or None


def _hermes_calls(flow: Flow, *, may_be_bare: bool) -> Generator[None, None, Sequence[Said] | None]:
    if (yield from flow.takes("<function=")):
        found = yield from read_function(flow)
    elif (yield from flow.peek(1)) in ("{", "["):
        return (yield from following_json(flow))
    else:
        found = (yield from read_pairs(flow)) if may_be_bare else None
    return None if found is None else [Said(*found)]


def _granite(flow: Flow) -> Calls:
    return (yield from following_json(flow))


def _mistral(flow: Flow) -> Calls:
    yield from flow.skip_space()
    if (yield from flow.peek(1)) in ("[", "{"):
        return (yield from following_json(flow))
    name = yield from flow.word()
    call_id = None
    if (yield from flow.takes("[CALL_ID]")):
        call_id = (yield from flow.word()) or None
    yield from flow.takes("[ARGS]")
    yield from flow.skip_space()
    arguments = yield from following_object(flow)
    if not name or arguments is None:
        return None
    return [Said(name, arguments, call_id)]


def following_object(flow: Flow) -> Generator[None, None, str | None]:
    """Read the text of one JSON object."""
    start = flow.at
    if not (yield from skip_value(flow)):
        return None
    text = flow.text[start : flow.at]
    try:
        members(text)
    except ValueError:
        return None
    return text


HERMES = MarkedCalls(
    ("<tool_call>",),
    _hermes,
    Written(
        head=f'<tool_call>\n{{"name": "{NAME}", "arguments": ',
        tail="}\n</tool_call>",
        between="\n",
    ),
    ("</tool_call>",),
    unmarked=("<function=",),
)
GRANITE = MarkedCalls(
    ("<|tool_call|>",), _granite, replace(LISTED, prefix=f"<|tool_call|>{LISTED.prefix}")
)
MISTRAL = MarkedCalls(
    ("[TOOL_CALLS]",),
    _mistral,
    replace(LISTED, prefix=f"[TOOL_CALLS]{LISTED.prefix}"),
    ("[ARGS]", "[CALL_ID]"),
    sign="[ARGS]",
    writes_with_sign=Written(head=f"[TOOL_CALLS]{NAME}[ARGS]"),
)
