"""Deployment: the table, bucket, queues and stores of one installation, built from settings."""

from __future__ import annotations

import os
from functools import cache

from .aws.bucket import Bucket
from .aws.events import EventBus
from .aws.parameters import FleetPlans
from .aws.queues import Queue
from .aws.stores.files import FileStore
from .aws.stores.fleets import FleetStore
from .aws.stores.intake_progress import IntakeProgressStore
from .aws.stores.ledger import Ledger
from .aws.stores.overview import Overview
from .aws.stores.processes import ProcessStore
from .aws.stores.table import Table
from .aws.stores.uploads import UploadStore
from .aws.stores.usage import UsageStore
from .settings import Settings, read_settings
from .tenants.keys import KeyStore
from .tenants.limits import TenantLimits
from .tenants.oidc import TokenVerifier
from .tenants.refusals import Refusals
from .tenants.tenants import KnownTenants, TenantStore


class Deployment:
    """Resources of one deployment, through objects that create operations.

    `service` names this process in the metrics of fleets; None uses the environment's name.
    """

    def __init__(self, settings: Settings, *, service: str | None = None) -> None:
        self.settings, self.service = settings, service
        self.table = Table(settings.table)
        self.keys = KeyStore(settings.table)
        self.refusals = Refusals()
        self.tokens = TokenVerifier(settings.oidc) if settings.oidc else None
        self.tenants = TenantStore(settings.table)
        self.usage = UsageStore(settings.table)
        self.known_tenants = KnownTenants(self.tenants)
        self.limits = TenantLimits(
            self.known_tenants, self.usage, settings.limits, settings.gpu_hours_per_day
        )
        self.ledger = Ledger(settings.table)
        self.overview = Overview(settings.table)
        self.files = FileStore(settings.table)
        self.intake_progress = IntakeProgressStore(settings.table)
        self.uploads = UploadStore(settings.table)
        self.bucket = Bucket(settings.bucket)
        self.control = Queue(settings.control_queue)
        self.intake = Queue(settings.intake_queue or settings.control_queue)
        self.drops = Queue(settings.drops_queue or settings.control_queue)
        self.fleets = FleetStore(settings.table)
        self.processes = ProcessStore(settings.table)
        self.fleet_plans = FleetPlans(settings.fleets)
        self.work = {model: Queue(url) for model, url in settings.work_queues.items()}
        # Maps the model names that requests may use to the model whose workers run them.
        self.models = {
            **settings.model_aliases,
            **settings.model_adapters,
            **{model: model for model in self.work},
        }
        self.events = EventBus(settings.event_bus)


@cache
def deployment() -> Deployment:
    """Return the deployment of this process."""
    return Deployment(read_settings(os.environ))
