"""Index of a shard's durable rows, or of its drafts; unreadable parts are logged and left out."""

from __future__ import annotations

from tidemill.batch.model import Shard
from tidemill.batch.parts import PartIndex

from ..aws.sync import Aws
from ..deployment import Deployment
from ..observability import logger


def index_parts(
    aws: Aws, deployment: Deployment, shard: Shard, *, are_drafts: bool = False
) -> PartIndex:
    """Return the index of a shard's parts; their lines run again if a part is unreadable."""

    def left_out(key: str, reason: str) -> None:
        logger.error("part unreadable", batch_id=shard.batch_id, key=key, reason=reason)

    return aws.run(
        deployment.bucket.index_parts(
            shard.batch_id, shard.number, left_out=left_out, are_drafts=are_drafts
        )
    )
