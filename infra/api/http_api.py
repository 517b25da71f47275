"""The HTTP API: one Lambda behind every route, which itself authenticates keys."""

from __future__ import annotations

import json
from typing import Literal

from aws_cdk import Duration
from aws_cdk import aws_apigatewayv2 as gateway
from aws_cdk import aws_apigatewayv2_authorizers as authorizers
from aws_cdk import aws_apigatewayv2_integrations as integrations
from aws_cdk import aws_certificatemanager as acm
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.config import Domain

# A runaway loop of one caller must not use up the account's Lambda concurrency.
# The limit of all tenants together, before authentication; each tenant also has separate limits.
REQUESTS_PER_SECOND, BURST = 500, 1000
# Limit for each page that needs no key: a flood is stopped before it reaches the Lambda.
_PUBLIC_REQUESTS_PER_SECOND, _PUBLIC_BURST = 50, 100
# Routes without a signature; handler/api/open_paths.py has the same list. None of them contains a
# tenant's data.
_PUBLIC = ("/", "/health", "/openapi.json", "/dashboard", "/dashboard/assets/{proxy+}")
# Logged fields of a request: never its headers or query, which may contain keys and signatures. The
# function's log has its tenant and the key's ID under the same request ID.
_LOGGED = {
    "request_id": "$context.requestId",
    "method": "$context.httpMethod",
    "route": "$context.routeKey",
    "path": "$context.path",
    "status": "$context.status",
    "latency_ms": "$context.responseLatency",
    "error": "$context.error.message",
}
ApiMetric = Literal["latency", "requests", "4xx", "5xx"]


class HttpApi(Construct):
    """Routes everything to `api`, which checks keys; with `signed`, only IAM-signed requests pass.

    The gateway's own error responses do not have OpenAI's format, and cannot be changed: so the
    gateway itself rejects no keys.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        api: lambda_.IFunction,
        signed: bool,
        access_logs: logs.ILogGroup,
        domain: Domain | None,
    ) -> None:
        super().__init__(scope, construct_id)
        self._domain = domain
        self.api = gateway.HttpApi(self, "Api", create_default_stage=False)
        self.stage = gateway.HttpStage(
            self,
            "Stage",
            http_api=self.api,
            stage_name="$default",
            auto_deploy=True,
            throttle=gateway.ThrottleSettings(rate_limit=REQUESTS_PER_SECOND, burst_limit=BURST),
        )
        stage = self.stage.node.default_child
        assert isinstance(stage, gateway.CfnStage)
        stage.access_log_settings = gateway.CfnStage.AccessLogSettingsProperty(
            destination_arn=access_logs.log_group_arn, format=json.dumps(_LOGGED)
        )
        integration = integrations.HttpLambdaIntegration("Lambda", api)
        methods = [gateway.HttpMethod.GET, gateway.HttpMethod.HEAD]
        for path in _PUBLIC:
            for route in self.api.add_routes(path=path, methods=methods, integration=integration):
                # The default stage must exist before it can be configured.
                assert isinstance(route.node.default_child, gateway.CfnRoute)
                stage.node.add_dependency(route.node.default_child)
        stage.route_settings = {
            f"{method.value} {path}": {
                "ThrottlingRateLimit": _PUBLIC_REQUESTS_PER_SECOND,
                "ThrottlingBurstLimit": _PUBLIC_BURST,
            }
            for method in methods
            for path in _PUBLIC
        }
        self.api.add_routes(
            path="/{proxy+}",
            methods=[gateway.HttpMethod.ANY],
            integration=integration,
            authorizer=authorizers.HttpIamAuthorizer() if signed else None,
        )

        # Target of the domain's CNAME or alias record.
        self.domain_target = self._add_domain(domain) if domain else None

    @property
    def url(self) -> str:
        """The address of the API: the `base_url` of the OpenAI SDK without `/v1`."""
        return f"https://{self._domain.name}" if self._domain else self.api.api_endpoint

    def metric(
        self, name: ApiMetric, *, period: Duration, statistic: str, label: str | None = None
    ) -> cloudwatch.Metric:
        """Return a metric of all requests."""
        of_api = {
            "latency": self.api.metric_latency,
            "requests": self.api.metric_count,
            "4xx": self.api.metric_client_error,
            "5xx": self.api.metric_server_error,
        }
        return of_api[name](period=period, statistic=statistic, label=label)

    def _add_domain(self, domain: Domain) -> str:
        certificate = acm.Certificate.from_certificate_arn(self, "Certificate", domain.certificate)
        name = gateway.DomainName(
            self,
            "Domain",
            domain_name=domain.name,
            certificate=certificate,
            security_policy=gateway.SecurityPolicy.TLS_1_2,
        )
        gateway.ApiMapping(self, "Mapping", api=self.api, domain_name=name, stage=self.stage)
        return name.regional_domain_name
