"""Plotly figures, the same for the report and for Weights & Biases."""
