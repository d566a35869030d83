"""Other APIs than OpenAI's chat: a request becomes one of ours, and mlx-lm's events become theirs."""
