"""Chat completions from body to body, with a generator that follows a script."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.engine.scripted_model import (
    CREATED,
    MAX_MODEL_LEN,
    TURN_END,
    Scene,
    sentencepiece_tokenizer,
    text_model,
    text_model_of,
)
from tidemill.engine.text.text_model import SamplingDefaults


def test_the_answer_is_openais_chat_completion() -> None:
    """It validates as the SDK's type; ids and times come from the line and the job."""
    body = Scene().chat(model="tiny", logprobs=True, top_logprobs=2, n=2)
    answer = ChatCompletion.model_validate(body)
    assert answer.id == "chatcmpl-0123"
    assert (answer.created, answer.model) == (CREATED, "tiny")
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content == " Paris."
    assert answer.choices[0].message.refusal is None
    assert answer.choices[0].finish_reason == "stop"


def test_the_same_line_gives_the_same_body() -> None:
    """A row contains nothing random."""
    scene = Scene()
    assert scene.chat(n=3) == scene.chat(n=3)


def test_the_prompt_is_the_rendered_conversation() -> None:
    """Its tokens are those of the template's text, with nothing added."""
    scene = Scene()
    scene.chat("Hi")
    text = scene.tokenizer.text(scene.last().prompt_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_usage_counts_the_prompt_once_and_every_choice() -> None:
    """Only the summary contains cached tokens: a row must not depend on the cache."""
    scene = Scene()
    scene.generator.num_cached_tokens = 8
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 2}
    reply = scene.reply(scene.chats, body)
    num_prompt, num_answer = len(scene.last().prompt_ids), len(scene.generator.token_ids)
    assert reply.body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 2 * num_answer,
        "total_tokens": num_prompt + 2 * num_answer,
    }
    assert reply.usage.cached_tokens == 8
    assert reply.usage.completion_tokens == 2 * num_answer


def test_every_sampling_parameter_reaches_the_generator() -> None:
    """None of them is dropped on the way."""
    scene = Scene()
    scene.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"7": 3},
        logprobs=True,
        top_logprobs=4,
        max_completion_tokens=9,
        min_tokens=2,
        stop_token_ids=[11],
        prompt_logprobs=1,
    )
    request = scene.last()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.presence_penalty) == (0.1, 1)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (-1, 1.2)
    assert (sampling.logit_bias, sampling.logprobs) == ({7: 3}, 4)
    assert (request.max_tokens, request.min_tokens, request.prompt_logprobs) == (9, 2, 1)
    assert request.stop_token_ids == {11} | scene.model.eos_token_ids


def test_a_request_without_parameters_gets_the_models_defaults() -> None:
    """The model's generation config provides the defaults; the context is the limit."""
    defaults = SamplingDefaults(temperature=0.6, top_p=0.8, top_k=20, repetition_penalty=1.1)
    scene = Scene(model=text_model(defaults=defaults))
    scene.chat()
    request = scene.last()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.8, 20)
    assert sampling.repetition_penalty == 1.1
    assert request.max_tokens == MAX_MODEL_LEN - len(request.prompt_ids)
    scene.chat(temperature=0, top_p=1, top_k=-1, repetition_penalty=1)
    sampling = scene.last().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 1, 0)
    assert sampling.repetition_penalty == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 10**6}, {"top_k": 0}),
        ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"temperature": 1e300}, {"temperature": 1e4}),
    ],
)
def test_edge_values_have_a_plain_meaning(
    fields: dict[str, Any], expected: dict[str, float]
) -> None:
    """-1 and 0 and the whole vocabulary allow all; a share of 0 allows the most likely token."""
    scene = Scene()
    scene.chat(**fields)
    sampling = scene.last().sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


def test_choice_0_draws_as_if_it_were_alone() -> None:
    """`n` only adds choices, each with its own seed."""
    scene = Scene()
    scene.chat(seed=5)
    scene.chat(seed=5, n=3)
    alone, *choices = [request.sampling.seed for request in scene.generator.requests]
    assert choices[0] == alone
    assert len(set(choices)) == 3


def test_the_end_of_a_turn_is_not_in_the_text() -> None:
    """Like vLLM, the answer has no stop reason for the model's own end token."""
    choice = Scene().chat()["choices"][0]
    assert choice["message"]["content"] == " Paris."
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def test_the_end_of_a_turn_may_be_ignored() -> None:
    """`ignore_eos` continues; special tokens are shown if they are not skipped."""
    scene = Scene(f" Paris.{TURN_END} the")
    choice = scene.chat(ignore_eos=True, skip_special_tokens=False)["choices"][0]
    assert choice["message"]["content"] == f" Paris.{TURN_END} the{TURN_END}"
    assert choice["finish_reason"] == "length"


def test_a_stop_token_ends_and_is_cut() -> None:
    """It is the stop reason; `include_stop_str_in_output` keeps its text."""
    scene = Scene()
    [dot] = scene.tokenizer.encode(".", add_special_tokens=False)
    choice = scene.chat(stop_token_ids=[dot])["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == (" Paris", dot)
    body = scene.chat(stop_token_ids=[dot], include_stop_str_in_output=True)
    assert body["choices"][0]["message"]["content"] == " Paris."


def test_a_stop_string_inside_tokens_ends_and_is_cut() -> None:
    """The text before it is exact, and the token's text after it is dropped."""
    scene = Scene()
    choice = scene.chat(stop=["zzz", "ari"])["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == (" P", "ari")
    assert choice["finish_reason"] == "stop"
    body = scene.chat(stop="ari", include_stop_str_in_output=True)
    assert body["choices"][0]["message"]["content"] == " Pari"


def test_a_stop_pattern_ends_and_its_match_stays() -> None:
    """Strings come first; before the minimum nothing ends; the reason is the pattern."""
    scene = Scene("The capital of France is Paris, of Norway Oslo.")
    choice = scene.chat(stop_regex=r"[A-Z]\w+s,")["choices"][0]
    assert choice["message"]["content"].endswith(" Paris,")
    assert (choice["stop_reason"], choice["finish_reason"]) == (r"[A-Z]\w+s,", "stop")
    both = scene.chat(stop_regex=["zzz", "P.r"], stop=["ari"])["choices"][0]
    assert (both["message"]["content"][-2:], both["stop_reason"]) == (" P", "ari")
    late = scene.chat(stop_regex="o", min_tokens=len(scene.generator.token_ids) - 3)["choices"][0]
    assert late["message"]["content"].endswith("Oslo")
    assert scene.chat_fault(stop_regex="(").param == "stop_regex"
    assert scene.chat_fault(stop_regex=[""]).param == "stop_regex.0"


def test_sglangs_name_keeps_the_stop_string_too() -> None:
    """`no_stop_trim` is another name of `include_stop_str_in_output`."""
    body = Scene().chat(stop="ari", no_stop_trim=True)
    assert body["choices"][0]["message"]["content"] == " Pari"


def test_a_stop_token_that_completes_a_stop_string_is_cut_as_a_token() -> None:
    """The engine reports the token, and the whole of it goes."""
    scene = Scene()
    ris = scene.generator.token_ids[1]
    choice = scene.chat(stop="ari", stop_token_ids=[ris])["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == (" Pa", ris)


def test_a_stop_string_before_the_least_length_is_text() -> None:
    """`min_tokens` protects it, and later occurrences still end the sequence."""
    scene = Scene(" Paris. Paris.")
    choice = scene.chat(stop="ari", min_tokens=3)["choices"][0]
    assert choice["message"]["content"] == " Paris. P"


def test_half_a_character_at_the_limit_is_replaced() -> None:
    """A sequence may end inside a character; the body stays valid UTF-8."""
    scene = Scene("é")
    choice = scene.chat(max_tokens=1, logprobs=True)["choices"][0]
    assert choice["message"]["content"] == "\ufffd"
    [token] = choice["logprobs"]["content"]
    assert (token["token"], [*token["bytes"]]) == ("\\xc3", [0xC3])


def test_log_probabilities_go_with_the_tokens() -> None:
    """Each token has its text, its bytes and the most likely alternatives, best first."""
    scene = Scene()
    choice = scene.chat(logprobs=True, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == len(scene.generator.token_ids)
    first_id = scene.generator.token_ids[0]
    assert content[0]["token"] == scene.tokenizer.text([first_id])
    assert bytes(content[0]["bytes"]) == scene.tokenizer.piece(first_id)
    assert content[0]["logprob"] == pytest.approx(-first_id / 100)
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == pytest.approx([0, -0.01])
    plain = scene.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert plain[0]["top_logprobs"] == []
    assert scene.chat()["choices"][0]["logprobs"] is None


def test_token_ids_and_prompt_log_probabilities_are_vllms() -> None:
    """They are in vLLM's fields, and only if requested."""
    scene = Scene()
    body = scene.chat(return_token_ids=True, prompt_logprobs=1)
    prompt_ids = scene.last().prompt_ids
    assert body["prompt_token_ids"] == prompt_ids
    assert body["choices"][0]["token_ids"] == scene.generator.token_ids
    first, second = body["prompt_logprobs"][:2]
    assert first is None
    assert second[str(prompt_ids[1])]["decoded_token"] == scene.tokenizer.text([prompt_ids[1]])
    assert second["0"]["rank"] == 1
    assert second[str(prompt_ids[1])]["rank"] == prompt_ids[1] + 1
    assert "prompt_logprobs" not in scene.chat()


def test_echo_puts_the_message_before_its_continuation() -> None:
    """With `continue_final_message` the whole assistant's message is returned."""
    scene = Scene(" Paris.")
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    answer = scene.reply(scene.chats, body).body
    assert answer["choices"][0]["message"]["content"] == "It is Paris."
    prompt = scene.tokenizer.text(scene.last().prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nIt is")
    assert scene.chat(echo=True)["choices"][0]["message"]["content"] == " Paris."


def test_reasoning_effort_and_template_variables_reach_the_template() -> None:
    """A template that supports the variables uses them; another renders as without them."""
    source = (
        "{{ reasoning_effort }} {{ verbosity }} {{ enable_thinking }} {{ messages[0].content }}"
    )
    scene = Scene(model=text_model(chat_template=source))
    hints = {"reasoning_effort": "low", "verbosity": "high"}
    scene.chat(**hints, chat_template_kwargs={"enable_thinking": False})
    assert scene.tokenizer.text(scene.last().prompt_ids) == "low high False Hi"
    plain = Scene()
    with_hint, without = plain.chat(**hints), plain.chat()
    assert with_hint == without


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": 10**6}, "max_tokens", "context_length_exceeded"),
        ({"max_completion_tokens": 64}, "max_completion_tokens", "context_length_exceeded"),
        (
            {"messages": [{"role": "user", "content": "x" * 64}]},
            "messages",
            "context_length_exceeded",
        ),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "invalid_request"),
        ({"min_tokens": 64}, "min_tokens", "invalid_request"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "invalid_request"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "invalid_request"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "invalid_request"),
    ],
)
def test_unsupported_parameters_are_rejected_by_name(
    fields: dict[str, Any], param: str, code: str
) -> None:
    """Nothing of such a request reaches the generator."""
    scene = Scene()
    error = scene.chat_fault(**fields)
    assert (error.param, error.code) == (param, code)
    assert scene.generator.requests == []


def test_the_error_of_a_prompt_above_the_context_has_the_numbers() -> None:
    """The numbers show by how much to shorten the prompt or the completion."""
    error = Scene().chat_fault(max_tokens=63)
    assert "64 tokens" in error.message
    assert "63 in the completion" in error.message


def test_the_whole_context_may_be_used() -> None:
    """Prompt and completion together may be as long as the context, and no longer."""
    scene = Scene()
    scene.chat()
    rest = MAX_MODEL_LEN - len(scene.last().prompt_ids)
    scene.chat(max_tokens=rest)
    assert scene.last().max_tokens == rest
    assert scene.chat_fault(max_tokens=rest + 1).param == "max_tokens"


def test_the_error_without_a_template_names_the_option() -> None:
    """A base model still serves completions."""
    scene = Scene(model=text_model(chat_template=None))
    error = scene.chat_fault()
    assert "--chat-template" in error.message
    assert scene.complete()["choices"][0]["text"] == " Paris."


def test_a_template_error_names_the_messages() -> None:
    """The error contains the template's own message."""
    source = "{{ raise_exception('roles must alternate') }}"
    error = Scene(model=text_model(chat_template=source)).chat_fault()
    assert error.param == "messages"
    assert "roles must alternate" in error.message


def test_a_conversation_that_renders_to_nothing_is_refused() -> None:
    """Generation needs at least one token."""
    error = Scene(model=text_model(chat_template="{# nothing #}")).chat_fault()
    assert error.param == "messages"


def test_a_rendered_prompt_gets_no_more_special_tokens_by_default() -> None:
    """Templates write their own special ones; `add_special_tokens: true` adds the tokenizer's."""
    scene = Scene("a", model=text_model_of(sentencepiece_tokenizer()))
    scene.chat("ab")
    [start, *rest] = scene.last().prompt_ids
    assert start == 1
    assert 1 not in rest
    scene.chat("ab", add_special_tokens=True)
    assert scene.last().prompt_ids == [1, 1, *rest]
