"""What a definition of the community is made of, read from its configuration alone."""
