"""Graphs, mixing matrices and gossip."""
