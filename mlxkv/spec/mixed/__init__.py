"""The law of codes whose bits differ by channel or direction, how backends are compared with it, and published siblings."""
