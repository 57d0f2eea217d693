"""What a plan is about: the problem, its clipped gradients, batches and trained leaves."""
