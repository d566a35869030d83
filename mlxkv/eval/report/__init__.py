"""What an evaluation shows: rows, verdicts, tables, report.json, report.html and pictures."""
