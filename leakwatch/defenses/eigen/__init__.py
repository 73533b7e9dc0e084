"""Noise along the Jacobian's singular vectors: bases and how a budget is allocated."""
