"""The decoder: configuration, positions, attention, blocks, cache, generation, checkpoints."""
