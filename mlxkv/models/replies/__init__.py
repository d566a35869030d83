"""The text of replies: thoughts before the answer, stop words, and going on with a start."""
