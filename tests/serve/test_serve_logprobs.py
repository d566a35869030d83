"""Log probabilities are those of the model: a float32 softmax of its logits, an entry for each token of the text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from serving import events, send, serving

from mlxkv.models import load

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
COUNT, BEST = 12, 5
LOUD = {"logit_bias": {"257": -100}}  # never the last token


def entries(server, path: str, stream: bool, **more) -> list[tuple[int, float, list[float]]]:
    """(token, its log-probability, those of the best) of a reply."""
    body = {"max_tokens": COUNT, "stream": stream, "temperature": 0, **LOUD, **more}
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": "Tell me."}]}
        body |= {"logprobs": True, "top_logprobs": BEST}
    else:
        body |= {"prompt": "Tell me.", "logprobs": BEST}
    status, _, data = send(server, "POST", path, body)
    assert status == 200, data
    choices = [
        c for part in (events(data) if stream else [json.loads(data)]) for c in part["choices"]
    ]
    documents = [choice["logprobs"] for choice in choices if "logprobs" in choice]
    if path == CHAT:
        steps = [step for one in documents for step in one["content"]]
        tops = [[best["logprob"] for best in step["top_logprobs"]] for step in steps]
        return [(step["id"], step["logprob"], top) for step, top in zip(steps, tops, strict=True)]
    numbers = [x for one in documents for x in one["token_logprobs"]]
    tops = [sorted(x.values(), reverse=True) for one in documents for x in one["top_logprobs"]]
    return [(-1, number, top) for number, top in zip(numbers, tops, strict=True)]


def softmax(folder, dtype: str, prompt: list[int]) -> list[tuple[int, float, list[float]]]:
    """The same by the model alone, a token at a time, without the last token."""
    model, _ = load(str(folder), "int4", dtype=dtype)
    caches, out = make_prompt_cache(model), []
    model(mx.array([prompt[:-1]]), cache=caches)
    token = prompt[-1]
    for _ in range(COUNT):
        logits = model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32)
        logits[257] -= 100
        logprobs = logits - mx.logsumexp(logits)
        token = mx.argmax(logprobs).item()
        out.append((token, logprobs[token].item(), mx.sort(logprobs)[-BEST:].tolist()[::-1]))
    return out


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("float16", 1e-3)])
def test_they_are_a_softmax_in_float32(model_folder, dtype, bound, subtests):
    """Where batches round otherwise than one row: logits of 16 bits differ in their last bit."""
    with serving(model_folder, dtype=dtype) as server:
        ids = server.engine.tokenizer.encode
        prompts = {CHAT: "<s>user\nTell me.</s>\n<s>assistant\n", TEXT: "Tell me."}
        for path, prompt in prompts.items():
            expected = softmax(model_folder, dtype, ids(prompt, add_special_tokens=False))
            for stream in (False, True):
                with ThreadPoolExecutor(3) as pool:
                    salts = [
                        f"{path}{stream}",
                        f"{path}{stream}",
                        "other",
                        "third",
                    ]  # the second is a hit
                    found = [entries(server, path, stream, cache_salt=salt) for salt in salts[:2]]
                    jobs = [
                        pool.submit(entries, server, path, stream, cache_salt=s) for s in salts[2:]
                    ]
                    found += [job.result() for job in jobs]
                for case, steps in zip(("cold", "hit", "batch", "batch"), found, strict=True):
                    with subtests.test(path, stream=stream, case=case):
                        assert len(steps) == COUNT
                        for (token, number, top), (id, value, best) in zip(
                            steps, expected, strict=True
                        ):
                            assert path == TEXT or token == id
                            assert number == pytest.approx(value, abs=bound)
                            assert top == pytest.approx(best, abs=bound)


def test_the_end_of_a_turn_has_no_entry(model_folder):
    body = {"prompt": "Tell me.", "logprobs": 1, "logit_bias": {"257": 100}, "max_tokens": 9}
    with serving(model_folder) as server:
        status, _, data = send(server, "POST", TEXT, body)
        (choice,) = json.loads(data)["choices"]
        assert status == 200 and choice["text"] == "" and not choice.get("logprobs")
