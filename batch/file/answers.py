"""Answers: the comparable part of a row's body, and the differences of two answers."""

from __future__ import annotations

import json
import math
import struct
from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import mul
from typing import Any, Final, NamedTuple, TypeAlias

from tidemill.protocol.embeddings import TYPE_CODES

from .rows import has_truncated_answer

# These differ in each run of some APIs, or do not describe the answer.
_NOT_COMPARED = ("id", "created", "created_at", "model", "object", "usage", "system_fingerprint")
# Types of a response's calls, with those of a chat and the field of their arguments.
_CALLS: Final = {
    "function_call": ("function", "arguments"),
    "custom_tool_call": ("custom", "input"),
}


Vector: TypeAlias = Sequence[float] | Mapping[int, float]
"""Numbers of a vector, of the vectors of all tokens, or of a sparse vector by index."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Texts of all choices, or numbers: each vector, or all scores; decisions and labels have both.

    `finish_reasons` are those of the choices, `num_tokens` is the number of generated tokens.
    """

    texts: tuple[str, ...] = ()
    vectors: tuple[Vector, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    num_tokens: int | None = None


def first_numbers(vector: Vector, limit: int) -> str:
    """Return the first numbers of a vector, those of a sparse one with their indexes."""
    if isinstance(vector, Mapping):
        shown = [f"{index}: {vector[index]:.6g}" for index in islice(vector, limit)]
    else:
        shown = [f"{number:.6g}" for number in vector[:limit]]
    if len(vector) > limit:
        shown.append(f"… ({len(vector):,} numbers)")
    return ", ".join(shown)


class TextDifference(NamedTuple):
    """The first choice whose text differs, and the first differing character, both 0-based."""

    choice: int
    position: int
    a: str
    b: str


class NumberDifference(NamedTuple):
    """The largest absolute difference of two numbers, and the smallest cosine of two vectors.

    None if they cannot be compared: different numbers of vectors, or of dimensions.
    """

    max_abs: float | None
    cosine: float | None


def answer_of(body: Mapping[str, Any]) -> Answer:
    """Return the answer in a body of any endpoint; the JSON is the text for unknown ones."""
    tokens = _tokens_of(body)
    if isinstance(choices := body.get("choices"), list):
        named = [choice for choice in choices if isinstance(choice, dict)]
        reasons = tuple(_reason(choice.get("finish_reason")) for choice in named)
        return Answer(tuple(map(_text_of, named)), (), reasons, tokens)
    if decided := _decided(body.get("answers")):
        lines, shares = zip(*decided, strict=True)
        return Answer(("\n".join(lines),), shares if any(shares) else (), num_tokens=tokens)
    if spans := _spans_of(body):
        return Answer(spans, num_tokens=tokens)
    if moderated := _moderated(body):
        verdicts, scores = zip(*moderated, strict=True)
        return Answer(verdicts, scores, num_tokens=tokens)
    vectors = _vectors_of(body)
    if vectors:
        return Answer(_labels_of(body, vectors), vectors, num_tokens=tokens)
    if isinstance(text := body.get("text"), str):
        return Answer((text,), num_tokens=tokens)
    if isinstance(items := body.get("output"), list):
        reason = "length" if has_truncated_answer(body) else _reason(body.get("status"))
        return Answer((_text_of_output(items),), (), (reason,), tokens)
    rest = {name: value for name, value in body.items() if name not in _NOT_COMPARED}
    return Answer((_json(rest),), num_tokens=tokens)


def difference_between(a: Answer, b: Answer) -> TextDifference | NumberDifference | None:
    """Return the difference of two answers; None if they are identical."""
    if a.vectors and b.vectors:
        return None if a.vectors == b.vectors else _number_difference(a.vectors, b.vectors)
    texts_a, texts_b = _texts_of(a), _texts_of(b)
    for choice, (one, other) in enumerate(zip(texts_a, texts_b, strict=False)):
        if one != other and normalized(one) != normalized(other):
            return TextDifference(choice, common_prefix(one, other), one, other)
    if len(texts_a) == len(texts_b):
        return None
    choice = min(len(texts_a), len(texts_b))
    one, other = (texts[choice] if choice < len(texts) else "" for texts in (texts_a, texts_b))
    return TextDifference(choice, 0, one, other)


def normalized(text: str) -> str:
    """Return a JSON object or array with canonical white space and order; other texts unchanged."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return _json(json.loads(text))
    except (ValueError, RecursionError):
        return text


def common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _texts_of(answer: Answer) -> tuple[str, ...]:
    return answer.texts or tuple(
        _json(vector if isinstance(vector, dict) else [*vector]) for vector in answer.vectors
    )


def _text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice, with its refusal and its tool calls without their IDs."""
    message = choice.get("message")
    if not isinstance(message, dict):
        return _as_text(choice.get("text"))
    texts = [_as_text(message.get(name)) for name in ("content", "refusal")]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        texts += [
            _json(call.get("function") or call.get("custom"))
            for call in calls
            if isinstance(call, dict)
        ]
    return "\n".join(filter(None, texts))


def _text_of_output(items: Sequence[Any]) -> str:
    """Return the text of the items of `/v1/responses`, with their calls."""
    texts = []
    for item in items:
        if not isinstance(item, dict) or item.get("type") == "reasoning":
            continue
        parts = item.get("content")
        if isinstance(parts, list):
            texts += [_as_text(part.get("text")) for part in parts if isinstance(part, dict)]
        called = item.get("arguments", item.get("input"))  # a custom tool has an input
        if called is not None:
            texts.append(_json([item.get("name"), called]))
    return "\n".join(filter(None, texts))


def chat_of_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of `/v1/responses` with the fields of a chat that has the same answer."""
    items = [item for item in body["output"] if isinstance(item, dict)]
    calls = [_chat_call(item) for item in items if item.get("type") in _CALLS]
    message: dict[str, Any] = {
        "content": _joined_parts(items, "message"),
        "reasoning": _joined_parts(items, "reasoning"),
        "tool_calls": calls or None,
    }
    reason = "length" if has_truncated_answer(body) else "tool_calls" if calls else "stop"
    tokens = [token for part in _parts(items, "message") for token in part.get("logprobs") or ()]
    logprobs = {"content": tokens} if tokens else None
    choice = {"message": message, "finish_reason": reason, "logprobs": logprobs}
    return {"choices": [choice], "usage": body.get("usage"), "model": body.get("model")}


def _joined_parts(items: Sequence[Mapping[str, Any]], kind: str) -> str | None:
    """Return the text of all items of a type; None without one."""
    parts = _parts(items, kind)
    return "".join(_as_text(part.get("text")) for part in parts) if parts else None


def _parts(items: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [part for item in items if item.get("type") == kind for part in item["content"]]


def _chat_call(item: Mapping[str, Any]) -> dict[str, Any]:
    kind, field = _CALLS[item["type"]]
    called = {"name": item.get("name"), field: item.get(field)}
    return {"id": item.get("call_id"), "type": kind, kind: called}


def _reason(value: object) -> str:
    return value if isinstance(value, str) else "none"


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _tokens_of(body: Mapping[str, Any]) -> int | None:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    tokens = usage.get("completion_tokens", usage.get("output_tokens"))
    return tokens if isinstance(tokens, int) else None


def named_answers(answers: object) -> list[tuple[Any, Any]]:
    """Return the answers of a decision by their names, or by their numbers."""
    if isinstance(answers, dict):
        return [*answers.items()]
    found: list[tuple[Any, Any]] = []
    for place, answer in enumerate(answers if isinstance(answers, list) else ()):
        name = answer.get("name") if isinstance(answer, dict) else None
        found.append((place if name is None else name, answer))
    return found


def _decided(answers: object) -> list[tuple[str, list[float]]]:
    """Return each answer of a decision in a line, with its probabilities; empty if malformed."""
    try:
        return [_decided_line(name, answer) for name, answer in named_answers(answers)]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return []


def decision_of(answer: Mapping[str, Any]) -> tuple[str, Mapping[Any, float]]:
    """Return the decided value and the probability of each; raises for a malformed answer."""
    kind = answer.get("type")
    if kind is None:  # of a table, which may not have probabilities
        return _as_text(answer["choice"]), {}
    if kind == "refusal":
        return "refusal", {}
    shares = probabilities_of(answer)
    winner = max(shares, key=shares.__getitem__)
    return _as_text(winner), shares


def _decided_line(name: object, answer: Mapping[str, Any]) -> tuple[str, list[float]]:
    text, shares = decision_of(answer)
    if not shares:
        return f"{name}: {text}", []
    return f"{name}: {text} ({max(shares.values()):.3f})", [*map(float, shares.values())]


def probabilities_of(answer: Mapping[str, Any]) -> Mapping[Any, float]:
    """Return the probability of each value of a decision; raises for a malformed answer."""
    if answer.get("type") == "predicate":
        return {"yes": answer["probability"], "no": 1 - answer["probability"]}
    shares: Any = answer.get("probabilities")
    if isinstance(shares, dict):
        return shares
    return {item.get("label", item["value"]): item["probability"] for item in shares}


def _vectors_of(body: Mapping[str, Any]) -> tuple[Vector, ...]:
    """Return the embeddings, or one-dimensional vectors for scores; empty if any is malformed.

    Of a `/v2/embed` body they are those of the first type.
    """
    if isinstance(by_type := body.get("embeddings"), dict):
        body = {"data": [{"embedding": each} for each in next(iter(by_type.values()), ())]}
    items = [*_items_by_index(body)]
    dtype = body.get("output_dtype", "float")
    code = TYPE_CODES.get(dtype) if isinstance(dtype, str) else None
    vectors = [_vector_of(item, code) for item in items]
    known = [vector for vector in vectors if vector or isinstance(vector, dict)]
    return tuple(known) if len(known) == len(vectors) else ()


def _spans_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the spans of each text as JSON; empty for a body without spans."""
    items = [*_items_by_index(body)]
    has_spans = bool(items) and all(isinstance(item.get("spans"), list) for item in items)
    return tuple(_json(item["spans"]) for item in items) if has_spans else ()


def _moderated(body: Mapping[str, Any]) -> list[tuple[str, list[float]]]:
    """Return the verdict of each moderated text with its scores; empty if any is malformed."""
    found = []
    for item in _items_by_index(body):
        flags, scores = item.get("categories"), item.get("category_scores")
        if not isinstance(flags, dict) or not isinstance(scores, dict):
            return []
        if not _are_numbers(scores.values()):
            return []
        flagged = ", ".join(f"{name} ({scores.get(name, 0):.3f})" for name in flags if flags[name])
        verdict = f"flagged: {flagged}" if item.get("flagged") else "not flagged"
        found.append((verdict, [scores[name] for name in sorted(scores)]))
    return found


def _labels_of(body: Mapping[str, Any], vectors: Sequence[Vector]) -> tuple[str, ...]:
    """Return the label of each text with its number; empty for vectors and scores."""
    return tuple(
        f"{_as_text(item['label'])} ({max(vector):.3f})"
        for item, vector in zip(_items_by_index(body), vectors, strict=False)
        if "label" in item
    )


def _vector_of(item: Mapping[str, Any], type_code: str | None) -> Vector | None:
    found = item.get("embedding", item.get("probs"))
    if found is None and item.get("object") == "pooling":
        found = item.get("data")
        if isinstance(found, list) and all(isinstance(pair, dict) for pair in found):
            return _sparse(found)
        found = found if isinstance(found, str) else [*_numbers_in(found)]
    if found is None:
        found = [item.get("score", item.get("relevance_score"))]
    if isinstance(found, str):
        found = _decoded(found, type_code)
    return found if isinstance(found, list) and _are_numbers(found) else None


def _are_numbers(found: Collection[Any]) -> bool:
    """Return whether all values are numbers with a finite sum."""
    if not set(map(type, found)) <= {int, float}:
        return False
    try:
        return math.isfinite(math.fsum(found))
    except (OverflowError, ValueError):
        return False


def _sparse(pairs: Sequence[Mapping[str, Any]]) -> dict[int, float] | None:
    """Return the values of a sparse vector by index; None if it is malformed."""
    indexes: list[Any] = [pair.get("index") for pair in pairs]
    values: list[Any] = [pair.get("value") for pair in pairs]
    if not all(type(index) is int for index in indexes) or not _are_numbers(values):
        return None
    return dict(zip(indexes, values, strict=True))


def _numbers_in(data: object) -> Iterator[object]:
    """Yield the numbers of a vector, or of the vectors of tokens one after the other."""
    for part in data if isinstance(data, list) else [data]:
        yield from part if isinstance(part, list) else [part]


def _items_by_index(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the items of `data` or `results`, in the order of the inputs."""
    found = body.get("data", body.get("results"))
    if isinstance(found, list) and all(isinstance(item, dict) for item in found):
        index_of = {id(item): item.get("index") for item in found}
        is_indexed = all(isinstance(index, int) for index in index_of.values())
        yield from sorted(found, key=lambda item: index_of[id(item)]) if is_indexed else found


def _decoded(text: str, type_code: str | None) -> list[float] | None:
    """Return the vector that a base64 text encodes (`encoding_format`)."""
    if type_code is None:
        return None
    try:
        data = b64decode(text, validate=True)
        return [*struct.unpack(f"<{len(data) // struct.calcsize(type_code)}{type_code}", data)]
    except (struct.error, ValueError):
        return None


def _number_difference(a: Sequence[Vector], b: Sequence[Vector]) -> NumberDifference:
    pairs = [_aligned(one, other) for one, other in zip(a, b, strict=False)]
    if len(a) != len(b) or any(len(one) != len(other) for one, other in pairs):
        return NumberDifference(None, None)
    gaps = (abs(x - y) for one, other in pairs for x, y in zip(one, other, strict=True))
    cosines = [_cosine(one, other) for one, other in pairs]
    known = [cosine for cosine in cosines if cosine is not None]
    return NumberDifference(max(gaps, default=None), min(known, default=None))


def _aligned(a: Vector, b: Vector) -> tuple[Sequence[float], Sequence[float]]:
    """Return the numbers of two vectors in the same order; sparse ones are 0 elsewhere."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        indexes = a.keys() | b.keys()
        return [a.get(index, 0.0) for index in indexes], [b.get(index, 0.0) for index in indexes]
    return [*a], [*b]


def _cosine(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the cosine of two vectors; None for zero vectors and single numbers."""
    size = math.hypot(*a) * math.hypot(*b)
    if len(a) < 2 or not size:
        return None
    return math.fsum(map(mul, a, b)) / size
