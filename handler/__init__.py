"""Cloud service: takes in uploads, runs batches and delivers results; everything but the engine.

Packages, top layer first; each imports only lower layers, which pyproject.toml enforces.

    lambdas      entry point of each Lambda
        dashboard    web page for people          api        HTTP routes for programs
        control      next step of a batch, reaper, sweep, dead letters
        finalize     rows of all shards joined to results, webhooks
        fleet        starts and stops workers
        intake       checks a file and cuts it    worker     claims, runs and commits shards
        lifecycle    one step of a batch          queries    what clients read of a batch
        tenants      keys, limits, secrets
        aws          the only package that calls AWS
        deployment, settings, observability, errors
"""
