"""Config and its parts, made into plans: here alone algorithms and accounting meet."""
