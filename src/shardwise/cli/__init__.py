"""The command line: one thin file per verb; the work itself is done elsewhere.

Nothing in this package imports JAX, transformers or tokamax until a verb's options are read and good.
"""
