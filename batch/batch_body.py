"""Body of `POST /v1/batches`: types only, so that they are in the OpenAPI document.

Only the API loads it: a pydantic model takes thousands of calls to build.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tidemill.protocol.routes import ENDPOINTS

from .batch_request import (
    MAX_EXPIRY_SECONDS,
    MAX_IDEMPOTENCY_KEY_CHARS,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARS,
    MAX_URL_CHARS,
    MIN_EXPIRY_SECONDS,
)
from .model import MAX_PRIORITY

_Url = Annotated[
    str | None,
    Field(
        description="A public https URL that the rows are also PUT to.",
        json_schema_extra={"format": "uri", "maxLength": MAX_URL_CHARS},
    ),
]


class OutputExpiresAfter(BaseModel):
    """Expiry of the output and error files, in seconds after their creation."""

    model_config = ConfigDict(strict=True)

    anchor: Annotated[str, Field(json_schema_extra={"enum": ["created_at"]})]
    seconds: Annotated[
        int,
        Field(json_schema_extra={"minimum": MIN_EXPIRY_SECONDS, "maximum": MAX_EXPIRY_SECONDS}),
    ]


class BatchOptions(BaseModel):
    """Options of a new batch; a null parameter counts as missing."""

    model_config = ConfigDict(strict=True)

    completion_window: Annotated[
        str | None,
        Field(
            description="A number of minutes, hours or days, from 30m to 14d, such as 24h.",
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
            description="A public https URL to call at the end, instead of the tenant's webhook.",
            json_schema_extra={"format": "uri", "maxLength": MAX_URL_CHARS},
        ),
    ] = None
    on_invalid_line: Annotated[
        str | None, Field(json_schema_extra={"enum": ["fail", "skip", None]})
    ] = None
    max_cost: Annotated[
        float | None,
        Field(
            description="GPU cost limit: at the limit the batch expires with its finished rows.",
            json_schema_extra={"exclusiveMinimum": 0},
        ),
    ] = None
    strict_parameters: Annotated[
        bool | None,
        Field(description="Reject a file whose lines have unknown parameters."),
    ] = None
    escalate: Annotated[
        str | None,
        Field(description="Decide rows with an answer of a low confidence again with this model."),
    ] = None
    escalate_below: Annotated[
        float | None,
        Field(
            description="Escalate rows with an answer whose confidence is lower than this.",
            json_schema_extra={"exclusiveMinimum": 0, "maximum": 1},
        ),
    ] = None
    escalate_by: Annotated[
        str | None,
        Field(
            description="`chat` lets the second model generate its answers, after any reasoning.",
            json_schema_extra={"enum": ["decision", "chat"]},
        ),
    ] = None
    target_accuracy: Annotated[
        float | None,
        Field(
            description="Escalate below the confidence from which answers to the recipe's gold "
            "rows reach this accuracy.",
            json_schema_extra={"exclusiveMinimum": 0, "maximum": 1},
        ),
    ] = None
    priority: Annotated[
        int | None,
        Field(
            description="Order among the tenant's batches: a lower number runs first.",
            json_schema_extra={"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY, "default": 0},
        ),
    ] = None
    echo_fields: Annotated[
        list[str] | None,
        Field(description="Fields of a line next to its `body` that are copied to its row."),
    ] = None
    recipe: Annotated[
        dict[str, Any] | None,
        Field(
            description="If the file is a table, the keys of its recipe, as in NAME.recipe.toml.",
        ),
    ] = None
    idempotency_key: Annotated[
        str | None,
        Field(
            description="A repeated request with the same key returns the first request's batch.",
            json_schema_extra={"minLength": 1, "maxLength": MAX_IDEMPOTENCY_KEY_CHARS},
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """Return the parameters by name."""
        return self.model_dump()


class BatchRequest(BatchOptions):
    """A new batch; a null parameter counts as missing."""

    input_file_id: Annotated[
        str, Field(description="A file ID, or an s3:// URI of this bucket with a key under input/.")
    ]
    endpoint: Annotated[str, Field(json_schema_extra={"enum": list(ENDPOINTS)})]
