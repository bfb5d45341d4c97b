"""Loaded models and the conversations they serve."""
