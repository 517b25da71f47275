"""Request files for benchmarks: chat lines with a stated number of prompt and output tokens.

python -m bench.requests out/requests.jsonl --lines 256 --prompt-tokens 165 --output-tokens 128
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from bench.models import words

TOKENS_PER_WORD = 1.7


def chat_lines(
    lines: int, prompt_tokens: int, output_tokens: int, model: str, seed: int = 1
) -> Iterator[str]:
    """Yield chat requests of about `prompt_tokens` distinct-word prompts, greedy, EOS ignored."""
    rng = random.Random(seed)
    vocabulary = words(4_000)
    count = int(prompt_tokens / TOKENS_PER_WORD)
    for number in range(lines):
        text = " ".join(rng.choices(vocabulary, k=count))
        yield json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": model,
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": output_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            }
        )


def write_chat_file(
    path: Path, lines: int, prompt_tokens: int, output_tokens: int, model: str
) -> None:
    """Write `chat_lines` to `path`."""
    with path.open("w", encoding="utf-8") as file:
        for line in chat_lines(lines, prompt_tokens, output_tokens, model):
            file.write(line + "\n")


def main() -> None:
    """Write one file from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--lines", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=165)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--model", default="bench")
    arguments = parser.parse_args()
    write_chat_file(
        arguments.path,
        arguments.lines,
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.model,
    )


if __name__ == "__main__":
    main()
