"""Whether a prompt's answer is the same however the work on it is cut, cached, moved and shared."""
