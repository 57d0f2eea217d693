"""Decentralized algorithms as init/step pairs."""
