"""What `tierd doctor` looks at."""
