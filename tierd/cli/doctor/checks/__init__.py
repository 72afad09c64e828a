"""The checks of `tierd doctor`."""
