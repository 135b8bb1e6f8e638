"""Command line and Day-0 tools of day0; imports every layer below, and nothing imports it."""
