"""`tierd explain`."""
