"""What one family of transformers does on compressed caches."""

from __future__ import annotations

import numpy as np
import torch

from cuda_track.models import seam
from experiments.families.building import NOT_BUILT, VOCABULARY, build
from experiments.families.found import EXACT, NEW, PROMPT, Family, examined


def family(name: str) -> Family:
    torch.set_num_threads(1)
    return examined(name, NOT_BUILT, build, _written, seam.attach, seam.detach, EXACT)


def _written(model) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, the prompt's before them, and their logits [NEW, V]."""
    torch.manual_seed(5)
    ids = torch.randint(3, VOCABULARY - 20, (1, PROMPT))
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0].tolist(), torch.cat(out.logits).float().numpy()
