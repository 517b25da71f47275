"""The OpenAPI document: it is served, kept, whole, and says of errors what is true."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openapi_spec_validator import validate

from localstack.processes import ROOT
from tests.handler.api.rig import answer_to, request_of
from tidemill.handler.api.app import app
from tidemill.handler.api.document import document, text


@pytest.fixture(scope="module")
def operations() -> dict[str, dict[str, Any]]:
    """Return all operations by method and path."""
    return {
        f"{method.upper()} {path}": operation
        for path, item in document(app)["paths"].items()
        for method, operation in item.items()
    }


def test_the_kept_document_is_that_of_the_routes() -> None:
    """After a change of a route, run `make openapi`."""
    assert (ROOT / "docs/reference/openapi.json").read_text(encoding="utf-8") == text(app)


def test_the_document_is_valid() -> None:
    """OpenAPI's own schema validates it."""
    validate(document(app))


def test_the_document_is_served_without_a_key() -> None:
    """Serving it calls no AWS service."""
    event = request_of("/openapi.json")
    del event["headers"]["authorization"]
    del event["headers"]["accept-encoding"]
    answer = answer_to(event)
    assert answer["statusCode"] == 200
    assert json.loads(answer["body"]) == document(app)


def test_all_routes_except_the_dashboards_are_documented(
    operations: dict[str, dict[str, Any]],
) -> None:
    """Only `include_in_schema=False` hides a route."""
    routes = [*app._static_routes, *app._dynamic_routes]
    hidden = {route.openapi_path for route in routes if not route.include_in_schema}
    assert all(
        path in {"/", "/openapi.json", "/dashboard"} or path.startswith("/dashboard/")
        for path in hidden
    )
    assert len(operations) == sum(route.include_in_schema for route in routes)


def test_operations_have_names_words_and_answers(operations: dict[str, dict[str, Any]]) -> None:
    """Code generators and readers need them; no name of Powertools is left."""
    names = [operation["operationId"] for operation in operations.values()]
    assert len(set(names)) == len(names)
    for name, operation in operations.items():
        assert operation["summary"], name
        assert len(operation["tags"]) == 1, name
        assert {"400", "404", "500"} < set(operation["responses"]), name
        assert "422" not in operation["responses"], name
        is_public = operation.get("security") == []
        assert is_public is ("401" not in operation["responses"]), name
    assert {name for name, found in operations.items() if found.get("security") == []} == {
        "GET /health"
    }
    assert not {"HTTPValidationError", "ValidationError"} & set(
        document(app)["components"]["schemas"]
    )
    assert all(name.isalnum() for name in document(app)["components"]["schemas"])


def test_what_is_made_leads_on_by_its_id(operations: dict[str, dict[str, Any]]) -> None:
    """Links lead to every path that takes such an ID, and from a file to a batch."""
    links = operations["POST /v1/files"]["responses"]["200"]["links"]
    assert set(links) == {"retrieveFile", "deleteFile", "fileContent", "makeBatch"}
    assert links["deleteFile"]["parameters"] == {"file_id": "$response.body#/id"}
    names = {operation["operationId"] for operation in operations.values()}
    for operation in operations.values():
        for answer in operation["responses"].values():
            assert set(answer.get("links", ())) <= names


def test_answers_have_a_type(operations: dict[str, dict[str, Any]]) -> None:
    """A generated client therefore knows every field."""
    for name, operation in operations.items():
        for status, answer in operation["responses"].items():
            if status.startswith("2"):
                (content,) = answer["content"].values()
                assert content["schema"], name
