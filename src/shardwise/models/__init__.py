"""The one transformer (Flax NNX) and its parts: configuration, positions, attention, embedding, head, cache."""
