"""What changes from step to step: batches, key lists, slots and plans."""
