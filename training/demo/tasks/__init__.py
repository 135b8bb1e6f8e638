"""The demo model's tasks, one family a file."""
