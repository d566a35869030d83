"""Commands that report on this machine and what it can run: doctor, fit, presets, models. No text is generated."""
