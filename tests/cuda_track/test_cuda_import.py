"""`mlxkv.torch`, the public name of the second track."""

import subprocess
import sys

from cuda_track.models import handing, loader, seam


def test_it_hands_out_the_second_track_without_mlx():
    from mlxkv import torch as door

    assert door.attach is seam.attach and door.detach is seam.detach and door.load is loader.load
    assert door.handed is handing.handed and all(hasattr(door, name) for name in door.__all__)
    code = "import mlxkv.torch, sys; raise SystemExit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
