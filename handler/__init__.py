"""Cloud service: takes in uploads, runs batches and delivers results; everything but the engine.

Packages, top layer first; each imports only lower layers, which pyproject.toml enforces.

    lambdas     where each Lambda begins
    dashboard   the page for people            api        the routes for programs
    control     what comes next: a message, the schedule, a dead letter
    finalize    rows of all shards into results
    intake      a file checked and cut         worker     a shard claimed, run, committed
    outbound    hosts of clients: webhooks, presigned urls
    moves       one step of a batch            reading    what people see of it
    deployment  the resources that one deployment has
    objects     bytes in S3                    weights    a model's, from S3 to a disk
    tenants     keys, limits, secrets
    aws         the only place that speaks to AWS
    batch       values and pure functions      settings, metrics, errors, log
"""
