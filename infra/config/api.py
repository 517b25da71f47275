"""`vpc_endpoint_ids`, `[domain]` and `[oidc]`: how callers reach the API and authenticate."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from infra.config.table import Table

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_CERTIFICATE = r"arn:aws[a-z-]*:acm:[a-z0-9-]+:[0-9]{12}:certificate/[A-Za-z0-9-]+"
EndpointId = Annotated[str, StringConstraints(pattern=r"^vpce-[0-9a-f]{8,17}$")]


class Domain(Table):
    """The API's domain name and its certificate, in the deployment's region."""

    name: Annotated[str, StringConstraints(pattern=rf"^{_LABEL}(\.{_LABEL})+$")]
    certificate: Annotated[str, StringConstraints(pattern=rf"^{_CERTIFICATE}$")]


class Oidc(Table):
    """OIDC tokens accepted in addition to keys: their issuer, audience and tenant claim."""

    issuer: Annotated[
        str, StringConstraints(pattern=r"^https://[^\s?#@]+[^\s?#@/]/?$", max_length=512)
    ]
    audience: Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=512)]
    tenant_claim: Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=128)]
