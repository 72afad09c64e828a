"""`tierd doctor`."""
