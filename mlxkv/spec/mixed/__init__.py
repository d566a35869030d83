"""The law of codes whose bits differ by channel or direction, and how backends are compared with it."""
