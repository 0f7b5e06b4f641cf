"""lm-evaluation-harness gets from a paged model what its own class gets from the model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError
from tests.support.model_folders import PLAIN_TEMPLATE, make_folder

pytest.importorskip("lm_eval", reason="lm-eval is installed by those who use it")

TEXTS = ["The weights of a model", " are files. " * 12, "Ein längerer Satz, der über das Fenster geht. " * 6, "1 + 1"]


def of(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def test_values_are_those_of_the_class_hf(tmp_path: Path) -> None:
    from lm_eval.api.registry import get_model

    import offload.integrations.lm_eval  # registers the model

    assert offload.integrations.lm_eval.OffloadLM is get_model("offload")
    folder = str(make_folder(tmp_path / "model", PLAIN_TEMPLATE))
    theirs = get_model("hf")(pretrained=folder, device="cpu", dtype="float32", batch_size=2)
    ours = get_model("offload").create_from_arg_obj(
        {"pretrained": folder, "micro_batch_size": 2}, {"batch_size": 3, "device": "cpu", "max_batch_size": None}
    )
    pairs = of("loglikelihood", *((text, end) for text in ("", *TEXTS) for end in (" yes", " no", "")[:2]))
    # Greedy continuations too: the most probable token of each context.
    greedy = theirs.generate_until(of("generate_until", *((text, {"until": [], "max_gen_toks": 1}) for text in TEXTS)))
    pairs += of("loglikelihood", *zip(TEXTS, greedy, strict=True))
    expected, actual = theirs.loglikelihood(pairs), ours.loglikelihood(pairs)
    assert [value for _, value in actual] == [value for _, value in expected]
    assert any(value for _, value in actual) and not all(value for _, value in actual)
    # Sums of some tokens' fp32 logits below 8, whose products are summed in another order.
    assert [value for value, _ in actual] == pytest.approx([value for value, _ in expected], abs=2**-23 * 8 * 128)
    texts = of("loglikelihood_rolling", *((text,) for text in TEXTS))  # longer than the model's positions
    rolled = theirs.loglikelihood_rolling(texts)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(rolled, abs=2**-23 * 8 * 512)
    prompts = of("generate_until", *((text, {"until": ["a"], "max_gen_toks": 12}) for text in TEXTS))
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)
    chat = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert ours.get_model_info()["model_num_parameters"] == theirs.get_model_info()["model_num_parameters"]
    ours.model.destroy()
    with pytest.raises(ConfigError, match="micro_batch_size is at least 1"):
        get_model("offload")(pretrained=folder, micro_batch_size=0)
