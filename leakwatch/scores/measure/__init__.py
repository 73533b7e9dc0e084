"""From samples at a network to the spectrum of each, by the cheapest way.

``plan`` chooses the way: ``dense`` (one Gram matrix per sample tells everything),
``matrix_free`` (products with J and Jᵀ: ends, and through ``sampled`` sums), or
``power_iteration`` (the papers' recipe). Each turns ``inputs`` into one
``sample_spectrum`` per sample, which ``measure`` completes. ``gaussian_channel`` and
``influence_path`` tell how well the best estimator with a Gaussian prior recovers the
image, ``pixel_range`` what it gains by knowing the range of pixels.
"""
