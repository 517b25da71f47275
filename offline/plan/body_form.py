"""Body form: everything about a request except its texts, found once for lines that share it.

Most lines of a file have the parameters of the line before and differ only in their prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import to_json

from tidemill.batch.file.expected_tokens import max_output_tokens
from tidemill.protocol.prompt_key import (
    is_determined,
    prompt_fields,
    prompt_head,
    prompt_key,
    settings_key,
)

_MAX_FORMS: Final = 256
_MAX_FORM_BYTES: Final = 2**15
_MAX_NAME_CHARS: Final = 100


class BodyForm:
    """Form of a body: its `settings` (JSON of its parameters) and facts that follow from them.

    `model` is the start of its model's name, `prompt_fields` are the fields that its prompt is
    rendered from. `has_unknown_parameters` is None until they have been searched for.
    """

    __slots__ = (
        "_field",
        "_head",
        "_is_per_prompt",
        "_max_tokens",
        "_url",
        "has_unknown_parameters",
        "is_determined",
        "model",
        "prompt_fields",
        "settings",
    )

    def __init__(
        self, body: Mapping[str, Any], settings: bytes | None = None, url: str = ""
    ) -> None:
        self.settings = settings_key(body) if settings is None else settings
        self.prompt_fields = prompt_fields(body)
        self.is_determined = is_determined(body)
        self.has_unknown_parameters: bool | None = None
        self.model = str(body.get("model") or "")[:_MAX_NAME_CHARS]
        self._head = prompt_head(body)
        self._field = self.prompt_fields[0] if len(self.prompt_fields) == 1 else None
        self._url = url
        self._max_tokens = max_output_tokens(url, body)
        self._is_per_prompt = "prompt" in body

    def prompt_key(self, body: Mapping[str, Any]) -> bytes:
        """Return the `prompt_key` of a body of this form."""
        if self._field is None:
            return prompt_key(body)
        return b"%b,%b]" % (self._head, to_json(body[self._field]))

    def max_tokens(self, body: Mapping[str, Any]) -> int | None:
        """Return the limit of a body of this form; None without a limit."""
        return max_output_tokens(self._url, body) if self._is_per_prompt else self._max_tokens


class BodyForms:
    """Forms of the bodies of a file; the memory for them is bounded."""

    def __init__(self) -> None:
        self._forms: dict[tuple[object, ...], BodyForm] = {}

    def form_of(self, url: str, body: Mapping[str, Any]) -> BodyForm:
        """Return the form of a request, the same for equal URLs, parameters and field names."""
        settings = settings_key(body)
        key = url, settings, *body
        form = self._forms.get(key)
        if form is None:
            form = BodyForm(body, settings, url)
            if len(url) + len(settings) <= _MAX_FORM_BYTES and len(body) <= _MAX_FORMS:
                if len(self._forms) == _MAX_FORMS:
                    self._forms.clear()
                self._forms[key] = form
        return form
