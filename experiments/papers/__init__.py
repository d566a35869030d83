"""The claims of the papers on real models, a command for each paper over one runner."""
