"""Names, folders, sizes and downloads of models. No framework is imported here; cuda_track reads it too."""
