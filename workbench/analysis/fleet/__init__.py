"""Several replicas behind a router, simulated: each replica is an exact scheduler with its own clock."""
