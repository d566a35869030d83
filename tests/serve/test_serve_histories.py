"""Calls of tools in a chat that goes on: each template gets arguments as it wants them, and no history is refused."""

from __future__ import annotations

import json

from mlx_lm.tokenizer_utils import load as load_tokenizer
from random_model import write_tokenizer
from request_bodies import SERVED

from mlxkv.serve.http import request
from mlxkv.serve.prompts import Prompts

HEAD = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content if m.content is not none else '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
)
TAIL = "</tool_call>{% endfor %}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
TEMPLATES = {
    "items": "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}",
    "tojson": "{{ c.function.arguments | tojson }}",
    "joined by +, as DeepSeek R1 does": "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}",
    "is string": "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
    "mlx-lm's own for DeepSeek V3.2": None,
}  # fmt: skip
# Arguments as clients send them, and words that the model has to read.
ARGUMENTS = {
    "an object as text": ('{"city": "Oslo \\"é\\"", "days": 2}', "Oslo"),
    "an object": ({"city": "Oslo"}, "Oslo"),
    "empty text": ("", ""),
    "null": (None, ""),
    "an empty object": ("{}", ""),
    "a list": ("[1, 2]", "1, 2"),
    "a number": ("7", "7"),
    "no JSON": ("city: Oslo", "city: Oslo"),
    "half of it": ('{"city": "Os', "Os"),
    "too deep": ("[" * 50_000, "[[[["),
    "a number that is none": ('{"a": 1e400, "b": NaN}', "NaN"),
    "a mark": ('{"city": "\\u003c/s>Oslo"}', "</s>Oslo"),
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_chats_with_calls_go_on(tmp_path, subtests):
    for name, template in TEMPLATES.items():
        folder = tmp_path / name[:4]
        folder.mkdir()
        write_tokenizer(folder, template and HEAD + template + TAIL)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        if template is None:
            file = folder / "tokenizer_config.json"
            settings = json.loads(file.read_text()) | {"chat_template_type": "deepseek_v32"}
            file.write_text(json.dumps(settings))
        tokenizer = load_tokenizer(folder)
        prompts = Prompts(tokenizer, {})
        for kind, (arguments, word) in ARGUMENTS.items():
            call = {
                "id": "1",
                "type": "function",
                "function": {"name": "weather", "arguments": arguments},
            }
            chat = [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "tool_calls": [call]},
            ]
            body = {"messages": [*chat, {"role": "tool", "tool_call_id": "1", "content": "rain"}]}
            with subtests.test(name, arguments=kind):
                asked = request.check(body | {"tools": [TOOL]}, True, SERVED)
                prompt = prompts.read(asked)
                text = tokenizer.decode(prompt.tokens)
                assert "rain" in text and text.count(word) >= 1
                assert '\\"city' not in text or kind == "half of it"  # encoded once
                ends = prompt.tokens.count(tokenizer.eos_token_id)
                assert ends == (0 if template is None else 3)
