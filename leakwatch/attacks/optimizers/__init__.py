"""First-order descent on pixels, for many independent attacks at once.

- `first_order`: Adam, gradient descent, schedules, and the settings of a descent;
  `lbfgs`: L-BFGS with a line search for each attack.
- `descent`: the loop over steps, for any objective; `state`: points, the best so far,
  and the way back from where numbers are not finite.
"""
