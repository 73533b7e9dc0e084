"""Scores of weight updates after local training."""
