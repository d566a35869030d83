"""Which threads multiply on a CPU."""

import pytest

from mlxkv import startup
from mlxkv.calibration import measure
from mlxkv.formats.calibration import artifact
from mlxkv.loading import quality_check
from mlxkv.loading.load import load


@pytest.mark.skipif(not startup.has_openblas, reason="MLX multiplies by itself here")
def test_the_first_calibrated_preset_takes_one_thread(model_folder, tmp_path, monkeypatch):
    library, seen = startup._openblas_library, {}
    count, limit = (getattr(library, startup.THREADS.format(name)) for name in ("get", "set"))
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(measure, "TOKENS", 600)
    for module, name in ((measure, "calibrate"), (quality_check, "divergence")):
        real = getattr(module, name)

        def counted(*args, name=name, real=real, **options):
            seen[name] = count()
            return real(*args, **options)

        monkeypatch.setattr(module, name, counted)
    before = count()
    limit(3)
    try:
        quality_check.warn(load(str(model_folder), "fill-3"))
        assert seen == {"calibrate": 1, "divergence": 1} and count() == 3
    finally:
        limit(before)
