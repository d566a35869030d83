"""`mlxkv eval`: measure what a compressed cache costs in quality, with the cache in the loop.

    command, run            the options, and a run of the command
    arms, feed              a model with several caches, and how it reads through them
    divergence, retrieval   the tasks; questions: documents with facts in them, and questions about these
    engine, store           a task on a text, its results as they are computed and kept
    report, verdict, page, plots, intervals   what a run shows

Speed is in `mlxkv.bench`. No other command may be imported here.
"""
