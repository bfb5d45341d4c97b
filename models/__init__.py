"""Model files: references, headers, pairing, memory, downloads, the bundled family."""
