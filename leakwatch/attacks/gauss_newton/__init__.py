"""The second-order attacker: Levenberg–Marquardt on the difference of gradients.

- `attack`: the settings, and one run of waves from several starts.
- `levenberg_marquardt`: the iteration, for many attacks at once; `steps`: where each
  goes next, by a dense matrix or by products; `subproblems`: the quadratic models that
  a step minimises.
- `objective`: what is minimised, the posterior of an image, and its derivatives;
  `smoothed_relu`: rectifiers whose kinks these derivatives see.
"""
