"""`tierd bench`."""
