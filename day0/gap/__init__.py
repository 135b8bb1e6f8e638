"""What stands between a definition and production on a device."""
