"""Prepare this process for MLX and mlx-lm, before either is imported."""

import resource

DESCRIPTORS = 4096  # mlx-lm sets this limit on import, and ends where a process may not have it


def prepare() -> None:
    """Have OpenBLAS multiply for MLX on Linux, and mlx-lm imported whatever the limit of descriptors is."""
    from mlxkv import blas

    blas.preload_openblas()
    allow_few_descriptors()


def allow_few_descriptors() -> None:
    """Have mlx-lm imported where this process may have fewer descriptors than it asks for."""
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < DESCRIPTORS:  # RLIM_INFINITY is below 0
        _cap_next_limit()


def _cap_next_limit() -> None:
    """Have the next call of `resource.setrlimit` for descriptors, which is mlx-lm's, take what there is."""
    usual = resource.setrlimit

    def capped(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_NOFILE:
            resource.setrlimit = usual
            hard = resource.getrlimit(kind)[1]
            limits = min(limits[0], hard), min(limits[1], hard)
        usual(kind, limits)

    resource.setrlimit = capped
