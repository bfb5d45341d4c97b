"""Settings: each field in one place, with its default, its check and its help."""
