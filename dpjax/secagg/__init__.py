"""Exchanges under encryption, and secure sums: who computes cannot read what it computes with."""
