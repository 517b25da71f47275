"""Client of a Kubernetes API server: Jobs and pods of one namespace, over httpx.

Its methods are those that a `Call` to the service `kubernetes` names. Raises AwsError, whose code
is the reason in the server's Status; NotThere for a missing object.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from tidemill.net.backoff import retry

from ...errors import AwsError, NotThere

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_SECONDS: Final = 10.0
_RETRY_DELAYS_SECONDS: Final = (0.2, 1.0)
_RETRIED: Final = frozenset({429, 500, 502, 503, 504})
_NOT_FOUND: Final = 404
_MERGE_PATCH: Final = "application/merge-patch+json"


class NoCluster(Exception):
    """No API server is known, neither a pod's nor a given one; the message gives advice."""


class KubernetesClient:
    """Calls one API server; as a service account if it has a `token_file`, which rotates."""

    def __init__(
        self,
        url: str,
        *,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        retry_delays_seconds: tuple[float, ...] = _RETRY_DELAYS_SECONDS,
    ) -> None:
        self._token_file = token_file
        self._delays = retry_delays_seconds
        verify = ssl.create_default_context(cafile=str(ca_file)) if ca_file else True
        # No proxy from the environment: that is for AWS, and the server is inside the cluster.
        self._http = httpx.Client(
            base_url=url, timeout=_TIMEOUT_SECONDS, verify=verify, trust_env=False
        )

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def create_job(self, *, namespace: str, manifest: Mapping[str, Any]) -> Any:
        """Create a Job; a retry after success raises an error with the code AlreadyExists."""
        return self._send("create_job", "POST", _jobs(namespace), json=manifest)

    def list_jobs(self, *, namespace: str, **how: Any) -> Any:
        """Return a page of Jobs: `label_selector`, `limit`, `continue_token`."""
        return self._send("list_jobs", "GET", _jobs(namespace), params=_params(**how))

    def list_pods(self, *, namespace: str, **how: Any) -> Any:
        """Return a page of pods: `label_selector`, `limit`, `continue_token`."""
        path = f"/api/v1/namespaces/{quote(namespace)}/pods"
        return self._send("list_pods", "GET", path, params=_params(**how))

    def patch_job(self, *, namespace: str, name: str, patch: Mapping[str, Any]) -> Any:
        """Merge a patch into a Job."""
        path = f"{_jobs(namespace)}/{quote(name)}"
        headers = {"Content-Type": _MERGE_PATCH}
        return self._send("patch_job", "PATCH", path, json=patch, headers=headers)

    def delete_job(self, *, namespace: str, name: str, propagation_policy: str) -> Any:
        """Delete a Job, and its pod by the policy."""
        path = f"{_jobs(namespace)}/{quote(name)}"
        params = {"propagationPolicy": propagation_policy}
        return self._send("delete_job", "DELETE", path, params=params)

    def _send(self, what: str, method: str, path: str, **request: Any) -> Any:
        def attempt() -> httpx.Response:
            response = self._http.request(
                method, path, **{**request, "headers": self._headers(request)}
            )
            if response.status_code in _RETRIED:
                response.raise_for_status()
            return response

        try:
            response = retry(attempt, self._delays, httpx.HTTPError)
        except httpx.HTTPStatusError as exc:
            response = exc.response
        except httpx.HTTPError as exc:
            words = f"kubernetes {what}: {self._http.base_url} cannot be reached: {exc!r}"
            raise AwsError(words) from exc
        if not response.is_success:
            raise _error(response, what)
        return _json(response, what)

    def _headers(self, request: Mapping[str, Any]) -> dict[str, str]:
        headers = dict(request.get("headers") or {})
        if self._token_file is not None:
            try:
                token = self._token_file.read_text(encoding="utf-8").strip()
            except OSError as exc:
                raise AwsError(f"{self._token_file} cannot be read: {exc.strerror}") from exc
            headers["Authorization"] = f"Bearer {token}"
        return headers


def connect(environment: Mapping[str, str], url: str | None = None) -> KubernetesClient:
    """Return a client of this pod's cluster, or of the server at a URL; raises NoCluster."""
    if url is not None:
        return KubernetesClient(url)
    host, port = (environment.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
    if not host:
        raise NoCluster(
            "not running in a Kubernetes pod (KUBERNETES_SERVICE_HOST is not set): "
            "pass --api-server, for example --api-server http://127.0.0.1:8001 with `kubectl proxy`"
        )
    token_file = SERVICE_ACCOUNT / "token"
    if not token_file.exists():
        raise NoCluster(
            f"{token_file} not found: the pod needs a serviceAccountName, and its token mounted"
        )
    address = f"[{host}]" if ":" in host else host
    return KubernetesClient(
        f"https://{address}:{port or 443}",
        token_file=token_file,
        ca_file=SERVICE_ACCOUNT / "ca.crt",
    )


def own_namespace() -> str | None:
    """Return the namespace of this pod; None outside of a cluster."""
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _jobs(namespace: str) -> str:
    return f"/apis/batch/v1/namespaces/{quote(namespace)}/jobs"


def _params(
    *, label_selector: str, limit: int, continue_token: str | None = None
) -> dict[str, str]:
    more = {"continue": continue_token} if continue_token else {}
    return {"labelSelector": label_selector, "limit": str(limit), **more}


def _json(response: httpx.Response, what: str) -> Any:
    try:
        return response.json()
    except ValueError as exc:
        raise AwsError(f"kubernetes {what}: the reply is not JSON; is it an API server?") from exc


def _error(response: httpx.Response, what: str) -> AwsError:
    """Return the error of a Status: its message, and its reason as the code."""
    try:
        status = response.json()
        message, reason = status.get("message"), status.get("reason")
    except (ValueError, AttributeError):
        message, reason = None, None
    words = f"kubernetes {what}: {message or response.text[:500] or response.reason_phrase}"
    code = str(reason or response.status_code)
    if response.status_code == _NOT_FOUND and what in {"delete_job", "patch_job"}:
        return NotThere(words, aws_code=code)
    return AwsError(words, aws_code=code)
