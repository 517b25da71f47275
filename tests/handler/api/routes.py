"""Every route of the API, and how to call it with the IDs of a tenant's objects.

A route that is missing from these tables fails the tests: every new route must be added here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.handler.api.open_paths import is_open
from tidemill.handler.lambdas.api import app

_PARAMETER = re.compile(r"<(\w+)>")


@dataclass(frozen=True, slots=True)
class Call:
    """Inputs of a route besides its path; texts in `{}` are names of IDs."""

    json: Mapping[str, Any] | None = None
    files: Mapping[str, tuple[str, bytes]] | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] | None = None

    def arguments(self, ids: Mapping[str, str]) -> dict[str, Any]:
        """Return what httpx sends of it."""
        found: dict[str, Any] = {} if self.params is None else {"params": self.params}
        if self.json is not None:
            found["json"] = _filled(self.json, ids)
        if self.files is not None:
            found |= {"files": self.files, "data": self.data}
        return found


_PART = {"data": ("x", b"12")}
# Routes whose path says whose thing they are about, by the id in it.
OF_ONE: Mapping[str, Call] = {
    "GET /v1/batches/<batch_id>": Call(),
    "POST /v1/batches/<batch_id>/cancel": Call(),
    "DELETE /v1/batches/<batch_id>": Call(),
    "GET /v1/batches/<batch_id>/history": Call(),
    "GET /v1/batches/<batch_id>/results": Call(),
    "GET /v1/files/<file_id>": Call(),
    "DELETE /v1/files/<file_id>": Call(),
    "GET /v1/files/<file_id>/content": Call(),
    "GET /v1/uploads/<upload_id>": Call(),
    "POST /v1/uploads/<upload_id>/parts": Call(files=_PART),
    "POST /v1/uploads/<upload_id>/urls": Call(json={"part_numbers": [1]}),
    "POST /v1/uploads/<upload_id>/complete": Call(json={"part_ids": ["{part_id}"]}),
    "POST /v1/uploads/<upload_id>/cancel": Call(),
    "GET /dashboard/view/batches/<batch_id>": Call(),
    "GET /dashboard/view/batches/<batch_id>/errors": Call(),
    "GET /dashboard/view/batches/<batch_id>/export": Call(params={"format": "csv"}),
    "GET /dashboard/view/batches/<batch_id>/first-rows": Call(),
    "GET /dashboard/view/batches/<batch_id>/requests": Call(),
    "GET /dashboard/view/batches/<batch_id>/rows": Call(),
    "GET /dashboard/view/batches/<batch_id>/retry": Call(),
    "POST /v1/batches/<batch_id>/retry": Call(json={}),
    "GET /dashboard/view/files/<file_id>/link": Call(),
}
# Routes that show, count or make what is the caller's own.
OF_ALL: Mapping[str, Call] = {
    "GET /v1/batches": Call(),
    "GET /v1/files": Call(),
    "GET /v1/stats": Call(),
    "GET /metrics": Call(),
    "GET /dashboard/view/batches": Call(),
    "GET /dashboard/view/session": Call(),
    "GET /dashboard/view/new": Call(),
    "GET /dashboard/view/month": Call(),
    "POST /dashboard/view/check": Call(json={"name": "x", "bytes": 2, "head": "e30="}),
    "POST /v1/files": Call(files={"file": ("mine.jsonl", b"{}")}, data={"purpose": "batch"}),
    "POST /v1/uploads": Call(json={"bytes": 9, "filename": "mine.jsonl", "purpose": "batch"}),
    "POST /v1/batches": Call(
        json={"input_file_id": "{file_id}", "endpoint": "/v1/chat/completions"}
    ),
}
# Routes that know nothing of tenants.
TENANTLESS = frozenset({"GET /v1/models", "GET /v1/models/.+"})
# Routes that take another ID in addition to the path: in the query `after`, or as the call does.
TAKING_IDS: Mapping[str, str] = {
    "GET /v1/batches": "batch_id",
    "GET /v1/files": "file_id",
    "GET /dashboard/view/batches": "batch_id",
    "POST /v1/batches": "file_id",
}


def all_routes() -> set[str]:
    """Return method and path of every route that the API has and that needs a key."""
    routes = (*app._static_routes, *app._dynamic_routes)
    return {
        f"{route.method} {route.path}"
        for route in routes
        if not is_open(_PARAMETER.sub("x", route.path))
    }


def path_with(route: str, ids: Mapping[str, str]) -> tuple[str, str]:
    """Return method and path of a route with ids in it."""
    method, _, path = route.partition(" ")
    return method, _PARAMETER.sub(lambda found: ids[found[1]], path).replace(".+", "tidemill-demo")


def _filled(value: Any, ids: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return value.format(**ids) if "{" in value else value
    if isinstance(value, Mapping):
        return {name: _filled(each, ids) for name, each in value.items()}
    return [_filled(each, ids) for each in value] if isinstance(value, list) else value
