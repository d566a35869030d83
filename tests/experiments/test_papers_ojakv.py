"""OjaKV's experiment against the float64 law."""

import numpy as np
import torch

from experiments.papers import ojakv
from mlxkv.spec import oja as spec


def test_steps_are_those_of_the_spec():
    rng = np.random.default_rng(0)
    u = spec.orthonormal(rng.standard_normal((2, 16, 8)))
    x = rng.standard_normal((2, 5, 16)) * 0.3
    made = torch.from_numpy(u).float(), torch.from_numpy(x).float()
    expected = {
        ojakv.NORMAL: spec.update(u, x, 0.1),
        ojakv.RAW: spec.update(u, x, 0.1, raw=True),
        ojakv.TOKEN: spec.orthonormal(spec.update_by_token(u, x, 0.1)),
    }
    for rule, right in expected.items():
        np.testing.assert_allclose(ojakv.step(*made, 0.1, rule), right, atol=1e-5)
    one = spec.orthonormal(spec.update_by_token(u, x[:, :1], 0.1))
    np.testing.assert_allclose(one, spec.update(u, x[:, :1], 0.1, raw=True), atol=1e-12)
    large = made[1] * 100  # the rule by tokens leaves float32
    torch.testing.assert_close(ojakv.step(made[0], large, 0.1, ojakv.TOKEN), made[0])
