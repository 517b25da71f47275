"""The model's template renders conversations to prompts; some templates refuse input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.scripted_model import TEMPLATE, pretrained_tokenizer
from tidemill.engine.text.chat_template import ChatTemplate, read_chat_template
from tidemill.engine.text.vocabulary import vocabulary_of
from tidemill.protocol import sandbox
from tidemill.protocol.contract import EngineError
from tidemill.protocol.errors import RequestError
from tidemill.protocol.messages import Message

PARTS_ONLY = (
    "{% for m in messages %}{% for part in m.content %}"
    "{% if part.type == 'text' %}({{ part.text }}){% endif %}{% endfor %}{% endfor %}"
)
CREATED = 1_700_000_000  # 14 November 2023


def template(source: str | None = None) -> ChatTemplate:
    """Return the tiny model's template, or another one."""
    return ChatTemplate(vocabulary_of(pretrained_tokenizer()), source=source)


def render(messages: list[Message], source: str | None = None, **options: Any) -> str:
    """Return the rendering of messages that were created at `CREATED`."""
    return template(source).render(messages, **{"created": CREATED} | options)


def message(role: str, content: object, **others: object) -> Message:
    """Return a validated message."""
    return Message.model_validate({"role": role, "content": content, **others})


def test_a_conversation_of_many_turns_is_rendered() -> None:
    """The prompt ends by opening the assistant's turn."""
    turns = [message("system", "s"), message("user", "u"), message("assistant", "a")]
    assert render([*turns, message("user", "v")]) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nv<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_assistants_turn_may_stay_closed() -> None:
    """`add_generation_prompt: false` ends with the last message."""
    text = render([message("user", "u")], add_generation_prompt=False)
    assert text == "<|im_start|>user\nu<|im_end|>\n"


def test_the_last_message_may_be_continued() -> None:
    """`continue_final_message` leaves the last turn open after its exact text."""
    turns = [message("user", "u"), message("assistant", "The answer is ")]
    text = render(turns, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nThe answer is "


def test_text_parts_are_joined_by_newlines_for_a_string_template() -> None:
    """vLLM joins them the same way."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = render([message("user", parts)], add_generation_prompt=False)
    assert text == "<|im_start|>user\na\nb<|im_end|>\n"


def test_a_template_of_parts_gets_parts() -> None:
    """For such a template, string content becomes one part."""
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert render([message("user", "a"), message("user", parts)], PARTS_ONLY) == ("(a)(b)(c)")


@pytest.mark.parametrize(
    ("source", "role"),
    [("{{ messages[0].role }}", "system"), ("{# developer #}{{ messages[0].role }}", "developer")],
)
def test_developer_becomes_system_for_templates_without_it(source: str, role: str) -> None:
    """OpenAI's newer name for the system message works with every template."""
    assert render([message("developer", "x")], source) == role


def test_variables_and_documents_reach_the_template() -> None:
    """`chat_template_kwargs` set the template's variables; fields of messages are passed along."""
    source = "{{ mode }} {{ documents[0].text }} {{ messages[0].name }}"
    text = render(
        [message("user", "u", name="n")],
        source,
        documents=[{"text": "d"}],
        variables={"mode": "fast"},
    )
    assert text == "fast d n"


def test_a_variable_may_have_any_unreserved_name() -> None:
    """It includes names that the rendering code uses internally."""
    text = render(
        [message("user", "u")], "{{ created }} {{ now }}", variables={"created": 1, "now": 2}
    )
    assert text == "1 2"


def test_a_template_gets_the_date_of_the_request() -> None:
    """A request that is rerun on another day renders the same prompt; each batch has a date."""
    strftime_at = template("{{ strftime_now('%d %b %Y') }}|{{ strftime_now(\"%Y\") }}")
    created = [CREATED, 0, CREATED + 86_400, CREATED]
    assert [strftime_at.render([message("user", "u")], created=one) for one in created] == [
        "14 Nov 2023|2023",
        "01 Jan 1970|1970",
        "15 Nov 2023|2023",
        "14 Nov 2023|2023",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages.nothing.at_all }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_template_failure_is_a_request_error(source: str) -> None:
    """Its own message is shown; the sandbox isolates it from the interpreter."""
    with pytest.raises(RequestError) as caught:
        render([message("user", "u")], source)
    assert caught.value.param == "messages"
    assert caught.value.code == "chat_template_error"


def test_a_message_of_a_template_is_shown() -> None:
    """The client gets the reason, in a message of bounded length."""
    with pytest.raises(RequestError, match="no system role, please"):
        render([message("user", "u")], "{{ raise_exception('no system role, please') }}")
    with pytest.raises(RequestError) as caught:
        render([message("user", "u" * 9999)], "{{ raise_exception(messages[0].content) }}")
    assert len(caught.value.message) < 1000


def test_deep_nesting_in_variables_is_a_request_error() -> None:
    """The recursion ends with an error, not a crash."""
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError):
        render([message("user", "u")], "{{ deep }}", variables={"deep": deep})


def test_invalid_jinja_is_refused_immediately() -> None:
    """A broken template prevents the start instead of failing each row."""
    with pytest.raises(EngineError, match="not valid Jinja"):
        template("{% for %}")


@pytest.mark.parametrize("value", ["{{ 'x' * 10 ** 12 }}", "{{ messages | nothing }}"])
def test_a_template_that_cannot_render_one_message_is_refused(value: str) -> None:
    """It would fail each row or never end."""
    with pytest.raises(EngineError, match="the chat template"):
        template(value)


def test_an_endless_template_fails_only_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request's own input can cause the length; the next request renders."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 5_000)
    source = "{% for i in range(n or 1) %}{% for j in range(n or 1) %}{{ messages[0].content }}"
    source += "{% endfor %}{% endfor %}"
    one = template(source)
    with pytest.raises(RequestError, match="steps") as caught:
        one.render([message("user", "u")], created=CREATED, variables={"n": 99_999})
    assert caught.value.code == "chat_template_error"
    assert one.render([message("user", "u")], created=CREATED) == "u"


def test_reasoning_reaches_templates_under_every_name() -> None:
    """`reasoning` is vLLM's, `reasoning_content` its old one, `thinking` gpt-oss's."""
    names = ("reasoning", "reasoning_content", "thinking")
    source = "".join(f"{{{{ messages[0].{name} }}}}" for name in names)
    for name in names:
        assert render([message("assistant", "a", **{name: "t"})], source) == "ttt"
    assert render([message("assistant", "a", reasoning=None, thinking="t")], source) == "ttt"
    assert render([message("assistant", "a", reasoning="", thinking="t")], source) == "ttt"


def test_empty_reasoning_is_not_missing_reasoning() -> None:
    """If it is missing, templates look for it in the content."""
    source = "{{ messages[0].reasoning_content is string }}"
    assert render([message("assistant", "a", reasoning="")], source) == "True"
    assert render([message("assistant", "a", reasoning=None)], source) == "False"


def test_the_last_of_many_parts_may_be_continued() -> None:
    """A template that trims its messages is cut where the text ends."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render([message("assistant", parts)], PARTS_ONLY, **options) == "(a)(b "
    trimmed = "{{ messages[0].content | trim }}|end"
    assert render([message("assistant", "b ")], trimmed, **options) == "b"
    with pytest.raises(RequestError, match="skips the last message"):
        render([message("assistant", "b")], "nothing", **options)


def test_a_model_without_a_template_is_refused() -> None:
    """The caller then serves it as a base model."""
    with pytest.raises(EngineError, match="no chat template"):
        ChatTemplate(vocabulary_of(pretrained_tokenizer(chat_template=None)))


def test_the_argument_is_a_file_or_the_template_itself(tmp_path: Path) -> None:
    """`--chat-template` accepts both; a path that does not exist is not a template."""
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    assert read_chat_template(str(path)) == TEMPLATE
    assert read_chat_template(TEMPLATE) == TEMPLATE
    assert read_chat_template("{{ x }}" * 1000) == "{{ x }}" * 1000
    with pytest.raises(EngineError, match=r"missing\.jinja"):
        read_chat_template(str(tmp_path / "missing.jinja"))
    with pytest.raises(EngineError, match="cannot read"):
        read_chat_template("x" * 5000)
