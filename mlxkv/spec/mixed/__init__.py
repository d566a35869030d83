"""The law of codes whose bits differ by channel or direction, their comparison, and published siblings."""
