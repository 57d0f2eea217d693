"""Noise design: one convex problem, its solver, and the designs over agents."""
