"""The attention layer as `torch.nn` modules: projections, compressor, indexer, attention."""
