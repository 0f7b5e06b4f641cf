"""Text that continues prompts, by the model's own `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload.errors import ConfigError
from offload.finetune.corpus.documents import Chat, Prompt
from offload.finetune.corpus.packing import encode_prompt
from offload.finetune.model import check_model
from offload.offline.open_model import FiniteLogits, OpenModel, in_groups, is_paged, padded, static_cache
from offload.presets import positions_of


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A prompt and the model's continuation."""

    place: str
    """File, and line or row; "--prompt" for a prompt of the command line."""
    text: str
    tokens: int
    """Tokens that were generated, the end-of-text token among them."""

    def line(self) -> dict[str, Any]:
        return {"place": self.place, "completion": self.text, "tokens": self.tokens}


def question(text: str, tokenizer: Any, raw: bool) -> Prompt | Chat:
    """Returns the prompt of the command line: a user's message for the chat template, if there is one, or the text."""
    if raw or not text or getattr(tokenizer, "chat_template", None) is None:
        return Prompt("--prompt", text)
    return Chat("--prompt", [{"role": "user", "content": text}])


def encode_fitting(
    prompt: Prompt | Chat, tokenizer: Any, config: Any, *, max_new_tokens: int, cached: int | None = None
) -> np.ndarray:
    """Returns the tokens of a prompt, (n,) int32, after a check that prompt and completion fit.

    `cached` is the most tokens of prompt and completion; None to limit them only by the model's positions.
    """
    row = encode_prompt(prompt, tokenizer)
    if not len(row):
        raise ConfigError(f"{prompt.place} is an empty prompt, which a model cannot continue; leave it out")
    longest = positions_of(config)
    if longest is not None and len(row) > longest:
        raise ConfigError(
            f"{prompt.place} is a prompt of {len(row)} tokens, more than the {longest} positions of this model; "
            "shorten it, or leave it out"
        )
    # The positions of an encoder do not limit the text that the decoder generates.
    if longest is not None and max_new_tokens + (0 if config.is_encoder_decoder else len(row)) > longest:
        raise ConfigError(
            f"{prompt.place} is a prompt of {len(row)} tokens, which with {max_new_tokens} new ones are more than the "
            f"{longest} positions of this model; lower --max-new-tokens, or shorten the prompt"
        )
    if cached is not None and len(row) + max_new_tokens > cached:
        raise ConfigError(
            f"{prompt.place} is a prompt of {len(row)} tokens, which with {max_new_tokens} new ones are more than the "
            f"{cached} of --static-cache; raise it, or shorten the prompt"
        )
    return row


def completions(
    model: OpenModel,
    prompts: Iterable[Prompt | Chat],
    *,
    batch_size: int,
    max_new_tokens: int,
    cached: int | None = None,
    cache_on_host: bool = False,
    **sampling: Any,
) -> Iterator[Completed]:
    """Yields the text that continues each prompt, in order. Prompts are read as they are needed.

    The weights cross to the device once for each token of a batch of prompts. `cached` is the most tokens of a prompt
    and its completion. Each batch allocates a cache for so many tokens before its first token; None for a cache that
    grows. With `cache_on_host` the cache is in host memory, and each layer's part is on the device only during its use.
    `sampling` are keywords of the model's `generate`, such as `do_sample` and `temperature`.

    Raises:
        ConfigError: A prompt is malformed or empty, has tokens that the model does not know, or leaves too few
            positions for `max_new_tokens`; or the device does not support a cache on the host.
        NumericsError: Logits are inf or NaN.
    """
    from transformers import LogitsProcessorList

    tokenizer = model.tokenizer
    module: Any = model.engine.module
    paged = is_paged(cache_on_host, model.engine.device)
    can_generate = getattr(module, "can_generate", None)
    if can_generate is None or not can_generate():
        raise ConfigError(f"{type(module).__name__} does not generate text: give a causal language model")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    for group in in_groups(prompts, batch_size):
        rows = []
        for prompt in group:
            rows.append(encode_fitting(prompt, tokenizer, model.config, max_new_tokens=max_new_tokens, cached=cached))
            check_model(module, len(rows[-1]), int(rows[-1].max()))
        # Padding goes before the prompt, so that every prompt ends where its completion begins.
        ids = padded(rows, pad, left=True)
        mask = padded([np.ones(len(row), np.int64) for row in rows], 0, left=True)
        # The model's own settings apply to all other options, such as top_p. `use_cache` is set here, since folders
        # written by a training often turn it off, and each token would then recompute the whole row. Compilation is
        # off, since compiled code would hold weights that the engine pages.
        keys: dict[str, Any] = {
            "use_cache": True,
            "logits_processor": LogitsProcessorList([FiniteLogits([prompt.place for prompt in group])]),
        }
        if cached is not None:
            keys |= {"past_key_values": static_cache(model.config, cached, paged), "disable_compile": True}
        tokens: torch.Tensor = model.engine.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, pad_token_id=pad, **keys, **sampling
        )
        # An encoder-decoder model returns only the generated tokens, any other model the prompt too.
        first = 0 if model.config.is_encoder_decoder else ids.shape[1]
        # A list if a model has several end-of-text tokens, as Llama 3 does. Padding follows the first of them.
        end = module.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        for prompt, row in zip(group, tokens[:, first:].cpu().tolist(), strict=True):
            new = row[: next((at for at, token in enumerate(row) if token in ends), len(row) - 1) + 1]
            text = tokenizer.decode(new, skip_special_tokens=True)
            yield Completed(place=prompt.place, text=text, tokens=len(new))


# -- conversation --------------------------------------------------------------------------------------


def check_chat_template(tokenizer: Any, config: Any) -> None:
    """Raises `ConfigError` if the tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "the model's tokenizer has no chat template: give a folder with one (chat_template.jinja), or continue a "
            "text by offload generate --prompt"
        )
    encode_prompt(Chat("the conversation", [{"role": "user", "content": "Hello"}]), tokenizer)


class Conversation:
    """Messages of a user and the model's answers, by the tokenizer's chat template."""

    def __init__(self, model: OpenModel, system: str | None, *, max_new_tokens: int, **sampling: Any) -> None:
        """Begins with a system message, if one is given.

        An answer has at most `max_new_tokens`, and no more than the model's positions leave. `sampling` are keywords
        of the model's `generate`.
        """
        self._model, self._most, self._sampling = model, max_new_tokens, sampling
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.tokens = 0
        """Tokens that the model has generated."""

    def answer(self, message: str, show: Callable[[str], None] | None = None) -> str:
        """Returns the model's answer to a message; `show` receives the words of the answer as they come.

        Raises:
            ConfigError: The conversation has become longer than the model's positions.
            NumericsError: Logits are inf or NaN.
        """
        self._messages.append({"role": "user", "content": message})
        streamer = {} if show is None else {"streamer": _streamer(self._model.tokenizer, show)}
        chat = Chat("the conversation", self._messages)
        longest, length = positions_of(self._model.config), len(encode_prompt(chat, self._model.tokenizer))
        if longest is not None and length >= longest:
            raise ConfigError(
                f"the conversation has {length} tokens, and the model {longest} positions, so no answer has room; "
                "begin another one"
            )
        most = self._most if longest is None else min(self._most, longest - length)
        (done,) = completions(self._model, [chat], batch_size=1, max_new_tokens=most, **self._sampling, **streamer)
        self._messages.append({"role": "assistant", "content": done.text})
        self.tokens += done.tokens
        return done.text


def _streamer(tokenizer: Any, show: Callable[[str], None]) -> Any:
    """Returns a streamer of transformers that calls `show` with each piece of text that is complete."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
