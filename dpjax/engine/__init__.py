"""From a plan to a run: scan, checkpoint, resume, keys, sharding."""
