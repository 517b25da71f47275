"""Where every process of the cloud logs: one JSON line an event, with the batch it is about."""

from __future__ import annotations

from aws_lambda_powertools import Logger

logger = Logger(service="tidemill")
