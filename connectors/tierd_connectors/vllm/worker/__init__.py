"""The worker's side: copies of blocks between the engine's tensors and slots."""
