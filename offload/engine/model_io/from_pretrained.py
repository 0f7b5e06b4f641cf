"""Replacement of transformers' `from_pretrained` inside `offload.init`, which streams a folder unit by unit.

The original loads the complete model into memory at once. Calls that `load_pretrained` cannot serve still reach the
original: a name of the hub, weights in another format, keywords about how to read. A model from such a call has the
same values, but all of them are in memory.
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
"""Keywords that do not change the values that are read from a folder; `load_pretrained` does not receive them."""
_THEIRS = ("state_dict", "subfolder", "variant", "from_tf", "from_flax", "gguf_file", "key_mapping", "fusion_config")
"""Keywords that, if set, make a call go to the original. Others, but not `_NO_VALUES`, go to `load_pretrained`."""
_LEFT_OUT_IF_NONE = frozenset(
    "device_map quantization_config max_memory offload_folder generation_config distributed_config device_mesh tp_plan "
    "tp_size kernel_config tqdm_class".split()
)
"""Keywords of the original that are left out if None. None for any other keyword is a value for the model's config."""


@contextlib.contextmanager
def streaming(load: Callable[..., Any]) -> Iterator[None]:
    """Lets `from_pretrained` of transformers stream local folders, in this thread, while the context is open.

    Args:
        load: Called as `load(model_class, folder, output_loading_info=True, **keywords)` in place of `from_pretrained`;
            returns the model and its `LoadingInfo`.
    """
    if "transformers" not in sys.modules:  # an import inside the context is not patched
        yield
        return
    from transformers import PreTrainedModel

    patched: Any = PreTrainedModel
    original = patched.__dict__["from_pretrained"]
    thread = threading.get_ident()

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        theirs: Any = original.__get__(None, cls)
        # The patch is visible to all threads, and a model that is built below may call `from_pretrained` in its
        # constructor.
        if threading.get_ident() != thread or _is_inside() or args or any(kwargs.get(each) for each in _THEIRS):
            return theirs(name, *args, **kwargs)
        if name is None or not (Path(name).is_dir() and any(Path(name).glob("*.safetensors"))):
            return theirs(name, **kwargs)
        # An adapter is loaded by the original, which adds it to the model that it has loaded.
        if (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path") or Path(
            name, "adapter_config.json"
        ).exists():
            return theirs(name, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        fit = {
            key: value
            for key, value in kwargs.items()
            if key not in (*_NO_VALUES, *_THEIRS) and not (value is None and key in _LEFT_OUT_IF_NONE)
        }
        fit["model_config"] = fit.pop("config", None)
        with _inside():
            model, info = load(cls, name, output_loading_info=True, **fit)
        return (model, info._asdict()) if wants_info else model

    patched.from_pretrained = classmethod(from_pretrained)  # AutoModel classes call this method too
    try:
        yield
    finally:
        patched.from_pretrained = original


class _Depth(threading.local):
    """Flag of each thread: true while the replaced `from_pretrained` loads a model."""

    inside = False


_depth = _Depth()


def _is_inside() -> bool:
    """Returns True while the replaced `from_pretrained` loads a model in this thread, whose code may load others."""
    return _depth.inside


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """Sets the flag of this thread while the context is open."""
    _depth.inside = True
    try:
        yield
    finally:
        _depth.inside = False
