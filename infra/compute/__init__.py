"""Compute stacks for the workers: work queues in, parts out.

A compute stack is made of a `DataStack`, whose work queues ring for shards, of an `ApiStack`, whose
Lambdas start workers, and of the workers' image. It makes what `tidemill worker` is started from
for every model of the configuration, and says so in a parameter that the Lambdas read
(`infra.fleets`); nothing in it runs by itself. Workers have the rights of
`infra.permissions.worker` and the variables of `DataStack.worker_settings`.

Nothing else knows how workers run: the rights of those who start them are a policy of this stack.
"""
