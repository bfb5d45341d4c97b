"""Heads: what reads a target's hidden states and drafts for that target only."""
