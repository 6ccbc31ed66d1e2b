"""What a process needs around JAX: devices, several processes, memory allocation, the compile cache.

Not here: meshes and shardings (partition/). Modules of this package import JAX only inside functions.
"""
