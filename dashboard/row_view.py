"""A row as the page shows it: the request next to its answer, or its error.

Rows and requests are the bytes of any client and of any model: whatever they contain, they have a
view, and it contains only text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

from tidemill.batch.file.answers import Answer, first_numbers, named_answers, probabilities_of
from tidemill.batch.file.request_text import part_texts, request_text

from .request_code import curl_of, python_of
from .row_facts import (
    RowFacts,
    answer_in,
    as_text,
    confidences_in,
    fields_in,
    parse_json,
    row_facts,
    short_name,
)
from .visible_text import visible

_MAX_NUMBERS: Final = 8
_MAX_PARTS: Final = 50
_CHARS_OF_LIST: Final = 1_000
# Of one row on its own page, whose response must stay below 6 MB.
_CHARS_OF_ROW: Final = 400_000
_MAX_AUDIO_CHARS: Final = 2_000_000
_MAX_JSON_BYTES: Final = 2**18  # indented, nested lists would become a hundred times as long
_MAX_COLUMNS: Final = 200
_AUDIO: Final = "data:audio/"


class Field(NamedTuple):
    """One named value of an answer or a request."""

    name: str
    value: str
    confidence: float | None = None


class Share(NamedTuple):
    """One possible value of a decision and its probability."""

    label: str
    probability: float


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a request or an answer: a text, the fields of an object, or probabilities.

    `num_more` characters of it are not shown.
    """

    title: str = ""
    text: str = ""
    fields: tuple[Field, ...] = ()
    shares: tuple[Share, ...] = ()
    num_more: int = 0


@dataclass(frozen=True, slots=True)
class RowView:
    """One row on the page; `request` is None while it is unknown.

    `cells` are those of the row of a table. `json`, `curl` and `python` are empty in a list.
    """

    line: int
    facts: RowFacts | None
    custom_id: str
    words: tuple[str, ...]
    answer: tuple[Part, ...]
    request: tuple[Part, ...] | None = None
    cells: tuple[Part, ...] = ()
    audio: str = ""
    json: str = ""
    curl: str = ""
    python: str = ""

    @property
    def is_cut(self) -> bool:
        """Say whether a part of it is not shown."""
        parts = (*self.answer, *(self.request or ()), *self.cells)
        return any(part.num_more for part in parts)


class _Room:
    """The characters that are left for the texts of one row."""

    def __init__(self, *, is_full: bool) -> None:
        self.each = _CHARS_OF_ROW if is_full else _CHARS_OF_LIST
        self._left = _CHARS_OF_ROW if is_full else 8 * _CHARS_OF_LIST

    def part(self, title: object, text: str) -> Part:
        """Return a part with as much of a text as there is room for."""
        shown = text[: min(self.each, self._left)]
        self._left -= len(shown)
        return Part(short_name(title), visible(shown), num_more=len(text) - len(shown))

    def parts(self, title: str, text: str, confidence: object = None) -> Part:
        """Return a part with the fields of a JSON object, or else with the text."""
        found = _object_in(text) if len(text) <= self.each else None
        if not found or len(found) > _MAX_PARTS:
            return self.part(title, text)
        known = confidence if isinstance(confidence, dict) else {}
        return self.fields(title, found, known)

    def fields(
        self, title: str, values: Mapping[str, Any], confidence: Mapping[str, Any] | None = None
    ) -> Part:
        """Return a part with named values."""
        shown, num_more = [], 0
        for name, value in values.items():
            part = self.part(name, as_text(value))
            pointer = "/" + str(name).replace("~", "~0").replace("/", "~1")
            sure = next(confidences_in((confidence or {}).get(pointer)), None)
            shown.append(Field(part.title, part.text, sure))
            num_more += part.num_more
        return Part(title, fields=tuple(shown), num_more=num_more)


def row_view(
    line: int,
    data: bytes | None,
    request: bytes | None = None,
    *,
    cells: Mapping[str, Any] | None = None,
    is_full: bool = False,
) -> RowView:
    """Return a row for the page, in full or as an item of a list.

    `data` is None for a row that is too large to be read.
    """
    room = _Room(is_full=is_full)
    row = None if data is None else parse_json(data)
    if not isinstance(row, dict):
        text = "This row is too large for the page: it is in the batch's files."
        if data is not None:
            text = data[: 4 * room.each].decode(errors="replace")
        return RowView(
            line, None, "", ("not shown" if data is None else "not a row",), (room.part("", text),)
        )
    facts = row_facts(row)
    answer = _error_parts(facts, room) if facts.status == "failed" else _answer_parts(row, room)
    request_fields = None if request is None else parse_json(request)
    body = request_fields.get("body") if isinstance(request_fields, dict) else None
    shown = None
    if isinstance(body, dict):
        shown = _request_parts(body, room, is_full=is_full)
    elif request is not None:
        shown = [room.part("", request[: 4 * room.each].decode(errors="replace"))]
    return RowView(
        line,
        facts,
        short_name(facts.custom_id or ""),
        _words(facts),
        tuple(answer),
        None if shown is None else tuple(shown),
        tuple(_columns(cells or {}, room)),
        audio=_recording_in(body) if is_full else "",
        json=_indented(data or b"", row) if is_full else "",
        curl=curl_of(request_fields) if is_full else "",
        python=python_of(request_fields) if is_full else "",
    )


def columns_view(
    line: int, facts: RowFacts, request: Mapping[str, str], answer: Mapping[str, str], json: str
) -> RowView:
    """Return a row of a table, in full with its cells as `json`.

    Columns of the request and the answer are fields; the answer's `text` needs no name.
    """
    room, words = _Room(is_full=bool(json)), _words(facts)
    if facts.status == "failed":  # a table has no status codes
        parts, words = _error_parts(facts, room), tuple(map(short_name, facts.reasons))
    else:
        rest = {name: text for name, text in answer.items() if name != "text"}
        parts = [room.parts("", answer["text"])] if answer.get("text") else []
        parts += _columns(rest, room)
    return RowView(
        line,
        facts,
        short_name(facts.custom_id or ""),
        words,
        tuple(parts) or (Part(text="(empty answer)"),),
        tuple(_columns(request, room)),
        json=visible(json) if len(json) <= _CHARS_OF_ROW else "",
    )


def _columns(values: Mapping[str, Any], room: _Room) -> list[Part]:
    shown = dict(islice(values.items(), _MAX_COLUMNS))
    num_more = len(values) - len(shown)
    more = [Part(text=f"… and {num_more:,} more columns")] if num_more else []
    return [*([room.fields("", shown)] if shown else []), *more]


def _recording_in(body: object) -> str:
    """Return the first recording that is in a request itself."""
    fields = fields_in(body)
    for url in (fields.get("file_url"), *_recordings_of_chat(fields.get("messages"))):
        if isinstance(url, str) and url.startswith(_AUDIO) and len(url) < _MAX_AUDIO_CHARS:
            return url
    return ""


def _recordings_of_chat(messages: object) -> Iterator[str]:
    """Yield the URLs of the recordings in messages; data becomes a data URL."""
    for message in messages if isinstance(messages, list) else ():
        content = fields_in(message).get("content")
        for part in content if isinstance(content, list) else ():
            match part:
                case {"type": "input_audio", "input_audio": {"data": str(data), **rest}}:
                    yield f"{_AUDIO}{rest.get('format', 'wav')};base64,{data}"
                case {"type": "audio_url", "audio_url": {"url": str(url)}}:
                    yield url


def _words(facts: RowFacts) -> tuple[str, ...]:
    """Return the words after a row's number and ID."""
    words = []
    if facts.status == "failed":
        words.append("not run" if facts.status_code is None else f"status {facts.status_code}")
        words += [facts.error_code] if facts.error_code else []
    words += facts.reasons
    if facts.num_tokens is not None:
        words.append(f"{facts.num_tokens:,} tokens")
    if facts.confidence is not None:
        words.append(f"confidence {facts.confidence:.2f}")
    return tuple(map(short_name, words))


def _error_parts(facts: RowFacts, room: _Room) -> list[Part]:
    return [room.part("", facts.text or "This row has no answer and no error message.")]


def _answer_parts(row: Mapping[str, Any], room: _Room) -> list[Part]:
    body = row["response"]["body"]
    choices = body.get("choices")
    if isinstance(choices, list):
        named = [choice for choice in choices if isinstance(choice, dict)]
        parts = [part for choice in named for part in _choice_parts(choice, room, len(named))]
    elif decided := _decision_parts(body.get("answers"), room):
        parts = decided
    else:
        answer = answer_in(body)
        parts = [room.parts("", text) for text in answer.texts] or _number_parts(answer, room)
    return _few(parts) or [Part(text="(empty answer)")]


def _choice_parts(choice: Mapping[str, Any], room: _Room, num_choices: int) -> Iterator[Part]:
    index = choice.get("index")
    prefix = f"Choice {index + 1}" if num_choices > 1 and isinstance(index, int) else ""
    message = choice.get("message")
    if not isinstance(message, dict):
        yield room.parts(prefix, as_text(choice.get("text", "")), choice.get("confidence"))
        return
    for name in ("reasoning", "reasoning_content"):
        if message.get(name):
            yield room.part(" · ".join(filter(None, (prefix, "Reasoning"))), as_text(message[name]))
            break
    if message.get("content"):
        yield room.parts(prefix, as_text(message["content"]), choice.get("confidence"))
    if message.get("refusal"):
        yield room.part("Refusal", as_text(message["refusal"]))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        fields = fields_in(call)
        function = fields_in(fields.get("function") or fields.get("custom"))
        title = f"Call of {short_name(as_text(function.get('name')))}"
        text = as_text(function.get("arguments", function.get("input", "")))
        # The input of a custom tool is text, whatever it looks like.
        yield (room.parts if "arguments" in function else room.part)(title, text)


def _decision_parts(answers: object, room: _Room) -> list[Part]:
    """Return each answer of a decision with its probabilities; none if one is malformed."""
    parts = []
    try:
        for name, answer in named_answers(answers):
            if answer.get("type") in {None, "refusal"}:
                parts.append(room.part(name, as_text(answer.get("choice", answer.get("type")))))
                continue
            shares = sorted(probabilities_of(answer).items(), key=lambda item: -item[1])
            shown = [Share(short_name(as_text(label)), float(share)) for label, share in shares]
            parts.append(Part(short_name(name), shares=tuple(shown[:_MAX_PARTS])))
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
    return parts


def _number_parts(answer: Answer, room: _Room) -> list[Part]:
    """Return scores as fields, and the first numbers of each vector."""
    vectors = answer.vectors[:_MAX_PARTS]
    is_sparse = any(isinstance(vector, Mapping) for vector in vectors)
    if len(vectors) > 1 and not is_sparse and all(len(vector) == 1 for vector in vectors):
        return [room.fields("Scores", {str(place): each[0] for place, each in enumerate(vectors)})]
    parts = []
    for place, vector in enumerate(vectors):
        name = f"Vector {place}" if len(vectors) > 1 else ""
        parts.append(room.part(name, first_numbers(vector, _MAX_NUMBERS)))
    return parts


def _request_parts(body: Mapping[str, Any], room: _Room, *, is_full: bool) -> list[Part]:
    """Return chat turns, or the text or the fields of any other request."""
    shown = {"model"}
    turns = body.get("messages", body.get("input"))
    has_turns = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    if isinstance(body.get("questions"), list) and "input" in body:
        shown |= {"questions", "input", "instructions"}
        parts = [room.part("", _text_of_request(body))]
    elif has_turns and isinstance(turns, list):
        shown |= {"messages", "input"}
        parts = [_turn(turn, room) for turn in turns]
    else:
        text = next((name for name in ("prompt", "input") if isinstance(body.get(name), str)), None)
        shown |= {text or "", "file_url"}
        parts = [room.part("", body[text])] if text else []
    rest = {name: value for name, value in body.items() if name not in shown}
    if rest and (is_full or not parts):
        parts.append(room.fields("Parameters" if parts else "", rest))
    return _few(parts) or [Part(text="(empty request)")]


def _text_of_request(body: Mapping[str, Any]) -> str:
    try:
        return request_text(body)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return as_text(body)


def _turn(turn: Mapping[str, Any], room: _Room) -> Part:
    content = turn.get("content")
    texts = [content] if isinstance(content, str) else [*part_texts(content)]
    if turn.get("tool_calls"):
        texts.append(as_text(turn["tool_calls"]))
    if not texts:
        texts = [as_text({name: value for name, value in turn.items() if name != "role"})]
    return room.part(turn.get("role") or turn.get("type") or "message", "\n".join(texts))


def _few(parts: Sequence[Part]) -> list[Part]:
    """Return the first parts, and the number of the others."""
    num_more = len(parts) - _MAX_PARTS
    more = [Part(text=f"… and {num_more:,} more parts")] if num_more > 0 else []
    return [*parts[:_MAX_PARTS], *more]


def _indented(data: bytes, row: object) -> str:
    if len(data) > _MAX_JSON_BYTES:
        return ""
    text = json.dumps(row, indent=2, ensure_ascii=False)
    return visible(text) if len(text) <= _CHARS_OF_ROW else ""


def _object_in(text: str) -> dict[str, Any] | None:
    found = parse_json(text.encode(errors="replace")) if text.lstrip().startswith("{") else None
    return found if isinstance(found, dict) else None
