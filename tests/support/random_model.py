"""Makes small random models in the hub's folder format, tokenizer and chat template included."""

import json
from importlib import import_module
from pathlib import Path

CONFIG = json.loads(Path(__file__).parents[1].joinpath("data", "families.json").read_text())[
    "folder"
]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Byte-level tokens, `<s>` and `</s>`, no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(
    folder: Path, seed: int = 0, template: str | None = TEMPLATE, poison: bool = False, **changes
) -> Path:
    """A model with random weights, a llama unless `changes` to config.json say otherwise.

    poison: one weight is NaN.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(seed)
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(config))
    weights = {k: v.astype(mx.float16) for k, v in tree_flatten(model.parameters())}
    if poison:
        weights["model.norm.weight"] = mx.full((config["hidden_size"],), float("nan"), mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_tokenizer(folder, template)
    return folder
