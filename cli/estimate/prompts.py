"""Prompt tokens of a file, by the model's tokenizer and chat template, without its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tidemill.batch.file.lines import LineError, parse_line
from tidemill.engine.endpoints.endpoint import Endpoint, RequestMetadata
from tidemill.protocol.errors import RequestError
from tidemill.protocol.parts import has_images

from ..console.error_summary import ErrorSummary
from ..files.defaults import Defaults
from ..files.input_file import PlacedLine

MAX_TOKENIZED: Final = 20_000
"""Of a longer file so many lines are tokenised, evenly spread."""


@dataclass(slots=True)
class PromptTokens:
    """Tokens of prompts, one count a line, and what the endpoints refuse.

    `kinds` counts lines by url and model. `most_output_tokens` are of all answers, as long as they
    may be. `refused` are the places of lines without a count; those of the `failing` passed the
    check before.
    """

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: list[int] = field(default_factory=list)
    most_output_tokens: int = 0
    refused: set[int] = field(default_factory=set)
    failing: ErrorSummary = field(default_factory=ErrorSummary)


def count_prompt_tokens(
    lines: Iterable[PlacedLine],
    endpoints: Sequence[Endpoint[Any, Any, Any]],
    check: Callable[[str, dict[str, Any]], object],
    defaults: Defaults,
) -> PromptTokens:
    """Prepare requests as a run would, and count the tokens of their prompts.

    Lines that `check` raises `RequestError` for, by url and body, are left out.
    """
    found = PromptTokens()
    for place, raw in lines:
        try:
            line = parse_line(raw)
            found.kinds[line.url, str(line.body.get("model") or "")] += 1
            body = defaults.apply(line.url, line.body)
            check(line.url, body)
        except (LineError, RequestError):
            found.refused.add(place)
            continue
        if has_images(body):  # whose tokens depend on sizes that nobody has looked at
            continue
        endpoint = next(one for one in endpoints if one.route.matches(line.url))
        try:
            prepared = endpoint.prepare(body, RequestMetadata("", line.request_id, 0))
        except RequestError as exc:
            found.failing.add(exc.message, line.number)
            found.refused.add(place)
            continue
        num_choices = body.get("n") or 1
        prompts = [len(request.prompt_ids) for request in prepared.requests[::num_choices]]
        found.counts.append(sum(prompts))
        found.most_output_tokens += sum(request.max_tokens for request in prepared.requests)
    return found
