"""Configuration of a deployment: one TOML file, read once and fully validated."""

from __future__ import annotations

from infra.config.api import Domain
from infra.config.data import Retention, Reuse
from infra.config.deployment import Config
from infra.config.model import Adapter, Model
from infra.config.network import DEFAULT_ZONES, Network
from infra.config.producers import Producer
from infra.config.read import (
    DEFAULT_PATH,
    ConfigRefused,
    make_config,
    read_config,
    with_aliases,
    with_concurrency,
    with_name,
    with_zones,
)

__all__ = (
    "DEFAULT_PATH",
    "DEFAULT_ZONES",
    "Adapter",
    "Config",
    "ConfigRefused",
    "Domain",
    "Model",
    "Network",
    "Producer",
    "Retention",
    "Reuse",
    "make_config",
    "read_config",
    "with_aliases",
    "with_concurrency",
    "with_name",
    "with_zones",
)
