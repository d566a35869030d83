"""Studies of what could come after the published methods: `python -m experiments.frontier.pages --help`."""
