"""The terminal app: chat with live acceptance, round inspector, playground, methods."""
