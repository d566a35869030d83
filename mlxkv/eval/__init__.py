"""`mlxkv eval`: measure what a compressed cache costs in quality, with the cache in the loop.

    command, run            the options, and a run of the command
    engine, rows            parts of a run, and their results, computed and stored
    arms, reading           a model with several caches, and how it reads through them
    divergence, retrieval   the tasks; questions: documents with facts in them, and questions about these
    report, verdict, plots, intervals   the output of a run

`experiments.evidence` is a second configuration of the same engine. Speed is in `mlxkv.bench`. No other command may
be imported here.
"""
