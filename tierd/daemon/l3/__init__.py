"""Storage tiers: lookup, promotion, backup."""
