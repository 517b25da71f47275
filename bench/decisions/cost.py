"""Cost of decisions: CPU seconds and computed tokens per row, by questions and orders of options.

    python -m bench.decisions.cost out/bench/46m [--rows 40] [--runs 3] [--dtype bfloat16]

Rows are texts of 430 tokens, and the rows of file h; questions have 12 tokens before wrapping.
All kinds run in turns in one engine, each time about other rows. Prints medians, and the fewest
tokens of row-first reads: those that no prefix shares, also with one instruction for all.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from bench.compare.compare import machine
from bench.workloads import WORKLOADS, Texts, words_of
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.load import load_served

CHATS = "chats"
ONE_OF_H, ONE, ONE_CHOICE = "h: one question", "one question", "one choice of four"


class Kind(NamedTuple):
    """Rows with some questions, and the kind that they are compared with."""

    source: str
    num_questions: int = 1
    layout: str = "row_first"
    num_orders: int = 1
    other: str | None = None
    is_choice: bool = False


KINDS = {
    "h: chats with `max_tokens` 1": Kind("h", layout=CHATS),
    ONE_OF_H: Kind("h", other="h: chats with `max_tokens` 1"),
    "h: eight, row first": Kind("h", 8, other=ONE_OF_H),
    "h: eight, questions first": Kind("h", 8, "questions_first", other=ONE_OF_H),
    ONE: Kind("text"),
    "eight, row first": Kind("text", 8, other=ONE),
    "eight, questions first": Kind("text", 8, "questions_first", other=ONE),
    ONE_CHOICE: Kind("text", is_choice=True),
    "four orders, row first": Kind("text", 1, "row_first", 4, ONE_CHOICE, is_choice=True),
    "four orders, questions first": Kind(
        "text", 1, "questions_first", 4, ONE_CHOICE, is_choice=True
    ),
}


def bodies(name: str, count: int, run: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the URL and the body of each row of a kind."""
    kind, texts = KINDS[name], Texts()
    instructions = [f"{texts(words_of(12))[:-1]}?" for _ in range(kind.num_questions)]
    choices = [{"value": value} for value in ("travel", "money", "weather", "food")]
    if kind.source == "h":
        states = [request.user for request in WORKLOADS["h"].requests(texts)[:count]]
    else:
        states = [texts(words_of(430)) for _ in range(count)]
    for state in states:
        text = f"{run} {name} {state}"
        if kind.layout == CHATS:
            content = f"{text}\n\nQuestion: {instructions[0]}\nAnswer only with one letter: Y or N."
            messages = [{"role": "user", "content": content}]
            chat = {"messages": messages, "max_tokens": 1, "temperature": 0, "logprobs": True}
            yield "/v1/chat/completions", {**chat, "top_logprobs": 5}
            continue
        own = {"type": "choice", "choices": choices} if kind.is_choice else {"type": "predicate"}
        yield (
            "/v1/decisions",
            {
                "input": text,
                "questions": [{**own, "instructions": question} for question in instructions],
                "question_layout": kind.layout,
                "debias": kind.num_orders,
            },
        )


def cost(served: Dispatcher, name: str, count: int, run: int) -> tuple[float, float]:
    """Run all rows of a kind at once; return CPU seconds and computed prompt tokens per row."""
    lines = list(bodies(name, count, run))

    async def run_all() -> None:
        replies = await asyncio.gather(
            *(served.respond(url, body, f"r{i}", 0) for i, (url, body) in enumerate(lines))
        )
        assert {reply.status_code for reply in replies} == {200}, replies

    started, before = time.process_time(), served.stats().prefilled_tokens
    asyncio.run(run_all())
    num_tokens = served.stats().prefilled_tokens - before
    return (time.process_time() - started) / count, num_tokens / count


ROW, ASK = "<|im_start|>user\n{text}\n\n", "Answer only with one letter: Y for yes or N for no."
END = "<|im_end|>\n<|im_start|>assistant\n"
WORDINGS = {
    "as now": ROW + "Question: {question}\n" + ASK + END,
    "with the instruction before the questions": ROW + ASK + "\n\nQuestion: {question}" + END,
}


def fewest_tokens(tokenizer: Tokenizer, name: str, wording: str, count: int) -> float:
    """Return the tokens per row of a kind that are in no prefix of another prompt."""
    seen: set[tuple[int, int]] = set()
    for _, body in bodies(name, count, 0):
        for question in body["questions"]:
            prompt = wording.format(text=body["input"], question=question["instructions"])
            prefix = 0
            for token in tokenizer.encode(prompt).ids:
                prefix = hash((prefix, token))
                seen.add((prefix, token))
    return len(seen) / count


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="use this folder of a model")
    parser.add_argument("--rows", type=int, default=40, help="run N rows (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="run each N times (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="use this dtype (%(default)s)")
    arguments = parser.parse_args()
    served = load_served(
        EngineConfig(arguments.model, dtype=arguments.dtype, device="cpu", max_model_len=2048)
    )
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    try:
        cost(served, ONE, 4, -1)  # warms up
        for run in range(arguments.runs):
            for name in KINDS:
                figures[name].append(cost(served, name, arguments.rows, run))
                print(name, *figures[name][-1], flush=True)
    finally:
        served.close()
    medians = {
        name: [statistics.median(column) for column in zip(*own, strict=True)]
        for name, own in figures.items()
    }
    print("\n| rows | CPU ms | computed tokens | ratios |  |\n|---|---:|---:|---:|---|")
    for name, kind in KINDS.items():
        seconds, num_tokens = medians[name]
        ratios = "|"
        if kind.other is not None:
            own, tokens = medians[kind.other]
            ratios = f"{seconds / own:.2f}, {num_tokens / tokens:.2f} | {kind.other}"
        print(f"| {name} | {1e3 * seconds:.0f} | {num_tokens:.0f} | {ratios} |")
    print(machine() + ".")
    tokenizer = Tokenizer.from_file(f"{arguments.model}/tokenizer.json")
    for wording, prompt in WORDINGS.items():
        one, eight = (
            fewest_tokens(tokenizer, name, prompt, arguments.rows)
            for name in (ONE_OF_H, "h: eight, row first")
        )
        print(f"Fewest tokens, {wording}: {one:.0f}, {eight:.0f} ({eight / one:.2f} x).")


if __name__ == "__main__":
    main()
