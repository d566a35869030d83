"""The programs that `mlxkv launch` starts: how each is told where its model is. Imports nothing heavy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

KEY = "MLXKV_API_KEY"  # the variable in which OpenCode and Codex find the key
MOST_OUTPUT = 8192  # tokens of one reply, at the most; memory is set aside for as many


@dataclass(frozen=True)
class Served:
    """The server that a program is to use. longest: tokens of a sequence, its reply included."""

    url: str
    key: str
    model: str
    longest: int

    @property
    def output(self) -> int:
        """Tokens of a reply: a quarter of what fits leaves room for the conversation."""
        return max(1, min(MOST_OUTPUT, self.longest // 4))


@dataclass(frozen=True)
class Start:
    """How a program is started. unset: variables that would lead it elsewhere."""

    env: dict[str, str]
    args: list[str] = field(default_factory=list)
    unset: tuple[str, ...] = ()


def claude(served: Served) -> Start:
    """code.claude.com/docs/en/env-vars and .../llm-gateway."""
    model = served.model
    names = ("OPUS", "SONNET", "HAIKU")
    env = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_MODEL": model,
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": model for name in names},
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.output),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(served.longest),
        # The others of its services are Anthropic's.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # A line that differs in each request would stand before everything that a cache holds.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    # A key has precedence over the token.
    return Start(
        env, unset=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
    )


def opencode(served: Served) -> Start:
    """opencode.ai/docs/config and .../providers."""
    limit = {"context": served.longest, "output": served.output}
    model = {"name": served.model, "limit": limit, "tool_call": True}
    options = {"baseURL": f"{served.url}/v1", "apiKey": f"{{env:{KEY}}}"}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxkv",
        "options": options,
        "models": {served.model: model},
    }
    name = f"mlxkv/{served.model}"
    config = {"provider": {"mlxkv": provider}, "model": name, "small_model": name}
    return Start({"OPENCODE_CONFIG_CONTENT": json.dumps(config), KEY: served.key})


def codex(served: Served) -> Start:
    """developers.openai.com/codex/config-advanced; values are TOML."""
    provider = "model_providers.mlxkv"
    settings = {
        "model": served.model,
        "model_provider": "mlxkv",
        f"{provider}.name": "mlxkv",
        f"{provider}.base_url": f"{served.url}/v1",
        f"{provider}.env_key": KEY,
        f"{provider}.wire_api": "responses",
        "model_context_window": served.longest,
        "web_search": "disabled",  # a tool that runs at OpenAI
    }
    args = [
        part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")
    ]
    return Start({KEY: served.key}, args)


@dataclass(frozen=True)
class Tool:
    """A program, how to install it, and how it is started."""

    program: str
    install: str
    start: object


TOOLS = {
    "claude": Tool("claude", "npm install -g @anthropic-ai/claude-code", claude),
    "opencode": Tool("opencode", "npm install -g opencode-ai", opencode),
    "codex": Tool("codex", "npm install -g @openai/codex", codex),
}
