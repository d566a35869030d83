"""What one family of transformers does on compressed caches."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import replace

import torch

from cuda_track.models import seam
from experiments.families.building import NOT_BUILT, VOCABULARY, build
from experiments.families.found import EXACT, INT4, NEAR, NEW, PROMPT, Family, line


def family(name: str) -> Family:
    """Build `name` and compare it: plain, on lossless pages, on int4, and plain again after detach."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result = Family(name)
    if name in NOT_BUILT:
        return replace(result, skipped=NOT_BUILT[name])
    try:
        model = build(name)
        result = replace(result, built=type(model).__name__)
    except Exception as error:
        return replace(result, skipped=f"is not built: {line(error)}")
    try:
        plain, logits = _written(model)
    except Exception as error:
        return replace(result, skipped=f"plain `generate` fails in transformers: {line(error)}")
    try:
        reports = seam.attach(model, EXACT)
        tokens, logits_ours = _written(model)
        gap = float((logits_ours - logits).norm() / logits.norm())
        result = replace(result, layers=tuple(reports), exact=gap)
        if not (torch.equal(tokens, plain) and gap < NEAR):
            return replace(result, fault=f"lossless pages: logits {gap:.1e} apart")
        reports = seam.attach(model, INT4)
        tokens, logits_ours = _written(model)
        if not logits_ours.isfinite().all():
            return replace(result, fault="int4: logits are not finite")
        result = replace(result, int4=any(r.compressed for r in reports))
        seam.detach(model)
        if not torch.equal(_written(model)[1], logits):
            return replace(result, fault="after detach the model is another")
    except Exception as error:
        return replace(
            result, fault=f"{line(error)} at {traceback.extract_tb(error.__traceback__)[-1].name}"
        )
    return result


def _written(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [1, NEW] and their logits [NEW, V]."""
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
    return out.sequences, torch.cat(out.logits)
