"""AWS's own client for the commands, and what goes wrong with it in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from boto3.exceptions import Boto3Error
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - theirs, which is no OSError
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)

from cli.errors import CliError, KeyRefused, Refused, Unreachable
from handler.aws.sync import aws_client

_NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    SSOError,
    TokenRetrievalError,
)
_NO_RIGHT = frozenset(
    {
        "403",
        "AccessDenied",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
    }
)


def client_of(service: str, **options: Any) -> Any:
    """Return a client with the settings of whoever typed; raises Refused when they cannot work."""
    try:
        return aws_client(service, **options)
    except _NO_CREDENTIALS as exc:
        raise KeyRefused(f"there are no AWS credentials: {exc}") from exc
    except NoRegionError as exc:
        raise Refused(
            "no AWS region is set: export AWS_REGION, or set one in your AWS profile"
        ) from exc
    # An endpoint that is none is a bare ValueError.
    except (BotoCoreError, ValueError) as exc:
        raise Refused(f"the settings of AWS cannot work: {exc}") from exc


@contextmanager
def told(doing: str) -> Iterator[None]:
    """Say in words what AWS refuses; raises KeyRefused, Unreachable or CliError."""
    try:
        yield
    except _NO_CREDENTIALS as exc:
        raise KeyRefused(f"{doing} needs AWS credentials: {exc}") from exc
    except (HTTPClientError, ConnectionError, IncompleteReadError) as exc:
        raise Unreachable(f"{doing} failed: {exc}") from exc
    except ClientError as exc:
        code = exc.response["Error"]["Code"]
        if code in _NO_RIGHT:
            raise KeyRefused(f"{doing} is not allowed with these AWS credentials: {exc}") from exc
        if exc.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
            raise Unreachable(f"{doing} failed: {exc}") from exc
        raise CliError(f"{doing} failed: {exc}") from exc
    except (BotoCoreError, Boto3Error) as exc:
        raise CliError(f"{doing} failed: {exc}") from exc
