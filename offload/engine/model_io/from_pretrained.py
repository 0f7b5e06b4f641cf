"""Inside `offload.init`, `from_pretrained` of transformers reads a folder as `load_pretrained` does: unit by unit.

transformers' own way has the whole model in memory at once. It is left to what `load_pretrained` does not do: a name of
the hub, weights in another format, keywords about how to read. There the model has the same values, all in memory.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_NO_VALUES = frozenset(
    "low_cpu_mem_usage use_safetensors local_files_only cache_dir force_download token proxies trust_remote_code "
    "revision code_revision adapter_kwargs _commit_hash _from_auto _fast_init weights_only disable_mmap".split()
)
"""Keywords that change no value of what is read from a folder."""
_THEIRS = ("state_dict", "subfolder", "variant", "from_tf", "from_flax", "gguf_file", "key_mapping", "fusion_config")
"""Keywords that `load_pretrained` does not have; what it refuses itself is not among them."""


@contextlib.contextmanager
def streaming(load: Callable[..., Any]) -> Iterator[None]:
    """Lets `from_pretrained` of transformers stream a local folder, in this thread.

    Args:
        load: is called as `load(model_class, folder, output_loading_info=True, **keywords)` in place of it, and
            returns the model and what `load_pretrained` tells of its loading.
    """
    if "transformers" not in sys.modules:  # what is imported inside reads its own way
        yield
        return
    from transformers import PreTrainedModel

    patched: Any = PreTrainedModel
    original = patched.__dict__["from_pretrained"]
    thread = threading.get_ident()

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        theirs: Any = original.__get__(None, cls)
        if threading.get_ident() != thread or _is_inside() or args or any(kwargs.get(each) for each in _THEIRS):
            return theirs(name, *args, **kwargs)
        if name is None or not (Path(name).is_dir() and any(Path(name).glob("*.safetensors"))):
            return theirs(name, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        fit = {key: value for key, value in kwargs.items() if key not in (*_NO_VALUES, *_THEIRS)}
        fit["model_config"] = fit.pop("config", None)
        with _inside():
            model, info = load(cls, name, output_loading_info=True, **fit)
        return (model, info._asdict()) if wants_info else model

    patched.from_pretrained = classmethod(from_pretrained)  # each AutoModel calls it too
    try:
        yield
    finally:
        patched.from_pretrained = original


class _Depth(threading.local):
    inside = False


_depth = _Depth()


def _is_inside() -> bool:
    """Whether `load_pretrained` is building a model, which may have others inside."""
    return _depth.inside


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _depth.inside = True
    try:
        yield
    finally:
        _depth.inside = False
