"""Tool-call and reasoning parsers, compared with vLLM's on the transcripts of the tests.

    python -m bench.compare.call_parsers --vllm-python PATH [--formats hermes,…]

Each transcript is parsed as a whole text; those without reasoning also token by token. The table
has the transcripts whose parts differ from the expected ones, without whitespace around them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
"""The `reasoning`, `content` and `calls` of a transcript, or an `error`."""

_MAX_SHOWN_CHARS = 150


def main() -> None:
    """Print the table."""
    from tests.engine.parsers.transcripts import FORMATS, TOOLS, load_transcripts
    from tidemill import demo
    from tidemill.engine.parsers.registry import select_parsers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--formats", default=",".join(FORMATS))
    options = parser.parse_args()
    transcripts = [each for name in options.formats.split(",") for each in load_transcripts(name)]
    marks: set[str] = set()
    for each in transcripts:
        own = select_parsers(
            None, tool_calls=each.tool_call_parser, reasoning=each.reasoning_parser
        )
        marks.update(own.marks)
    job = {
        "tokenizer": str(demo.MODEL_PATH),
        "marks": sorted(marks),
        "tools": TOOLS,
        "transcripts": [
            [each.tool_call_parser, each.reasoning and each.reasoning_parser, each.text]
            for each in transcripts
        ],
    }
    run = subprocess.run(
        [options.vllm_python, __file__],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    answers = json.loads(run.stdout.splitlines()[-1])
    num_equal = 0
    print("| transcript | read | expected | vLLM |\n|---|---|---|---|")
    for each, (whole, streamed) in zip(transcripts, answers, strict=True):
        expected = {
            "reasoning": each.reasoning,
            "content": each.content,
            "calls": [[name, value_of(arguments)] for name, arguments in each.calls],
        }
        for how, answer in (("whole", whole), ("streamed", streamed)):
            if answer is None or _comparable(answer) == _comparable(expected):
                num_equal += answer is not None
                continue
            fields = [name for name in answer if _comparable(answer)[name] != expected.get(name)]
            shown = (
                _cell({name: part.get(name) for name in fields}) for part in (expected, answer)
            )
            print(f"| {each} | {how} | {' | '.join(shown)} |")
    print(
        f"\n{num_equal} of {sum(part is not None for pair in answers for part in pair)} are equal."
    )


def _comparable(answer: Answer) -> Answer:
    """Return an answer without whitespace around its texts."""
    return {name: part.strip() if isinstance(part, str) else part for name, part in answer.items()}


def _cell(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False).replace("|", "\\|")
    return f"`{text[:_MAX_SHOWN_CHARS]}{'…' if len(text) > _MAX_SHOWN_CHARS else ''}`"


def value_of(arguments: str) -> object:
    """Return a call's arguments; those that are cut off as their text."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def parse_with_vllm() -> None:
    """Parse the transcripts of a job from standard input; this runs in vLLM's environment."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import (  # type: ignore[import-not-found]
        ChatCompletionRequest,
    )
    from vllm.reasoning import ReasoningParserManager  # type: ignore[import-not-found]
    from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]

    job = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    tokenizer.add_special_tokens({"additional_special_tokens": job["marks"]})
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in job["tools"].items()
    ]
    body = {"messages": [{"role": "user", "content": "Hi"}], "model": "m", "tools": tools}

    def whole(calls: str, reasoning: str, text: str) -> Answer:
        request = ChatCompletionRequest.model_validate(body)
        thought, content = "", text
        if reasoning:
            reader = ReasoningParserManager.get_reasoning_parser(reasoning)(tokenizer)
            thought, content = reader.extract_reasoning(text, request)
        parser = ToolParserManager.get_tool_parser(calls)(tokenizer, request.tools)
        result = parser.extract_tool_calls(content or "", parser.adjust_request(request))
        return {
            "reasoning": thought or "",
            "content": result.content or "",
            "calls": [
                [call.function.name, value_of(call.function.arguments)]
                for call in result.tool_calls
            ],
        }

    def streamed(calls: str, text: str) -> Answer:
        request = ChatCompletionRequest.model_validate(body)
        parser = ToolParserManager.get_tool_parser(calls)(tokenizer, request.tools)
        request = parser.adjust_request(request)
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
        content, found = "", dict[int, list[str]]()
        before = ""
        for end in range(1, len(ids) + 1):
            now = tokenizer.decode(ids[:end], skip_special_tokens=False)
            if now.endswith("\ufffd"):
                continue
            new = now[len(before) :]
            delta = parser.extract_tool_calls_streaming(
                before, now, new, ids[: end - 1], ids[:end], ids[end - 1 : end], request
            )
            before = now
            content += (delta and delta.content) or ""
            for call in (delta and delta.tool_calls) or ():
                part = found.setdefault(call.index, ["", ""])
                part[0] += (call.function and call.function.name) or ""
                part[1] += (call.function and call.function.arguments) or ""
        if found:  # as vLLM's server does at the end
            found[max(found)][1] += parser.get_remaining_unstreamed_args()
        parts = [[name, value_of(arguments)] for name, arguments in found.values()]
        return {"reasoning": "", "content": content, "calls": parts}

    def guarded(parse: Callable[..., Answer], *parts: object) -> Answer:
        try:
            return parse(*parts)
        except Exception as exc:  # noqa: BLE001 - a fault of a parser is a result
            return {"error": f"{type(exc).__name__}: {exc}"}

    print(
        json.dumps(
            [
                [
                    guarded(whole, calls, reasoning, text),
                    None if reasoning else guarded(streamed, calls, text),
                ]
                for calls, reasoning, text in job["transcripts"]
            ]
        )
    )


if __name__ == "__main__":
    parse_with_vllm() if sys.argv[1:] == [] else main()
