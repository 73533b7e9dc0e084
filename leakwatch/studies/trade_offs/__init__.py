"""What does a defense cost, and what does it buy?

``grid`` says what is compared, ``study`` runs it, ``attackers`` and ``attack`` are who
looks at the messages, ``outcomes`` and ``rows`` what they found; ``result``, ``table``
and ``report`` show it.
"""
