"""Configuration of a deployment: one TOML file, read once and fully validated."""

from __future__ import annotations

from infra.config.data import Retention
from infra.config.deployment import DEFAULT_ZONES, Config
from infra.config.model import Adapter, Model
from infra.config.producers import Producer
from infra.config.read import (
    DEFAULT_PATH,
    ConfigRefused,
    make_config,
    read_config,
    with_aliases,
)

__all__ = (
    "DEFAULT_PATH",
    "DEFAULT_ZONES",
    "Adapter",
    "Config",
    "ConfigRefused",
    "Model",
    "Producer",
    "Retention",
    "make_config",
    "read_config",
    "with_aliases",
)
