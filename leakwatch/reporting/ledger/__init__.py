"""The append-only record of every measured value, and how it lies on disk.

- ``ledger``: a run directory, what it holds, how it grows and resumes.
- ``run_file``: ``run.json``, which also holds the hash of each file.
- ``claim``: one writer for each run directory.
- ``rows``: one value with its status, and its form in a CSV part.
- ``table``: rows sorted into columns, the form that everything else reads.
- ``storage``: files that are complete or absent; arrays without pickled objects.
- ``dataframe``: rows for pandas.
"""
