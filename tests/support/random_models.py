"""Small random models of every family, in memory and as folders of the hub, with tokenizer and chat template."""

import json
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes, save_model

from mlxkv.errors import UserError
from mlxkv.loading.load import load

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "families.json").read_text("utf-8"))
CONFIG = CONFIGS["folder"]
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


BASE, FAMILIES = CONFIGS["plain"]["base"], CONFIGS["plain"]["families"]
LATENT_BASE, LATENT_FAMILIES = CONFIGS["latent"]["base"], CONFIGS["latent"]["families"]
VOCAB = BASE["vocab_size"]


def config_of(family: str) -> dict:
    """A config.json for a tiny model of `family`."""
    extra = FAMILIES[family]
    if "text_config" in extra:
        text = BASE | {"model_type": family} | extra["text_config"]
        return {"model_type": family, "vocab_size": VOCAB, "text_config": text}
    return BASE | {"model_type": family} | extra


def random_model(family: str, seed: int = 0, **changes):
    """A tiny model of `family` with random float32 weights; `changes` go into its config."""
    return _made(config_of(family) | changes, seed)


def latent_model(family: str, seed: int = 0, **changes):
    """The same of a family with multi-head latent attention (MLA)."""
    config = LATENT_BASE | LATENT_FAMILIES[family]
    if "text_config" in config:
        inner = config["text_config"] | changes
        config, changes = {"text_config": inner | {"model_type": "kimi_linear"}}, {}
    return _made(config | {"model_type": family} | changes, seed)


def _made(config: dict, seed: int):
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    return with_noise(model_class(args_class.from_dict(config)))


def with_noise(model):
    """Add noise to every parameter: biases and norms start as constants, random ones make every path matter."""
    model.update(tree_map(_noise, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _noise(x: mx.array) -> mx.array:
    if x.size == 0 or not mx.issubdtype(x.dtype, mx.floating):
        return x
    return x.astype(mx.float32) + 0.02 * mx.random.normal(x.shape)


def tokens(count: int, seed: int = 1) -> mx.array:
    """[count] random token ids."""
    return mx.random.randint(0, VOCAB, (count,), key=mx.random.key(seed))


WEIGHTS = "model.safetensors"


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A whole model folder; tests copy it before they break it."""
    return save(tmp_path_factory.mktemp("model"), random_model("llama"), config_of("llama"))


def save(path: Path, model, config: dict) -> Path:
    save_model(path, model)
    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    return path


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def error_of(name: str | Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        load(str(name), **options)
    text = str(caught.value)
    assert text.startswith("[") and "; got " in text and "\n" not in text
    return text


def response():
    """A 404 of the hub, as its errors take it."""

    class Response:
        headers, request, status_code = {}, None, 404

    return Response()
