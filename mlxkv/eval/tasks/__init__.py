"""What an evaluation measures: one module per task, and the arithmetic they share."""
