"""Summaries of what the ledger holds, for loggers, commands and the report alike.

- ``aggregates``: over samples and classes.
- ``headline``: predicted PSNR of the most exposed sample.
- ``achieved``: what attacks achieved; only conclusive ones give numbers.
- ``correlation``: Spearman's, with everything needed to judge it.
- ``correlation_table``: of every score with every quality, as LAVP reports it.
- ``scalars``: what loggers get, and under which keys.
"""
