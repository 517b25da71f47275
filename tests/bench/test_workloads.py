"""The files of the benchmarks match their descriptions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from bench.models import SHAPES
from bench.workloads import DATATROVE, MLPERF, WORKLOADS, Published, Texts, lines

# Others are of ten thousand lines and more.
SMALL = sorted(set(WORKLOADS) - {"datatrove", "mlperf"})


def bodies(name: str) -> list[dict[str, Any]]:
    """Return the bodies of a file's lines."""
    return [json.loads(line)["body"] for line in lines(name)]


def prompts(name: str) -> list[str]:
    """Return the user's text in each line."""
    return [body["messages"][-1]["content"] for body in bodies(name)]


def num_words(text: str) -> int:
    """Return the number of words of a text."""
    return len(text.split())


def is_scattered(groups: list[str]) -> bool:
    """Return whether lines of one group are neighbours no more often than in a shuffle."""
    neighbours = sum(one == other for one, other in pairwise(groups))
    expected = sum(count * (count - 1) for count in Counter(groups).values()) / len(groups)
    return neighbours < 2 * expected + 6


@pytest.mark.parametrize("name", SMALL)
def test_a_file_is_the_same_every_time(name: str) -> None:
    """Figures of two machines speak of the same bytes, and ids are unique."""
    once, again = list(lines(name)), list(lines(name))
    assert once == again
    assert len({json.loads(line)["custom_id"] for line in once}) == len(once)


@pytest.mark.parametrize("name", SMALL)
def test_a_file_names_a_model_and_ignores_the_end_token(name: str) -> None:
    """The work of a line is stated, whatever random weights come to; only g is sampled."""
    for body in bodies(name):
        assert body["model"] in SHAPES
        assert body["ignore_eos"] is True
        assert (body["temperature"] == 0) == (name != "g")


@pytest.mark.parametrize(
    ("name", "count", "words", "max_tokens"),
    [("base", 256, 137, 128), ("f", 192, 150, 64), ("g", 256, 137, 128), ("d", 192, 60, None)],
)
def test_prompts_of_some_files_share_nothing(
    name: str, count: int, words: int, max_tokens: int | None
) -> None:
    """No two prompts begin alike, so a cache of prefixes finds nothing."""
    found = prompts(name)
    assert [num_words(prompt) for prompt in found] == [words] * count
    assert len({" ".join(prompt.split()[:4]) for prompt in found}) == count
    assert max_tokens in {None, *(body["max_tokens"] for body in bodies(name))}


def test_a_has_one_system_prompt_for_all() -> None:
    """800 words are shared by all lines, 30 are each one's own."""
    systems = {body["messages"][0]["content"] for body in bodies("a")}
    assert [num_words(system) for system in systems] == [800]
    assert [num_words(prompt) for prompt in prompts("a")] == [30] * 192


def test_b_has_fifty_templates() -> None:
    """Each of 50 templates of 400 words precedes three or four questions."""
    templates = [prompt.partition("\n")[0] for prompt in prompts("b")]
    assert len(templates) == 192
    assert {num_words(template) for template in templates} == {400}
    assert sorted(set(Counter(templates).values())) == [3, 4]
    assert len(set(templates)) == 50
    assert is_scattered(templates)


def test_three_in_ten_lines_of_c_repeat_another() -> None:
    """Repeats are exact, which a plan may compute once."""
    found = prompts("c")
    assert {num_words(prompt) for prompt in found} == {120}
    assert len(found) - len(set(found)) == 58
    assert 58 / len(found) == pytest.approx(0.3, abs=0.005)


def test_outputs_of_d_have_a_heavy_tail() -> None:
    """Most are short, some are as long as it goes, and long ones carry half of the tokens."""
    wanted = sorted(body["max_tokens"] for body in bodies("d"))
    assert wanted[0] == 8
    assert wanted[-1] == 512
    assert wanted[96] < 32
    assert sum(wanted[-36:]) > sum(wanted) / 2


def test_e_has_sixteen_questions_per_document() -> None:
    """The documents of 1,500 words come first, so that they are shared."""
    documents = [prompt.partition("\n")[0] for prompt in prompts("e")]
    assert {num_words(document) for document in documents} == {1500}
    assert sorted(Counter(documents).values()) == [16] * 12
    assert is_scattered(documents)


def test_g_is_base_except_for_its_sampling() -> None:
    """The same prompts under a large vocabulary: what differs in time is sampling."""
    assert prompts("g") == prompts("base")
    body = bodies("g")[0]
    assert (body["temperature"], body["top_p"], body["repetition_penalty"]) == (0.7, 0.9, 1.05)
    assert SHAPES[body["model"]]["vocab_size"] == 152_000


@pytest.mark.parametrize(
    ("published", "prompt", "output"), [(DATATROVE, 1100, 1024), (MLPERF, 778, 128)]
)
def test_published_work_has_the_lengths_that_are_published(
    published: Published, prompt: int, output: int
) -> None:
    """Mean token counts agree; all begin with one instruction and share nothing else."""
    requests = replace(published, count=1000)(Texts())
    assert requests == replace(published, count=1000)(Texts())
    found = [num_words(request.user) + request.user.count(".") for request in requests]
    assert sum(found) / len(found) == pytest.approx(prompt, rel=0.06)
    answers = [request.max_tokens for request in requests]
    assert sum(answers) / len(answers) == pytest.approx(output, rel=0.06)
    assert max(answers) <= published.outputs.most
    begins, _, _ = zip(*(request.user.partition("\n") for request in requests), strict=True)
    assert len(set(begins)) == 1
    assert len({request.user.partition("\n")[2] for request in requests}) == 1000
