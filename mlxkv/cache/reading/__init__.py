"""Reading fewer pages: what a chunk of tokens is ranked by, which are chosen, and attention over the chosen ones."""
