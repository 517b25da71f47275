"""S3-compatible store: the endpoint and the options of S3 clients that do not use AWS's own S3.

AWS's own variables and profiles configure it; only a profile for S3 alone is an addition.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import md5
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's, which is not an OSError
    HTTPClientError,
    SSLError,
)
from botocore.session import Session

PROFILE_VARIABLE: Final = "TIDEMILL_STORE_PROFILE"
"""The AWS profile of S3 clients alone: endpoint, region and keys of an S3-compatible store."""

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_AWS_DOMAINS = ("amazonaws.com", "amazonaws.com.cn", "api.aws", "amazonaws.eu")
# Stores reject checksums in headers and trailers that AWS's clients have sent since 2025. Bodies
# are still signed by their SHA-256. Without an addressing style, clients put the bucket into the
# path if an endpoint is set.
_FOREIGN_OPTIONS: Final[Mapping[str, Any]] = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
_DELETES = "before-sign.s3.DeleteObjects"
_KEYS = "its keys or its region differ from those configured here"
_HOST_NAMES = (
    "it requires the bucket in the host name: set addressing_style = virtual in the s3 section of "
    "the AWS profile"
)
_REASONS: Final[Mapping[str, str]] = {
    "403": _KEYS,
    "500": "it has failed, or the port belongs to another server, such as a console",
    "AuthorizationHeaderMalformed": _KEYS,
    "InvalidAccessKeyId": _KEYS,
    "NoSuchBucket": "it has no such bucket",
    "NotImplemented": "it does not support this operation or one of its options",
    "PathStyleDomainForbidden": _HOST_NAMES,
    "SecondLevelDomainForbidden": _HOST_NAMES,
    "SignatureDoesNotMatch": _KEYS,
    "VirtualHostDomainRequired": _HOST_NAMES,
}
_PATHS = (
    "; addressing_style = virtual puts the bucket into the host name, which many stores do not "
    "support: try addressing_style = path"
)


class BadEndpoint(BotoCoreError):  # type: ignore[misc]
    """An endpoint that is not a URL with a host."""

    fmt = "Invalid endpoint: {endpoint_url} (write http(s)://host or http(s)://host:port)"


@dataclass(frozen=True, slots=True)
class S3Store:
    """The store that this process's S3 clients use; None leaves a value to AWS's defaults."""

    profile: str | None = None
    region: str | None = None
    endpoint_url: str | None = None
    addressing_style: Literal["path", "virtual"] = "virtual"

    @property
    def is_aws(self) -> bool:
        """Return whether this is AWS's own S3, whatever the endpoint."""
        if self.endpoint_url is None:
            return True
        host = urlsplit(self.endpoint_url).hostname or ""
        return any(host.endswith(f".{domain}") for domain in _AWS_DOMAINS)

    @property
    def client_options(self) -> dict[str, Any]:
        """Options that replace those of a client at AWS, in a new dict that botocore may modify."""
        if self.is_aws:
            return {}
        return {**_FOREIGN_OPTIONS, "s3": {"addressing_style": self.addressing_style}}

    def prepare(self, client: Any) -> None:
        """Let a client delete many objects with the older checksum, which all stores support."""
        if not self.is_aws:
            client.meta.events.register(_DELETES, _use_md5)

    def __str__(self) -> str:
        return "S3" if self.endpoint_url is None else self.endpoint_url


def find_store(environment: Mapping[str, str] = os.environ) -> S3Store:
    """Return the configured store; raises BotoCoreError if the profile is missing.

    Variables take precedence over the profile, a service's over the general, as in AWS's clients.
    """
    profile = environment.get(PROFILE_VARIABLE) or None
    session = Session(profile=profile)
    settings = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(settings.get("services", ""), {})
    named = (
        *(environment.get(name) for name in _ENDPOINT_VARIABLES),
        services.get("s3", {}).get("endpoint_url"),
        settings.get("endpoint_url"),
    )
    endpoint_url = next(filter(None, named), None)
    if endpoint_url is not None:
        _check_endpoint(endpoint_url)
    style = settings.get("s3", {}).get("addressing_style")
    return S3Store(
        profile=profile,
        region=settings.get("region") if profile else None,
        endpoint_url=endpoint_url,
        addressing_style="virtual" if style == "virtual" else "path",
    )


def explain(error: ClientError | BotoCoreError) -> str:
    """Return a hint on an error of a store, in parentheses; empty for AWS's own S3."""
    if (reason := _reason(error)) is None:
        return ""
    try:
        store = find_store()
    except BotoCoreError:
        return ""
    if store.is_aws:
        return ""
    is_doubtful = store.addressing_style == "virtual" and reason != _KEYS
    return f" (the store is {store}: {reason}{_PATHS if is_doubtful else ''})"


def _reason(error: ClientError | BotoCoreError) -> str | None:
    if isinstance(error, ClientError):
        return _REASONS.get(str(error.response.get("Error", {}).get("Code")))
    if isinstance(error, SSLError):
        return "its certificate is not trusted: set AWS_CA_BUNDLE to the CA's certificates"
    if isinstance(error, ConnectionError | HTTPClientError):
        return "it does not respond"
    return None


def _check_endpoint(url: str) -> None:
    """Raise BadEndpoint for a string that is not a URL with a host."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise BadEndpoint(endpoint_url=url)


def _use_md5(request: Any, **_: Any) -> None:
    """Replace a request's checksum by the MD5 of its body."""
    for name in [name for name in request.headers if name.lower().startswith("x-amz-checksum-")]:
        del request.headers[name]
    del request.headers["x-amz-sdk-checksum-algorithm"]
    del request.headers["Content-MD5"]
    digest = md5(request.body, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = b64encode(digest).decode()
