"""The law of codes whose bits differ by channel or direction, and their comparison."""
