"""`python -m cuda_track.generate --model NAME --kv NAME`: generate text by transformers on compressed caches."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

import torch

from cuda_track import cli
from cuda_track.models.attach_model import new_cache
from cuda_track.models.loader import Loaded, load
from cuda_track.models.transformers_compat import handed
from mlxkv import console
from mlxkv.catalog.reports import summarise
from mlxkv.errors import UserError


@dataclass(frozen=True)
class Reply:
    """tokens: of the reply. cache_bytes: allocated at its end. seconds: with the prefill."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    cache_bytes: int
    seconds: float


def prompt_tokens(loaded: Loaded, prompt: str, raw: bool = False) -> list[int]:
    """Return the tokens of a prompt: through the chat template, if there is one and not `raw`."""
    tokenizer = loaded.tokenizer
    if raw or tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "user", "content": prompt}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return rendered["input_ids"]


def generate(
    loaded: Loaded, tokens: list[int], max_tokens: int = 256, temp: float = 0.0, **options
) -> Reply:
    """Reply to a prompt; options go to `model.generate`."""
    if not tokens:
        raise UserError("[generate] empty prompt")
    model = loaded.model
    cache = new_cache(model)
    options |= {"do_sample": True, "temperature": temp} if temp else {"do_sample": False}
    ids = torch.tensor([tokens], device=model.device)
    start = time.perf_counter()
    out = model.generate(  # pyright: ignore[reportCallIssue] (`attach` has looked for it)
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        **handed(cache),
        **options,
    )
    reply = out[0, len(tokens) :].tolist()
    seconds = time.perf_counter() - start
    text = loaded.tokenizer.decode(reply, skip_special_tokens=True)
    return Reply(text, reply, len(tokens), cache.nbytes, seconds)


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    loaded = load(
        arguments.model, arguments.kv, arguments.dtype, arguments.device, arguments.calibration
    )
    for line in summarise(loaded.layers):
        console.note(line)
    tokens = prompt_tokens(loaded, arguments.prompt, arguments.raw)
    reply = generate(loaded, tokens, arguments.max_tokens, arguments.temp)
    print(json.dumps(asdict(reply)) if arguments.json else reply.text)


if __name__ == "__main__":
    console.run_tool(main)
