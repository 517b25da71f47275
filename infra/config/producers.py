"""`producers`: who may put files into the bucket, and do nothing else."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from infra.config.table import Table
from tidemill.batch.object_keys import TENANT

# An ARN that does not end in a wildcard: the principal must be named in full.
_PRINCIPAL = r"arn:aws[a-z-]*:iam::[0-9]{12}:(root|(role|user)/[A-Za-z0-9+=,.@_/-]{1,576})"


class Producer(Table):
    """A principal, of another account for instance, that may put files under `input/`.

    With a `tenant`, in the folder of that tenant alone.
    """

    arn: Annotated[str, StringConstraints(pattern=rf"^{_PRINCIPAL}$")]
    tenant: Annotated[str, StringConstraints(pattern=rf"^({TENANT})?$")] = ""
