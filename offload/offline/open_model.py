"""The model of a folder under an engine that does not train it, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from offload.config import read_json
from offload.engine.inference import InferenceEngine, inference, read_model
from offload.errors import ConfigError, OffloadError, UsageError
from offload.finetune.model import read_tokenizer
from offload.losses import chunk_loss_of
from offload.offline.static_cache import beside_cache, cache_nbytes, device_nbytes, value_nbytes
from offload.presets import check_folder, check_positions, error_message, positions_of, require_transformers
from offload.sizes import count_of, format_size

_LONGEST = 1024
"""Default of the longest row, for models that have more positions."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Options of a command about where a model runs. None leaves the choice to the engine."""

    config: Path | None = None
    """DeepSpeed JSON file; the other options overrule it."""
    dtype: str | None = None
    """Dtype of the weights; None for that of the files."""
    device: str | None = None
    host_memory: str | None = None
    device_memory: str | None = None
    static_cache: int | None = None
    """Most tokens of a prompt and its continuation, whose keys and values have memory of their own from the begin."""
    cache_on_host: bool = False
    """True to keep that memory on the host."""
    rows: int = 1
    """Prompts of a batch."""

    def content(self) -> dict[str, Any]:
        """Returns the config of the engine. Raises `ConfigError` if the file cannot be read."""
        content = {} if self.config is None else dict(read_json(self.config))
        if self.dtype is not None:
            content |= {name: {"enabled": name == self.dtype} for name in ("bf16", "fp16")}
            content.pop("bfloat16", None)  # DeepSpeed's older name
        given = {"device": self.device, "host_memory": self.host_memory, "device_memory": self.device_memory}
        block = content.get("offload", {})
        if isinstance(block, Mapping):
            content["offload"] = {**block, **{name: value for name, value in given.items() if value is not None}}
        return content


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A model that is ready to run."""

    engine: InferenceEngine
    tokenizer: Any
    rewards: bool
    """True if the model's output for a row is its score: a model of transformers for sequence classification."""
    chunked: bool
    """True if a call with labels returns the loss of each row, and never holds all logits."""
    lines: tuple[str, ...]
    """Lines for the user."""

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.engine.module.config

    def longest(self, wanted: int | None) -> int:
        """Returns the most tokens of a row: as wanted, else the model's positions, at most 1024.

        Raises:
            ConfigError: The model has fewer positions than wanted.
        """
        # At the start: a longer row may come after hours.
        if wanted is not None:
            check_positions(self.config, wanted)
        return wanted or min(positions_of(self.config) or _LONGEST, _LONGEST)


def open_model(
    name: str, placement: Placement, *, scores: bool, check: Callable[[Any, Any], object] | None = None
) -> OpenModel:
    """Returns the model of a folder under an engine.

    Args:
        name: path of the folder.
        placement: where the model runs.
        scores: True to score records, False to generate.
        check: called with tokenizer and config before the weights are opened, which may take long; may raise.

    Raises:
        ConfigError: The folder contains no model that can do that, or an option is wrong.
        StoreError: Its files are missing or damaged.
        BudgetError: A memory budget is too small.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}; give a model's folder: config.json, tokenizer, safetensors. A model on the "
            "hub is fetched first: hf download OWNER/NAME --local-dir NAME"
        )
    check_folder(folder)
    require_transformers()
    content = placement.content()  # a wrong config is reported before the model is built
    tokenizer = read_tokenizer(folder)
    try:
        model = read_model(folder, None, {"trust_remote_code": False})
    except OffloadError:
        raise
    except Exception as error:  # code of transformers, with the values of a file that may be anybody's
        raise ConfigError(f"cannot build the model of {folder}: {error_message(error)}") from error
    # By its name, as transformers has no other mark of what a head is for.
    rewards = type(model).__name__.endswith("ForSequenceClassification")
    # Before the engine takes the model over: hooks of layers that come later may be taken away.
    chunked, lines = _prepare(model, rewards) if scores else (False, ())
    config: Any = model.config
    if check is not None:
        check(tokenizer, config)
    if placement.static_cache is not None:
        check_positions(config, placement.static_cache, "--static-cache")
        nbytes = cache_nbytes(config, placement.static_cache, placement.rows, value_nbytes(content, config))
        on_host = placement.cache_on_host
        content = beside_cache(content, device_nbytes(config, placement.static_cache, nbytes, on_host))
        lines = (
            f"keys and values of {count_of(placement.rows, 'prompt')} of at most {placement.static_cache} tokens take "
            f"{format_size(nbytes)} of {'host' if on_host else 'device'} memory",
        )
    engine = inference(model, content)
    return OpenModel(engine=engine, tokenizer=tokenizer, rewards=rewards, chunked=chunked, lines=lines)


def _prepare(model: nn.Module, rewards: bool) -> tuple[bool, tuple[str, ...]]:
    """Makes a model return losses by row, and returns whether it does, and a line if it does not.

    Raises:
        ConfigError: The model gives no score.
    """
    if rewards:
        return False, ()
    whole: Any = model
    if not hasattr(model, "get_output_embeddings") or whole.get_output_embeddings() is None:
        raise ConfigError(
            f"{type(model).__name__} gives no log-likelihood and no reward: give a causal language model, or a model "
            "for sequence classification"
        )
    if whole.config.is_encoder_decoder:
        raise ConfigError(
            f"{type(model).__name__} has an encoder and a decoder, which score does not run: give a causal language "
            "model, or call the engine of offload.inference with labels"
        )
    try:
        chunk_loss_of(model, evaluation=True, by_row=True)
    except UsageError as error:
        return False, (f"all logits of a micro-batch are held at once: {error}",)
    return True, ()
