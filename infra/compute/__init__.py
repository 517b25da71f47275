"""Where workers run: work queues in, parts out.

A compute stack is made of a `DataStack`, whose work queues ring for shards, and of the workers'
image. It runs `tidemill worker` for every model of the configuration: as many as its shards can
keep busy, up to `max_workers`, and none while there are no shards. Each has the rights of
`infra.permissions.worker` and the variables of `DataStack.settings`. The stack gives `running`,
which maps each model to the metric that counts its workers; the dashboard shows it.

Nothing else knows how workers run: a second stack, on another service, changes nothing in Data or
Api but `TIDEMILL_SERVICES`, by which intake starts the first worker sooner than scaling would.
"""
