"""From a config to a run: plan, scan, checkpoint, resume, sharding, command lines."""
