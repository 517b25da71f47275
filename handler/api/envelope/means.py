"""What requests are answered with: one driver a process, made when the first request needs it."""

from __future__ import annotations

from functools import cache

from handler.aws.sync import Aws

aws = cache(Aws)
