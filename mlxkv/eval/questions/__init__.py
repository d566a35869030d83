"""What an evaluation asks: texts with facts in them, questions, prompts and tool calls. No MLX."""
