"""Tools: function definitions, tool choice, and tool calls of earlier messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from .constraints.schemas import SchemaRules, served_schema
from .custom_tools import FormatFault, function_fields, pattern_of
from .errors import RequestError
from .fields import Text, encodable, fault

_MAX_NAME_CHARS = 128
_MAX_TOOLS = 1_024
_NAME_CHARS = r"^[A-Za-z0-9_.:/-]+$"

ToolName = Annotated[str, Field(min_length=1, max_length=_MAX_NAME_CHARS, pattern=_NAME_CHARS)]


def _of_tool(kind: str) -> str:
    if kind not in {"function", "custom"}:
        raise ValueError("must be 'function' or 'custom': other tool types are not supported")
    return kind


_ToolType = Annotated[str, AfterValidator(_of_tool)]


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ValueError('must be a schema with "type": "object", because arguments have names')
    return schema


class Function(BaseModel):
    """Function that a model may call; unknown fields are passed to the template unchanged.

    `parameters` is the JSON schema of its arguments; without it there are no arguments. With
    `strict` the arguments always follow the schema.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    name: ToolName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_of_object)] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """Tool of a request."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: _ToolType
    function: Function

    def arguments_schema(self) -> dict[str, Any]:
        """Return the enforced schema of its arguments: the whole schema if it is `strict`.

        Otherwise a schema that cannot be enforced is replaced by any object.
        """
        parameters = self.function.parameters
        if parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        rules = SchemaRules(is_strict=bool(self.function.strict))
        try:
            schema = served_schema(parameters, "tools", rules)
        except RequestError:
            schema = {}
        if schema.get("properties") == {} and schema.keys() <= {"$schema", "type", "properties"}:
            schema["additionalProperties"] = False  # a function without parameters
        return {**schema, "type": "object"}

    def check_schema(self, param: str) -> None:
        """Raise `RequestError` for a schema that cannot be enforced; `param` is the tool's path."""
        rules = SchemaRules(is_strict=True)
        served_schema(self.function.parameters or {}, f"{param}.function.parameters", rules)

    def as_template_reads(self) -> dict[str, Any]:
        """Return the tool from the request, as plain JSON."""
        return self.model_dump(exclude_unset=True)


class _CustomFields(BaseModel):
    """Name, description and input format of a custom tool."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: ToolName
    description: Text | None = None
    format: Any = None


class CustomTool(BaseModel):
    """Tool whose only argument is a text; for the model it is a function of `input`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["custom"]
    custom: _CustomFields

    @model_validator(mode="after")
    def _has_format(self) -> Self:
        try:
            pattern_of(self.custom.format)
        except FormatFault as exc:
            raise fault(("custom", "format", *exc.path), exc.words, exc.value) from None
        return self

    @cached_property
    def function(self) -> Function:
        """Return the function that the model sees."""
        fields = self.custom.model_dump(include={"name", "description"}, exclude_unset=True)
        return Function(**fields, **function_fields(pattern_of(self.custom.format)))

    def check_schema(self, param: str) -> None:
        """Raise `RequestError` for a regular expression that cannot be enforced."""
        try:
            self._as_tool.check_schema(param)
        except RequestError as error:
            own = f"{param}.custom.format.grammar.definition"
            error.message = error.message.replace(f"`{error.param}`", f"`{own}`")
            error.param = own
            raise

    def arguments_schema(self) -> dict[str, Any]:
        """Return the enforced schema of the function's arguments."""
        return self._as_tool.arguments_schema()

    def as_template_reads(self) -> dict[str, Any]:
        """Return the function, as plain JSON."""
        return self._as_tool.as_template_reads()

    @property
    def _as_tool(self) -> Tool:
        return Tool(type="function", function=self.function)


def _form_of_tool(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<custom>" if kind == "custom" else "<function>"


AnyTool = Annotated[
    Annotated[Tool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    Discriminator(_form_of_tool),
]


class _Named(BaseModel):
    """The name of one function."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: ToolName


class NamedToolChoice(BaseModel):
    """Tool choice of one tool, which must be called; a custom one is under `custom`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: _ToolType
    function: Annotated[_Named, Field(validation_alias=AliasChoices("function", "custom"))]

    @model_validator(mode="before")
    @classmethod
    def _has_custom(cls, choice: object) -> object:
        fields = choice if isinstance(choice, dict) else {}
        if fields.get("type") == "custom" and fields.keys().isdisjoint(("function", "custom")):
            raise fault(("custom",), "must be an object", None)
        return choice

    @property
    def name_param(self) -> str:
        """Return the path of the name within the choice."""
        return f"{self.type}.name"


def _with_function(tool: object) -> object:
    """Return a named tool in the chat form; the responses form has the name directly."""
    if isinstance(tool, dict) and tool.keys().isdisjoint(("function", "custom")) and "name" in tool:
        return {"type": tool.get("type"), "function": {"name": tool["name"]}}
    return tool


class AllowedTools(BaseModel):
    """Subset of the tools, and whether one of them must be called."""

    model_config = ConfigDict(extra="ignore", strict=True)

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedToolChoice, BeforeValidator(_with_function)]],
        Field(fail_fast=True, min_length=1, max_length=_MAX_TOOLS),
    ]


def _with_allowed_tools(choice: object) -> object:
    """Return a choice in the chat form; the responses form has the mode directly."""
    if isinstance(choice, dict) and "allowed_tools" not in choice and "tools" in choice:
        return {**choice, "allowed_tools": choice}
    return choice


class AllowedToolsChoice(BaseModel):
    """Tool choice among a subset of the tools."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _form_of_choice(value: object) -> str | None:
    if isinstance(value, str):
        return "<word>" if value in ("none", "auto", "required") else None
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return "<allowed>"
    return "<named>" if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedToolChoice, Tag("<named>")]
    | Annotated[AllowedToolsChoice, BeforeValidator(_with_allowed_tools), Tag("<allowed>")],
    Discriminator(
        _form_of_choice,
        custom_error_type="choice_form",
        custom_error_message="Input should be 'none', 'auto', 'required' or"
        ' {"type": "function", "function": {"name": …}} or {"type": "allowed_tools", …}',
    ),
]


class ToolFields(BaseModel):
    """Fields of a chat request about tools."""

    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=_MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def check_tools(self) -> None:
        """Refuse duplicate tool names, and a choice of an unknown tool."""
        names = [tool.function.name for tool in self.tools or ()]
        kinds = [tool.type for tool in self.tools or ()]
        for place, tool in enumerate(self.tools or ()):
            if tool.function.strict:
                tool.check_schema(f"tools.{place}")
        for place, name in enumerate(names):
            if name in names[:place]:
                raise RequestError(
                    f"`tools.{place}.{kinds[place]}.name` must be unique; got '{name}' twice.",
                    param=f"tools.{place}.{kinds[place]}.name",
                )
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return
        if not names:
            raise RequestError(
                "`tool_choice` requires `tools`.",
                param="tool_choice",
            )
        chosen = {"": choice} if isinstance(choice, NamedToolChoice) else {}
        if isinstance(choice, AllowedToolsChoice):
            allowed = enumerate(choice.allowed_tools.tools)
            chosen = {f".allowed_tools.tools.{place}": one for place, one in allowed}
        for path, one in chosen.items():
            if one.function.name not in names:
                param = f"tool_choice{path}.{one.name_param}"
                raise RequestError(
                    f"`{param}` must be the name of one of the `tools`; got '{one.function.name}'.",
                    param=param,
                )

    @property
    def custom_tools(self) -> frozenset[str]:
        """Return the names of the custom tools."""
        return frozenset(
            tool.function.name for tool in self.tools or () if isinstance(tool, CustomTool)
        )

    @property
    def offered_tools(self) -> Sequence[Tool | CustomTool]:
        """Return the tools in the prompt: those allowed, and none if `tool_choice` is `none`."""
        tools: Sequence[Tool | CustomTool] = () if self.tool_choice == "none" else self.tools or ()
        if not isinstance(self.tool_choice, AllowedToolsChoice):
            return tools
        names = {one.function.name for one in self.tool_choice.allowed_tools.tools}
        return [tool for tool in tools if tool.function.name in names]

    @property
    def callable_tools(self) -> Sequence[Tool | CustomTool]:
        """Return the offered tools that the model may call."""
        choice = self.tool_choice
        if not isinstance(choice, NamedToolChoice):
            return self.offered_tools
        return [tool for tool in self.offered_tools if tool.function.name == choice.function.name]

    @property
    def needs_call(self) -> bool:
        """Say whether the output must be a tool call."""
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice not in (None, "auto", "none")


def _object_of(arguments: object) -> object:
    """Return the arguments of an earlier call as an object; an empty text means no arguments.

    Models may write texts that are not JSON objects, for example if a token limit truncates them:
    such a text stays unchanged.
    """
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return encodable(arguments)
        return value if isinstance(value, dict) else encodable(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("must be a string or an object")  # noqa: TRY004 - pydantic reads these
    return arguments


class CalledFunction(BaseModel):
    """A function call; its arguments are an object, or a text that is not a JSON object."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: Annotated[Text, Field(min_length=1)]
    arguments: Annotated[dict[str, Any] | str, BeforeValidator(_object_of)]


def _with_function_call(call: object) -> object:
    """Return a call of a custom tool as one of its function."""
    if not isinstance(call, dict) or call.get("type") != "custom":
        return call
    custom = call.get("custom")
    if not isinstance(custom, dict):
        raise fault(("custom",), "must be an object", custom)
    name = custom.get("name")
    if not isinstance(name, str) or not name:
        raise fault(("custom", "name"), "must be a string of at least 1 character", name)
    if not isinstance(custom.get("input"), str):
        raise fault(("custom", "input"), "must be a string", custom.get("input"))
    function = {"name": name, "arguments": {"input": custom["input"]}}
    return {"id": call.get("id"), "type": "function", "function": function}


class ToolCall(BaseModel):
    """Tool call of an assistant's message; that of a custom tool becomes one of its function."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: Annotated[Text, Field(min_length=1)] | None = None
    type: _ToolType = "function"
    function: CalledFunction

    _as_function = model_validator(mode="before")(_with_function_call)
