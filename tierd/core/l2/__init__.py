"""The parts of host memory (L2), which `tierd.core.host.HostTier` composes, and its limit."""
