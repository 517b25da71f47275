"""Published objects of a batch's rows, pinned, and their rows as streams."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial

from tidemill.batch.model import Batch, Source
from tidemill.batch.result_kinds import KINDS, ResultKind

from ..aws.calls import Operation
from ..aws.objects.stream import LineStream, ObjectStream
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere


def row_sources(
    deployment: Deployment, batch: Batch, kinds: Sequence[ResultKind] = KINDS
) -> Operation[list[Source]]:
    """Return the published objects of rows, pinned; raises NotThere for a deleted one."""
    bucket, sources = deployment.bucket, []
    for kind in kinds:
        file_id = kind.field(batch, "file_id")
        if file_id is None:
            continue
        file = yield from deployment.files.get_file(file_id)
        found = (yield from bucket.head(file.key, file.version_id)) if file else None
        if file is None or found is None:
            raise NotThere(f"the {kind.name} file {file_id} of batch {batch.id}")
        etag, num_bytes = found["ETag"], found["ContentLength"]
        sources.append(Source(bucket.name, file.key, etag, num_bytes, file.version_id))
    return sources


def open_rows(
    aws: Aws, stack: ExitStack, sources: Sequence[Source], look: Callable[[], None] = lambda: None
) -> list[Iterator[bytes]]:
    """Return the rows of each object; the stack closes their connections."""

    def rows_of(source: Source) -> Iterator[bytes]:
        stream = stack.enter_context(closing(ObjectStream(aws, source)))
        return iter(partial(LineStream(stream, look=look).readline, sys.maxsize), b"")

    return [rows_of(source) for source in sources]
