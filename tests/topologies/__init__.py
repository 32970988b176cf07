"""What stands between an application and its database: poolers, replicas, clusters."""
