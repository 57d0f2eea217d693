"""What is guaranteed, to whom, and how it was computed."""
