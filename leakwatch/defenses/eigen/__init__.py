"""Noise that is shaped by the Jacobian of each sample.

``basis`` has its singular directions; ``allocations`` and ``row_norms`` say how a
budget is spread over them or over entries; ``input_space`` draws the noise as a change
of the image; ``noise`` is the defense.
"""
