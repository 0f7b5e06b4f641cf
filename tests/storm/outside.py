"""A storm over the installed command alone: `python -m tests.storm.outside [OFFLOAD] --seed 7 --minutes 10`.

Nothing of the package is imported. A seed draws a tiny model, options of `offload train`, and what each life of the run
meets: signals, a full drive, memory that ends, a pause, a second command in the same folder. Then

* each command ends in time, with an exit code and a message that the documentation promises, and no traceback;
* a life has committed what it has logged, but for the steps that `--durability` leaves to a kill;
* verify, inspect, log, export, score, fork and replay find the run whole;
* the losses of all steps, and the final weights, have the bits of a run in memory that nothing disturbs, and the losses
  are those of a loop of plain PyTorch, within a bound.

A seed fixes what is drawn. The moments of signals are those of the machine: repeat a seed that failed a few times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LONG = 300.0
"""Seconds in which a command must end, on a machine that does much else."""
ROW = 32
"""Tokens of a document, which is a row."""
_ERRORS = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


_NOT_BEGUN = re.compile(
    r"^Exception ignored in thread started by: .*\n(Traceback.*\n(  .*\n)*)?MemoryError.*\n", re.MULTILINE
)
"""What Python prints of a thread that finds no memory to begin (python/cpython#140746)."""


class Wrong(Exception):
    """A promise that was not kept."""


class Drawn(NamedTuple):
    """What a seed trains."""

    micro: int
    accumulation: int
    steps: int
    lr: float
    decay: float
    clip: float
    dtype: str
    moments: str
    every: int
    """Steps from one commit to the next."""
    learning: tuple[str, ...]
    """Options that decide the numbers."""
    placement: tuple[str, ...]
    """Options that do not."""

    @property
    def lost(self) -> int:
        """Steps that a kill may take."""
        return 1 if self.every == 1 else self.every + 1


def draw(chance: random.Random) -> Drawn:
    """Draws a training."""
    micro, accumulation, steps = chance.randint(1, 3), chance.randint(1, 3), chance.randint(6, 14)
    lr, decay, clip = chance.choice([3e-4, 1e-3]), chance.choice([0.0, 0.1]), chance.choice([0.0, 0.5, 1.0])
    dtype, moments = chance.choice(["fp32", "fp32", "bf16"]), chance.choice(["fp32", "fp32", "bf16", "int8"])
    master = ("--master", chance.choice(["fp32", "bf24"])) if dtype == "bf16" else ()
    every = chance.choice([1, 1, 1, 3])
    learning = (
        *("--seq-len", str(ROW), "--batch-size", str(micro), "--accumulation", str(accumulation)),
        *("--steps", str(steps), "--lr", str(lr), "--weight-decay", str(decay), "--grad-clip", str(clip)),
        *("--schedule", "constant", "--warmup", "0", "--seed", str(chance.randrange(1000)), "--device", "cpu"),
        *("--dtype", dtype, "--moments", moments, *master),
        *chance.choice([(), ("--gradient-checkpointing",)]),
        *chance.choice([(), ("--chunked-loss",), ("--no-chunked-loss",)]),
        *chance.choice([("--eval-every", "0"), ("--eval-data", "rows.jsonl", "--eval-every", "2")]),
    )
    placement = (
        *("--offload-param", chance.choice(["nvme", "nvme", "cpu", "none"]), "--offload-optimizer", "nvme"),
        *(
            "--durability",
            "step" if every == 1 else str(every),
            "--keep-every",
            str(chance.choice([2, 3]) if every == 1 else every),
        ),
        *chance.choice([(), ("--accumulation-schedule", chance.choice(["layer-major", "micro-batch-major"]))]),
        *chance.choice([(), (), ("--save-every", "4"), ("--log-every", "1")]),
    )
    return Drawn(micro, accumulation, steps, lr, decay, clip, dtype, moments, every, learning, placement)


# -- what the training is compared with ------------------------------------------------------------------


def make_model(folder: Path, chance: random.Random) -> None:
    """Writes a tiny model of random weights, and a tokenizer of bytes."""
    special = ("<s>", "</s>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate((*special, *alphabet))}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    tied, layers = chance.random() < 0.5, chance.randint(1, 3)
    common = {"vocab_size": len(special) + len(alphabet), "bos_token_id": 0, "eos_token_id": 1}
    config: Any = transformers.LlamaConfig(
        **common,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=2 * ROW,
        tie_word_embeddings=tied,
    )
    if chance.random() < 0.4:
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(**common, **none, n_embd=32, n_layer=layers, n_head=4, n_positions=2 * ROW)
    torch.manual_seed(chance.randrange(1 << 30))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def plain_losses(folder: Path, texts: Sequence[str], drawn: Drawn) -> list[float]:
    """Returns the losses of a loop of plain PyTorch, whose batch is all documents: the order makes no difference."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts])
    assert ids.shape == (len(texts), ROW)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": drawn.decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=drawn.lr), list[float]()
    for _ in range(drawn.steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if drawn.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), drawn.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# -- commands ------------------------------------------------------------------------------------------


def promised() -> re.Pattern[str]:
    """Returns the pattern of all messages that the page of errors lists, and of those about one file or argument."""
    words = re.findall(r"^\* `+ ?(.*?) ?`+$", _ERRORS.read_text(), re.MULTILINE)
    listed = (".*".join(map(re.escape, line.split("…"))) for line in words)
    return re.compile("|".join((*listed, r"cannot \w+ .*\[Errno \d+\]", r"see `offload .* --help`")), re.DOTALL)


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    output: str
    errors: str


class Command:
    """A process of the command in a session of its own."""

    _promised = promised()

    def __init__(self, words: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.words = words
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=self._out, stderr=self._err, start_new_session=True
        )

    def end(self, *codes: int, limited: bool = False) -> Done:
        """Waits for the end, and checks it: one of `codes`, with a promised message where it is an error.

        A command whose memory is `limited` may print what Python says of a thread that finds none.
        """
        try:
            self.process.wait(LONG)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # prints where each thread is
            self.process.wait()
            raise Wrong(f"{self._name()} has not ended in {LONG:.0f} s: {_content(self._err)[-4000:]}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        done = Done(self.process.returncode, *map(_content, (self._out, self._err)))
        if limited:
            done = done._replace(errors=_NOT_BEGUN.sub("", done.errors))
        if done.code not in codes:
            raise Wrong(f"{self._name()} ended with {done.code}, expected {codes}: {done.errors[-2000:]}")
        if any(words in done.errors for words in ("Traceback", "Exception ignored", "terminate called", "Fatal")):
            raise Wrong(f"{self._name()} printed what is for developers: {done.errors[-4000:]}")
        if done.code in (1, 2):
            message = done.errors.partition("error: ")[2]
            if not message and not done.output:
                raise Wrong(f"{self._name()} ended with {done.code} and no message: {done.errors[-2000:]}")
            if message and not self._promised.search(message):
                raise Wrong(f"{self._name()}: the page of errors lacks the message: {message[:600]}")
        return done

    def has_begun(self) -> bool:
        """Returns True if anything is on stderr: Python and the first modules are there."""
        return os.fstat(self._err.fileno()).st_size > 0

    def _name(self) -> str:
        return f"`offload {' '.join(self.words[1:])}`"


def _content(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


@contextlib.contextmanager
def drive(folder: Path, chance: random.Random) -> Iterator[tuple[Path, bool]]:
    """Yields a small file system, and whether it is one: where none can be mounted it is a plain folder."""
    place, image = folder / "drive", folder / "image"
    place.mkdir()
    what = ["-t", "tmpfs", "-o", "size=160m", "none"]
    if chance.random() < 0.7 and shutil.which("mkfs.ext4"):
        image.touch()
        os.truncate(image, 160 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        what = ["-o", "loop", str(image)]
    own = os.geteuid() == 0 and not subprocess.run(["mount", *what, str(place)], check=False).returncode
    try:
        yield place, own
    finally:
        if own:
            subprocess.run(["umount", "-l", str(place)], check=True)


# -- a run and its lives ---------------------------------------------------------------------------------

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Story:
    """The lives of one run."""

    def __init__(self, seed: int, executable: Path, folder: Path) -> None:
        self.chance, self.folder, self.executable = random.Random(f"outside {seed}"), folder, executable
        self.told: list[str] = []
        """What has happened, for a failure."""
        self.drawn, self.seconds, self.kept = draw(self.chance), 10.0, 0
        self.filled = False
        """True once a command has ended on a full drive: the last lines of its log may be missing."""
        self.environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        self.environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONFAULTHANDLER": "1"}

    def live(self) -> None:
        """Trains the run through its lives; raises `Wrong`."""
        make_model(self.folder / "model", self.chance)
        count, letters = self.drawn.micro * self.drawn.accumulation, "abcdefghij klmnop"
        texts = ["".join(self.chance.choices(letters, k=ROW - 1)) for _ in range(count)]
        with drive(self.folder, self.chance) as (self.place, self.own):
            rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (self.place / "rows.jsonl").write_text(rows)
            began = time.monotonic()
            tiers = ("--offload-param", self.chance.choice(["cpu", "none"]), "--offload-optimizer", "cpu")
            self.run(*self.train("calm"), *tiers)
            self.seconds = time.monotonic() - began
            calm = self.losses("calm")
            self._compare_with_plain(calm, plain_losses(self.folder / "model", texts, self.drawn))
            for number in range(self.chance.randint(1, 4)):
                self._life(number)
                if not (self.place / "swap" / "run").exists() and self.losses("run"):
                    break
            self.run(*self.train("run"), *self.drawn.placement, *RESUMED)
            self._compare(calm, "run")
            for look in self.chance.sample(LOOKS, 3):
                look(self, calm)
            self.run("rm", "swap/run", "--yes")

    def train(self, run: str) -> tuple[str, ...]:
        """Returns the command that trains a run, without its placement."""
        data = ("--model", str(self.folder / "model"), "--data", "rows.jsonl", "--log", f"{run}.jsonl")
        return ("train", *data, *self.drawn.learning, "--run", run, "--output", f"{run}-model")

    def begin(self, *words: str) -> Command:
        self.told.append(" ".join(words))
        return Command([str(self.executable), *words], self.place, self.environment)

    def run(self, *words: str, codes: Sequence[int] = (0,)) -> Done:
        return self.begin(*words).end(*codes)

    def losses(self, run: str) -> dict[int, float]:
        """Returns the losses in a run's log, by step. Raises `Wrong` for a step that is there twice."""
        path = self.place / f"{run}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        lines = [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may have cut the last one
        steps = [(line["step"], line["loss"]) for line in lines if "grad_norm" in line]
        if len(by_step := dict(steps)) < len(steps):
            raise Wrong(f"the log of {run} has a step twice: {[step for step, _ in steps]}")
        return by_step

    # -- lives --------------------------------------------------------------------------------------

    def _life(self, number: int) -> None:
        """Lives a life that something disturbs, and checks what it leaves."""
        chance, before = self.chance, max(self.losses("run"), default=0)
        deed = chance.choice([self._signal, self._signal, self._fill, self._limit, self._twice, self._pause])
        moment = chance.randint(before, self.drawn.steps) if chance.random() < 0.75 else None
        self.told.append(f"life {number}: {deed.__name__} {f'after step {moment}' if moment is not None else ''}")
        command = self.begin(*self.train("run"), *self.drawn.placement, *RESUMED)
        try:
            wait, end = chance.uniform(0, 0.3), time.monotonic() + LONG
            if moment is None:
                wait = chance.uniform(0, self.seconds)
            while moment is not None and max(self.losses("run"), default=0) < moment and time.monotonic() < end:
                if command.process.poll() is not None:
                    break
                time.sleep(0.02)
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.process.wait(wait)
            whole = deed(command)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.process.pid, signal.SIGKILL)
        self._check_durable(whole)

    def _signal(self, command: Command) -> bool:
        number, group = self.chance.choice(SIGNALS), self.chance.random() < 0.5
        self.told.append(f"{number.name}{' to the group' if group else ''}")
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(command.process.pid, number)
        # The same to a shell: before the command can answer, the signal itself ends the process.
        code = command.end(0, -number, *(() if number == signal.SIGKILL else (128 + number,))).code
        return code >= 0

    def _fill(self, command: Command) -> bool:
        if not self.own:
            return self._signal(command)
        self.filled, filler = True, self.place / "filler"
        free = os.statvfs(self.place)
        left = self.chance.choice([0, 4096, 1 << 16, 1 << 20])
        with filler.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - left))
        try:
            code = command.end(0, 1, 2).code
        finally:
            filler.unlink()
        self.told.append(f"the drive was full, but for {left} bytes: {code}")
        return code == 0

    def _limit(self, command: Command) -> bool:
        if not command.has_begun():  # Python itself would end with a traceback, even where an earlier life has logged
            return self._signal(command)
        more = self.chance.choice([0, 1 << 20, 1 << 26])
        with contextlib.suppress(OSError, ProcessLookupError):
            pages = int(Path(f"/proc/{command.process.pid}/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + more
            resource.prlimit(command.process.pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        code = command.end(0, 1, 2, limited=True).code
        self.told.append(f"no memory beside {more} bytes: {code}")
        return code == 0

    def _twice(self, command: Command) -> bool:
        done = self.run(*self.train("run"), *self.drawn.placement, *RESUMED, codes=(0, 2))
        refused = re.search("in use by|under way|another run", done.errors)
        # The second may open the run before the first, or once the first has closed it and while that process ends. Two
        # that train at the same time would log steps twice: see `losses`.
        if done.code and command.process.poll() is None and not refused:
            raise Wrong(f"a second command in the same folder ended with {done.code}: {done.errors}")
        self.run("inspect", "swap", codes=(0, 2))
        self.run("verify", "swap/run", codes=(0, 2))
        # The first command may find the run of the second.
        return command.end(0, 2).code == 0

    def _pause(self, command: Command) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.process.pid, signal.SIGSTOP)
            time.sleep(self.chance.uniform(0, 1))
            os.kill(command.process.pid, signal.SIGCONT)
        return self._signal(command)

    def _check_durable(self, whole: bool) -> None:
        """Compares the last commit with the log: all of it for a life that ended by itself."""
        self.kept, logged = 0, max(self.losses("run"), default=0)
        if (self.place / "swap" / "run").exists():
            report = json.loads(self.run("inspect", "swap/run", "--json", codes=(0, 2)).output or "{}")
            self.kept = max(
                (commit["step"] for rank in report.get("ranks", ()) for commit in rank["commits"]), default=0
            )
        if self.kept < logged - (0 if whole else self.drawn.lost):
            raise Wrong(f"step {self.kept} is committed, and step {logged} was logged")
        self.run("verify", "swap/run", codes=(0,) if self.kept else (0, 2))
        if self.kept and self.chance.random() < 0.5:
            self.chance.choice(LOOKS)(self, None)

    # -- looks at the run ----------------------------------------------------------------------------

    def _log(self, _: dict[int, float] | None) -> None:
        rows = json.loads(self.run("log", "swap/run", "--json").output)
        if max(row["step"] for row in rows if row["run"] == "run") != self._step():
            raise Wrong(f"`offload log` lists {rows}, and the last commit is of step {self._step()}")

    def _step(self) -> int:
        report = json.loads(self.run("inspect", "swap/run", "--json").output)
        return int(report["ranks"][0]["commits"][0]["step"])

    def _export(self, calm: dict[int, float] | None) -> None:
        """Exports the run and scores the documents by its model; the last model is the calm run's."""
        shutil.rmtree(self.place / "exported", ignore_errors=True)
        self.run("export", "swap/run", "exported")
        if calm is not None:
            self._compare_weights("exported")
        scored = self.run("score", "exported", "--data", "rows.jsonl", "--seq-len", str(ROW)).output.splitlines()
        if len(scored) != self.drawn.micro * self.drawn.accumulation:
            raise Wrong(f"{len(scored)} lines of scores")

    def _fork(self, calm: dict[int, float] | None) -> None:
        """Forks the run, and trains the fork to the end of the run."""
        self.run("fork", "swap/run", "fork")
        if calm is not None:
            self.run(*self.train("fork"), *self.drawn.placement, *RESUMED)
            self._compare(calm, "fork")
        self.run("rm", "swap/fork", "--yes")

    def _replay(self, _: dict[int, float] | None) -> None:
        rows = json.loads(self.run("log", "swap/run", "--json").output)
        first = min((row["step"] for row in rows if row["kept"]), default=self.drawn.steps) + 1
        last = min(first + 1, self._step())
        if first <= last:
            done = self.run("replay", "swap/run", "--steps", f"{first}..{last}", "--json")
            if not json.loads(done.output)["equal"]:
                raise Wrong(f"the replay differs: {done.output}")

    # -- comparisons ---------------------------------------------------------------------------------

    def _compare(self, calm: dict[int, float], run: str) -> None:
        losses = self.losses(run)
        differing = {step: (loss, calm.get(step)) for step, loss in losses.items() if loss != calm.get(step)}
        if differing or (run == "run" and losses.keys() != calm.keys() and not self.filled):
            raise Wrong(f"losses of {run} differ from the calm run's: {differing or losses.keys() ^ calm.keys()}")
        self._compare_weights(f"{run}-model")

    def _compare_weights(self, name: str) -> None:
        left, right = (load_file(self.place / folder / "model.safetensors") for folder in ("calm-model", name))
        different = [key for key in left.keys() | right.keys() if not _same_bits(left.get(key), right.get(key))]
        if different:
            raise Wrong(f"weights in {name} differ from the calm run's: {different}")

    def _compare_with_plain(self, losses: dict[int, float], expected: Sequence[float]) -> None:
        exact = self.drawn.dtype == "fp32" and self.drawn.moments == "fp32"
        for step, loss in enumerate(expected, 1):
            if not math.isclose(losses[step], loss, rel_tol=1e-3 if exact else 0.05):
                raise Wrong(f"the loss of step {step} is {losses[step]}, that of plain PyTorch {loss}")


RESUMED = ("--resume", "auto", "--keep")
LOOKS: tuple[Callable[[Story, dict[int, float] | None], None], ...] = (
    Story._log,
    Story._export,
    Story._fork,
    Story._replay,
)


def _same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storm.outside", description="a storm from outside")
    parser.add_argument("executable", nargs="?", type=Path, default=Path(sys.executable).with_name("offload"))
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first seed")
    parser.add_argument("--count", type=int, default=1 << 30, help="so many seeds at most")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no seed after these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    began, failed, commands, seed = time.monotonic(), 0, 0, arguments.seed
    while seed - arguments.seed < arguments.count and time.monotonic() - began < 60 * arguments.minutes:
        with tempfile.TemporaryDirectory(prefix="offload-outside-", ignore_cleanup_errors=True) as name:
            story = Story(seed, arguments.executable.absolute(), Path(name))
            try:
                story.live()
            except Wrong as wrong:
                failed += 1
                told = "\n    ".join(story.told)
                print(f"seed {seed} FAILED: {wrong}\n    {story.drawn}\n    {told}", flush=True)
        commands, seed = commands + len(story.told), seed + 1
        print(f"seed {seed - 1}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"{seed - arguments.seed} seeds, {failed} failed, from seed {arguments.seed} on")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
