"""LoRA adapters of peft: `offload merge` adds one to the weights of its base model, in the memory of a few pieces.

    base/*.safetensors ─► tensor after tensor, a piece of rows at a time ─► out/*.safetensors
                              └ adapted: W + scaling * B @ A in fp32, rounded once to the dtype of W

The names, shapes and dtypes of the base's files stay, so whatever loads the base loads the result. `MergePlan.adapted`
returns the model that runs with its adapter, and writes no file: A and B stay beside W, which is read in place.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from offload.errors import ConfigError, NumericsError, StoreError
from offload.fileio.inner_files import read_bounded
from offload.fileio.safetensors_stream import SafetensorsWriter, read_header, unrepeated
from offload.hub import local_model
from offload.model_io.base_files import find_difference
from offload.model_io.deferred import make_deferred, origin_of
from offload.model_io.folder import CONFIG, GENERATION, INDEX, SINGLE, Stored, stored_tensors
from offload.model_io.save import TOKENIZER, arriving, check_room, copy_tokenizer
from offload.offline.open_model import deferred_model
from offload.presets import check_folder, require_transformers
from offload.sizes import MIB

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PIECE_NBYTES = 16 * MIB
"""Bytes of a piece of rows in fp32; its change and its rounded values take as much again."""
_PREFIX = "base_model.model."
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of peft's `init_lora_weights` that leave the base model's weights as they are."""
_MEANS_NOTHING: tuple[Any, ...] = (None, False, [], {}, "none")
_REFUSED = (
    *("layer_replication", "target_parameters", "lora_bias", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
    *("arrow_config", "kasa_config", "monteclora_config"),
)
"""Settings of an adapter that compute something else than a sum of products per weight."""


_Apply = Callable[[range, torch.Tensor], torch.Tensor]
"""Takes some rows of a weight and their values, (rows, …) fp32, which it may overwrite; returns the merged values."""


class _Change(Protocol):
    """What an adapter does to one weight. Only its shapes are known until the weight's turn comes."""

    def fits(self, shape: tuple[int, ...]) -> bool: ...

    def read(self) -> _Apply: ...


class _LowRank(NamedTuple):
    """scaling * B @ A, transposed for embeddings and for layers whose weight is (in, out)."""

    a: Stored
    """(rank, in)"""
    b: Stored
    """(out, rank)"""
    scaling: float
    transposed: bool
    start: Stored | None
    """Values that peft has saved in place of the base's, (out, in), as it does for embeddings; None for the base's."""
    magnitude: Stored | None
    """(out,), norms of the rows of the merged weight with DoRA (arXiv 2402.09353, equation 5)."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        out, into = self.b.shape[0], self.a.shape[1]
        product = (into, out) if self.transposed else (out, into)
        return shape == product and (self.start is None or shape == self.start.shape)

    def read(self) -> _Apply:
        a, b = self.a.whole().float(), self.b.whole().float()
        left, right = (a.t(), b.t()) if self.transposed else (b, a)
        norms = None if self.magnitude is None else self.magnitude.whole().float().view(-1, 1)

        def apply(rows: range, values: torch.Tensor) -> torch.Tensor:
            of = slice(rows.start, rows.stop)
            if self.start is not None:
                values = _rows_of(self.start, rows)
            values.addmm_(left[of], right, alpha=self.scaling)
            return values if norms is None else values.mul_(norms[of] / values.norm(dim=1, keepdim=True))

        return apply


class _Replaced(NamedTuple):
    """A module of `modules_to_save`, or a bias that was trained."""

    stored: Stored

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.stored.shape == shape

    def read(self) -> _Apply:
        return lambda rows, values: _rows_of(self.stored, rows)


class _TokenRows(NamedTuple):
    """Rows of an embedding that were trained (`trainable_token_indices`)."""

    indices: torch.Tensor
    """(n,) int64"""
    rows: Stored
    """(n, features)"""

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and self.rows.shape[1] == shape[1] and int(self.indices.max()) < shape[0]

    def read(self) -> _Apply:
        new = self.rows.whole().float()

        def apply(rows: range, values: torch.Tensor) -> torch.Tensor:
            here = (self.indices >= rows.start) & (self.indices < rows.stop)
            values[self.indices[here] - rows.start] = new[here]
            return values

        return apply


@dataclass(frozen=True, kw_only=True)
class MergePlan:
    """Decisions of a merge, made before any file is created."""

    adapter: Path
    base: Path
    tensors: Mapping[str, Stored]
    """All tensors of the base model's files."""
    changes: Mapping[str, _Change]
    """Changes of some of them, by their names in the files."""
    model: torch.nn.Module
    """The base model, with deferred parameters."""
    notices: tuple[str, ...]
    """Lines for the user."""

    @classmethod
    def of(cls, adapter: Path, base: str | None = None) -> MergePlan:
        """Returns the plan for an adapter of peft. Reads headers of files alone.

        LoRA, rsLoRA and DoRA are merged, and biases, token rows and modules that the training saved whole.

        Args:
            adapter: Folder with `adapter_config.json` and `adapter_model.safetensors`.
            base: Folder of the base model, or its name on the hub, which may be another one than that of the training;
                None for the one that the adapter names.

        Raises:
            ConfigError: The adapter computes something that is no sum with a weight, or does not fit the base model.
            StoreError: Files are missing or damaged, or the base model that the adapter names is another one now.
            IoError: A file cannot be read.
        """
        settings = _read_settings(adapter)
        folder = _base_of(settings, adapter) if base is None else Path(local_model(base))
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}; give the folder of the base model by --base")
        weights = adapter / ADAPTER_WEIGHTS
        different = find_difference(read_header(weights)[1], folder) if weights.is_file() else None
        if different is not None and base is None:
            raise StoreError(
                f"{different}; put the file back, or give the folder of the model to take by --base, which may be "
                f"{folder} as it is"
            )
        check_folder(folder)
        require_transformers()
        tensors = stored_tensors(folder)
        unsafe = next((stored.path for stored in tensors.values() if stored.path.suffix != ".safetensors"), None)
        if unsafe is not None:
            raise ConfigError(f"{unsafe} is no safetensors file: load and save the base model by transformers once")
        model = deferred_model(folder)
        if not weights.is_file():
            raise StoreError(f"{adapter} contains no {ADAPTER_WEIGHTS}; save the adapter as safetensors")
        changes = _changes(settings, stored_tensors(weights), _places(model, folder), adapter, folder)
        notices = () if different is None else (different,)
        return cls(adapter=adapter, base=folder, tensors=tensors, changes=changes, model=model, notices=notices)

    @property
    def nbytes(self) -> int:
        return sum(stored.place.tensor.nbytes for stored in self.tensors.values())

    def write(self, out: Path, progress: Callable[[int], None] = lambda _: None) -> tuple[str, ...]:
        """Writes the merged model into a new folder, all files at once at the end. Returns notices about leftovers.

        `progress` is called with the bytes of each piece that was written.

        Raises:
            NumericsError: A merged weight has inf or NaN.
            StoreError: `out` contains something else, its drive has no room, or a file of the base has changed.
            IoError: Something cannot be read or written.
        """
        files = sorted({stored.path for stored in self.tensors.values()})
        notices = [*self.notices]
        with arriving(out, notices.append) as folder:
            check_room(folder, self.nbytes, out)
            placed: dict[str, str] = {}
            for number, path in enumerate(files, 1):
                name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
                of_file = {key: stored for key, stored in self.tensors.items() if stored.path == path}
                tensors = {key: stored.place.tensor for key, stored in of_file.items()}
                with SafetensorsWriter(folder / name, tensors, {"format": "pt"}) as writer:
                    for key, stored in of_file.items():
                        for start, data in _merged(stored, self.changes.get(key)):
                            writer.write(key, start, data)
                            progress(len(data))
                placed |= dict.fromkeys(of_file, name)
            if len(files) > 1:
                index = {"metadata": {"total_size": self.nbytes}, "weight_map": placed}
                (folder / INDEX).write_text(json.dumps(index, indent=2))
            _copy_texts(self.adapter, self.base, folder)
        return tuple(notices)

    def adapted(self) -> torch.nn.Module:
        """Returns the model with its adapter, as deferred parameters. To be called once.

        A linear layer computes its low-rank product beside its weight. Any other weight that the adapter changes is
        merged when it is read.
        """
        linear = (torch.nn.Linear, require_transformers().pytorch_utils.Conv1D)
        for name, parameter in list(self.model.named_parameters()):
            origin = origin_of(parameter)
            change = self.changes.get(origin.name) if isinstance(origin, Stored) else None
            layer = self.model.get_submodule(name.rpartition(".")[0])
            if (
                isinstance(change, _LowRank)
                and type(layer) in linear
                and (change.start, change.magnitude) == (None, None)
            ):
                _add_product(layer, change)
            elif change is not None:
                assert isinstance(origin, Stored)
                make_deferred(parameter, _MergedParameter(origin, change))
        return self.model


def _add_product(layer: Any, change: _LowRank) -> None:
    """Makes a linear layer add scaling * B @ A @ input to its output, in the dtype of A and B."""
    for name, stored in (("lora_A", change.a), ("lora_B", change.b)):
        parameter = torch.nn.Parameter(torch.empty(stored.shape, dtype=stored.dtype, device="meta"), False)
        make_deferred(parameter, stored)
        layer.register_parameter(name, parameter)
    # In transformers' words for a layer whose weights in fp32 stay so beside others in 16 bits.
    layer._keep_in_fp32_modules = ["lora_A", "lora_B"]

    def add(layer: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        low = torch.nn.functional.linear(args[0].to(layer.lora_A.dtype), layer.lora_A)
        return output + (torch.nn.functional.linear(low, layer.lora_B) * change.scaling).to(output.dtype)

    layer.register_forward_hook(add)


class _MergedParameter(NamedTuple):
    """A weight and what an adapter does to it; implements `Origin`."""

    stored: Stored
    change: _Change

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def pieces(self, part: range | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        width = max(math.prod(self.shape[1:]), 1)
        begin, stop = (0, math.prod(self.shape)) if part is None else (part.start, part.stop)
        for first, values in _merged_rows(self.stored, self.change, range(begin // width, -(-stop // width))):
            flat, start = values.view(-1), first * width
            inside = flat[max(begin - start, 0) : stop - start]
            yield max(start - begin, 0), inside


def _copy_texts(adapter: Path, base: Path, folder: Path) -> None:
    """Copies configs of the base, and the adapter's tokenizer if it contains one: its training may have added words."""
    for name in (CONFIG, GENERATION):
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    own = next((source for source in (adapter, base) if any((source / name).is_file() for name in TOKENIZER)), None)
    if own is not None:
        copy_tokenizer(own, folder)


# -- weights -------------------------------------------------------------------------------------------


def _merged(stored: Stored, change: _Change | None) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes of a tensor in pieces, each with its position in the tensor."""
    itemsize = stored.dtype.itemsize
    if change is None:
        for position, values in stored.pieces():
            yield position * itemsize, _bytes_of(values)
        return
    width = math.prod(stored.shape[1:])
    for first, values in _merged_rows(stored, change, range(stored.shape[0])):
        yield first * width * itemsize, _bytes_of(values.view(-1))


def _merged_rows(stored: Stored, change: _Change, rows: range) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields merged rows of a tensor in pieces, (rows, …) in its dtype, each with the number of its first row."""
    apply = change.read()
    count = max(_PIECE_NBYTES // (4 * max(math.prod(stored.shape[1:]), 1)), 1)
    for first in range(rows.start, rows.stop, count):
        part = range(first, min(first + count, rows.stop))
        values = apply(part, _rows_of(stored, part)).to(stored.dtype).contiguous()
        if not values.isfinite().all():
            raise NumericsError(
                f"{stored.name} has inf or NaN after the merge: look at the adapter's training, and at the weights of "
                f"{stored.path}"
            )
        yield first, values


def _bytes_of(values: torch.Tensor) -> memoryview:
    flat: Any = values.view(torch.uint8).numpy()
    return memoryview(flat)


def _rows_of(stored: Stored, rows: range) -> torch.Tensor:
    """Returns rows of a tensor in a file, (rows, …) fp32."""
    width = math.prod(stored.shape[1:])
    values = torch.empty(len(rows) * width)
    for position, piece in stored.pieces(range(rows.start * width, rows.stop * width)):
        values[position : position + len(piece)] = piece
    return values.view(len(rows), *stored.shape[1:])


# -- adapter -------------------------------------------------------------------------------------------


def _read_settings(adapter: Path) -> dict[str, Any]:
    """Returns the settings of an adapter. Raises `ConfigError` for an adapter that cannot be merged."""
    path = adapter / ADAPTER_CONFIG
    if not path.is_file():
        raise StoreError(f"{adapter} contains no {ADAPTER_CONFIG}; expected the folder of an adapter of peft")
    try:
        settings = json.loads(read_bounded(path, 16 * MIB), object_pairs_hook=unrepeated)
        if not isinstance(settings, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not the JSON of an adapter: {error}") from error
    by_peft = f"merge it by peft: PeftModel.from_pretrained(model, {str(adapter)!r}).merge_and_unload()"
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {settings.get('peft_type')!r}, and offload merges LORA; {by_peft}")
    if settings.get("init_lora_weights") not in _INITIALIZATIONS:
        raise ConfigError(
            f"{path}: init_lora_weights {settings['init_lora_weights']!r} changes the base model's weights when the "
            f"adapter is made; {by_peft}"
        )
    refused = next((key for key in _REFUSED if settings.get(key) not in _MEANS_NOTHING), None)
    if refused is not None:
        raise ConfigError(f"{path} sets {refused}, which offload does not merge; {by_peft}")
    return settings


def _base_of(settings: Mapping[str, Any], adapter: Path) -> Path:
    name = settings.get("base_model_name_or_path")
    base = Path(local_model(name) if isinstance(name, str) else "")
    if not isinstance(name, str) or not base.is_dir():
        raise ConfigError(
            f"{adapter / ADAPTER_CONFIG} names the base model {name!r:.199}, which is no folder here: give its folder "
            "by --base"
        )
    return base


class _Parameter(NamedTuple):
    stored: Stored | None
    """The tensor of a file that has its values; None if the values are computed from several tensors."""
    tied: bool
    transposed: bool
    """True if a low-rank change is (in, out): of embeddings, and of layers such as GPT-2's `Conv1D`."""


def _places(model: torch.nn.Module, base: Path) -> dict[str, _Parameter]:
    config: Any = model.config
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"the weights of {base} are quantized: give the folder of the model before by --base")
    named = dict(model.named_parameters(remove_duplicate=False))
    uses: dict[int, int] = {}
    for parameter in named.values():
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    places = {}
    for name, parameter in named.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        origin = origin_of(parameter)
        places[name] = _Parameter(
            origin if isinstance(origin, Stored) and origin.shape == tuple(parameter.shape) else None,
            uses[id(parameter)] > 1,
            isinstance(owner, torch.nn.Embedding) or type(owner).__name__ == "Conv1D",
        )
    return places


_LOW_RANK = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<part>A|B)\.weight|lora_embedding_(?P<embedding>A|B)"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.weight)?|(?P<start>base_layer)\.weight)"
)
_TOKENS = re.compile(r"(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_delta")


def _changes(
    settings: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    places: Mapping[str, _Parameter],
    adapter: Path,
    base: Path,
) -> dict[str, _Change]:
    """Returns the change of each tensor of the base's files, by its name there."""
    weights = adapter / ADAPTER_WEIGHTS
    parts: dict[str, dict[str, Stored]] = {}
    changes: dict[str, _Change] = {}
    for key, stored in tensors.items():
        name = key.removeprefix(_PREFIX)
        if name == key:
            raise StoreError(f"{weights}: expected names that begin with {_PREFIX}, got {key!r:.99}")
        if match := _LOW_RANK.fullmatch(name):
            part = match["part"] or match["embedding"] or match["magnitude"] or "base_layer"
            parts.setdefault(match["module"], {})[part] = stored
        elif match := _TOKENS.fullmatch(name):
            changes[f"{match['module']}.weight"] = _token_rows(settings, match["module"], stored, weights)
        else:
            # A bias that was trained is, in the adapter, of the layer that peft has wrapped.
            changes[name.replace(".base_layer.", ".")] = _Replaced(stored)
    for module, of_module in parts.items():
        name = f"{module}.weight"
        changes[name] = _low_rank(settings, module, of_module, places.get(name), weights)
    return {_place(name, change, places, weights, base).name: change for name, change in changes.items()}


def _place(name: str, change: _Change, places: Mapping[str, _Parameter], weights: Path, base: Path) -> Stored:
    """Returns the tensor of the base's files that a change of the parameter `name` changes."""
    if name not in places:
        raise ConfigError(
            f"{weights} changes {name:.99}, which the model of {base} does not have: give the folder of the model "
            "that the adapter was trained on by --base"
        )
    stored, tied, _ = places[name]
    if stored is None:
        raise ConfigError(
            f"{weights} changes {name}, whose values transformers computes from several tensors of {base}: merge "
            "the adapter by peft"
        )
    if tied and not isinstance(change, _TokenRows):
        raise ConfigError(
            f"{weights} changes {name}, which is tied to another parameter, so that a merge would change both: use "
            "the adapter beside its base model"
        )
    if not change.fits(stored.shape):
        raise ConfigError(
            f"{weights} does not fit {name}, which is {list(stored.shape)} in {base}: give the folder of the model "
            "that the adapter was trained on by --base"
        )
    return stored


def _low_rank(
    settings: Mapping[str, Any], module: str, parts: Mapping[str, Stored], place: _Parameter | None, weights: Path
) -> _LowRank:
    a, b, magnitude = parts.get("A"), parts.get("B"), parts.get("lora_magnitude_vector")
    matrices = a is not None and b is not None and len(a.shape) == len(b.shape) == 2
    if a is None or b is None or not matrices or a.shape[0] != b.shape[1] or not a.shape[0]:
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in sorted(parts.items()))
        raise ConfigError(
            f"{weights}: expected matrices A, (rank, in), and B, (out, rank), of {module:.99}, got {shapes}; merge the "
            "adapter by peft"
        )
    alpha = _of_module(settings.get("alpha_pattern"), module, settings.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ConfigError(f"{weights.parent / ADAPTER_CONFIG}: expected a number as lora_alpha, got {alpha!r:.99}")
    transposed = place is not None and place.transposed
    if magnitude is not None and (transposed or math.prod(magnitude.shape) != b.shape[0]):
        raise ConfigError(
            f"{weights}: expected the norm of each row of {module:.99} for DoRA; merge the adapter by peft"
        )
    rank, written = a.shape[0], _of_module(settings.get("rank_pattern"), module, settings.get("r"))
    if rank != written:
        raise ConfigError(
            f"{weights} has matrices of rank {rank} for {module:.99}, and {ADAPTER_CONFIG} says {written!r:.99}: these "
            "are files of two adapters, or one was changed"
        )
    scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return _LowRank(a, b, scaling, transposed, parts.get("base_layer"), magnitude)


def _of_module(patterns: Any, module: str, default: Any) -> Any:
    """Returns the value of the first name that `module` ends with, as peft chooses it; `default` without one.

    peft takes names as regular expressions. A foreign one may take for ever, so only names are accepted.
    """
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(
                f"{ADAPTER_CONFIG} has the pattern {pattern!r:.99}, which is no name of modules; merge the adapter by "
                "peft"
            )
        if module == name or (not pattern.startswith("^") and module.endswith(f".{name}")):
            return value
    return default


def _token_rows(settings: Mapping[str, Any], module: str, rows: Stored, weights: Path) -> _TokenRows:
    indices = settings.get("trainable_token_indices")
    if isinstance(indices, dict):
        indices = _of_module(indices, module, None)
    tokens = isinstance(indices, list) and all(type(index) is int and 0 <= index < 2**31 for index in indices)
    if not tokens or not indices or len(rows.shape) != 2 or len(indices) != rows.shape[0]:
        raise ConfigError(
            f"{weights} has rows {list(rows.shape)} of {module:.99}; expected one for each token that "
            "trainable_token_indices names"
        )
    return _TokenRows(torch.tensor(indices), rows)
