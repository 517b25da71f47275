"""Compute stacks for the workers: work queues in, parts out.

A compute stack needs a `DataStack` (its work queues announce shards), an `ApiStack` (its Lambdas
start workers) and the workers' image. For every model of the configuration it creates a launch
configuration for `tidemill worker`, and publishes it in a parameter that the Lambdas read
(`infra.fleets`); nothing in it runs by itself. Workers have the permissions of
`infra.permissions.worker` and the variables of `DataStack.worker_settings`.

No other module knows how workers run: the permissions to start them are a policy of this stack.
"""
