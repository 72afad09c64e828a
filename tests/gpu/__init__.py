"""Checks of what only a GPU can show: `make gpu-test`. Not yet run on a GPU.

An engine's process (`engine`) shows its memory, the checks (`checks`) copy as the daemon does.
test_gpu_checks_on_host.py runs the same checks on host memory and on CUDA in host memory, so
that what reaches a GPU has run before.
"""
