"""What caches do beside storing, for both tracks: take tokens back, observe queries, keep runs, read fewer pages."""
