"""A run and its directory: where it lies, what it is built of, and how a finished one is opened again."""
