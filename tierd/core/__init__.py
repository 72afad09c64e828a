"""Decisions of the daemon, without I/O, clock or event loop.

`host` is host memory as the daemon sees it, and `l2` has its parts. `l3` decides for storage
tiers. `states`, `effects` and `reasons` are the vocabulary of host memory.
"""
