"""`mlxkv eval`: measure what a compressed cache costs in quality, with the cache in the loop.

    command, run, store  the options, the run, its results as they are computed and kept
    arms, feed           a model with several caches, and how it reads through them
    questions            documents with facts in them, and questions about these
    tasks/  report/

Speed is in `mlxkv.bench`. No other command may be imported here.
"""
