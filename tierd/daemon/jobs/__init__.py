"""Work that no request waits for, and what operators order."""
