"""`mlxkv bench`, `bench decode` and `bench batch`: whole models, and files of results. No server.

plan, run, process, rows and power import no framework: `mlxkv bench` measures in other processes.
"""
