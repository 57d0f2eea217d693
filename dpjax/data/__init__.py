"""Datasets, their cache, partitions over agents, and batches."""
