"""Plans: a preset for each layer. What they hold, how files of them are read, how one is found. No framework."""
