"""The integer code of sums: the lattice, what one client does in NumPy, and many in jit."""
