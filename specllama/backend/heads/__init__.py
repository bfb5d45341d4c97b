"""Heads: drafters that read a target's hidden states and serve that target only."""
