"""Converts values to DynamoDB items and back: numbers as Decimal, nulls left out."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeVar

from boto3.dynamodb.types import TypeDeserializer, TypeSerializer
from pydantic import TypeAdapter

T = TypeVar("T")

_serialize = TypeSerializer().serialize
_deserialize = TypeDeserializer().deserialize


def to_value(value: object) -> dict[str, Any]:
    """Return one attribute value in the DynamoDB client's format."""
    typed: dict[str, Any] = _serialize(_storable(value))
    return typed


def to_item(fields: Mapping[str, object]) -> dict[str, Any]:
    """Return an item; fields that are None are left out."""
    return {name: to_value(value) for name, value in fields.items() if value is not None}


def from_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an item, its numbers as int or float."""
    return {name: _plain(_deserialize(value)) for name, value in item.items()}


def dump(value: object) -> dict[str, Any]:
    """Return the fields of a frozen dataclass as plain values."""
    fields: dict[str, Any] = _adapter(type(value)).dump_python(value, mode="json", by_alias=True)
    return fields


def load(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Return the dataclass from the result of `dump`."""
    value: T = _adapter(kind).validate_python(dict(fields))
    return value


_adapters: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def _storable(value: object) -> object:
    if isinstance(value, float):
        return Decimal(repr(value))
    if isinstance(value, Mapping):
        return {name: _storable(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_storable(item) for item in value]
    return value


def _plain(value: object) -> object:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
