"""Training scripts, outside the runtime packages."""
