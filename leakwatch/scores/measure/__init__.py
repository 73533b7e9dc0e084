"""From samples to the numbers that scores are computed from."""
