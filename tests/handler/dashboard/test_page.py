"""The page and its files, without a browser: what everybody gets, and under which headers."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localstack.ministack import environment_for
from tests.handler.api.rig import answer_to, refusal_in, request_of
from tidemill.dashboard.assets import assets, version
from tidemill.handler.api.envelope.caller import aws
from tidemill.handler.deployment import deployment

ROOT = Path(__file__).parents[3]
PUBLIC = ["/dashboard", f"/dashboard/assets/{version()}/app.js"]
VIEWS = ["session", "batches", "batches/batch_1", "month"]


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Give the Lambda an unreachable deployment."""
    for name in ("TABLE", "BUCKET", "CONTROL_QUEUE"):
        monkeypatch.setenv(f"TIDEMILL_{name}", "drops")
    for name, value in environment_for("http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    for cached in (deployment, aws):
        cached.cache_clear()
    yield monkeypatch
    for cached in (deployment, aws):
        cached.cache_clear()


def reply_to(path: str, *, encoding: str = "") -> dict[str, Any]:
    """Return the answer to a request without a key."""
    event = request_of(path)
    del event["headers"]["authorization"]
    event["headers"]["accept-encoding"] = encoding
    return answer_to(event)


def test_the_address_of_the_api_leads_to_the_page() -> None:
    """A browser needs nothing but the API's address."""
    answer = reply_to("/")
    assert (answer["statusCode"], answer["headers"]["Location"]) == (307, "/dashboard")
    assert "/dashboard" in answer["body"]


@pytest.mark.parametrize("path", PUBLIC)
def test_the_page_keeps_to_itself(path: str) -> None:
    """It loads only from its origin, runs no inline script, and cannot be framed."""
    answer = reply_to(path)
    assert answer["statusCode"] == 200
    headers = answer["headers"]
    rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == "'self'"
    assert rules["connect-src"] == "'self' https://drops.s3.us-east-1.amazonaws.com"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_the_page_has_no_text_that_runs_and_loads_nothing_from_elsewhere() -> None:
    """The policy above would stop both; the page needs neither."""
    body = reply_to("/dashboard")["body"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", body)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", body))
    found = re.findall(r'(?:src|href)="([^"#]+)"', body)
    assert len(found) > 3
    assert all(re.fullmatch(rf"/dashboard/assets/{version()}/[\w.]+", name) for name in found)
    for name in found:
        assert reply_to(name)["statusCode"] == 200


def test_files_are_kept_for_ever_and_come_compressed() -> None:
    """Their digest is in their path, so that another version has another."""
    path = f"/dashboard/assets/{version()}/tidemill.css"
    answer = reply_to(path, encoding="br, gzip")
    assert answer["headers"]["Cache-Control"] == "public, max-age=31536000, immutable"
    assert answer["headers"]["Content-Encoding"] == "gzip"
    assert answer["headers"]["Vary"] == "Accept-Encoding"
    packed = b64decode(answer["body"])
    assert gzip.decompress(packed).decode() == reply_to(path)["body"] == assets()["tidemill.css"]
    assert len(packed) < 20_000
    assert reply_to("/dashboard")["headers"]["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/assets/0000000000000000/app.js",
        f"/dashboard/assets/{version()}/none.js",
        f"/dashboard/assets/{version()}/..%2Fpage.py",
        f"/dashboard/assets/{version()}/%2e%2e",
        "/dashboard/assets/app.js",
    ],
)
def test_a_file_that_is_not_there(path: str) -> None:
    """Another version's file is not found: no cache may store it under a wrong digest."""
    event = request_of(path)
    event["headers"].pop("accept-encoding")
    assert refusal_in(answer_to(event))[0] == 404


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_requires_a_key(view: str) -> None:
    """The page then shows the sign-in form."""
    assert refusal_in(reply_to(f"/dashboard/view/{view}"))[0] == 401


def test_a_deployment_with_signed_requests_explains_itself(no_cloud: pytest.MonkeyPatch) -> None:
    """A browser cannot sign requests, so there is no sign-in form."""
    no_cloud.setenv("TIDEMILL_AUTH", "iam")
    deployment.cache_clear()
    body = reply_to("/dashboard")["body"]
    assert "Signed requests only" in body
    assert "<form" not in body


def test_no_other_request_pays_for_the_dashboard() -> None:
    """A start of the Lambda imports its routes alone: neither templates nor jinja2."""
    code = "import sys, tidemill.handler.lambdas.api; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = set(done.stdout.split())
    assert "tidemill.handler.dashboard.routes" in loaded
    ours = {name for name in loaded if "tidemill" in name and ".dashboard." in name}
    assert ours == {"tidemill.handler.dashboard.routes"}
    assert not loaded & {"jinja2", "markupsafe"}
