"""`OffloadLM`: lm-evaluation-harness on a model larger than the RAM, whose weights are read from its own files.

    python -m offload.integrations.lm_eval run --model offload --model_args pretrained=./llama-70b --tasks hellaswag

is the command `lm_eval` with one model class more. Requests, tokens, windows and generation are those of its class
`hf`. The forwards that score tokens are this module's: all rows of a batch pass through a block before the next is
read.

Requires `pip install 'offload[hf,eval]'`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from offload.errors import ConfigError
from offload.hub import local_model
from offload.offline.open_model import in_groups, open_model, padded, refuse
from offload.offline.options import ModelOptions

_Request = tuple[Any, list[int], list[int]]
"""Texts, tokens of the context, tokens of the continuation."""


@register_model("offload")
class OffloadLM(HFLM):
    """The model `offload` of lm_eval: that of a folder, or of the hub, under an engine that does not train it.

    Args:
        pretrained: Folder with config.json, tokenizer and safetensors files, or OWNER/NAME on the hub.
        batch_size: Rows for which the weights are read once; "auto" is 64.
        micro_batch_size: Rows that a layer computes at a time. Their logits of scored tokens are held in fp32.
        config: DeepSpeed JSON file, which the options after it overrule.
        dtype: "bf16", "fp16" or "fp32"; "auto" for that of the files.
        device: Where to compute; None for the accelerator that is there, or else the CPU. So is "cuda:0", which lm_eval
            passes by itself; CUDA_VISIBLE_DEVICES chooses another GPU.
        host_memory: Host budget, as "16GiB".
        device_memory: Device budget for weights, as "8GiB", or "50%": that share of them stays.
        more: Options of the class `hf` about requests, such as `max_length`, `add_bos_token`, `enable_thinking`.

    Raises:
        ConfigError: The folder contains no suitable model, or an option is wrong.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        batch_size: int | str | None = None,
        micro_batch_size: int = 8,
        config: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        host_memory: str | None = None,
        device_memory: str | None = None,
        **more: Any,
    ) -> None:
        if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size is at least 1, not {micro_batch_size!r:.99}")
        options = ModelOptions(
            model=local_model(pretrained),
            config=None if config is None else Path(config),
            dtype=None if dtype == "auto" else dtype,
            device=None if device is None or device.startswith("cuda") else device,
            host_memory=host_memory,
            device_memory=device_memory,
        )
        model = open_model(options)
        self._engine, self._micro_batch_size = model.engine, micro_batch_size
        rows = 64 if batch_size is None or str(batch_size).startswith("auto") else int(batch_size)
        super().__init__(pretrained=model.engine, tokenizer=model.tokenizer, batch_size=rows, **more)
        self.pretrained = pretrained
        forward = inspect.signature(model.engine.module.forward)
        self._keeps = "logits_to_keep" in forward.parameters

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether greedy decoding would produce it."""
        # Sorted, so that micro-batches contain rows of similar length and little padding.
        order = sorted(range(len(requests)), key=lambda at: -len(requests[at][1]) - len(requests[at][2]))
        results: dict[int, tuple[float, bool]] = {}
        for group in in_groups(order, self.batch_size):
            parts = list(in_groups(group, self._micro_batch_size))
            scored = self._engine.map(lambda part: self._score([requests[at] for at in part]), parts)
            for part, values in zip(parts, scored, strict=True):
                results |= zip(part, values, strict=True)
        for at, (texts, _, _) in enumerate(requests):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[at])
        return [results[at] for at in range(len(requests))]

    def _score(self, requests: Sequence[_Request]) -> list[tuple[float, bool]]:
        rows = [np.array((context + wanted)[-(self.max_length + 1) :][:-1]) for _, context, wanted in requests]
        ids = padded(rows, 0)  # behind each row, where a causal model does not look
        # Of the vocabulary's logits only those of positions that some row of the micro-batch scores are computed.
        first = min(len(row) - len(wanted) for row, (_, _, wanted) in zip(rows, requests, strict=True))
        keep = {"logits_to_keep": ids.shape[1] - first} if self._keeps else {}
        logits: torch.Tensor = self._engine(input_ids=ids, use_cache=False, **keep).logits[:, -(ids.shape[1] - first) :]
        results = []
        for row, values, (texts, _, wanted) in zip(rows, logits, requests, strict=True):
            scored = values[len(row) - len(wanted) - first : len(row) - first].float().log_softmax(-1)
            tokens = torch.tensor(wanted, device=scored.device)
            total = float(scored.gather(1, tokens[:, None]).sum())
            if not total < math.inf:
                raise refuse(f"the request {texts!r:.99}")
            results.append((total, bool((scored.argmax(-1) == tokens).all())))
        return results


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
