"""Checks that need a GPU: `make gpu-test`. Not yet run on a GPU.

An engine's process (`engine`) exports its memory, and the checks (`checks`) copy as the daemon
does. test_gpu_checks_on_host.py runs the same checks on host memory and on CUDA in host memory, so
that the checks themselves are tested before they reach a GPU.
"""
