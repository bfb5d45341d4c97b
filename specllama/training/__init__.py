"""Training of draft heads for a model file: its own replies, read and learned from."""
