"""Sampling that a model's makers ask for: generation_config.json is read, whatever is in it."""

import json
from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.catalog.aliases import PACKAGES
from mlxkv.loading.sampling import FILE, LIMITS, Sampling, read_sampling

VOCABULARY = 260
SAID = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}


def of(folder, said, name: str = "some-model") -> Sampling:
    (folder / FILE).write_text(said if isinstance(said, str) else json.dumps(said))
    return read_sampling(folder, name, VOCABULARY)


def test_what_the_makers_ask_for(tmp_path):
    assert of(tmp_path, SAID | {"do_sample": True, "eos_token_id": [1, 2]}) == Sampling(**SAID)
    assert of(tmp_path, SAID) == Sampling(**SAID)
    assert of(tmp_path, {"do_sample": True, "top_k": 5}) == Sampling(temperature=1.0, top_k=5)


def test_as_many_tokens_as_there_are_is_all_of_them(tmp_path):
    """mlx-lm's sampler refuses the number."""
    for top_k, kept in ((VOCABULARY - 1, VOCABULARY - 1), (VOCABULARY, 0), (VOCABULARY + 1, 0)):
        assert of(tmp_path, {"temperature": 1, "top_k": top_k}).top_k == kept


def test_the_likeliest_token_where_they_say_nothing(tmp_path):
    for said in [
        SAID | {"do_sample": False},
        {"do_sample": True, "temperature": 0, "top_p": 0.5},
        {"top_p": 0.5, "top_k": 5},  # nobody says that replies are drawn
        {},
        None,
        [],
        "",
        "{",
        "\ufeff{}",
        "[" * 100_000,
        '{"do_sample": true, "temperature": NaN}',  # no JSON
        '{"temperature": 1e999}',
        '{"temperature": ' + "9" * 5000 + "}",
    ]:
        assert of(tmp_path, said) == Sampling()
        assert read_sampling(tmp_path / "absent", "some-model", VOCABULARY) == Sampling()


def test_a_package_says_it_where_the_file_does_not(tmp_path):
    want = Sampling(**PACKAGES["smollm2"].sampling)
    assert (
        read_sampling(tmp_path, "smollm2", VOCABULARY)
        == want
        == of(tmp_path, {"top_p": 0.1}, "smollm2")
    )
    assert of(tmp_path, {"do_sample": False}, "smollm2") == Sampling()
    assert of(tmp_path, {"temperature": 0.7}, "smollm2") == Sampling(temperature=0.7)


def test_a_gguf_file_says_it_or_its_family_does(tmp_path):
    def read(**values) -> Sampling:
        header = {key.replace("__", "."): x for key, x in values.items()}
        return read_sampling(tmp_path, "some.gguf", VOCABULARY, header)

    family = {"general__architecture": "qwen3", "tokenizer__chat_template": "{{ messages }}"}
    assert read(**family) == Sampling(0.6, 0.95, 20)
    said = {"general__sampling__temp": float(np.float32(0.3)), "general__sampling__top_k": 7}
    assert read(**family, **said) == Sampling(temperature=0.3, top_k=7)
    assert read(**family, general__sampling__temp=0.0) == Sampling()  # greedy on purpose
    assert read(**family, general__sampling__temp="hot") == Sampling()
    assert read(general__architecture="qwen3") == Sampling()  # a base model, without a template
    thinking = {"general__architecture": "llama", "tokenizer__chat_template": "a <think> b"}
    assert read(**thinking) == Sampling(0.6, 0.95)
    assert read(**thinking | {"general__architecture": "qwen2"}) == Sampling(0.6, 0.95)
    assert read(**family | {"tokenizer__chat_template": "a <think> b"}).top_k == 20
    assert read(**family | {"general__architecture": "qwen2"}).repetition_penalty == 1.05
    assert read(general__architecture="llama", tokenizer__chat_template="a") == Sampling()
    assert read_sampling(tmp_path, "smollm2", VOCABULARY, {}) == Sampling(0.2, 0.9)


HOSTILE = ("0.5", True, None, [], {}, -1, -0.1, 1e300, 1 << 70)


def test_a_value_that_no_sampler_takes_is_not_said(tmp_path):
    for key in LIMITS:
        for value in HOSTILE:
            said = SAID | {"do_sample": True, key: value}
            usual = {"temperature": 1.0}.get(key, asdict(Sampling())[key])
            assert of(tmp_path, said) == Sampling(**SAID | {key: usual})


@pytest.mark.parametrize("said", [SAID, SAID | {"top_k": 1 << 20, "repetition_penalty": 1}])
def test_samplers_take_it(tmp_path, said):
    found = of(tmp_path, said | {"do_sample": True})
    sampler, processors = found.drawing()
    logits = mx.zeros((1, VOCABULARY))
    for processor in processors:
        logits = processor(mx.array([1, 2]), logits)
    assert 0 <= sampler(logits).item() < VOCABULARY
