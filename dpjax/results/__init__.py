"""Records, tables and figures."""
