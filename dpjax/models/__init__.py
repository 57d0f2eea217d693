"""Flax modules and losses."""
