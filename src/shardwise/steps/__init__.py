"""Compiled steps: build_step(plan, workload), losses, sampling, optimizers."""
