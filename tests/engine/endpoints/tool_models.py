"""Text models whose templates show tools in the style of each family, with scripted answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.engine.scripted_model import (
    INFO,
    TURN_END,
    Scene,
    ScriptedGenerator,
    byte_level_backend,
    text_model_of,
)
from tidemill.engine.endpoints import text_endpoints
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.parsers.registry import select_parsers
from tidemill.engine.text.text_model import TextModel

_TURNS = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.content %}{{ message.content }}{% endif -%}"
    "{%- for call in message.tool_calls or [] -%}CALL{%- endfor -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
_SHOWN_TOOLS = "{%- for tool in tools or [] -%}TOOL {{ tool | tojson }}\n{%- endfor -%}"

HERMES = _SHOWN_TOOLS + _TURNS.replace(
    "CALL",
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>",
)
# As in Qwen3: the model opens its thinking itself, unless the prompt has closed it.
QWEN3 = HERMES.replace(
    "assistant\n{%- endif -%}",
    "assistant\n{%- if enable_thinking is defined and enable_thinking is false -%}"
    "<think>\n\n</think>\n\n{%- endif -%}{%- endif -%}",
)
R1 = HERMES.replace("assistant\n{%- endif -%}", "assistant\n{{ '<think>\n' }}{%- endif -%}") + (
    "{#- </think> -#}"
)
SEED = HERMES.replace(
    "assistant\n{%- endif -%}",
    "assistant\n{{ '<seed:think>' }}{%- if thinking_budget is defined and thinking_budget == 0 -%}"
    "{{ '</seed:think>' }}{%- endif -%}{%- endif -%}",
)
LLAMA = _SHOWN_TOOLS + _TURNS.replace(
    "CALL",
    '<|python_tag|>{"name": "{{ call.function.name }}", "parameters": '
    "{{ call.function.arguments | tojson }}}",
)
MISTRAL = _SHOWN_TOOLS + _TURNS.replace(
    "CALL",
    "{%- if call.id is not defined or call.id | length != 9 -%}"
    '{{ raise_exception("ids have nine characters") }}{%- endif -%}'
    '[TOOL_CALLS][{"name": "{{ call.function.name }}", "arguments": '
    '{{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}]',
).replace(
    "{%- if message.content %}",
    "{%- if message.tool_call_id is defined %}[{{ message.tool_call_id }}]{% endif -%}"
    "{%- if message.content %}",
)
# Its own template joins arguments to a text.
DEEPSEEK = _SHOWN_TOOLS + _TURNS.replace(
    "CALL",
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name"
    " + '\n```json\n' + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}",
)
KIMI = _SHOWN_TOOLS + _TURNS.replace(
    "CALL",
    "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + call.id"
    " + '<|tool_call_argument_begin|>' + call.function.arguments | tojson"
    " + '<|tool_call_end|><|tool_calls_section_end|>' }}",
)
MINIMAX = _SHOWN_TOOLS + _TURNS.replace(
    "CALL",
    '<minimax:tool_call>\n<invoke name="{{ call.function.name }}">\n'
    "{{ call.function.arguments | tojson }}</invoke>\n</minimax:tool_call>",
)
GEMMA4 = _SHOWN_TOOLS + _TURNS.replace(
    "CALL",
    "<|tool_call>call:{{ call.function.name }}{{ call.function.arguments | tojson }}<tool_call|>",
)
PYTHONIC = (
    _SHOWN_TOOLS
    + "{#- [func_name1(params_name1=1)] -#}"
    + _TURNS.replace("CALL", "[{{ call.function.name }}({{ call.function.arguments | tojson }})]")
)
GPT_OSS = _SHOWN_TOOLS + (
    "{%- for message in messages -%}<|start|>{{ message.role }}"
    "{%- for call in message.tool_calls or [] -%} to=functions.{{ call.function.name }}<|channel|>"
    "commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{%- endfor -%}"
    "{%- if message.content -%}<|message|>{{ message.content }}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
TEMPLATES = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "gemma4": GEMMA4,
    "kimi_k2": KIMI,
    "minimax_m2": MINIMAX,
    "pythonic": PYTHONIC,
    "openai": GPT_OSS,
}
_SPECIAL = (
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|start|>", "<|channel|>"),
    *("<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<minimax:tool_call>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "</minimax:tool_call>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tools_prefix|>", "<|tools_suffix|>"),
    *("<start_function_call>", "<end_function_call>", "<escape>", "<|action_start|>"),
    *("<|plugin|>", "<|action_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
)
# As in Qwen's vocabulary: a separate token, but ordinary text.
_PLAIN = ("<|fim_pad|>",)
_CONTEXT = 4_096


@cache
def _backend() -> Backend:
    backend = Backend.from_str(byte_level_backend().to_str())
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in _SPECIAL])
    backend.add_tokens([AddedToken(mark, special=False) for mark in _PLAIN])
    return backend


def tool_model(template: str) -> TextModel:
    """Return the text side of a model with this template, to which all marks are special tokens."""
    pretrained = PreTrainedTokenizerFast(
        tokenizer_object=_backend(), eos_token=TURN_END, chat_template=template
    )
    return replace(text_model_of(pretrained), max_model_len=_CONTEXT)


class ToolScene(Scene):
    """A scene of a model with this template, parsed as the template implies or as configured."""

    def __init__(self, answer: str, template: str = HERMES, **parsers: Any) -> None:
        super().__init__(answer, model=tool_model(template))
        source = None if self.model.chat_template is None else self.model.chat_template.source_text
        endpoints = text_endpoints(self.model, seed=7, parsers=select_parsers(source, **parsers))
        self.chats, self.completions, self.scoring, *_ = endpoints
        self.served = Dispatcher(endpoints, self.generator, INFO, model_names=("tiny",))

    def choice(self, *, tools: Any = None, **fields: Any) -> dict[str, Any]:
        """Return the only choice that answers a user's message."""
        [choice] = self.chat(tools=[WEATHER] if tools is None else tools, **fields)["choices"]
        return dict(choice)

    def prompt(self, **body: Any) -> str:
        """Return the prompt of a body."""
        self.reply(self.chats, body)
        return self.tokenizer.text(self.last().prompt_ids, skip_special_tokens=False)


def say(scene: Scene, generator: ScriptedGenerator, text: str) -> None:
    """Make a generator return this text from now on."""
    ids = scene.tokenizer.encode(text, add_special_tokens=False)
    generator.token_ids = [*ids, *scene.model.eos_token_ids]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is like.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
