"""AWS clients for the commands, and AWS errors as command-line errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from boto3.exceptions import Boto3Error
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's, not a subclass of OSError
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)

from tidemill.handler.aws.sync import aws_client
from tidemill.offline.console.errors import CliError, KeyRefused, Refused, Unreachable

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


def make_client(service: str, **options: Any) -> Any:
    """Return a client with the user's AWS settings; raises KeyRefused, Refused."""
    try:
        return aws_client(service, **options)
    except _NO_CREDENTIALS as exc:
        raise KeyRefused(f"no AWS credentials found: {exc}") from exc
    except NoRegionError as exc:
        raise Refused(
            "no AWS region is set: export AWS_REGION, or set one in your AWS profile"
        ) from exc
    # An invalid endpoint URL raises a bare ValueError.
    except (BotoCoreError, ValueError) as exc:
        raise Refused(f"the AWS settings are not valid: {exc}") from exc


@contextmanager
def aws_call(doing: str) -> Iterator[None]:
    """Translate AWS errors raised inside to KeyRefused, Unreachable or CliError."""
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
