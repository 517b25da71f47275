"""Prompt tokens of a file, by the model's tokenizer and chat template, without its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from tidemill.batch.file.lines import LineError, parse_line
from tidemill.engine.endpoints.dispatcher import find_endpoint
from tidemill.engine.endpoints.endpoint import Endpoint, RequestMetadata
from tidemill.engine.structured_output.constraint_check import ConstraintCheck
from tidemill.protocol.errors import RequestError
from tidemill.protocol.parts import has_images

from ..arguments.defaults import Defaults
from ..console.error_summary import ErrorSummary
from ..files.input_file import PlacedLine

MAX_TOKENIZED: Final = 20_000
"""Of a longer file so many lines are tokenised, evenly spread."""


@dataclass(slots=True)
class PromptTokens:
    """Tokens of prompts, one count a line, and what the endpoints refuse, of so many lines.

    `most_output_tokens` are of all answers, as long as they may be. `refused` are the places of
    lines without a count; those of the `failing` passed the check before.
    """

    num_lines: int = 0
    counts: list[int] = field(default_factory=list)
    most_output_tokens: int = 0
    refused: set[int] = field(default_factory=set)
    failing: ErrorSummary = field(default_factory=ErrorSummary)


def count_prompt_tokens(
    lines: Iterable[PlacedLine],
    endpoints: Sequence[Endpoint[Any, Any, Any]],
    check: Callable[[str, dict[str, Any]], BaseModel],
    defaults: Defaults,
) -> PromptTokens:
    """Prepare requests as a run would, and count the tokens of their prompts.

    Lines that `check` raises `RequestError` for, by url and body, are left out.
    """
    found, constraints = PromptTokens(), ConstraintCheck()
    for place, raw in lines:
        found.num_lines += 1
        try:
            line = parse_line(raw)
            body = defaults.apply(line.url, line.body)
            request = check(line.url, body)
        except (LineError, RequestError):
            found.refused.add(place)
            continue
        try:
            if has_images(body):  # the number of their tokens depends on sizes that are not known
                constraints.check(request)
                continue
            endpoint = find_endpoint(line.url, endpoints)
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
