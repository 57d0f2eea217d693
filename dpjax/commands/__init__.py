"""What `dpjax design`, `dpjax account`, `dpjax plot` and `dpjax data` do."""
