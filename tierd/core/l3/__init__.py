"""Decisions about storage tiers (L3), which know hashes, sizes and times, but no slots."""
