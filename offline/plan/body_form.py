"""Body form: everything about a request except its texts, found once for lines that share it.

Most lines of a file have the parameters of the line before and differ only in their prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from pydantic_core import to_json

from tidemill.batch.file.expected_tokens import max_output_tokens
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.completions import CompletionRequest
from tidemill.protocol.embeddings import InputRequest
from tidemill.protocol.prompt_key import (
    is_determined,
    prompt_fields,
    prompt_head,
    prompt_key,
    settings_key,
)
from tidemill.protocol.requests import PROMPT_NAMES, check_request
from tidemill.protocol.routes import ENDPOINTS

_OF_TEXTS: Final = (ChatCompletionRequest, CompletionRequest, InputRequest)
_MAX_FORMS: Final = 256
_MAX_FORM_BYTES: Final = 2**15
_MAX_NAME_CHARS: Final = 100
_MAX_TEXTS: Final = 64
_MAX_ROLES_CHARS: Final = 2**10  # any text is a valid role


class BodyForm:
    """Form of a body: its `settings` (JSON of its parameters) and facts that follow from them.

    `model` is the start of its model's name. `has_unknown_parameters` is None until they have been
    searched for. Bodies whose texts have `valid_roles` are valid.
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
        "settings",
        "valid_roles",
    )

    def __init__(
        self, body: Mapping[str, Any], settings: bytes | None = None, url: str = ""
    ) -> None:
        self.settings = settings_key(body) if settings is None else settings
        self.is_determined = is_determined(body)
        self.has_unknown_parameters: bool | None = None
        self.valid_roles = set[tuple[str, ...]]()
        self.model = str(body.get("model") or "")[:_MAX_NAME_CHARS]
        self._head = prompt_head(body)
        fields = prompt_fields(body)
        self._field = fields[0] if len(fields) == 1 else None
        self._url = url
        self._max_tokens = max_output_tokens(url, body)
        self._is_per_prompt = "prompt" in body

    def prompt_key(self, body: Mapping[str, Any]) -> bytes:
        """Return the `prompt_key` of a body of this form."""
        if self._field is None:
            return prompt_key(body)
        return b"%b,%b]" % (self._head, to_json(body[self._field]))

    def hash_of(self, prompt_key: bytes) -> int:
        """Return the hash of a body of this form, 0 if its results are sampled."""
        return hash((prompt_key, self.settings)) if self.is_determined else 0

    def max_tokens(self, body: Mapping[str, Any]) -> int | None:
        """Return the limit of a body of this form; None without a limit."""
        return max_output_tokens(self._url, body) if self._is_per_prompt else self._max_tokens

    def roles(self, body: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the roles of a body's messages, or the field of its prompt; empty if not texts.

        A text is a prompt, or the content of a message without other fields: any text is valid.
        """
        field = self._field
        if field is None:
            return ()
        value = body[field]
        if type(value) is str:
            return (field,) if value else ()
        if field != "messages" or type(value) is not list:
            return ()
        roles = []
        try:
            for message in value:
                role = message["role"]
                is_text = type(role) is str and type(message["content"]) is str
                if len(message) != 2 or not is_text:
                    return ()
                roles.append(role)
        except (KeyError, TypeError):  # a message without texts
            return ()
        return tuple(roles)


class BodyForms:
    """Forms of the bodies of a file, for a model with these names; their memory is bounded."""

    def __init__(self, served_names: Sequence[str], endpoints: Sequence[str] = ENDPOINTS) -> None:
        self._served_names = served_names
        self._endpoints = endpoints
        self._forms: dict[tuple[object, ...], BodyForm] = {}
        self._names: tuple[str, ...] = ()  # of the fields of the latest body
        self._parameters: Callable[[Mapping[str, Any]], object] = len  # of a body without any

    def form_of(self, url: str, body: Mapping[str, Any]) -> BodyForm:
        """Return the form of a request, the same for equal URLs, parameters and field names."""
        names = tuple(body)
        if names != self._names:
            found = [name for name in names if name not in PROMPT_NAMES]
            self._names, self._parameters = names, itemgetter(*found) if found else len
        key = url, names, to_json(self._parameters(body))
        form = self._forms.get(key)
        if form is None:
            settings = settings_key(body)
            form = BodyForm(body, settings, url)
            if len(url) + len(settings) <= _MAX_FORM_BYTES and len(body) <= _MAX_FORMS:
                if len(self._forms) == _MAX_FORMS:
                    self._forms.clear()
                self._forms[key] = form
        return form

    def check(self, url: str, body: dict[str, Any], form: BodyForm) -> None:
        """Raise the `RequestError` of a request; those that differ only in texts are checked once.

        `form` is the one of `form_of`.
        """
        roles = form.roles(body)
        if roles in form.valid_roles:
            return
        request = check_request(url, body, self._served_names, self._endpoints)
        is_short = 0 < len(roles) <= _MAX_TEXTS and sum(map(len, roles)) <= _MAX_ROLES_CHARS
        if is_short and isinstance(request, _OF_TEXTS):
            if len(form.valid_roles) == _MAX_TEXTS:
                form.valid_roles.clear()
            form.valid_roles.add(roles)
