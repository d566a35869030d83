"""Checks of the Metal texts on machines without Metal: see README.md here."""
