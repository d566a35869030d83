"""What users of transformers do with an attached model: it is right, or refused in one line."""

import copy
import io
import pickle
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from cuda_track.models import attach_model, prompt_cache, transformers_compat
from cuda_track.models.examine import Examined
from cuda_track.models.layers import CompressedLayer
from cuda_track.models.loader import Loaded
from cuda_track.models.taps import observing
from cuda_track.models.transformers_compat import cache_of, handed
from experiments.families.building import VOCABULARY, build, config_of
from experiments.families.found import EXACT, INT4, PROMPT
from mlxkv.catalog.reports import CAPPED, SINKS, summarise
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv

torch.set_num_threads(1)

IDS = torch.randint(3, VOCABULARY - 20, (1, PROMPT), generator=torch.Generator().manual_seed(3))
NEW = 8


def written(model, **options):
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False} | options
    ids = options.pop("ids", IDS)
    return model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)


def step(model, cache, ids=(5,)):
    with torch.no_grad():
        return model(torch.tensor([ids]), **handed(cache)).logits


@pytest.fixture
def llama():
    return build("llama")


def test_the_scale_of_scores_is_the_models_own(llama):
    for layer in llama.model.layers:
        layer.self_attn.scaling *= 3
    with torch.no_grad():
        right = llama(IDS).logits
    attach_model.attach(llama, EXACT)
    cache = attach_model.new_cache(llama)
    got = torch.cat(
        [step(llama, cache, IDS[0, :-1].tolist()), step(llama, cache, IDS[0, -1:].tolist())], 1
    )
    assert (got - right).norm() < 1e-3 * right.norm()
    scales = []
    with observing(llama, lambda call: scales.append(call.scale)), torch.no_grad():
        llama(IDS, use_cache=False)
    assert scales == [layer.self_attn.scaling for layer in llama.model.layers]


@pytest.fixture
def attached(llama):
    attach_model.attach(llama, INT4)
    return llama


@pytest.fixture
def filled(attached):
    """A cache with pages, made by `attached`."""
    return cache_of(written(attached, return_dict_in_generate=True))


# -- which layers


def test_what_is_not_compressed_is_said_with_its_reason_and_goes_on(subtests):
    for family, line in {
        "falcon": "uses cached keys or values as arrays",
        "minimax": "uses cache of its own",
        "openai-gpt": "uses no cache of transformers",
        "deepseek_v32": "(indexed): full precision, indexed cache that grows: not supported",
        "mistral": "layers 0-3 (sliding window 512): full precision, small by nature",
        "falcon_h1": "(full beside a state): full precision, a cache that grows beside a state: not supp",
        "mamba": "layers 0-3 (state): full precision, constant size",
        "dots3_note_text": "layers 0-1 (indexed): full precision, indexed cache that grows: not",
    }.items():
        with subtests.test(family=family, line=line):
            model = build(family)
            right, before = written(model), model.config._attn_implementation
            with pytest.warns(UserWarning, match="NOTHING IS COMPRESSED"):
                reports = attach_model.attach(model, "int4")
            lines = summarise(reports)
            assert lines[0].startswith("NOTHING IS COMPRESSED") and any(line in x for x in lines), (
                lines
            )
            assert model.config._attn_implementation == before and "generate" not in vars(model)
            assert torch.equal(written(model), right)


def test_capped_scores_and_sinks_are_no_reason_by_themselves(subtests):
    capped = "queries of capped scores cannot be observed"
    for cache, reasons in {
        Examined("full", True, None, (2, 64, 64), capped=True): ("", capped, CAPPED),
        Examined("full", True, None, (2, 64, 64), sinks=True): ("", "", SINKS),
    }.items():
        for name, reason in zip(("int4", "oja-0.75+int4", "centred-int2"), reasons, strict=True):
            with subtests.test(cache=cache, name=name):
                report = cache.report(0, parse_kv(name), torch.device("cpu"))
                assert ("" if report.compressed else report.reason) == reason


def test_masks_have_a_column_for_each_token_that_is_kept():
    cache = SimpleNamespace(offset=100, windows=SimpleNamespace(dropped=30))
    assert CompressedLayer(cache).get_mask_sizes(4) == (74, 30)


def test_the_dry_run_leaves_a_model_as_it_was(llama):
    llama.train()
    llama.model.layers[1].eval()
    llama.model.register_buffer("counter", torch.zeros(3))
    llama.model.seen = 0

    def count(module, args, kwargs, out):
        module.counter += 1
        module.counter = module.counter.clone()
        module.seen += torch.rand(1).item()

    hook = llama.model.register_forward_hook(count, with_kwargs=True)
    buffer, modes = llama.model.counter, [m.training for m in llama.modules()]
    weights = [p.clone() for p in llama.parameters()]
    state = torch.random.get_rng_state()
    assert all(r.compressed for r in attach_model.attach(llama, "int4"))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [m.training for m in llama.modules()] == modes
    assert llama.model.counter is buffer and not buffer.any() and llama.model.seen == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, llama.parameters(), strict=True))
    assert all(p.grad is None for p in llama.parameters())
    assert len(llama.model._forward_hooks) == 1
    hook.remove()


def test_attention_that_is_another_function_is_refused(llama, monkeypatch):
    module = type(llama.model.layers[0].self_attn).__module__
    own = sys.modules[module].eager_attention_forward

    def bent(module, query, key, value, mask, **kwargs):
        return own(module, query, key * (1 + 0.1 * key.abs()), value, mask, **kwargs)

    monkeypatch.setattr(sys.modules[module], "eager_attention_forward", bent)
    with pytest.warns(UserWarning, match="attention is another function"):
        reports = attach_model.attach(llama, "int4")
    assert not any(r.compressed for r in reports)


def test_lossless_pages_give_the_plain_logits(subtests):
    for family, way in [("gemma2", "eager"), ("gpt_oss", "eager"), ("bart", "sdpa")]:
        with subtests.test(family=family, way=way):
            model = build(family)
            model.set_attn_implementation(way)
            options = {"return_dict_in_generate": True, "output_logits": True}
            two = IDS.repeat(2, 1)
            mask = torch.ones_like(two)
            mask[1, :7] = 0  # padded on the left
            plain = model.generate(
                two, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, **options
            )
            assert any(r.compressed for r in attach_model.attach(model, EXACT))
            got = model.generate(
                two, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, **options
            )
            for a, b in zip(plain.logits, got.logits, strict=True):
                assert (a - b).norm() < 1e-3 * a.norm()
            with torch.no_grad():  # and without any cache
                model(IDS, use_cache=False)


# -- options of generate


def test_no_cache_is_the_plain_model(llama):
    right = written(llama)
    attach_model.attach(llama, INT4)
    assert torch.equal(written(llama, use_cache=False), right)
    own = GenerationConfig(use_cache=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)
    got = llama.generate(IDS, own, attention_mask=torch.ones_like(IDS))
    assert torch.equal(got, right)
    llama.generation_config.use_cache = False
    assert torch.equal(written(llama), right)
    cached = cache_of(written(llama, use_cache=True, return_dict_in_generate=True))
    assert cached.get_seq_length() == PROMPT + NEW - 1
    with pytest.raises(UserError, match="reads no cache; got a compressed one"):
        written(llama, **handed(attach_model.new_cache(llama)))


def test_generate_of_attached_models_takes_a_cache_by_either_name(subtests, attached):
    for name in transformers_compat.NAMES:
        with subtests.test(name=name):
            right, cache = written(attached), attach_model.new_cache(attached)
            out = written(attached, return_dict_in_generate=True, **{name: cache})
            assert torch.equal(out.sequences, right)
            assert cache_of(out) is cache and cache.get_seq_length() == PROMPT + NEW - 1
            assert torch.equal(written(attached, **{name: None}), right)
            other = {x: attach_model.new_cache(attached) for x in transformers_compat.NAMES}
            with pytest.raises(UserError, match="one cache; got cache and past_key_values"):
                written(attached, **other)
            with pytest.raises(UserError, match="reads no cache"):
                written(attached, use_cache=False, **{name: attach_model.new_cache(attached)})


def test_caches_of_transformers_are_refused_by_name(subtests, attached):
    for name in [
        "static",
        "dynamic",
        "quantized",
        "offloaded",
        "offloaded_static",
        "sliding_window",
    ]:
        with subtests.test(name=name):
            with pytest.raises(UserError, match=f"cache_implementation .* got '{name}'"):
                written(attached, cache_implementation=name)
            own = GenerationConfig(cache_implementation="static")
            with pytest.raises(UserError, match="cache_implementation"):
                attached.generate(IDS, generation_config=own)


def test_a_cache_that_the_models_file_names_gives_way(subtests, attached):
    for name in ["static", "hybrid", "dynamic"]:
        with subtests.test(name=name):
            right = written(attached)
            attached.generation_config.cache_implementation = name
            out = written(attached, return_dict_in_generate=True)
            assert torch.equal(out.sequences, right)
            assert all(type(layer) is CompressedLayer for layer in cache_of(out).layers)
            assert torch.equal(written(attached, cache_implementation="hybrid"), right)


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_weights_of_attention_are_there(llama, way):
    llama.set_attn_implementation("eager")
    options = {"return_dict_in_generate": True, "output_attentions": True}
    right = written(llama, **options).attentions
    llama.set_attn_implementation(way)
    attach_model.attach(llama, EXACT)
    got = written(llama, **options).attentions
    assert len(got) == len(right) == NEW
    for ours, theirs in zip(got, right, strict=True):
        assert len(ours) == len(theirs) == 4
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(ours, theirs, strict=True))


def test_an_attached_assistant_rolls_its_windows_back():
    model, assistant = build("gemma2"), build("gemma2")
    for one in (model, assistant):
        one.config.sliding_window = 32
        for layer in one.model.layers:
            layer.self_attn.sliding_window = layer.self_attn.sliding_window and 32
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.03 * torch.randn_like(assistant.lm_head.weight))
    options = {"max_new_tokens": 30, "min_new_tokens": 30}
    right = written(model, **options)
    for one in (model, assistant):
        attach_model.attach(one, EXACT)
    assert torch.equal(written(model, assistant_model=assistant, **options), right)


def test_ways_to_generate_are_those_of_the_plain_model(subtests):
    for options, family in (
        ({"num_beams": 3}, "llama"),
        ({"num_beams": 2, "num_return_sequences": 2}, "gemma2"),
        ({"prompt_lookup_num_tokens": 5}, "llama"),
        ({"prefill_chunk_size": 16}, "gemma2"),
        ({"guidance_scale": 1.5}, "llama"),
    ):
        with subtests.test(options=options, family=family):
            model = build(family)
            right = written(model, **options)
            attach_model.attach(model, EXACT)
            assert torch.equal(written(model, **options), right)


# -- copies, pickles, and other models' caches


def test_models_pickle(llama, tmp_path):
    plain = written(llama)
    attach_model.attach(llama, INT4)
    right = written(llama)
    torch.save(llama, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(written(other), right)
    assert vars(other)["generate"].model is other
    attach_model.detach(other)
    assert torch.equal(written(other), plain)
    llama.save_pretrained(tmp_path / "folder")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert torch.equal(written(again), plain)


def test_caches_pickle(subtests, llama):
    for kv in ["int4", "naive-int4", "turbo-int4"]:
        with subtests.test(kv=kv):
            attach_model.attach(llama, kv)
            ids = IDS.repeat(1, 6)
            cache = cache_of(written(llama, ids=ids, return_dict_in_generate=True))
            assert cache.layers[0].cache._count_pages
            file = io.BytesIO()
            torch.save(cache, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            others = [loaded, pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)]
            right = step(llama, cache)
            assert all(torch.equal(step(llama, other), right) for other in others)
            assert cache.get_seq_length() == loaded.get_seq_length()


def test_sessions_of_states_are_refused(tmp_path):
    model = build("jamba")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attach_model.attach(model, "int4")
    cache = attach_model.new_cache(model)
    step(model, cache, IDS[0].tolist())
    loaded = Loaded(model, None, "m", "int4", [])
    with pytest.raises(UserError, match="sessions hold keys and values; got a layer of"):
        prompt_cache.save(tmp_path / "s", prompt_cache.Saved(cache, IDS[0].tolist()), loaded)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_a_cache_after_detach_is_one_line(attached, filled, way):
    attach_model.detach(attached)
    attached.set_attn_implementation(way)
    with pytest.raises(UserError, match="cannot read compressed caches.*after detach") as found:
        step(attached, filled)
    assert "\n" not in str(found.value)
    with pytest.raises(UserError, match="call attach"):
        attach_model.new_cache(attached)


def test_a_cache_of_another_model_is_one_line(attached):
    with pytest.raises(UserError, match="cannot read compressed caches"):
        step(build("gpt2"), attach_model.new_cache(attached))
    config = config_of("llama")
    config.num_hidden_layers = 6
    config.layer_types = None
    deeper = AutoModelForCausalLM.from_config(config).eval()
    attach_model.attach(deeper, INT4)
    with pytest.raises(UserError, match="a cache of 4 layers; got keys of layer 4"):
        step(deeper, attach_model.new_cache(attached))


def test_exchanged_attention_is_one_line(attached):
    attached.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match="was exchanged; got 'sdpa'"):
        written(attached)
    attach_model.detach(attached)
    assert attached.config._attn_implementation == "sdpa"


def test_dynamic_caches_go_both_ways(llama):
    with torch.no_grad():
        plain = cache_of(llama(IDS, **handed(DynamicCache(config=llama.config))))
    before = copy.deepcopy(plain)
    attach_model.attach(llama, EXACT)
    ours = attach_model.compressed_from(llama, plain)
    assert ours.layers[0].cache._count_pages
    right = step(llama, plain)
    assert (step(llama, ours) - right).norm() < 1e-4 * right.norm()
    back = DynamicCache(attach_model.compressed_from(llama, before))
    for a, b in zip(back.layers, before.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    assert DynamicCache(attach_model.new_cache(llama)).get_seq_length() == 0
    with pytest.warns(UserWarning, match="NOTHING IS COMPRESSED"):
        written(llama, **handed(DynamicCache(config=llama.config)))
    with pytest.raises(UserError, match="a model of 4 layers; got a cache of 0"):
        attach_model.compressed_from(llama, DynamicCache())


def test_crop_counts_as_transformers_does(attached, filled):
    tokens = filled.get_seq_length()
    with pytest.raises(ValueError, match=r"got 100; write crop\(-100\)"):
        filled.crop(100)
    assert filled.get_seq_length() == tokens
    filled.crop(0)
    assert filled.get_seq_length() == tokens
    filled.crop(-3)
    assert filled.get_seq_length() == tokens - 3
    filled.crop(-1000)
    assert filled.get_seq_length() == 0
    fresh = step(attached, attach_model.new_cache(attached), IDS[0].tolist())
    assert torch.equal(step(attached, filled, IDS[0].tolist()), fresh)
