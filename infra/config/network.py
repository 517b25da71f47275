"""`[isolated]`: the settings of a network without a way out."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from infra.config.table import Table


class Isolated(Table):
    """Settings of an isolated network: VPC endpoints for AWS's services, in some of its zones.

    With `internet` there is a way to hosts that lines name, through a NAT gateway.
    """

    internet: bool = False
    endpoint_zones: Annotated[int, Field(ge=1, le=6)] = 1
