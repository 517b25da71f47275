"""The files of the benchmarks on real work, r1 to r4.

    python -m bench.real.files out/bench/real

Chats with a real model, greedy, whose answers end by themselves:

- r1: topics of 600 short texts, in up to 6 tokens, after two examples;
- r2: 192 announcements of up to 200 tokens;
- r3: three fields of 240 customer messages under a closed schema, after two examples;
- r4: one of six subjects for each of 600 texts, as an enum.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bench.real.messages import make_messages
from bench.real.texts import sample_texts

MODEL: Final = "smollm2"
NUM_TEXTS, NUM_ANNOUNCEMENTS, NUM_MESSAGES = 600, 192, 240
SUBJECTS: Final = ("files", "network", "numbers", "text", "time", "other")
_TOPICS: Final = (
    ("Return the current working directory as a string.", "Folders"),
    ("Send a message to a mail server and wait for its answer.", "Email"),
)
_FIELDS: Final = ("name", "city", "product")
_EXTRACT: Final = "Extract the customer's name, the city and the product from the message as JSON."
_EXAMPLES: Final = (
    (
        "Hello, my garden hose leaks. Can you send a new one to Lisbon? Anna",
        {"name": "Anna", "city": "Lisbon", "product": "garden hose"},
    ),
    (
        "hi its Ben from Cardiff, the mirror came in pieces :(",
        {"name": "Ben", "city": "Cardiff", "product": "mirror"},
    ),
)

Message = Mapping[str, str]


def topics() -> Iterator[dict[str, Any]]:
    """Yield the bodies of r1."""
    shown = [
        turn
        for text, topic in _TOPICS
        for turn in (_user(f"Text: {text}\nTopic:"), _assistant(topic))
    ]
    for text in sample_texts(NUM_TEXTS):
        yield _body([*shown, _user(f"Text: {text}\nTopic:")], max_tokens=6)


def announcements() -> Iterator[dict[str, Any]]:
    """Yield the bodies of r2."""
    for text in sample_texts(NUM_ANNOUNCEMENTS):
        instruction = (
            f"Write a short announcement of this software feature for its users.\n\n{text}"
        )
        yield _body([_user(instruction)], max_tokens=200)


def extractions() -> Iterator[dict[str, Any]]:
    """Yield the bodies of r3."""
    shown = [
        turn
        for text, fields in _EXAMPLES
        for turn in (_user(f"{_EXTRACT}\n\n{text}"), _assistant(json.dumps(fields)))
    ]
    schema = _object({name: {"type": "string"} for name in _FIELDS})
    for message in make_messages(NUM_MESSAGES):
        query = _user(f"{_EXTRACT}\n\n{message.text}")
        yield _body([*shown, query], max_tokens=64, response_format=_format("fields", schema))


def subjects() -> Iterator[dict[str, Any]]:
    """Yield the bodies of r4."""
    schema = _object({"subject": {"type": "string", "enum": [*SUBJECTS]}})
    for text in sample_texts(NUM_TEXTS):
        instruction = f"What is this text about: {', '.join(SUBJECTS)}? Answer in JSON.\n\n{text}"
        yield _body([_user(instruction)], max_tokens=32, response_format=_format("subject", schema))


FILES: Final[Mapping[str, Callable[[], Iterator[dict[str, Any]]]]] = {
    "r1": topics,
    "r2": announcements,
    "r3": extractions,
    "r4": subjects,
}


def lines(name: str) -> Iterator[str]:
    """Yield the lines of a file."""
    for number, body in enumerate(FILES[name]()):
        line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions"}
        yield json.dumps({**line, "body": body})


def _body(messages: list[Message], *, max_tokens: int, **fields: object) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return {**body, **fields}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _format(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}


def main() -> None:
    """Write all files into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        text = "".join(f"{line}\n" for line in lines(name))
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
