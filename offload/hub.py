"""Models on the Hugging Face Hub, by name: fetched once into the hub's own cache, and used there; folders sent there.

A model that the cache contains is used without a question to the network, so that a run resumes with the files that it
began with. `huggingface_hub` comes with transformers; nothing of a model is run.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, OffloadError
from offload.fileio import atomic_write
from offload.model_io.folder import CONFIG, stored_tensors

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""A model on the hub, as owner/name; a relative path of two folders looks alike."""
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_OTHERS = ["*/*", "consolidated*"]
"""Copies of the weights for other libraries."""


def local_model(name: str, config_only: bool = False) -> str:
    """Returns the folder of a model of the hub, or `name` itself if it is a folder, a preset, or no name of the hub.

    Args:
        name: A model as a user names it; on the hub OWNER/NAME.
        config_only: True if the model's config is enough, which takes kilobytes.

    Raises:
        ConfigError: The hub has no such model, or it cannot be asked.
    """
    if not _HUB_NAME.fullmatch(name) or os.path.exists(name):
        return name
    return str(_hub_folder(name, config_only))


def _hub_folder(name: str, config_only: bool) -> Path:
    """Returns the folder in the hub's cache. Fetches what the cache lacks, with a progress bar."""
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name} is no folder; to fetch a model of the hub, run: pip install 'offload[hf]'"
        ) from error
    # Read at each call: a script may set it after the import of huggingface_hub.
    more: dict[str, Any] = {"endpoint": endpoint} if (endpoint := os.environ.get("HF_ENDPOINT")) else {}
    if not config_only:
        more |= {"allow_patterns": _FILES, "ignore_patterns": _OTHERS}
    try:
        folder = _fetch(huggingface_hub, name, config_only, local_files_only=True, **more)
        if config_only or _is_whole(folder):
            return folder
    except (errors.LocalEntryNotFoundError, errors.EntryNotFoundError):
        pass
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"there is no folder {name}, HF_HUB_OFFLINE is set, and the hub's cache does not have the model: unset the "
            f"variable, or fetch the model where there is a network: hf download {name}"
        )
    try:
        return _fetch(huggingface_hub, name, config_only, **more)
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name} is on the hub, and its owner asks for a consent: accept it on the model's page, then run: "
            "hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is no folder {name}, and the hub has no model of that name that you may see: correct the name, or "
            "run: hf auth login"
        ) from error
    except Exception as error:  # huggingface_hub and its HTTP client raise classes of their own
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"there is no folder {name}, and it cannot be fetched from the hub ({type(error).__name__}: "
            f"{reason:.200}): fetch it where there is a network: hf download {name} --local-dir "
            f"{name.rpartition('/')[2]}"
        ) from error


def data_set(name: str) -> Any:
    """Returns the split of a data set of the hub, as a `datasets.Dataset`; None if `name` is no OWNER/NAME[:SPLIT].

    Without a split it is "train".

    Raises:
        ConfigError: `datasets` is not installed, or cannot load the split.
    """
    owner_name, _, split = name.partition(":")
    if not _HUB_NAME.fullmatch(owner_name):
        return None
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"there is no data at {name}; to fetch a data set of the hub, run: pip install 'offload[datasets]'"
        ) from error
    try:
        return datasets.load_dataset(owner_name, split=split or "train")
    except Exception as error:  # datasets and the readers below it raise classes of their own
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"there is no data at {name}, and no data set of the hub can be loaded by that name "
            f"({type(error).__name__}: {reason:.300}): correct the path, or OWNER/NAME:SPLIT"
        ) from error


def check_push(name: str) -> None:
    """Raises `ConfigError` if `name` cannot be a repository of the hub, or no token for the hub is at hand."""
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"--push-to-hub takes OWNER/NAME of a model on the hub, got {name!r:.99}")
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise ConfigError(
            f"--push-to-hub {name} needs a token that may write there: run: hf auth login, or set HF_TOKEN"
        )


def push(folder: Path, name: str, about: Mapping[str, Any], text: str) -> str:
    """Sends a folder to a repository of the hub, which is made, private, if there is none. Returns its address.

    The folder's README.md becomes a model card of `text` (Markdown) and the metadata `about`.

    Raises:
        ConfigError: The hub did not take the folder, which then stays as it is.
    """
    import huggingface_hub

    try:
        metadata = huggingface_hub.ModelCardData(**about).to_yaml()
        atomic_write(folder / "README.md", f"---\n{metadata}\n---\n\n{text}")
        hub = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        url = hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=["checkpoint-*"])
    except Exception as error:  # huggingface_hub and its HTTP client raise classes of their own
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{folder} is saved, and could not be sent to {name} ({type(error).__name__}: {reason:.200}); to repeat "
            f"that alone, run: {shlex.join(['hf', 'upload', '--private', name, str(folder), '.'])}"
        ) from error
    return str(url)


def _fetch(huggingface_hub: Any, name: str, config_only: bool, **more: Any) -> Path:
    if config_only:
        return Path(huggingface_hub.hf_hub_download(name, CONFIG, **more)).parent
    return Path(huggingface_hub.snapshot_download(name, **more))


def _is_whole(folder: Path) -> bool:
    """Returns True if a folder of the cache contains a config and all weights."""
    try:
        stored_tensors(folder)
    except OffloadError:
        return False
    return (folder / CONFIG).is_file()
