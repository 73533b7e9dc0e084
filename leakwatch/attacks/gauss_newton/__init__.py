"""The second-order attacker: Levenberg–Marquardt on the distance of gradients."""
