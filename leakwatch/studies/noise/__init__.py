"""How much noise is enough, and whom does the same noise protect worst?

``spectra`` keeps one spectrum per sample, from which both follow; ``required`` and
``check`` are the prediction and the attack behind ``recommendation``.
"""
