"""The resources of one deployment: what every operation of ours begins with."""

from __future__ import annotations

import os
from functools import cache

from handler.aws.bucket import Bucket
from handler.aws.events import EventBus
from handler.aws.parameters import FleetPlans
from handler.aws.queues import Queue
from handler.aws.stores.files import FileStore
from handler.aws.stores.fleets import FleetStore
from handler.aws.stores.ledger import Ledger
from handler.aws.stores.overview import Overview
from handler.aws.stores.processes import ProcessStore
from handler.aws.stores.readings import ReadingStore
from handler.aws.stores.table import Table
from handler.aws.stores.uploads import UploadStore
from handler.aws.stores.usage import UsageStore
from handler.settings import Settings, read_settings
from handler.tenants.keys import KeyStore
from handler.tenants.limits import TenantLimits
from handler.tenants.tenants import TenantStore


class Deployment:
    """The resources of one deployment, as makers of operations."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.table = Table(settings.table)
        self.keys = KeyStore(settings.table)
        self.tenants = TenantStore(settings.table)
        self.usage = UsageStore(settings.table)
        self.limits = TenantLimits(self.tenants, self.usage, settings.limits)
        self.ledger = Ledger(settings.table)
        self.overview = Overview(settings.table)
        self.files = FileStore(settings.table)
        self.readings = ReadingStore(settings.table)
        self.uploads = UploadStore(settings.table)
        self.bucket = Bucket(settings.bucket)
        self.control = Queue(settings.control_queue)
        self.intake = Queue(settings.intake_queue or settings.control_queue)
        self.fleets = FleetStore(settings.table)
        self.processes = ProcessStore(settings.table)
        self.fleet_plans = FleetPlans(settings.fleets)
        self.work = {model: Queue(url) for model, url in settings.work_queues.items()}
        # What lines may say, and the model whose workers run each.
        self.models = {
            **settings.model_aliases,
            **settings.model_adapters,
            **{model: model for model in self.work},
        }
        self.events = EventBus(settings.event_bus)


@cache
def deployment() -> Deployment:
    """Return the deployment that this process belongs to."""
    return Deployment(read_settings(os.environ))
