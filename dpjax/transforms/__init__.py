"""Optax gradient transformations on agent-stacked pytrees: clipping and noise."""
