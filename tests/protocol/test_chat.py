"""The body of a chat completion: accepted fields, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.validation import parse

MESSAGES = [{"role": "user", "content": "Hi"}]
CALLS = "messages.1.tool_calls"


def call(arguments: object) -> dict[str, Any]:
    """Return a tool call of an assistant."""
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def tool(name: str = "f", **fields: object) -> dict[str, Any]:
    """Return a tool of this name."""
    return {"type": "function", "function": {"name": name, **fields}}


CALL = call("{}")


def chat(**fields: Any) -> ChatCompletionRequest:
    """Return the request of a chat body with these fields."""
    return parse(ChatCompletionRequest, {"messages": MESSAGES, **fields})


def param_of_fault(**fields: Any) -> str | None:
    """Return the parameter in the error."""
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.status_code == 400
    return caught.value.param


def test_null_is_the_same_as_absent_for_every_optional_field() -> None:
    """Clients that write out all their fields get the defaults."""
    optional = [name for name in ChatCompletionRequest.model_fields if name != "messages"]
    assert chat(**dict.fromkeys(optional)) == chat()


def test_unknown_and_harmless_fields_are_accepted() -> None:
    """Fields without effect may have any value."""
    request = chat(user="u", metadata={"a": "b"}, store=True, anything=[1])
    assert request == chat()


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    """Return a choice among a subset of the tools."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 10**9),
        ("n", 0),
        ("n", True),
        ("n", "2"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("temperature", "warm"),
        ("temperature", 10**400),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("seed", 2**63),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("stop_token_ids", 5),
        ("ignore_eos", "yes"),
        ("logprobs", 5),
        ("prompt_logprobs", -2),
        ("logprob_start_len", 1),
        ("logit_bias", [1]),
        ("messages", []),
        ("messages", None),
        ("messages", "Hi"),
        ("reasoning_effort", "enormous"),
        ("verbosity", "loud"),
        ("documents", "text"),
        ("chat_template_kwargs", []),
        ("cache_salt", ""),
        ("cache_salt", 5),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    """The error names the field itself."""
    assert param_of_fault(**{field: value}) == field


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stop", "", "stop.0"),
        ("stop", ["a", ""], "stop.1"),
        ("stop", [5], "stop.0"),
        ("stop", ["\udfff"], "stop.0"),
        ("stop", ["x"] * 65, "stop"),
        ("stop_token_ids", [1, -1], "stop_token_ids.1"),
        ("logit_bias", {"x": 1}, "logit_bias.x"),
        ("logit_bias", {"-1": 1}, "logit_bias.-1"),
        ("logit_bias", {"9" * 99: 1}, f"logit_bias.{'9' * 99}"),
        ("logit_bias", {"5": 100.5}, "logit_bias.5"),
        ("logit_bias", {"5": float("nan")}, "logit_bias.5"),
    ],
)
def test_an_invalid_part_of_a_field_is_reported(field: str, value: object, param: str) -> None:
    """The error has the item of the list or object."""
    assert param_of_fault(**{field: value}) == param


def test_a_length_limit_is_reported_in_its_unit() -> None:
    """A string has characters, a list has items."""
    with pytest.raises(RequestError, match=r"`stop.0` must not be longer than 1,000 characters"):
        chat(stop="x" * 1001)
    with pytest.raises(RequestError, match=r"`stop` must not have more than 64 items"):
        chat(stop=["x"] * 65)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Hi", "messages.1"),
        ({"content": "Hi"}, "messages.1.role"),
        ({"role": "", "content": "Hi"}, "messages.1.role"),
        ({"role": "tool", "content": "5"}, "messages.1.tool_call_id"),
        ({"role": "tool", "tool_call_id": "c"}, "messages.1.content"),
        ({"role": "function", "content": "5"}, "messages.1.role"),
        ({"role": "user"}, "messages.1.content"),
        ({"role": "assistant", "content": None}, "messages.1.content"),
        ({"role": "user", "content": 5}, "messages.1.content"),
        ({"role": "user", "content": []}, "messages.1.content"),
        ({"role": "user", "content": "a\ud800"}, "messages.1.content"),
        ({"role": "user", "content": ["Hi"]}, "messages.1.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.1.content.0.text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.1.content.0.image_url.url",
        ),
        ({"role": "assistant", "tool_calls": [{}]}, "messages.1.tool_calls.0.function"),
        ({"role": "user", "refusal": "No."}, "messages.1.content"),
        ({"role": "assistant", "refusal": 5}, "messages.1.refusal"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": None}]},
            "messages.1.content.0.refusal",
        ),
        ({"role": "assistant", "tool_calls": []}, "messages.1.content"),
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "messages.1.tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL, call([1])]}, f"{CALLS}.1.function.arguments"),
        ({"role": "assistant", "tool_calls": [call(5)]}, f"{CALLS}.0.function.arguments"),
        ({"role": "assistant", "tool_calls": [call("\udfff{")]}, f"{CALLS}.0.function.arguments"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "web"}]}, f"{CALLS}.0.type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": ""}]}, f"{CALLS}.0.id"),
        (
            {"role": "assistant", "content": "", "function_call": {"a": 1}},
            "messages.1.function_call",
        ),
        ({"role": "assistant", "content": "", "audio": {"id": "a"}}, "messages.1.audio"),
    ],
)
def test_an_unsupported_message_is_reported(message: object, param: str) -> None:
    """The error has the message and the field in it."""
    assert param_of_fault(messages=[*MESSAGES, message]) == param


def test_content_is_a_string_or_text_parts() -> None:
    """Both forms give a list of texts; a part may have fields of other servers."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    request = chat(
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    )
    assert [message.texts() for message in request.messages] == [["s"], ["a", "b"]]


def test_unknown_fields_of_a_message_are_kept_for_the_template() -> None:
    """Templates read `name`; empty tool calls are ignored."""
    message = {"role": "assistant", "content": "x", "name": "n", "tool_calls": []}
    [parsed] = chat(messages=[message]).messages
    assert parsed.other_fields() == {"name": "n"}


def test_a_turn_with_only_reasoning_needs_no_content() -> None:
    """Answers that are truncated while reasoning look like this; only assistants have reasoning."""
    message = {"role": "assistant", "content": None, "reasoning": "Hm."}
    assert chat(messages=[*MESSAGES, message]).messages[-1].thought == "Hm."
    for other in ({"role": "user"}, {"reasoning": ""}, {"reasoning": None}):
        assert param_of_fault(messages=[*MESSAGES, message | other]) == "messages.1.content"


def test_reasoning_must_be_text() -> None:
    """Other values are refused with their place, under each of its names."""
    for name in ("reasoning", "reasoning_content", "thinking"):
        for value in (["Hm."], "\ud800"):
            message = {"role": "assistant", "content": "x", name: value}
            assert param_of_fault(messages=[*MESSAGES, message]) == f"messages.1.{name}"


def test_integers_may_be_written_as_floats() -> None:
    """A data frame writes 16.0 for 16."""
    assert chat(max_tokens=16.0).max_tokens == 16


def test_a_stop_string_is_a_list_of_one() -> None:
    """Both forms of `stop` mean the same."""
    assert chat(stop="###").stop == chat(stop=["###"]).stop == ["###"]


def test_logit_bias_has_token_ids() -> None:
    """JSON's keys are strings, but token IDs are numbers."""
    assert chat(logit_bias={"5": -100, "17": 1}).logit_bias == {5: -100.0, 17: 1.0}


def test_a_large_logit_bias_is_checked_up_to_its_first_faults() -> None:
    """Valid ones are checked completely; an error per item would take a gigabyte."""
    whole = {str(token_id): 1 for token_id in range(5_000)}
    assert chat(logit_bias=whole).logit_bias == dict.fromkeys(range(5_000), 1.0)
    with pytest.raises(RequestError, match=r"`logit_bias\.2000` must be a valid number") as caught:
        chat(logit_bias=whole | dict.fromkeys(map(str, range(2_000, 5_000)), "x"))
    assert "logit_bias.3000" not in caught.value.message


def test_log_probabilities_have_two_fields() -> None:
    """`logprobs` turns them on, and `top_logprobs` counts alternatives."""
    assert chat().num_logprobs is None
    assert chat(logprobs=False, top_logprobs=0).num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(
    fields: dict[str, Any], param: str
) -> None:
    """Neither of the two is silently ignored."""
    assert param_of_fault(**fields) == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": ["f"]}, "tools.0"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{**tool(), "type": "web_search"}]}, "tools.0.type"),
        ({"tools": [tool("")]}, "tools.0.function.name"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("x" * 129)]}, "tools.0.function.name"),
        ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools.0.function.parameters"),
        ({"tools": [tool(strict="yes")]}, "tools.0.function.strict"),
        ({"tools": [tool("a"), tool("b"), tool("a")]}, "tools.2.function.name"),
        ({"tools": [tool()], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": ["f"]}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "tool"}}, "tool_choice.type"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [tool()], "tool_choice": tool("g")}, "tool_choice.function.name"),
        (
            {"tools": [tool()], "tool_choice": allowed("auto", tool("f"), tool("g"))},
            "tool_choice.allowed_tools.tools.1.function.name",
        ),
        (
            {"tools": [tool()], "tool_choice": allowed("none", tool("f"))},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tools": [tool()], "tool_choice": allowed("auto", {"type": "mcp", "name": "f"})},
            "tool_choice.allowed_tools.tools.0.type",
        ),
        (
            {"tools": [tool()], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools",
        ),
        ({"tools": [tool()], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("auto", tool("f"))}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": tool()}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}]}
            | {"continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
def test_invalid_tools_are_reported(fields: dict[str, Any], param: str) -> None:
    """The error has the tool and its field, or the invalid choice."""
    assert param_of_fault(**fields) == param


def test_an_unknown_choice_is_reported_with_the_valid_ones() -> None:
    """The message has the values to use."""
    with pytest.raises(RequestError) as caught:
        chat(tools=[tool()], tool_choice="any")
    assert caught.value.message == (
        "`tool_choice` must be 'none', 'auto', 'required' or"
        ' {"type": "function", "function": {"name": …}} or {"type": "allowed_tools", …};'
        " got 'any'."
    )


def test_a_choice_decides_which_tools_are_shown_and_callable() -> None:
    """`none` shows no tools; a named one is the only callable one, but all are shown."""
    tools = [tool("a"), tool("b")]
    for choice, shown, callable_names, needs in (
        (None, "ab", "ab", False),
        ("auto", "ab", "ab", False),
        ("none", "", "", False),
        ("required", "ab", "ab", True),
        (tool("b"), "ab", "b", True),
        (allowed("auto", tool("b")), "b", "b", False),
        (allowed("required", tool("b"), tool("a")), "ab", "ab", True),
        (  # as in OpenAI's Responses API
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "b"}],
            },
            "b",
            "b",
            True,
        ),
    ):
        request = chat(tools=tools, tool_choice=choice)
        assert "".join(item.function.name for item in request.offered_tools) == shown
        assert "".join(item.function.name for item in request.callable_tools) == callable_names
        assert request.needs_call is needs


def test_a_tool_reaches_the_template_as_it_was_sent() -> None:
    """Unknown fields are kept, and no fields are added."""
    sent = {**tool(parameters={"type": "object", "x": [1]}, returns="text"), "more": 1}
    [parsed] = chat(tools=[sent]).tools or []
    assert parsed.as_template_reads() == sent


def test_a_refusal_in_an_earlier_answer_is_its_text() -> None:
    """It may be a part, or the whole message; only assistants refuse."""
    part = {"type": "refusal", "refusal": "No."}
    turns = [
        {"role": "assistant", "content": [part, {"type": "text", "text": "Sorry."}]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": "Yes.", "refusal": None},
    ]
    parsed = chat(messages=[*MESSAGES, *turns]).messages[1:]
    assert [turn.texts() for turn in parsed] == [["No.", "Sorry."], ["No."], ["Yes."]]
    assert [turn.other_fields() for turn in parsed] == [{}] * 3


def test_arguments_of_calls_become_objects() -> None:
    """Clients send back the text that they received; an empty one has no arguments."""
    calls = [call('{"a": 1}'), call({"a": 1}), call(" "), {"function": CALL["function"]}]
    [_, turn] = chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": calls}]).messages
    arguments = [made.function.arguments for made in turn.tool_calls or []]
    assert arguments == [{"a": 1}, {"a": 1}, {}, {}]


@pytest.mark.parametrize("text", ['{"a": "Par', "[1]", "5", "[" * 9**6], ids=range(4))
def test_other_arguments_stay_text(text: str) -> None:
    """A truncated answer is sent back unchanged."""
    turn = chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call(text)]}]).messages[1]
    assert [made.function.arguments for made in turn.tool_calls or []] == [text]
    assert turn.texts() == []
