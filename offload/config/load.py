"""Reader that turns a config file or a dict into a `Config`."""

from __future__ import annotations

import base64
import difflib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pydantic
from pydantic_core import ErrorDetails

from offload.config.blocks import (
    OLD_SWITCHES,
    SCHEDULES,
    Block,
    Every,
    ScheduleParams,
    SchedulerBlock,
    all_blocks,
    inner_block,
    unpacked,
)
from offload.config.schema import Config, Findings, no_findings
from offload.errors import ConfigError
from offload.sizes import count_of

# -- contradictions ------------------------------------------------------------------------------------
#
# Contradictions between blocks of a config, where each block is right by itself.


def find_contradictions(config: Config) -> Iterator[ConfigError]:
    """Yields an error for each contradiction between blocks that are right: a wrong key may be what makes one."""
    if config.fp16.enabled and config.bf16.enabled:
        yield ConfigError("fp16 and bf16 are both enabled; leave one of them on")
    if config.torch_autocast.enabled and config.dtype != "fp32":
        yield ConfigError(
            f"torch_autocast and {config.dtype} are both enabled: autocast is for fp32 weights; leave one of them on"
        )
    if config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16":
        yield ConfigError(
            "torch_autocast.dtype is fp16, whose gradients need a loss scale that only the fp16 block has; set it to "
            "bf16, or enable fp16 in place of torch_autocast"
        )
    if config.bf16.enabled and config.bf16.bf16_optimizer_states and config.moments != "bf16":
        yield ConfigError(
            'bf16.bf16_optimizer_states asks for moments in bf16, and "moments" in the block "offload" for '
            f"{config.moments}; leave one of them out"
        )
    if config.moments != "fp32" and config.optimizer is not None and config.optimizer.params.fp32_optimizer_states:
        yield ConfigError(
            f"optimizer.params.fp32_optimizer_states asks for moments in fp32, and another key for {config.moments}; "
            "leave one of them out"
        )
    kept, every = config.offload.keep_every, config.offload.commit_every
    if kept and config.offload.durability == "none":
        yield ConfigError(
            f'offload.keep_every is {kept}, and with "durability": "none" no step is committed; leave one of them out'
        )
    if kept % every:
        yield ConfigError(
            f"offload.keep_every is {kept}, and only each step that is a multiple of {every} is committed: set it to a "
            f"multiple of {every}"
        )
    wanted = config.data_types.param_dtype
    if wanted is not None and wanted != config.dtype:
        mode = "switch bf16 and fp16 off" if wanted == "fp32" else f'set "{wanted}": {{"enabled": true}}'
        yield ConfigError(
            f"data_types.param_dtype is {wanted}, but the weights are {config.dtype}; {mode}, or leave it out"
        )
    zero = config.zero_optimization
    # Codes have a format of their own, so a dtype for them contradicts it.
    if zero.zero_quantized_gradients and config.communication_data_type is not None:
        yield ConfigError(
            "zero_optimization.zero_quantized_gradients has ranks send gradients as int8 codes, and "
            f"communication_data_type in {config.communication_data_type}; leave one of them out"
        )
    if zero.zero_hpz_partition_size > 1 and zero.stage < 3:
        yield ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {zero.zero_hpz_partition_size} in stage {zero.stage}, and "
            'ranks divide weights in stage 3: set "stage" to 3, or leave it out'
        )
    elif zero.zero_hpz_partition_size > 1 and zero.mics_shard_size > 0:
        yield ConfigError(
            "zero_optimization.zero_hpz_partition_size keeps a copy of the weights in each node, and mics_shard_size "
            "the weights and states themselves; leave one of them out"
        )
    if config.optimizer is not None and config.optimizer.sends_signs:
        kind = config.optimizer.type
        if zero.stage > 1:
            yield ConfigError(
                f"optimizer.type {kind} keeps all states on each rank, and zero_optimization.stage {zero.stage} "
                'divides them: set "stage" to 0 or 1, or use AdamW, where zero_optimization.zero_quantized_gradients '
                "sends half of the bytes of bf16; docs/reference/deepspeed-compatibility.md says why not fewer"
            )
        elif zero.mics_shard_size != 1:
            yield ConfigError(
                f"optimizer.type {kind} keeps all states on each rank, and zero_optimization.mics_shard_size is "
                f"{zero.mics_shard_size}; leave it out"
            )
        if zero.zero_quantized_gradients:
            yield ConfigError(
                "zero_optimization.zero_quantized_gradients has ranks send gradients as int8 codes, and optimizer.type "
                f"{kind} signs of momenta; leave one of them out"
            )
    for name, tier in (("offload_param", config.weight_tier), ("offload_optimizer", config.optimizer_tier)):
        if tier == "nvme" and not config.drives:
            yield ConfigError(
                f'zero_optimization.{name}.device is nvme, but no "nvme_path" is given; set it beside the device, or '
                'once in the "offload" block'
            )


# -- explain -------------------------------------------------------------------------------------------
#
# Error messages of the config: the key, what was expected, what was given, and what to do.


def nearest(model: type[Block], key: str) -> str | None:
    """Returns the key of `model` whose spelling is nearest to `key`, or None if none is close."""
    known = (*model.keys(), *model.OLD_NAMES, *model.TUNING, *model.UNSUPPORTED, *model.REFUSED)
    return next(iter(difflib.get_close_matches(key, known, 1, 0.6)), None)


def blocks_with_key(model: type[Block], key: str, path: str) -> str:
    """Returns the dotted names of `key` in the blocks inside `model`, joined by "or"; "" for none or over three."""
    inside = [name for name, block in all_blocks(model, "") if name and key in block.model_fields]
    return " or ".join(f"{path}{name}.{key}" for name in inside) if len(inside) <= 3 else ""


def unknown_key(model: type[Block], near: str | None, matches: str, dotted: str) -> str:
    """Returns the message about an unknown key of a block.

    `near` is a known key of similar spelling; `matches` are dotted names of the same key in inner blocks, or "".
    """
    if matches:
        return f"unknown key {dotted}; did you mean {matches}?"
    name = dotted.rpartition(".")[2]
    if name in Config.model_fields:
        return f'unknown key {dotted}; "{name}" belongs at the top level, beside the other blocks'
    keys = f"; keys with an effect are {', '.join(model.keys())}" if model.keys() else ""
    hint = f'did you mean "{near}"?' if near else f"remove it{keys}"
    return f"unknown key {dotted}; {hint}"


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "should be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "should be true or false"),
    "model_type": "should be a block, as {...}",
    "dict_type": "should be a block, as {...}",
    "tuple_type": "should be a list",
    "string_type": "should be text",
    "missing": "is required",
    "string_too_short": "should not be empty",
}
# By key, or by the beginning of a dotted key.
_ADVICE = {
    "gradient_clipping": "0 switches clipping off",
    "gradient_allreduce_op": "for a sum multiply the loss by the number of ranks",
    "managed_gradient_accumulation": "to mark the end of a step, call engine.set_gradient_accumulation_boundary",
    "offload.run": "it names a folder: letters, digits, '.', '_' and '-', the first a letter or digit",
    "offload.durability": 'give "auto", "step", "none", or {"every": 10}, which commits every tenth step',
    "scheduler.params.total_num_steps": (
        'give the steps of the complete training; only `offload train` and a Trainer fill "auto"'
    ),
    "optimizer.type": "set one of these, or pass optimizer= to offload.initialize",
}


def explain(error: pydantic.ValidationError, path: str = "") -> list[str]:
    """Returns a message for each wrong key: its path, what was expected, what was given, and what to do.

    `path` is the dotted prefix of the block that was validated; "" for the whole config.
    """
    # pydantic reports an error for each type that a value may have; all of them belong to one key.
    of_key: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        place = tuple(itertools.takewhile(lambda part: not _is_choice(part), detail["loc"]))
        # An error inside of a value that was wrong already adds nothing.
        whole = next((known for known in of_key if place[: len(known)] == known), place)
        of_key.setdefault(whole, []).append(detail)
    return [_explain_key(errors, path) for errors in of_key.values()]


def _explain_key(errors: Sequence[ErrorDetails], path: str) -> str:
    # If a block was given, the error of the block type is the useful one; it comes second.
    several = len(errors) > 1 and _is_choice(errors[0]["loc"][-1]) and isinstance(errors[0]["input"], Mapping)
    first = errors[1] if several else errors[0]
    key = path + ".".join(str(part) for part in first["loc"] if not _is_choice(part))
    own_message = first["type"] == "value_error"  # our own validators may quote the value, or name the key of a block
    names_value = first["type"] == "missing" or (
        own_message and (repr(first["input"]) in first["msg"] or isinstance(first["input"], Mapping))
    )
    value = "" if names_value else f", got {first['input']!r}"
    expected = re.sub("^(Value error, |Input |String |Tuple )", "", first["msg"]).replace(
        " after validation, not", ", not"
    )
    # `parse_size` and `parse_percent` have no subject for their messages, and the config has one: the key.
    expected = re.sub("^expected a (size|percentage)", r"should be a \1", expected)
    expected = _EXPECTED.get(first["type"], expected)
    if first["type"] == "string_too_short" and re.search(r"nvme_path\.\d+$", key):
        key = key.rpartition(".")[0]  # a single folder may be given without a list
        expected = "should be a folder on the drive, or a list of folders, one for each drive"
    advice = next((f"; {words}" for name, words in _ADVICE.items() if key == name or key.startswith(f"{name}.")), "")
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        key, expected = key.rpartition(".")[0], f"should be a longer list: item {first['loc'][-1] + 1} is missing"
    if first["type"] == "model_type" and not path:
        advice = _suggestion(key, first["input"]) or advice
    return f"{key} {expected}{value}{advice}"


def _suggestion(key: str, value: Any) -> str:
    """Returns advice on what to write in place of `value`, which was given instead of a block; "" without any."""
    block = dict(all_blocks(Config, "")).get(key)
    if block is None or not block.SUGGESTION:
        return ""
    # If the value fits the first key of the block, it is part of the suggestion; else the example stays as it is.
    first = next(iter(block.SUGGESTION))
    content = {**block.SUGGESTION, first: value}
    try:
        block.model_validate(content)
    except pydantic.ValidationError:
        content = dict(block.SUGGESTION)
    return f'; write "{key.rpartition(".")[2]}": {json.dumps(content)}'


def one_error(errors: Sequence[ConfigError]) -> ConfigError:
    """Returns an error for all that is wrong with a config: a single one as it is, several on lines of their own."""
    if len(errors) == 1:
        return errors[0]
    return ConfigError(f"{len(errors)} things are wrong with the config:" + "".join(f"\n* {error}" for error in errors))


def _is_choice(part: object) -> bool:
    """Returns True if a part of an error's location is one of a value's possible types rather than a key."""
    return isinstance(part, str) and (part.startswith("literal[") or part == Every.__name__)


# -- load ----------------------------------------------------------------------------------------------


_LONGEST = 1 << 24
"""Characters of a config file at most: a file of holes has any number."""
_NOTES = ("_comment", "//", "#")
"""Prefixes of keys that are notes: plain JSON has no comments."""


def load_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """Reads a config.

    Comments (`//`, `#`, `/* */`) and a comma after the last item are allowed. A key must not appear twice in one block.

    Args:
        source: path of a JSON file, its content as a dict, or its content in base64.

    Raises:
        ConfigError: names each wrong key, what was expected and what was given.
    """
    config, findings = examine(source if isinstance(source, Mapping) else read_json(source))
    if config is None:
        raise one_error(findings.errors)
    return config


def examine(content: Mapping[str, Any]) -> tuple[Config | None, Findings]:
    """Returns the config of a content, or None if something is wrong with it, and what was found about its keys."""
    findings = no_findings()
    known = _known_content(Config, _with_new_names(content, findings), "", findings) or {}
    config = None
    try:
        config = Config.model_validate(known)
    except pydantic.ValidationError as error:
        findings.errors.extend(map(ConfigError, explain(error)))
    contradictions = find_contradictions(config) if config is not None and not findings.errors else ()
    scheduler = _scheduler(known) if config is None else config.scheduler
    if scheduler is not None and scheduler.type in SCHEDULES:
        _read_params(SCHEDULES[scheduler.type], scheduler.params, "scheduler.params.", findings)
    findings.errors.extend(contradictions)
    if config is None or findings.errors:
        return None, findings
    # A config with keys that ask for nothing equals one without.
    config._findings = findings._replace(off={})
    return config, findings


def _scheduler(known: Mapping[str, Any]) -> SchedulerBlock | None:
    """Returns the schedule of a config that is wrong elsewhere; None without one, or if it is wrong itself."""
    try:
        return SchedulerBlock.model_validate(known.get("scheduler"))
    except pydantic.ValidationError:  # reported with the whole config
        return None


P = TypeVar("P", bound=ScheduleParams)


def schedule_params(model: type[P], content: Mapping[Any, Any]) -> P:
    """Validates the params of a schedule that a script gives."""
    findings = no_findings()
    params = _read_params(model, content, "", findings)
    if params is None:
        raise one_error(findings.errors)
    return params


def _read_params(model: type[P], content: Mapping[Any, Any], path: str, findings: Findings) -> P | None:
    """Returns the params of a schedule, or None after adding what is wrong with them to `findings`."""
    before = len(findings.errors)
    known = _known_content(model, content, path, findings) or {}
    try:
        params = model.model_validate(known)
        for low, high in model.ORDERED:
            check_order(path + low, getattr(params, low), path + high, getattr(params, high))
    except pydantic.ValidationError as error:
        findings.errors.extend(map(ConfigError, explain(error, path)))
    except ConfigError as error:
        findings.errors.append(error)
    return params if len(findings.errors) == before else None


def check_order(low: str, lows: Any, high: str, highs: Any) -> None:
    """Raises `ConfigError` if a value of `lows` exceeds the matching value of `highs`. "auto" exceeds nothing.

    Both are a number, or one for each group of parameters.
    """
    of_each = isinstance(lows, list | tuple) and isinstance(highs, list | tuple)  # one for each group
    low_rates, high_rates = (rates if isinstance(rates, list | tuple) else (rates,) for rates in (lows, highs))
    # A single number applies to every group, hence the product.
    for least, most in (
        zip(low_rates, high_rates, strict=False) if of_each else itertools.product(low_rates, high_rates)
    ):
        if most != "auto" and least > most:
            raise ConfigError(f"{low} {least:g} is above {high} {most:g}; exchange them, or change one")


def read_json(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content of a config file: JSON with comments, without a key that appears twice.

    The source is a path, or the content in base64, as DeepSpeed's autotuner passes it.
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"the config must be a dict or the path of a JSON file, got {type(source).__name__}")
    name = os.fspath(source)
    text = _decoded(source) if isinstance(source, str) else None
    if text is not None:
        name = "the config that came in base64"
    else:
        try:
            with open(name, encoding="utf-8-sig") as file:
                text = file.read(_LONGEST + 1)
            if len(text) > _LONGEST:
                raise ValueError(f"it has more than {_LONGEST} characters")
        except (OSError, ValueError) as error:  # a path may hold a null byte, a file anything
            reason = getattr(error, "strerror", None) or error  # without the number and the name, which stands before
            raise ConfigError(f"cannot read the config {name}: {reason}") from error
    content = _parse(text, name)
    if not isinstance(content, dict):
        raise ConfigError(f"the config must be a JSON object, got {type(content).__name__}")
    return content


def _decoded(source: str) -> str | None:
    """Returns the text of a JSON object that is encoded in either alphabet of base64; None for anything else."""
    try:
        text = base64.b64decode(source.replace("-", "+").replace("_", "/"), validate=True).decode()
    except ValueError:
        return None
    # Many paths are valid base64 too, but do not decode to the start of a JSON object.
    return text if text.lstrip().startswith("{") else None


# Strings are matched first, so that comment signs and commas inside them are left alone.
_STRING = r'("(?:\\.|[^"\\\n])*")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])")


def without_comments(text: str) -> str:
    """Returns `text` with each comment replaced by as many spaces and line ends: every place stays the same."""
    return _COMMENT.sub(_blank, text)


def without_last_commas(text: str) -> str:
    """Returns `text`, which has no comments, with each comma after a last item replaced by a space."""
    return _LAST_COMMA.sub(_blank, text)


def _blank(match: re.Match[str]) -> str:
    """Returns the string that was matched, or spaces, which keep lines and columns of error messages right."""
    return match[1] or re.sub(r"[^\n]", " ", match[0])


def _parse(text: str, name: str) -> Any:
    """Parses JSON with comments and trailing commas. Raises `ConfigError` that names the line and column."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                raise ConfigError(f"{name}: the key {key!r} appears twice in one block; keep one of them")
            seen[key] = value
        return seen

    try:
        return json.loads(without_last_commas(without_comments(text)), object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}. Comments and a comma after "
            f"the last item are allowed, other HJSON is not: put keys and strings in quotes, and commas between items"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{name} is not a config: its blocks are nested too deeply") from error
    except ConfigError:
        raise
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError(f"{name} is not a config: {error}") from error


def _with_new_names(content: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Converts spellings of older files to blocks: a boolean "zero_optimization", and those of `OLD_SWITCHES`."""
    content = dict(content)
    zero = content.get("zero_optimization")
    if isinstance(zero, bool):
        content["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        content["zero_optimization"] = zero = dict(zero)
        for old, new in OLD_SWITCHES.items():
            old_value = zero.pop(old, None)
            if old_value is not None and not _is_on(old_value):
                findings.off[f"zero_optimization.{old}"] = f"off; on, it would be {new} on the CPU"
            if _is_on(old_value):
                if zero.get(new) is not None:
                    findings.errors.append(
                        ConfigError(f"zero_optimization contains both {old} and {new}; leave {old} out")
                    )
                    continue
                zero[new] = {"device": "cpu"}
                findings.honoured.append(f"zero_optimization.{old}")
    return content


def _known_content(
    model: type[Block], content: Mapping[str, Any], path: str, findings: Findings
) -> dict[str, Any] | None:
    """Returns the keys of `content` that are fields of `model`, except those whose value means the default.

    Treats inner blocks the same way. What was found about the keys, and what is wrong with them, is added to
    `findings`. None stands for a block that asks for something unsupported as a whole.
    """
    try:
        model.check(content, path)
        content = model.arranged(unpacked(content))
    except ConfigError as error:
        findings.errors.append(error)
        return None
    known: dict[str, Any] = {}
    switch = content.get("enabled")
    on = "enabled" not in model.model_fields or _is_on(switch) or switch == "auto"  # no notice for a block that is off
    for key, value in content.items():
        name, dotted = model.OLD_NAMES.get(key, key), f"{path}{key}"
        why = _why_off(model, name, value, on)
        if str(key).startswith(_NOTES):
            findings.off[dotted] = "a note"
            continue
        if why is not None:
            findings.off[dotted] = why
        if name in model.REFUSED:
            if why is None:
                findings.errors.append(ConfigError(f'"{dotted}" {model.REFUSED[name]}'))
        elif name in model.TUNING or name in model.UNSUPPORTED:
            if why is None and name in model.ALWAYS and value is model.ALWAYS[name]:
                findings.honoured.append(dotted)
            elif why is None:
                (findings.tuning if name in model.TUNING else findings.unsupported).append(dotted)
        elif name not in model.model_fields:
            _note_unknown(model, key, path, findings)
        elif name in known or (name != key and name in content):
            findings.errors.append(
                ConfigError(f'"{dotted}" is the older name of "{path}{name}", which is set too; keep one of them')
            )
        elif _means_default(value, name, model):
            findings.auto.extend([dotted] * (value is not None))
        elif (inner := inner_block(model, name)) is None or not isinstance(value, Mapping):
            findings.honoured.extend([dotted] * (why is None))
            known[name] = value
        elif (block := _known_content(inner, value, f"{dotted}.", findings)) is not None:
            known[name] = block
    return known


def _why_off(model: type[Block], name: str, value: Any, on: bool) -> str | None:
    """Returns the reason why a key that the block knows asks for nothing; None if it asks for something."""
    if value == {} and name in model.model_fields:
        return "an empty block"
    known = name in model.model_fields or name in model.TUNING
    if name in model.REFUSED:
        splits_nothing = name.endswith("_size") and value in (-1, 1)
        return None if _is_on(value) and not splits_nothing else "off; on, it would be refused"
    if name in model.UNSUPPORTED:
        return None if _is_on(value) else "off; on, it would be ignored"
    if known and not on and name != "enabled":
        return 'its block is off, by "enabled"'
    if known and value is None and _means_default(value, name, model):
        return "null, which is the default"
    return None


def _note_unknown(model: type[Block], key: Any, path: str, findings: Findings) -> None:
    """Adds a key that the block does not know to `findings`: as an error, or as one of another tool."""
    dotted = f"{path}{key}"
    near, tiers = nearest(model, str(key)), blocks_with_key(model, str(key), path)
    if path or near or not isinstance(key, str):
        findings.errors.append(ConfigError(unknown_key(model, near, tiers, dotted)))
    else:
        # At the top level this is another tool's block or a note: no error, as in DeepSpeed.
        findings.unsupported.append(f"{dotted} (did you mean {tiers}?)" if tiers else dotted)


def _means_default(value: Any, name: str, model: type[Block]) -> bool:
    """Returns True if `value` (null or "auto") stands for the default of the field."""
    if value is None:
        return name != "gradient_clipping"  # null could be meant as "no clipping", so pydantic refuses it
    return isinstance(value, str) and value == "auto" and name not in model.OWN_AUTO


def _is_on(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return bool(value) and value != "auto"
    if "enabled" in value:
        return _is_on(value["enabled"])
    # Without a switch any truthy setting counts as a request.
    switches = list(_switches(value))
    return any(switches) if switches else any(_is_on(inner) for inner in value.values())


def _switches(block: Mapping[str, Any]) -> Iterator[bool]:
    for key, value in block.items():
        if key == "enabled":
            yield _is_on(value)
        elif isinstance(value, Mapping):
            yield from _switches(value)


class Batch(NamedTuple):
    """The three batch sizes; total = micro * accumulation * world size."""

    micro: int
    accumulation: int
    total: int


def resolve_batch(config: Config, world_size: int) -> Batch:
    """Returns the three batch sizes with missing ones derived as DeepSpeed does; 1 for each rank if none is given."""
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro, accumulation, micro * accumulation * world_size)
    if micro is None:
        accumulation = accumulation or 1
        micro = _third_size(total, "gradient_accumulation_steps", accumulation, world_size)
    elif accumulation is None:
        accumulation = _third_size(total, "train_micro_batch_size_per_gpu", micro, world_size)
    # Also reached with a derived size, which then fits by construction.
    if micro * accumulation * world_size != total:
        raise ConfigError(
            f"train_batch_size must be train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks, but it is "
            f"{total}, and {micro} * {accumulation} * {world_size} is {micro * accumulation * world_size}; "
            f"change one of the three, or leave one out that the others determine"
        )
    return Batch(micro, accumulation, total)


def _third_size(total: int, name: str, size: int, world_size: int) -> int:
    """Returns the third batch size, given the total and the size `size` of key `name`.

    Raises `ConfigError` if the total is not divisible.
    """
    if total % (size * world_size):
        raise ConfigError(
            f"train_batch_size must be a multiple of {name} * ranks, but it is {total}, and {size} * {world_size} is "
            f"{size * world_size}; change one of them"
        )
    return total // (size * world_size)


def effective(config: Config, batch: Batch, world_size: int) -> str:
    """Returns a line about values that a file leaves open: batch sizes, resolved "auto" keys, a changed default."""
    parts = [
        f"{count_of(batch.total, 'sample')} a step = {batch.micro} in a micro-batch * "
        f"{count_of(batch.accumulation, 'micro-batch', 'micro-batches')} * {count_of(world_size, 'rank')}"
    ]
    # DeepSpeed changed this default, so a file without the key may train differently than before.
    if "gradient_clipping" not in {*config.model_fields_set, *config.left_open}:
        parts.append(f"gradient_clipping {config.gradient_clipping:g} by default, which was 0 in older DeepSpeed")
    resolved = [f"{name} {_describe(name, _value(config, batch, name))}" for name in config.left_open]
    if resolved:
        parts.append(f'"auto": {", ".join(resolved)}')
    return f"config: {'; '.join(parts)}"


def _value(config: Config, batch: Batch, name: str) -> Any:
    sizes = dict(
        zip(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), batch, strict=True)
    )
    if name in sizes:
        return sizes[name]
    block, _, key = name.rpartition(".")
    # Defaults of params depend on the type of the optimizer or schedule, so the attributes of the block lack them.
    if block == "optimizer.params" and config.optimizer is not None:
        return config.optimizer.settings.get(key)
    if block == "scheduler.params" and config.scheduler is not None:
        return getattr(schedule_params(SCHEDULES[config.scheduler.type], config.scheduler.params), key)
    value: Any = config
    for part in name.split("."):
        # A block keeps the name that it has in the file, which may be an older one.
        value = getattr(value, value.OLD_NAMES.get(part, part))
    return value


def _describe(name: str, value: Any) -> str:
    if name == "optimizer.params.lr":
        return "(that of optimizer=)"
    if value is None:
        return "(its default)"  # the absence of a block, of a bound or of a file, or a choice of this library
    return "(its defaults)" if isinstance(value, Block | Mapping) else json.dumps(value)
