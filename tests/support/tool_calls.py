"""A template whose tool calls mlx-lm reads as JSON, and a question for them."""

# mlx-lm finds its parser by the words of the template.
TEMPLATE = (
    "{% if tools %}<s>tools {{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}"
    "<tool_call>{{ tool_call.name }} {{ tool_call.arguments | tojson }}</tool_call>{% endfor %}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
