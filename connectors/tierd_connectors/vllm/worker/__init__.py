"""The worker's side: how blocks get from the engine's tensors to slots and back."""
