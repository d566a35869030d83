"""A folder for PYTHONPATH: Python imports `sitecustomize` of it as it starts (`mlxkv.run.start`)."""
