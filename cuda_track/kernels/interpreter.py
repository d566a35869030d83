"""Run Triton's kernels on the CPU: import this before any module that imports triton."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter  # noqa: E402 (it reads the environment)

_patch_tensor = interpreter._patch_lang_tensor


def _with_index(tensor, scope) -> None:
    """Triton 3.6 turns arrays of one element into integers, which NumPy 2.4 no longer does."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_index

# Triton patches its language anew at each call of a function inside a kernel, thousands of times in one: a third of
# the time. Once a kernel is enough, since nothing undoes it before the kernel ends.
_patch_lang, _restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
_patched: set = set()


def _once(fn):
    if fn not in _patched:
        _patched.add(fn)
        return _patch_lang(fn)


def _end(self) -> None:
    _restore(self)
    _patched.clear()


interpreter._patch_lang, interpreter._LangPatchScope.restore = _once, _end
