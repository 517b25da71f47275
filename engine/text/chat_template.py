"""From a conversation to the text of a prompt, by the model's own template in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.protocol.chat import Message
from engine.protocol.errors import RequestError
from engine.protocol.validation import printable

_PROBE = "tidemill probe of a template"
_PART_SEPARATOR = "\n"
_MAX_REASON_CHARS = 300
_DATE_CALL = re.compile(r"""strftime_now\(\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\)""")


def read_chat_template(argument: str) -> str:
    """Return the template that `--chat-template` names: the file of that path, or itself."""
    looks_inline = "{" in argument or "\n" in argument
    try:
        if Path(argument).is_file():
            return Path(argument).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        if not looks_inline:
            raise EngineError(f"cannot read the chat template {argument}: {exc}") from exc
    if looks_inline:
        return argument
    raise EngineError(f"the chat template {argument} is neither a file nor a Jinja template")


class ChatTemplate:
    """A compiled chat template. `pretrained` is transformers' tokenizer, whose sandbox renders it.

    `source` replaces the model's own template. Raises `EngineError` when there is none or it is no
    Jinja.
    """

    def __init__(self, pretrained: Any, *, source: str | None = None) -> None:
        self._pretrained = pretrained
        try:
            template: str = pretrained.get_chat_template(source, None)
        except ValueError as exc:
            raise EngineError(f"the model has no chat template of its own: {exc}") from exc
        self._source = template
        self._knows_developer = "developer" in self._source
        self._takes_parts = self._needs_parts()

    def render(
        self,
        messages: Sequence[Message],
        *,
        created: int,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text; raises `RequestError` when the template refuses the messages.

        Text parts are joined by a newline unless the template can read only parts. `developer` is
        called `system` for a template that does not know it. A template that asks for today's date
        gets that of `created` (seconds since the epoch, UTC): a line must render alike on any day.
        """
        return self._rendered(
            [self._as_template_reads(message) for message in messages],
            created,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=documents,
            **(variables or {}),
        )

    def _rendered(self, messages: list[dict[str, Any]], created: int, /, **options: Any) -> str:
        try:
            text: str = self._pretrained.apply_chat_template(
                messages,
                chat_template=_with_date(self._source, created),
                tokenize=False,
                **options,
            )
        except Exception as exc:  # a template may fail in any way that Python code may
            reason = printable(str(exc), _MAX_REASON_CHARS) or type(exc).__name__
            raise RequestError(
                f"The chat template could not render the messages: {reason}",
                param="messages",
                code="chat_template_error",
            ) from exc
        return text

    def _as_template_reads(self, message: Message) -> dict[str, Any]:
        texts = message.texts()
        content: object = _PART_SEPARATOR.join(texts)
        if self._takes_parts:
            content = [{"type": "text", "text": text} for text in texts]
        role = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        return {**message.other_fields(), "role": role, "content": content}

    def _needs_parts(self) -> bool:
        """Find out by trying whether the template reads content as parts only."""
        from jinja2 import TemplateSyntaxError

        as_parts = [{"type": "text", "text": _PROBE}]
        for content, takes_parts in ((_PROBE, False), (as_parts, True)):
            try:
                text = self._rendered([{"role": "user", "content": content}], 0)
            except RequestError as exc:
                if isinstance(exc.__cause__, TemplateSyntaxError):
                    raise EngineError(f"the chat template is no Jinja: {exc.__cause__}") from exc
                continue  # it may want other messages than one; what it says is for a row
            if _PROBE in text:
                return takes_parts
        return False


@lru_cache(maxsize=64)
def _with_date(template: str, created: int) -> str:
    """Return the template with each date that it asks for by a literal format filled in."""
    now = datetime.fromtimestamp(created, UTC)
    return _DATE_CALL.sub(
        lambda call: '"' + now.strftime(call[1] or call[2] or "").replace('"', "") + '"', template
    )
