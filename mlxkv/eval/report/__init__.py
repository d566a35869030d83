"""What an evaluation shows: rows, verdicts, tables, report.json, report.md and a picture."""
