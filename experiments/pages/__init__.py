"""What docs/ and README.md show of the code itself: the reference, pictures, the output of commands."""
