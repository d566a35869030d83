"""Ask the 300 forms by torch, with an exact cache: a minute of a core, where `chat.evaluate` needs several.

PYTHONPATH=.:training python -m chat.quick runs/part-2/hub               # several folders: the mean of their weights
"""

import sys
from pathlib import Path

import export
import torch
from evaluate import forward
from model import Model
from tokenizer import BOS, END, EOS
from tokenizers import Tokenizer

from chat.evaluate import LONGEST, wilson
from chat.forms import Form, read


def mean(folders: list[Path]) -> Model:
    """Return the model of a folder, or the mean of several."""
    models = [export.read(folder) for folder in folders]
    held = [model.state_dict() for model in models]
    models[0].load_state_dict({name: sum(w[name] for w in held) / len(held) for name in held[0]})
    return models[0]


@torch.no_grad()
def reply(model: Model, tokenizer: Tokenizer, form: Form) -> str:
    """Return the greedy reply to the last turn; the replies before it are the model's own."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    past, new, said = None, [BOS], []
    for turn in form.turns:
        new += ids(f"<start_of_turn>user\n{turn}<end_of_turn>\n<start_of_turn>model\n")
        said = []
        while len(said) < LONGEST:
            hidden, past = forward(model, torch.tensor([new]), past)
            new = [int(model.logits(hidden[:, -1]).argmax())]
            if new[0] in (END, EOS):
                break
            said += new
        new = [END, *ids("\n")]
    return tokenizer.decode(said).strip()


def main(*folders: str) -> None:
    model = mean([Path(folder) for folder in folders])
    tokenizer = Tokenizer.from_file(str(Path(folders[0]) / "tokenizer.json"))
    parts: dict[bool, list[bool]] = {False: [], True: []}
    for form in read():
        said = reply(model, tokenizer, form)
        parts[form.kept_back].append(form.right(said))
        if not form.right(said):
            print(f"{form.kind}: {' >> '.join(form.turns)}\n    {said}")
    named = (("worded as in training", parts[False]), ("kept back", parts[True]))
    for name, some in (*named, ("all", parts[False] + parts[True])):
        low, high = wilson(sum(some), len(some))
        share = f"{sum(some) / len(some):.1%} ({low:.0%} to {high:.0%})"
        print(f"{name}: {sum(some)} of {len(some)}, {share}")


if __name__ == "__main__":
    main(*sys.argv[1:])
