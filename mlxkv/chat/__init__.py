"""`mlxkv chat`: a conversation in the terminal or one answer. What other commands share is in `generate`."""
