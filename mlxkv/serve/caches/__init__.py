"""Memory set aside for requests, and caches of finished ones, in memory and on disk. Nothing here
knows of HTTP connections or of the generation loop."""
