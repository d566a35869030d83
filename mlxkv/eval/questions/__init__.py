"""What an evaluation asks: texts with planted facts, questions, prompts and tool calls. No MLX."""
