"""A tiny model as experiments of the papers measure it."""

from pathlib import Path

import pytest
from small_models import CALIBRATION, TINY


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    import torch

    from cuda_track.models.loader import load
    from experiments.papers import runner
    from mlxkv.formats.calibration import artifact

    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("out")
    made = runner.Subject(load(TINY, "fp16", "float32"), "tiny", out, 600)
    made.calibration = artifact.read_calibration(Path(TINY) / CALIBRATION)
    return made
