"""Host memory (L2), and its adoption by the next incarnation of the daemon."""
