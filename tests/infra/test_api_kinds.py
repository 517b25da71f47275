"""Access to the API: by a custom domain, inside a VPC only, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.infra.compute.kinds import CERTIFICATE
from tests.infra.conftest import Synth, templates_of
from tests.infra.reading import Deployment, Template
from tidemill.handler.api.open_paths import PUBLIC

if TYPE_CHECKING:
    from aws_cdk import App

ENDPOINTS = ["vpce-0123456789abcdef0", "vpce-0123456789abcdef1"]
PRIVATE = {"api": "private", "vpc_endpoint_ids": ENDPOINTS}
OF_GATEWAYS = ("AWS::ApiGatewayV2::Api", "AWS::ApiGateway::RestApi")
INVOKE = "arn:aws:apigateway:eu-west-1:lambda:path/2015-03-31/functions/ApiFunction.Arn/invocations"


@pytest.fixture(scope="module")
def private(synth: Synth) -> Deployment:
    """Return a deployment whose API is inside a VPC."""
    return Deployment(synth(PRIVATE))


def only(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the one of what there is one of."""
    ((_, properties),) = found.items()
    return properties


def rest_api(found: Deployment) -> dict[str, Any]:
    """Return the properties of the private API."""
    return only(found.properties("AWS::ApiGateway::RestApi"))


def test_a_private_api_has_no_public_endpoint(
    private: Deployment, templates: dict[str, Template]
) -> None:
    """A public one has no private endpoint."""
    for found, kind in ((private, OF_GATEWAYS[1]), (Deployment(templates), OF_GATEWAYS[0])):
        assert [it for it in OF_GATEWAYS if found.resources(it)] == [kind]


def test_a_private_api_is_reached_through_its_endpoints_alone(private: Deployment) -> None:
    """Other sources are denied; its address is a name of the first endpoint's."""
    api = rest_api(private)
    assert api["EndpointConfiguration"] == {"Types": ["PRIVATE"], "VpcEndpointIds": ENDPOINTS}
    allowed, denied = api["Policy"]["Statement"]
    assert (allowed["Effect"], allowed["Resource"]) == ("Allow", "execute-api:/*")
    assert (denied["Effect"], denied["Resource"]) == ("Deny", "execute-api:/*")
    assert denied["Condition"] == {"StringNotEquals": {"aws:SourceVpce": ENDPOINTS}}
    host = f"PrivateApi-{ENDPOINTS[0]}.execute-api.eu-west-1.amazonaws.com"
    assert private.outputs("Api") == {"ApiUrl": f"https://{host}"}


def methods(found: Deployment) -> dict[tuple[str, str], str]:
    """Return how the methods of a private API authorise, by the path of each and its verb."""
    paths = {
        name: f"{it['ParentId'].partition('.')[0]}/{it['PathPart']}"
        for name, it in found.properties("AWS::ApiGateway::Resource").items()
    }
    return {
        (paths.get(it["ResourceId"], "/"), it["HttpMethod"]): it["AuthorizationType"]
        for it in found.properties("AWS::ApiGateway::Method").values()
    }


def test_every_path_of_a_private_api_leads_to_the_function(private: Deployment) -> None:
    """Bytes come as they are; refusals of the gateway have the form that clients read."""
    assert methods(private) == {("/", "ANY"): "NONE", ("PrivateApi/{proxy+}", "ANY"): "NONE"}
    for method in private.properties("AWS::ApiGateway::Method").values():
        assert method["Integration"] == {
            "IntegrationHttpMethod": "POST",
            "Type": "AWS_PROXY",
            "Uri": INVOKE,
        }
    assert rest_api(private)["BinaryMediaTypes"] == ["*/*"]
    refusals = {
        it["ResponseType"]: it
        for it in private.properties("AWS::ApiGateway::GatewayResponse").values()
    }
    errors = {}
    for kind, refusal in refusals.items():
        template = refusal["ResponseTemplates"]["application/json"]
        body = json.loads(template.replace("$context.error.messageString", '"Forbidden"'))
        assert set(body["error"]) == {"message", "type", "param", "code"}
        errors[kind] = (refusal.get("StatusCode"), body["error"]["type"])
    assert errors == {
        "THROTTLED": ("429", "rate_limit_error"),
        "DEFAULT_4XX": (None, "invalid_request_error"),
        "DEFAULT_5XX": (None, "server_error"),
    }
    permission = only(private.properties("AWS::Lambda::Permission"))
    assert permission["Principal"] == "apigateway.amazonaws.com"
    assert permission["SourceArn"].endswith(":PrivateApi/*")


def test_a_stage_is_the_first_part_of_the_paths_that_clients_know(private: Deployment) -> None:
    """Each has the limit of requests; the top-level routes of the public API do not exist."""
    from infra.api.private_api import STAGES

    stages = private.properties("AWS::ApiGateway::Stage").values()
    assert {it["StageName"] for it in stages} == set(STAGES)
    assert {path.split("/")[1] for path in PUBLIC} <= {*STAGES, "", "openapi.json"}
    for stage in stages:
        [settings] = stage["MethodSettings"]
        assert settings["ThrottlingRateLimit"] == 500
    alarm = private.properties("AWS::CloudWatch::Alarm")["ApiServerErrors"]
    assert alarm["MetricName"] == "5XXError"
    assert alarm["Dimensions"] == [{"Name": "ApiName", "Value": rest_api(private)["Name"]}]


def test_a_private_api_takes_signatures(synth: Synth) -> None:
    """Only the page needs none, and the policy grants callers no more than their own."""
    signed = Deployment(synth(PRIVATE | {"auth": "iam"}))
    assert methods(signed) == {
        ("/", "GET"): "NONE",
        ("/", "HEAD"): "NONE",
        ("PrivateAssets/{proxy+}", "GET"): "NONE",
        ("PrivateAssets/{proxy+}", "HEAD"): "NONE",
        ("PrivateApi/{proxy+}", "ANY"): "AWS_IAM",
    }
    allowed, _ = rest_api(signed)["Policy"]["Statement"]
    assert allowed["Resource"] == [
        f"execute-api:/{path}"
        for verb in ("GET", "HEAD")
        for path in (f"dashboard/{verb}/", f"dashboard/{verb}/assets/*", f"health/{verb}/")
    ]


def test_a_change_of_a_private_api_is_deployed(
    private: Deployment,
    synth: Synth,
    make_app: Callable[..., App],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deployment is a snapshot: another API has another, and so have other refusals of it."""
    from infra.api import private_api

    other = Deployment(synth(PRIVATE | {"auth": "iam"}))
    names = [set(it.resources("AWS::ApiGateway::Deployment")) for it in (private, other)]
    assert names[0] & names[1] == set()
    taken = only(other.resources("AWS::ApiGateway::Deployment"))["DependsOn"]
    refusals = other.resources("AWS::ApiGateway::GatewayResponse")
    assert len(taken) == len(methods(other)) + len(refusals)
    monkeypatch.setattr(private_api, "_REFUSALS", {})
    silent = Deployment(templates_of(make_app(PRIVATE)))
    assert set(silent.resources("AWS::ApiGateway::Deployment")) & names[0] == set()


def test_a_deployment_can_have_no_api(synth: Synth) -> None:
    """There is no function, gateway, graph or alarm; commands that need an API report it."""
    found = Deployment(synth({"api": "none"}))
    assert [it for it in OF_GATEWAYS if found.resources(it)] == []
    assert not [it for it in found.resources("AWS::Lambda::Function") if it.startswith("Api")]
    assert not [it for it in found.resources("AWS::CloudWatch::Alarm") if it.startswith("Api")]
    assert "AWS/ApiGateway" not in json.dumps(found.templates)
    assert found.outputs("Api") == {"NoApi": 'api = "none"'}


def test_the_kind_of_the_api_can_change(
    private: Deployment, templates: dict[str, Template], synth: Synth
) -> None:
    """No stack imports anything of a gateway, which CloudFormation would then not let go."""
    found = (private, Deployment(templates), Deployment(synth({"api": "none"})))
    exported = [
        {
            output["Export"]["Name"]
            for output in it.templates["Api"]["Outputs"].values()
            if "Export" in output
        }
        for it in found
    ]
    assert exported[0] == exported[1] == exported[2]


def test_a_domain_leads_to_the_api(revised: Deployment) -> None:
    """Clients use its name, which its owner points at the target."""
    found = revised
    named = only(found.properties("AWS::ApiGatewayV2::DomainName"))
    assert named["DomainName"] == "llm.example.com"
    [endpoint] = named["DomainNameConfigurations"]
    assert endpoint == {
        "CertificateArn": CERTIFICATE,
        "EndpointType": "REGIONAL",
        "SecurityPolicy": "TLS_1_2",
    }
    mapping = only(found.resources("AWS::ApiGatewayV2::ApiMapping"))
    assert found.plain(mapping["Properties"]["ApiId"]) == "HttpApi"
    assert mapping["Properties"]["Stage"] == "$default"
    assert [name.startswith("HttpStage") for name in mapping["DependsOn"]] == [True]
    assert found.outputs("Api") == {
        "ApiUrl": "https://llm.example.com",
        "DomainTarget": "HttpDomain.RegionalDomainName",
    }
