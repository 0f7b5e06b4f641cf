"""The model of a folder under an engine that does not train it, and its tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from offload.config import read_json
from offload.engine.memory_guard import beside_forward
from offload.errors import BudgetError, ConfigError, NumericsError, OffloadError, UsageError
from offload.finetune.corpus.packing import Document
from offload.finetune.corpus.token_stream import IGNORED
from offload.finetune.model import read_tokenizer
from offload.inference_engine import InferenceEngine, read_model, start
from offload.losses import chunk_loss_of
from offload.model_io.folder import CONFIG
from offload.model_io.save import TOKENIZER
from offload.offline.options import ModelOptions
from offload.presets import check_folder, check_positions, error_message, positions_of, require_transformers
from offload.sizes import count_of, format_size, parse_percent, parse_size

if TYPE_CHECKING:
    from offload.offline.merge import MergePlan

# -- static cache --------------------------------------------------------------------------------------
#
# The static cache of keys and values of `offload generate`, and its memory, known before a token is computed.


_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a value by the name of its dtype."""


_MOVING = 3
"""Layers of a host cache that are on an accelerator at a time: one in use, one in its upload, one in its download."""


def static_cache(config: Any, length: int, paged: bool = False) -> Any:
    """Returns an empty cache of transformers. Its memory is allocated at the first token.

    `length` is the most tokens of a prompt and its continuation. A paged cache keeps each layer's part in host memory
    between its uses on a GPU.
    """
    from transformers import StaticCache

    text = config.get_text_config(decoder=True)
    try:
        cache = StaticCache(config, max_cache_len=length, offloading=paged, offload_only_non_sliding=False)
        plain = all(getattr(layer, "max_cache_len", 0) for layer in cache.layers)
    # transformers raises these errors for layers without a static cache.
    except (AttributeError, KeyError, TypeError, ValueError):
        plain = False
    # Latent attention compresses keys and values, so that their width is not a head's width.
    if not plain or config.is_encoder_decoder or getattr(text, "kv_lora_rank", None):
        raise ConfigError(
            f"{config.model_type} keeps other values from token to token than the keys and values of its heads, for "
            "which there is no static cache: leave --static-cache out"
        )
    return cache


def is_paged(on_host: bool, device: torch.device) -> bool:
    """Returns True if the layers of a static cache move between host and device: with `on_host`, except on a CPU.

    Raises:
        ConfigError: the device is another accelerator: transformers moves caches only to CUDA GPUs.
    """
    if on_host and device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"--static-cache-on host is for GPUs of CUDA and for the CPU, and the model computes on {device.type}: "
            "leave it out"
        )
    return on_host and device.type == "cuda"


def device_nbytes(config: Any, length: int, nbytes: int, on_host: bool) -> int:
    """Returns the bytes of a static cache of `nbytes` that are on the device at a time."""
    if not on_host:
        return nbytes
    tokens: list[int] = [layer.max_cache_len for layer in static_cache(config, length).layers]
    return min(nbytes, _MOVING * max(tokens) * nbytes // sum(tokens))


def cache_nbytes(config: Any, length: int, rows: int, itemsize: int) -> int:
    """Returns the bytes of the static cache of a batch, for values of `itemsize` bytes.

    Layers with a sliding window keep no more tokens than the window.
    """
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = sum(layer.max_cache_len for layer in static_cache(config, length).layers)
    return 2 * rows * int(heads) * int(width) * int(tokens) * itemsize


def value_nbytes(content: Mapping[str, Any], config: Any) -> int:
    """Returns the bytes of one element of the cache, whose dtype is the compute dtype in the engine's config."""
    for name in ("bf16", "bfloat16", "fp16"):
        if name in content:
            return 2 if content[name].get("enabled") else 4
    return _DTYPES.get(str(config.dtype).removeprefix("torch."), 4)


def beside_cache(content: Mapping[str, Any], nbytes: int) -> dict[str, Any]:
    """Returns the config of the engine. If it has a device budget, the cache's bytes are subtracted."""
    block = content.get("offload", {})
    budget = block.get("device_memory", "auto")
    if budget == "auto" or parse_percent(budget) is not None:  # a percentage is of the weights alone
        return dict(content)
    left = parse_size(budget) - nbytes
    if left <= 0:
        raise BudgetError(
            f"the static cache takes {format_size(nbytes)} there, and the device budget is {budget}: raise "
            "--device-memory, lower --static-cache or --batch-size, or try --static-cache-on host"
        )
    return {**content, "offload": {**block, "device_memory": left}}


# -- open model ----------------------------------------------------------------------------------------


_LONGEST = 1024
"""Default length of the longest row, for models with more positions."""


class StaticCacheSize(NamedTuple):
    """The keys and values that get memory at the start."""

    tokens: int
    """Most tokens of a prompt and its continuation."""
    rows: int = 1
    """Prompts of a batch."""
    on_host: bool = False


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A model that is ready to run."""

    engine: InferenceEngine
    tokenizer: Any
    rewards: bool
    """True if the model's output for a row is the score: a model of transformers for sequence classification."""
    chunked: bool
    """True if a call with labels returns the loss of each row, and never holds all logits."""
    longest: int
    """Most tokens of a row."""
    rows: int
    """Rows of a micro-batch."""
    batch: int
    """Rows of a batch, for which the weights are read once."""
    lines: tuple[str, ...]
    """Lines for the user."""

    @property
    def config(self) -> Any:
        return self.engine.module.config


def open_model(
    options: ModelOptions,
    *,
    scores: bool = False,
    rows: int = 1,
    batch: int = 1,
    seq_len: int | None = None,
    cache: StaticCacheSize | None = None,
    check: Callable[[Any, Any], object] | None = None,
) -> OpenModel:
    """Returns the model of a folder under an engine, to score records or to generate.

    The folder may be that of an adapter of peft, which names its base model, unless the options do. To score, a
    micro-batch has at most `rows` rows, and a batch at most `batch`, of at most `seq_len` tokens; None stands for the
    model's positions, at most 1024. Where the CPU computes, both numbers are halved until a limit of memory has room.
    `check` is called with tokenizer and config before the weights are opened, since opening may take long. `check` may
    raise.

    Raises:
        ConfigError: The folder contains no suitable model, or an option is wrong.
        StoreError: The model's files are missing or damaged.
        BudgetError: A memory budget is too small.
    """
    folder = Path(options.model)
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}; give a model's folder: config.json, tokenizer, safetensors, or OWNER/NAME "
            "of a model on the hub"
        )
    content = _content(options)  # a wrong config is reported before the model is built
    plan = _adapter(folder, options.base)
    if plan is None:
        check_folder(folder)
        require_transformers()
        tokenizer = read_tokenizer(folder)
        model = deferred_model(folder)
    else:
        # A training may have added words, so an adapter may have a tokenizer of its own.
        tokenizer = read_tokenizer(folder if any((folder / file).is_file() for file in TOKENIZER) else plan.base)
        model = plan.adapted()
    # Decided by the class name, since transformers has no other mark of a head's purpose.
    rewards = type(model).__name__.endswith("ForSequenceClassification")
    # Called before the engine takes the model over: hooks that are registered later may be removed.
    chunked, lines = _prepare(model, rewards) if scores else (False, ())
    config: Any = model.config
    if check is not None:
        check(tokenizer, config)
    if cache is not None:
        check_positions(config, cache.tokens, "--static-cache")
        nbytes = cache_nbytes(config, cache.tokens, cache.rows, value_nbytes(content, config))
        content = beside_cache(content, device_nbytes(config, cache.tokens, nbytes, cache.on_host))
        lines = (
            f"keys and values of {count_of(cache.rows, 'prompt')} of at most {cache.tokens} tokens take "
            f"{format_size(nbytes)} of {'host' if cache.on_host else 'device'} memory",
        )
    if seq_len is not None:
        check_positions(config, seq_len)  # a longer row may come after hours
    longest = seq_len or min(positions_of(config) or _LONGEST, _LONGEST)
    itemsize = value_nbytes(content, config)
    asked = rows, batch = min(rows, batch), batch
    while True:
        waiting = max(batch - rows, 0) * longest
        beside = beside_forward(model, rows * longest, itemsize, chunked, waiting) if scores else {}
        try:
            engine = start(model, content, beside)
            break
        except BudgetError:
            if rows == batch == 1:
                # Records may be shorter than the longest row. The guard of memory looks at each batch.
                engine = start(model, content)
                break
        rows, batch = (rows // 2, batch) if rows > 1 else (1, max(batch // 2, 1))
    if (rows, batch) != asked:
        lines += (
            f"memory has no room for {asked[0]} of {asked[1]} rows of {longest} tokens at a time: a layer computes "
            f"{count_of(rows, 'row')} at a time, and the weights are read for each {count_of(batch, 'row')}; a shorter "
            "--seq-len leaves room for more",
        )
    return OpenModel(
        engine=engine,
        tokenizer=tokenizer,
        rewards=rewards,
        chunked=chunked,
        longest=longest,
        rows=rows,
        batch=batch,
        lines=(*(() if plan is None else plan.notices), *lines),
    )


def _content(options: ModelOptions) -> dict[str, Any]:
    """Returns the config of the engine. Raises `ConfigError` if the file cannot be read."""
    content = {} if options.config is None else dict(read_json(options.config))
    if options.dtype is not None:
        content |= {name: {"enabled": name == options.dtype} for name in ("bf16", "fp16")}
        content.pop("bfloat16", None)  # DeepSpeed's older name
    values = {name: getattr(options, name) for name in ("device", "host_memory", "device_memory")}
    block = content.get("offload", {})
    if isinstance(block, Mapping):
        content["offload"] = {**block, **{name: value for name, value in values.items() if value is not None}}
    return content


def _adapter(folder: Path, base: str | None) -> MergePlan | None:
    """Returns the plan of the adapter in a folder; None if the folder contains a model."""
    from offload.offline.merge import ADAPTER_CONFIG, MergePlan  # imports this module

    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
        return MergePlan.of(folder, base)
    if base is not None:
        raise ConfigError(f"--base {base} is the model of an adapter, and {folder} is no folder of one: leave it out")
    return None


def deferred_model(folder: Path) -> nn.Module:
    """Returns the model of a folder, with deferred parameters. Raises `ConfigError` if it cannot be built."""
    try:
        return read_model(folder, None, {"trust_remote_code": False})
    except OffloadError:
        raise
    except Exception as error:  # transformers may raise any error for the values of a foreign file
        raise ConfigError(f"cannot build the model of {folder}: {error_message(error)}") from error


def _prepare(model: nn.Module, rewards: bool) -> tuple[bool, tuple[str, ...]]:
    """Makes a model return losses by row. Returns True on success, and otherwise False with a line for the user."""
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


# -- rows ----------------------------------------------------------------------------------------------
#
# Rows of tokens, made from the records of files, and batches that are padded to their longest row.


_T = TypeVar("_T")


class TokenRow(NamedTuple):
    """A row of tokens of one record."""

    ids: np.ndarray
    """(n,) int32"""
    labels: np.ndarray
    """(n,) int32; -100 for tokens that do not count."""

    @property
    def counted(self) -> int:
        """Number of tokens whose likelihood counts: all tokens with a label except the row's first."""
        return int((self.labels[1:] != IGNORED).sum())


def rows_of(document: Document, length: int) -> list[TokenRow]:
    """Returns the rows of a record, each of at most `length` tokens; `length` is at least 2.

    A text is cut into windows. Each window begins with the last token of the previous one, so that each token except
    the first counts once. A chat or a completion becomes one row with its first tokens.
    """
    # The loss shifts labels, and so ignores the label of a row's first token.
    labels = np.where(document.learned, document.ids, np.int32(IGNORED))
    last = max(len(document.ids) - 1, 1) if document.divisible else 1
    starts = range(0, last, length - 1)
    return [TokenRow(document.ids[start : start + length], labels[start : start + length]) for start in starts]


def in_groups(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Yields lists of `size` items; the last one may be shorter."""
    group: list[_T] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def padded(rows: Sequence[np.ndarray], fill: int, left: bool = False) -> torch.Tensor:
    """Returns rows as (rows, longest) int64, padded with `fill` behind each row, or before it if `left`."""
    longest = max(len(row) for row in rows)
    array = np.full((len(rows), longest), fill, np.int64)  # embeddings take no int32 on every device
    for at, row in enumerate(rows):
        array[at, longest - len(row) :] = row if left else array[at, longest - len(row) :]
        if not left:
            array[at, : len(row)] = row
    return torch.from_numpy(array)


# -- finite --------------------------------------------------------------------------------------------
#
# The check that a model's logits are finite: a model whose weights contain NaN returns only NaN, without an error.


def refuse(place: str) -> NumericsError:
    """Returns the error for a record or prompt whose logits are not finite."""
    return NumericsError(
        f"the model's logits are not finite at {place}: its weights contain inf or NaN, or their products overflow in "
        "this dtype; look at the files of its folder, or give another --dtype, such as fp32"
    )


class FiniteLogits:
    """A logits processor of transformers that checks logits and changes nothing."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # NaN is its own maximum.
        wrong = ~(scores.amax(-1) < math.inf)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise refuse(self._places[row * len(self._places) // len(scores)])
        return scores
