"""Tuned configurations of kernels: the file they are kept in, the table they are looked up in, the search that finds them.

    file.py      a JSON file: atomic writes, merges, errors that name the file and the remedy
    entry.py     one tuned case: key, versions, configuration, what was measured
    table.py     the entries that apply here, looked up by key: a dictionary hit
    shipped.py   this package's own entries, one file an architecture
    tunable.py   what an op brings to be tuned: key, configuration, candidates, default
    search.py    times candidates, checks their results, and keeps every failure's reason
    clock.py     how a candidate is timed on a GPU

Nothing here knows an op: keys and configurations are frozen dataclasses of plain values.
"""
