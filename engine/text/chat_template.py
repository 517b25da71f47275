"""Chat template: renders a conversation as a prompt, with the model's Jinja in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from tidemill.protocol.contract import EngineError
from tidemill.protocol.errors import RequestError
from tidemill.protocol.messages import Message
from tidemill.protocol.parts import AudioPart, InputAudioPart, Part, RefusalPart, TextPart
from tidemill.protocol.sandbox import Sandbox, TemplateEndless, strftime_at
from tidemill.protocol.tools import ToolCall
from tidemill.protocol.validation import printable, short_repr

from .vocabulary import Vocabulary

_PROBE = "tidemill probe of a template"
_PART_SEPARATOR = "\n"
_MAX_REASON_CHARS = 300
_OPEN_END = "TIDEMILL OPEN END "
# A call that probes the format of arguments, and the text rendered for a wrong format.
_PROBE_KEY = "tidemill_probe"
_AS_PYTHON_SHOWS = f"{{'{_PROBE_KEY}'"
_SHORT_ID_CHARS = 9
_WANTS_SHORT_IDS = re.compile(rf"\bid\b\s*\|\s*length\s*!=\s*{_SHORT_ID_CHARS}\b")
# Fields from which templates read an assistant's reasoning.
_REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")


def read_chat_template(argument: str) -> str:
    """Return the template in `--chat-template`: a file's text, or the argument itself."""
    looks_inline = "{" in argument or "\n" in argument
    try:
        if Path(argument).is_file():
            return Path(argument).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        if not looks_inline:
            raise EngineError(f"cannot read the chat template {argument}: {exc}") from exc
    if looks_inline:
        return argument
    raise EngineError(f"chat template {argument!r} is neither a file nor a Jinja template")


class ChatTemplate:
    """A compiled chat template, rendered as transformers renders it, within a limit of steps.

    `source` replaces the vocabulary's own template. Raises `EngineError` if there is none, if it is
    invalid Jinja, or if one short message exceeds the limit. With `leaves_messages_out` it renders
    the same prompt for all messages; with `knows_tools` it renders tools.
    """

    def __init__(self, vocabulary: Vocabulary, *, source: str | None = None) -> None:
        template = _own_template(vocabulary.chat_template) if source is None else source
        self.source_text = template
        self.knows_tools = re.search(r"\btools\b", template) is not None
        self._knows_developer = "developer" in template
        self._wants_short_ids = _WANTS_SHORT_IDS.search(template) is not None
        self._special_tokens = vocabulary.special_tokens
        try:
            self._compiled = Sandbox().compile_template(template)
        except TemplateSyntaxError as exc:
            raise EngineError(
                f"the chat template is not valid Jinja: line {exc.lineno}: {exc.message}"
            ) from exc
        except Exception as exc:
            raise EngineError(
                f"the chat template cannot be compiled: {type(exc).__name__}: {exc}"
            ) from exc
        self._takes_parts, self.leaves_messages_out = self._probe_content()
        self._takes_argument_texts = self.knows_tools and self._probe_arguments()

    def render(
        self,
        messages: Sequence[Message],
        *,
        created: int,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text; raise `RequestError` if the template refuses the messages.

        Text parts are joined by a newline unless the template reads only parts, or an image is
        among them, which the template sees as a placeholder. `developer` becomes `system` for a
        template without that role. A template that reads the date gets that of `created` (seconds
        since the epoch, UTC): a row must render the same on every day.
        """
        rendered_messages = [self._as_template_reads(message) for message in messages]
        if continue_final_message:
            rendered_messages[-1]["content"] = _with_open_end(rendered_messages[-1]["content"])
        text = self._rendered(
            rendered_messages,
            created,
            add_generation_prompt=add_generation_prompt,
            documents=documents,
            tools=tools,
            **(variables or {}),
        )
        return _up_to_open_end(text) if continue_final_message else text

    def _rendered(self, messages: list[dict[str, Any]], created: int, /, **options: Any) -> str:
        variables = {"tools": None, "documents": None, **self._special_tokens, **options}
        try:
            return self._compiled(
                **{"strftime_now": strftime_at(created), **variables, "messages": messages}
            )
        except Exception as exc:  # a template may fail in the same ways as Python code
            reason = printable(str(exc), _MAX_REASON_CHARS) or type(exc).__name__
            raise _refusal(reason) from exc

    def _as_template_reads(self, message: Message) -> dict[str, Any]:
        texts = message.texts()
        content: object = _PART_SEPARATOR.join(texts)
        if self._takes_parts:
            content = [{"type": "text", "text": text} for text in texts]
        if isinstance(message.content, list) and message.media():
            content = [_part_as_template_reads(part) for part in message.content]
        role = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        others = {
            name: value for name, value in message.other_fields().items() if value is not None
        }
        if message.thought is not None:
            others |= dict.fromkeys(_REASONING_FIELDS, message.thought)
        if message.tool_calls:
            others["tool_calls"] = [self._as_call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            others["tool_call_id"] = self._call_id(message.tool_call_id)
        return {**others, "role": role, "content": content}

    def _as_call(self, call: ToolCall) -> dict[str, Any]:
        function = call.function
        arguments: object = function.arguments
        if self._takes_argument_texts and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        result = {"type": call.type, "function": {"name": function.name, "arguments": arguments}}
        return result if call.id is None else {"id": self._call_id(call.id), **result}

    def _call_id(self, call_id: str) -> str:
        """Return an id that the template accepts: some require exactly nine letters and digits."""
        is_short = len(call_id) == _SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum()
        if is_short or not self._wants_short_ids:
            return call_id
        return blake2b(call_id.encode(), digest_size=8).hexdigest()[:_SHORT_ID_CHARS]

    def _probe_arguments(self) -> bool:
        """Probe whether the template takes a call's arguments as text instead of an object."""
        arguments = {_PROBE_KEY: 1}
        for value, is_text in ((arguments, False), (json.dumps(arguments), True)):
            function = {"name": "probe", "arguments": value}
            call = {"id": "probe0000", "type": "function", "function": function}
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": _PROBE},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            try:
                text = self._rendered(messages, 0, add_generation_prompt=False)
            except RequestError:
                continue
            if _PROBE_KEY in text and _AS_PYTHON_SHOWS not in text:
                return is_text
        return False

    def _probe_content(self) -> tuple[bool, bool]:
        """Probe whether the template reads content only as parts, and whether it ignores them."""
        as_parts = [{"type": "text", "text": _PROBE}]
        leaves_messages_out = True
        for content, takes_parts in ((_PROBE, False), (as_parts, True)):
            try:
                text = self._rendered(
                    [{"role": "user", "content": content}], 0, add_generation_prompt=False
                )
            except RequestError as exc:
                if isinstance(exc.__cause__, TemplateEndless):
                    raise EngineError(
                        f"the chat template is unusable: for one short message {exc.__cause__}"
                    ) from exc
                # It may require other messages; its error concerns a row.
                leaves_messages_out = False
                continue
            if _PROBE in text:
                return takes_parts, False
        return False, leaves_messages_out


def _part_as_template_reads(part: Part) -> dict[str, Any]:
    """Return a part; templates know a recording by its type or by its field."""
    if isinstance(part, TextPart | RefusalPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, AudioPart | InputAudioPart):
        return {"type": "audio", "audio": ""}
    return {"type": "image"}


def _own_template(template: Any) -> str:
    """Return the template of a model; the default one if there are several, like transformers."""
    if isinstance(template, dict):
        if "default" not in template:
            names = printable(", ".join(map(str, template)), _MAX_REASON_CHARS)
            raise EngineError(
                f"the model has several chat templates ({names}) but no default: pass one with "
                "--chat-template"
            )
        template = template["default"]
    if template is None:
        raise EngineError("the model has no chat template")
    if not isinstance(template, str):
        raise EngineError(f"the model's chat template is {short_repr(template)} instead of text")
    return template


def _refusal(reason: str) -> RequestError:
    return RequestError(
        f"The chat template could not render the messages: {reason}",
        param="messages",
        code="chat_template_error",
    )


def _with_open_end(content: Any) -> Any:
    """Mark the end of the last message, so that the template's text after it can be cut."""
    if isinstance(content, str):
        return content + _OPEN_END
    *before, last = content
    if "text" not in last:
        raise _refusal("`continue_final_message` requires a text as the last part")
    return [*before, {**last, "text": last["text"] + _OPEN_END}]


def _up_to_open_end(text: str) -> str:
    end = text.rfind(_OPEN_END.rstrip())
    if end < 0:
        raise _refusal("it skips the last message, so `continue_final_message` has no end")
    # A template that trims its messages has also trimmed the text before the mark.
    is_whole = text.startswith(_OPEN_END, end)
    return text[:end] if is_whole else text[:end].rstrip()
