"""What one family does on compressed caches, found out in a process of its own."""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from dataclasses import replace

import torch

from cuda_track.models import seam
from experiments.families.building import VOCABULARY, build
from experiments.families.found import EXACT, INT4, NEAR, NEW, PROMPT, Family, line
from mlxkv.formats.config import CacheConfig
from mlxkv.models.catalog.reports import LayerReport


def family(name: str) -> Family:
    """Build `name` and compare it: plain, on lossless pages, on int4, and plain again after detach."""
    result = Family(name)
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
        reports = _attached(model, EXACT)
        tokens, logits_ours = _written(model)
        gap = float((logits_ours - logits).norm() / logits.norm())
        result = replace(result, layers=tuple(reports), exact=gap)
        if not (torch.equal(tokens, plain) and gap < NEAR):
            return replace(result, fault=f"lossless pages: logits {gap:.1e} apart")
        reports = _attached(model, INT4)
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


def _attached(model, config: CacheConfig) -> list[LayerReport]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is compressed stands in the table
        return seam.attach(model, config)


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


def apart(name: str, seconds: float) -> Family:
    """`family` in a process that ends after `seconds`."""
    context = multiprocessing.get_context("fork")  # transformers takes seconds to import
    receiver, sender = context.Pipe(False)
    process = context.Process(target=_report, args=(name, sender))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the new process has one
        process.start()
    sender.close()
    try:
        return (
            receiver.recv()
            if receiver.poll(seconds)
            else Family(name, fault=f"more than {seconds:g} s")
        )
    except EOFError:
        return Family(name, fault="the process died")
    finally:
        process.kill()
        process.join()


def _report(name: str, sender) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sender.send(family(name))
