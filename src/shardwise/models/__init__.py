"""The one transformer (Flax NNX) and its parts: config, positions, attention, embedding, head, cache."""
