"""`offload export … OUT.gguf`: a model's folder as a file of llama.cpp, in the memory of a few pieces.

    folder/*.safetensors ─► tensor after tensor, a piece at a time ─► OUT.gguf
                              └ names by the package gguf; Llama's query and key rows in llama.cpp's order

Values stay in their dtype; biases and norms are written in fp32, as llama.cpp reads them. Only families whose names,
order of rows and tokenizer are known are written. For all others llama.cpp has a converter of its own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.aio.unanswered import sync
from offload.errors import ConfigError, StoreError
from offload.fileio import naming_errors, replace_durably
from offload.finetune.model import read_tokenizer
from offload.model_io.deferred import origin_of
from offload.model_io.folder import Stored
from offload.model_io.save import check_room
from offload.notices import folder_to_make
from offload.offline.open_model import deferred_model
from offload.presets import check_folder, quantized_bits

_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""Class of transformers ─► architecture of llama.cpp."""
_EXPECTED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
"""Settings of a model's config whose other values llama.cpp computes differently, or not at all."""
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_REGEX.format(digits=r"\p{N}{1,3}"): "llama-bpe", _REGEX.format(digits=r"\p{N}"): "qwen2"}
"""Regular expression of a tokenizer that splits texts ─► its name in llama.cpp, which has these expressions as code."""
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Types of tokens in a GGUF file."""


class _Written(NamedTuple):
    """A tensor of the new file, and where its values come from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Stored | torch.Tensor
    heads: int = 0
    """Heads whose rows change their order; 0 for all other tensors."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yields the values in order, in pieces that are valid until the next one."""
        if isinstance(self.source, torch.Tensor):
            yield self.source
        elif not self.heads:
            for _, values in self.source.pieces():
                yield values.to(self.dtype)
        else:
            numel = math.prod(self.shape) // self.heads
            head = torch.empty(numel, dtype=self.dtype)
            for start in range(0, numel * self.heads, numel):
                for position, values in self.source.pieces(range(start, start + numel)):
                    head[position : position + len(values)] = values
                # transformers rotates row i with row i + half of the head, llama.cpp row 2 i with row 2 i + 1.
                yield head.view(2, -1, *self.shape[1:]).transpose(0, 1).contiguous()


@dataclass(frozen=True, kw_only=True)
class GgufPlan:
    """Decisions of an export to GGUF, made before the file is created."""

    folder: Path
    architecture: str
    config: Any
    vocabulary: Mapping[str, Any]
    """Arguments of the writer's methods `add_…` by their names."""
    tensors: tuple[_Written, ...]

    @classmethod
    def of(cls, folder: Path, tokenizer: Path | None = None) -> GgufPlan:
        """Returns the plan for a model's folder. Reads the tokenizer, and of the weights the headers alone.

        Args:
            folder: Folder with config.json, safetensors files and, unless it is named, a tokenizer.
            tokenizer: Folder of the tokenizer; None for the model's.

        Raises:
            ConfigError: Of this model or tokenizer it is not known how llama.cpp computes it.
            StoreError: Files are missing or damaged.
        """
        library = _library()
        if quantized_bits(check_folder(folder)) is not None:
            raise _refusal(folder, "its weights are quantized")
        model: Any = deferred_model(folder)
        architecture, config = _FAMILIES.get(type(model).__name__), model.config
        if architecture is None:
            raise _refusal(folder, f"it is a {type(model).__name__}, and offload writes {', '.join(_FAMILIES)}")
        for key, value in _EXPECTED.items():
            if getattr(config, key, value) != value:
                raise _refusal(folder, f"its config sets {key} to {getattr(config, key)!r:.99}")
        names = library.get_tensor_name_map(getattr(library.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        tensors = [_factors(config, folder, architecture)] if _rope(config)["rope_type"] != "default" else []
        for name, parameter in model.named_parameters():
            stored, new = origin_of(parameter), names.get_name(name, try_suffixes=(".weight", ".bias"))
            if not isinstance(stored, Stored) or stored.dtype not in _DTYPES or new is None:
                raise _refusal(folder, f"its weight {name} is not a tensor in fp32, fp16 or bf16 that llama.cpp has")
            permuted = heads.get(new.split(".")[-2], 0) if architecture == "llama" else 0
            dtype = stored.dtype if len(stored.shape) > 1 else torch.float32
            tensors.append(_Written(new, stored.shape, dtype, stored, permuted))
        vocabulary = _vocabulary(tokenizer or folder, config, folder)
        return cls(
            folder=folder, architecture=architecture, config=config, vocabulary=vocabulary, tensors=tuple(tensors)
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, out: Path, progress: Callable[[int], None] = lambda _: None) -> None:
        """Writes the file, which must not exist. A failure leaves nothing.

        `progress` is called with the bytes of each piece that was written.

        Raises:
            StoreError: There is something at `out`, its drive has no room, or a file of the model has changed.
            IoError: Something cannot be read or written.
        """
        check_file(out)
        check_room(out.parent, self.nbytes, out)
        library = _library()
        # A name that nobody guesses: in a folder that others may write, a link could wait.
        partial = out.with_name(f".{out.name}.{os.urandom(8).hex()}")
        try:
            with naming_errors(out, "write"):
                writer = library.GGUFWriter(partial, self.architecture)
                self._describe(writer, library)
                for tensor in self.tensors:
                    kind = getattr(library.GGMLQuantizationType, _DTYPES[tensor.dtype])
                    writer.add_tensor_info(tensor.name, tensor.shape, None, tensor.nbytes, kind)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                # The writer takes whole tensors, so their bytes are written here.
                with writer.fout[0] as file:
                    writer.write_padding(file, file.tell())
                    for tensor in self.tensors:
                        for values in tensor.pieces():
                            flat: Any = values.view(-1).view(torch.uint8).numpy()
                            file.write(memoryview(flat))
                            progress(values.nbytes)
                        writer.write_padding(file, tensor.nbytes)
                    file.flush()
                    sync(file.fileno(), out)
                replace_durably(partial, out)
        finally:
            partial.unlink(missing_ok=True)

    def _describe(self, writer: Any, library: Any) -> None:
        config, head = self.config, _head_width(self.config)
        kind = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}
        largest = max(self.tensors, key=lambda tensor: tensor.nbytes)
        values = {
            "type": library.GGUFType.MODEL,
            "name": self.folder.resolve().name,
            "file_type": getattr(library.LlamaFileType, kind[largest.dtype]),
            "quantization_version": library.GGML_QUANT_VERSION,
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "head_count": config.num_attention_heads,
            "head_count_kv": config.num_key_value_heads,
            "key_length": head,
            "value_length": head,
            "rope_dimension_count": head,
            "rope_freq_base": _rope(config)["rope_theta"],
            "layer_norm_rms_eps": config.rms_norm_eps,
            "vocab_size": config.vocab_size,
            **self.vocabulary,
        }
        for name, value in values.items():
            getattr(writer, f"add_{name}")(value)


def check_file(out: Path) -> None:
    """Raises `StoreError` if there is something at `out`, or no folder for it."""
    if out.exists() or out.is_symlink():
        raise StoreError(f"{out} exists already; give the file another name, or delete it")
    if not out.parent.is_dir():
        raise StoreError(f"there is no folder {folder_to_make(out.parent)}")


def _library() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ConfigError("gguf is not installed; run: pip install 'offload[gguf]'") from error
    return gguf


def _refusal(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot write {folder} as GGUF: {why}; use llama.cpp's own converter, convert_hf_to_gguf.py, with a folder "
        "of safetensors"
    )


# -- positions -----------------------------------------------------------------------------------------


def _rope(config: Any) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = config.rope_parameters
    return rope


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _factors(config: Any, folder: Path, architecture: str) -> _Written:
    """Returns the divisors of Llama 3.1's frequencies, which llama.cpp reads as a tensor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = _rope(config)
    if architecture != "llama" or rope["rope_type"] != "llama3":
        raise _refusal(folder, f"its positions are of the kind {rope['rope_type']!r:.99}")
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = _head_width(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    factors = (plain / scaled).float()
    return _Written("rope_freqs.weight", tuple(factors.shape), torch.float32, factors)


# -- tokenizer -----------------------------------------------------------------------------------------


def _vocabulary(source: Path, config: Any, folder: Path) -> dict[str, Any]:
    """Returns the tokenizer as values of GGUF.

    llama.cpp has its own tokenizer, which works as the one of transformers does if merges, kinds of tokens and the
    expression that splits texts are the same.
    """
    tokenizer = read_tokenizer(source)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refusal(folder, "its tokenizer has no tokenizer.json")
    content = json.loads(backend.to_str())
    model, added = content["model"], content["added_tokens"]
    split = _split(content)
    if split is None or not model["merges"] or model.get("byte_fallback") or model.get("dropout"):
        raise _refusal(folder, "its tokenizer is not the byte-level BPE of Llama 3, Qwen or GPT-2")
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added):
        raise _refusal(folder, "its tokenizer has tokens that take the spaces beside them")
    tokens = {number: (text, _NORMAL) for text, number in model["vocab"].items()}
    tokens |= {token["id"]: (token["content"], _CONTROL if token["special"] else _USER_DEFINED) for token in added}
    if max(tokens) >= config.vocab_size:
        raise _refusal(folder, f"its tokenizer has {max(tokens) + 1} tokens, and the model {config.vocab_size}")
    listed = [tokens.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(config.vocab_size)]
    special = {
        f"{kind}_token_id": number
        for kind in ("bos", "eos", "pad", "unk")
        for number in [getattr(tokenizer, f"{kind}_token_id", None)]
        if number is not None
    }
    # A post-processor may add anything, so the tokenizer shows what it adds.
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    first, last = [special.get("bos_token_id")], [special.get("eos_token_id")]
    with_ends = {(begins, ends): first * begins + bare + last * ends for begins in (0, 1) for ends in (0, 1)}
    added_ends = next((which for which, ids in with_ends.items() if ids == whole), None)
    if added_ends is None:
        raise _refusal(folder, "its tokenizer adds other tokens to a text than one at its beginning and its end")
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": split,
        "token_list": [text for text, _ in listed],
        "token_types": [kind for _, kind in listed],
        "token_merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
        **special,
        "add_bos_token": bool(added_ends[0]),
        "add_eos_token": bool(added_ends[1]),
        **({} if template is None else {"chat_template": template}),
    }


def _split(content: Mapping[str, Any]) -> str | None:
    """Returns llama.cpp's name of the way in which a tokenizer splits texts; None if it has none."""
    model, splitter = content["model"], content.get("pre_tokenizer") or {}
    # llama.cpp normalizes no text, also where Qwen's tokenizer does (NFC), and its own converter accepts that.
    normal = (content.get("normalizer") or {"type": None})["type"]
    if model["type"] != "BPE":
        return None
    parts = splitter.get("pretokenizers", [splitter])
    levels = parts[-1]
    if levels.get("type") != "ByteLevel" or levels.get("add_prefix_space"):
        return None
    if len(parts) == 1:
        plain = levels.get("use_regex", True) and normal is None and not model.get("ignore_merges")
        return "gpt-2" if plain else None
    if len(parts) != 2 or levels.get("use_regex", True) or parts[0].get("behavior") != "Isolated":
        return None
    name = _SPLITS.get(parts[0].get("pattern", {}).get("Regex", ""))
    as_usual = (normal is None and model.get("ignore_merges")) if name == "llama-bpe" else normal in (None, "NFC")
    return name if as_usual and not parts[0].get("invert") else None
