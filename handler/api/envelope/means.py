"""What requests are answered with: one driver a process, made when the first request needs it."""

from __future__ import annotations

from functools import cache

from handler.aws.sync import Aws

aws = cache(Aws)

# Of the context of a request that is asked with HEAD, and answered as with GET.
IS_HEAD = "is_head"
