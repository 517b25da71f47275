"""Where workers run: work queues in, parts out.

A compute stack is made of a `DataStack`, whose work queues ring for shards, and of the workers'
image. It runs `tidemill worker` for every model of the configuration, as many as wait for nothing
in vain and none when there is no work, with the rights of `infra.permissions.worker`. Nothing else
knows how: a second one, on another service, needs no change in Data or Api.
"""
