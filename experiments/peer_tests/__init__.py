"""mlx-lm's own tests with our caches in place of its own: what differs, and why."""
