"""A run behind HTTP: worker processes with batches of whatever requests come together."""
