"""leakwatch inside of other frameworks; each needs the extra of its name."""
