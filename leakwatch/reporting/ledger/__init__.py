"""The append-only record of every measured value, and how it lies on disk."""
