"""`tierd top`."""
