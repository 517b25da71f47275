"""What `POST /v1/batches` takes: OpenAI's parameters, and ours by `extra_body`.

Only the kinds of values are looked at here, so that the OpenAPI document tells them; what they may
say is checked where batches are made. What has another name is ignored, as by OpenAI.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from engine.protocol.routes import ROUTES
from handler.batch.options import (
    MAX_EXPIRY_SECONDS,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARS,
    MAX_URL_CHARS,
    MIN_EXPIRY_SECONDS,
)
from handler.intake.create import MAX_IDEMPOTENCY_KEY_CHARS

_Url = Annotated[
    str | None,
    Field(
        description="A public https url that the rows are PUT to as well.",
        json_schema_extra={"format": "uri", "maxLength": MAX_URL_CHARS},
    ),
]


class OutputExpiresAfter(BaseModel):
    """When the output and error files are forgotten: so long after they were made."""

    model_config = ConfigDict(strict=True)

    anchor: Annotated[str, Field(json_schema_extra={"enum": ["created_at"]})]
    seconds: Annotated[
        int,
        Field(json_schema_extra={"minimum": MIN_EXPIRY_SECONDS, "maximum": MAX_EXPIRY_SECONDS}),
    ]


class BatchRequest(BaseModel):
    """A new batch; a parameter that is null counts as not there."""

    model_config = ConfigDict(strict=True)

    input_file_id: Annotated[
        str, Field(description="A file's id, or s3:// with our bucket and a key under input/.")
    ]
    endpoint: Annotated[str, Field(json_schema_extra={"enum": [known.name for known in ROUTES]})]
    completion_window: Annotated[
        str | None,
        Field(
            description="24h, or any number of minutes, hours or days: 30m to 14d.",
            json_schema_extra={"pattern": "^[1-9][0-9]*[mhd]$"},
        ),
    ] = None
    metadata: Annotated[
        dict[str, str] | None,
        Field(
            json_schema_extra={
                "maxProperties": MAX_METADATA_PAIRS,
                "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARS},
                "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE_CHARS},
            }
        ),
    ] = None
    output_expires_after: OutputExpiresAfter | None = None
    output_url: _Url = None
    error_url: _Url = None
    webhook_url: Annotated[
        str | None,
        Field(
            description="A public https url that is told of the end, instead of the tenant's.",
            json_schema_extra={"format": "uri", "maxLength": MAX_URL_CHARS},
        ),
    ] = None
    on_invalid_line: Annotated[
        str | None, Field(json_schema_extra={"enum": ["fail", "skip", None]})
    ] = None
    idempotency_key: Annotated[
        str | None,
        Field(
            description="A repeated request with the same key returns the batch of the first.",
            json_schema_extra={"minLength": 1, "maxLength": MAX_IDEMPOTENCY_KEY_CHARS},
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """Return the parameters by name."""
        return self.model_dump()
