"""A small engine: request lists, continuous batching, runs."""
