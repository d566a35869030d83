"""GGUF files that mean harm, or that are of another kind: one line, exit code 2, and no memory taken."""

import struct
import tracemalloc

import pytest
from gguf_files import tensors, write_gguf

from mlxkv.catalog.folder import check_folder
from mlxkv.cli import main
from mlxkv.errors import UserError
from mlxkv.loading.load import load

HUGE = 1 << 60
STRING, ARRAY, U32, F32 = 8, 9, 4, 6


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name="t", shape=(32,), kind=0, offset=0, dims=None) -> bytes:
    dims = len(shape) if dims is None else dims
    out = text(name) + struct.pack("<I", dims) + struct.pack(f"<{len(shape)}Q", *shape)
    return out + struct.pack("<IQ", kind, offset)


def file(entries=(), tensors=(), version=3, counts=None, data=b"\0" * 4096) -> bytes:
    counts = counts or (len(tensors), len(entries))
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*entries, *tensors]) + data


NUMBER = struct.pack("<I", 7)
CASES = {
    "nothing behind the magic": (b"GGUF", "ends inside its header"),
    "version 1": (file(version=1), "of version 1; versions 2 and 3"),
    "other byte order": (file(version=3 << 24), "other byte order"),
    "2^60 tensors": (file(counts=(HUGE, 0)), "more than 65536 values or tensors"),
    "2^60 values": (file(counts=(0, HUGE)), "more than 65536 values or tensors"),
    "a name of 2^60 bytes": (file([struct.pack("<Q", HUGE)], counts=(0, 1)), "length there is too"),
    "a name of 2^64 - 1 bytes": (file([b"\xff" * 8], counts=(0, 1)), "length there is too large"),
    "a text of 2^60 bytes": (
        file([entry("a", STRING, struct.pack("<Q", HUGE))]),
        "length there is too large",
    ),
    "2^60 numbers": (
        file([entry("a", ARRAY, struct.pack("<IQ", U32, HUGE))]),
        "length there is too large",
    ),
    "2^60 texts": (
        file([entry("a", ARRAY, struct.pack("<IQ", STRING, HUGE))]),
        "more than 2097152 texts",
    ),
    "an array of arrays": (
        file([entry("a", ARRAY, struct.pack("<IQ", ARRAY, 3))]),
        "array of arrays",
    ),
    "a value of no type": (file([entry("a", 99, NUMBER)]), "value of an unknown type"),
    "two values of one name": (file([entry("a", U32, NUMBER)] * 2), "two values of one name"),
    "a name that is not UTF-8": (file([text(b"\xff\xfe")], counts=(0, 1)), "not UTF-8"),
    "alignment 0": (
        file([entry("general.alignment", U32, struct.pack("<I", 0))]),
        "alignment that is no power of two",
    ),
    "alignment as text": (
        file([entry("general.alignment", STRING, text("32"))]),
        "alignment that is no power of two",
    ),
    "2^31 dimensions": (file(tensors=[tensor(dims=1 << 31)]), "tensor of 2147483648 dimensions"),
    "no dimensions": (file(tensors=[tensor(shape=())]), "tensor of 0 dimensions"),
    "sizes whose product overflows": (
        file(tensors=[tensor(shape=(1 << 32, 1 << 32, 1 << 32))]),
        "is not whole: its header promises",
    ),
    "an offset of 2^60": (file(tensors=[tensor(offset=HUGE)]), "is not whole: its header promises"),
    "an odd offset": (file(tensors=[tensor(offset=5)]), "where its alignment says"),
    "tensors that overlap": (file(tensors=[tensor("a"), tensor("b", offset=64)]), "overlap"),
    "two tensors of one name": (
        file(tensors=[tensor(), tensor(offset=128)]),
        "two tensors of one name",
    ),
    "a type that is not read": (
        file(tensors=[tensor(kind=77)]),
        "type 77, which is not read; those",
    ),
    "half a block": (file(tensors=[tensor(shape=(31,), kind=8)]), "no whole number of blocks"),
    "no architecture": (file(), "architecture 'none', which is not read; those are llama, qwen2"),
    "numbers as an architecture": (
        file([entry("general.architecture", ARRAY, struct.pack("<IQI", U32, 1, 1))]),
        "architecture 'none', which is not read; those are llama, qwen2",
    ),
    "another architecture": (
        file([entry("general.architecture", STRING, text("mamba"))]),
        "architecture 'mamba', which is not read; those are llama, qwen2, qwen3, gemma3",
    ),
}


def test_crafted_files(tmp_path, capsys):
    for data, expected in CASES.values():
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(UserError) as fault:
            check_folder(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
        assert expected in str(fault.value) and "\n" not in str(fault.value)
        for command in (["chat", "--prompt", "a"], ["fit"]):
            assert main([command[0], "--model", str(path), *command[1:]]) == 2
            said = capsys.readouterr()
            assert expected in said.err and "Traceback" not in said.err + said.out


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    made = tensors("qwen2", ["Q4_0", "Q6_K"])
    return write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf", "qwen2", made)


def test_cut_anywhere(sound, tmp_path):
    """In each value before the tokens, at many places in these, and in the data."""
    data, path = sound.read_bytes(), tmp_path / "x.gguf"
    start = check_folder(sound).headers[0].start
    places = [*range(4, 900, 7), *range(900, start, 4999), start, start + 1, len(data) - 1]
    for at in places:
        path.write_bytes(data[:at])
        with pytest.raises(UserError, match="is not whole|no sound|ends inside"):
            check_folder(path)


def test_values_that_do_not_fit(tmp_path):
    for values, expected in [
        ({"leave": ("block_count",)}, "has no block_count from 1"),
        ({"leave": ("block_count",), "block_count": 3}, r"fit together \(ValueError: Missing"),
        (
            {"leave": ("block_count",), "block_count": 1},
            r"fit together \(ValueError: Received 26 parameters not in model: model.layers.1.input",
        ),
        ({"leave": ("block_count",), "block_count": 1 << 30}, "has no num_hidden_layers from 1"),
        ({"leave": ("block_count",), "block_count": 0}, "has no block_count from 1"),
        ({"leave": ("block_count",), "block_count": "2"}, "has no block_count from 1"),
        ({"leave": ("embedding_length",), "embedding_length": 128}, "fit together"),
        ({"leave": ("attention.head_count",), "attention__head_count": 3}, "does not divide"),
        ({"rope__dimension_count": 32}, "differs from the width of a head, 64"),
        ({"rope__scaling__type": "longrope"}, "'longrope', which is not read; those are linear"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": float("nan")}, "no rope.scal"),
        ({"expert_count": 8}, "has experts"),
    ]:
        made = tensors("qwen2", ["Q4_0"])
        path = write_gguf(tmp_path / "x.gguf", "qwen2", made, **values)
        with pytest.raises(UserError, match=expected):
            load(str(path))


def test_values_that_change_nothing_or_are_refused(tmp_path):
    """What mlx-lm would not compute as the file says is refused, in one line with its name."""
    made = {arch: tensors(arch, ["Q4_0"]) for arch in ("llama", "qwen3", "gemma3")}
    for arch, values in [
        ("llama", {"attention__causal": True, "logit_scale": 1.0, "residual_scale": 0.0}),
        ("llama", {"vocab_size": 3072, "tensor_data_layout": "Meta AI original pth"}),
        ("llama", {"attention__scale": 64**-0.5, "rope__scaling__attn_factor": 1.0}),
        ("llama", {"expert_used_count": 0, "rope__scaling__finetuned": False}),
        ("llama", {"leave": ("attention.head_count_kv",), "attention__head_count_kv": [2, 2]}),
        ("qwen3", {"pooling_type": 0, "attention__sliding_window": 1024}),
        ("gemma3", {"final_logit_softcapping": 30.0, "rope__local__freq_base": 1e4}),
        ("gemma3", {"vision__block_count": 27, "mm__tokens_per_image": 256}),
    ]:
        check_folder(write_gguf(tmp_path / "x.gguf", arch, made[arch], **values))
    for arch, values, expected in [
        ("llama", {"logit_scale": 0.25}, r"'llama.logit_scale' of 0.25, which is not read"),
        ("llama", {"residual_scale": 0.22}, r"'llama.residual_scale'"),
        ("llama", {"embedding_scale": 12.0}, r"'llama.embedding_scale'"),
        ("llama", {"attention__scale": 0.5}, "attention.scale of its own"),
        ("gemma3", {"attention__scale": 0.5}, "attention.scale of its own"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"attention__clamp_kqv": 8.0}, "clamp_kqv"),
        ("llama", {"attention__max_alibi_bias": 8.0}, "max_alibi_bias"),
        ("llama", {"attention__causal": False}, "attention.causal"),
        ("qwen3", {"pooling_type": 3}, "'qwen3.pooling_type' of 3"),
        ("qwen3", {"attention__sliding_window": 512}, "a sliding window, which is not read"),
        ("llama", {"rope__scaling__attn_factor": 1.2}, "attn_factor"),
        ("llama", {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("qwen3", {"rope__dimension_sections": [16, 24, 24, 0]}, "dimension_sections"),
        ("gemma3", {"attention__key_length_swa": 32}, "differs from the width of a head"),
        ("llama", {"of_tomorrow": "x" * 999}, "'llama.of_tomorrow', which is not read"),
        (
            "llama",
            {"leave": ("attention.head_count_kv",), "attention__head_count_kv": [2, 1]},
            "layers that differ in attention.head_count_kv",
        ),
        (
            "llama",
            {"leave": ("feed_forward_length",), "feed_forward_length": [512, 256]},
            "layers that differ in feed_forward_length",
        ),
    ]:
        with pytest.raises(UserError, match=expected) as fault:
            check_folder(write_gguf(tmp_path / "x.gguf", arch, made[arch], **values))
        assert "fetch the file again" not in str(fault.value) and len(str(fault.value)) < 400


def test_files_beside_a_model_say_what_they_are(tmp_path):
    llama, path = entry("general.architecture", STRING, text("llama")), tmp_path / "x.gguf"
    for entries, held, expected in [
        ([llama, entry("general.type", STRING, text("adapter"))], [tensor()], "adapter"),
        ([entry("general.type", STRING, text("imatrix"))], [tensor()], "importance matrix"),
        ([entry("general.type", STRING, text("mmproj"))], [tensor()], "images' side of a model"),
        ([entry("general.architecture", STRING, text("clip"))], [tensor()], "images' side"),
        ([llama, entry("general.type", STRING, text("model"))], [], "a vocabulary alone"),
    ]:
        path.write_bytes(file(entries, held))
        with pytest.raises(UserError, match=f"{expected}.*; name the file of the model itself$"):
            check_folder(path)


def test_tokenizers_that_are_not_read(sound, tmp_path):
    for old, new, expected in [
        (b"deepseek-r1-qwen", b"deepseek-v9-qwen", "'deepseek-v9-qwen', which is not read; those"),
        (text("gpt2"), text("bert"), "tokenizer 'bert', which is not read"),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.nothing"[:21], "no sound merges"),
        (b"tokenizer.ggml.token_type", b"tokenizer.ggml.token_typo", "no type for each"),
    ]:
        path = tmp_path / "x.gguf"
        assert sound.read_bytes().count(old) == 1
        path.write_bytes(sound.read_bytes().replace(old, new))
        with pytest.raises(UserError, match=expected):
            check_folder(path)


def test_a_number_of_no_token(sound, tmp_path):
    data, name = sound.read_bytes(), b"tokenizer.ggml.eos_token_id"
    at = data.index(name) + len(name) + 4
    (tmp_path / "x.gguf").write_bytes(data[:at] + b"\xff" * 4 + data[at + 4 :])
    with pytest.raises(UserError, match="eos token that is none of its tokens"):
        check_folder(tmp_path / "x.gguf")


def test_another_file_is_no_model(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGML" + b"\0" * 100)
    with pytest.raises(UserError, match=r"x\.gguf does not begin as GGUF files do; got b'GGML"):
        load(str(tmp_path / "x.gguf"))
