"""Inputs, cases and comparisons shared by tests, `check` and `bench`."""
