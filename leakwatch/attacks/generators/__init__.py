"""Attacks that search the inputs and weights of a generator instead of pixels."""
