"""Parity with transformers: stored logits (run everywhere), live comparisons (where torch is installed)."""
