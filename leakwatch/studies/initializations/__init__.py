"""Which initialisation leaks least?

``study`` runs it, ``measure`` gives its ``points``, ``ranking`` says which schemes can
be told apart; ``result`` and ``report`` show it.
"""
