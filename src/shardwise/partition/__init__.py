"""Meshes, rules, padding and the Plan that they make; knows tensors by name, shape and logical axes only."""
