"""The options of `mlxkv chat`: names, defaults, help texts and checks. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from typer import Argument, Option

from mlxkv.catalog.aliases import DEFAULT
from mlxkv.catalog.option_checks import (
    check_sampling,
    check_weights,
    dtype_name,
    fitting_sizes,
    template_arguments,
)
from mlxkv.errors import UserError
from mlxkv.formats import session
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import canonical, requested
from mlxkv.options import (
    AdapterPath,
    Calibration,
    Context,
    Dtype,
    Json,
    Kv,
    Memory,
    Model,
    Strict,
    Weights,
)


@dataclass(frozen=True)
class ChatOptions:
    """The command line, in the order of `--help`. Raises UserError for values out of range."""

    text: Annotated[
        list[str] | None,
        Argument(help="Answer this and leave; text on stdin comes before it.", show_default=False),
    ] = None
    model: Model = DEFAULT
    kv: Kv = "int4"
    memory: Memory = None
    context: Context = None
    prompt: Annotated[
        str | None, Option("--prompt", "-p", help="The same as TEXT.", rich_help_panel="Output")
    ] = None
    system: Annotated[
        str | None, Option("--system", "-s", help="System prompt.", rich_help_panel="Model")
    ] = None
    max_tokens: Annotated[
        int | None,
        Option(
            help="Longest reply. Default: until the context is full.",
            rich_help_panel="Sampling",
        ),
    ] = None
    temp: Annotated[
        float | None,
        Option(
            "--temp",
            "--temperature",
            help="Temperature; 0 picks the likeliest token. Default: what the model's makers recommend.",
            rich_help_panel="Sampling",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Option(help="Nucleus sampling. Default: as for --temp.", rich_help_panel="Sampling"),
    ] = None
    seed: Annotated[int, Option(help="Sampling seed.", rich_help_panel="Sampling")] = 0
    quiet: Annotated[
        bool,
        Option(
            "--quiet",
            "-q",
            help="Hide the banner, the layer report and figures.",
            rich_help_panel="Output",
        ),
    ] = False
    think: Annotated[
        bool | None,
        Option(
            help="Turn thinking on or off (enable_thinking).",
            rich_help_panel="Model",
        ),
    ] = None
    chat_template_args: Annotated[str | None, Option(help="JSON for the chat template.")] = None
    kv_strict: Strict = False
    raw: Annotated[
        bool,
        Option(
            "--raw", help="No chat template: continue the text as it is.", rich_help_panel="Model"
        ),
    ] = False
    load: Annotated[
        str | None, Option(help="Continue a saved session.", rich_help_panel="Model")
    ] = None
    pack: Annotated[
        str | None,
        Option(
            "--with",
            metavar="PACK",
            help="Begin after a pack of mlxkv read, with its model and preset.",
            rich_help_panel="Model",
        ),
    ] = None
    adapter_path: AdapterPath = None
    dtype: Dtype = None
    weights: Weights = None
    calibration: Calibration = None
    json: Json = False

    def __post_init__(self):
        if self.text and self.prompt is not None:
            raise UserError(
                f"[--prompt] says what the text says; got both, {self.prompt[:40]!r} and "
                f"{' '.join(self.text)[:40]!r}; leave one of them out"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"[--max-tokens] must be at least 1; got {self.max_tokens}")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"[--seed] must be 0 or more, below 2^64; got {self.seed}")
        for other in ("load", "system"):
            if self.pack is not None and getattr(self, other) is not None:
                raise UserError(
                    f"[--with] a pack begins the conversation; got --{other}, too; leave one of them out"
                )
        check_sampling(self.temp, self.top_p)
        _ = self.cache
        fitting_sizes(self.kv, self.memory, self.context)
        dtype_name(self.dtype)
        check_weights(self.weights)
        _ = self.template  # raises for invalid JSON
        if self.raw and (self.system or self.template):
            name = "--system" if self.system else "--chat-template-args"
            raise UserError(f"[{name}] needs a chat template; it cannot go with --raw")

    @property
    def preset(self) -> str:
        """Return the canonical name of `--kv`."""
        return canonical(self.kv)

    @property
    def saved(self) -> str | None:
        """Return the session or the pack to continue, or None."""
        return self.pack if self.load is None else self.load

    @property
    def cache(self) -> CacheConfig | str:
        """Return the configuration of `--kv`, or the share that it asks for, as text; for a session saved under a name
        that is gone, the file's configuration."""
        try:
            return requested(self.preset)
        except UserError:
            if self.load is None:
                raise
            head = session.read_header(session.file_named(self.load))
            if head.entries["kv_name"] != self.preset:
                raise
            return replace(session.cache_of(head), name=self.preset)

    @property
    def asked(self) -> str | None:
        """Return the text of the command line, or None. Arguments that are not UTF-8 contain surrogates."""
        text = " ".join(self.text) if self.text else self.prompt
        return None if text is None else text.encode("utf-8", "replace").decode("utf-8")

    @property
    def template(self) -> dict:
        """Return the extra arguments of the chat template."""
        return template_arguments(self.chat_template_args, self.think)
