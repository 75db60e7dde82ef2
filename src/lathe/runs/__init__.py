"""A run directory: creating, finding and reading it, and building what its configuration describes."""
