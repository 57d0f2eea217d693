"""What `dpjax design` and `dpjax account` do: losses, multipliers and their reports."""
