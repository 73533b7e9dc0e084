"""Attacks on weight updates after many local steps: SME and simulation."""
