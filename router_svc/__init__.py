"""The public door: admission, choice of a replica, retry, and streaming back."""
