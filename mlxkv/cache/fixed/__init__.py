"""Caches in a step of fixed shapes, which is traced once and replayed: whole buffers, and arrays that say how
much of them is in use. The loop around it is `models.compiled`."""
