"""The files of the benchmarks, base, a to l and the anchors': the same bytes for the same name.

    python -m bench.workloads base out/bench/base.jsonl

Chat lines, shuffled, so that shared prefixes are not adjacent; greedy except for g, the end token
ignored. `many` keep a thousand sequences running at a time. The rest are for GPUs: `documents` is e
40 times, and `datatrove` and `mlperf` are shapes of work that others have published a throughput of
(`bench.gpu.anchors`), under whatever name `--served-model-name` gives a model. Texts are sentences
of seven made-up words, each word and each full stop one token of the tokenizers of `bench.models`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.models import NUM_COMMON_WORDS, words

SEED = 1
SENTENCE_WORDS = 7
GREEDY = {"temperature": 0}
LIKELIEST = {"temperature": 0, "logprobs": True, "top_logprobs": 20}
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
SCORED = {"temperature": 0, "prompt_logprobs": 1}
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.05}


@dataclass(frozen=True, slots=True)
class Request:
    """One line: what the model reads, and how many tokens it answers with.

    `before` are earlier messages, of the user and the assistant in turns, and `beginning` is that
    of the answer, which goes on with it.
    """

    user: str
    max_tokens: int = 64
    system: str = ""
    before: tuple[str, ...] = ()
    beginning: str = ""


class Texts:
    """Unique texts of a number of words; everything random comes from one seed."""

    def __init__(self) -> None:
        self.rng = random.Random(SEED)
        self._vocabulary = words(NUM_COMMON_WORDS)

    def __call__(self, num_words: int) -> str:
        """Return a new text."""
        chosen = self.rng.choices(self._vocabulary, k=num_words)
        sentences = (
            " ".join(chosen[start : start + SENTENCE_WORDS]) + "."
            for start in range(0, num_words, SENTENCE_WORDS)
        )
        return " ".join(sentences)


@dataclass(frozen=True, slots=True)
class Workload:
    """Contents of a file, and the shape of `bench.models` that its lines name."""

    requests: Callable[[Texts], list[Request]]
    model: str = "46m"
    sampling: Mapping[str, float] | None = None


def nothing_shared(count: int, num_words: int, max_tokens: int) -> Callable[[Texts], list[Request]]:
    """Unique prompts of a number of words."""
    return lambda texts: [Request(texts(num_words), max_tokens) for _ in range(count)]


def one_system_prompt(texts: Texts) -> list[Request]:
    """One system prompt of 800 words for all, and a short question each."""
    system = texts(800)
    return [Request(texts(30), system=system) for _ in range(192)]


def few_shot_templates(texts: Texts) -> list[Request]:
    """50 templates of 400 words, three or four questions under each."""
    templates = [texts(400) for _ in range(50)]
    return [Request(f"{templates[number * 50 // 192]}\n{texts(30)}") for number in range(192)]


def exact_repeats(texts: Texts) -> list[Request]:
    """Prompts of 120 words; 58 of the 192 lines, 30 %, repeat another."""
    own = [Request(texts(120)) for _ in range(134)]
    return own + texts.rng.choices(own, k=58)


def heavy_tail(texts: Texts) -> list[Request]:
    """Prompts of 60 words; outputs of 8 to 512 tokens, by a Pareto distribution that is cut."""
    lengths = [min(512, int(8 * texts.rng.paretovariate(0.6))) for _ in range(192)]
    return [Request(texts(60), length) for length in lengths]


def documents(count: int) -> Callable[[Texts], list[Request]]:
    """Documents of 1,500 words, with 16 questions each."""

    def requests(texts: Texts) -> list[Request]:
        found = [texts(1500) for _ in range(count)]
        return [Request(f"{text}\n{texts(20)}") for text in found for _ in range(16)]

    return requests


def table_rows(texts: Texts) -> list[Request]:
    """2,000 rows of a table in one template: eight columns, values of four of them repeat."""
    template = texts(60)
    repeating = [[texts(words) for _ in range(count)] for count, words in TABLE_COLUMNS]
    rows = []
    for _ in range(2_000):
        columns = [texts.rng.choice(values) for values in repeating]
        columns += [texts(8) for _ in range(4)]
        named = "\n".join(f"{name}: {value}" for name, value in enumerate(columns))
        rows.append(Request(f"{template}\n{named}", 16))
    return rows


def many_answers(longest: int, tail: float | None = None) -> Callable[[Texts], list[Request]]:
    """5,000 short prompts, whose answers differ much: evenly, or by a Pareto distribution."""

    def requests(texts: Texts) -> list[Request]:
        rng = texts.rng
        lengths = (
            rng.randint(8, longest) if tail is None else int(40 * rng.paretovariate(tail))
            for _ in range(5_000)
        )
        return [Request(texts(20), min(longest, length)) for length in lengths]

    return requests


# Values of each repeating column, and the words of one.
TABLE_COLUMNS = ((4, 40), (12, 60), (40, 30), (200, 20))


def nested_chats(texts: Texts) -> list[Request]:
    """20 chats of ten turns under one system prompt; each turn is a line, with all before it."""
    system, lines = texts(150), []
    for _ in range(20):
        turns = tuple(texts(40) for _ in range(19))
        lines += [Request(turns[at], 32, system, turns[:at]) for at in range(0, 19, 2)]
    return lines


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens by a log-normal distribution of this mean, cut at `most`."""

    mean: float
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """Return the next one."""
        drawn = rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return max(1, min(self.most, round(drawn)))


@dataclass(frozen=True, slots=True)
class Published:
    """A published workload: `count` texts of some lengths behind one instruction for all.

    Lengths are published as means alone; the form of their distribution is taken to be log-normal.
    """

    count: int
    instruction: int
    texts: Lengths
    outputs: Lengths

    def __call__(self, texts: Texts) -> list[Request]:
        """Return the requests."""
        instruction = texts(words_of(self.instruction))
        return [
            Request(
                f"{instruction}\n{texts(words_of(self.texts.draw(texts.rng)))}",
                self.outputs.draw(texts.rng),
            )
            for _ in range(self.count)
        ]


def scored_choices(texts: Texts) -> list[Request]:
    """400 questions of 30 words with 4 answers of 5 each, all behind one few-shot prompt."""
    shots = texts(words_of(1_000))
    return [
        Request(f"{question} {texts(5)}", max_tokens=1, system=shots)
        for question in [texts(30) for _ in range(400)]
        for _ in range(4)
    ]


def quoting_summaries(texts: Texts) -> list[Request]:
    """192 documents of 60 phrases, most of which stand there twice; answers quote from a phrase on.

    Behind each phrase the model goes on as behind one of its two places.
    """
    requests = []
    for _ in range(192):
        phrases = [texts(texts.rng.randint(8, 20)) for _ in range(40)]
        document = texts.rng.choices(phrases, k=60)
        beginning = " ".join(document[texts.rng.randrange(50)].split()[:2])
        requests.append(Request(" ".join(document), max_tokens=256, beginning=beginning))
    return requests


def edited_records(texts: Texts) -> list[Request]:
    """192 records of 60 fields that are written again, of which six have another value, too."""
    requests = []
    for _ in range(192):
        fields = [texts(4) for _ in range(60)]
        edits = [
            " ".join([*field.split()[:2], texts(2)]) for field in texts.rng.sample(fields[1:], 6)
        ]
        beginning = " ".join(fields[0].split()[:2])
        requests.append(Request(" ".join(fields + edits), max_tokens=256, beginning=beginning))
    return requests


def words_of(num_tokens: int) -> int:
    """Return the words of a number of tokens, including the full stops."""
    return max(1, num_tokens * SENTENCE_WORDS // (SENTENCE_WORDS + 1))


# Documents of FineWeb-Edu, cut where their answer would not fit into 8,192 tokens; answers are not
# published, except for their limit.
DATATROVE = Published(10_000, 60, Lengths(1070, 0.8, 4000), Lengths(1030, 0.5, 4096))
# Articles of CNN-DailyMail; nearly all answers are as long as they may be.
MLPERF = Published(13_368, 30, Lengths(750, 0.45, 2540), Lengths(128, 0.0, 128))
WORKLOADS = {
    "base": Workload(nothing_shared(256, 137, 128)),
    "a": Workload(one_system_prompt),
    "b": Workload(few_shot_templates),
    "c": Workload(exact_repeats),
    "d": Workload(heavy_tail),
    "e": Workload(documents(12)),
    "f": Workload(nothing_shared(192, 150, 64)),
    "g": Workload(nothing_shared(256, 137, 128), model="46m-152k", sampling=SAMPLED),
    "h": Workload(table_rows),
    "i": Workload(nested_chats),
    "j": Workload(scored_choices, sampling=SCORED),
    "k": Workload(quoting_summaries, model="46m-copy"),
    "l": Workload(edited_records, model="46m-copy"),
    "many": Workload(many_answers(96)),
    "many-logprobs": Workload(many_answers(96), sampling=LIKELIEST),
    "many-tail": Workload(many_answers(1_024, tail=0.9)),
    "documents": Workload(documents(500), model="470m"),
    "datatrove": Workload(DATATROVE, model="470m"),
    "mlperf": Workload(MLPERF, model="470m"),
}


def lines(name: str) -> Iterator[str]:
    """Yield the lines of a file."""
    return lines_of(WORKLOADS[name])


def lines_of(workload: Workload) -> Iterator[str]:
    """Yield the lines of a workload."""
    texts = Texts()
    requests = workload.requests(texts)
    texts.rng.shuffle(requests)
    for number, request in enumerate(requests):
        yield line_of(workload, number, request)


def line_of(workload: Workload, number: int, request: Request) -> str:
    """Return the line of one request of a workload."""
    contents = (*request.before, request.user)
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(contents)]
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    if request.beginning:
        messages.append({"role": "assistant", "content": request.beginning})
    body: dict[str, Any] = {
        "model": workload.model,
        "messages": messages,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        **(CONTINUED if request.beginning else {}),
        **(workload.sampling or GREEDY),
    }
    return json.dumps(
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body,
        }
    )


def main() -> None:
    """Write one file from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    text = "".join(line + "\n" for line in lines(arguments.name))
    arguments.path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
