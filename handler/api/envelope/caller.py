"""Who calls: a tenant, as the authorizer has found it; never what the request says itself."""

from __future__ import annotations

from aws_lambda_powertools.utilities.data_classes import APIGatewayProxyEventV2

from handler.batch.keys import DROP_TENANT


def tenant_of(event: APIGatewayProxyEventV2) -> str:
    """Return the caller's tenant; raises PermissionError for a request that nobody let in.

    Requests signed with IAM are all of the tenant that owns what is dropped into the bucket.
    """
    authorizer = event.request_context.authorizer
    found = (authorizer.get_lambda or {}).get("tenant") if authorizer else None
    if found:
        return str(found)
    if authorizer and authorizer.iam and authorizer.iam.user_arn:
        return DROP_TENANT
    raise PermissionError("the request has passed no authorizer")
