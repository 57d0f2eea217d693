"""Exchanges under encryption: agents compute with numbers that they cannot read."""
