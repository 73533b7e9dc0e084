"""The report of a run as one HTML file: what its sections show, and how they look.

What a section shows is decided in Python: one module for each, whose dataclasses
hold finished words and can be tested without HTML. How it looks is in ``templates``
(Jinja2; everything from data is escaped there), ``report.css`` and ``report.js``.

- ``report``: writes the file; puts the sections together.
- ``page``: the frame of every page, for this report and those of studies.
- ``markup``: what sections share: figures, cards, cells, pictures.
- ``summary``, ``notices``, ``attacks``, ``correlations``, ``samples``, ``tables``:
  the sections.

A new section is a function that returns what it shows, or None; a template
``sections/<anchor>.html.j2`` that finds this as ``content``; and a line in ``report``.
"""
