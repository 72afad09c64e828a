"""`tierd warm`."""
