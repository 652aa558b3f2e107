"""Kernels in Triton for every GPU that it knows: SM80 and up."""
