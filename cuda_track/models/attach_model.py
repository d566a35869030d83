"""`attach` and `detach`: run a model of transformers on compressed caches, unchanged.

`attending` is the attention that is registered for it, `examine` decides which layers are compressed.
`model.generate` makes a compressed cache unless it is given one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from cuda_track.cache.adaptive import AdaptiveKVCache
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.latent import LatentKVCache
from cuda_track.codec import maps
from cuda_track.codec.maps import LayerMaps
from cuda_track.models import latent
from cuda_track.models.attending import EAGER, NAME
from cuda_track.models.examine import Examined, examine, implementations, put_back
from cuda_track.models.layers import CompressedCache, CompressedLayer, held, plain_layers
from cuda_track.models.transformers_compat import check_one_process, handed, renamed, share_of
from mlxkv.catalog import folder
from mlxkv.catalog.folder import fingerprint
from mlxkv.catalog.reports import LayerReport, nothing_compressed, with_own
from mlxkv.catalog.shapes import context_limit
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact, layers
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv

_ATTACHED = "_mlxkv_attached"


@dataclass
class Attached:
    """What `attach` did to a model.

    kv: as given. caches: makers of empty caches, by compressed layer. calibration: that was used, or None.
    attention_names: of the model's own attention functions, by part.
    """

    kv: str | CacheConfig
    caches: dict[int, Callable[[], CompressedKVCache]]
    calibration: Calibration | None
    attention_names: list


def attach(
    model: PreTrainedModel,
    kv: str | CacheConfig,
    calibration: Calibration | Path | str | None = None,
) -> list[LayerReport]:
    """Run `model` on the caches `kv`. Returns a report for each layer.

    A dry run over three tokens decides which layers are compressed; it leaves the model as it was.
    calibration: for presets that need one; by default the one beside the model, else the user's own.
    Raises UserError; then the model is not attached. Warns if nothing at all is compressed.
    """
    methods = ("config", "generate", "set_attn_implementation")  # wrappers of models hand them on
    if not all(hasattr(model, name) for name in methods):
        raise UserError(
            f"[attach] not a model of transformers; got {type(model).__name__}; give one that "
            "AutoModelForCausalLM has loaded"
        )
    config = parse_kv(kv)
    detach(model)
    if config.needs_queries:  # heads vote together, and each process has some of them
        check_one_process(model, "attach", f"{config.label} runs")
    names_before = implementations(model)
    try:
        examined = examine(model, config)
        reports = [cache.report(i, config, model.device) for i, cache in enumerate(examined)]
        compressible = {r.index: examined[r.index] for r in reports if r.compressed}
        fits, calibration_used = _fit(model, config, compressible, calibration)
    except BaseException:
        put_back(model, names_before)
        raise
    caches = {}
    for i, cache in compressible.items():
        kind = AdaptiveKVCache if config.needs_queries else CompressedKVCache
        caches[i] = partial(LatentKVCache if cache.latent else kind, *fits[i])
        reports[i] = with_own(reports[i], cache.fitting(config), fits[i][0])
    if compressible:
        vars(model)["generate"] = Generate(model, vars(model).get("generate"))
        vars(model)["init_continuous_batching"] = _no_batches
    else:
        put_back(model, names_before)
        if message := nothing_compressed(reports):
            warnings.warn(f"[attach] {message}", stacklevel=2)
    setattr(model, _ATTACHED, Attached(kv, caches, calibration_used, names_before))
    return reports


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`."""
    attachment: Attached | None = vars(model).pop(_ATTACHED, None)
    if attachment is None or not attachment.caches:
        return
    generate = vars(model).pop("generate", None)
    if isinstance(generate, Generate):
        generate = generate.own
    if generate is not None:
        vars(model)["generate"] = generate
    vars(model).pop("init_continuous_batching", None)
    if model.config._attn_implementation in (NAME, EAGER):  # else somebody has chosen another since
        put_back(model, attachment.attention_names)
    else:
        latent.unpatch(model)


def attached(model: PreTrainedModel) -> Attached:
    """Raise UserError where `attach` was not called."""
    if (attachment := vars(model).get(_ATTACHED)) is None:
        raise UserError("[attach] this model has no compressed cache; call attach(model, kv) first")
    return attachment


def new_cache(model: PreTrainedModel) -> CompressedCache:
    """Return an empty cache for `model.generate(cache=...)`, or `model(ids, **handed(cache))`."""
    layers = plain_layers(model)
    for i, make in attached(model).caches.items():
        layers[i] = CompressedLayer(make())
    return CompressedCache(layers=layers)


def _fit(
    model: PreTrainedModel,
    config: CacheConfig,
    compressible: dict[int, Examined],
    source: Calibration | Path | str | None,
) -> tuple[dict[int, tuple[CacheConfig, LayerMaps | None]], Calibration | None]:
    """Return the configuration and the maps of each layer, for the kv heads in this process."""
    share = share_of(model)
    if not config.calibrated or not compressible:
        return {i: (cache.fitting(config), None) for i, cache in compressible.items()}, None
    path = Path(model.config._name_or_path)
    mark = getattr(model, "_mlxkv_fingerprint", None)
    if mark is None and path.is_dir():
        mark = fingerprint(folder.check_folder(path))
    if source is None:
        source = artifact.find(mark, path, config) if mark else None
    elif not isinstance(source, Calibration):
        source = artifact.read_calibration(source)
    if source is None:
        raise UserError(
            f"[attach] {config.label} needs a calibration; got none; make one with python -m "
            "cuda_track.calibrate --model MODEL -o FILE, and name it by --calibration FILE"
        )
    sizes = {str(i): cache.sizes for i, cache in compressible.items()}
    whole_model = {n: (heads * share.size, k, v) for n, (heads, k, v) in sizes.items()}
    source.check(whole_model, mark)
    if config.keys.calibrated and not all(cache.latent for cache in compressible.values()):
        artifact.tell_reach(source, context_limit(model.config.to_dict()))
    configs = {str(i): cache.fitting(config) for i, cache in compressible.items()}
    fits = {}
    for name, fitted in layers.fitted(configs, source).items():
        layer_maps = maps.of(source, fitted.fitted, [name])[name]
        if share.size > 1:
            layer_maps = maps.cut(layer_maps, share.rank, share.size)
        fits[int(name)] = fitted, layer_maps.to(model.device)
    return fits, source


def compressed_from(model: PreTrainedModel, cache: DynamicCache) -> CompressedCache:
    """Return a compressed cache of the tokens in `cache`, which stays as it is. The way back is
    `DynamicCache(compressed)`, of what was stored.

    Raises UserError for a cache of another model, or a preset that needs to see queries.
    """
    out = new_cache(model)
    if any(isinstance(getattr(layer, "cache", None), AdaptiveKVCache) for layer in out.layers):
        raise UserError(
            "[cache] this preset observes queries, which a filled cache has not kept; read the prompt again"
        )
    if len(out.layers) != len(cache.layers):
        raise UserError(
            f"[cache] a model of {len(out.layers)} layers; got a cache of {len(cache.layers)}"
        )
    for i, (layer, source) in enumerate(zip(out.layers, cache.layers, strict=True)):
        if not isinstance(layer, CompressedLayer):
            out.layers[i] = copy.deepcopy(source)
        elif not isinstance(source, CacheLayerMixin):
            raise UserError(
                f"[cache] layer {i} takes keys and values; got {type(source).__name__}; choose a cache of "
                "this model"
            )
        elif source.get_seq_length():
            layer.update(*held(source))
    return out


class Generate:
    """Stands in for `model.generate`: makes a compressed cache if none is given, by either name
    (`transformers_compat.NAMES`) in every version.

    An object, not a closure: copies and pickles of the model take one of their own with them. own: what
    stood there for this very model, or None for the method of its class.
    """

    def __init__(self, model: PreTrainedModel, own: Callable | None = None):
        self.model, self.own = model, own

    def __call__(self, *args, **kwargs):
        model, source = self.model, renamed(kwargs)
        if model.config._attn_implementation not in (NAME, EAGER):
            raise UserError(
                "[generate] the attention of an attached model was exchanged; got "
                f"{model.config._attn_implementation!r}; call attach(model, kv) again, or detach(model)"
            )
        generation = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        if self._option("cache_implementation", generation, kwargs) not in (None, "hybrid"):
            raise UserError(
                "[generate] cache_implementation makes caches of transformers; got "
                f"{self._option('cache_implementation', generation, kwargs)!r} with a model that has compressed "
                "ones; leave it out, or detach(model) first"
            )
        if self._option("use_cache", generation, kwargs, model.generation_config) is False:
            if isinstance(source, CompressedCache):
                raise UserError(
                    "[generate] use_cache=False reads no cache; got a compressed one; leave one of them out"
                )
        elif source is None:
            cache = new_cache(model)
            kwargs |= handed(cache)
            if self._option("is_assistant", generation, kwargs):  # its windows are rolled back
                cache.activate_past_recording()
            if model.generation_config.cache_implementation is not None:
                kwargs["cache_implementation"] = None  # of the model's file: not asked for here
        elif isinstance(source, DynamicCache):
            warnings.warn(
                "[generate] this cache is a DynamicCache: NOTHING IS COMPRESSED; give new_cache(model), "
                "or compressed_from(model, cache)",
                stacklevel=2,
            )
        own = self.own or MethodType(type(model).generate, model)  # pyright: ignore[reportAttributeAccessIssue] (checked)
        return own(*args, **kwargs)

    @staticmethod
    def _option(name: str, *givers):
        """Return the first value of an option: of the call's configuration, its own options, or the model's."""
        options = [x.get(name) if isinstance(x, dict) else getattr(x, name, None) for x in givers]
        return next((x for x in options if x is not None), None)


def _no_batches(*args, **kwargs):
    """Stands in for `model.init_continuous_batching`, which would bypass compressed caches."""
    raise UserError(
        "[attach] generate_batch of transformers makes a paged cache of its own; got a model with "
        "compressed caches; choose model.generate, or detach(model) first"
    )
