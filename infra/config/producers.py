"""`producers`: principals that may only put files into the bucket."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from infra.config.table import Table
from tidemill.batch.object_keys import TENANT

# An ARN that does not end in a wildcard: the principal must be named in full.
_PRINCIPAL = r"arn:aws[a-z-]*:iam::[0-9]{12}:(root|(role|user)/[A-Za-z0-9+=,.@_/-]{1,576})"


class Producer(Table):
    """A principal, for instance of another account, that may put files under `input/`.

    With a `tenant`, only in that tenant's folder.
    """

    arn: Annotated[str, StringConstraints(pattern=rf"^{_PRINCIPAL}$")]
    tenant: Annotated[str, StringConstraints(pattern=rf"^({TENANT})?$")] = ""
