"""Serves a run over HTTP, with dynamic batching in worker processes."""
